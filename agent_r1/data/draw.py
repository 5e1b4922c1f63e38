"""Which questions an iteration attempts."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from agent_r1.records import Question
from agent_r1.seeds import derive


def draw(questions: Sequence[Question], count: int, *, iteration: int, seed: int) -> list[Question]:
    """The `count` questions of an iteration: all are passed through, in a new order each time, before one repeats.

    Raises:
        ValueError: there are fewer questions than an iteration needs.
    """
    if count > len(questions):
        raise ValueError(
            f"train.rollout.questions is {count} and there are {len(questions)} training questions; "
            "lower it or prepare more"
        )
    positions = np.arange(iteration * count, (iteration + 1) * count)
    orders = {
        round_: np.random.default_rng(derive(seed, "questions", round_)).permutation(len(questions))
        for round_ in {int(position) // len(questions) for position in positions}
    }
    return [questions[orders[p // len(questions)][p % len(questions)]] for p in positions.tolist()]
