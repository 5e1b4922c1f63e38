"""The tokens of an episode whose loop is outside: the messages of its requests as contexts, of tokens as sampled.

A request goes on in a context if its rendering begins with what the policy has read and said there; else it begins a
new one. What the policy sampled is read again as its sampled ids, and is ACTION once.
"""

from __future__ import annotations

import json
import logging
import re
import time
from bisect import bisect
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from hashlib import blake2b
from itertools import chain, takewhile
from typing import Any, NamedTuple

import numpy as np

from agent_r1.envs.base import (
    TAGS,
    Conversation,
    ParsedAction,
    ParsedCall,
    hermes,
    object_of,
    parse_action,
    split_action,
)
from agent_r1.envs.tool_env import canonical, think
from agent_r1.http.client import in_words
from agent_r1.http.dialects.conversation import ChatMessage, ChatRequest, Refused, Reply, ToolCall
from agent_r1.params.agents import AgentParams
from agent_r1.params.env import EnvParams
from agent_r1.records import Call, CallStatus, Outcome, Source, Step, StopReason
from agent_r1.rollout.calls import leniently
from agent_r1.rollout.chat import Answering, Chat
from agent_r1.rollout.codec import Encoded, Message, Piece, Tools
from agent_r1.rollout.episode import Play, require_fit
from agent_r1.rollout.sampling import Action, Request
from agent_r1.seeds import derive
from agent_r1.tools.arguments import ArgumentCheck
from agent_r1.tools.base import function_schema, object_schema

_OPEN = chr(0x10FFFC)  # before an earlier answer, which is looked for in a rendering
_CLOSE = chr(0x10FFFD)  # after it
_ANSWER = re.compile(f"{_OPEN}([^{_OPEN}{_CLOSE}]*){_CLOSE}")
_UNMARKED = str.maketrans({_OPEN: None, _CLOSE: None})
_THOUGHT_END = "</think>"
_MALFORMED = Call(status=CallStatus.MALFORMED)

logger = logging.getLogger(__name__)


class Offered(NamedTuple):
    """The tools of a request, and the form of its text."""

    tools: Tools
    arguments: dict[str, ArgumentCheck]  # by the tool's name
    form: ArgumentCheck | None


@lru_cache(maxsize=64)
def offered(spelled: str) -> Offered:
    """The `spelled_schemas` of a request. Raises Refused for those that are none, or cannot be checked."""
    request_tools, form = json.loads(spelled)
    tools = []
    arguments = {}
    form_check = None
    field = "tools"
    try:
        for tool in request_tools:
            match tool:
                case {"type": "function", "function": {"name": str(name), **fields}}:
                    schema: Any = fields.get("parameters") or {"type": "object"}
                    tools.append(function_schema(name, str(fields.get("description") or ""), schema))
                    arguments[name] = ArgumentCheck(schema)
                case _:
                    raise ValueError('a tool is {"type": "function", "function": {"name": ...}}')
        if form:
            field, schema = form
            form_check = ArgumentCheck(object_schema(schema))
    except ValueError as fault:
        raise Refused(f"{field}: {str(fault)[:400]}", field) from None
    return Offered(tools, arguments, form_check)


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
        path = list[GivenAction]()
        action = self.parent
        while action:
            path.append(action)
            action = action.place.parent
        return path[::-1]

    @property
    def ids(self) -> list[int]:
        """All tokens that the policy reads."""
        history = (index for drawn in self.path for index in (*drawn.place.read.ids, *drawn.action.token_ids))
        return [*history, *self.read.ids]


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
    stop: str | None  # the text that ended it

    def reply(self, model: str) -> Reply:
        """The action as its client sees it."""
        return Reply(
            name=self.name,
            model=model,
            thoughts=[self.thought] if self.thought else (),
            content=self.content,
            calls=[ToolCall(name, *call) for name, call in self.calls],
            cut=self.action.stop_reason is StopReason.LENGTH,
            stop=self.stop,
            read=len(self.place.ids),
            sampled=len(self.action.token_ids),
        )


@dataclass(slots=True)
class EpisodeCounts:
    """The measures of an episode."""

    requests: int = 0
    shown: int = 0  # sampled tokens that later requests showed again
    kept: int = 0  # of these, the ones that were read as sampled
    unknown: int = 0  # assistant messages that are no earlier answer
    lenient: int = 0  # actions whose calls were read leniently
    unmet_form: int = 0  # actions without the calls or the form that their requests demand


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
        self._chat = chat
        self._limits = limits
        self._agent = agent
        self._parts = parts
        self._play = play
        self.drawn = list[GivenAction]()
        self.counts = EpisodeCounts()
        self.refused: Outcome | None = None  # the limit at which a request was refused
        self._begun = 0  # actions, those under way too
        self._asked = Counter[str]()  # contexts
        self._by_call = dict[str, GivenAction]()
        self._by_text = dict[str, list[GivenAction]]()
        self._step_began_s = time.monotonic()

    def require_room(self, chat_request: ChatRequest) -> None:
        """Raises Refused for messages of more characters than the longest tokens could hold; nothing is rendered."""
        characters = sum(len(message.text) for message in chat_request.messages if message.role != "assistant")
        most = self._limits.max_tokens * self._chat.longest
        if characters > most:
            raise self.full(f"the messages have {characters} characters, and a context takes {most} at most")

    def place(self, chat_request: ChatRequest) -> Position:
        """Where a request stands. Raises Refused if its tools are none, or the template cannot write it."""
        try:
            tools = offered(chat_request.spelled_schemas)
            kind, tool = chat_request.choice
            if kind == "required" and not (tool in tools.arguments if tool else tools.arguments):
                raise Refused(f"tool_choice: no tool {tool[:80]!r} is offered", "tool_choice")
            messages, answers = self._read(chat_request)
            opening = len(list(takewhile(lambda message: message[0] == "system", messages)))
            messages[opening:opening] = self._chat.example_messages(self._examples, tools.tools)
            return self._placed(messages, [*[None] * self._example_turns, *answers], tools)
        except Refused:
            raise
        except ValueError as fault:  # of a template, which may refuse the messages
            logger.warning("a request is refused: %s", in_words(fault))
            raise Refused(in_words(fault), "messages") from None

    def _placed(self, messages: list[Message], answers: Sequence[GivenAction | None], tools: Offered) -> Position:
        escaped: Tools = self._chat.escape_all(tools.tools)
        self._chat.template.require_written(messages, escaped)
        text = self._chat.template.render(messages, escaped)
        candidates = [drawn for drawn in self.drawn if text.startswith(drawn.closed)]
        longest = max((len(drawn.closed) for drawn in candidates), default=0)
        tied = [drawn for drawn in candidates if len(drawn.closed) == longest]
        last = answers[-1] if answers else None
        parent = last if last in tied else min(tied, key=lambda drawn: drawn.action.token_ids, default=None)
        place = Position(parent, Encoded([], []), text, len(answers), messages, tools)
        return place._replace(read=self._tokens(place, escaped, answers))

    def request(self, place: Position, chat_request: ChatRequest, episode: int) -> tuple[Request, bool]:
        """The draw that a request is, and whether it goes on in the episode's first context.

        Raises Refused, with the API's code, if the episode has no step left or the context no room.
        """
        limits = self._limits
        context = place.ids
        if self._begun >= limits.max_steps:
            self.refused = Outcome.TURN_LIMIT
            raise Refused(f"this episode has had its {limits.max_steps} actions (max_steps)", None, 400, "turn_limit")
        room = limits.max_tokens - len(context)
        if room < 1:
            raise self.full(f"maximum context length is {limits.max_tokens} tokens, the messages have {len(context)}")
        first = not self._agent.parallel and all(drawn.place.parent is not place.parent for drawn in self.drawn)
        first = first and (place.parent.first if place.parent else True)
        spelled = blake2b(np.array(context, np.int32).tobytes(), digest_size=16).hexdigest()
        parts = (*self._parts, len(place.path))
        parts += () if first else ("context", spelled, self._asked[spelled])
        parts += () if chat_request.seed is None else ("client", chat_request.seed)
        self._asked[spelled] += 1
        self._begun += 1
        self.counts.requests += 1
        return Request(
            episode=episode,
            step=len(place.path),
            context=context,
            seed=derive(*parts),
            max_tokens=min(limits.max_action_tokens, room, chat_request.most or room),
            greedy=self._play.greedy,
            messages=self._chat.plain(place.messages, place.offered.tools) if self._play.told else (),
        ), first

    def full(self, words: str) -> Refused:
        """The refusal of a request whose context leaves no room for an action."""
        self.refused = Outcome.TOKEN_LIMIT
        return Refused(words, "messages", 400, "context_length_exceeded")

    def take(
        self, place: Position, chat_request: ChatRequest, request: Request, first: bool, action: Action
    ) -> GivenAction:
        """Takes the action of a request in, cut behind the token that completes a stop string."""
        chat = self._chat
        require_fit(
            action,
            request,
            chat.end_ids,
            f"question {self._parts[2]!r}, sample {self._parts[3]}, weights of version {self._play.policy_version}",
        )
        action = self._cut(action, chat_request.stops)
        ids = _without_end(action)
        written = chat.write(ids)
        text = self._understood(chat.opened(request.context) + chat.decode(ids), place.offered)
        parsed = parse_action(text, self._limits.parallel_calls if chat_request.parallel else 1)
        stop = _first(chat_request.stops, text) if action.stop_reason is StopReason.STOP else None
        reply = _reply(text, parsed, chat_request, stop)
        name = f"{request.seed:016x}"
        meets = _meets(reply, chat_request, place.offered)
        self.counts.unmet_form += not meets
        drawn = GivenAction(
            name=name,
            place=place,
            first=first,
            action=action,
            said=written,
            closed=place.text + written + chat.end_mark,
            thought=reply.thought,
            content=reply.content,
            calls=_named(name, reply.calls),
            problem=parsed.problem,
            step=Step(
                action_start=0,
                action_stop=len(action.token_ids),
                stop_reason=action.stop_reason,
                calls=_statuses(parsed.calls, place.offered) if meets and not reply.stray else [_MALFORMED],
                rewards={"think": think(parsed)},
                duration_s=self._lap_s(),
            ),
            stop=stop,
        )
        self._remember(drawn, text)
        return drawn

    def _understood(self, text: str, tools: Offered) -> str:
        """A text in the project's format; with lenient calls also where the policy came near to it."""
        strict = self._chat.understood(text, tools.tools).lstrip()
        if self._limits.calls != "lenient":
            return strict
        lenient = leniently(strict, tools.arguments)
        self.counts.lenient += lenient != strict
        return lenient

    def _lap_s(self) -> float:
        """Seconds since the last action, or since the episode began."""
        began_s = self._step_began_s
        self._step_began_s = time.monotonic()
        return self._step_began_s - began_s

    def _remember(self, drawn: GivenAction, text: str) -> None:
        """Keeps an answer, to be recognised by its calls, by its text and by its content."""
        self.drawn.append(drawn)
        self._by_call |= {name: drawn for name, _ in drawn.calls}
        for spelled in {text.strip()} | (set() if drawn.calls else {drawn.content}):
            self._by_text.setdefault(spelled, []).append(drawn)

    @property
    def may_be_at_fault(self) -> bool:
        """Whether the policy did something that a program may not be able to bear."""
        bad = (CallStatus.MALFORMED, CallStatus.UNKNOWN_TOOL, CallStatus.BAD_ARGUMENTS)
        steps = [drawn.step for drawn in self.drawn]
        return any(step.stop_reason is StopReason.LENGTH or step.call_status in bad for step in steps)

    def contexts(self) -> list[list[GivenAction]]:
        """The actions of every context, each in all contexts that hold it.

        They stand in the order of their last actions, so that the latest action is the last one; where requests are
        under way at the same time, in the order of their ids, which does not depend on arrival.
        """
        parents = {drawn.place.parent for drawn in self.drawn}
        paths = [[*drawn.place.path, drawn] for drawn in self.drawn if drawn not in parents]
        if self._agent.parallel:
            paths.sort(key=lambda path: [*path[-1].place.ids, *path[-1].action.token_ids])
        return paths

    def _read(self, chat_request: ChatRequest) -> tuple[list[Message], list[GivenAction | None]]:
        """The messages, escaped but for earlier answers, and for each of the assistant's the answer that it is."""
        messages = list[Message]()
        answers = list[GivenAction | None]()
        call_ids = set[str]()
        answer: GivenAction | None = None
        for message in chat_request.messages:
            role = message.role
            text = self._chat.escape(message.text)
            if role == "assistant":
                answer = self._earlier(message, answer)
                call_ids = {call.id for call in message.calls}
                text = self._again(answer, message) if answer else self._chat.escape(_spelled(message))
                self.counts.unknown += answer is None
                answers.append(answer)
            elif role == "tool":
                if message.call_id not in call_ids and (call_ids or not answers):
                    problem = f"the result of {message.call_id[:80]!r}, a call that nobody made"
                    raise Refused(f"messages: {problem} in the assistant's last message", "messages")
                if answer and answer.problem and not answer.step.calls:  # the agent takes it for a call that failed
                    answer.step = replace(answer.step, calls=[_MALFORMED])
            messages.append((role, text))
        if messages[-1][0] == "assistant":
            raise Refused("messages: the last one is the assistant's, and the policy begins its own", "messages")
        return messages, answers

    def _earlier(self, message: ChatMessage, parent: GivenAction | None) -> GivenAction | None:
        """The answer that a message of the assistant is; of several with one text the one behind `parent`."""
        if message.calls:
            calls = [(call.id, call.name, object_of(call.spelled)) for call in message.calls]
            answer = self._by_call.get(calls[0][0])
            return answer if answer and calls == [(name, *call) for name, call in answer.calls] else None
        same = self._by_text.get(message.text.strip(), [])
        children = [drawn for drawn in same if drawn.place.parent is parent]
        return min(children or same, key=lambda drawn: drawn.action.token_ids, default=None)

    def _again(self, answer: GivenAction, message: ChatMessage) -> str:
        """An earlier answer as the template takes it: whole, or as it came without its thought."""
        came = bool(message.thought) or answer.thought in message.text
        if self._agent.history == "sampled" or came:
            return answer.said
        return answer.said.partition(_THOUGHT_END)[2]

    def _tokens(self, place: Position, tools: Tools, answers: Sequence[GivenAction | None]) -> Encoded:
        """The tokens behind the parent's action, or of the whole prompt, with earlier answers as they were sampled."""
        parent = place.parent
        replies, role = _replies(place.messages)
        covered = parent.place.turns + 1 if parent else 0
        self.counts.shown += sum(len(answer.action.token_ids) for answer in answers if answer)
        self.counts.kept += sum(len(answer.action.token_ids) for answer in answers[:covered] if answer)
        closed = not parent or parent.action.token_ids[-1] == self._chat.end_id
        if parent and role and covered == len(answers):
            return self._chat.after(parent.closed, place.text, replies, role, closed=closed)
        history = place.text
        frame = list[Piece]()
        if role and len(answers) > self._example_turns and not parent:
            history, frame = self._chat.split_history(place.text, replies, role)
        parts = [
            Encoded([self._chat.end_id][closed:], [int(Source.TEMPLATE)][closed:]),
            *self._spliced(place, tools, answers, slice(len(parent.closed) if parent else 0, len(history))),
            self._chat.encode(frame, self._chat.end_mark),
        ]
        return Encoded([*chain(*(part.ids for part in parts))], [*chain(*(part.source for part in parts))])

    def _spliced(
        self, place: Position, tools: Tools, answers: Sequence[GivenAction | None], span: slice
    ) -> Iterator[Encoded]:
        """The tokens of a span of a rendering, and an answer in it as its ids; one that is rewritten is text."""
        source = Source.OBSERVATION if place.parent else Source.PROMPT
        left_mark = self._chat.end_mark if place.parent else None
        queue = [answer for answer in answers if answer]
        stop = 0
        for number, text in enumerate(self._pieces(place, tools, answers)):
            start = stop
            stop += len(text)
            while number % 2 and queue and queue[0].said != text:
                queue.pop(0)
            if number % 2 and queue and span.start <= start and stop <= span.stop:
                action = queue.pop(0).action
                ids = _without_end(action)
                self.counts.kept += len(action.token_ids)
                yield Encoded(ids, [source] * len(ids))
                left_mark = ""
            elif part := text[max(0, span.start - start) : max(0, span.stop - start)]:
                yield self._chat.encode([Piece(part, source)], left_mark)
                left_mark = ""

    def _pieces(self, place: Position, tools: Tools, answers: Sequence[GivenAction | None]) -> list[str]:
        """The text of a rendering, with earlier answers at odd places, or as one where they cannot be told apart."""
        rendering = place.text.translate(_UNMARKED)
        if not any(answers):
            return [rendering]
        answer = iter(answers)
        messages = [
            (role, f"{_OPEN}{text}{_CLOSE}") if role == "assistant" and next(answer) else (role, text)
            for role, text in place.messages
        ]
        pieces = [piece.translate(_UNMARKED) for piece in _ANSWER.split(self._chat.template.render(messages, tools))]
        return pieces if "".join(pieces) == place.text else [rendering]

    def _cut(self, action: Action, stops: Sequence[str]) -> Action:
        """An action up to the token that completes a stop string; the same one where none does."""
        ids = _without_end(action)
        decode = self._chat.decode
        if not any(stop in decode(ids) for stop in stops):
            return action
        length = bisect(range(len(ids)), False, key=lambda count: any(stop in decode(ids[:count]) for stop in stops))
        return Action(token_ids=ids[:length], logprobs=action.logprobs[:length], stop_reason=StopReason.STOP)


def _without_end(action: Action) -> list[int]:
    return action.token_ids[:-1] if action.stop_reason is StopReason.END else action.token_ids


class _Reply(NamedTuple):
    """An action's text as the client sees it."""

    thought: str
    content: str
    calls: Sequence[ParsedCall]
    stray: bool  # whether tags without their meaning stand in it, as text


def _named(name: str, calls: Sequence[ParsedCall]) -> list[tuple[str, ParsedCall]]:
    """The calls of an action, each with the id by which a client answers it."""
    return [(f"call_{name}{at}", call) for at, call in enumerate(calls)]


def _reply(text: str, parsed: ParsedAction, chat_request: ChatRequest, stop: str | None) -> _Reply:
    visible = text.partition(stop)[0] if stop else text
    thought, rest = _apart(visible)
    if parsed.problem and any(tag in rest for tag in TAGS):
        return _Reply("", visible.strip(), [], stray=True)
    calls = [] if chat_request.choice.kind == "none" or parsed.problem else parsed.calls
    return _Reply(thought, (_without_calls(rest) if calls else rest).strip(), calls, stray=False)


def _meets(reply: _Reply, chat_request: ChatRequest, tools: Offered) -> bool:
    """Whether an action has the calls and the form that its request demands."""
    choice = chat_request.choice
    if choice.kind == "required":
        return bool(reply.calls) and all(call.tool == (choice.tool or call.tool) for call in reply.calls)
    if tools.form is None or reply.calls:
        return True
    value = object_of(reply.content)
    return value is not None and tools.form.fits(value)


def _replies(messages: Sequence[Message]) -> tuple[list[str], Answering | None]:
    """The messages behind the assistant's last one, and their role, where it is one that answers an action."""
    tail = list(takewhile(lambda message: message[0] != "assistant", messages[::-1]))[::-1]
    roles = {role for role, _ in tail}
    return [text for _, text in tail], "tool" if roles == {"tool"} else "user" if roles == {"user"} else None


def _spelled(message: ChatMessage) -> str:
    """A message of the assistant that the policy did not sample, with its calls in text."""
    calls = [ParsedCall(call.name, object_of(call.spelled) or {}) for call in message.calls]
    return "\n".join(filter(None, (message.text, hermes(calls))))


def _first(stops: Sequence[str], text: str) -> str:
    """The stop string with which a text ends first."""
    return min(stops, key=lambda stop: len(text.partition(stop)[0]))


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
    statuses = []
    for call in calls:
        check = tools.arguments.get(call.tool)
        fits = check is not None and check.fits(call.arguments)
        status = CallStatus.OK if fits else CallStatus.BAD_ARGUMENTS if check else CallStatus.UNKNOWN_TOOL
        statuses.append(Call(tool=call.tool, arguments=canonical(call.arguments), status=status))
    return statuses
