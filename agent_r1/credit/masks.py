"""Which tokens count: the action mask is a fact of the record, the switches over it are choices.

Every function takes `source` [L] (values of `Source`) and gives a mask [L]. A switch that is on selects the
action tokens; off, it selects every token after the first prompt (DESIGN §6; Agent-R1, arXiv 2511.14460, §4). Where a
later context opens with history that is rendered again, that opening is a prompt too: what it repeats counted before.
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

    Template text that precedes the first action (a role header) belongs to the first prompt.
    """
    mask: Mask = np.logical_or.accumulate(action_tokens(source)) & np.not_equal(source, Source.PROMPT)
    return mask


def loss_mask(source: NDArray[np.uint8], on: bool) -> Mask:
    """[L] tokens the policy loss runs over."""
    return _select(source, on)


def time_steps(source: NDArray[np.uint8], on: bool) -> Mask:
    """[L] tokens that are time steps of the advantage recursion (`advantage_mask.recursion`)."""
    return _select(source, on)


def whitening_mask(source: NDArray[np.uint8], on: bool) -> Mask:
    """[L] tokens that the whitening statistics are taken over (`advantage_mask.whitening`)."""
    return _select(source, on)


def critic_mask(source: NDArray[np.uint8], on: bool) -> Mask:
    """[L] tokens the value loss runs over (`advantage_mask.critic`)."""
    return _select(source, on)


def _select(source: NDArray[np.uint8], on: bool) -> Mask:
    return action_tokens(source) if on else after_prompt(source)
