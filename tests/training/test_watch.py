"""What alarms do to a run; the proof of the sampler's weights: what passes, what raises."""

import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from agent_r1 import params
from agent_r1.credit.collapse import Alarm
from agent_r1.params.train import CanaryTolerance, TrainParams
from agent_r1.rollout.sampling import HeldWeights
from agent_r1.training.watch import (
    Account,
    RunDecision,
    StaleWeightsError,
    Unrecorded,
    Verdict,
    announce,
    duration,
    judge,
    prove_held,
    prove_sampled,
)
from tests.cases import cases


def told(monkeypatch: pytest.MonkeyPatch, clock: list[float], rows: list[dict[str, float]], every: int) -> list[str]:
    """The lines of a run of 20 iterations, at the readings of a clock that starts with the process.

    It goes on after the rows that are one more than there are readings.
    """
    plain = config()
    validation = plain.validation.model_copy(update={"every": every})
    settings = plain.model_copy(update={"iterations": 20, "validation": validation})
    monkeypatch.setattr("agent_r1.training.watch.time.perf_counter", iter(clock).__next__)
    before = len(rows) - len(clock) + 1
    account = Account(settings, "exact match", rows[:before])
    lasts = {number: {name: rows[number][name] for name in ROW} for number in range(before, len(rows))}
    return [account.line([*rows[:number], last], planned=20) for number, last in lasts.items()]


ROW = {"rollout/success": 0.6375, "reward/total": 0.25, "policy/learning_rate": 3e-4}
ROW |= {"time/rollout_s": 14.2, "time/update_s": 31.0, "tool/s": 9.0}


def test_a_finished_iteration_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the clock iterations take 50 s, though their verbs took 45."""
    line = "iteration 1: exact match 0.637, return 0.250, rollout 14 s, update 31 s; 2 of 20 done, about 15 min left"
    assert told(monkeypatch, [100.0, 150.0, 200.0], [ROW, ROW], every=0)[-1] == line  # 18 x 50 = 900 s
    assert told(monkeypatch, [100.0, 150.0], [ROW] * 20, every=0)[-1].endswith("update 31 s; 20 of 20 done")
    alone = ROW | {"policy/learning_rate": 0.0}  # the critic's warm-up may end sooner
    assert "1 of at most 20 done, about" in told(monkeypatch, [100.0, 150.0], [alone], every=0)[-1]
    assert [duration(seconds) for seconds in (0.42, 9.96, 99, 100, 5900, 6000)] == [
        "0.4 s", "10 s", "99 s", "1.7 min", "98 min", "1.7 h"
    ]  # fmt: skip


def test_time_left_falls_with_every_iteration_and_counts_validations(monkeypatch: pytest.MonkeyPatch) -> None:
    """Iterations of 6 s, and after every fourth a validation of 8 s: the clock of the next one has it."""
    validated = ROW | {"time/validate_s": 8.0}
    rows = [validated if (number + 1) % 4 == 0 else ROW for number in range(19)]
    clock = [0.0, *(6.0 * done + 8.0 * ((done - 1) // 4) for done in range(1, 20))]
    lines = told(monkeypatch, clock, rows, every=4)
    left = [line.partition("about ")[2] for line in lines]
    # 16 x 6 + 5 x 14.2, before any validation; then 15 x 6 + 4 x 8, 14 x 6 + 4 x 8, ...
    assert left[3:7] == ["2.8 min left", "2.0 min left", "1.9 min left", "1.8 min left"]
    assert left[-1] == "14 s left"  # 6 + 8, for the last policy is validated too
    resumed = told(monkeypatch, [0.0, 6.0], [*rows[:4], ROW], every=4)
    assert resumed[0].endswith("about 2.0 min left"), "an earlier process validated"


CALM = {"reward/total": 0.5, "reward/max": 1.0, "reward/std": 0.5, "rollout/surprisal": 0.3}


def config(on_collapse: str = "warn", max_rollbacks: int = 0) -> TrainParams:
    plain = params.load(Path(__file__).parents[2] / "params.yaml").train
    changes = {"on_collapse": on_collapse, "max_rollbacks": max_rollbacks, "patience": 1}
    return plain.model_copy(update={"monitor": plain.monitor.model_copy(update=changes)})


@cases("on_collapse, rollbacks, decision")
def test_an_alarm_does_what_the_run_says(on_collapse: str, rollbacks: int, decision: str) -> None:
    settings = config(on_collapse, 2 if on_collapse == "rollback" else 0)
    verdict = judge([CALM, {**CALM, "rollout/surprisal": 0.0}], settings, rollbacks)
    assert (verdict.decision, verdict.clean) == (RunDecision[decision], False)
    assert verdict.metrics == {"monitor/alarms": 1, "monitor/rollbacks": rollbacks}
    calm = judge([{**CALM, "monitor/alarms": 0.0}] * 2, settings, 0)
    assert (calm.alarms, calm.clean, calm.decision) == ([], True, RunDecision.GO_ON)


def verdict(decision: RunDecision, *signs: str) -> Verdict:
    alarms = [Alarm(sign=sign, metric="rollout/surprisal", value=0.01, standard=0.3, limit=0.03) for sign in signs]
    return Verdict(alarms=alarms, clean=not alarms, decision=decision, rollbacks=1)


def test_log_and_tags_name_what_was_seen(caplog: pytest.LogCaptureFixture) -> None:
    record = Mock(spec=Unrecorded)
    with caplog.at_level(logging.WARNING):
        announce(verdict(RunDecision.GO_ON), record, 3)
        assert (caplog.text, record.mock_calls) == ("", [])
        announce(verdict(RunDecision.ROLL_BACK, "entropy_fall", "reward_std_fall"), record, 4)
    assert "iteration 4 shows signs of collapse, the run rolled back: entropy_fall: " in caplog.text
    assert "and was 0.3 (what helps: train.rollout.samples, train.credit.filter.refill, " in caplog.text
    tags = dict(each.args for each in record.tag.mock_calls)
    assert tags["monitor/signs"] == "entropy_fall, reward_std_fall"
    assert tags["monitor/last_alarm"].startswith("iteration 4, rolled back: entropy_fall")
    assert (tags["monitor/rollbacks"], record.rewind.call_count) == ("2", 1)


def test_a_sign_is_told_before_it_is_an_alarm(caplog: pytest.LogCaptureFixture) -> None:
    """An update that was too long is seen where it is made, and an alarm once it has lasted."""
    patient = config()
    patient = patient.model_copy(update={"monitor": patient.monitor.model_copy(update={"patience": 2})})
    steps = [{**CALM, "policy/kl_step": length} for length in (0.01, 0.3, 0.3)]
    with caplog.at_level(logging.INFO, logger="agent_r1.training.watch"):
        for number, expected in enumerate([([], 0), (["long_step"], 0), ([], 1)]):
            found = judge(steps[: number + 1], patient, 0)
            announce(found, Unrecorded(), number)
            assert ([each.sign for each in found.begun], len(found.alarms)) == expected
    sign, alarm = caplog.messages
    assert sign.startswith("iteration 1 shows a first sign of collapse, an alarm if it lasts: long_step: ")
    assert alarm.startswith("iteration 2 shows signs of collapse, the run went on: long_step")


def holding(sums: dict[str, int]) -> HeldWeights:
    return HeldWeights(sampler="the engine", dtype="bfloat16", sums=sums)


def test_a_tensor_of_another_sum_is_named_and_one_without_a_sum_proves_nothing() -> None:
    learners = {"head": 1, "norm": 2, "gate": 3}
    assert prove_held(holding({"head": 1, "norm": 2, "router": 5}), learners) == {"gate", "router"}
    with pytest.raises(StaleWeightsError, match=r"the engine holds other .* 1 of 3 tensors differ, norm for one; "):
        prove_held(holding({"head": 1, "norm": 7, "gate": 3}), learners)
    assert prove_held(holding({"a": 1, "b": 0}), {"a": 1}) == set(), "adapters of a layer that has none are zeros"


def logprobs(*rows: list[float]) -> list[NDArray[np.float32]]:
    return [np.array(row, np.float32) for row in rows]


def sampled(rows: list[NDArray[np.float32]]) -> Any:
    return [SimpleNamespace(logprobs=row, action_mask=np.ones(len(row), np.bool_)) for row in rows]


@pytest.mark.parametrize(("dtype", "gap"), [("float32", 0.5), ("bfloat16", 0.25)])
def test_the_gap_is_the_largest_difference_or_the_mean_one(dtype: str, gap: float) -> None:
    """Differences .25, 0, and -.5: the largest is .5 and the mean .25, and a tolerance of just that passes."""
    samplers, learners = sampled(logprobs([-1.0, -2.0], [-3.0])), logprobs([-1.25, -2.0], [-2.5])
    given, other = getattr(torch, dtype), {"float32": 9.0, "bfloat16": 9.0}
    assert prove_sampled(samplers, learners, given, CanaryTolerance(**{**other, dtype: gap})) == gap
    with pytest.raises(StaleWeightsError, match=rf"off by {gap} nats.*canary_tolerance\.{dtype} is 0\.2\).*_V2_MODEL_"):
        prove_sampled(samplers, learners, given, CanaryTolerance(**{**other, dtype: 0.2}))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("value", [float("nan"), float("-inf")])
@pytest.mark.parametrize(("side", "row"), [(0, 2), (1, 1)])
def test_what_is_not_a_number_proves_nothing(side: int, row: int, value: float, dtype: torch.dtype) -> None:
    sides = [logprobs([-1.0, -2.0], [-3.0], [-4.0, -5.0]) for _ in range(2)]
    sides[side][row][-1] = value
    with pytest.raises(StaleWeightsError):
        prove_sampled(sampled(sides[0]), sides[1], dtype, CanaryTolerance(float32=1e-4, bfloat16=1e-2))
