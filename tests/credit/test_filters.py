"""The StarPO-S filter: worked examples, and what holds of every choice."""

from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent_r1.credit.assign import select, top_fraction, top_p
from agent_r1.params.credit import FilterParams
from tests.cases import cases

SIZE = 4  # trajectories of a group

Rule = Callable[[np.ndarray, float], np.ndarray]


def chosen(rule: Rule, stds: list[float], share: float) -> list[int]:
    return np.flatnonzero(rule(np.array(stds), share, len(stds))).tolist()


@cases("stds, share, expected")
def test_top_p_by_hand(stds: list[float], share: float, expected: list[int]) -> None:
    assert chosen(top_p, stds, share) == expected


@cases("stds, share, expected")
def test_top_fraction_by_hand(stds: list[float], share: float, expected: list[int]) -> None:
    assert chosen(top_fraction, stds, share) == expected
    assert len(chosen(top_fraction, range(100, 0, -1), 0.29)) == 29  # .29 * 100 is a little less


def test_groups_are_kept_whole_by_their_sample_std() -> None:
    # Group 7: 0, 2: std sqrt 2. Group 3: 1, 1: 0. Group 5: 0, 1: 1 / sqrt 2. Group 9: one trajectory: 0.
    returns, groups = np.array([0.0, 1, 0, 2, 1, 1, 9]), np.array([7, 3, 5, 7, 3, 5, 9])
    kept, share, threshold = select(returns, groups, FilterParams(kind="top_fraction", share=0.25, refill=0))
    assert kept.tolist() == [True, False, False, True, False, False, False]
    assert share == 1 / 4
    assert threshold == pytest.approx(2**0.5)
    kept, share, threshold = select(returns, groups, FilterParams(kind="top_p", share=1.0, refill=0))
    assert kept.tolist() == [True, False, True, True, False, True, False]
    assert share == 2 / 4
    assert threshold == pytest.approx(0.5**0.5)


def test_after_a_refill_the_share_is_still_of_the_questions_asked_first() -> None:
    # Four groups were asked for, two of them with equal returns, and two further ones came: half of four are kept.
    returns = np.array([0.0, 0, 0, 4, 1, 1, 0, 2, 0, 8, 0, 6])
    groups = np.repeat(np.arange(6), 2)
    params = FilterParams(kind="top_fraction", share=0.5, refill=1)
    assert sorted(set(groups[select(returns, groups, params, questions=4)[0]])) == [4, 5]
    assert sorted(set(groups[select(returns, groups, params)[0]])) == [1, 4, 5]


def test_equal_returns_added_up_in_another_order_do_not_differ() -> None:
    returns = np.array([0.1 + 0.2 + 0.3, 0.3 + 0.2 + 0.1])
    assert returns[0] != returns[1]
    kept, *_ = select(returns, np.zeros(2, np.int64), FilterParams(kind="top_p", share=1.0, refill=0))
    assert not kept.any()


kinds = st.sampled_from(["top_p", "top_fraction"])
shares = st.sampled_from([0.05, 0.25, 0.5, 0.9, 1.0])
# Returns as rewards give them: small whole numbers, so that groups tie and groups without differences are common.
iterations = st.lists(st.lists(st.integers(-2, 2), min_size=SIZE, max_size=SIZE), min_size=1, max_size=12)


def selected(returns: np.ndarray, kind: str, share: float) -> tuple[np.ndarray, float, float]:
    """[G, SIZE] returns -> which of their trajectories are kept, and what else `select` says."""
    groups = np.repeat(np.arange(len(returns)), SIZE)
    return select(returns.ravel(), groups, FilterParams.model_validate({"kind": kind, "share": share, "refill": 0}))


@given(iterations, kinds, shares)
def test_kept_group_is_whole_and_differs_most_of_all(drawn: list[list[int]], kind: str, share: float) -> None:
    returns = np.array(drawn, np.float64)
    chosen, kept_share, threshold = selected(returns, kind, share)
    stds, kept = returns.std(axis=1, ddof=1), chosen.reshape(-1, SIZE)
    assert (kept.all(axis=1) == kept.any(axis=1)).all()
    kept = kept[:, 0]
    assert (stds[kept] > 0).all()
    assert kept.any() == (stds > 0).any(), "where any group differs, one at least is kept"
    if kept.any():
        assert threshold == pytest.approx(stds[kept].min())
        assert stds[~kept].max(initial=0) <= stds[kept].min() + 1e-12
    assert kept_share == kept.mean()
