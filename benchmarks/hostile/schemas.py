"""Tools that agents outside offer, and calls that policies make: JSON schemas and arguments without measure."""

from __future__ import annotations

import asyncio
import json
import sys
import time
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

from agent_r1.agents.gateway import Asking, OpenEpisode
from agent_r1.agents.session import Session
from agent_r1.http.dialects.chat import ChatCompletions
from agent_r1.http.dialects.conversation import Refused
from agent_r1.learn.builtin import train_tokenizer
from agent_r1.params import SHIPPED, load
from agent_r1.params.agents import AgentParams
from agent_r1.rollout.chat import Chat
from agent_r1.rollout.episode import PLAY
from agent_r1.rollout.sampling import Action, Request
from benchmarks.hostile import kind
from benchmarks.hostile.kind import Defect, Kind, require

_AWAY = "http://127.0.0.1:1/x"
_MOST_S = 3.0  # of the processor, for which the loop is held: 1.5 were seen on a busy machine
_CALLS = 4  # of an input


def _folded(levels: int, key: str, **more: Any) -> dict[str, Any]:
    """References that unfold to 2 ** `levels`."""
    defined = {f"n{at + 1}": {key: [{"$ref": f"#/$defs/n{at}"}] * 2, **more} for at in range(levels)}
    return {"properties": {"a": {"$ref": f"#/$defs/n{levels}"}}, "$defs": {"n0": {"type": "string"}, **defined}}


def _nested(levels: int, key: str) -> Any:
    return {key: _nested(levels - 1, key)} if levels else {"type": "string"}


def _of(schema: Any) -> dict[str, Any]:
    """An object of one property."""
    return {"properties": {"a": schema}}


SCHEMAS: tuple[Any, ...] = (
    _of({"type": "string"}), _of(True), _of(False), _of(None), _of([]), [], 3, {"properties": []}, {"required": "a"},
    {"$ref": "#"}, {"$ref": _AWAY}, {"$dynamicRef": _AWAY}, {"$recursiveRef": _AWAY}, {"$schema": _AWAY},
    {"$id": _AWAY, "$dynamicRef": "y"}, {"$id": _AWAY, **_of({"$id": "y", "$ref": "#/$defs/b"}), "$defs": {"b": {}}},
    {"$dynamicAnchor": "m", "allOf": [{"$dynamicRef": "#m"}]}, {"$vocabulary": {_AWAY: True}},
    {"$defs": {"a%25": {}, "a%": {"$ref": "#/$defs/a%25"}}, **_of({"$ref": "#/$defs/a%25"})},
    _of({"$schema": "http://json-schema.org/draft-04/schema#", "pattern": "(a+)+$"}),
    _folded(20, "allOf"), _folded(20, "anyOf"), _folded(20, "oneOf"), _folded(60, "allOf"),
    _folded(12, "allOf", unevaluatedProperties=False), _folded(20, "anyOf", unevaluatedItems=False),
    _of(_nested(28, "not")), _nested(200, "items"), {"allOf": [{}] * 4000}, {"anyOf": [{}] * 1000, "not": {}},
    _of({"anyOf": [{"type": "string"}] * 500}), _of({"enum": [*range(2800)]}), _of({"items": {"enum": [*range(2800)]}}),
    _of({"pattern": "(a+)+$"}), _of({"pattern": "("}), _of({"pattern": "(?=a)"}), _of({"pattern": "a{99999999999}"}),
    _of({"pattern": r"(\w|\d){300}$"}), _of({"pattern": "(" * 3000 + ")" * 3000}), _of({"pattern": "\ud800"}),
    {"patternProperties": {"(a+)+$": {"type": "number"}}, "additionalProperties": False},
    {"patternProperties": {"(a+)+$": {}}, "unevaluatedProperties": False}, {"propertyNames": {"pattern": "(a|a)*$"}},
    {"properties": {f"p{at}": {"pattern": rf"(\w|\d){{200}}{at}"} for at in range(200)}},
    _of({"multipleOf": 0.5}), _of({"multipleOf": 1e-320}), _of({"multipleOf": 0}), _of({"maximum": 1e308}),
    _of({"uniqueItems": True}), _of({"contains": {"uniqueItems": True}, "minContains": 10**30}), _of({"minLength": -1}),
    _of({"items": {"items": {"items": {}}}}), _of({"const": [[[[1]]]]}), {"dependentRequired": {"a": ["b"] * 3000}},
    _of({"format": "regex"}), _of({"format": "idn-email"}), _of({"\ud800": 1}), {"properties": {"\ud800": True}},
)  # fmt: skip

_DIGITS, _AS = "1" + "0" * 400, "a" * 2000 + "b"
VALUES: tuple[str, ...] = (
    '"x"', "1", "1.25", "1.5", "null", "true", "{}", "[]", '""', '"\\ud800"', '"\\u0000"', _DIGITS, f"-{_DIGITS}",
    f"{_DIGITS}.5", "1e999", "-1e999", "1e308", "1e-320", "NaN", "Infinity", "1" * 5000, "0.1", "-0.0", f'"{_AS}"',
    f'["{_AS}"]', f'{{"{_AS}": 1}}', f'{{"{_AS}": {{"{_AS}": {_DIGITS}}}}}', "[" * 100 + "]" * 100,
    "[" * 900 + "]" * 900, "[" * 20_000 + "]" * 20_000, '{"a":' * 300 + "1" + "}" * 300, f"[{'1,' * 3000}1]",
    f"[{'[],' * 3000}1]", "[" + ",".join(f'{{"b": {at}}},{at}' for at in range(1500)) + "]",
    f"[{','.join(map(str, range(2799, -1, -1)))}]", f"[{'[[1]],' * 1000}1]", '[1, 1.0, true, "1"]',
    '{"$ref": "http://127.0.0.1:1/x"}', '{"__proto__": {}, "": 1}', f'"{"é" * 3000}"', f'"{"0" * 6000}"', "[[[[1]]]]",
)  # fmt: skip


class Offer(NamedTuple):
    """The parameters of a tool, and arguments of its calls."""

    parameters: Any
    values: list[str]  # of `a`, as JSON


class ToolSchemas(Kind):
    """A tool that an agent offers, and calls of it: a request or an action ends, and nothing else."""

    name, tried, refusals, limit_s = "tool schemas", 240, (kind.Refused,), 60.0

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self._chat = Chat(train_tokenizer([], 384))
        self._limits = load(SHIPPED).env.model_copy(update={"max_tokens": 1 << 20, "max_action_tokens": 1 << 19})
        self._agent = AgentParams(function="m:f", timeout_s=1.0)
        self._away = list[str]()
        sys.addaudithook(self._note)

    def make(self, rng: Random) -> Offer:
        schema = rng.choice(SCHEMAS)
        full = {"type": "object", **schema} if isinstance(schema, dict) else schema
        return Offer(full, rng.sample(VALUES, _CALLS))

    def judge(self, made: Offer) -> None:
        self._away.clear()
        held_s, refused = asyncio.run(self._played(made))
        require(not self._away, f"asks {self._away[:1]}")
        require(held_s < _MOST_S, f"holds the loop for {held_s:.1f} s")
        if refused:
            raise kind.Refused(refused)

    def names(self, made: Offer) -> tuple[str, ...]:
        return ("tools", "messages", "Invalid JSON")

    def _note(self, event: str, details: tuple[Any, ...]) -> None:
        if event in ("socket.connect", "socket.getaddrinfo", "urllib.Request"):
            self._away.append(f"{event} {details[1:]}")

    async def _played(self, made: Offer) -> tuple[float, str]:
        """The longest time for which the loop was held, and why a request was refused; "" if none was."""
        said = iter(made.values)

        async def act(request: Request) -> Action:
            text = f'<tool_call>{{"name": "look", "arguments": {{"a": {next(said)}}}}}</tool_call>'
            ids = self._chat.encode_action(text)
            return Action.of(ids, [0.0] * len(ids), self._chat.end_ids)

        session = Session(self._chat, self._limits, self._agent, (0, 0, "q", 0), PLAY)
        episode = OpenEpisode(session, act, 0, parallel=False, parts=[])
        watching = asyncio.create_task(_longest_s())
        await asyncio.sleep(0)  # until it watches
        tool = {"type": "function", "function": {"name": "look", "parameters": made.parameters}}
        refused = ""
        for number in range(_CALLS):
            messages = [{"role": "user", "content": f"Who asked {number}?"}]
            body = json.dumps({"model": "policy", "messages": messages, "tools": [tool]}).encode()
            try:
                asking: Asking = episode.ask(ChatCompletions().read(body, {}), body, again=False)
                await asyncio.shield(asking.drawing)
            except Refused as fault:
                refused = str(fault)
            if episode.broken.done():
                raise Defect(f"ends the stage: {episode.broken.exception()!r}")
        watching.cancel()
        [held_s] = await asyncio.gather(watching)
        episode.close()
        return held_s, refused


async def _longest_s() -> float:
    """The longest time of the processor that this thread spent between two turns of the loop, until cancelled."""
    longest, last = 0.0, time.thread_time()
    try:
        while True:
            await asyncio.sleep(0.001)
            now = time.thread_time()
            longest, last = max(longest, now - last), now
    except asyncio.CancelledError:
        return max(longest, time.thread_time() - last)
