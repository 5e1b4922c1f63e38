"""Rows of an update: spans that follow the steps, old logprobs, and losses that see selected tokens alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from agent_r1.learn.gradients import (
    CreditedTrajectory,
    asked_of_learner,
    credited,
    loss_tokens,
    not_finite_in,
    require_none,
    span_lengths,
)
from agent_r1.learn.losses import normaliser, token_losses
from agent_r1.learn.scoring import Compute, TokenScores, micro_batches
from agent_r1.params.train import UpdateParams
from agent_r1.records import Credit, Trajectory
from tests.learn.learning import CPU, with_changes

Make = Callable[..., Any]
P, A, O = 0, 1, 2  # noqa: E741
VOCABULARY = 400
EVERYTHING = {"kl_loss": 0.3, "entropy_bonus": 0.2, "importance_cap": 1.5}
RATIOS = ["token", "step", "sequence"]
AGGREGATIONS = [("token_mean", 0), ("sequence_mean", 0), ("constant_length", 50)]


def compute(max_tokens: int) -> Compute:
    return Compute(device=CPU, dtype=torch.float32, max_tokens=max_tokens)


def bigram_logits(seed: int = 0) -> Tensor:
    """[V, V] of a policy that looks at the last token only, so that a context cannot hide what padding does."""
    return torch.randn(VOCABULARY, VOCABULARY, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def step_loss(rows: Sequence[CreditedTrajectory], table: Tensor, params: UpdateParams, max_tokens: int) -> Tensor:
    """The loss of one optimiser step of the bigram policy, in micro-batches of at most `max_tokens` padded tokens."""
    masks = [row.credit.loss_mask for row in rows]
    sums = [torch.zeros((), dtype=torch.float64)]
    for batch in micro_batches([row.trajectory for row in rows], masks, compute(max_tokens)):
        logits = table[batch.ids[:, :-1]][batch.mask[:, 1:]]
        tokens = loss_tokens(batch, rows, *TokenScores.apply(logits, batch.ids[batch.mask], True), params)
        sums.append((token_losses(tokens, params) * tokens.weights).sum())
    return torch.stack(sums).sum() / normaliser([row.loss_tokens for row in rows], params)


def test_spans_follow_the_steps(make_trajectory: Make, update_params: UpdateParams) -> None:
    episode = make_trajectory(0, [P, P, A, A, A, O, O, A, A])
    by = {ratio: with_changes(update_params, ratio=ratio) for ratio in RATIOS}
    on, off = episode.action_mask, np.arange(9) > 1
    assert [span_lengths(episode, on, by[ratio]) for ratio in RATIOS] == [None, [3, 2], [5]]
    assert span_lengths(episode, off, by["step"]) == [5, 2], "an observation belongs to the step that it answers"
    assert span_lengths(episode, off, by["sequence"]) == [7]


def test_steps_that_touch_are_two_spans(make_trajectory: Make, update_params: UpdateParams) -> None:
    episode = make_trajectory(0, [P, A, A, A])
    first, second = replace(episode.steps[0], action_stop=2), replace(episode.steps[0], action_start=2)
    params = with_changes(update_params, ratio="step")
    assert span_lengths(replace(episode, steps=[first, second]), episode.action_mask, params) == [1, 2]


@pytest.mark.parametrize("cap", [0.0, 2.0])
def test_where_old_logprobs_come_from(
    make_trajectory: Make, make_credit: Make, update_params: UpdateParams, cap: float
) -> None:
    samplers = np.array([0, -1, 0, -2], np.float32)
    episode = make_trajectory(0, [P, A, O, A], samplers)
    credit = make_credit(episode, loss_mask=[False, True, True, True])
    params = with_changes(update_params, importance_cap=cap)
    assert asked_of_learner(episode, credit, params).tolist() == [False, bool(cap), True, bool(cap)]
    own = np.array([0, -1.5, -3, -2.5], np.float32)
    row = credited(episode, credit, own, params)
    assert row.sampler_logprobs.tolist() == [0, -1, -3, -2]
    assert row.old_logprobs.tolist() == ([0, -1.5, -3, -2.5] if cap else [0, -1, -3, -2])
    assert not asked_of_learner(episode, make_credit(episode, kept=False), params).any()


@pytest.mark.parametrize(("aggregation", "length"), AGGREGATIONS)
@pytest.mark.parametrize("ratio", RATIOS)
def test_the_gradient_at_masked_tokens_is_exactly_zero(
    make_trajectory: Make, make_credit: Make, update_params: UpdateParams, ratio: str, aggregation: str, length: int
) -> None:
    """And nowhere else, with every term of the loss in play."""
    params = with_changes(update_params, ratio=ratio, aggregation=aggregation, constant_length=length, **EVERYTHING)
    episodes = [make_trajectory(0, [P, P, A, A, O, A, A]), make_trajectory(1, [P, A, O, O, A])]
    own = np.full(7, -6, np.float32)
    rows = [credited(each, make_credit(each), own[: len(each.token_ids)], params) for each in episodes]
    [batch] = micro_batches(episodes, [each.action_mask for each in episodes], compute(100))
    logits = torch.randn(2, 7, VOCABULARY, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    logits.requires_grad_()
    tokens = loss_tokens(batch, rows, *TokenScores.apply(logits[batch.mask], batch.ids[batch.mask], True), params)
    ((token_losses(tokens, params) * tokens.weights).sum() / normaliser([4, 2], params)).backward()
    assert logits.grad is not None
    assert (logits.grad.abs().sum(-1) > 0).equal(batch.mask)


episode_sources = st.lists(st.sampled_from([A, A, O]), min_size=1, max_size=12).map(lambda rest: [P, *rest])


@pytest.mark.parametrize(("aggregation", "length"), AGGREGATIONS)
@pytest.mark.parametrize("ratio", RATIOS)
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=20, derandomize=True, deadline=None)
@given(
    sources=st.lists(episode_sources, min_size=1, max_size=5),
    max_tokens=st.integers(1, 40),
    masked=st.booleans(),
)
def test_padding_never_changes_a_loss(
    make_trajectory: Make,
    make_credit: Make,
    update_params: UpdateParams,
    ratio: str,
    aggregation: str,
    length: int,
    sources: list[list[int]],
    max_tokens: int,
    masked: bool,
) -> None:
    """Nor its gradient: beside longer rows a row gives what it gives alone, for any size of the micro-batches."""
    params = with_changes(update_params, ratio=ratio, aggregation=aggregation, constant_length=length, **EVERYTHING)
    rows = []
    for index, source in enumerate(sources):
        noise = np.random.default_rng(index).normal(-6, 0.3, size=(2, len(source))).astype(np.float32)
        episode: Trajectory = make_trajectory(index, source, noise[0])
        after_prompt = np.logical_or.accumulate(episode.action_mask)
        credit: Credit = make_credit(episode, loss_mask=None if masked else after_prompt)
        rows.append(credited(episode, credit, noise[1], params))
    if not any(row.loss_tokens for row in rows):
        return
    table = bigram_logits().requires_grad_()
    losses = [step_loss(rows, table, params, tokens) for tokens in (max_tokens, 1)]  # 1: every row alone
    assert losses[0].item() == pytest.approx(losses[1].item(), rel=1e-12, abs=1e-12)
    packed, alone = (torch.autograd.grad(loss, table)[0] for loss in losses)
    torch.testing.assert_close(packed, alone, rtol=1e-12, atol=1e-14)


def test_what_is_not_finite_is_named_by_trajectory(make_trajectory: Make) -> None:
    episodes = [make_trajectory(index, [P, A, A]) for index in range(3)]
    masks = [each.action_mask for each in episodes]
    [batch] = micro_batches(episodes, masks, compute(100))
    fine, broken = torch.zeros(6), torch.tensor([0, 0, torch.nan, 0, 0, torch.inf])
    require_none("policy loss", not_finite_in(batch, episodes, fine, fine), compute(100))
    with pytest.raises(FloatingPointError, match=r"policy loss is not finite in trajectories 0/q1/0, 0/q2/0;"):
        require_none("policy loss", not_finite_in(batch, episodes, fine, broken), compute(100))
