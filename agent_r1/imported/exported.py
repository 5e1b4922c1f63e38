"""Trajectories for other programs: chat messages as JSON lines, or ATIF-v1.8, a trajectory a line."""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import zip_longest
from pathlib import Path

import numpy as np

from agent_r1.data.sources import read
from agent_r1.files import replacing
from agent_r1.imported.episodes import calls_of, text_of
from agent_r1.imported.store import REWARD, messages_file, read_about, rows_of
from agent_r1.imported.traces import ATIF_IDS, ATIF_ROLES
from agent_r1.records import Json, Source, Trajectory
from agent_r1.tables import read_rows

SOURCES = {role: source for source, role in ATIF_ROLES.items()} | {"developer": "system"}
LATEST = "ATIF-v1.8"


def export(folder: Path, form: str, into: Path) -> int:
    """Writes the trajectories of an imported run to a new file; returns how many."""
    about = read_about(folder)
    if into.exists():
        raise FileExistsError(f"{into} is there already; name a new file")
    with replacing(into) as temporary, temporary.open("w") as file:
        for step in about.steps:
            rows = read_rows(rows_of(folder, step), Trajectory) if about.exact and form == "atif" else []
            for row, trajectory in zip_longest(read(messages_file(folder, step)), rows):
                own = form == about.format
                atif = form == "atif"
                document = as_atif(row.fields, own, trajectory) if atif else as_messages(row.fields, own)
                file.write(json.dumps(document, ensure_ascii=False) + "\n")
    return about.rows


def as_messages(row: Json, own: bool) -> Json:
    """A row of chat messages with its reward. What else the source has is beside them if that is its `own` format."""
    further = row["extra"] if own else {**row["columns"], "source": row["extra"]}
    return {"messages": row["messages"], **_stated(row), **further}


def _stated(row: Json) -> Json:
    """Reward and step, where the source says them."""
    stated = {REWARD: row["score"], "step": row["step"]}
    return {name: value for name, value in stated.items() if value is not None}


def as_atif(row: Json, own: bool, trajectory: Trajectory | None) -> Json:
    """A trajectory of ATIF: the `own` one itself, or one of the messages, with the ids that their sampler had."""
    stated = {**_stated(row), **row["columns"]}
    if own:
        return {**row["extra"], "extra": {**(row["extra"].get("extra") or {}), **stated}}
    steps = list[Json]()
    spans = _sampled(trajectory) if trajectory else iter(())
    for message in row["messages"]:
        if message["role"] == "tool" and steps:
            results = steps[-1].setdefault("observation", {"results": []})["results"]
            known = [call["tool_call_id"] for call in steps[-1].get("tool_calls", [])]
            call_id = message.get("tool_call_id")
            results.append(
                {"source_call_id": call_id if call_id in known else None, "content": text_of(message["content"])}
            )
            continue
        steps.append(_step(message, len(steps) + 1))
        if message["role"] == "assistant" and (metrics := next(spans, None)):
            steps[-1]["metrics"] = metrics
    return {
        "schema_version": LATEST,
        "agent": {"name": "agent_r1", "version": "imported"},
        "steps": steps,
        "extra": {**stated, "source": row["extra"]},
    }


def _step(message: Json, number: int) -> Json:
    source = SOURCES.get(message["role"], "user")
    step = {"step_id": number, "source": source, "message": text_of(message.get("content"))}
    if source != "agent":
        return step
    if thought := text_of(message.get("reasoning_content")):
        step["reasoning_content"] = thought
    if calls := calls_of(message):
        ids = [call.get("id") for call in message["tool_calls"]]
        step["tool_calls"] = [
            {
                "tool_call_id": call_id or str(place),
                "function_name": call.tool,
                "arguments": _arguments(call.arguments),
            }
            for place, (call, call_id) in enumerate(zip(calls, ids, strict=True))
        ]
    return step


def _arguments(arguments: str) -> Json:
    """Arguments as an object; what is none, as ATIF demands, under a name of its own."""
    value = json.loads(arguments or "{}")
    return value if isinstance(value, dict) else {"arguments": value}


def _sampled(trajectory: Trajectory) -> Iterator[Json]:
    for step in trajectory.steps:
        if trajectory.source[step.action_start] == Source.ACTION:
            start = max(start for start in trajectory.context_starts if start <= step.action_start)
            action = slice(step.action_start, step.action_stop)
            # the shortest digits that are the same float32
            logprobs = [float(np.format_float_scientific(value)) for value in trajectory.logprobs[action]]
            ids = [trajectory.ids(slice(start, step.action_start)), trajectory.ids(action), logprobs]
            yield dict(zip(ATIF_IDS, ids, strict=True))
