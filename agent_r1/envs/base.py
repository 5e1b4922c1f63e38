"""The two sides of an episode: what an environment is, and how it reads an action.

An environment sees and says text; tokens are the rollout's business. An action is at most one thought, then one tool
call or one answer, in Hermes tags: `parse_action` says what it means, to the environment; `split_action` how it reads,
to a person.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

from agent_r1.records import CallStatus, Outcome

_THOUGHT = re.compile(r"\s*<think>(.*?)</think>", re.DOTALL)
_BLOCK = re.compile(r"<(tool_call|answer)>(.*?)</\1>", re.DOTALL)
_TAG = re.compile(r"</?(?:think|tool_call|answer)>")
_OPENED = r"\A(?:(?!<think>).)*?</think>"  # a thought whose tag the prompt wrote
_PIECE = re.compile(rf"{_OPENED}|<(think|tool_call|answer)>.*?(?:</\1>|\Z)", re.DOTALL)
_KINDS = {"think": "thought", "tool_call": "call", "answer": "answer"}
TAGS = tuple(f"<{slash}{name}>" for name in _KINDS for slash in ("", "/"))  # that an action is made of


@dataclass(frozen=True, kw_only=True, slots=True)
class Transition:
    """What one action led to."""

    observation: str | None  # the text that comes back; None ends the episode
    outcome: Outcome | None = None  # set where observation is None
    answer: str = ""  # the text between the answer tags
    fault: str = ""  # of an episode that is ABORTED: what the world did wrong
    tool: str = ""
    arguments: str = ""  # JSON
    call_status: CallStatus = CallStatus.NONE
    latency_s: float = 0.0
    rewards: dict[str, float] = field(default_factory=dict)  # named parts, unweighted
    rewards_when_read: dict[str, float] = field(default_factory=dict)  # further ones, if the observation finds room

    def __post_init__(self) -> None:
        if (self.observation is None) == (self.outcome is None):
            raise ValueError("a transition has either an observation or, where the episode ends, an outcome")
        if self.observation is None and self.rewards_when_read:
            raise ValueError("nothing is read after the end of an episode: it takes no rewards_when_read")
        if bool(self.fault) != (self.outcome is Outcome.ABORTED):
            raise ValueError("an episode is aborted by a fault of the world, and the fault is named")


class Env(Protocol):
    """One episode's environment: made for one question, used once."""

    system: str  # the opening system message
    user: str  # the opening user message
    tools: list[dict[str, Any]]  # JSON schemas in the OpenAI function form, for the chat template

    def step(self, action: str) -> Transition:
        """Takes the decoded action and answers it.

        It holds special tokens, but not the end token that closed it; where the prompt ends in `<think>`, it opens so.
        """
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class Attempt:
    """An episode to be run, as often as its environment is opened."""

    question_id: str
    group: int  # index of the question within the iteration
    sample: int  # index of the episode within its group
    open: Callable[[], Env]  # an environment in which nothing has happened yet


@dataclass(frozen=True, kw_only=True, slots=True)
class ParsedAction:
    """What an action says."""

    thought: str = ""
    tool: str = ""  # "" without a well-formed call
    arguments: dict[str, Any] | None = None  # None without a well-formed call
    answer: str | None = None  # None without a well-formed answer
    call_status: CallStatus = CallStatus.NONE  # OK: well formed; NONE: an answer; else MALFORMED
    problem: str = ""  # what is wrong with a malformed action


def parse_action(text: str) -> ParsedAction:
    """Reads an action's text (without its end token). Whatever the text, the result says what it is.

    Well formed is: an optional `<think>...</think>` first, then exactly one `<tool_call>` or one `<answer>` block.
    Free text around the block is let pass, stray or unclosed tags are not. A call is a JSON object with the keys
    `name`, a string, and `arguments`, an object, and no others.
    """
    found = _THOUGHT.match(text)
    thought, rest = (found[1].strip(), text[found.end() :]) if found else ("", text)
    tags = len(_TAG.findall(rest))
    if not tags:
        return _malformed(thought, "neither a tool call nor an answer")
    block = _BLOCK.search(rest) if tags == 2 else None  # among many, every opening tag would look for its end
    if block is None:
        return _malformed(thought, "the tags do not form one tool call or one answer")
    if block[1] == "answer":
        return ParsedAction(thought=thought, answer=block[2].strip())
    return _parse_call(thought, block[2])


def _parse_call(thought: str, body: str) -> ParsedAction:
    try:
        call = json.loads(body, parse_constant=_refuse)
        json.dumps(call, ensure_ascii=False, allow_nan=False).encode()  # what it refuses, no file could keep
    except (ValueError, RecursionError):
        return _malformed(thought, "the tool call is not valid JSON")
    match call:
        case {"name": str(name), "arguments": dict(arguments)} if len(call) == 2:
            return ParsedAction(thought=thought, tool=name, arguments=arguments, call_status=CallStatus.OK)
    return _malformed(thought, 'a tool call is {"name": ..., "arguments": {...}}')


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is not JSON")


def _malformed(thought: str, problem: str) -> ParsedAction:
    return ParsedAction(thought=thought, call_status=CallStatus.MALFORMED, problem=problem)


class Piece(NamedTuple):
    """A stretch of an action's text."""

    kind: str  # thought, call, answer, or text for what stands outside of tags
    text: str  # with its tags

    @property
    def inside(self) -> str:
        """What stands between the tags."""
        tag = next((tag for tag, kind in _KINDS.items() if kind == self.kind), "")
        return (self.text.removeprefix(f"<{tag}>").removesuffix(f"</{tag}>") if tag else self.text).strip()


def split_action(text: str) -> list[Piece]:
    """The pieces of an action's text in order, well formed or not; joined, they are the text again.

    A thought may lack the tag that opens it, where the prompt wrote that; the last piece may lack the tag that closes.
    """
    pieces, at = [], 0
    for found in _PIECE.finditer(text):
        pieces += [Piece("text", text[at : found.start()]), Piece(_KINDS[found[1] or "think"], found[0])]
        at = found.end()
    return [piece for piece in [*pieces, Piece("text", text[at:])] if piece.text]
