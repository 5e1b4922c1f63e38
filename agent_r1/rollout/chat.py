"""The one renderer of conversations: warm start, training and evaluation all take their tokens from here.

Only a chat template's own text and sampled tokens may be added tokens (law 3).
"""

from __future__ import annotations

import hashlib
import json
import logging
import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cached_property
from itertools import zip_longest
from typing import TYPE_CHECKING, Literal, Self, TypeVar

from agent_r1.envs.base import TAGS, Conversation, Env, Restart
from agent_r1.envs.conversations import require_tools
from agent_r1.records import Source
from agent_r1.rollout.calls import CallForm, is_hermes, types_of
from agent_r1.rollout.codec import (
    ACTION,
    OBSERVATION,
    OPENING,
    SAMPLE_TOOL,
    Codec,
    Dialect,
    Encoded,
    Message,
    Piece,
    Template,
    Tools,
)

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

S = TypeVar("S", str, Sequence[int])
Answering = Literal["tool", "user"]  # the role of observations

logger = logging.getLogger(__name__)

_THOUGHT = "<think>"
_THOUGHT_END = "</think>"
_CALL = "<tool_call>"
_OPENED = re.compile(rf"{_THOUGHT}\s*\Z")
_TAIL = 32  # tokens at the end of a context among which an opened thought is
_SAMPLE_ACTIONS = ("<think>a</think>b", "c")  # a template that rewrites thoughts shows itself on the first
_SAMPLE_OBSERVATIONS = ("A: b.\nC: d.", "e")
_PLAIN = Dialect(tools=False, observations=False, later=False, rows=False)  # messages that every chat template takes


class Chat(Codec):
    """Turns conversations into token ids as the tokenizer's own chat template writes them.

    Only the template's text and the sampled text can be added tokens (message marks, tags). Everything else, such as
    questions, passages, tools and their output, stays text. A template that knows no system messages, tools or tool
    messages gets them in messages that it knows; see `agent_r1.rollout.codec.Dialect`. An environment without tools
    answers as a user does, in one user message.

    An action ends with any token of `end_ids`: the template's own and the model's others.

    Raises ValueError if the tokenizer has no chat template, or the template has no generation prompt, does not close
    the assistant's message with an added token, or gives other token ids than its messages one by one; the message
    names the first span that differs.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerFast, ends: Sequence[int] = ()) -> None:
        """`ends` are the model's own end tokens, see `agent_r1.pretrained.end_tokens`."""
        self.template = Template(tokenizer)
        super().__init__(tokenizer)
        frame = self.template.after_action
        end = self._mark.match(frame.lstrip())
        if end is None:
            raise ValueError(
                f"the chat template has no end token: the assistant's text is followed by {frame[:40]!r}, which does "
                "not begin with an added token of the tokenizer; use a template that closes messages with one"
            )
        self.end_mark = end[0]
        self.end_id = self._id_of[self.end_mark]
        self.end_ids = list(dict.fromkeys([self.end_id, *ends]))
        self.calls = _call_form(self.template, self.end_mark, hermes=_CALL in self._id_of)
        frame = self.template.after_action  # tools may be told in words now
        self._frames: dict[tuple[Answering, int], list[str]] = {
            ("tool", 1): frame.lstrip().removeprefix(self.end_mark).split(OBSERVATION)
        }
        rewritings = [*self._check_sample([SAMPLE_TOOL]), *self._check_sample(())]
        self.rewrites = next(iter(rewritings), "")  # the first one, in words
        if self.rewrites:
            logger.warning(
                "the chat template rewrites earlier messages: %s; a step after which it does starts a new context, and "
                "costs the tokens of that history once more",
                self.rewrites,
            )

    def encode_action(self, text: str, context: Sequence[int] = ()) -> list[int]:
        """The token ids that a policy would sample to write `text`: tags as added tokens, the end token last.

        Escaped marks stay text. If the context has opened a thought, the action goes on behind the tag, or, without a
        thought, closes it.
        """
        if self.opened(context):
            text = text.removeprefix(_THOUGHT) if text.startswith(_THOUGHT) else _THOUGHT_END + text
        text = self.calls.native(text) if self.calls else text
        return [*self.encode([Piece(text, Source.ACTION)]).ids, self.end_id]

    def escape_action(self, text: str) -> str:
        """The text of an action that was not sampled, with all marks escaped but an action's tags."""
        return self.escape(text, but=TAGS)

    def understood(self, action: str, tools: Tools) -> str:
        """A decoded action as environments read it: calls in the model's own form become Hermes'."""
        return self.calls.read(action, types_of(tools)) if self.calls else action

    def opened(self, context: Sequence[int]) -> str:
        """The part of the next action that its context has written: a thought's opening tag and blanks, or ""."""
        opening = _OPENED.search(self.decode(context[-_TAIL:]))
        return opening[0] if opening else ""

    def frames(self, observations: int, role: Answering = "tool") -> list[str]:
        """The template's text around an action's observations; ValueError if it does not write each once, in order."""
        if (role, observations) not in self._frames:
            several: list[Message] = [(role, f"{OBSERVATION}{number}\u2063") for number in range(observations)]
            tools: Tools = [SAMPLE_TOOL] if role == "tool" else ()
            text = self.template.render([*OPENING, ("assistant", ACTION), *several], tools)
            rest = text.partition(ACTION)[2].lstrip().removeprefix(self.end_mark)
            parts = re.split(rf"{OBSERVATION}(\d+)\u2063", rest)
            if parts[1::2] != list(map(str, range(observations))):
                raise ValueError(
                    f"the chat template does not write {observations} {role} messages one after the other; set "
                    "env.parallel_calls: 1"
                    if role == "tool"
                    else "the chat template does not write a user message after an action once; use another template"
                )
            self._frames[role, observations] = parts[::2]
        return self._frames[role, observations]

    def after(
        self, context: str, text: str, replies: Sequence[str], role: Answering, *, closed: bool, restarts: bool = False
    ) -> Encoded:
        """The tokens between an action and the next one: OBSERVATION, and TEMPLATE around them.

        `context` goes up to the action's end, `text` is the whole rendering and `replies` its last messages, of one
        role. If the action is not `closed` by the template's end token, that token comes first, as TEMPLATE. A new
        context begins if it `restarts` or the rendering does not go on from `context`; the history there is PROMPT.
        """
        if restarts or not text.startswith(context):
            history, framed = self.split_history(text, replies, role)
            return replace(self.encode([Piece(history, Source.PROMPT), *framed], None), restarts=True)
        tokens = self.encode(self._framed(text[len(context) :], replies, role), self.end_mark)
        if not closed:
            tokens = Encoded([self.end_id, *tokens.ids], [Source.TEMPLATE, *tokens.source])
        return tokens

    def split_history(self, text: str, replies: Sequence[str], role: Answering) -> tuple[str, list[Piece]]:
        """The text before the last messages, and those with the text around them; all of it if they are not found."""
        if not replies:
            return text, []
        first, *_, last = self.frames(len(replies), role)
        opening = first if len(replies) == 1 else first + replies[0].strip()
        start = text.rfind(opening, 0, len(text) - len(last))
        return (text[:start], self._framed(text[start:], replies, role)) if start >= 0 else (text, [])

    def plain(self, messages: Sequence[Message], tools: Tools) -> list[Message]:
        """Escaped messages for a model with another template; schemas end the system's text, tools answer as users."""
        put, _ = _PLAIN.put(messages, tools)
        conversation = [(role, self.unescape(text)) for role, text in put]
        return [(role, self.understood(text, tools) if role == "assistant" else text) for role, text in conversation]

    def _framed(self, text: str, replies: Sequence[str], role: Answering) -> list[Piece]:
        """The observations and the template's text around them."""
        first, *between, last = self.frames(len(replies), role)
        unframed = [Piece(text, Source.OBSERVATION)]  # for a template that frames these unlike any others
        if not text.startswith(first):
            return unframed
        pieces = [Piece(first, Source.TEMPLATE)]
        rest = text[len(first) :]
        for number, frame in enumerate(between):
            reply = replies[number]
            stops = [len(variant) for variant in (reply, reply.strip()) if rest.startswith(variant + frame)]
            if rest.count(frame) == between[number:].count(frame):  # no observation holds one that looks like it
                stops = [rest.index(frame)]
            if not stops:
                return unframed
            pieces += [Piece(rest[: stops[0]], Source.OBSERVATION), Piece(frame, Source.TEMPLATE)]
            rest = rest[stops[0] + len(frame) :]
        if not rest.endswith(last):
            return unframed
        return [*pieces, Piece(rest.removesuffix(last), Source.OBSERVATION), Piece(last, Source.TEMPLATE)]

    def example_messages(self, examples: Sequence[Conversation], tools: Tools) -> list[Message]:
        """The examples as escaped messages, calls in the model's own form; ValueError for one with other tools."""
        messages = list[Message]()
        for example in examples:
            require_tools(example, tools, "the environment")
            messages.append(("user", self.escape(example.user)))
            for action, observation in zip_longest(example.actions, example.observations):
                native = self.calls.native(action) if self.calls else action
                messages.append(("assistant", self.escape_action(native)))
                if observation is not None:
                    messages.append((answering(tools), self.escape(observation)))
        return messages

    def prompt_hash(self, system: str, tools: Tools = (), examples: Sequence[Conversation] = ()) -> str:
        """Identifies everything in a prompt but the user's message: system message, tools, examples and template."""
        content = [system, self.template.render(OPENING, tools), *self.frames(1, answering(tools))]
        content += [text for message in self.example_messages(examples, tools) for text in message]
        return hashlib.sha256(json.dumps(content).encode()).hexdigest()

    def prompts_hash(self, envs: Sequence[Env]) -> str:
        """Identifies the prompts of opened environments; for a single kind of prompt it is the `prompt_hash`."""
        if not self.template.dialect.tools and any(env.tools for env in envs):
            logger.info("the chat template shows no tools: the system message tells them in words")
        first, *rest = dict.fromkeys(self.prompt_hash(env.system, env.tools, env.examples) for env in envs)
        return hashlib.sha256("".join([first, *rest]).encode()).hexdigest() if rest else first

    def _check_sample(self, tools: Tools) -> Iterator[str]:
        """Compares contexts of a dialogue with the template's own, id for id; yields each rewriting in words."""
        dialogue = Dialogue(self, "Be brief.", "Who is it?", tools)
        context = dialogue.opening.ids
        self._compare(context, dialogue.text)
        for text, observation in zip(_SAMPLE_ACTIONS, _SAMPLE_OBSERVATIONS, strict=True):
            action = self.encode_action(text, context)
            history = dialogue.text + self.write(action[:-1]) + self.end_mark
            reply = dialogue.reply(action, [observation], closed=True)
            if reply.restarts:
                yield "{!r} becomes {!r}".format(*_first_difference(history, dialogue.text))
            context = reply.ids if reply.restarts else [*context, *action, *reply.ids]
            self._compare(context, dialogue.text)

    def _compare(self, context: Sequence[int], rendered: str) -> None:
        expected = self.encode_sampled(rendered)
        if list(context) != expected:
            rendered_ids, context_ids = _first_difference(expected, context)
            raise ValueError(
                f"the chat template gives other tokens than its messages one by one: {self.decode(rendered_ids)!r} "
                f"against {self.decode(context_ids)!r}; use a tokenizer that reads the text between two message marks "
                "for itself"
            )


def _call_form(template: Template, end_mark: str, *, hermes: bool) -> CallForm | None:
    """The form of the model's calls; None if it is the environments' own, `hermes`, or tools are told in words."""
    form = template.call_form(end_mark) if template.dialect.tools else None
    if form is None and template.dialect.tools and not hermes and _CALL not in template.render(OPENING, [SAMPLE_TOOL]):
        template.tell_in_words()
    return form if form and not is_hermes(form) else None


def answering(tools: Tools) -> Answering:
    """The role in which an environment with these tools answers."""
    return "tool" if tools else "user"


def _first_difference(first: S, second: S, around: int = 24) -> tuple[S, S]:
    """The spans of two sequences around the first place where they differ."""
    shared = zip(first, second, strict=False)
    at = next((at for at, (a, b) in enumerate(shared) if a != b), min(len(first), len(second)))
    span = slice(max(0, at - around), at + around)
    return first[span], second[span]


class Dialogue:
    """One conversation. Its contexts are the template's rendering of it, by appending where possible.

    If the rendering begins with the context so far, followed by the action and the end token, its rest is appended. If
    it does not (a template may drop old thoughts or trim messages), or the environment asks for a new context, the new
    context holds the whole rendering.
    """

    def __init__(
        self, chat: Chat, system: str, user: str, tools: Tools = (), examples: Sequence[Conversation] = ()
    ) -> None:
        self._chat = chat
        self._role = answering(tools)
        self._tools: Tools = chat.escape_all(tools)
        self._before: list[Message] = [("system", chat.escape(system)), *chat.example_messages(examples, tools)]
        self._messages: list[Message] = [*self._before, ("user", chat.escape(user))]
        self._native_call = ("", "")
        self.prompt = chat.template.render(self._messages, self._tools)  # the first context, escaped
        self.text = self.prompt  # of the current context

    @classmethod
    def of(cls, chat: Chat, env: Env) -> Self:
        """The conversation that opens in an environment."""
        dialogue = cls(chat, env.system, env.user, env.tools, env.examples)
        dialogue._native_call = (env.example_call, chat.calls.native(env.example_call) if chat.calls else "")
        return dialogue

    @cached_property
    def opening(self) -> Encoded:
        """The tokens of the first context."""
        return self._chat.encode([Piece(self.prompt, Source.PROMPT)], None)

    def reply(
        self, action: Sequence[int], observations: Sequence[str], *, closed: bool, restart: Restart | None = None
    ) -> Encoded:
        """The tokens between an action, as sampled, and the next one: OBSERVATION, and TEMPLATE around them.

        If the action is not `closed` by an end token, or by another than the template's, that one comes first, as
        TEMPLATE. In a new context, as `restart` asks for, the history before the observations is PROMPT: none of its
        tokens was sampled here.
        """
        chat = self._chat
        action_text = chat.write(action[:-1] if closed else action)
        replies = self._escaped(observations)
        self._messages += [("assistant", action_text), *((self._role, reply) for reply in replies)]
        history = self.text + action_text + chat.end_mark
        if restart:
            self._begin_anew(restart)
        self.text = chat.template.render(self._messages, self._tools)
        closed = closed and action[-1] == chat.end_id
        return chat.after(history, self.text, replies, self._role, closed=closed, restarts=restart is not None)

    def messages(self) -> list[Message]:
        """The context for a model with another template; schemas end the system's text, tools answer as the user."""
        return self._chat.plain(self._messages, self._tools)

    def _escaped(self, observations: Sequence[str]) -> list[str]:
        """The observations as messages; a user's are joined into one, because templates refuse two in a row."""
        hermes, native = self._native_call
        if native:
            observations = [text.replace(hermes, native) for text in observations]
        texts = observations if self._role == "tool" else ["\n".join(observations)] * bool(observations)
        return [*map(self._chat.escape, texts)]

    def _begin_anew(self, restart: Restart) -> None:
        """Keeps the system message, the examples, the new user message and the last exchanges."""
        exchanges = self._messages[len(self._before) :]
        begins = [at for at, (role, _) in enumerate(exchanges) if role == "assistant"]
        last = exchanges[begins[-restart.keep :][0] :] if restart.keep else []
        self._messages = [*self._before, ("user", self._chat.escape(restart.user)), *last]
