"""One conversation in three dialects: the same tokens in every form of its history, and errors in each one's own."""

from __future__ import annotations

import json
import re
from pathlib import Path
from random import Random
from typing import Any, Protocol

import pytest

from agent_r1.http.dialects.chat import ChatCompletions
from agent_r1.http.dialects.conversation import Dialect, Refused, Reply, ToolCall
from agent_r1.http.dialects.messages import Messages
from agent_r1.http.dialects.responses import Responses
from agent_r1.rollout.chat import Chat
from tests.agents.test_session import SEARCH, Episode
from tests.cases import cases, tables

SAYINGS, HISTORY, READ = (tables(Path(__file__).parent)[name] for name in ("sayings", "history", "history_read"))
FUNCTION = SEARCH["function"]


class Client(Protocol):
    """A client of a dialect, with the history that it keeps."""

    dialect: Dialect
    history: list[Any]

    def body(self) -> dict[str, Any]: ...
    def tell(self, text: str) -> None: ...
    def take(self, answer: dict[str, Any], results: list[str]) -> None: ...


class OfChat:
    dialect: Dialect = ChatCompletions()

    def __init__(self, _: Random) -> None:
        self.history: list[Any] = [{"role": "developer", "content": "Be brief."}]

    def body(self) -> dict[str, Any]:
        return {"messages": self.history, "tools": [SEARCH]}

    def tell(self, text: str) -> None:
        self.history.append({"role": "user", "content": text})

    def take(self, answer: dict[str, Any], results: list[str]) -> None:
        [choice] = answer["choices"]
        self.history.append(choice["message"])
        for call, text in zip(choice["message"].get("tool_calls", ()), results, strict=False):
            self.history.append({"role": "tool", "tool_call_id": call["id"], "content": text})


class OfResponses:
    """Sends all, or what is new behind the last response, or names what is stored."""

    dialect: Dialect = Responses()

    def __init__(self, rng: Random) -> None:
        self._rng = rng
        self.history: list[Any] = []
        self._new: list[Any] = []
        self._last: str | None = None

    def body(self) -> dict[str, Any]:
        tool = {"type": "function", **FUNCTION, "strict": True}
        fields = {"instructions": "Be brief.", "tools": [tool]}
        if self._last and self._rng.random() < 0.5:
            return {**fields, "input": self._new, "previous_response_id": self._last}
        named = self._rng.random() < 0.5
        items = [
            {"type": "item_reference", "id": item["id"]} if named and "id" in item else item for item in self.history
        ]
        return {**fields, "input": items}

    def tell(self, text: str) -> None:
        self._add({"role": "user", "content": [{"type": "input_text", "text": text}]})

    def take(self, answer: dict[str, Any], results: list[str]) -> None:
        self._last = answer["id"]
        self._new = []
        self.history += answer["output"]
        calls = [item for item in answer["output"] if item["type"] == "function_call"]
        for call, text in zip(calls, results, strict=False):
            self._add({"type": "function_call_output", "call_id": call["call_id"], "output": text})

    def _add(self, item: Any) -> None:
        self.history.append(item)
        self._new.append(item)


class OfMessages:
    dialect: Dialect = Messages()

    def __init__(self, _: Random) -> None:
        self.history: list[Any] = []

    def body(self) -> dict[str, Any]:
        tool = {"name": "search", "description": FUNCTION["description"], "input_schema": FUNCTION["parameters"]}
        system = [{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}]
        return {"system": system, "messages": self.history, "tools": [tool], "max_tokens": 4000}

    def tell(self, text: str) -> None:
        content = {"type": "text", "text": text}
        if self.history and self.history[-1]["role"] == "user":
            self.history[-1]["content"].append(content)
        else:
            self.history.append({"role": "user", "content": [content]})

    def take(self, answer: dict[str, Any], results: list[str]) -> None:
        self.history.append({"role": "assistant", "content": answer["content"]})
        calls = [block for block in answer["content"] if block["type"] == "tool_use"]
        replies = [
            {"type": "tool_result", "tool_use_id": call["id"], "content": [{"type": "text", "text": text}]}
            for call, text in zip(calls, results, strict=False)
        ]
        if replies:
            self.history.append({"role": "user", "content": replies})


def contexts(chat: Chat, client: Client, seed: int) -> tuple[list[list[int]], list[int]]:
    """What the policy reads in a conversation drawn by a seed, and its counts."""
    rng = Random(seed)
    episode = Episode(chat, limits={"parallel_calls": 2, "max_tokens": 2000, "max_steps": 20})
    stored = dict[str, Any]()
    client.tell("Who?")
    for number in range(rng.randrange(2, 7)):
        said = rng.choice(SAYINGS)
        body = {"model": "gpt", **client.body()}
        request = client.dialect.read(json.dumps(body).encode(), stored)
        reply = episode.take(request, said).reply("policy")
        assert len({name for name, *_ in reply.calls}) == len(reply.calls), "by its id a client answers a call"
        stored |= client.dialect.stored(request, reply)
        client.take(client.dialect.write(request, reply), [f"Result {number}.", "None."])
        if not reply.calls or rng.random() < 0.3:
            client.tell(f"And {number}?")
    counts = episode.session.counts
    return [asked.context for asked in episode.requests], [counts.kept, counts.shown, counts.unknown]


@pytest.mark.parametrize("seed", range(50))
def test_a_history_gives_the_same_tokens_in_every_dialect(chat: Chat, seed: int) -> None:
    """Whatever the policy says, and in whatever form Responses sends its items: ids, calls, thoughts and results."""
    read, of_responses, of_messages = (
        contexts(chat, kind(Random(seed)), seed) for kind in (OfChat, OfResponses, OfMessages)
    )
    assert read == of_responses == of_messages
    _, (kept, shown, unknown) = read
    assert (kept, unknown) == (shown, 0)


WHO = [{"role": "user", "content": "Who?"}]
BODIES: dict[str, tuple[Dialect, dict[str, Any]]] = {
    "chat": (ChatCompletions(), {"model": "m", "messages": WHO}),
    "responses": (Responses(), {"model": "m", "input": "Who?"}),
    "messages": (Messages(), {"model": "m", "max_tokens": 9, "messages": WHO}),
}


@cases("name, fields, param, message")
def test_bad_input_is_refused_by_its_field(name: str, fields: Any, param: str, message: str) -> None:
    dialect, body = BODIES[name]
    with pytest.raises(Refused, match=re.escape(message)) as fault:
        dialect.read(json.dumps(body | fields).encode(), {})
    assert fault.value.param == param


def test_a_refusal_has_the_form_of_its_dialect() -> None:
    fault = Refused("messages: the last one is the assistant's", "messages")
    openai = {"type": "invalid_request_error", "param": "messages", "code": "invalid_value"}
    assert ChatCompletions().error(fault)["error"] == openai | {"message": str(fault)}
    named = openai | {"param": "input", "message": "input: the last one is the assistant's"}
    assert Responses().error(fault)["error"] == named
    anthropic = {"type": "error", "error": {"type": "invalid_request_error", "message": str(fault)}, "request_id": None}
    assert Messages().error(fault) == anthropic
    assert Messages().error(Refused("x", None, 429))["error"]["type"] == "rate_limit_error"


def test_functions_of_a_namespace_come_and_go_by_both_names() -> None:
    """As Codex sends them: the policy knows `agents__wait`, its client `wait` of `agents`."""
    dialect = Responses()
    tools = [{"type": "namespace", "name": "agents", "tools": [{"type": "function", "name": "wait"}]}]
    call = {"type": "function_call", "call_id": "c", "name": "wait", "namespace": "agents", "arguments": "{}"}
    items = [*WHO, call, {"type": "function_call_output", "call_id": "c", "output": "Done."}]
    request = dialect.read(json.dumps({"model": "m", "input": items, "tools": tools}).encode(), {})
    assert request.tools == [{"type": "function", "function": {"name": "agents__wait"}}]
    assert [call.name for message in request.messages for call in message.calls] == ["agents__wait"]
    fields = {"name": "1", "model": "m", "content": "", "cut": False, "stop": None, "read": 1, "sampled": 1}
    reply = Reply(thoughts=["a", "b"], calls=[ToolCall("d", "agents__wait", {})], **fields)
    _, item = dialect.write(request, reply)["output"]
    assert (item["namespace"], item["name"]) == ("agents", "wait")
    names = [json.loads(event.partition("data: ")[2])["type"] for event in dialect.events(request, reply)]
    of_thoughts = names[dialect.opening : dialect.opening + 3]
    assert of_thoughts == [f"response.reasoning_summary_text.{end}" for end in ("delta", "delta", "done")]


def test_fields_that_change_no_token_are_taken_and_named() -> None:
    fields = {"temperature": 0.1, "top_k": 5, "min_p": 0.1, "verbosity": "low", "metadata": {"a": "b"}, "user": None}
    for dialect, body in BODIES.values():
        request = dialect.read(json.dumps(body | fields).encode(), {})
        assert request.unapplied == {*fields} - {"user"}


def test_history_of_another_model_is_read() -> None:
    """Thoughts, a refusal, a function call of the old form, and an object for arguments."""
    read = ChatCompletions().read(json.dumps({"model": "m", "messages": HISTORY}).encode(), {}).messages
    assert [[message.role, message.text, message.thought] for message in read] == READ
    assert [call.spelled for message in read for call in message.calls] == ['{"a": 1}', "{}"]
