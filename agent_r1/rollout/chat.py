"""The one renderer of conversations: warm start, training and evaluation all take their tokens from here.

Only a chat template's own text and sampled tokens may be added tokens (law 3).
"""

from __future__ import annotations

import hashlib
import json
import logging
import re
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any, TypeVar

from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerFast

from agent_r1.envs.base import TAGS
from agent_r1.records import Source
from agent_r1.rollout.template import ACTION, OBSERVATION, OPENING, SAMPLE_TOOL, Message, Template, Tools

S = TypeVar("S", str, Sequence[int])

logger = logging.getLogger(__name__)

FIRST_ESCAPE = 0x10FF00  # private use, and the last of it: a text that holds these characters loses nothing but them
_THOUGHT, _THOUGHT_END = "<think>", "</think>"
_OPENED = re.compile(rf"{_THOUGHT}\s*\Z")
_TAIL = 32  # tokens at the end of a context among which an opened thought is
_SAMPLE_ACTIONS = ("<think>a</think>b", "c")  # a template that rewrites thoughts shows itself on the first
_SAMPLE_OBSERVATIONS = ("A: b.\nC: d.", "e")


@dataclass(frozen=True, slots=True)
class Encoded:
    """Token ids and where each came from."""

    ids: list[int]  # [T]
    source: list[int]  # [T] values of Source
    restarts: bool = False  # a context of its own; else appended to the one before


@dataclass(frozen=True, slots=True)
class Piece:
    """A stretch of a rendered conversation, all of one source."""

    text: str
    source: Source


class Codec:
    """Encodes and decodes rendered conversations. A *mark* is the text of an added token: a message mark or a tag.

    Marks become their tokens, and what lies between two of them is encoded as one by a copy of the tokenizer without
    added tokens, so the ids are those of the tokenizer itself. A text whose marks must stay text is escaped before it
    is put into the template: the first character of each is replaced by one that no template and no tokenizer knows,
    and that comes back when the text is encoded. So a template may cut, strip and quote what it is given.

    Raises ValueError if the tokenizer has no other tokens than added ones for a character.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerFast) -> None:
        self._tokenizer = tokenizer
        state = json.loads(tokenizer.backend_tokenizer.to_str())
        plain = {**state, "added_tokens": [], "post_processor": None, "truncation": None}
        self._plain = Tokenizer.from_str(json.dumps(plain))
        self._mark_of = {index: str(token) for index, token in tokenizer.added_tokens_decoder.items()}
        self._id_of = {mark: index for index, mark in self._mark_of.items()}
        marks = "|".join(map(re.escape, sorted(self._id_of, key=len, reverse=True)))
        self._mark = re.compile(f"({marks or '(?!)'})")  # in a group: a split text then has the marks at odd places
        heads = sorted({mark[0] for mark in self._id_of})
        self._escaped = {head: chr(FIRST_ESCAPE + number) for number, head in enumerate(heads)}
        self._unescaped = str.maketrans({escape: head for head, escape in self._escaped.items()})
        for text in (chr(FIRST_ESCAPE), *self._id_of):  # refused here, and not by a passage
            list(self._read(text))

    def escape(self, text: str, but: Collection[str] = ()) -> str:
        """The text, of the same length, without a mark in it `but` those given."""

        def escaped(found: re.Match[str]) -> str:
            mark = found[0]
            return mark if mark in but else self._escaped[mark[0]] + mark[1:]

        while (other := self._mark.sub(escaped, text)) != text:
            text = other
        return text

    def escape_all(self, value: Any) -> Any:
        """A value of JSON with all of its texts escaped, names of fields too."""
        match value:
            case str():
                return self.escape(value)
            case dict():
                return {self.escape(name): self.escape_all(each) for name, each in value.items()}
            case list() | tuple():
                return [self.escape_all(each) for each in value]
        return value

    def write(self, ids: Sequence[int]) -> str:
        """The text of sampled tokens: added tokens as marks, and marks that were spelled out escaped."""
        runs = groupby(ids, key=self._mark_of.get)
        return "".join(
            self.escape(self.decode(list(run))) if mark is None else mark * len(list(run)) for mark, run in runs
        )

    def encode(self, pieces: Sequence[Piece]) -> Encoded:
        """The tokens of consecutive pieces; a token across two of them is OBSERVATION if one of them is."""
        tokens = list(self._tokens(pieces))
        return Encoded([index for index, _ in tokens], [source for _, source in tokens])

    def encode_sampled(self, text: str) -> list[int]:
        """The token ids that a policy would sample to write `text`, marks as added tokens."""
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False)
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        """Token ids as text, special tokens included."""
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False))

    def _tokens(self, pieces: Sequence[Piece]) -> Iterator[tuple[int, Source]]:
        plain: list[Piece] = []  # since the last mark
        for piece in pieces:
            for number, text in enumerate(self._mark.split(piece.text)):
                if number % 2 == 0:
                    plain.append(Piece(text, piece.source))
                else:
                    yield from self._plain_tokens(plain)
                    yield self._id_of[text], piece.source
                    plain = []
        yield from self._plain_tokens(plain)

    def _plain_tokens(self, pieces: Sequence[Piece]) -> Iterator[tuple[int, Source]]:
        text = "".join(piece.text for piece in pieces).translate(self._unescaped)
        source = [piece.source for piece in pieces for _ in piece.text]  # per character
        for index, start, stop in self._read(text):
            touched = source[start:stop] or source[:1]
            yield index, Source.OBSERVATION if Source.OBSERVATION in touched else touched[0]

    def _read(self, text: str) -> Iterator[tuple[int, int, int]]:
        """The tokens of a text without the added ones, and the characters of each.

        A tokenizer's model may have marks in its own vocabulary; what it takes for one is read letter by letter.
        """
        try:
            encoding = self._plain.encode(text, add_special_tokens=False)
        except TypeError:  # of a text that is none
            raise ValueError(f"a text holds half of a character, which UTF-8 cannot write: {text[:80]!a}") from None
        for index, (start, stop) in zip(encoding.ids, encoding.offsets, strict=True):
            if index not in self._mark_of:
                yield index, start, stop
            elif len(text) == 1:
                raise ValueError(
                    f"the tokenizer {self._tokenizer.name_or_path!r} reads the text {text!r} as its added token "
                    f"{self._mark_of[index]!r}; use a tokenizer that has bytes for characters it does not know"
                )
            else:
                for at in range(start, stop):
                    yield from ((letter, at, at + 1) for letter, _, _ in self._read(text[at]))


class Chat(Codec):
    """Turns conversations into token ids as the tokenizer's own chat template writes them.

    Only the template's text and what the policy sampled can be added tokens (message marks, tags). Everything else,
    such as questions, passages, tools and their output, stays text. A template that knows no system messages, tools or
    tool messages is given them in messages that it knows; see `agent_r1.rollout.template.Dialect`.

    Raises ValueError if the tokenizer has no chat template, or the template has no generation prompt, does not close
    the assistant's message with an added token, or gives other token ids than its messages one by one; the message
    names the first span that differs.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerFast) -> None:
        self.template = Template(tokenizer)
        super().__init__(tokenizer)
        after = self.template.after_action
        end = self._mark.match(after)
        if end is None:
            raise ValueError(
                f"the chat template has no end token: the assistant's text is followed by {after[:40]!r}, which does "
                "not begin with an added token of the tokenizer; use a template that closes messages with one"
            )
        self.end_mark = end[0]
        self.end_id = self._id_of[self.end_mark]
        self._frames = {1: after.removeprefix(self.end_mark).split(OBSERVATION)}
        self._check_sample()

    def encode_action(self, text: str, context: Sequence[int] = ()) -> list[int]:
        """The token ids that a policy would sample to write `text`: tags as added tokens, the end token last.

        What is escaped in it stays text. Where the context has opened a thought the policy goes on behind its tag, or,
        without a thought, closes it.
        """
        if self.opened(context):
            text = text.removeprefix(_THOUGHT) if text.startswith(_THOUGHT) else _THOUGHT_END + text
        return [*self.encode([Piece(text, Source.ACTION)]).ids, self.end_id]

    def escape_action(self, text: str) -> str:
        """The text of an action that nobody sampled: of the marks in it, only an action's tags are left."""
        return self.escape(text, but=TAGS)

    def opened(self, context: Sequence[int]) -> str:
        """The part of the next action that its context has written: a thought's opening tag and blanks, or ""."""
        found = _OPENED.search(self.decode(context[-_TAIL:]))
        return found[0] if found else ""

    def frames(self, observations: int) -> list[str]:
        """The template's text around so many observations of one action: before, between and after them.

        Raises ValueError if the template does not write each of them once, in their order.
        """
        if observations not in self._frames:
            several: list[Message] = [("tool", f"{OBSERVATION}{number}\u2063") for number in range(observations)]
            whole = self.template.render([*OPENING, ("assistant", ACTION), *several], [SAMPLE_TOOL])
            rest = whole.partition(ACTION)[2].removeprefix(self.end_mark)
            found = re.split(rf"{OBSERVATION}(\d+)\u2063", rest)
            if found[1::2] != list(map(str, range(observations))):
                raise ValueError(
                    f"the chat template does not write {observations} tool messages one after the other; set "
                    "env.parallel_calls: 1"
                )
            self._frames[observations] = found[::2]
        return self._frames[observations]

    def prompt_hash(self, system: str, tools: Tools = ()) -> str:
        """Identifies everything in a prompt but the user's message: system message, tools and template."""
        content = [system, self.template.render(OPENING, tools), *self.frames(1)]
        return hashlib.sha256(json.dumps(content).encode()).hexdigest()

    def _check_sample(self) -> None:
        """Compares the contexts of a conversation of two steps with the template's own, id for id."""
        dialogue = Dialogue(self, "Be brief.", "Who is it?", [SAMPLE_TOOL])
        context = dialogue.opening.ids
        self._compare(context, dialogue.text)
        rewritten: list[str] = []
        for text, observation in zip(_SAMPLE_ACTIONS, _SAMPLE_OBSERVATIONS, strict=True):
            action = self.encode_action(text, context)
            before = dialogue.text + self.write(action[:-1]) + self.end_mark
            reply = dialogue.reply(action, [observation], closed=True)
            if reply.restarts:
                rewritten.append("{!r} becomes {!r}".format(*_first_difference(before, dialogue.text)))
            context = reply.ids if reply.restarts else [*context, *action, *reply.ids]
            self._compare(context, dialogue.text)
        if rewritten:
            logger.warning(
                "the chat template rewrites what was said: %s; a step after which it does starts a new context, and "
                "costs the tokens of that history once more",
                rewritten[0],
            )

    def _compare(self, found: Sequence[int], rendered: str) -> None:
        expected = self.encode_sampled(rendered)
        if list(found) != expected:
            theirs, ours = _first_difference(expected, found)
            raise ValueError(
                f"the chat template gives other tokens than its messages one by one: {self.decode(theirs)!r} against "
                f"{self.decode(ours)!r}; use a tokenizer that reads the text between two message marks for itself"
            )


def _first_difference(left: S, right: S, around: int = 24) -> tuple[S, S]:
    """The spans of two sequences around the first place where they differ."""
    shared = zip(left, right, strict=False)
    at = next((at for at, (one, other) in enumerate(shared) if one != other), min(len(left), len(right)))
    span = slice(max(0, at - around), at + around)
    return left[span], right[span]


class Dialogue:
    """One conversation. Its contexts are what the template renders of it, where possible by appending.

    The template's rendering decides: where it begins with all that was there before, followed by the action and the
    end token, the rest of it is appended. Where it does not (a template may drop old thoughts or trim what was said),
    a new context holds all of it.
    """

    def __init__(self, chat: Chat, system: str, user: str, tools: Tools = ()) -> None:
        escape = chat.escape
        self._chat = chat
        self._tools: Tools = chat.escape_all(tools)
        self._messages: list[Message] = [("system", escape(system)), ("user", escape(user))]
        self.text = chat.template.render(self._messages, self._tools)  # of the current context, escaped
        self.opening = chat.encode([Piece(self.text, Source.PROMPT)])

    def reply(self, action: Sequence[int], observations: Sequence[str], *, closed: bool) -> Encoded:
        """The tokens between an action, as sampled, and the next one: OBSERVATION, and TEMPLATE around them.

        Where the action is not `closed` by the end token, that comes first, as TEMPLATE. In a new context the history
        before them is PROMPT: none of its tokens was sampled here.
        """
        chat = self._chat
        said, replies = chat.write(action[:-1] if closed else action), [*map(chat.escape, observations)]
        self._messages += [("assistant", said), *(("tool", each) for each in replies)]
        before = self.text + said + chat.end_mark
        self.text = chat.template.render(self._messages, self._tools)
        if not self.text.startswith(before):
            history, rest = self._split_history(replies)
            return replace(chat.encode([Piece(history, Source.PROMPT), *self._framed(rest, replies)]), restarts=True)
        tokens = chat.encode(self._framed(self.text[len(before) :], replies))
        if not closed:
            tokens = Encoded([chat.end_id, *tokens.ids], [Source.TEMPLATE, *tokens.source])
        return tokens

    def _split_history(self, replies: Sequence[str]) -> tuple[str, str]:
        """The text before the latest observations, and the rest; all of it where they cannot be found."""
        first, *_, last = self._chat.frames(len(replies))
        wanted = first if len(replies) == 1 else first + replies[0].strip()
        start = self.text.rfind(wanted, 0, len(self.text) - len(last))
        return (self.text[:start], self.text[start:]) if start >= 0 else (self.text, "")

    def _framed(self, text: str, replies: Sequence[str]) -> list[Piece]:
        """The observations and the template's text around them."""
        first, *between, last = self._chat.frames(len(replies))
        whole = [Piece(text, Source.OBSERVATION)]  # of a template that frames these as it frames no others
        if not text.startswith(first):
            return whole
        pieces, rest = [Piece(first, Source.TEMPLATE)], text[len(first) :]
        for said, frame in zip(replies[:-1], between, strict=True):
            shown = next((each for each in (said, said.strip()) if rest.startswith(each + frame)), None)
            if shown is None:
                return whole
            pieces += [Piece(shown, Source.OBSERVATION), Piece(frame, Source.TEMPLATE)]
            rest = rest[len(shown) + len(frame) :]
        if not rest.endswith(last):
            return whole
        return [*pieces, Piece(rest.removesuffix(last), Source.OBSERVATION), Piece(last, Source.TEMPLATE)]
