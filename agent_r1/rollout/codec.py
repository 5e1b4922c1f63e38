"""Conversations as a template's text, and as token ids; its marks and sampled tokens alone are added tokens (law 3)."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from functools import partial
from itertools import groupby, islice, product, takewhile
from typing import TYPE_CHECKING, Any

from jinja2 import TemplateError
from tokenizers import AddedToken, Tokenizer

from agent_r1.envs.base import ParsedCall
from agent_r1.records import Json, Source
from agent_r1.rollout import calls

if TYPE_CHECKING:  # which takes seconds, and who reads a trajectory needs none
    from transformers import PreTrainedTokenizerFast

Message = tuple[str, str]  # role (system, user, assistant or tool) and content
Tools = Sequence[Json]  # JSON schemas in the OpenAI function form
Said = list[Json]  # messages as a template takes them

FENCE = chr(0x10FEFF)  # stands before a text that no context begins with: some tokenizers read a first one otherwise
FIRST_ESCAPE = 0x10FF00  # in the last private-use plane: a text that holds these characters loses nothing but them
# Placeholders for the texts of a conversation: no template writes them, changes them or strips them.
SYSTEM = "\u2063SYSTEM\u2063"
USER = "\u2063USER\u2063"
ACTION = "\u2063ACTION\u2063"
OBSERVATION = "\u2063TOOL\u2063"
_READ_TOGETHER = 1024  # texts
_LONG = 1 << 14  # characters of a text that is read as a batch, since other threads go on meanwhile
# what the code of a template raises on values that it does not expect
TEMPLATE_ERRORS = (TemplateError, ArithmeticError, AttributeError, LookupError, RecursionError, TypeError)
TODAY = datetime(2024, 7, 26)  # for templates that write the date: with the true one no run could be repeated
OPENING: list[Message] = [("system", SYSTEM), ("user", USER)]
SAMPLE: list[Message] = [*OPENING, ("assistant", ACTION), ("tool", OBSERVATION)]
SAMPLE_TOOL = {
    "type": "function",
    "function": {
        "name": calls.NAME,
        "description": "Looks a word up.",
        "parameters": {"type": "object", "properties": {"word": {"type": "string"}}, "required": ["word"]},
    },
}
TOOLS_TEXT = """

# Tools

You may call one of these functions at a time:
<tools>
{schemas}
</tools>

To call one, write
<tool_call>
{{"name": <function-name>, "arguments": <args-json-object>}}
</tool_call>"""

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Encoded:
    """Token ids and where each came from."""

    ids: list[int]  # [T]
    source: list[int]  # [T] values of Source
    restarts: bool = False  # begins a new context; else appended to the one before


@dataclass(frozen=True, slots=True)
class Piece:
    """A stretch of a rendered conversation, all of one source."""

    text: str
    source: Source


class Codec:
    """Encodes and decodes rendered conversations. A *mark* is the text of an added token: a message mark or a tag.

    Added tokens of blanks alone are no marks, but text. Marks become their tokens, and swallow the blanks beside them
    where the tokenizer says so. The text between two marks is encoded as one by a copy of the tokenizer without marks,
    so the ids are those of the tokenizer itself. A text whose marks must stay text is escaped before it is put into the
    template: a character that no template and no tokenizer knows replaces the first one of each mark until the text is
    encoded. So a template may cut, strip and quote its texts.

    Raises ValueError if the tokenizer has only added tokens for a character.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerFast) -> None:
        self.tokenizer = tokenizer
        self._plain, self._blanks = _plain_tokenizer(tokenizer)
        added = tokenizer.added_tokens_decoder
        self._mark_of = {index: str(token) for index, token in added.items() if index not in self._blanks.values()}
        self._id_of = {mark: index for index, mark in self._mark_of.items()}
        self._swallow_left = {str(token) for token in added.values() if token.lstrip}
        self._swallow_right = {str(token) for token in added.values() if token.rstrip}
        marks = "|".join(map(re.escape, sorted(self._id_of, key=len, reverse=True)))
        self._mark = re.compile(f"({marks or '(?!)'})")  # in a group: a split text then has the marks at odd places
        heads = sorted({mark[0] for mark in self._id_of})
        self._escaped = {head: chr(FIRST_ESCAPE + number) for number, head in enumerate(heads)}
        self._unescaped = str.maketrans({escape: head for head, escape in self._escaped.items()} | {FENCE: "\ufffd"})
        self.longest = max(map(len, tokenizer.get_vocab()))  # characters of a token
        for text in (chr(FIRST_ESCAPE), *self._id_of):  # a tokenizer is refused now, and not at a passage
            list(self._read(text))

    def escape(self, text: str, but: Collection[str] = ()) -> str:
        """The text, of the same length, without a mark in it `but` those given."""

        def escaped(match: re.Match[str]) -> str:
            mark = match[0]
            return mark if mark in but else self._escaped[mark[0]] + mark[1:]

        last = ""
        while text != last:
            last = text
            text = self._mark.sub(escaped, text)
        return text

    def unescape(self, text: str) -> str:
        """The text before it was escaped."""
        return text.translate(self._unescaped)

    def escape_all(self, value: Any) -> Any:
        """A value of JSON with all of its texts escaped, names of fields too."""
        match value:
            case str():
                return self.escape(value)
            case dict():
                return {self.escape(name): self.escape_all(part) for name, part in value.items()}
            case list() | tuple():
                return [self.escape_all(part) for part in value]
        return value

    def write(self, ids: Sequence[int]) -> str:
        """The text of sampled tokens: added tokens as marks, and marks that were spelled out escaped."""
        runs = groupby(ids, key=self._mark_of.get)
        return "".join(self._spelled(list(run)) if mark is None else mark * len(list(run)) for mark, run in runs)

    def encode(self, pieces: Sequence[Piece], left_mark: str | None = "") -> Encoded:
        """The tokens of consecutive pieces; a token across two of them is OBSERVATION if one of them is.

        They stand behind `left_mark`, or within a context; None says that a context begins with them.
        """
        tokens = list(self._tokens(pieces, left_mark))
        return Encoded([index for index, _ in tokens], [source for _, source in tokens])

    def lengths(self, texts: Iterable[str]) -> Iterator[int]:
        """The number of tokens of each text, which begins a context; equal stretches of several texts are read once.

        All cores read. A mark that a text spells out may count as one token, where the vocabulary has it too.
        """
        rest = iter(texts)
        while rows := [list(self._stretches(text)) for text in islice(rest, _READ_TOGETHER)]:
            distinct = list({stretch for row in rows for stretch in row})
            read = self._plain.encode_batch_fast(distinct, add_special_tokens=False)
            counts = dict(zip(distinct, map(len, read), strict=True))
            yield from (sum(counts[stretch] for stretch in row) for row in rows)

    def encode_sampled(self, text: str) -> list[int]:
        """The token ids that a policy would sample to write `text`, marks as added tokens."""
        ids: list[int] = self.tokenizer.encode(text, add_special_tokens=False)
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        """Token ids as text, special tokens included."""
        return str(self.tokenizer.decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False))

    def _spelled(self, ids: list[int]) -> str:
        """The escaped text of tokens between two marks, with a blank at its start that a decoder takes for its own."""
        text = self.escape(self.decode(ids))
        if self.encode([Piece(text, Source.ACTION)]).ids == ids:
            return text
        return f" {text}" if self.encode([Piece(f" {text}", Source.ACTION)]).ids == ids else text

    def _tokens(self, pieces: Sequence[Piece], left_mark: str | None) -> Iterator[tuple[int, Source]]:
        plain = list[Piece]()  # since the last mark
        for piece in pieces:
            for number, text in enumerate(self._mark.split(piece.text)):
                if number % 2 == 0:
                    plain.append(Piece(text, piece.source))
                else:
                    yield from self._plain_tokens(plain, left_mark, text)
                    yield self._id_of[text], piece.source
                    plain = []
                    left_mark = text
        yield from self._plain_tokens(plain, left_mark, "")

    def _plain_tokens(self, pieces: Sequence[Piece], left_mark: str | None, mark: str) -> Iterator[tuple[int, Source]]:
        """The tokens between the mark that they stand behind and the next one."""
        text = self.unescape("".join(piece.text for piece in pieces))
        source = [piece.source for piece in pieces for _ in piece.text]  # per character
        read = self._beside(text, left_mark, mark)
        source = source[text.find(read) :]
        for index, start, stop in self._read(read, begins=left_mark is None):
            touched = source[start:stop] or source[:1]
            yield index, Source.OBSERVATION if Source.OBSERVATION in touched else touched[0]

    def _beside(self, text: str, left_mark: str | None, mark: str) -> str:
        """A text without the blanks that the marks beside it swallow."""
        if left_mark in self._swallow_right:
            text = text.lstrip()
        return text.rstrip() if mark in self._swallow_left else text

    def _stretches(self, text: str) -> Iterator[str]:
        """The texts between marks, with FENCE in place of the mark that each but the first stands behind."""
        parts = ["", *self._mark.split(text), ""]
        for left_mark, part, mark in zip(parts[::2], parts[1::2], parts[2::2], strict=False):
            yield FENCE * bool(left_mark) + self._beside(self.unescape(part), left_mark, mark)

    def _read(self, text: str, *, begins: bool = False) -> Iterator[tuple[int, int, int]]:
        """The tokens of a text, none of them added, and their spans; marks of the vocabulary are read by letter."""
        fenced = text if begins else FENCE + text
        try:
            if len(text) > _LONG:
                [encoding] = self._plain.encode_batch([fenced], add_special_tokens=False)
            else:
                encoding = self._plain.encode(fenced, add_special_tokens=False)
        except TypeError:  # the text is not valid Unicode
            raise ValueError(f"a text holds half of a character, which UTF-8 cannot write: {text[:80]!a}") from None
        fence = 0 if begins else 1
        spans = [(max(0, start - fence), max(0, stop - fence)) for start, stop in encoding.offsets[fence:]]
        ids = [self._blanks.get(index, index) for index in encoding.ids[fence:]]
        for index, (start, stop) in zip(ids, spans, strict=True):
            if index not in self._mark_of:
                yield index, start, stop
            elif len(text) == 1:
                raise ValueError(
                    f"the tokenizer {self.tokenizer.name_or_path!r} reads the text {text!r} as its added token "
                    f"{self._mark_of[index]!r}; use a tokenizer that has bytes for characters it does not know"
                )
            else:
                for at in range(start, stop):
                    yield from ((letter, at, at + 1) for letter, _, _ in self._read(text[at]))


@dataclass(frozen=True, kw_only=True, slots=True)
class Dialect:
    """The kinds of messages that a template renders by itself; others are put into messages that it knows."""

    system: bool = True  # else the system text opens the user message
    tools: bool = True  # else their schemas end the system text
    observations: bool = True  # role "tool"; else those of an action are a user message in <tool_response> tags
    later: bool = True  # system messages behind other ones; else they are a user's
    bare: bool = True  # tools without a system message; else an empty one is put before them
    rows: bool = True  # users in a row; else they are one message

    def put(self, messages: Sequence[Message], tools: Tools) -> tuple[list[Message], Tools]:
        """A conversation as the template can take it; the system messages that open it become one."""
        opening = list(takewhile(lambda message: message[0] == "system", messages))
        system = "\n\n".join(text for _, text in opening)
        rest = list(messages[len(opening) :])
        if tools and not self.tools:
            schemas = "\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools)
            system = system + TOOLS_TEXT.format(schemas=schemas)
            tools = ()
        if not self.later:
            rest = [("user" if role == "system" else role, text) for role, text in rest]
        if not self.observations:
            rest = list(self._as_users(rest))
        if opening or system or (tools and not self.bare):
            asks = not self.system and rest[:1] and rest[0][0] == "user"
            first = f"{system}\n\n{rest[0][1]}" if asks else system
            rest = [("system" if self.system else "user", first), *rest[1 if asks else 0 :]]
        return (rest if self.rows else list(self._in_turn(rest))), tools

    def _in_turn(self, messages: Sequence[Message]) -> Iterator[Message]:
        for role, some in groupby(messages, key=lambda message: message[0]):
            if role == "user":
                yield role, "\n\n".join(text for _, text in some)
            else:
                yield from some

    def _as_users(self, messages: Sequence[Message]) -> Iterator[Message]:
        for role, some in groupby(messages, key=lambda message: message[0]):
            if role == "tool":
                yield "user", "\n".join(f"<tool_response>\n{content}\n</tool_response>" for _, content in some)
            else:
                yield from some


class Template:
    """Renders conversations with a tokenizer's chat template; ValueError if it refuses them in every `Dialect`."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast) -> None:
        if not tokenizer.chat_template:
            raise ValueError(
                f"the tokenizer {tokenizer.name_or_path!r} has no chat template; use an instruct model, or set "
                "`chat_template` on the tokenizer and save it again"
            )
        self._tokenizer = tokenizer
        self.dialect = Dialect()  # the start; each kind of message is then tried in turn
        self.dialect = replace(self.dialect, system=self._shows(OPENING, (), SYSTEM))
        self.dialect = replace(self.dialect, tools=self._shows(OPENING, [SAMPLE_TOOL], calls.NAME))
        self.dialect = replace(self.dialect, observations=self._shows([*SAMPLE, *SAMPLE[2:]], (), OBSERVATION))
        self.dialect = replace(self.dialect, later=self._shows([*SAMPLE[:3], ("system", OBSERVATION)], (), OBSERVATION))
        self.dialect = replace(self.dialect, bare=self._shows(OPENING[1:], [SAMPLE_TOOL], calls.NAME))
        self.dialect = replace(self.dialect, rows=self._shows([*OPENING, OPENING[1]], (), USER))
        if self.dialect != Dialect():
            logger.debug("the chat template does not render everything by itself: %s", self.dialect)
        self.after_action = self._after_action()
        self._written = dict[tuple[tuple[str, ...], bool], bool]()  # whether conversations of these roles are

    def require_written(self, messages: Sequence[Message], tools: Tools) -> None:
        """Raises ValueError if the template refuses messages of these roles in this order, or leaves a text out."""
        roles = tuple(role for role, _ in messages)
        key = (roles, bool(tools))
        if key not in self._written:
            text = self.render([(role, f"{USER}{at}\u2063") for at, role in enumerate(roles)], [SAMPLE_TOOL] * key[1])
            in_order = re.findall(f"{USER}(\\d+)\u2063", text) == [str(at) for at in range(len(roles))]
            self._written[key] = in_order and (calls.NAME in text or not tools)
        if not self._written[key]:
            raise ValueError(f"the chat template does not write each of the messages {', '.join(roles)[-200:]}")

    def render(self, messages: Sequence[Message], tools: Tools = (), *, generation_prompt: bool = True) -> str:
        """A conversation as text, up to the assistant's next message. Raises ValueError if the template refuses it."""
        try:
            return self._render(messages, tools, generation_prompt=generation_prompt)
        except TEMPLATE_ERRORS as error:
            raise ValueError(
                f"the chat template refuses a conversation of {', '.join(role for role, _ in messages)}: {error}; "
                "use a model whose template takes user and assistant messages in turn"
            ) from error

    def _render(self, messages: Sequence[Message], tools: Tools, *, generation_prompt: bool = True) -> str:
        conversation, tools = self._put(messages, tools)
        try:
            return self._apply(conversation, list(tools) or None, generation_prompt=generation_prompt)
        except TypeError:
            if tools:
                raise
            # it looks for tools without asking
            return self._apply(conversation, [], generation_prompt=generation_prompt)

    def _put(self, messages: Sequence[Message], tools: Tools) -> tuple[Said, Tools]:
        rows, tools = self.dialect.put(messages, tools)
        return [{"role": role, "content": content} for role, content in rows], tools

    def _apply(self, messages: Said, tools: list[Json] | None, *, generation_prompt: bool = True) -> str:
        text = self._tokenizer.apply_chat_template(
            messages,
            tools=tools,  # type: ignore[arg-type]
            tokenize=False,
            add_generation_prompt=generation_prompt,
            strftime_now=TODAY.strftime,
        )
        return str(text)

    def _shows(self, messages: Sequence[Message], tools: Tools, text: str) -> bool:
        try:
            return text in self._render(messages, tools)
        except TEMPLATE_ERRORS:
            return False

    def call_form(self, end_mark: str) -> calls.CallForm | None:
        """The form in which the template writes calls in messages that `end_mark` closes; None if it writes none."""
        ways = product((False, True), (calls.ID, "functions.{tool}:{at}"))
        return calls.form_of([partial(self._calling, end_mark, *way) for way in ways])

    def _calling(self, end_mark: str, spelled: bool, name_it: str, parsed: Sequence[ParsedCall]) -> str | None:
        """The assistant's text with these calls, behind a text if the template writes both."""
        tool_calls = _tool_calls(parsed, spelled, name_it)
        reply = {"role": "tool", "content": OBSERVATION, "tool_call_id": calls.ID, "name": calls.NAME}
        opening, _ = self._put(OPENING, ())
        for content in (ACTION, ""):
            conversation = [*opening, {"role": "assistant", "content": content, "tool_calls": tool_calls}]
            conversation += [reply.copy() for _ in parsed]
            try:
                text, prompt = (
                    self._apply(messages, [SAMPLE_TOOL]).partition(USER)[2] for messages in (conversation, opening)
                )
            except TEMPLATE_ERRORS:
                continue
            shared = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(text, prompt, strict=False)))
            answer = text.partition(ACTION)[2] if content else text[len(text[:shared].rstrip("<|[")) :]
            answer = answer.partition(end_mark)[0]
            if parsed[0].tool in answer and OBSERVATION not in answer:
                return answer
        return None

    def tell_in_words(self) -> None:
        """From now on tools are told in the system text."""
        self.dialect = replace(self.dialect, tools=False)
        self.after_action = self._after_action()

    def _after_action(self) -> str:
        """The template's text between an action and the next one, with OBSERVATION in it."""
        prompt = self.render(OPENING, [SAMPLE_TOOL])
        sample = self.render(SAMPLE, [SAMPLE_TOOL])
        for text, where in ((SYSTEM, prompt), (USER, prompt), (ACTION, sample), (OBSERVATION, sample)):
            if where.count(text) != 1:
                raise ValueError(
                    f"the chat template writes the text {text.strip(chr(0x2063))!r} {where.count(text)} times; "
                    "use a template that renders every message once"
                )
        history, _, tail = sample.partition(ACTION)
        self._check_generation_prompt(prompt, history)
        return tail

    def _check_generation_prompt(self, prompt: str, history: str) -> None:
        """Requires that a prompt opens the assistant's message as the `history` before one does."""
        prompt_end, history_end = (text.partition(USER)[2].strip() for text in (prompt, history))
        if prompt_end != history_end and prompt == self.render(OPENING, [SAMPLE_TOOL], generation_prompt=False):
            raise ValueError(
                f"the chat template has no generation prompt: it writes {history_end[-40:]!r} before the assistant's "
                f"text, and a prompt ends with {prompt_end[-40:]!r}; use a template that honours add_generation_prompt"
            )


def _plain_tokenizer(tokenizer: PreTrainedTokenizerFast) -> tuple[Tokenizer, dict[int | None, int]]:
    """A copy without marks, and the ids of added blanks by the copy's."""
    state = json.loads(tokenizer.backend_tokenizer.to_str())
    blanks = [token for token in state["added_tokens"] if token["content"].replace("\u2581", " ").isspace()]
    state |= {"added_tokens": blanks, "post_processor": None, "truncation": None, "padding": None}
    plain = Tokenizer.from_str(json.dumps(state))
    plain.add_special_tokens([AddedToken(FENCE, normalized=False)])
    return plain, {plain.token_to_id(token["content"]): token["id"] for token in blanks}


def _tool_calls(parsed: Sequence[ParsedCall], spelled: bool, name_it: str) -> list[Json]:
    """Calls as a template takes them, the arguments `spelled` in JSON or as an object."""
    return [
        {
            "id": name_it.format(tool=call.tool, at=at),
            "type": "function",
            "function": {"name": call.tool, "arguments": json.dumps(call.arguments) if spelled else call.arguments},
        }
        for at, call in enumerate(parsed)
    ]
