"""An estimator's batch of trajectories and step rewards, and the arithmetic of advantages.

Legend for shapes: B = trajectories, L = tokens of the longest, K = steps of one, S = steps of all, one trajectory after
the other. `source` [L] holds values of `Source`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from agent_r1.params.credit import CreditParams
from agent_r1.records import Floats, Floats32, Int32s, Int64s, Mask, Source, Trajectory

NO_STEP = -1
EQUAL = 1e-9  # a std of returns that differ by rounding alone is below; a sum of weights depends on its order
WHITENING_EPSILON = 1e-8


@dataclass(frozen=True, kw_only=True, slots=True)
class Batch:
    """Trajectories side by side; padding is in no mask and no step."""

    rewards: Floats  # [B, L] a step's reward at its last action token, 0 elsewhere
    values: Floats | None  # [B, L] the critic's of the state before each token; None without a critic
    steps: Int32s  # [B, L] the index of the step that an action token belongs to, NO_STEP elsewhere
    time_steps: Mask  # [B, L] tokens of the advantage recursion; every reward is on one
    whitening_mask: Mask  # [B, L] tokens that the whitening statistics are taken over
    critic_mask: Mask  # [B, L] tokens a critic of tokens is trained at
    groups: Int64s  # [B] the group of each trajectory
    states: Int64s | None = None  # [S] of every step before it, equal for equal ones; None where unread


def collate(
    trajectories: Sequence[Trajectory],
    step_rewards: Sequence[Floats],
    values: Sequence[Floats32] | None,
    kl: Sequence[Floats] | None,
    rows: Sequence[int],
    params: CreditParams,
) -> Batch:
    """Puts the trajectories with the indices `rows` side by side, with the masks that `params` chooses.

    Each comes with the rewards [K] of its steps, the critic's values [L] if there is a critic, and its `kl_rewards` [L]
    if there is a reference: `params.kl_reward` times these joins the rewards.
    """
    switches = params.advantage_mask
    subset = [trajectories[row] for row in rows]

    def pad_masks(on: bool) -> Mask:
        return _pad([select_tokens(trajectory.source, on) for trajectory in subset])

    rewards = _pad([token_rewards(trajectories[row], step_rewards[row]) for row in rows])
    return Batch(
        rewards=rewards if kl is None else rewards + params.kl_reward * _pad([kl[row] for row in rows]),
        values=None if values is None else _pad([values[row] for row in rows]).astype(np.float64),
        steps=_pad([token_steps(trajectory) for trajectory in subset], fill=NO_STEP),
        time_steps=pad_masks(switches.recursion),
        whitening_mask=pad_masks(switches.whitening),
        critic_mask=pad_masks(switches.critic),
        groups=groups_of(subset),
        states=_states(subset, params) if params.estimator == "gigpo" else None,
    )


def after_prompt(source: NDArray[np.uint8]) -> Mask:
    """[L] true from the first sampled token on, at actions, observations and template text, never at a prompt.

    Template text that precedes the first action (a role header) belongs to the first prompt. The opening of a later
    context is a prompt too: it renders history again, which counted before.
    """
    mask: Mask = np.logical_or.accumulate(source == Source.ACTION) & (source != Source.PROMPT)
    return mask


def select_tokens(source: NDArray[np.uint8], on: bool) -> Mask:
    """[L] the action tokens where a mask's switch is on; every token after the first prompt where it is off.

    The switches are `loss_mask` (tokens of the policy loss) and those of `advantage_mask`: `recursion` (time steps of
    the advantages), `whitening` (tokens of its statistics) and `critic` (tokens of the value loss).

    Source: Agent-R1 (arXiv 2511.14460), §4.
    """
    return np.equal(source, Source.ACTION) if on else after_prompt(source)


def groups_of(trajectories: Sequence[Trajectory]) -> Int64s:
    """[B] the group of each trajectory."""
    return np.array([trajectory.group for trajectory in trajectories], dtype=np.int64)


def token_rewards(trajectory: Trajectory, step_rewards: Floats) -> Floats:
    """[L] every step's reward [K] at its last action token (law 4)."""
    rewards = np.zeros(len(trajectory.token_ids))
    last_tokens = [step.action_stop - 1 for step in trajectory.steps]
    if not trajectory.action_mask[last_tokens].all():
        raise ValueError(f"trajectory {trajectory.trajectory_id!r}: a step ends on a token that was not sampled")
    rewards[last_tokens] = step_rewards
    return rewards


def returns_to_go(trajectory: Trajectory, step_rewards: Floats) -> Floats:
    """[L] the undiscounted sum of the rewards at a token and after it, from the rewards [K] of the steps."""
    returns: Floats = np.cumsum(token_rewards(trajectory, step_rewards)[::-1])[::-1]
    return returns


def token_steps(trajectory: Trajectory) -> Int32s:
    """[L] the index of the step that an action token belongs to, NO_STEP at every other token."""
    steps = np.full(len(trajectory.token_ids), NO_STEP, dtype=np.int32)
    for k, step in enumerate(trajectory.steps):
        steps[step.action_start : step.action_stop] = k
    if not np.array_equal(steps >= 0, trajectory.action_mask):
        raise ValueError(f"trajectory {trajectory.trajectory_id!r}: its steps are not the tokens that were sampled")
    return steps


def _states(trajectories: Sequence[Trajectory], params: CreditParams) -> Int64s:
    by_env = params.gigpo.state == "env"
    return np.concatenate([step_states(trajectory, by_env=by_env) for trajectory in trajectories])


def step_states(trajectory: Trajectory, *, by_env: bool) -> Int64s:
    """[K] a hash of the state that each step was taken in: the environment's if it is asked for and was stated.

    Else it is the context that the policy read: its token ids before the step, from the context's start.
    """
    hashes = []
    for step in trajectory.steps:
        state = step.state.encode() if by_env else b""
        context_start = max(start for start in trajectory.context_starts if start <= step.action_start)
        context = trajectory.token_ids[context_start : step.action_start].tobytes()
        digest = blake2b(state or context, digest_size=8, person=b"state" if state else b"").digest()
        hashes.append(int.from_bytes(digest, signed=True))
    return np.array(hashes, np.int64)


def _pad(rows: Sequence[NDArray[Any]], fill: int = 0) -> NDArray[Any]:
    """[B, L] the rows side by side, filled on the right up to the longest."""
    lengths = np.array([len(row) for row in rows])
    mask = np.arange(lengths.max()) < lengths[:, None]
    padded = np.full(mask.shape, fill, dtype=rows[0].dtype)
    padded[mask] = np.concatenate(rows)
    return padded


def generalized_advantages(rewards: Floats, values: Floats, lengths: Int64s, *, gamma: float, lam: float) -> Floats:
    """[N] A_n = delta_n + gamma lam A_{n+1}, delta_n = r_n + gamma V_{n+1} - V_n, V and A 0 after a sequence's end.

    Rewards [N] are received at each entry, values [N] are of the state before it; `lengths` [S] may be 0.

    Source: Schulman et al. 2016 (arXiv 1506.02438), Eq. 11 and 16.
    """
    next_values = np.append(values[1:], 0.0)
    next_values[np.cumsum(lengths)[lengths > 0] - 1] = 0.0
    return discounted_sums(rewards + gamma * next_values - values, lengths, gamma * lam)


def discounted_sums(entries: Floats, lengths: Int64s, factor: float) -> Floats:
    """[N] S_n = x_n + factor S_{n+1} of entries x [N], S 0 after the end of a sequence; `lengths` [S] may be 0."""
    if lengths.sum() != len(entries):
        raise RuntimeError(f"{len(entries)} entries for sequences of {lengths.sum()} together")
    mask = np.arange(lengths.max(initial=0)) < lengths[:, None]  # [S, longest]
    sums = scatter(entries, mask).T.copy()  # [longest, S], in which a row is in one piece
    for next_row, row in pairwise(sums[::-1]):
        row += factor * next_row
    return sums.T[mask]


def whitened(advantages: Floats, batch: Batch, floor: float) -> Floats:
    """[B, L] the advantages whitened over the batch's whitening mask, exactly 0 outside its time steps."""
    return np.where(batch.time_steps, whiten(advantages, batch.whitening_mask, floor), 0.0)


def whiten(advantages: Floats, mask: Mask, floor: float) -> Floats:
    """[B, L] scaled so that the tokens of `mask` have mean 0 and population std 1; a std counts as `floor` at least."""
    selection = advantages[mask]
    mean = float(selection.mean())
    std = float(selection.std())
    return (advantages - mean) / (max(std, floor) + WHITENING_EPSILON)


def group_statistics(returns: Floats, groups: Int64s) -> tuple[Floats, Floats, Int64s]:
    """[B] deviation from the group's mean, [B] the group's sample std (0 in a group of one), [B] the group's size."""
    _, first, group, counts = np.unique(groups, return_index=True, return_inverse=True, return_counts=True)
    # Measured from a member of the group, so that equal returns deviate by exactly 0 and not by a rounding error.
    shifted = returns - returns[first][group]
    deviations = shifted - (np.bincount(group, weights=shifted) / counts)[group]
    variances = np.bincount(group, weights=deviations**2) / np.maximum(counts - 1, 1)
    return deviations, np.sqrt(variances)[group], counts[group]


class StepSpans(NamedTuple):
    """The steps of a batch; S = its steps, one trajectory after the other, N = its action tokens."""

    acting: Mask  # [B, L] the action tokens
    first: Mask  # [B, L] the first token of every step
    starts: NDArray[np.intp]  # [S] which of the N action tokens begins the step
    tokens: Int64s  # [S] tokens of each step
    per_trajectory: Int64s  # [B] steps of each trajectory

    def sums(self, rewards: Floats) -> Floats:
        """[S] a step's reward is the sum of its tokens' rewards [B, L]."""
        sums: Floats = np.add.reduceat(rewards_at(rewards, self.acting), self.starts)
        return sums


def step_spans(steps: Int32s) -> StepSpans:
    """The spans of steps [B, L], given as in `Batch.steps`."""
    acting = steps >= 0
    first = acting.copy()
    first[:, 1:] &= steps[:, 1:] != steps[:, :-1]
    starts = np.flatnonzero(first[acting])
    tokens = np.diff(starts, append=np.count_nonzero(acting))
    return StepSpans(acting, first, starts, tokens, first.sum(axis=1))


def step_advantages(rewards: Floats, values: Floats, spans: StepSpans, params: CreditParams) -> Floats:
    """[S] the advantages of steps with values [S]."""
    steps = spans.per_trajectory
    return generalized_advantages(spans.sums(rewards), values, steps, gamma=params.step_gamma, lam=params.step_lam)


def step_returns(rewards: Floats, spans: StepSpans, params: CreditParams) -> Floats:
    """[S] the returns to go of steps, discounted per step."""
    return discounted_sums(spans.sums(rewards), spans.per_trajectory, params.step_gamma)


def on_steps(advantages: Floats, spans: StepSpans) -> Floats:
    """[B, L] the advantage [S] of a step at each of its tokens."""
    return scatter(np.repeat(advantages, spans.tokens), spans.acting)


def token_advantages(rewards: Floats, values: Floats, time_steps: Mask, params: CreditParams) -> Floats:
    """[B, L] the generalised advantages of every trajectory's time steps; tokens between them get exactly 0."""
    flat_rewards = rewards_at(rewards, time_steps)
    lengths = time_steps.sum(axis=1)
    advantages = generalized_advantages(flat_rewards, values[time_steps], lengths, gamma=params.gamma, lam=params.lam)
    return scatter(advantages, time_steps)


def rewards_at(rewards: Floats, time_steps: Mask) -> Floats:
    """[N] the rewards [B, L] at the time steps. Raises RuntimeError for one elsewhere."""
    if rewards[~time_steps].any():
        raise RuntimeError("a reward outside of the time steps would be lost")
    return rewards[time_steps]


def broadcast(advantages: Floats, batch: Batch) -> Floats:
    """[B, L] a trajectory's advantage [B] at each of its time steps, exactly 0 elsewhere."""
    return np.where(batch.time_steps, advantages[:, None], 0.0)


def scatter(entries: Floats, mask: Mask) -> Floats:
    """[B, L] the entries [N] at the N tokens of the mask, 0 elsewhere."""
    tokens = np.zeros(mask.shape)
    tokens[mask] = entries
    return tokens
