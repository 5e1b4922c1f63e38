"""Tokens get the text that is theirs, also where they are pieces of a character."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast

from agent_r1.inspection.viewer import Pieces, action_parts

LOST = "\N{REPLACEMENT CHARACTER}"


def utf8(token_ids: Sequence[int]) -> str:
    """A tokenizer of single bytes."""
    return bytes(token_ids).decode(errors="replace")


def first_space_dropped(token_ids: Sequence[int]) -> str:
    """What a SentencePiece tokenizer does to the words that are its tokens."""
    return "".join([" Gorda", " is", ".", " a"][token] for token in token_ids).removeprefix(" ")


def test_a_character_is_with_the_last_of_its_bytes() -> None:
    assert Pieces(utf8).of("aé字!".encode()) == ["a", "", "é", "", "", "字", "!"]


def test_what_never_becomes_a_character_is_shown_all_the_same() -> None:
    assert Pieces(utf8).of(b"a\xffb\xe5\xad") == ["a", "", f"{LOST}b", "", LOST]
    assert "".join(Pieces(utf8).of(b"\xff" * 20)) == LOST * 20


def test_spaces_are_kept_where_a_tokenizer_drops_the_first() -> None:
    assert Pieces(first_space_dropped).of([0, 1, 3, 2]) == ["Gorda", " is", " a", "."]


@given(st.text(max_size=20))
def test_the_pieces_are_the_text(tiny_tokenizer: PreTrainedTokenizerFast, text: str) -> None:
    def decode(token_ids: Sequence[int]) -> str:
        return str(tiny_tokenizer.decode(list(token_ids), clean_up_tokenization_spaces=False))

    ids = tiny_tokenizer(text, add_special_tokens=False)["input_ids"]
    pieces = Pieces(decode).of(ids)
    assert len(pieces) == len(ids)
    assert "".join(pieces) == decode(ids)


@pytest.mark.parametrize(
    ("pieces", "ended", "parts"),
    [
        (
            ["<think>", "a", "</think>", "\n", "<answer>", "b", "</answer>", "<end>"],
            True,
            [("thought", 4), ("answer", 4)],
        ),
        (["<think>a</", "think>\n<", "tool_call>{}</tool_call>"], False, [("thought", 2), ("call", 1)]),
        (["Who?", "\n", "</think>", "<answer></answer>"], False, [("thought", 3), ("answer", 1)]),  # opened for it
        (["so: ", "<think>", "a", "</think>"], False, [("text", 1), ("thought", 3)]),
        (["so: ", "<tool_call>", "{", "}"], False, [("text", 1), ("call", 3)]),
        (["hm", "<end>"], True, [("text", 2)]),
        (["", "\n<answer>", "</answer>", "tail"], False, [("answer", 3), ("text", 1)]),
        ([], False, []),
    ],
)
def test_parts_of_an_action(pieces: list[str], ended: bool, parts: list[tuple[str, int]]) -> None:
    assert action_parts(pieces, ended=ended) == parts
