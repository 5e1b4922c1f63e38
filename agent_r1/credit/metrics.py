"""The metrics of an iteration's trajectories, rewards and credit."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from agent_r1.answers import normalize
from agent_r1.credit.batch import EQUAL, group_statistics, returns_to_go
from agent_r1.params.train import LARGEST_K3, LARGEST_LOG_RATIO
from agent_r1.records import CallStatus, Credit, Floats, Floats32, Int64s, Metrics, Outcome, StopReason, Trajectory

NGRAM = 4  # tokens; short enough for a bare answer, long enough that two questions rarely share one by chance
MULTIPLIER = np.uint64(0x9E3779B97F4A7C15)  # odd and without structure: the golden ratio of 2^64
OUTCOMES = tuple(outcome for outcome in Outcome if outcome is not Outcome.ABORTED)  # credit sees no aborted episode


def reference_metrics(trajectories: Sequence[Trajectory], kl: Sequence[Floats]) -> Metrics:
    """The penalty (`kl_rewards`) per trajectory, before its coefficient, and the estimate k3 per action token."""
    differences = np.concatenate([penalty[t.action_mask] for t, penalty in zip(trajectories, kl, strict=True)])
    return {"reward/kl": _mean([penalty.sum() for penalty in kl]), "policy/reference_kl": _k3(differences)}


def step_metrics(
    trajectories: Sequence[Trajectory], old_logprobs: Sequence[Floats32], new_logprobs: Sequence[Floats32]
) -> Metrics:
    """How far an update moved the policy: k3 of KL(old || new) per action token, from both logprobs [L] in nats.

    The tokens were drawn before it. Nothing where there are none.
    """
    differences = [
        (new.astype(np.float64) - old)[t.action_mask]
        for t, old, new in zip(trajectories, old_logprobs, new_logprobs, strict=True)
    ]
    all_differences = np.concatenate([np.zeros(0), *differences])
    return {"policy/kl_step": _k3(all_differences)} if len(all_differences) else {}


def _k3(differences: Floats) -> float:
    """The mean over tokens of exp(x) - 1 - x, at most 10, for differences x of logprobs; see `losses.k3`."""
    clamped = differences.clip(-LARGEST_LOG_RATIO, LARGEST_LOG_RATIO)
    return _mean(np.minimum(np.expm1(clamped) - clamped, LARGEST_K3))


def returns_of(totals: Sequence[Floats]) -> Floats:
    """[B] the undiscounted sums of step rewards [K]."""
    return np.array([total.sum() for total in totals])


def rollout_metrics(trajectories: Sequence[Trajectory]) -> Metrics:
    """How the episodes went and ended. One without an answer scores 0; a share of calls or actions is 0 without any."""
    calls = [call.status for t in trajectories for step in t.steps for call in step.calls]
    cut = sum(step.stop_reason is StopReason.LENGTH for t in trajectories for step in t.steps)
    last = [t.steps[-1].rewards if t.steps else {} for t in trajectories]
    stated = [fact for fact in ("em", "f1") if any(fact in facts for facts in last)]
    ends = Counter(t.outcome for t in trajectories)
    return {
        **{f"outcome/{outcome}": ends[outcome] / len(trajectories) for outcome in OUTCOMES},
        "rollout/success": _mean([t.success for t in trajectories]),
        **{f"rollout/{fact}": _mean([facts.get(fact, 0.0) for facts in last]) for fact in stated},
        "rollout/steps": _mean([len(t.steps) for t in trajectories]),
        "rollout/tool_calls": len(calls) / len(trajectories),
        "rollout/valid_call_share": calls.count(CallStatus.OK) / max(len(calls), 1),
        "rollout/cut_action_share": cut / max(sum(len(t.steps) for t in trajectories), 1),
        "rollout/tokens": _mean([len(t.token_ids) for t in trajectories]),
        "rollout/action_tokens": _mean([int(t.action_mask.sum()) for t in trajectories]),
        "rollout/surprisal": -_mean(
            np.concatenate([t.logprobs[t.action_mask] for t in trajectories], dtype=np.float64)
        ),
    }


def reward_metrics(returns: Floats, parts: Sequence[dict[str, Floats]], groups: Int64s) -> Metrics:
    """Every part unweighted; of the returns the mean, the highest, the sample std, and its mean over groups."""
    _, stds, sizes = group_statistics(returns, groups)
    _, [std, *_], _ = group_statistics(returns, np.zeros_like(groups))
    return {
        **{f"reward/{name}": _mean([part[name].sum() for part in parts]) for name in parts[0]},
        "reward/total": _mean(returns),
        "reward/max": float(returns.max()),
        "reward/std": float(std),
        "reward/std_in_groups": float((stds / sizes).sum() / len(np.unique(groups))),
    }


def advantage_metrics(trajectories: Sequence[Trajectory], credits_: Sequence[Credit]) -> Metrics:
    """Over the action tokens of the policy loss; nothing where there is none."""
    pairs = zip(trajectories, credits_, strict=True)
    advantages = np.concatenate([credit.advantages[t.action_mask & credit.loss_mask] for t, credit in pairs])
    if not len(advantages):
        return {}
    advantages = advantages.astype(np.float64)
    return {
        "advantage/mean": float(advantages.mean()),
        "advantage/std": float(advantages.std()),
        "advantage/abs_max": float(np.abs(advantages).max()),
    }


def value_metrics(trajectories: Sequence[Trajectory], credits_: Sequence[Credit], totals: Sequence[Floats]) -> Metrics:
    """The share of the variance of the observed return to go that the values explain; `totals` are step rewards [K].

    Over the action tokens of the critic mask. Nothing without a critic or without a trajectory that is kept; 0 where
    all returns to go are equal.
    """
    masks = [t.action_mask & credit.critic_mask for t, credit in zip(trajectories, credits_, strict=True)]
    pairs = zip(trajectories, totals, masks, strict=True)
    returns = np.concatenate([returns_to_go(t, total)[mask] for t, total, mask in pairs])
    values = np.concatenate([credit.values[mask] for credit, mask in zip(credits_, masks, strict=True)])
    if not len(returns):
        return {}
    explained = 1 - (returns - values).var() / returns.var() if returns.std() > EQUAL else 0.0
    return {"value/explained_return": float(explained)}


def repetition_metrics(trajectories: Sequence[Trajectory]) -> Metrics:
    """Repetition of answers and of thoughts, both in [0, 1]; nothing where all trajectories are of one question."""
    if len({trajectory.group for trajectory in trajectories}) < 2:
        return {}
    return {
        "rollout/answer_repetition": answer_repetition(trajectories),
        "rollout/thought_repetition": thought_repetition(trajectories),
    }


def answer_repetition(trajectories: Sequence[Trajectory]) -> float:
    """The share of the most frequent answer, normalised; every question weighs the same. No answer repeats nothing."""
    sizes = Counter(trajectory.group for trajectory in trajectories)
    shares: defaultdict[str, float] = defaultdict(float)
    for trajectory in trajectories:
        shares[normalize(trajectory.answer)] += 1 / sizes[trajectory.group]
    shares.pop("", None)
    return max(shares.values(), default=0.0) / len(sizes)


def thought_repetition(trajectories: Sequence[Trajectory], length: int = NGRAM) -> float:
    """The chance that an n-gram of one trajectory also occurs in a trajectory of another question.

    Over the distinct n-grams, `length` token ids in a row within one action, of every trajectory: the mean share of
    the trajectories of other questions that hold the n-gram. 0 where no action is that long.
    """
    rows = [np.unique(_ngrams(trajectory, length)) for trajectory in trajectories]
    groups = np.array([trajectory.group for trajectory in trajectories])
    owners = np.repeat(groups, [len(row) for row in rows])  # [N] the question of each n-gram, N over all trajectories
    if not len(owners):
        return 0.0
    _, ngrams = np.unique(np.concatenate(rows), return_inverse=True)
    _, pairs = np.unique(ngrams * (groups.max() + 1) + owners, return_inverse=True)
    holders = np.bincount(ngrams)[ngrams] - np.bincount(pairs)[pairs]
    possible_holders = len(groups) - np.bincount(groups)[owners]
    return float((holders / possible_holders).mean())


def _ngrams(trajectory: Trajectory, length: int) -> NDArray[np.uint64]:
    """A 64-bit fingerprint of every n-gram of the actions: the value of a polynomial in its token ids."""
    ids = trajectory.token_ids.astype(np.uint64)
    spans = [np.arange(step.action_start, step.action_stop - length + 1) for step in trajectory.steps]
    starts = np.concatenate([np.zeros(0, np.intp), *spans])
    prints = np.zeros(len(starts), np.uint64)
    for offset in range(length):
        prints = prints * MULTIPLIER + ids[starts + offset]
    return prints


def _mean(values: Sequence[float] | Floats) -> float:
    return float(np.mean(values))
