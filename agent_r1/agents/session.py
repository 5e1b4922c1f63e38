"""The tokens of an episode whose loop is outside: the messages of its requests as contexts, of tokens as sampled.

A request goes on in a context if its rendering begins with what the policy has read and said there; else it begins a
new one. What the policy sampled is read again as its sampled ids, and is ACTION once.
"""

from __future__ import annotations

import json
import logging
import re
from bisect import bisect
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from hashlib import blake2b
from itertools import takewhile
from typing import Annotated, Any, Literal, NamedTuple

import numpy as np
from pydantic import BaseModel, Field

from agent_r1.envs.base import TAGS, Conversation, ParsedCall, hermes, object_of, parse_action, split_action
from agent_r1.envs.tool_env import canonical, think
from agent_r1.http.client import in_words
from agent_r1.http.completions import Asked, ChatMessage, Refused
from agent_r1.params.env import AgentParams, EnvParams
from agent_r1.records import Call, CallStatus, Outcome, Source, Step, StopReason
from agent_r1.rollout.chat import Answering, Chat
from agent_r1.rollout.codec import Encoded, Message, Piece, Tools
from agent_r1.rollout.episode import Play, require_fit
from agent_r1.rollout.sampling import Action, Request
from agent_r1.seeds import derive
from agent_r1.tools.arguments import ArgumentCheck
from agent_r1.tools.base import function_schema

_OPEN, _CLOSE = chr(0x10FFFC), chr(0x10FFFD)  # around an earlier answer, which is looked for in a rendering
_ANSWER = re.compile(f"{_OPEN}([^{_OPEN}{_CLOSE}]*){_CLOSE}")
_UNMARKED = str.maketrans({_OPEN: None, _CLOSE: None})
_THOUGHT_END = "</think>"

logger = logging.getLogger(__name__)


class _CalledFunction(BaseModel):
    name: str
    arguments: str


class _ToolCall(BaseModel):
    id: str
    type: Literal["function"] = "function"
    function: _CalledFunction


class AgentMessage(ChatMessage):
    """A message of an agent's conversation."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    reasoning_content: str | None = None
    tool_calls: list[_ToolCall] | None = None
    tool_call_id: str | None = None


class Completing(Asked):
    """A request of an agent outside, which keeps the conversation itself."""

    messages: Annotated[list[AgentMessage], Field(min_length=1, max_length=1024)]  # type: ignore[assignment]
    top_p: float | None = None
    tools: Annotated[list[dict[str, Any]], Field(max_length=128)] | None = None
    tool_choice: Literal["auto", "none"] | None = None

    @property
    def spelled_tools(self) -> str:
        return json.dumps(self.tools or [])


class Offered(NamedTuple):
    """The tools of a request."""

    tools: Tools
    arguments: dict[str, ArgumentCheck]  # by the tool's name


@lru_cache(maxsize=64)
def offered(spelled: str) -> Offered:
    """The tools of a request in the OpenAI function form, from their JSON. Raises Refused for what is none."""
    tools, arguments = [], {}
    for tool in json.loads(spelled):
        match tool:
            case {"type": "function", "function": {"name": str(name), **told}}:
                schema: Any = told.get("parameters") or {"type": "object"}
                try:
                    tools.append(function_schema(name, str(told.get("description") or ""), schema))
                    arguments[name] = ArgumentCheck(schema)
                except ValueError as fault:
                    raise Refused(f"tools: {str(fault)[:400]}", "tools") from None
            case _:
                raise Refused('tools: a tool is {"type": "function", "function": {"name": ...}}', "tools")
    return Offered(tools, arguments)


class Position(NamedTuple):
    """Where a request stands in an episode."""

    parent: GivenAction | None  # the action behind which it goes on; None where a context begins
    read: Encoded  # the tokens since that action, or the whole prompt
    text: str  # its rendering, escaped
    turns: int  # messages of the assistant in it
    messages: list[Message]  # escaped
    offered: Offered

    @property
    def path(self) -> list[GivenAction]:
        """The actions before it in its context, the first one first."""
        found, at = list[GivenAction](), self.parent
        while at:
            found.append(at)
            at = at.place.parent
        return found[::-1]

    @property
    def ids(self) -> list[int]:
        """All tokens that the policy reads."""
        before = (index for each in self.path for index in (*each.place.read.ids, *each.action.token_ids))
        return [*before, *self.read.ids]


@dataclass(eq=False, kw_only=True, slots=True)
class GivenAction:
    """An action, where it was sampled, and how the client sees it."""

    name: str  # its seed
    place: Position
    first: bool  # of the context with which the episode began
    action: Action
    said: str  # as a template takes it, escaped
    closed: str  # the rendering up to its end
    thought: str
    content: str
    calls: list[tuple[str, ParsedCall]]  # with the ids that the client was given
    problem: str  # "" for a well-formed one
    step: Step  # with a span of its own


@dataclass(slots=True)
class EpisodeCounts:
    """The measures of an episode."""

    requests: int = 0
    shown: int = 0  # sampled tokens that later requests showed again
    kept: int = 0  # of these, the ones that were read as sampled
    unknown: int = 0  # assistant messages that are no earlier answer


class Session:
    """One episode: its contexts, what it may ask for still, and how it was refused."""

    def __init__(
        self,
        chat: Chat,
        limits: EnvParams,
        agent: AgentParams,
        parts: tuple[int | str, ...],
        play: Play,
        examples: Sequence[Conversation] = (),
    ) -> None:
        """`parts` are those of the episode's seed; the examples stand behind the system messages of each request."""
        self._examples = examples
        self._example_turns = sum(len(example.actions) for example in examples)
        self._chat, self._limits, self._agent, self._parts, self._play = chat, limits, agent, parts, play
        self.drawn: list[GivenAction] = []
        self.counts = EpisodeCounts()
        self.refused: Outcome | None = None  # the limit at which a request was refused
        self._begun = 0  # actions, those under way too
        self._asked = Counter[str]()  # contexts
        self._by_call = dict[str, GivenAction]()
        self._by_text = dict[str, list[GivenAction]]()

    def place(self, asked: Completing) -> Position:
        """Where a request stands. Raises Refused if its tools are none, or the template cannot write it."""
        try:
            tools = offered(asked.spelled_tools)
            messages, answers = self._read(asked)
            opening = len(list(takewhile(lambda message: message[0] == "system", messages)))
            messages[opening:opening] = self._chat.example_messages(self._examples, tools.tools)
            return self._placed(messages, [*[None] * self._example_turns, *answers], tools)
        except Refused:
            raise
        except Exception as fault:  # a template meets values that it does not expect
            logger.warning("a request is refused: %s", in_words(fault))
            raise Refused(in_words(fault), "messages") from None

    def _placed(self, messages: list[Message], answers: Sequence[GivenAction | None], tools: Offered) -> Position:
        escaped: Tools = self._chat.escape_all(tools.tools)
        self._chat.template.require_written(messages, escaped)
        text = self._chat.template.render(messages, escaped)
        known = [each for each in self.drawn if text.startswith(each.closed)]
        longest = max((len(each.closed) for each in known), default=0)
        tied = [each for each in known if len(each.closed) == longest]
        last = answers[-1] if answers else None
        parent = last if last in tied else min(tied, key=lambda each: each.action.token_ids, default=None)
        place = Position(parent, Encoded([], []), text, len(answers), messages, tools)
        return place._replace(read=self._tokens(place, escaped, answers))

    def request(self, place: Position, asked: Completing, episode: int) -> tuple[Request, bool]:
        """The draw that a request is, and whether it goes on in the episode's first context.

        Raises Refused, with the API's code, if the episode has no step left or the context no room.
        """
        limits, context = self._limits, place.ids
        if self._begun >= limits.max_steps:
            self.refused = Outcome.TURN_LIMIT
            raise Refused(f"this episode has had its {limits.max_steps} actions (max_steps)", None, 400, "turn_limit")
        if (room := limits.max_tokens - len(context)) < 1:
            raise self.full(f"maximum context length is {limits.max_tokens} tokens, the messages have {len(context)}")
        first = not self._agent.parallel and all(each.place.parent is not place.parent for each in self.drawn)
        first = first and (place.parent.first if place.parent else True)
        spelled = blake2b(np.array(context, np.int32).tobytes(), digest_size=16).hexdigest()
        parts = (*self._parts, len(place.path))
        parts += () if first else ("context", spelled, self._asked[spelled])
        parts += () if asked.seed is None else ("client", asked.seed)
        self._asked[spelled] += 1
        self._begun += 1
        self.counts.requests += 1
        return Request(
            episode=episode,
            step=len(place.path),
            context=context,
            seed=derive(*parts),
            max_tokens=min(limits.max_action_tokens, room, asked.most or room),
            greedy=self._play.greedy,
            messages=self._chat.plain(place.messages, place.offered.tools) if self._play.told else (),
        ), first

    def full(self, words: str) -> Refused:
        """The refusal of a request whose context leaves no room for an action."""
        self.refused = Outcome.TOKEN_LIMIT
        return Refused(words, "messages", 400, "context_length_exceeded")

    def take(self, place: Position, asked: Completing, request: Request, first: bool, action: Action) -> GivenAction:
        """Takes the action of a request in, cut behind the token that completes a stop string."""
        chat, who = self._chat, f"question {self._parts[2]!r}, sample {self._parts[3]}"
        require_fit(action, request, chat.end_ids, f"{who}, weights of version {self._play.policy_version}")
        action = self._cut(action, asked.stops)
        ids = action.token_ids[:-1] if action.stop_reason is StopReason.END else action.token_ids
        said = chat.write(ids)
        text = chat.understood(chat.opened(request.context) + chat.decode(ids), place.offered.tools).lstrip()
        most = 1 if asked.parallel_tool_calls is False else self._limits.parallel_calls
        parsed = parse_action(text, most)
        shown = _before_stop(text, asked.stops) if action.stop_reason is StopReason.STOP else text
        thought, rest = _apart(shown)
        stray = bool(parsed.problem) and any(tag in rest for tag in TAGS)
        calls = [] if asked.tool_choice == "none" or parsed.problem else parsed.calls
        name = f"{request.seed:016x}"
        drawn = GivenAction(
            name=name,
            place=place,
            first=first,
            action=action,
            said=said,
            closed=place.text + said + chat.end_mark,
            thought="" if stray else thought,
            content=(shown if stray else _without_calls(rest) if calls else rest).strip(),
            calls=[(f"call_{name}{at}", call) for at, call in enumerate(calls)],
            problem=parsed.problem,
            step=Step(
                action_start=0,
                action_stop=len(action.token_ids),
                stop_reason=action.stop_reason,
                calls=[Call(status=CallStatus.MALFORMED)] if stray else _statuses(parsed.calls, place.offered),
                rewards={"think": think(parsed)},
            ),
        )
        self.drawn.append(drawn)
        self._by_call |= {name: drawn for name, _ in drawn.calls}
        for spelled in {text.strip()} | (set() if drawn.calls else {drawn.content}):
            self._by_text.setdefault(spelled, []).append(drawn)
        return drawn

    @property
    def may_be_at_fault(self) -> bool:
        """Whether the policy did something that a program may not be able to bear."""
        bad = (CallStatus.MALFORMED, CallStatus.UNKNOWN_TOOL, CallStatus.BAD_ARGUMENTS)
        steps = [each.step for each in self.drawn]
        return any(step.stop_reason is StopReason.LENGTH or step.call_status in bad for step in steps)

    def contexts(self) -> list[list[GivenAction]]:
        """The actions of every context, each in all contexts that hold it.

        They stand in the order of their last actions, so that the latest action is the last one; where requests are
        under way at the same time, in the order of their ids, which does not depend on arrival.
        """
        before = {each.place.parent for each in self.drawn}
        found = [[*each.place.path, each] for each in self.drawn if each not in before]
        if self._agent.parallel:
            found.sort(key=lambda path: [*path[-1].place.ids, *path[-1].action.token_ids])
        return found

    def _read(self, asked: Completing) -> tuple[list[Message], list[GivenAction | None]]:
        """The messages, escaped but for earlier answers, and for each of the assistant's the answer that it is."""
        messages, answers, made = list[Message](), list[GivenAction | None](), set[str]()
        at: GivenAction | None = None
        for message in asked.messages:
            role = "system" if message.role == "developer" else message.role
            text = self._chat.escape(message.text)
            if role == "assistant":
                at = self._earlier(message, at)
                made = {call.id for call in message.tool_calls or ()}
                text = self._again(at, message) if at else self._chat.escape(_spelled(message))
                self.counts.unknown += at is None
                answers.append(at)
            elif role == "tool":
                if message.tool_call_id not in made and (made or not answers):
                    called = f"the result of {str(message.tool_call_id)[:80]!r}, a call that nobody made"
                    raise Refused(f"messages: {called} in the assistant's last message", "messages")
                if at and at.problem and not at.step.calls:  # the agent takes it for a call that failed
                    at.step = replace(at.step, calls=[Call(status=CallStatus.MALFORMED)])
            messages.append((role, text))
        if messages[-1][0] == "assistant":
            raise Refused("messages: the last one is the assistant's, and the policy begins its own", "messages")
        return messages, answers

    def _earlier(self, message: AgentMessage, before: GivenAction | None) -> GivenAction | None:
        """The answer that a message of the assistant is; of several with one text the one behind `before`."""
        if message.tool_calls:
            told = [(each.id, each.function.name, object_of(each.function.arguments)) for each in message.tool_calls]
            known = self._by_call.get(told[0][0])
            return known if known and told == [(name, *call) for name, call in known.calls] else None
        same = self._by_text.get(message.text.strip(), [])
        next_ones = [each for each in same if each.place.parent is before]
        return min(next_ones or same, key=lambda each: each.action.token_ids, default=None)

    def _again(self, answer: GivenAction, message: AgentMessage) -> str:
        """An earlier answer as the template takes it: whole, or as it came without its thought."""
        came = bool(message.reasoning_content) or answer.thought in message.text
        if self._agent.history == "sampled" or came:
            return answer.said
        return answer.said.partition(_THOUGHT_END)[2]

    def _tokens(self, place: Position, tools: Tools, answers: Sequence[GivenAction | None]) -> Encoded:
        """The tokens behind the parent's action, or of the whole prompt, with earlier answers as they were sampled."""
        chat, parent, text = self._chat, place.parent, place.text
        tail = list(takewhile(lambda message: message[0] != "assistant", place.messages[::-1]))[::-1]
        replies, role = [said for _, said in tail], _one_role(tail)
        covered = parent.place.turns + 1 if parent else 0
        sizes = [len(each.action.token_ids) if each else 0 for each in answers]
        self.counts.shown += sum(sizes)
        self.counts.kept += sum(sizes[:covered])
        closed = not parent or parent.action.token_ids[-1] == chat.end_id
        if parent and role and covered == len(answers):
            return chat.after(parent.closed, text, replies, role, closed=closed)
        asks = role if role and len(answers) > self._example_turns and not parent else None
        history, framed = chat.split_history(text, replies, asks) if asks else (text, [])
        start, source = (len(parent.closed), Source.OBSERVATION) if parent else (0, Source.PROMPT)
        parts = [
            Encoded([chat.end_id][closed:], [int(Source.TEMPLATE)][closed:]),
            *self._spliced(place, tools, answers, slice(start, len(history)), source),
            chat.encode(framed, chat.end_mark),
        ]
        return Encoded([each for part in parts for each in part.ids], [each for part in parts for each in part.source])

    def _spliced(
        self, place: Position, tools: Tools, answers: Sequence[GivenAction | None], span: slice, source: Source
    ) -> Iterator[Encoded]:
        """The tokens of a span of a rendering, and an answer in it as its ids; one that is rewritten is text."""
        around, left, at, pieces = iter(answers), [each for each in answers if each], 0, [place.text]
        behind = self._chat.end_mark if place.parent else None
        if left:
            messages = [
                (role, f"{_OPEN}{text}{_CLOSE}") if role == "assistant" and next(around) else (role, text)
                for role, text in place.messages
            ]
            found = _ANSWER.split(self._chat.template.render(messages, tools))
            pieces = found if "".join(found).translate(_UNMARKED) == place.text else pieces
        for number, piece in enumerate(pieces):
            text = piece.translate(_UNMARKED)
            begin, at = at, at + len(text)
            while number % 2 and left and left[0].said != text:
                left.pop(0)
            if number % 2 and left and span.start <= begin and at <= span.stop:
                answer = left.pop(0)
                ids = answer.action.token_ids[: -1 if answer.action.stop_reason is StopReason.END else None]
                self.counts.kept += len(answer.action.token_ids)
                yield Encoded(ids, [source] * len(ids))
                behind = ""
            elif within := text[max(0, span.start - begin) : max(0, span.stop - begin)]:
                yield self._chat.encode([Piece(within, source)], behind)
                behind = ""

    def _cut(self, action: Action, stops: Sequence[str]) -> Action:
        """An action up to the token that completes a stop string; the same one where none does."""
        ids, decode = action.token_ids[: -1 if action.stop_reason is StopReason.END else None], self._chat.decode
        if not any(stop in decode(ids) for stop in stops):
            return action
        kept = bisect(range(len(ids)), False, key=lambda count: any(stop in decode(ids[:count]) for stop in stops))
        return Action(token_ids=ids[:kept], logprobs=action.logprobs[:kept], stop_reason=StopReason.STOP)


def _one_role(messages: Sequence[Message]) -> Answering | None:
    """The role of all messages, where it is one that answers an action."""
    roles = {role for role, _ in messages}
    return "tool" if roles == {"tool"} else "user" if roles == {"user"} else None


def _spelled(message: AgentMessage) -> str:
    """A message of the assistant that the policy did not sample, with its calls in text."""
    made = [
        ParsedCall(each.function.name, object_of(each.function.arguments) or {}) for each in message.tool_calls or ()
    ]
    return "\n".join(filter(None, (message.text, hermes(made))))


def _before_stop(text: str, stops: Sequence[str]) -> str:
    return min((text.partition(stop)[0] for stop in stops), key=len, default=text)


def _apart(text: str) -> tuple[str, str]:
    """The thought of an action, without its tags, and the rest."""
    first = next(iter(split_action(text)), None)
    if first and first.kind == "thought" and first.text.endswith(_THOUGHT_END):
        return first.text.removesuffix(_THOUGHT_END).removeprefix("<think>").strip(), text[len(first.text) :]
    return "", text


def _without_calls(text: str) -> str:
    return "".join(piece.text for piece in split_action(text) if piece.kind != "call")


def _statuses(calls: Sequence[ParsedCall], tools: Offered) -> list[Call]:
    """The calls of an action, as far as the tools' schemas tell what comes of them."""
    made = []
    for call in calls:
        check = tools.arguments.get(call.tool)
        fits = check is not None and check.fits(call.arguments)
        status = CallStatus.OK if fits else CallStatus.BAD_ARGUMENTS if check else CallStatus.UNKNOWN_TOOL
        made.append(Call(tool=call.tool, arguments=canonical(call.arguments), status=status))
    return made
