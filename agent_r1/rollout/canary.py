"""The proof that the sampler runs the learner's weights (law 6)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from agent_r1.records import Trajectory
from agent_r1.rollout.chat import Chat
from agent_r1.rollout.episodes import Attempt, collect
from agent_r1.rollout.scripted import ScriptedSampler

_SCRIPT = ["<think>yes</think>\n<answer> yes </answer>"]


class StaleWeightsError(RuntimeError):
    """The sampler does not run the weights it was given."""


def probes(attempts: Sequence[Attempt], chat: Chat, *, max_tokens: int) -> list[Trajectory]:
    """Fixed tokens that sampler and learner are compared on: the attempts' prompts with a fixed answer each."""
    script = ScriptedSampler([_SCRIPT] * len(attempts), chat)
    return collect(script, chat, attempts, max_tokens=max_tokens, max_action_tokens=max_tokens, seed=0)


def prove(
    samplers: Sequence[NDArray[np.float32]], learners: Sequence[NDArray[np.float32]], *, tolerance: float
) -> float:
    """The largest difference in nats between the logprobs of the same tokens.

    Raises:
        StaleWeightsError: it is above the tolerance, or not a number.
    """
    differences = [np.abs(sampler - learner) for sampler, learner in zip(samplers, learners, strict=True)]
    gap = float(np.concatenate(differences).max())  # NaN where one of them is
    if not gap <= tolerance:
        raise StaleWeightsError(
            f"after a weight transfer the sampler's logprobs are off by {gap:.2g} nats (train.update.canary_tolerance "
            f"is {tolerance:g}): it does not run the learner's weights. In bfloat16 a tolerance of about 0.1 is usual"
        )
    return gap
