"""REINFORCE++: no critic, and a baseline that is the batch's (whitening) or the group's mean."""

from __future__ import annotations

import numpy as np

from agent_r1.credit.batch import Batch, Estimate, without_critic
from agent_r1.credit.group import broadcast, compared
from agent_r1.credit.recursion import discounted_sums
from agent_r1.credit.whitening import whitened
from agent_r1.params import CreditParams


def reinforce_pp(batch: Batch, params: CreditParams) -> Estimate:
    """The discounted return to go (`gamma`) at every time step, then whitening over the batch.

    Tokens that are no time steps neither discount the return nor end it: an action receives what later steps earn,
    whatever observations stand in between.

    Source: REINFORCE++, Hu et al. 2025 (arXiv 2501.03262).
    """
    assert not batch.rewards[~batch.time_steps].any(), "a reward outside the time steps would be lost"
    returns = np.zeros(batch.rewards.shape)
    returns[batch.time_steps] = discounted_sums(
        batch.rewards[batch.time_steps], batch.time_steps.sum(axis=1), params.gamma
    )
    return without_critic(whitened(returns, batch))


def reinforce_pp_baseline(batch: Batch, params: CreditParams) -> Estimate:
    """R - mean within the group, then whitening over the batch; a trajectory alone in its group deviates by 0.

    Source: REINFORCE++ with baseline, Hu et al. 2025 (arXiv 2501.03262).
    """
    deviations, _, _ = compared(batch)
    return without_critic(whitened(broadcast(deviations, batch), batch))
