"""One pass of the policy over an iteration's trajectories: what training steps on and what a replay measures."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor
from transformers import PreTrainedModel

from agent_r1.params import UpdateParams
from agent_r1.policy.model import precision, selected_logits
from agent_r1.policy.objective import Tokens, token_losses
from agent_r1.policy.rows import Row, asked_of_learner, make_row, require_finite, select
from agent_r1.policy.scoring import Compute, logprobs, micro_batches
from agent_r1.records import Credit, Trajectory


def make_rows(
    policy: PreTrainedModel,
    trajectories: Sequence[Trajectory],
    credits: Sequence[Credit],
    params: UpdateParams,
    compute: Compute,
) -> list[Row]:
    """The rows of an update by a policy, which says what the sampler did not about the tokens before the update.

    Raises:
        ValueError: `kl_loss` is above 0 and the credits were assigned without a reference.
    """
    if params.kl_loss and not any(credit.reference_logprobs.any() for credit in credits):
        raise ValueError(
            f"kl_loss {params.kl_loss} needs a reference, and the credits hold no logprobs of one; "
            "assign credit with a reference, or set kl_loss: 0"
        )
    pairs = list(zip(trajectories, credits, strict=True))
    own = logprobs(policy, trajectories, [asked_of_learner(*pair, params) for pair in pairs], compute)
    return [make_row(*pair, before, params) for pair, before in zip(pairs, own, strict=True)]


def policy_pass(
    policy: PreTrainedModel, rows: Sequence[Row], params: UpdateParams, compute: Compute, *, learn: bool
) -> Iterator[tuple[Tokens, Tensor]]:
    """The loss tokens of one micro-batch after the other, and their losses [N], with a graph where they `learn`.

    Raises:
        FloatingPointError: a loss is not finite; names the trajectories.
    """
    trajectories, masks = [row.trajectory for row in rows], [row.credit.loss_mask for row in rows]
    for batch in micro_batches(trajectories, masks, compute):
        with torch.set_grad_enabled(learn), precision(compute.device, compute.dtype):
            logits = selected_logits(policy, batch.ids, batch.mask)
        tokens = select(batch, rows, logits, params)
        terms = token_losses(tokens, params)
        require_finite("policy loss", batch, rows, terms, tokens.logprobs - tokens.old_logprobs)
        yield tokens, terms
