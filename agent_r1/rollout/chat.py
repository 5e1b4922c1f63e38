"""The one renderer of conversations: warm start, training and evaluation all take their tokens from here."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

from jinja2 import TemplateError
from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerFast

from agent_r1.records import Source

Messages = Sequence[tuple[str, str]]  # (role, content)
Tools = Sequence[dict[str, Any]]  # JSON schemas in the OpenAI function form

# Placeholders for the texts of a conversation: no template writes them, changes them or strips them.
_SYSTEM, _USER, _ACTION, _OBSERVATION = (
    "\u2063SYSTEM\u2063",
    "\u2063USER\u2063",
    "\u2063ACTION\u2063",
    "\u2063TOOL\u2063",
)

_SAMPLE_TOOL = {
    "type": "function",
    "function": {
        "name": "look_up",
        "description": "Looks a word up.",
        "parameters": {"type": "object", "properties": {"word": {"type": "string"}}, "required": ["word"]},
    },
}
_SAMPLE_ACTIONS = ("<think>a</think>b", "c")  # a template that rewrites thoughts shows itself on the first
_SAMPLE_OBSERVATIONS = ("A: b.\nC: d.", "e")


@dataclass(frozen=True, slots=True)
class Tokens:
    """Token ids and where each came from."""

    ids: list[int]  # [T]
    source: list[int]  # [T] values of Source


@dataclass(frozen=True, slots=True)
class _Piece:
    """A stretch of a rendered conversation."""

    text: str
    given: bool  # put into the template, not written by it


class Chat:
    """Turns conversations into token ids, step by step, as the tokenizer's own chat template writes them.

    Only the template's text can become added tokens (message marks, tags). Everything put into it, such as
    questions, passages and tool output, is encoded by a copy of the tokenizer that has no added tokens.

    Raises:
        ValueError: the tokenizer has no chat template, the template does not close the assistant's message with
            an added token, or a conversation is not the sum of its messages.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerFast) -> None:
        if not tokenizer.chat_template:
            raise ValueError(
                f"the tokenizer {tokenizer.name_or_path!r} has no chat template; use an instruct model, or set "
                "`chat_template` on the tokenizer and save it again"
            )
        self._tokenizer = tokenizer
        self._plain = _without_added_tokens(tokenizer)
        self._added = {str(token): index for index, token in tokenizer.added_tokens_decoder.items()}
        self._added_ids = frozenset(self._added.values())
        self._mark = re.compile("|".join(map(re.escape, sorted(self._added, key=len, reverse=True))) or r"(?!)")
        self.end_id, self._before_observation, self._after_observation = self._derive_reply()
        self._check_sample()

    def opening(self, system: str, user: str, tools: Tools = ()) -> Tokens:
        """The tokens of a context before its first action, the assistant's header included; all of them PROMPT."""
        ids = self._encode(_fill(self._render_opening(tools), {_SYSTEM: system, _USER: user})).ids
        return Tokens(ids, [Source.PROMPT] * len(ids))

    def reply(self, observation: str, *, closed: bool) -> Tokens:
        """The tokens between one action and the next: OBSERVATION, and TEMPLATE around it.

        Args:
            observation: what the environment answered.
            closed: whether the action ended with the end token; if not, the end token comes first, as TEMPLATE.
        """
        rest = self._encode(
            [
                _Piece(self._before_observation, given=False),
                _Piece(observation, given=True),
                _Piece(self._after_observation, given=False),
            ]
        )
        if closed:
            return rest
        return Tokens([self.end_id, *rest.ids], [Source.TEMPLATE, *rest.source])

    def encode_action(self, text: str) -> list[int]:
        """What a policy that writes `text` would sample: tags are added tokens and the end token comes last."""
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False)
        return [*ids, self.end_id]

    def decode(self, ids: Sequence[int]) -> str:
        """Token ids as text, special tokens included."""
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False))

    def prompt_hash(self, system: str, tools: Tools = ()) -> str:
        """Identifies everything in a prompt but the user's message: system message, tools and template."""
        content = [system, self._render_opening(tools), self._before_observation, self._after_observation]
        return hashlib.sha256(json.dumps(content).encode()).hexdigest()

    def _render(self, messages: Messages, tools: Tools) -> str:
        try:
            text = self._tokenizer.apply_chat_template(
                [{"role": role, "content": content} for role, content in messages],
                tools=list(tools) or None,
                tokenize=False,
                add_generation_prompt=True,
            )
        except TemplateError as error:
            raise ValueError(
                f"the chat template refuses a conversation of {', '.join(role for role, _ in messages)}: {error}; "
                "use a model whose template knows system and tool messages"
            ) from error
        return str(text)

    def _render_opening(self, tools: Tools) -> str:
        return self._render([("system", _SYSTEM), ("user", _USER)], tools)

    def _derive_reply(self) -> tuple[int, str, str]:
        """The end token, and what the template writes before and after an observation."""
        messages = [("system", _SYSTEM), ("user", _USER), ("assistant", _ACTION), ("tool", _OBSERVATION)]
        after_action = self._render(messages, [_SAMPLE_TOOL]).partition(_ACTION)[2]
        end = self._mark.match(after_action)
        if end is None:
            raise ValueError(
                f"the chat template has no end token: the assistant's text is followed by {after_action[:40]!r}, which "
                "does not begin with an added token of the tokenizer; use a template that closes messages with one"
            )
        before, found, after = after_action[end.end() :].partition(_OBSERVATION)
        if not found:
            raise ValueError("the chat template leaves out messages of the role 'tool'; use one that renders them")
        return self._added[end.group()], before, after

    def _check_sample(self) -> None:
        """Compares a whole conversation of two steps with the sum of its pieces, id for id."""
        messages = [("system", "Be brief."), ("user", "Who is it?")]
        found = self.opening("Be brief.", "Who is it?", [_SAMPLE_TOOL]).ids
        for action, observation in zip(_SAMPLE_ACTIONS, _SAMPLE_OBSERVATIONS, strict=True):
            messages += [("assistant", action), ("tool", observation)]
            found = [*found, *self.encode_action(action), *self.reply(observation, closed=True).ids]
        rendered = self._render(messages, [_SAMPLE_TOOL])
        expected = self._tokenizer.encode(rendered, add_special_tokens=False)
        for at, (ours, theirs) in enumerate(zip_longest(found, expected)):
            if ours != theirs:
                raise ValueError(
                    "the chat template does not append: it renders a conversation of two steps as "
                    f"...{self.decode(expected[max(0, at - 8) : at + 12])!r} where the steps one by one give "
                    f"...{self.decode(found[max(0, at - 8) : at + 12])!r}; use a template that leaves earlier "
                    "messages as they were"
                )

    def _encode(self, pieces: Sequence[_Piece]) -> Tokens:
        """Given text is OBSERVATION, the template's is TEMPLATE; a token across both is OBSERVATION.

        Text between two marks is encoded as one, so the ids are those of the rendered whole.
        """
        ids: list[int] = []
        source: list[int] = []
        for stretch in self._stretches(pieces):
            tokens = self._encode_plain(stretch) if isinstance(stretch, list) else Tokens([stretch], [Source.TEMPLATE])
            ids += tokens.ids
            source += tokens.source
        return Tokens(ids, source)

    def _stretches(self, pieces: Sequence[_Piece]) -> Iterator[list[_Piece] | int]:
        """The template's marks as ids, and the pieces of plain text between them."""
        plain: list[_Piece] = []
        for piece in pieces:
            position = 0
            for mark in self._mark.finditer(piece.text) if not piece.given else ():
                yield [*plain, _Piece(piece.text[position : mark.start()], given=False)]
                yield self._added[mark.group()]
                plain, position = [], mark.end()
            plain.append(_Piece(piece.text[position:], piece.given))
        yield plain

    def _encode_plain(self, pieces: Sequence[_Piece]) -> Tokens:
        encoding = self._plain.encode("".join(piece.text for piece in pieces), add_special_tokens=False)
        assert self._added_ids.isdisjoint(encoding.ids), "plain text became an added token"
        given = [piece.given for piece in pieces for _ in piece.text]  # per character
        return Tokens(
            encoding.ids,
            [Source.OBSERVATION if any(given[start:stop]) else Source.TEMPLATE for start, stop in encoding.offsets],
        )


def _without_added_tokens(tokenizer: PreTrainedTokenizerFast) -> Tokenizer:
    state = json.loads(tokenizer.backend_tokenizer.to_str())
    return Tokenizer.from_str(json.dumps({**state, "added_tokens": [], "post_processor": None, "truncation": None}))


def _fill(rendered: str, texts: dict[str, str]) -> list[_Piece]:
    """A rendering with placeholders, cut into the template's own text and the texts that stand for them."""
    parts = re.split(f"({'|'.join(map(re.escape, texts))})", rendered)
    placeholders = [part for part in parts if part in texts]
    if sorted(placeholders) != sorted(texts):
        raise ValueError(
            f"the chat template writes {placeholders} where each of {sorted(texts)} belongs once; "
            "use a template that renders the system and the user message once each"
        )
    return [_Piece(texts.get(part, part), given=part in texts) for part in parts]
