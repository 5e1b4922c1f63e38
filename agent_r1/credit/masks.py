"""Which tokens count: the action mask is a fact of the record, the switches over it are choices.

`source` [L] holds values of `Source`, as in `Trajectory.source`.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from agent_r1.records import Source

Mask = NDArray[np.bool_]


def action_tokens(source: NDArray[np.uint8]) -> Mask:
    """[L] true where the policy sampled the token."""
    return np.equal(source, Source.ACTION)


def after_prompt(source: NDArray[np.uint8]) -> Mask:
    """[L] true from the first sampled token on, at actions, observations and template text alike, never at a prompt.

    Template text that precedes the first action (a role header) belongs to the first prompt. Where a later context
    opens with history that is rendered again, that opening is a prompt too: what it repeats counted before.
    """
    mask: Mask = np.logical_or.accumulate(action_tokens(source)) & np.not_equal(source, Source.PROMPT)
    return mask


def select_tokens(source: NDArray[np.uint8], on: bool) -> Mask:
    """[L] the tokens of a mask whose switch is on, the action tokens, or off, every token after the first prompt.

    The switches are `loss_mask` (tokens of the policy loss) and those of `advantage_mask`: `recursion` (time steps of
    the advantages), `whitening` (tokens of its statistics) and `critic` (tokens of the value loss).

    Source: DESIGN §6; Agent-R1 (arXiv 2511.14460), §4.
    """
    return action_tokens(source) if on else after_prompt(source)
