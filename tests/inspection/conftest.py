"""Small episodes whose tokens are words, and a real browser that looks at pages of them."""

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from playwright.sync_api import Browser, Page

from agent_r1.inspection.stored import PageTrajectory, When
from agent_r1.records import Call, CallStatus, Question, Source
from tests.trajectories import credit_of, from_parts, question_fields

OpenPage = Callable[..., Page]


class Words:
    """A tokenizer whose tokens are words with the white space before them."""

    def __init__(self) -> None:
        self._ids: dict[str, int] = {}

    def encode(self, text: str) -> list[int]:
        return [self._ids.setdefault(word, len(self._ids)) for word in re.findall(r"\s*\S+|\s+", text)]

    def decode(self, token_ids: Sequence[int]) -> str:
        texts = list(self._ids)
        return "".join(texts[token] for token in token_ids)


@pytest.fixture
def words() -> Words:
    return Words()


@pytest.fixture
def make_entry(words: Words) -> Callable[..., PageTrajectory]:
    """An episode of a search and an answer: `Who is it (q)?`, `<think>`, `<tool_call>`, a passage, `<answer>`."""

    def make(
        question_id: str = "q",
        when: When = When.TRAINING,
        *,
        answer: str = "Tesk",
        passage: str = "Veld: Its capital is Tesk.",
        iteration: int = 0,
        hops: int = 1,
        status: CallStatus = CallStatus.OK,
    ) -> PageTrajectory:
        parts = [
            (Source.PROMPT, f"<s>user Who is it ({question_id})?"),
            (Source.ACTION, '<think>Look it up.</think>\n<tool_call>\n{"name": "search"}\n</tool_call><end>'),
            (Source.TEMPLATE, "\n<s>tool "),
            (Source.OBSERVATION, passage),
            (Source.TEMPLATE, "\n<s>assistant "),
            (Source.ACTION, f"<answer>{answer}</answer> <end>"),
        ]
        right = float(answer == "Tesk")
        training = when is When.TRAINING
        trajectory = from_parts(
            [(source, words.encode(text)) for source, text in parts],
            [
                {"calls": [Call(tool="search", arguments="{}", status=status, latency_s=0.002)]},
                {"rewards": {"em": right}},
            ],
            trajectory_id=f"{iteration}/{question_id}/0",
            question_id=question_id,
            policy_version=iteration,
            iteration=iteration,
            answer=answer,
        )
        sampled = trajectory.action_mask
        trajectory = replace(trajectory, logprobs=np.where(sampled, -0.25, 0).astype(np.float32))
        masks = {"loss_mask": sampled, "critic_mask": sampled}
        credit = credit_of(np.where(sampled, 1.5, 0), trajectory_id=trajectory.trajectory_id, return_=1.0, **masks)
        return PageTrajectory(
            when=when,
            question=Question(**question_fields(question_id, strata={"hops": str(hops), "kind": "bridge"})),
            trajectory=trajectory,
            totals=np.array([0.0, right]),
            parts={"em": np.array([0.0, right]), "valid_call": np.array([1.0, 0.0])},
            credit=credit if training else None,
            learner_logprobs=np.full(len(sampled), -0.5, np.float32) if training else None,
        )

    return make


@pytest.fixture
def open_page(browser: Browser, tmp_path: Path) -> Iterator[OpenPage]:
    """Opens a page's text as a file, and waits until it is drawn.

    The test fails at its end where the page has requested anything besides itself, or a script of it has failed.
    """
    requests: list[str] = []
    faults: list[str] = []
    contexts = []
    file = tmp_path / "page.html"

    def open_text(text: str, **options: Any) -> Page:
        file.write_text(text, encoding="utf-8")
        context = browser.new_context(**options)
        contexts.append(context)
        page = context.new_page()
        page.on("request", lambda request: requests.append(request.url.partition("#")[0]))
        page.on("pageerror", lambda error: faults.append(str(error)))
        page.on("console", lambda message: faults.append(message.text) if message.type == "error" else None)
        page.goto(file.as_uri())
        page.wait_for_selector("html[data-ready=true]")
        return page

    yield open_text
    for context in contexts:
        context.close()
    assert set(requests) == {file.as_uri()}
    assert faults == []
