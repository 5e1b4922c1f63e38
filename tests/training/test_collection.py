"""A sampler that shares a GPU with the learner rests while that one works."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest

from agent_r1.learn.learner import Learner
from agent_r1.records import Passage, Question
from agent_r1.rollout.engines import open_engine
from agent_r1.rollout.sampling import Engine
from agent_r1.training import collection
from agent_r1.training.loop import Training, iterate
from tests.fixtures import Task


def question(split: str) -> Question:
    return Question(
        question_id=split,
        dataset="d",
        split=split,
        text="?",
        answers=["yes"],
        gold_titles=[],
        strata={"hops": "1", "kind": ""},
    )


def test_a_sampler_rests_but_for_collecting_and_validating(
    tiny_model: Path,
    bm25_index: Callable[..., Any],
    open_training: Callable[..., AbstractContextManager[Training]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The learner gives memory back before the sampler wakes, and the first thing that wakes one is its weights."""
    told = list[str]()

    def noted(owner: Any, name: str, as_what: str) -> None:
        plain = getattr(owner, name)
        monkeypatch.setattr(owner, name, lambda *args, **named: [told.append(as_what), plain(*args, **named)][1])

    def opened(*args: Any) -> Engine:
        engine = open_engine(*args)
        engine.rests = True
        for name in ("rest", "sample", "load_weights"):
            noted(engine, name, name)
        return engine

    monkeypatch.setattr(collection, "open_engine", opened)
    noted(collection, "release", "release")
    noted(Learner, "update", "update")
    index = bm25_index([Passage(passage_id="p", title="Veld", text="Tesk is a city.")])
    task = Task(questions=[question("train"), question("dev")], index=index, model=tiny_model)
    small = {
        "iterations": 1,
        "credit": {"estimator": "grpo"},
        "rollout": {"samples": 2},
        "update": {"minibatches": 1, "entropy_bonus": 0.01, "critic": {"minibatches": 1}},
        "validation": {"every": 1, "questions": 1},
    }
    with open_training(task, small) as training:
        iterate(training)
    collected, validated_ = ["rest", "release", "sample", "rest"], ["release", "load_weights", "sample", "rest"]
    assert [name for name, _ in groupby(told)] == [*collected, "update", *validated_]
