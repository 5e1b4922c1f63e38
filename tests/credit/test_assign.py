"""Credit of whole trajectories: every setting of the mask switches, worked by hand."""

import itertools
import logging
import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from agent_r1.credit.assign import assign, groups_to_refill
from agent_r1.credit.estimators import ESTIMATORS
from agent_r1.params.credit import RewardWeights
from agent_r1.records import Call, CallStatus, Outcome, StopReason
from tests.cases import cases
from tests.credit.letters import params, progress, trajectory

# "PAAOTA": prompt, a step of two tokens, an observation and a template token, a step of one token.
# Step rewards 1 and 2, gamma = 1/2, gamma lambda = 1/4. Over the action tokens t1, t2, t5:
#   t5: delta = 2 + 0 - 1/2 = 3/2            A = 3/2
#   t2: delta = 1 + 1/2 * 1/2 - 1 = 1/4      A = 1/4 + 1/4 * 3/2 = 5/8
#   t1: delta = 0 + 1/2 * 1 - 1/2 = 0        A = 1/4 * 5/8 = 5/32
# Over all tokens after the prompt:
#   t4: delta = 1/2 * 1/2 + 1 = 5/4          A = 5/4 + 1/4 * 3/2 = 13/8
#   t3: delta = -1/2 - 2 = -5/2              A = -5/2 + 1/4 * 13/8 = -67/32
#   t2: delta = 1 + 1/2 * 2 - 1 = 1          A = 1 - 1/4 * 67/32 = 61/128
#   t1: delta = 1/2 * 1 - 1/2 = 0            A = 1/4 * 61/128 = 61/512
VALUES = np.array([9, 0.5, 1, 2, -1, 0.5], dtype=np.float32)
OVER_ACTIONS = [0, 5 / 32, 5 / 8, 0, 0, 3 / 2]
OVER_ALL = [0, 61 / 512, 61 / 128, -67 / 32, 13 / 8, 3 / 2]
ACTIONS = np.array([False, True, True, False, False, True])
AFTER_PROMPT = np.array([False, True, True, True, True, True])

# Mean and std of the raw advantages, by (recursion, whitening):
STATISTICS = {
    # 5, 20, 48 thirty-seconds: sum 73, squares 2729; n^2 var = 3 * 2729 - 73^2 = 2858
    (True, True): (73 / 3 / 32, math.sqrt(2858) / 3 / 32),
    # the same with two exact zeros between them: 5 * 2729 - 73^2 = 8316
    (True, False): (73 / 5 / 32, math.sqrt(8316) / 5 / 32),
    # 61, 244, 768 of 512: sum 1073, squares 653081; 3 * 653081 - 1073^2 = 807914
    (False, True): (1073 / 3 / 512, math.sqrt(807914) / 3 / 512),
    # 61, 244, -1072, 832, 768 of 512: sum 833, squares 2494489; 5 * 2494489 - 833^2 = 11778556
    (False, False): (833 / 5 / 512, math.sqrt(11778556) / 5 / 512),
}
# A + V with A before whitening, by (recursion, critic):
TARGETS = {
    (True, True): [0, 21 / 32, 13 / 8, 0, 0, 2],
    # At the observation, no time step, targets come from the recursion over all tokens: 2 - 67/32 and -1 + 13/8.
    (True, False): [0, 21 / 32, 13 / 8, -3 / 32, 5 / 8, 2],
    (False, True): [0, 317 / 512, 189 / 128, 0, 0, 2],
    (False, False): [0, 317 / 512, 189 / 128, -3 / 32, 5 / 8, 2],
}
SWITCHES = list(itertools.product([True, False], repeat=3))


@pytest.mark.parametrize(("recursion", "whitening", "critic"), SWITCHES)
def test_gae_with_every_setting_of_the_advantage_mask(recursion: bool, whitening: bool, critic: bool) -> None:
    chosen = params(gamma=0.5, lam=0.5, recursion=recursion, whitening=whitening, critic=critic)
    [credit], _ = assign([trajectory("PAAOTA", progress(1, 2))], [VALUES], chosen)
    raw, time_steps = (OVER_ACTIONS, ACTIONS) if recursion else (OVER_ALL, AFTER_PROMPT)
    mean, std = STATISTICS[recursion, whitening]
    np.testing.assert_allclose(credit.advantages[time_steps], (np.array(raw)[time_steps] - mean) / std, atol=1e-6)
    assert not credit.advantages[~time_steps].any(), "exactly 0 at masked tokens, whitening or not"
    np.testing.assert_allclose(credit.value_targets, TARGETS[recursion, critic], atol=1e-7)
    assert credit.critic_mask.tolist() == (ACTIONS if critic else AFTER_PROMPT).tolist()
    assert credit.loss_mask.tolist() == ACTIONS.tolist()
    assert credit.values.tolist() == VALUES.tolist()
    assert credit.return_ == 3
    assert credit.kept


@pytest.mark.parametrize("recursion", [True, False])
def test_a_reward_lands_on_the_last_action_token_whatever_comes_after(recursion: bool) -> None:
    # gamma = 0: an advantage is the reward of its own token. Only the step's last action token, index 2, has one.
    chosen = params("gae", gamma=0.0, recursion=recursion)
    [credit], _ = assign([trajectory("PAAOOT", progress(5))], [np.zeros(6, np.float32)], chosen)
    assert credit.value_targets.tolist() == [0, 0, 5, 0, 0, 0]


def test_grpo_credits_groups() -> None:
    # Group 0: returns 3, 0: deviations 3/2, sample std 3/sqrt 2, advantages 1/sqrt 2. Group 1: equal, so 0.
    rows = [
        trajectory("PAOA", progress(1, 2), group=0, name="a"),
        trajectory("PAAO", progress(1), group=1, name="b"),
        trajectory("PAA", group=0, name="c"),
        trajectory("PA", progress(1), group=1, name="d"),
    ]
    a, b, c, d = assign(rows, None, params("grpo"))[0]
    root = 1 / math.sqrt(2)
    np.testing.assert_allclose(a.advantages, [0, root, 0, root], atol=1e-6)
    np.testing.assert_allclose(c.advantages, [0, -root, -root], atol=1e-6)
    assert not b.advantages.any()
    assert not d.advantages.any()
    assert all(credit.kept for credit in (a, b, c, d)), "without a filter, groups of equal returns are kept"
    assert b.loss_mask.tolist() == [False, True, True, False], "and count in the normaliser"
    assert not any(credit.critic_mask.any() or credit.values.any() for credit in (a, b, c, d))


def test_masks_that_are_off_reach_all_tokens_after_the_prompt() -> None:
    rows = [trajectory("PAOTA", progress(3)), trajectory("PA")]
    first, _ = assign(rows, None, params("grpo", recursion=False, loss_mask=False))[0]
    np.testing.assert_allclose(first.advantages, [0, *[1 / math.sqrt(2)] * 4], atol=1e-6)
    assert first.loss_mask.tolist() == [False, True, True, True, True]


def test_metrics() -> None:
    ok = {"calls": [Call(tool="search", status=CallStatus.OK)]}
    malformed = {"calls": [Call(status=CallStatus.MALFORMED)]}
    cut = {"stop_reason": StopReason.LENGTH}
    rows = [
        trajectory("PAAOTA", [ok, {"rewards": {"em": 1.0, "f1": 1.0}}], outcome=Outcome.ANSWERED, group=0),
        trajectory("PAOA", [malformed | cut, ok], group=0),
        trajectory("PAOA", [ok, {"rewards": {"em": 0.0, "f1": 0.5}}], outcome=Outcome.ANSWERED, group=1),
    ]
    rows[0] = replace(rows[0], logprobs=np.where(rows[0].action_mask, -1.75, 0).astype(np.float32))
    values = [np.zeros(len(row.token_ids), np.float32) for row in rows]
    _, metrics = assign(rows, values, params(weights={"agent_r1": 1.0, "valid_call": 0.5}))
    assert {name: metrics[name] for name in metrics if name.startswith("rollout/")} == pytest.approx(
        {
            "rollout/success": 1 / 3,
            "rollout/em": 1 / 3,
            "rollout/f1": 1.5 / 3,
            "rollout/steps": 2,
            "rollout/tool_calls": 4 / 3,
            "rollout/valid_call_share": 3 / 4,
            "rollout/cut_action_share": 1 / 6,
            "rollout/tokens": 14 / 3,
            "rollout/action_tokens": 7 / 3,
            "rollout/surprisal": 3 * 1.75 / 7,
            "rollout/answer_repetition": 0,  # no episode gives a text
            "rollout/thought_repetition": 0,  # no action is as long as an n-gram
        }
    )
    ends = {"answered": 2 / 3, "turn_limit": 1 / 3, "token_limit": 0, "malformed": 0, "ended": 0}
    assert {name: metrics[f"outcome/{name}"] for name in ends} == pytest.approx(ends)
    assert {name: metrics[name] for name in metrics if name.startswith("reward/")} == pytest.approx(
        {
            **{f"reward/{name}": 0 for name in RewardWeights.model_fields},
            "reward/agent_r1": (1 - 1 + 0) / 3,
            "reward/success": 1 / 3,
            "reward/em": 1 / 3,
            "reward/f1": 1.5 / 3,
            "reward/valid_call": 3 / 3,
            "reward/failed_call": -1 / 3,
            "reward/no_answer": -1 / 3,
            "reward/length": -7 / 3,
            "reward/total": (1.5 - 0.5 + 0.5) / 3,
            "reward/max": 1.5,
            "reward/std": 1,  # mean 1/2, squared deviations 1, 1, 0, over 2
            # Group 0: returns 3/2 and -1/2, sample std sqrt 2. Group 1: one member, 0.
            "reward/std_in_groups": math.sqrt(2) / 2,
        }
    )
    # Returns to go on action tokens: 3/2, 3/2, 1; -1/2, -1/2; 1/2, 0. Whitened: mean 0, std 1, and the largest is
    # (3/2 - 1/2) / sqrt(4/7), for the mean is 7/2 / 7 and the squared deviations are 1, 1, 1/4, 1, 1, 0, 1/4: 9/2.
    assert metrics["advantage/mean"] == pytest.approx(0, abs=1e-6)
    assert metrics["advantage/std"] == pytest.approx(1, abs=1e-6)
    assert metrics["advantage/abs_max"] == pytest.approx(1 / math.sqrt(9 / 2 / 7), abs=1e-6)
    # V = 0 everywhere: it explains none of the returns' variance.
    assert metrics["value/explained_return"] == pytest.approx(0, abs=1e-6)


@cases("changes")
def test_explained_return_is_of_what_was_observed_at_action_tokens(changes: dict[str, Any]) -> None:
    # Returns to go at the actions 4, 2 (the values 9 and 107 do not count), variance 1. V = 3, 2: residuals 1, 0,
    # variance 1/4. Explained: 3/4, though below lambda 1 the targets hold the critic's own values.
    _, metrics = assign([trajectory("PAOA", progress(2, 2))], [np.array([9, 3, 107, 2], np.float32)], params(**changes))
    assert metrics["value/explained_return"] == pytest.approx(0.75)


def test_nothing_is_explained_where_all_returns_are_equal_but_for_rounding() -> None:
    rows = [trajectory("PA", progress(share), name=str(share)) for share in (0.1, 0.1, 0.3 - 0.2)]
    _, metrics = assign(rows, [np.array([0, each], np.float32) for each in (1, 2, 3)], params())
    assert metrics["value/explained_return"] == 0


@pytest.mark.parametrize("estimator", ["gae", "grpo"])
def test_what_a_filter_drops_has_no_influence(estimator: str) -> None:
    """The others get what they would get alone: whitening statistics, advantages and targets, bit for bit."""
    kept = [trajectory("PAOA", progress(1, 2), name="a"), trajectory("PA", name="b")]
    # Equal returns; a large one, so that a trace in the statistics would show.
    dropped = [trajectory("PAAOTA", progress(50, 50), group=1, name=name) for name in ("c", "d")]
    rows = [dropped[0], kept[0], dropped[1], kept[1]]
    values = [np.linspace(0, 1, len(row.token_ids), dtype=np.float32) for row in rows]
    some = values if estimator == "gae" else None
    chosen = params(estimator, filter={"kind": "top_p"})
    together, metrics = assign(rows, some, chosen)
    alone, _ = assign(kept, some and [values[1], values[3]], params(estimator))
    assert [credit.kept for credit in together] == [False, True, False, True]
    for left, right in zip([together[1], together[3]], alone, strict=True):
        assert left.return_ == right.return_
        for name in ("advantages", "values", "value_targets", "loss_mask", "critic_mask"):
            assert getattr(left, name).tolist() == getattr(right, name).tolist(), name
    for credit in (together[0], together[2]):
        assert credit.return_ == 100
        for row in (credit.loss_mask, credit.critic_mask, credit.advantages):
            assert not row.any()
    # Group 0: returns 3 and 0, sample std 3 / sqrt 2, one group of two. All episodes stay in the other metrics.
    assert metrics["filter/kept_share"] == 0.5
    assert metrics["filter/std_threshold"] == pytest.approx(3 / math.sqrt(2))
    assert metrics["reward/total"] == 203 / 4
    assert metrics["reward/std_in_groups"] == pytest.approx(3 / math.sqrt(2) / 2)
    assert metrics["advantage/mean"] == pytest.approx(
        np.concatenate([credit.advantages[row.action_mask] for row, credit in zip(kept, alone, strict=True)]).mean()
    )


@cases("changes, warning, shares")
def test_where_nothing_is_trained_it_is_said_and_no_advantage_is_shown(
    changes: dict[str, Any], warning: str, shares: dict[str, float], caplog: pytest.LogCaptureFixture
) -> None:
    rows = [trajectory("PA", progress(1), name=name) for name in ("a", "b")]
    with caplog.at_level(logging.WARNING):
        credits_, metrics = assign(rows, [np.zeros(2, np.float32)] * 2, params(**changes))
    assert {(each.kept, each.critic_mask.any()) for each in credits_} == {("filter" not in changes,) * 2}
    assert not any(each.loss_mask.any() for each in credits_)
    assert warning in caplog.text
    assert {name: metrics[f"filter/{name}"] for name in shares} == shares
    assert np.isfinite(list(metrics.values())).all()
    assert "advantage/mean" not in metrics


@pytest.mark.parametrize("estimator", ["gae", "grpo"])
def test_an_episode_left_out_is_in_the_statistics_and_in_no_policy_loss(estimator: str) -> None:
    """One ran out of steps, one broke off a call, one answered: the credit is the same but for the loss masks."""
    void = {"calls": [Call(status=CallStatus.MALFORMED)]}
    rows = [
        trajectory("PAAOA", progress(1, 2), name="a"),
        trajectory("PAOA", [void, {}], outcome=Outcome.ANSWERED, name="b"),
        trajectory("PAA", progress(1), outcome=Outcome.ANSWERED, name="c"),
    ]
    values = [np.linspace(0, 1, len(row.token_ids), dtype=np.float32) for row in rows] if estimator == "gae" else None
    whole, _ = assign(rows, values, params(estimator))
    for switches, in_loss in (
        ({"truncated": True}, [False, True, True]),
        ({"void_step": True}, [True, False, True]),
        ({"truncated": True, "void_step": True}, [False, False, True]),
    ):
        credits_, metrics = assign(rows, values, params(estimator, left_out=switches))
        assert [credit.loss_mask.any() for credit in credits_] == in_loss
        assert metrics["filter/left_out_share"] == pytest.approx(1 - sum(in_loss) / 3)
        seen = np.concatenate([each.advantages[each.loss_mask] for each in credits_])
        assert metrics["advantage/mean"] == pytest.approx(seen.mean(), abs=1e-7)
        for credit, before in zip(credits_, whole, strict=True):
            assert credit.kept
            assert credit.critic_mask.any() == (estimator == "gae")
            for name in ("advantages", "values", "value_targets", "critic_mask"):
                assert np.array_equal(getattr(credit, name), getattr(before, name)), name


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_an_aborted_episode_has_never_been(estimator: str) -> None:
    lived = [trajectory("PAOA", progress(1, k), group=k // 2, name=f"0/q/{k}") for k in range(4)]
    aborted = trajectory("PAAAOA", progress(9, 9), outcome=Outcome.ABORTED, name="0/q/9")
    values = [np.linspace(0, 1, 4, dtype=np.float32)] * 4 if params(estimator).needs_critic else None
    chosen = params(estimator, filter={"kind": "top_fraction", "share": 0.5})
    alone, without = assign(lived, values, chosen)
    its_values = values and [values[0], np.full(6, 99, np.float32), *values[1:]]
    beside, with_it = assign([lived[0], aborted, *lived[1:]], its_values, chosen)
    assert repr([*beside[:1], *beside[2:]]) == repr(alone)
    assert with_it | {"outcome/aborted": 0} == without
    assert with_it["outcome/aborted"] == pytest.approx(0.2)
    blank = beside[1]
    assert (blank.return_, blank.kept) == (0.0, False)
    assert not any(each.any() for each in (blank.advantages, blank.values, blank.loss_mask, blank.critic_mask))


def test_a_group_that_lost_episodes_is_filled_up_again() -> None:
    """Two of three questions have returns that differ, until one of the episodes turns out to be aborted."""
    chosen = params("grpo", filter={"kind": "top_fraction", "refill": 1})
    outcomes = [Outcome.TURN_LIMIT] * 3 + [Outcome.ABORTED]
    rows = [trajectory("PA", progress(k % 2), group=k // 2, outcome=outcome) for k, outcome in enumerate(outcomes)]
    assert groups_to_refill(rows, 3, chosen) == 2


WHOLE = trajectory("PAAOA", name="1/q/3")
ABORTED = trajectory("PA", outcome=Outcome.ABORTED)


@pytest.mark.parametrize(
    ("estimator", "rows", "values", "message"),
    [
        ("gae", [WHOLE], None, "gae needs the values"),
        ("grpo", [WHOLE], [np.zeros(5, np.float32)], "grpo uses no values"),
        ("gae", [WHOLE], [np.full(5, np.nan, np.float32)], "'1/q/3': the critic's values are not finite"),
        ("grpo", [replace(WHOLE, steps=WHOLE.steps[1:])], None, "'1/q/3': its steps are not the tokens"),
        ("grpo", [trajectory("PP")], None, "none of the 1 trajectories holds a sampled token"),
        ("grpo", [ABORTED] * 2, None, r"cut all 2 episodes short; lower env\.aborted_share"),
    ],
)
def test_what_cannot_be_credited_is_refused(estimator: str, rows: list[Any], values: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        assign(rows, values, params(estimator))
