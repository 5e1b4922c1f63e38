"""The page as a file, and what is packed into it."""

import base64
import gzip
import json
import logging
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from agent_r1.inspection import viewer as page_module
from agent_r1.inspection.stored import PageTrajectory
from agent_r1.inspection.viewer import Alphabet, Payload, Pieces, action_parts, packed, page
from tests.cases import cases

ABOUT: dict[str, Any] = {"facts": [], "weights": {}, "notes": []}
LOST = "\N{REPLACEMENT CHARACTER}"
MakeEntry = Callable[..., PageTrajectory]


def unpacked(text: str) -> dict[str, Any]:
    match = re.search(r'<script type="application/gzip" id="data">([A-Za-z0-9+/=]*)</script>', text)
    return json.loads(gzip.decompress(base64.b64decode(match[1])))


def spelled(letters: str, table: list[Any]) -> list[Any]:
    """What the letters stand for; "]" is the first place of the table."""
    return [table[ord(letter) - ord("]")] for letter in letters]


def packed_alone(entry: PageTrajectory, decode: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """The content of a page of one episode, and the episode."""
    payload = Payload(decode)
    payload.add(entry)
    content = payload.content(ABOUT)
    [episode] = content["episodes"]
    return content, episode


def test_payload_by_hand(make_entry: MakeEntry, words: Any) -> None:
    content, episode = packed_alone(make_entry("q", iteration=2, passage="Tesk."), words.decode)
    [question] = content["questions"]
    assert question["text"] == "Who is it (q)?"
    assert episode["question"] == 0
    tokens = spelled(episode["tokens"], content["tokens"])
    assert "".join(text for _, text in tokens[:4]) == "<s>user Who is it"
    assert words.decode([token for token, _ in tokens]) == "".join(text for _, text in tokens)
    # 5 words of prompt, 7 of the first action, 3 around 1 of observation, 2 of the second action
    assert episode["source"] == [0, 5, 1, 7, 3, 2, 2, 1, 3, 2, 1, 2]
    assert episode["loss"] == [0, 5, 1, 7, 0, 5, 1, 2]
    assert spelled(episode["gap"], content["numbers"]) == [0.25] * 9, "of the sampled tokens"
    assert spelled(episode["advantages"], content["numbers"]) == [1.5] * 9
    assert "values" not in episode, "there is no critic"
    assert [step["rewards"] for step in episode["steps"]] == [{"valid_call": 1}, {"em": 1}]
    assert [step["parts"] for step in episode["steps"]] == [[("thought", 3), ("call", 4)], [("answer", 2)]]
    assert episode["steps"][0]["calls"][0]["latency_ms"] == 2


def test_numbers_outside_of_actions_are_packed_for_every_token(make_entry: MakeEntry, words: Any) -> None:
    """As they are where the advantage mask is off."""
    entry = make_entry(passage="Tesk.")
    advantages = np.arange(19, dtype=np.float32)
    content, episode = packed_alone(replace(entry, credit=replace(entry.credit, advantages=advantages)), words.decode)
    assert spelled(episode["advantages"], content["numbers"]) == list(range(19))
    assert len(episode["gap"]) == 9


@pytest.mark.parametrize(("logprob", "told"), [(-0.123456, -0.123), (-np.inf, None)])
def test_number_has_three_digits_or_null(make_entry: MakeEntry, words: Any, logprob: float, told: float | None) -> None:
    trajectory = make_entry().trajectory
    logprobs = np.where(trajectory.action_mask, logprob, 0).astype(np.float32)
    entry = replace(make_entry(), trajectory=replace(trajectory, logprobs=logprobs))
    content, episode = packed_alone(entry, words.decode)
    content = json.loads(gzip.decompress(base64.b64decode(packed(content))))
    assert set(spelled(episode["logprobs"], content["numbers"])) == {told}


def test_alphabet_skips_surrogates() -> None:
    table: Alphabet[int] = Alphabet()
    letters = table.spell(range(60_000))
    assert len(set(letters)) == 60_000
    assert letters[0] == "]"
    assert letters.encode().decode() == letters, "a surrogate is no letter"
    assert json.dumps(letters, ensure_ascii=False) == f'"{letters}"', "nothing is escaped"
    assert table.spell([2, 1]) == letters[2] + letters[1]


def test_page_escapes_title_and_names_no_other_file(make_entry: MakeEntry, words: Any) -> None:
    text = page("<script>alert(1)</script>", ABOUT, [[make_entry()]], words.decode)
    assert "<script>alert(1)" not in text
    assert unpacked(text)["title"] == "<script>alert(1)</script>"
    outside = set(re.findall(r"""(?:https?:)?//[^\s"'`)]+""", text)) - {"http://www.w3.org/2000/svg"}
    assert not {link for link in outside if link.startswith(("http", "//")) and "." in link}
    assert not re.search(r"<(?:link|img|iframe)[^>]*(?:src|href)=[\"'](?!data:)", text)


def test_page_beyond_limit_loses_last_questions(
    make_entry: MakeEntry, words: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    rng = np.random.default_rng(0)
    noise = [" ".join(map(str, rng.integers(0, 10**9, 200))) for _ in range(20)]
    groups = [[make_entry(f"q{number}", passage=text)] for number, text in enumerate(noise)]
    full = page("ppo", ABOUT, groups, words.decode)
    monkeypatch.setattr(page_module, "LARGEST_PAGE", len(full) - 10_000)
    with caplog.at_level(logging.WARNING):
        text = page("ppo", ABOUT, groups, words.decode)
    assert len(text.encode()) <= len(full) - 10_000
    ids = [question["id"] for question in unpacked(text)["questions"]]
    assert ids == [f"q{number}" for number in range(len(ids))]
    assert 10 < len(ids) < 20
    note = f"{len(ids)} of 20 trajectories are shown; the rest would make the page larger than 0 MB."
    assert unpacked(text)["notes"] == [note]
    assert note in caplog.text


def utf8(token_ids: Sequence[int]) -> str:
    """A tokenizer of single bytes."""
    return bytes(token_ids).decode(errors="replace")


def test_character_belongs_to_token_of_its_last_byte_and_bytes_of_none_are_shown() -> None:
    assert Pieces(utf8).of("aé字!".encode()) == ["a", "", "é", "", "", "字", "!"]
    assert Pieces(utf8).of(b"a\xffb\xe5\xad") == ["a", "", f"{LOST}b", "", LOST]
    assert "".join(Pieces(utf8).of(b"\xff" * 20)) == LOST * 20


@cases("pieces, ended, parts")
def test_action_parts_by_hand(pieces: list[str], ended: bool, parts: list[list[str | int]]) -> None:
    assert [*map(list, action_parts(pieces, ended=ended))] == parts
