"""A sampler that shares a GPU with the learner rests while that one works."""

from __future__ import annotations

from collections.abc import Callable
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest

from agent_r1 import params
from agent_r1.envs.shared import Shared
from agent_r1.params.places import RunId
from agent_r1.params.sections import override, validated
from agent_r1.policy.learner import Learner
from agent_r1.records import Passage, Question
from agent_r1.rollout.engines import open_engine
from agent_r1.rollout.sampling import Engine
from agent_r1.training import collection
from agent_r1.training.folder import RunFolder
from agent_r1.training.identity import Identity
from agent_r1.training.loop import Training, iterate

PARAMS = Path(__file__).parents[2] / "params.yaml"


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
    tiny_model: Path, bm25_index: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
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
    small = {
        "engine": {"kind": "transformers"},
        "env": {"max_steps": 2, "max_tokens": 256, "max_action_tokens": 4},
        "train": {"update": {"minibatches": 1, "entropy_bonus": 0.01, "critic": {"minibatches": 1}}},
        "runs": {
            "grpo": {
                "iterations": 1,
                "rollout": {"questions": 1, "samples": 2},
                "validation": {"every": 1, "questions": 1},
            }
        },
    }
    whole = params.load(PARAMS).model_dump(mode="json", by_alias=True)
    settings = validated(params.Params, override(whole, small), "small")
    config = settings.run(RunId("grpo"))
    questions = [question("train"), question("dev")]
    index = bm25_index([Passage(passage_id="p", title="Veld", text="Tesk is a city.")])
    folder = RunFolder(tmp_path / "run", Identity.of(settings, config))
    with (
        folder.opened(1, aside=tmp_path / "aside") as run,
        Shared(settings.env, index) as shared,
        Training(settings, config, questions=questions, shared=shared, model=tiny_model, folder=run) as training,
    ):
        iterate(training)
    collected, validated_ = ["rest", "release", "sample", "rest"], ["release", "load_weights", "sample", "rest"]
    assert [name for name, _ in groupby(told)] == [*collected, "update", *validated_]
