"""Which questions an iteration attempts."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from itertools import islice

import numpy as np

from agent_r1.records import Question
from agent_r1.seeds import derive


def draw(questions: Sequence[Question], count: int, *, iteration: int, seed: int) -> list[Question]:
    """The `count` questions of an iteration, no question twice.

    Successive iterations pass through all questions in a random order, then in another one; what is left at the end of
    a pass and does not fill an iteration is left out of it.

    Raises:
        ValueError: there are fewer questions than an iteration needs.
    """
    if count > len(questions):
        raise ValueError(
            f"train.rollout.questions is {count} and there are {len(questions)} training questions; "
            "lower it or prepare more"
        )
    passed, position = divmod(iteration, len(questions) // count)
    order = np.random.default_rng(derive(seed, "questions", passed)).permutation(len(questions))
    return [questions[index] for index in order[position * count : (position + 1) * count]]


def draw_further(
    questions: Sequence[Question], count: int, *, besides: Collection[str], iteration: int, refill: int, seed: int
) -> list[Question]:
    """At most `count` questions beside those whose ids are given, for the `refill`-th refill of an iteration.

    They come in a random order of their own: the passes of `draw` do not depend on how many refills there were, and
    meet these questions again.
    """
    order = np.random.default_rng(derive(seed, "refill", iteration, refill)).permutation(len(questions))
    others = (questions[index] for index in order if questions[index].question_id not in besides)
    return list(islice(others, count))
