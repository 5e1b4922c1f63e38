"""Rows that may hold token ids with logprobs: NeMo Gym's rollouts, ATIF's trajectories, verifiers' traces.

Sources: `nemo_gym.openai_utils` and `rollout_collection` (NVIDIA-NeMo/Gym), `harbor.models.trajectories` (Harbor 0.24,
ATIF-v1.0 to v1.8), `verifiers.v1.trace` and `graph` (verifiers 0.4). An episode has `sampled` tokens if each of its
actions has them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from agent_r1.data.sources import Row, read
from agent_r1.imported.episodes import (
    Episode,
    Message,
    Sampled,
    acted,
    actions_of,
    answers_of,
    column_of,
    columns_of,
    inner,
    messages_of,
    number,
    objects_in,
    rest_of,
    sampled_of,
    step_of,
    text_of,
)
from agent_r1.records import Json

GYM = ("responses_create_params", "response", "reward")
GYM_IDS = ("prompt_token_ids", "generation_token_ids", "generation_log_probs")
ATIF_IDS = ("prompt_token_ids", "completion_token_ids", "logprobs")
ATIF_ROLES = {"system": "system", "user": "user", "agent": "assistant"}


def nemo_gym(row: Row) -> Iterator[Episode]:
    """A row of `gym eval run`: what was asked of the Responses API, its output items, and the reward."""
    request = inner(row, "responses_create_params")
    output = objects_in(inner(row, "response"), "output")
    question = request.fields.get("input")
    items = [{"role": "user", "content": question}] if isinstance(question, str) else objects_in(request, "input")
    instructions = request.fields.get("instructions")
    opening = [{"role": "system", "content": instructions}] if instructions else []
    replies = [*_turns(output)] or [{"role": "assistant", "content": ""}]
    messages = _checked(row, "response", [*opening, *_turns(items), *replies])
    sampled = [_tokens(row, "response", item, GYM_IDS) for item in output if GYM_IDS[1] in item]
    yield Episode(
        messages=messages,
        score=number(row, "reward"),
        columns=columns_of(row, (*GYM, "_ng_task_index", "_ng_rollout_index")),
        answers=answers_of(row, "expected_answer"),
        sampled=_of_each(sampled, messages),
        extra=rest_of(row, GYM),
    )


def _turns(items: Sequence[Mapping[str, Any]]) -> Iterator[Message]:
    """Chat messages of a Responses API's items: what an assistant says in a row, up to an item with ids, is one."""
    turn: Message = {}
    for item in items:
        message = _message(item)
        goes_on = message["role"] == turn.get("role") == "assistant" and not (turn["content"] and message["content"])
        if turn and not goes_on:
            yield turn
            turn = {}
        calls = [*turn.get("tool_calls", []), *message.get("tool_calls", [])]
        turn |= {name: value for name, value in message.items() if value is not None or name not in turn}
        if calls:
            turn["tool_calls"] = calls
        if GYM_IDS[1] in item:
            yield turn
            turn = {}
    if turn:
        yield turn


def _message(item: Mapping[str, Any]) -> Message:
    match item.get("type") or "message":
        case "message":
            content = item.get("content")
            role = item.get("role")
            return {"role": role, "content": text_of(content) if role == "assistant" else content}
        case "reasoning":
            thought = text_of(item.get("content") or item.get("summary"))
            return {"role": "assistant", "content": None, "reasoning_content": thought}
        case "function_call":
            function = {"name": item.get("name"), "arguments": item.get("arguments")}
            call = {"id": item.get("call_id"), "type": "function", "function": function}
            return {"role": "assistant", "content": None, "tool_calls": [call]}
    return {"role": "tool", "tool_call_id": item.get("call_id"), "content": text_of(item.get("output"))}


def atif(row: Row) -> Iterator[Episode]:
    """A trajectory of ATIF; its reward is in `extra`, or in Harbor's result.json of the trial."""
    messages = list[Message]()
    sampled = list[Sampled]()
    for fields in row.objects("steps"):
        step = replace(row, fields=fields)
        metrics = inner(step, "metrics").fields
        messages += _atif_messages(step)
        if metrics.get(ATIF_IDS[1]):
            sampled.append(_tokens(row, "steps", metrics, ATIF_IDS))
    checked = _checked(row, "steps", messages)
    rewards = _rewards(row)
    yield Episode(
        messages=checked,
        score=number(rewards, "reward"),
        columns=columns_of(rewards, ("reward", "step")),
        step=step_of(rewards),
        sampled=_of_each(sampled, checked),
        extra=row.fields,
    )


def _atif_messages(step: Row) -> Iterator[Message]:
    """What a step says, and the results of its calls."""
    fields = step.fields
    message: Message = {"role": ATIF_ROLES.get(str(fields.get("source"))), "content": fields.get("message")}
    if fields.get("reasoning_content"):
        message["reasoning_content"] = fields["reasoning_content"]
    if calls := objects_in(step, "tool_calls"):
        message["tool_calls"] = [_atif_call(call) for call in calls]
    yield message
    for result in objects_in(inner(step, "observation"), "results"):
        yield {"role": "tool", "tool_call_id": result.get("source_call_id"), "content": result.get("content")}


def _atif_call(call: Mapping[str, Any]) -> Json:
    function = {"name": call.get("function_name"), "arguments": call.get("arguments")}
    return {"id": call.get("tool_call_id"), "type": "function", "function": function}


def _rewards(row: Row) -> Row:
    """The rewards of a trajectory: `extra` at its root, or the `verifier_result` in the result.json of its trial."""
    result = row.path.parent.parent / "result.json"
    if row.path.name != "trajectory.json" or not result.exists():
        return inner(row, "extra")
    return inner(inner(next(read(result)), "verifier_result"), "rewards")


def verifiers(row: Row) -> Iterator[Episode]:
    """The traces of an episode, a line of traces.jsonl. Of a graph with several branches it takes the last, as text."""
    work = inner(inner(row, "run"), "work")
    for place, fields in enumerate(row.objects("traces")):
        trace = replace(row, fields=fields)
        nodes = [replace(row, fields=node) for node in trace.objects("nodes")]
        path = _path(trace, nodes)
        messages = _checked(trace, "nodes", [inner(node, "message").fields for node in path])
        sampled = [*_of_nodes(trace, path)] if len(path) == len(nodes) else []
        score, columns = _scores(trace)
        yield Episode(
            messages=messages,
            score=score,
            columns=columns,
            step=step_of(work),
            answers=answers_of(inner(inner(trace, "task"), "data"), "answer"),
            fault=str(fields.get("errors") or ""),
            sampled=_of_each(sampled, messages),
            extra={"trace": place, **rest_of(row, ("traces",)), **rest_of(trace, ("nodes",))},
        )


def _scores(trace: Row) -> tuple[float | None, dict[str, float]]:
    """The sum of a trace's weighted rewards, None without any, and these beside its metrics."""
    rewards = inner(trace, "rewards")
    values = {name: _weighted(inner(rewards, name)) for name in rewards.fields}
    columns = columns_of(replace(trace, fields=inner(trace, "metrics").fields | values), ())
    paid = [columns[column_of(name)] for name, value in values.items() if value is not None]
    return sum(paid) if paid else None, columns


def _weighted(reward: Row) -> float | None:
    score = number(reward, "score")
    weight = number(reward, "weight")
    return None if score is None else score * (1.0 if weight is None else weight)


def _path(trace: Row, nodes: Sequence[Row]) -> list[Row]:
    """The nodes from a root to the last leaf."""
    parents = [node.fields.get("parent") for node in nodes]
    path = list[Row]()
    place: Any = len(nodes) - 1
    while place is not None:
        path.append(nodes[place])
        parent = parents[place]
        if parent is not None and not (isinstance(parent, int) and 0 <= parent < place):
            raise trace.fault("nodes", "must hold nodes whose parent is an earlier one")
        place = parent
    return path[::-1]


def _of_nodes(trace: Row, path: Sequence[Row]) -> Iterator[Sampled]:
    """The tokens of the sampled nodes; an action is the end of its node's tokens."""
    read_ids = list[Any]()
    for node in path:
        ids = node.fields.get("token_ids") or []
        mask = node.fields.get("mask") or []
        if not isinstance(ids, list) or not isinstance(mask, list) or len(ids) != len(mask):
            raise trace.fault("nodes", "must hold a mask for each of the token_ids")
        actions = mask.count(True)
        if not all(mask[len(mask) - actions :]):
            raise trace.fault("nodes", "must hold masks whose sampled tokens are the last")
        if actions:
            values = {"prompt": read_ids + ids[:-actions], "ids": ids[-actions:], "of": node.fields.get("logprobs")}
            yield _tokens(trace, "nodes", values, ("prompt", "ids", "of"))
        read_ids = read_ids + ids


def _tokens(row: Row, field: str, values: Mapping[str, Any], names: Sequence[str]) -> Sampled:
    return sampled_of(row, field, *(values.get(name) for name in names))


def _checked(row: Row, name: str, messages: list[Message]) -> list[Message]:
    """Messages that a reader made, checked as those that a file holds."""
    return acted(row, name, messages_of(replace(row, fields={name: messages}), name))


def _of_each(sampled: list[Sampled], messages: list[Message]) -> list[Sampled]:
    """The tokens of all actions; none if some action has none."""
    return sampled if len(sampled) == len(actions_of(messages)) else []
