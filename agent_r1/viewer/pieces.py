"""The text of every single token, though tokens may be pieces of a character."""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import accumulate, groupby, islice

from agent_r1.viewer.shown import Decode

UNFINISHED = "\N{REPLACEMENT CHARACTER}"  # what bytes decode to that are no whole character
LONGEST = 8  # tokens that one text may take to become whole; more are no character
OPENED = r"\A(?:(?!<think>).)*?</think>"  # a thought whose tag the prompt wrote
TAGGED = re.compile(rf"{OPENED}|<(think|tool_call|answer)>.*?(?:</\1>|\Z)", re.DOTALL)
PARTS = {"think": "thought", "tool_call": "call", "answer": "answer"}
OTHER = "text"


class Pieces:
    """Shares a decoded text out among its tokens. Joined, the pieces are the text again."""

    def __init__(self, decode: Decode) -> None:
        self._decode = decode
        self._known: dict[tuple[int, ...], str] = {}

    def of(self, token_ids: Sequence[int]) -> list[str]:
        """The text of each token, [L]; of the tokens of one character the last has it, and the others have ""."""
        texts: list[str] = []
        before: tuple[int, ...] = ()  # a whole token: some tokenizers drop the space of a text's first one
        group: tuple[int, ...] = ()
        for place, token in enumerate(token_ids, start=1):
            group += (token,)
            text = self._text(before + group)[len(self._text(before)) :]
            if text.endswith(UNFINISHED) and len(group) < LONGEST and place < len(token_ids):
                texts.append("")
                continue
            texts.append(text)
            before, group = (() if UNFINISHED in self._text((token,)) else (token,)), ()
        return texts

    def _text(self, token_ids: tuple[int, ...]) -> str:
        if token_ids not in self._known:
            self._known[token_ids] = self._decode(token_ids) if token_ids else ""
        return self._known[token_ids]


def action_parts(pieces: Sequence[str], *, ended: bool) -> list[tuple[str, int]]:
    """What an action consists of, in order: thought, call, answer or other text, each with its number of tokens.

    A token belongs to the part in which its first letter is. White space, and the end token where the action `ended`
    with it, belong to what they follow.
    """
    kinds = _kinds("".join(pieces))
    found: list[str | None] = []  # None: as the one before
    offset = 0
    for piece in pieces:
        found.append(kinds[offset + len(piece) - len(piece.lstrip())] if piece.strip() else None)
        offset += len(piece)
    if ended and found:
        found[-1] = None
    first = next(filter(None, found), OTHER)
    filled = accumulate(found, lambda before, kind: kind or before, initial=first)
    return [(str(kind), len(list(tokens))) for kind, tokens in groupby(islice(filled, 1, None))]


def _kinds(text: str) -> list[str]:
    """The part to which every character belongs."""
    kinds = [OTHER] * len(text)
    for match in TAGGED.finditer(text):
        kinds[match.start() : match.end()] = [PARTS[match[1] or "think"]] * (match.end() - match.start())
    return kinds
