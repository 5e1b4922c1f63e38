"""The page as a file, and what is packed into it."""

from __future__ import annotations

import base64
import gzip
import json
import logging
import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent_r1.viewer import page as page_module
from agent_r1.viewer.page import packed, page
from agent_r1.viewer.payload import Payload, run_lengths
from agent_r1.viewer.shown import Shown, When

ABOUT: dict[str, Any] = {"facts": [], "weights": {}, "notes": []}
MakeShown = Callable[..., Shown]


def unpacked(text: str) -> dict[str, Any]:
    found = re.search(r'<script type="application/gzip" id="data">([A-Za-z0-9+/=]*)</script>', text)
    assert found
    content: dict[str, Any] = json.loads(gzip.decompress(base64.b64decode(found[1])))
    return content


def test_an_episode_as_it_is_packed(make_shown: MakeShown, words: Any) -> None:
    payload = Payload(words.decode)
    payload.add(make_shown("q", iteration=2, passage="Tesk."))
    content = payload.content(ABOUT)
    [episode], [question] = content["episodes"], content["questions"]
    assert question["text"] == "Who is it (q)?"
    assert episode["question"] == 0
    told = [content["tokens"][place] for place in episode["tokens"]]
    assert "".join(text for _, text in told[:4]) == "<s>user Who is it"
    assert words.decode([token for token, _ in told]) == "".join(text for _, text in told)
    # 5 words of prompt, 7 of the first action, 3 around 1 of observation, 2 of the second action
    assert episode["source"] == [0, 5, 1, 7, 3, 2, 2, 1, 3, 2, 1, 2]
    assert episode["loss"] == [0, 5, 1, 7, 0, 5, 1, 2]
    assert episode["gap"] == [0] * 5 + [0.25] * 7 + [0] * 5 + [0.25] * 2
    assert episode["advantages"] == [0] * 5 + [1.5] * 7 + [0] * 5 + [1.5] * 2
    assert "values" not in episode, "there is no critic"
    assert [step["rewards"] for step in episode["steps"]] == [{"valid_call": 1}, {"em": 1}]
    assert [step["parts"] for step in episode["steps"]] == [[("thought", 3), ("call", 4)], [("answer", 2)]]
    assert episode["steps"][0]["latency_ms"] == 2


def test_without_credit_there_are_no_numbers_of_training(make_shown: MakeShown, words: Any) -> None:
    payload = Payload(words.decode)
    payload.add(make_shown(when=When.AFTER))
    [episode] = payload.content(ABOUT)["episodes"]
    assert not {"advantages", "loss", "kept", "gap"} & set(episode)


def test_a_question_and_a_token_are_there_once(make_shown: MakeShown, words: Any) -> None:
    payload = Payload(words.decode)
    for when in When:
        payload.add(make_shown(when=when))
    content = payload.content(ABOUT)
    assert len(content["questions"]) == 1
    assert len({tuple(token) for token in content["tokens"]}) == len(content["tokens"])


def test_a_number_that_is_not_finite_is_null(make_shown: MakeShown, words: Any) -> None:
    shown = make_shown()
    logprobs = np.full_like(shown.trajectory.logprobs, -np.inf)
    payload = Payload(words.decode)
    payload.add(replace(shown, trajectory=replace(shown.trajectory, logprobs=logprobs)))
    assert set(unpacked_numbers(payload, "logprobs")) == {None}


def unpacked_numbers(payload: Payload, name: str) -> list[float | None]:
    numbers: list[float | None] = json.loads(gzip.decompress(base64.b64decode(packed(payload.content(ABOUT)))))[
        "episodes"
    ][0][name]
    return numbers


@given(st.lists(st.integers(0, 3)))
def test_run_lengths_expand_again(values: list[int]) -> None:
    runs = run_lengths(values)
    assert [value for value, count in zip(runs[::2], runs[1::2], strict=True) for _ in range(count)] == values


def test_the_title_is_text(make_shown: MakeShown, words: Any) -> None:
    text = page("<script>alert(1)</script>", ABOUT, [[make_shown()]], words.decode)
    assert "<script>alert(1)" not in text
    assert unpacked(text)["title"] == "<script>alert(1)</script>"


def test_a_page_names_nothing_outside_itself(make_shown: MakeShown, words: Any) -> None:
    text = page("ppo", ABOUT, [[make_shown()]], words.decode)
    outside = set(re.findall(r"""(?:https?:)?//[^\s"'`)]+""", text)) - {"http://www.w3.org/2000/svg"}
    assert not {link for link in outside if link.startswith(("http", "//")) and "." in link}
    assert not re.search(r"<(?:link|img|iframe)[^>]*(?:src|href)=[\"'](?!data:)", text)


def test_a_page_that_would_be_too_large_loses_its_last_questions(
    make_shown: MakeShown, words: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    rng = np.random.default_rng(0)
    noise = [" ".join(map(str, rng.integers(0, 10**9, 200))) for _ in range(20)]
    groups = [[make_shown(f"q{number}", passage=text)] for number, text in enumerate(noise)]
    whole = page("ppo", ABOUT, groups, words.decode)
    monkeypatch.setattr(page_module, "LARGEST_PAGE", len(whole) - 10_000)
    with caplog.at_level(logging.WARNING):
        text = page("ppo", ABOUT, groups, words.decode)
    assert len(text.encode()) <= len(whole) - 10_000
    kept = [question["id"] for question in unpacked(text)["questions"]]
    assert kept == [f"q{number}" for number in range(len(kept))]
    assert 10 < len(kept) < 20
    assert f"{20 - len(kept)} of 20 questions are left out" in caplog.text
