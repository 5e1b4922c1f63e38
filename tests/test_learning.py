"""The whole loop learns: an engine acts, credit is assigned, a learner updates, and the engine takes its weights.

The task has one thing to learn. The warm start says yes and no half of the time each, and only yes is right.
"""

import json
import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from agent_r1.files import sha256
from agent_r1.params.sections import override
from agent_r1.records import Trajectory
from agent_r1.tables import read_rows
from agent_r1.teaching.demonstrator import Demonstrator
from agent_r1.training import loop
from agent_r1.training.loop import Training, iterate, leaves_work
from agent_r1.training.watch import StaleWeightsError, judge

ITERATIONS = 14
UPDATE = {
    "learning_rate": 4e-4,
    "critic": {"learning_rate": 1e-3, "warmup": {"iterations": 1, "explained_variance": 0, "limit": 0}},
}


@pytest.fixture(scope="module")
def task(one_action_task: Callable[..., Any]) -> Any:
    """Questions that differ in a name and are all to be answered with yes, and a model that says yes and no.

    The same are the dev questions.
    """
    rng = random.Random(0)
    answers = {f"Is it true of {name}?": "yes" for name in "ABCDEFGH"}
    made = one_action_task(answers, lambda _: f"<answer> {rng.choice(['yes', 'no'])} </answer>")
    dev = [replace(each, split="dev", question_id=f"dev {each.question_id}") for each in made.questions]
    return replace(made, questions=[*made.questions, *dev])


def share_of_yes(training: Training, iteration: int) -> float:
    rows = read_rows(training.folder.trajectories(iteration), Trajectory)
    return float(np.mean([row.answer == "yes" for row in rows]))


@pytest.mark.parametrize("estimator", ["gae", "grpo"])
def test_what_is_rewarded_is_done_more_often(task: Any, open_training: Callable[..., Any], estimator: str) -> None:
    """From about .5 to above .9; with the sign of the advantage flipped it falls to 0."""
    changes = {"iterations": ITERATIONS, "credit": {"estimator": estimator}, "update": UPDATE}
    with open_training(task, changes) as training:
        iterate(training)
    shares = [share_of_yes(training, iteration) for iteration in range(ITERATIONS)]
    assert 0.3 < shares[0] < 0.7
    assert np.mean(shares[-4:]) > 0.9, shares


@pytest.fixture(scope="module")
def wrong_task(one_action_task: Callable[..., Any]) -> Any:
    answers = {f"Is it true of {name}?": "yes" for name in "ABCDEFGH"}
    return one_action_task(answers, lambda _: "<answer> no </answer>", steps=80)


def test_a_demonstration_teaches_what_no_sample_shows(
    wrong_task: Any, open_training: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """And is in no file, group or statistic of the samples."""
    monkeypatch.setattr(Demonstrator, "script", lambda *_: ["<answer> yes </answer>"])
    changes = {
        "iterations": ITERATIONS,
        "rollout": {"demonstrate": 1.0},
        "credit": {"estimator": "grpo"},
        "update": UPDATE | {"learning_rate": 2e-3},
    }
    with open_training(wrong_task, changes) as training:
        iterate(training)
    history = training.folder.history()
    assert share_of_yes(training, 0) == 0
    assert len(read_rows(training.folder.trajectories(0), Trajectory)) == 64
    assert history[0]["reward/total"] < 1
    assert history[0]["demonstrations/joined"] == 8
    assert share_of_yes(training, ITERATIONS - 1) > 0.7
    shown = read_rows(training.folder.demonstrations(0), Trajectory)
    assert not any(each.action_mask.any() or each.logprobs.any() for each in shown)
    assert [each.group for each in shown] == [*range(8)]
    assert all(each.demonstration_mask[each.steps[0].action_start] for each in shown)
    assert history[0]["policy/demonstration_loss"] > 2 * history[4]["policy/demonstration_loss"]
    assert history[0]["update/episodes"] == 64


def test_step_length_is_the_distance_of_weights(task: Any, open_training: Callable[..., Any]) -> None:
    """None while the critic trains alone; else the new policy's k3 on the episodes that proved the old one."""
    warming = {
        **UPDATE,
        "critic": {**UPDATE["critic"], "warmup": {"iterations": 1, "explained_variance": 0, "limit": 0}},
    }
    with open_training(task, {"credit": {"estimator": "gae"}, "update": warming}) as training:
        metrics = training.rollout(0) | training.credit(0) | training.update(0)
        assert "policy/kl_step" not in metrics
        training.conclude(0, judge([metrics], training.config, rollbacks=0))
        before = training.rollout(1) | training.credit(1)
        proved = read_rows(training.folder.trajectories(1), Trajectory)[:16]
        old = training.learner.logprobs(proved)
        metrics = before | training.update(1)
        moved = [
            (new - one)[row.action_mask]
            for row, one, new in zip(proved, old, training.learner.logprobs(proved), strict=True)
        ]
        x = np.concatenate(moved).astype(np.float64)
        assert metrics["policy/kl_step"] == pytest.approx(np.mean(np.exp(x) - 1 - x), rel=1e-6)
        assert metrics["policy/kl_step"] > 0


def test_stale_sampler_noticed(task: Any, open_training: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    with open_training(task, {"credit": {"estimator": "grpo"}, "update": UPDATE}) as training:
        metrics = training.rollout(0) | training.credit(0) | training.update(0)
        training.conclude(0, judge([metrics], training.config, rollbacks=0))
        with monkeypatch.context() as patch:
            patch.setattr(training.collector.sampler.engine, "load_weights", lambda *_: None)
            with pytest.raises(StaleWeightsError, match="the sums of"):
                training.rollout(1)
        training.rollout(1)


VALIDATED = {
    "iterations": 4,
    "rollout": {"questions": 4, "samples": 8},
    "update": UPDATE,
    "credit": {"estimator": "grpo"},
    "validation": {"every": 1, "questions": 0},
}


def trained(training: Training) -> tuple[list[dict[str, float]], list[str]]:
    """The metrics of a run's iterations but seconds, and its trajectories."""
    iterate(training)
    seconds = ("time/", "cost/", "rollout/search_cache", "tool/waiting", "tool/search/latency")
    lines = [json.loads(line) for line in training.folder.metrics.read_text().splitlines()]
    rows = [read_rows(training.folder.trajectories(each), Trajectory) for each in range(len(lines))]
    for call in (call for each in rows for row in each for step in row.steps for call in step.calls):
        object.__setattr__(call, "latency_s", 0.0)
    return [{key: line[key] for key in line if not key.startswith(seconds)} for line in lines], list(map(repr, rows))


def test_a_run_that_is_validated_trains_as_one_that_is_not(task: Any, open_training: Callable[..., Any]) -> None:
    with open_training(task, VALIDATED | {"validation": {"every": 0}}) as training:
        plain, rows = trained(training)
    training.folder.path.rename(training.folder.path.with_name("plain"))
    scores = []
    for samples in (1, 3):
        with open_training(task, override(VALIDATED, {"validation": {"samples": samples}})) as training:
            validated, same_rows = trained(training)
        assert same_rows == rows
        assert [{key: line[key] for key in line if not key.startswith("validation/")} for line in validated] == plain
        scores.append([line["validation/success"] for line in validated])
        assert all(0 <= each <= 1 for each in scores[-1])
        training.folder.path.rename(training.folder.path.with_name(f"of_{samples}"))
    assert scores[0] != scores[1]  # greedy answers, and the mean of three draws


@pytest.fixture
def scores(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """What the validations of a training are to give, one after the other; of equal policies none could be the best."""
    to_come: list[float] = []
    monkeypatch.setattr(loop, "validation_scores", lambda _: {"validation/success": to_come.pop(0)})
    return to_come


def test_the_best_policy_is_the_runs(task: Any, open_training: Callable[..., Any], scores: list[float]) -> None:
    """The second of four is the best; the run ends with it, though its iterations are four."""
    scores += [0.25, 0.75, 0.5, 0.75]
    hashes = []
    with open_training(task, VALIDATED | {"validation": {"every": 1, "questions": 0, "keep_best": True}}) as training:
        folder, save = training.folder, training.folder.save

        def saved(*args: Any, **options: Any) -> None:
            save(*args, **options)
            hashes.append(sha256(folder.checkpoint / "policy"))

        folder.save = saved
        iterate(training)
        assert len({*hashes}) == 4
        folder.tidy()
    assert sha256(folder.checkpoint / "policy") == hashes[1]
    assert (folder.progress.iterations, folder.progress.policy_version) == (4, 2)
    assert loop.checkpoint.progress(folder.checkpoint) == folder.progress
    loop.checkpoint.require_whole(folder.checkpoint, "policy")
    assert not folder.best.exists()


def test_a_run_without_a_better_policy_ends(task: Any, open_training: Callable[..., Any], scores: list[float]) -> None:
    """A kill after the validation that exhausts the patience, before the run is said to be over, changes nothing."""
    scores += [0.5, 0.25]
    changes = VALIDATED | {"validation": {"every": 1, "questions": 0, "patience": 1}}
    with open_training(task, changes) as training, pytest.MonkeyPatch.context() as patch:
        patch.setattr(training.folder, "stop", lambda _: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            iterate(training)
    with open_training(task, changes) as training:
        assert leaves_work(training.folder)
        iterate(training)
        assert (training.folder.finished, training.folder.progress.stopped) == (2, True)
        assert not leaves_work(training.folder)
    assert not scores
