"""Rendered conversations as token ids and back: only marks, and sampled tokens, may be added tokens (law 3)."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerFast

from agent_r1.records import Source

FIRST_ESCAPE = 0x10FF00  # private use, and the last of it: a text that holds these characters loses nothing but them


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

    def unescape(self, text: str) -> str:
        """The text that was escaped."""
        return text.translate(self._unescaped)

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
        text = self.unescape("".join(piece.text for piece in pieces))
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
