"""The collapse monitor on histories written by hand."""

import math
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent_r1.credit.collapse import SIGNS, Alarm, Iteration, alarms, is_clean
from agent_r1.params import load
from agent_r1.params.train import MonitorParams
from tests.cases import cases, tables

MONITOR = load(Path(__file__).parents[2] / "params.yaml").train.monitor

# An iteration in which nothing is wrong. Returns are 0 or 1.
CALM = tables(Path(__file__).parent)["calm"]
# One sign each: threshold, where it begins by hand, a value that shows it and one that just does not.
WORKED = tables(Path(__file__).parent)["worked_signs"]


def monitor(patience: int = 1, first_iterations: int = 3, **thresholds: float) -> MonitorParams:
    signs = MONITOR.thresholds.model_copy(update=dict.fromkeys(SIGNS, 0.0) | thresholds)
    return MONITOR.model_copy(update={"patience": patience, "first_iterations": first_iterations, "thresholds": signs})


def history(metric: str, *values: float) -> list[Iteration]:
    return [{**CALM, metric: value} for value in values]


def seen(rows: Sequence[Iteration], params: MonitorParams, samples: int = 4) -> list[str]:
    return [alarm.sign for alarm in alarms(rows, params, samples=samples)]


def without(row: Iteration, metric: str) -> Iteration:
    return {name: value for name, value in row.items() if name != metric}


def test_every_threshold_has_its_sign_and_every_sign_is_worked_here() -> None:
    assert set(SIGNS) == set(MONITOR.thresholds.model_dump()) == set(WORKED)


@pytest.mark.parametrize("sign", WORKED)
def test_a_sign_shows_beyond_its_limit_unless_its_threshold_is_0(sign: str) -> None:
    metric, threshold, limit, value, calm = WORKED[sign]
    judged = monitor(**{sign: threshold})
    [alarm] = alarms(history(metric, CALM[metric], value), judged, samples=4)
    assert (alarm.sign, alarm.metric, alarm.value, alarm.standard) == (sign, metric, value, CALM[metric])
    assert alarm.limit == pytest.approx(limit)
    assert seen(history(metric, CALM[metric], calm), judged) == []
    assert seen(history(metric, CALM[metric], value), monitor()) == []
    rows = history(metric, *[CALM[metric]] * 3, value, value, calm, value, value, value)
    patient = monitor(patience=3, **{sign: threshold})
    assert [n for n in range(1, 10) if seen(rows[:n], patient)] == [9], "as often in a row as patience says"


@pytest.mark.parametrize(
    ("sign", "value", "limit", "shown"), [("entropy_fall", 0.02, 0.03, "below"), ("entropy_rise", 2.0, 1.2, "above")]
)
def test_an_alarm_names_what_it_saw_and_a_remedy(sign: str, value: float, limit: float, shown: str) -> None:
    alarm = str(Alarm(sign=sign, metric="rollout/surprisal", value=value, standard=0.3, limit=limit))
    assert alarm.startswith(f"{sign}: rollout/surprisal {value:g} is {shown} {limit:g}, and was 0.3 (what helps: ")


def test_a_run_that_collapses_at_once_is_held_against_its_only_calm_iteration() -> None:
    """Iterations 1 to 6 are collapsed; two of them are among the first three, and the healthiest of those counts."""
    rows = history("rollout/valid_call_share", 0.9, *[0.1] * 6)
    patient = monitor(patience=3, valid_call_fall=0.5)
    assert [n for n in range(1, 8) if seen(rows[:n], patient)] == [4, 5, 6, 7]


@cases("metric, values, signs, shown")
def test_signs_have_own_baselines(metric: str, values: list[float], signs: dict[str, float], shown: list[str]) -> None:
    assert seen(history(metric, *values), monitor(**signs)) == shown


def test_a_metric_that_is_missing_is_not_judged() -> None:
    """The critic's warm-up has no gradient of the policy: two iterations without, one that is the first to have it."""
    spikes, [spike] = monitor(grad_norm_spike=5.0), history("policy/grad_norm", 9.0)
    warm_up = [without(CALM, "policy/grad_norm")] * 2
    assert seen([*warm_up, spike], spikes) == []
    assert seen([*warm_up, CALM, spike], spikes) == ["grad_norm_spike"]
    assert seen([CALM, spike, *warm_up], spikes) == []
    assert seen([CALM, without(CALM, "policy/kl_step")], monitor(long_step=0.1)) == []


def test_with_one_sample_the_std_of_the_batch_is_judged() -> None:
    rows = [{**CALM, "reward/std": std, "reward/std_in_groups": 0.0} for std in (0.5, 0.1)]
    [alarm] = alarms(rows, monitor(reward_std_fall=0.4), samples=1)
    assert (alarm.metric, alarm.value) == ("reward/std", 0.1)
    assert seen(history("reward/std", 0.5, 0.1), monitor(reward_std_fall=0.4), samples=4) == []


def outcome(mean: float, std: float) -> Iteration:
    return {**CALM, "reward/total": mean, "reward/std": std}


def test_std_may_fall_as_the_return_nears_the_best() -> None:
    """Mean .5 to .9 leaves a fifth of the distance to 1: the limit falls from 0.4 x 0.5 to 0.04."""
    falls = monitor(reward_std_fall=0.4)
    assert seen([outcome(0.5, 0.5), outcome(0.9, 0.041)], falls, samples=1) == []
    assert seen([outcome(0.5, 0.5), outcome(0.9, 0.039)], falls, samples=1) == ["reward_std_fall"]
    assert seen([outcome(0.5, 0.5), outcome(0.4, 0.19)], falls, samples=1) == ["reward_std_fall"]


SOLVED = [(0.5, 1.0), (0.5, 1.0 - 1e-16), (0.5, 1.0 + 3e-16), (1.0, 1.0), (1.0, 1.0 + 3e-16)]


@pytest.mark.parametrize(("first", "mean"), SOLVED)
def test_a_solved_batch_has_no_std_and_no_alarm(first: float, mean: float) -> None:
    rows = [outcome(first, 1 - first), outcome(mean, 0.0)]
    assert seen(rows, monitor(reward_std_fall=1.0), samples=1) == []


@given(start=st.floats(0.01, 0.99), progress=st.lists(st.floats(0, 1), min_size=1, max_size=6))
def test_success_alone_never_looks_like_a_fall(start: float, progress: list[float]) -> None:
    """Returns of 0 and 1 with a mean p have the std sqrt(p (1 - p)); whatever the p above the first one."""
    chances = [start, *(start + (1 - start) * share for share in progress)]
    rows = [outcome(chance, math.sqrt(chance * (1 - chance))) for chance in chances]
    assert seen(rows, monitor(reward_std_fall=0.999999, first_iterations=1), samples=1) == []


def test_an_iteration_is_clean_where_no_sign_has_begun() -> None:
    patient = monitor(patience=3, entropy_fall=0.1)
    rows = history("rollout/surprisal", 0.3, 0.3, 0.01, 0.3)
    assert [is_clean(rows[:n], patient, samples=4) for n in range(1, 5)] == [True, True, False, True]


def test_no_iteration_of_a_streak_is_clean() -> None:
    """1, then 10 forever: seen alone, the third 10 does not stand out from a median of 10; the streak does from 1."""
    patient = monitor(patience=4, grad_norm_spike=5.0)
    rows = history("policy/grad_norm", 1.0, 10.0, 10.0, 10.0, 10.0)
    assert seen(rows[:4], monitor(patience=1, grad_norm_spike=5.0)) == []
    assert [is_clean(rows[:n], patient, samples=4) for n in range(1, 6)] == [True, False, False, False, False]
    assert seen(rows, patient) == ["grad_norm_spike"]


HEALTHY = tables(Path(__file__).parent)["healthy"]
TRAPPED = tables(Path(__file__).parent)["echo_trap"]


def healthy_rows() -> list[Iteration]:
    rows = [dict(zip(HEALTHY, values, strict=True)) for values in zip(*HEALTHY.values(), strict=True)]
    return [{"reward/max": 1.0, **{name: value for name, value in row.items() if value == value}} for row in rows]


@pytest.mark.parametrize("patience", [1, MONITOR.patience])
def test_a_healthy_run_shows_no_alarm(patience: int) -> None:
    rows, params = healthy_rows(), MONITOR.model_copy(update={"patience": patience})
    assert [seen(rows[:n], params, samples=1) for n in range(1, len(rows) + 1)] == [[]] * len(rows)
    assert all(is_clean(rows[:n], params, samples=1) for n in range(1, len(rows) + 1))


@pytest.mark.parametrize("samples", [1, 8])
def test_an_echo_trap_fires_while_the_reward_still_stands(samples: int) -> None:
    """RAGEN's order of events: std falls and thoughts repeat, then entropy goes, and the reward last."""
    rows = [{**CALM, **dict(zip(TRAPPED, values, strict=True))} for values in zip(*TRAPPED.values(), strict=True)]
    rows = [{**row, "reward/std_in_groups": row["reward/std"]} for row in rows]
    first = next(n for n in range(1, len(rows) + 1) if seen(rows[:n], MONITOR, samples=samples))
    assert first - 1 == 6, "two iterations before the reward is gone"
    assert seen(rows[:first], MONITOR, samples=samples) == ["reward_std_fall", "thought_repetition"]
