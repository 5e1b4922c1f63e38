"""The estimators by name, and the one door to them."""

from __future__ import annotations

from collections.abc import Callable

from agent_r1.credit.batch import Batch, Estimate
from agent_r1.credit.gae import bi_level_gae, gae, step_gae
from agent_r1.credit.group import dr_grpo, grpo, rloo
from agent_r1.credit.reinforce import reinforce_pp, reinforce_pp_baseline
from agent_r1.params import CreditParams

ESTIMATORS: dict[str, Callable[[Batch, CreditParams], Estimate]] = {
    "gae": gae,
    "step_gae": step_gae,
    "bi_level_gae": bi_level_gae,
    "grpo": grpo,
    "dr_grpo": dr_grpo,
    "rloo": rloo,
    "reinforce_pp": reinforce_pp,
    "reinforce_pp_baseline": reinforce_pp_baseline,
}


def estimate(batch: Batch, params: CreditParams) -> Estimate:
    """What the estimator that `params` names makes of a batch.

    Raises:
        ValueError: the batch has no values and the estimator needs them, or has values it would not look at.
    """
    if params.needs_critic and batch.values is None:
        raise ValueError(
            f"estimator {params.estimator} needs the values of a critic; give them, or set estimator: grpo"
        )
    if not params.needs_critic and batch.values is not None:
        raise ValueError(f"estimator {params.estimator} uses no values; give none, or set estimator: gae")
    return ESTIMATORS[params.estimator](batch, params)
