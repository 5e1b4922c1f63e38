"""One conversation in three dialects: the same tokens in every form of its history, and errors in each one's own."""

from __future__ import annotations

import json
from random import Random
from typing import Any, Protocol

import pytest

from agent_r1.http.dialects.chat import ChatCompletions
from agent_r1.http.dialects.conversation import Dialect
from agent_r1.http.dialects.messages import Messages
from agent_r1.http.dialects.responses import Responses
from agent_r1.rollout.chat import Chat
from tests.agents.test_session import CALL, SEARCH, Episode

TWO = '<tool_call>{"name": "search", "arguments": {"query": "a"}}</tool_call>\n' * 2
SAYINGS = (
    CALL,
    TWO,
    f"<think>Hm.</think>Look.\n{CALL.partition('</think>')[2]}",
    "<answer>Quill</answer>",
    "yes",
    "<tool_call>{",
    "",
)
SEEDS = range(50)
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
        stored |= client.dialect.stored(request, reply)
        client.take(client.dialect.write(request, reply), [f"Result {number}.", "None."])
        if not reply.calls or rng.random() < 0.3:
            client.tell(f"And {number}?")
    counts = episode.session.counts
    return [asked.context for asked in episode.requests], [counts.kept, counts.shown, counts.unknown]


@pytest.mark.parametrize("seed", SEEDS)
def test_a_history_gives_the_same_tokens_in_every_dialect(chat: Chat, seed: int) -> None:
    """Whatever the policy says, and in whatever form Responses sends its items: ids, calls, thoughts and results."""
    read, of_responses, of_messages = (
        contexts(chat, kind(Random(seed)), seed) for kind in (OfChat, OfResponses, OfMessages)
    )
    assert read == of_responses == of_messages
    _, (kept, shown, unknown) = read
    assert (kept, unknown) == (shown, 0)
