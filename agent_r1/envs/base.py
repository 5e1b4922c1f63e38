"""Environments, the other side of an episode, and the actions that they read.

An environment sees and says text; tokens are the rollout's business. An action is at most one thought, then one tool
call or one answer, in Hermes tags: `parse_action` reads it for the environment, and `split_action` for a person.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from itertools import islice
from typing import NamedTuple, NoReturn

from agent_r1.params.env import Answers
from agent_r1.records import LONGEST_STATE, Call, CallStatus, Json, Outcome, Question, Trajectory, status_of

_THOUGHT = re.compile(r"\s*<think>(.*?)</think>", re.DOTALL)
_BLOCK = re.compile(r"<(tool_call|answer)>(.*?)</\1>", re.DOTALL)
_OPENED_CALL = re.compile(r"<tool_call>\s*")
_CLOSED_CALL = re.compile(r"\s*</tool_call>")
_DECODER = json.JSONDecoder()
_TAG = re.compile(r"</?(?:think|tool_call|answer)>")
_OPENED = r"\A(?:(?!<think>).)*?</think>"  # a thought whose tag the prompt wrote
_PIECE = re.compile(rf"{_OPENED}|<(think|tool_call|answer)>.*?(?:</\1>|\Z)", re.DOTALL)
_KINDS = {"think": "thought", "tool_call": "call", "answer": "answer"}
TAGS = tuple(f"<{slash}{name}>" for name in _KINDS for slash in ("", "/"))  # that an action is made of


@dataclass(frozen=True, kw_only=True, slots=True)
class Restart:
    """The context in which an episode goes on: the system message, another user message, and the exchanges kept."""

    user: str  # its user message
    keep: int = 0  # exchanges of the old context, the last ones; the latest is the action with its observations

    def __post_init__(self) -> None:
        if self.keep < 0:
            raise ValueError(f"a context cannot keep {self.keep} exchanges")


@dataclass(frozen=True, kw_only=True, slots=True)
class Transition:
    """The result of one action."""

    observations: tuple[str, ...] = ()  # the texts that come back, one for each call
    outcome: Outcome | None = None  # set where the episode ends, with neither observations nor a restart
    restart: Restart | None = None  # the episode goes on in a new context
    answer: str = ""  # the text between the answer tags
    fault: str = ""  # the world's fault, if the episode is ABORTED
    calls: tuple[Call, ...] = ()  # the calls that the action asked for
    rewards: dict[str, float] = field(default_factory=dict)  # named parts, unweighted
    rewards_when_read: dict[str, float] = field(default_factory=dict)  # further ones, if the observations find room

    def __post_init__(self) -> None:
        if bool(self.observations or self.restart) == (self.outcome is not None):
            raise ValueError("a transition has either observations, or a restart, or where the episode ends an outcome")
        if self.restart and bool(self.restart.keep) != bool(self.observations):
            raise ValueError(
                f"a restart that keeps {self.restart.keep} exchanges comes with {len(self.observations)} observations: "
                "an exchange that is kept ends with some, and where none is kept nothing would show them"
            )
        if not self.observations and self.rewards_when_read:
            raise ValueError("nothing is read after the end of an episode: it takes no rewards_when_read")
        if bool(self.fault) != (self.outcome is Outcome.ABORTED):
            raise ValueError("an episode is aborted by a fault of the world, and the fault is named")

    @property
    def call_status(self) -> CallStatus:
        """The joint status of all its calls; see `status_of`."""
        return status_of(self.calls)


@dataclass(frozen=True, kw_only=True, slots=True)
class Conversation:
    """One row: the question, the assistant's actions, and the observations between them."""

    where: str  # file and row
    dataset: str  # "" where the row names none
    replies: str  # the role that answers the assistant: tool or user
    system: str  # "" where it opens without a system message
    user: str
    actions: list[str]  # [K] texts, without end tokens
    observations: list[str]  # [K - 1]

    @property
    def text(self) -> str:
        """All of it, for a tokenizer to learn its words from."""
        return "\n".join(["system", self.system, "user", self.user, "assistant", *self.actions, *self.observations])


class Env:
    """One episode's environment: made for one question, opened, used and closed once.

    A method that waits for somebody else awaits it, and the other episodes go on meanwhile. A WorldFault, wherever it
    is raised, ends the episode as ABORTED.
    """

    # By the time that `open` returns:
    system: str  # the opening system message
    user: str  # the opening user message
    tools: Sequence[Json] = ()  # JSON schemas in the OpenAI function form, for the chat template
    examples: Sequence[Conversation] = ()  # that stand between the system message and the user's

    @property
    def example_call(self) -> str:
        """A call of its tools as its error messages write it, in Hermes; "" where they write none."""
        return ""

    @property
    def state(self) -> str:
        """The key of the state that the next action meets, equal for equal states; "" where none is stated."""
        return ""

    async def open(self) -> None:
        """Makes the environment ready for the first action, such as by connecting to a server."""

    async def step(self, action: str) -> Transition:
        """Takes the decoded action and answers it.

        It holds special tokens, but not the end token that closed it; where the prompt ends in `<think>`, it opens so.
        """
        raise NotImplementedError

    def redraw(self, seed: int) -> None:
        """Has all chance from now on come from another seed. Called only on a `Kind` that is `restored`."""
        raise NotImplementedError

    async def close(self) -> None:
        """Frees the resources of the episode, however it ended."""


def stored_state(env: Env) -> str:
    """The key of an environment's state as a step keeps it: a hash of it where it is long or not ASCII."""
    key = env.state
    if key.isascii() and len(key) <= LONGEST_STATE:
        return key
    return blake2b(key.encode(errors="surrogatepass"), digest_size=16).hexdigest()


async def opened(env: Env) -> Env:
    """The environment with the messages with which an episode in it begins, closed again."""
    try:
        await env.open()
        return env
    finally:
        await env.close()


@dataclass(frozen=True, kw_only=True, slots=True)
class Prefix:
    """The steps of a stored trajectory before one of them, from where an episode goes on another way."""

    trajectory: Trajectory
    step: int  # index of the first step that is sampled anew
    draw: int  # number of the continuation


@dataclass(frozen=True, kw_only=True, slots=True)
class Attempt:
    """An episode to be run, as often as its environment is made."""

    question_id: str
    group: int  # index of the question within the iteration
    sample: int  # index of the episode within its group
    env: Callable[[int], Env]  # an environment in which nothing has happened yet, by the seed of its own chance
    question: Question | None = None  # None for one that a person asks
    agent: str = ""  # of `env.agents`, the one that plays it; "" for the loop of this project
    prefix: Prefix | None = None  # taken again before anything is sampled


@dataclass(frozen=True, kw_only=True, slots=True)
class ParsedAction:
    """An action, taken apart."""

    thought: str = ""
    calls: tuple[ParsedCall, ...] = ()  # none unless all are well formed
    answer: str | None = None  # None without a well-formed answer
    problem: str = ""  # the fault of a malformed action


class ParsedCall(NamedTuple):
    """A call of a tool, as an action says it."""

    tool: str
    arguments: Json


def parse_action(text: str, most_calls: int = 1, answers: Answers = "tagged") -> ParsedAction:
    """Reads an action's text, without its end token. Every text has a result.

    Well formed is: an optional `<think>...</think>` first, then one `<tool_call>` block, or up to `most_calls` of
    them, or one `<answer>` block. Free text around the blocks is let pass, stray or unclosed tags are not, but tags in
    the JSON of a call are its text. A call is a JSON object with the keys `name`, a string, and `arguments`, an object
    or a text of its JSON, and no others but an `id`. With `plain` answers the text behind the thought is one,
    too, if it holds no tags.
    """
    match = _THOUGHT.match(text)
    thought, rest = (match[1].strip(), text[match.end() :]) if match else ("", text)
    rest = _hidden_tags(rest, most_calls)
    tags = len(_TAG.findall(rest))
    if not tags and answers == "plain" and rest.strip():
        return ParsedAction(thought=thought, answer=rest.strip())
    if not tags:
        return ParsedAction(thought=thought, problem="neither a tool call nor an answer")
    few = tags <= 2 * most_calls  # among many, every opening tag would look for its end
    blocks = [*_BLOCK.finditer(rest)] if few else []
    kinds = {block[1] for block in blocks}
    if 2 * len(blocks) != tags or len(kinds) > 1 or (kinds == {"answer"} and len(blocks) > 1):
        calls = "one tool call" if most_calls == 1 else f"at most {most_calls} tool calls"
        return ParsedAction(thought=thought, problem=f"the tags do not form {calls} or one answer")
    if kinds == {"answer"}:
        return ParsedAction(thought=thought, answer=blocks[0][2].strip())
    try:
        return ParsedAction(thought=thought, calls=tuple(_parse_call(block[2]) for block in blocks))
    except ValueError as problem:
        return ParsedAction(thought=thought, problem=str(problem))


def without_answer_tags(action: str) -> str:
    """An action whose answer, if it has one, stands there plain."""
    return "".join(piece.inside if piece.kind == "answer" else piece.text for piece in split_action(action))


def _hidden_tags(text: str, calls: int) -> str:
    """The text with `<` in the JSON of its first calls written as JSON's escape, so that it begins no tag there."""
    hidden = ""
    at = 0
    for tag in islice(_OPENED_CALL.finditer(text), calls):
        if tag.start() < at:
            continue
        try:
            _, stop = _DECODER.raw_decode(text, tag.end())
        except (ValueError, RecursionError):
            continue
        if _CLOSED_CALL.match(text, stop):
            hidden += text[at : tag.end()] + text[tag.end() : stop].replace("<", "\\u003c")
            at = stop
    return hidden + text[at:]


def _parse_call(body: str) -> ParsedCall:
    """Reads the text between a call's tags; a ValueError names its fault."""
    try:
        call = json.loads(body, parse_constant=refuse_constant)
        if isinstance(call, dict) and isinstance(call.get("arguments"), str):
            call["arguments"] = object_of(call["arguments"])
        json.dumps(call, ensure_ascii=False, allow_nan=False).encode()  # no file could keep text that this refuses
    except (ValueError, RecursionError):
        raise ValueError("the tool call is not valid JSON") from None
    match call:
        case {"name": str(name), "arguments": dict(arguments), **rest} if not {*rest} - {"id"}:
            return ParsedCall(name, arguments)
    raise ValueError("a tool call is a JSON object of a name and an object of arguments")


def hermes(calls: Sequence[ParsedCall]) -> str:
    """Calls as an action writes them for `parse_action`."""
    texts = (json.dumps({"name": call.tool, "arguments": call.arguments}, ensure_ascii=False) for call in calls)
    return "\n".join(f"<tool_call>\n{text}\n</tool_call>" for text in texts)


def object_of(text: str) -> Json | None:
    """The object that a text of JSON holds; None if it holds none."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def refuse_constant(constant: str) -> NoReturn:
    """Refuses NaN and the infinities, which json.loads takes and JSON lacks."""
    raise ValueError(f"{constant} is not JSON")


class Piece(NamedTuple):
    """A stretch of an action's text."""

    kind: str  # thought, call, answer, or text outside of tags
    text: str  # with its tags

    @property
    def inside(self) -> str:
        """The text between the tags."""
        tag = next((tag for tag, kind in _KINDS.items() if kind == self.kind), "")
        return (self.text.removeprefix(f"<{tag}>").removesuffix(f"</{tag}>") if tag else self.text).strip()


def split_action(text: str) -> list[Piece]:
    """The pieces of an action's text in order, well formed or not; joined, they are the text again.

    A thought may lack the tag that opens it, where the prompt wrote that; the last piece may lack the tag that closes.
    """
    pieces = list[Piece]()
    at = 0
    for match in _PIECE.finditer(text):
        pieces += [Piece("text", text[at : match.start()]), Piece(_KINDS[match[1] or "think"], match[0])]
        at = match.end()
    return [piece for piece in [*pieces, Piece("text", text[at:])] if piece.text]


def is_prose(text: str) -> bool:
    """Whether an action's text begins neither a call nor an answer, be it well formed or not."""
    return not any(piece.kind in ("call", "answer") for piece in split_action(text))
