"""Estimators with a critic: generalised advantage estimation over tokens, over steps, and over both."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from agent_r1.credit.batch import Batch, Estimate, Floats
from agent_r1.credit.masks import Mask
from agent_r1.credit.recursion import Lengths, generalized_advantages
from agent_r1.credit.whitening import whitened
from agent_r1.params import CreditParams


def gae(batch: Batch, params: CreditParams) -> Estimate:
    """Generalised advantage estimation over tokens (`gamma`, `lam`), then whitening over the batch.

    Value targets are A + V with the advantages before whitening. Where the critic is trained at tokens that are
    no time steps (recursion on, critic off), the targets there come from the recursion over the critic's tokens.

    Source: Schulman et al. 2016 (arXiv 1506.02438); over action tokens alone: Agent-R1 (arXiv 2511.14460), §4.
    """
    assert batch.values is not None
    raw = token_advantages(batch.rewards, batch.values, batch.time_steps, gamma=params.gamma, lam=params.lam)
    targets = raw + batch.values
    beyond = batch.critic_mask & ~batch.time_steps
    if beyond.any():
        over_critic = token_advantages(
            batch.rewards, batch.values, batch.critic_mask, gamma=params.gamma, lam=params.lam
        )
        targets = np.where(beyond, over_critic + batch.values, targets)
    return Estimate(
        advantages=whitened(raw, batch),
        value_targets=np.where(batch.critic_mask, targets, 0.0),
        critic_mask=batch.critic_mask,
    )


def step_gae(batch: Batch, params: CreditParams) -> Estimate:
    """Generalised advantage estimation over steps (`step_gamma`, `step_lam`), the same at every token of a step.

    A step's value is that of the state before acting, at the step's first token. It is asked for nowhere else, so the
    critic is trained there alone, towards A + V. Whitening counts tokens, as the loss does: a long step weighs more.

    Source: StepPO (arXiv 2604.18401), whose whitening counts steps.
    """
    assert batch.values is not None
    spans = step_spans(batch.steps)
    values = batch.values[spans.first]
    raw = _step_advantages(batch.rewards, values, spans, params)
    return Estimate(
        advantages=whitened(_scatter(np.repeat(raw, spans.tokens), spans.acting), batch),
        value_targets=_scatter(raw + values, spans.first),
        critic_mask=spans.first,
    )


def bi_level_gae(batch: Batch, params: CreditParams) -> Estimate:
    """Generalised advantage estimation over steps, and inside every step over its tokens.

    1. Over steps (`step_gamma`, `step_lam`), with the value at a step's last token: its advantage A and return A + V.
    2. Over the tokens of each step alone (`gamma`, `lam`), with that return as the reward of its last token, whose
       advantage is thereby the step's.

    The critic is trained at every action token, towards the second level's A + V. Steps are told apart by their
    index; where a reward of 0 or an action right after another hides the boundary, it is a boundary all the same.

    Source: VAGEN (arXiv 2510.16907), Bi-Level GAE; RAGEN, ragen/trainer/core_algos.py, which takes the tokens with a
    reward for the boundaries.
    """
    assert batch.values is not None
    spans = step_spans(batch.steps)
    values = batch.values[spans.acting]
    ends = spans.starts + spans.tokens - 1
    returns = np.zeros(len(values))
    returns[ends] = _step_advantages(batch.rewards, values[ends], spans, params) + values[ends]
    raw = generalized_advantages(returns, values, spans.tokens, gamma=params.gamma, lam=params.lam)
    return Estimate(
        advantages=whitened(_scatter(raw, spans.acting), batch),
        value_targets=_scatter(raw + values, spans.acting),
        critic_mask=spans.acting,
    )


def token_advantages(rewards: Floats, values: Floats, time_steps: Mask, *, gamma: float, lam: float) -> Floats:
    """[B, L] the generalised advantages of every trajectory's time steps; tokens between them get exactly 0."""
    assert not rewards[~time_steps].any(), "a reward outside the time steps would be lost"
    flat = generalized_advantages(rewards[time_steps], values[time_steps], time_steps.sum(axis=1), gamma=gamma, lam=lam)
    return _scatter(flat, time_steps)


class StepSpans(NamedTuple):
    """Where the steps of a batch are; S = its steps, one trajectory after the other, N = its action tokens."""

    acting: Mask  # [B, L] the action tokens
    first: Mask  # [B, L] the first token of every step
    starts: NDArray[np.intp]  # [S] which of the N action tokens begins the step
    tokens: Lengths  # [S] tokens of each step
    per_trajectory: Lengths  # [B] steps of each trajectory


def step_spans(steps: NDArray[np.int32]) -> StepSpans:
    """The spans of steps [B, L], given as in `Batch.steps`."""
    acting = steps >= 0
    first = acting.copy()
    first[:, 1:] &= steps[:, 1:] != steps[:, :-1]
    starts = np.flatnonzero(first[acting])
    tokens = np.diff(starts, append=np.count_nonzero(acting))
    return StepSpans(acting, first, starts, tokens, first.sum(axis=1))


def _step_advantages(rewards: Floats, values: Floats, spans: StepSpans, params: CreditParams) -> Floats:
    """[S] the advantages of steps with values [S]; a step's reward is the sum of its tokens' rewards."""
    assert not rewards[~spans.acting].any(), "a reward outside the steps would be lost"
    per_step = np.add.reduceat(rewards[spans.acting], spans.starts)
    return generalized_advantages(per_step, values, spans.per_trajectory, gamma=params.step_gamma, lam=params.step_lam)


def _scatter(entries: Floats, mask: Mask) -> Floats:
    """[B, L] the entries [N] at the N tokens of the mask, 0 elsewhere."""
    tokens = np.zeros(mask.shape)
    tokens[mask] = entries
    return tokens
