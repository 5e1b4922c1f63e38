"""Credit assignment: which trajectories of an iteration are trained on, and what its rewards say about every token.

Legend for shapes: B = trajectories of an iteration, G = its groups, L = tokens of a trajectory.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from agent_r1.credit import metrics
from agent_r1.credit.batch import EQUAL, collate, group_statistics, groups_of, select_tokens
from agent_r1.credit.estimators import estimate
from agent_r1.credit.rewards import step_rewards
from agent_r1.params.credit import CreditParams, FilterParams, LeftOutParams
from agent_r1.records import CallStatus, Credit, Floats, Floats32, Int64s, Mask, Metrics, Trajectory

ROUNDING = 1e-9  # relative, of sums and products of shares

Indices = NDArray[np.intp]
TokenRows = Sequence[Floats32] | None  # [L] of every trajectory; None without the model that they come from

logger = logging.getLogger(__name__)


def assign(
    trajectories: Sequence[Trajectory],
    values: TokenRows,
    params: CreditParams,
    *,
    reference: TokenRows = None,
    questions: int | None = None,
    max_tokens: int | None = None,
) -> tuple[list[Credit], Metrics]:
    """The credit of every trajectory of one iteration, in their order, and the iteration's metrics.

    An episode that the world cut short (ABORTED), or that never asked the policy, is treated as if it had never been:
    it is in no filter, statistic, group or loss, and no metric but `outcome/aborted` knows of it. A trajectory that
    `params.filter` drops is not `kept` and has no influence: it is in no statistic of the estimator, and its masks are
    empty, so that it is in no loss and no denominator either. One that `params.left_out` names is kept, in all
    statistics and in the critic's training; only its loss mask is empty. A trajectory that is kept and whose advantages
    are 0 is another matter: its loss mask counts among the tokens that normalise the loss.

    Args:
        values: the critic's value [L] at every token of every trajectory, or None without a critic.
        reference: the frozen reference's logprob [L] of every action token, or None without one. With
            `kl_reward` the penalty joins the rewards that the estimator sees, hence the returns of group estimators;
            `Credit.return_`, the filter and the reward metrics stay with those of the episode.
        questions: the number that the filter's share of groups is of; all groups unless a refill has added some.
        max_tokens: the world's limit of a context, which `rewards.overlong` needs.

    Raises ValueError if there is nothing to credit, a reward, value or logprob is not finite, the values do not suit
    the estimator, `kl_reward` has no reference, or `rewards.overlong` no limit.
    """
    indices = _lived(trajectories)
    if all(trajectory.aborted for trajectory in trajectories):
        raise ValueError(f"the world cut all {len(trajectories)} episodes short; lower env.aborted_share")
    if not indices:
        raise ValueError(
            f"none of the {len(trajectories)} trajectories holds a sampled token; if their prompts fill the whole "
            "budget, raise env.max_tokens"
        )
    values, reference = (None if rows is None else [rows[index] for index in indices] for rows in (values, reference))
    subset = [trajectories[index] for index in indices]
    credited, measured = _assign(subset, values, reference, params, questions, max_tokens)
    credit_of = dict(zip(indices, credited, strict=True))
    credits_ = [credit_of.get(index) or _uncredited(trajectory) for index, trajectory in enumerate(trajectories)]
    return credits_, measured | {
        "outcome/aborted": sum(trajectory.aborted for trajectory in trajectories) / len(trajectories)
    }


def demonstration_credit(trajectory: Trajectory, weight: float) -> Credit:
    """The credit of a demonstration: the weight at every token of its actions. It has no return, and no critic."""
    mask = trajectory.demonstration_mask
    return replace(_uncredited(trajectory), advantages=np.float32(weight) * mask, loss_mask=mask, kept=True)


def _lived(trajectories: Sequence[Trajectory]) -> list[int]:
    """The indices of the trajectories that the world did not cut short, and in which the policy acted."""
    return [index for index, trajectory in enumerate(trajectories) if trajectory.counts]


def _assign(
    trajectories: Sequence[Trajectory],
    values: TokenRows,
    reference: TokenRows,
    params: CreditParams,
    questions: int | None,
    max_tokens: int | None,
) -> tuple[list[Credit], Metrics]:
    """`assign` without aborted trajectories. The estimator sees the kept ones alone."""
    _check(trajectories, values, reference, params)
    totals, parts = zip(*(step_rewards(trajectory, params, max_tokens) for trajectory in trajectories), strict=True)
    returns = metrics.returns_of(totals)
    groups = groups_of(trajectories)
    selection, share, threshold = select(returns, groups, params.filter, questions)
    kl = None if reference is None else list(map(kl_rewards, trajectories, reference))
    out = left_out(trajectories, params.left_out)
    credits_ = _credits(trajectories, totals, values, reference, kl, selection, out, params)
    return credits_, {
        **metrics.rollout_metrics(trajectories),
        **metrics.repetition_metrics(trajectories),
        **metrics.reward_metrics(returns, parts, groups),
        **({} if params.filter.kind == "none" else {"filter/kept_share": share, "filter/std_threshold": threshold}),
        **({"filter/left_out_share": float(out.mean())} if any(params.left_out.model_dump().values()) else {}),
        **metrics.advantage_metrics(trajectories, credits_),
        **metrics.value_metrics(trajectories, credits_, totals),
        **({} if kl is None else metrics.reference_metrics(trajectories, kl)),
    }


def _credits(
    trajectories: Sequence[Trajectory],
    totals: Sequence[Floats],
    values: TokenRows,
    reference: TokenRows,
    kl: Sequence[Floats] | None,
    selection: Mask,
    out: Mask,
    params: CreditParams,
) -> list[Credit]:
    """The credit of every trajectory, estimated for those of the selection; `out` empties the loss mask alone."""
    credits_ = list(map(_uncredited, trajectories, metrics.returns_of(totals).tolist()))
    rows = np.flatnonzero(selection).tolist()
    if not rows:
        logger.warning("the returns of no group differ: filter %s leaves nothing to train on", params.filter.kind)
        return credits_
    estimated = estimate(collate(trajectories, totals, values, kl, rows, params), params)
    for row, i in enumerate(rows):
        bare = credits_[i]
        source = trajectories[i].source
        tokens = row, slice(len(source))
        credits_[i] = replace(
            bare,
            advantages=estimated.advantages[tokens].astype(np.float32),
            values=values[i] if values else bare.values,
            value_targets=estimated.value_targets[tokens].astype(np.float32),
            reference_logprobs=_at_actions(trajectories[i], reference[i]) if reference else bare.reference_logprobs,
            loss_mask=select_tokens(source, params.loss_mask) & ~out[i],
            critic_mask=estimated.critic_mask[tokens],
            kept=True,
        )
    if not any(credit.loss_mask.any() for credit in credits_):
        logger.warning("left_out leaves the policy loss no trajectory")
    return credits_


def _at_actions(trajectory: Trajectory, logprobs: Floats32) -> Floats32:
    return np.where(trajectory.action_mask, logprobs, np.float32(0))


def _uncredited(trajectory: Trajectory, return_: float = 0.0) -> Credit:
    """The credit of a trajectory that is no part of the update."""
    zeros = np.zeros(len(trajectory.token_ids), np.float32)
    return Credit(
        trajectory_id=trajectory.trajectory_id,
        return_=return_,
        advantages=zeros,
        values=zeros,
        value_targets=zeros,
        reference_logprobs=zeros,
        loss_mask=zeros > 0,
        critic_mask=zeros > 0,
        kept=False,
    )


def _check(
    trajectories: Sequence[Trajectory],
    values: TokenRows,
    reference: TokenRows,
    params: CreditParams,
) -> None:
    for trajectory, row in [] if values is None else zip(trajectories, values, strict=True):
        if len(row) != len(trajectory.token_ids):
            raise ValueError(f"trajectory {trajectory.trajectory_id!r}: {len(row)} values of the critic")
        if not np.isfinite(row).all():
            raise ValueError(
                f"trajectory {trajectory.trajectory_id!r}: the critic's values are not finite; "
                "lower train.update.critic.learning_rate"
            )
    if reference is None and params.kl_reward:
        raise ValueError(f"kl_reward {params.kl_reward} needs a reference's logprobs; give them, or set it to 0")


def kl_rewards(trajectory: Trajectory, reference: Floats32) -> Floats:
    """[L] reference logprob - sampler's logprob at action tokens, 0 elsewhere; nats, before the coefficient.

    Its expectation under the policy is -KL(policy || reference): the estimate k1, the only one of the usual three
    whose gradient through the reward is that of the divergence.

    Source: Ouyang et al. 2022 (arXiv 2203.02155), Eq. 2; k1, k3: Schulman 2020, joschu.net/blog/kl-approx.html.
    """
    if len(reference) != len(trajectory.token_ids):
        raise ValueError(f"trajectory {trajectory.trajectory_id!r}: {len(reference)} logprobs of the reference")
    rewards = np.where(trajectory.action_mask, reference.astype(np.float64) - trajectory.logprobs, 0.0)
    if not np.isfinite(rewards).all():
        raise ValueError(
            f"trajectory {trajectory.trajectory_id!r}: a logprob of the sampler or of the reference is not finite; "
            "lower train.update.learning_rate and start again from the checkpoint"
        )
    return rewards


def groups_to_refill(
    trajectories: Sequence[Trajectory], questions: int, params: CreditParams, max_tokens: int | None = None
) -> int:
    """The number of groups that a refill is to bring: `questions` less the groups whose returns differ."""
    subset = [trajectories[index] for index in _lived(trajectories)]
    returns = metrics.returns_of([step_rewards(trajectory, params, max_tokens)[0] for trajectory in subset])
    stds, _ = _group_stds(returns, groups_of(subset))
    return questions - int((stds > EQUAL).sum())


def select(
    returns: Floats, groups: Int64s, params: FilterParams, questions: int | None = None
) -> tuple[Mask, float, float]:
    """[B] which trajectories are kept; the share of groups that are; the smallest in-group std kept, 0 where none is.

    The filter of StarPO-S: groups are kept whole by the sample std of their raw returns [B], 0 in a group of one. Where
    all attempts at a question earn the same, a return says nothing; where they differ, the policy has yet to learn. A
    share of groups is of so many `questions`: of all there are unless a refill has added some.

    Source: RAGEN (arXiv 2504.20073), §4.2.
    """
    stds, group = _group_stds(returns, groups)
    mask = FILTERS[params.kind](stds, params.share, questions or len(stds))
    return mask[group], float(mask.mean()), float(stds[mask].min()) if mask.any() else 0.0


def left_out(trajectories: Sequence[Trajectory], params: LeftOutParams) -> Mask:
    """[B] the trajectories that no policy loss runs over; statistics and critic keep them.

    Source: truncated ones: overlong filtering, DAPO (arXiv 2503.14476), §3.4; those with a void step, whose action is
    neither a well-formed call nor an answer: SimpleTIR (arXiv 2509.02479).
    """

    def is_out(trajectory: Trajectory) -> bool:
        void = any(step.call_status is CallStatus.MALFORMED for step in trajectory.steps)
        return (params.truncated and trajectory.truncated) or (params.void_step and void)

    return np.array([*map(is_out, trajectories)], np.bool_)


def _group_stds(returns: Floats, groups: Int64s) -> tuple[Floats, Indices]:
    """[G] the sample std of each group's returns [B], and [B] which of them is the trajectory's."""
    _, first, group = np.unique(groups, return_index=True, return_inverse=True)
    return group_statistics(returns, groups)[1][first], group


def top_p(stds: Floats, share: float, questions: int) -> Mask:
    """[G] as few groups as cover `share` of the sum of stds (not of their softmax), largest first; none of std 0."""
    ranked, back = _rank(stds)
    covered_before = ranked.cumsum() - ranked
    mask: Mask = (covered_before < (share - ROUNDING) * ranked.sum()) & (ranked > EQUAL)
    return mask[back]


def top_fraction(stds: Floats, share: float, questions: int) -> Mask:
    """[G] the `share` of `questions` groups (rounded down, at least one) with the largest std; none of std 0."""
    ranked, back = _rank(stds)
    most = max(int(share * questions + ROUNDING), 1)
    mask: Mask = (np.arange(len(stds)) < most) & (ranked > EQUAL)
    return mask[back]


FILTERS: dict[str, Callable[[Floats, float, int], Mask]] = {
    "none": lambda stds, share, questions: np.ones(len(stds), np.bool_),  # groups without differences are kept too
    "top_p": top_p,
    "top_fraction": top_fraction,
}


def _rank(stds: Floats) -> tuple[Floats, Indices]:
    """[G] the stds from the largest, among equals the earlier group first, and [G] each group's place among them."""
    order = np.argsort(-stds, kind="stable")
    return stds[order], np.argsort(order)
