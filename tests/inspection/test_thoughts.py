"""What thoughts say of their inputs."""

import dataclasses
import math
from collections.abc import Sequence

import numpy as np
import pytest

from agent_r1.inspection.thoughts import crossed, thought_metrics
from tests.credit.letters import trajectory


def test_crossed_puts_each_thought_behind_each_opening() -> None:
    """Up to the token that closes it; of a group the first that thinks, and of actions without a thought nothing."""

    def decode(ids: Sequence[int]) -> str:
        return "".join("</think>" if token == 7 else "a" for token in ids)

    tokens = {0: [1, 2, 7, 9], 1: [3, 7], 2: [4, 5]}
    rows = [trajectory("PP" + "A" * len(ids), group=group) for group, ids in tokens.items()]
    rows = [
        dataclasses.replace(row, token_ids=np.array([10 * row.group, 1, *tokens[row.group]], np.int32)) for row in rows
    ]
    thoughtless = dataclasses.replace(rows[2], group=0)
    rows_of_thoughts = crossed([thoughtless, *rows, rows[0], trajectory("PP")], decode)
    thoughts = [[1, 2, 7], [3, 7]]
    openings = [[0, 1], [10, 1]]
    expected = [[*opening, *thought] for thought in thoughts for opening in openings]
    assert [row.token_ids.tolist() for row in rows_of_thoughts] == expected
    assert [int(row.action_mask.sum()) for row in rows_of_thoughts] == [3, 3, 2, 2]


def test_thought_that_tells_its_input_is_retrieved_by_it() -> None:
    """Means over inputs are .3 and .2: log(.5 / .3) and log 1; the second is as likely under the first input."""
    metrics = thought_metrics(np.log([[0.5, 0.1], [0.2, 0.2]]))
    assert metrics == pytest.approx({"thought/information": math.log(5 / 3) / 2, "thought/retrieved": 0.5})
    alike = thought_metrics(np.full((4, 4), -2000.0))  # nats of a long thought, whose probability is no float
    assert alike == pytest.approx({"thought/information": 0, "thought/retrieved": 1 / 4})
    certain = thought_metrics(np.where(np.eye(4), -20.0, -900.0))
    assert certain == pytest.approx({"thought/information": math.log(4), "thought/retrieved": 1})
