"""Steps compared within a group, against numbers worked by hand and against the estimators of whole episodes."""

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from agent_r1.credit.assign import assign
from agent_r1.credit.batch import Batch, step_states
from agent_r1.credit.estimators import gigpo, step_return
from tests.credit.letters import batch, params, trajectory


def of_steps(found: np.ndarray, made: Batch) -> list[list[float]]:
    """The advantage of every step of every trajectory; it is one number for all of a step's tokens."""
    for row, steps in zip(found, made.steps, strict=True):
        assert all(len(set(row[steps == k])) == 1 for k in range(steps.max() + 1))
    rows = zip(found, made.steps, strict=True)
    return [[float(row[steps == k][0]) for k in range(steps.max() + 1)] for row, steps in rows]


def close(found: Sequence[Sequence[float]], expected: Sequence[Sequence[float]]) -> bool:
    return all(np.allclose(*pair, atol=1e-5) for pair in zip(found, expected, strict=True))


def test_a_step_is_compared_with_the_same_step_of_the_others() -> None:
    # Returns to go at 1/2 per step: 1 + 2/2 = 2 and 2; 0 + 4/2 = 2, 4 + 0/2 and 0; 5. The other group: 1 and 3.
    made = batch(
        [("PAAOA", [1, 2]), ("PAOAOA", [0, 4, 0]), ("PA", [5]), ("PA", [1]), ("PA", [3])], groups=[4, 4, 4, 7, 7]
    )
    found = step_return(made, params("step_return", step_gamma=0.5))
    assert not found.critic_mask.any()
    assert not found.value_targets.any()
    assert not found.advantages[made.steps < 0].any()
    # First steps 2, 2, 5, mean 3; second ones 2, 4, mean 3; the third is alone. First steps 1, 3, mean 2.
    assert close(of_steps(found.advantages, made), [[-1, -1], [-1, 1, 0], [2], [-1], [1]])


def test_gigpo_adds_the_step_among_equal_states_to_the_episode() -> None:
    # Returns 3, 4, 5: mean 4, episodes -1, 0, 1. Returns to go at 1/2 per step: 2, 2; 2, 4, 0; 5.
    # State 8 is before steps with 2, 2 and 5 to go, mean 3; state 9 before 2 and 4, mean 3; state 6 is seen once.
    rows = [("PAAOA", [1, 2]), ("PAOAOA", [0, 4, 0]), ("PA", [5])]
    made = batch(rows, states=[8, 9, 8, 9, 6, 8])
    episode, step = [[-1, -1], [0, 0, 0], [1]], [[-1, -1], [-1, 1, 0], [2]]
    for weight in (1.0, 0.25):
        chosen = params("gigpo", step_gamma=0.5, gigpo={"weight": weight})
        wanted = [
            np.add(*[np.array(part) * scale for part, scale in zip(pair, (1, weight), strict=True)])
            for pair in zip(episode, step, strict=True)
        ]
        assert close(of_steps(gigpo(made, chosen).advantages, made), wanted)
    # Sample std: of the returns 1; of 2, 2, 5 it is sqrt((1 + 1 + 4) / 2) = sqrt 3; of 2, 4 it is sqrt 2.
    by_std = gigpo(made, params("gigpo", step_gamma=0.5, gigpo={"std": True}))
    three, two = 1 / math.sqrt(3), 1 / math.sqrt(2)
    wanted = [[-1 - three, -1 - two], [-three, two, 0], [1 + 2 * three]]
    assert close(of_steps(by_std.advantages, made), wanted)


def test_with_a_history_steps_are_compared_after_the_same_states_too() -> None:
    # Three episodes pass states 1, 2 twice and 3, 2 once; returns to go are 6, 5; 2, 1; 0, 0.
    made = batch([("PAOA", [1, 5]), ("PAOA", [1, 1]), ("PAOA", [0, 0])], states=[1, 2, 1, 2, 3, 2])
    # State 1: 6 and 2, mean 4. State 2: 5, 1, 0, mean 2. After state 1: 5 and 1, mean 3, which weighs 3 against 2.
    wanted = [[2, (2 * 3 + 3 * 2) / 5], [-2, (2 * -1 + 3 * -2) / 5], [0, -2]]
    for history in (1, 2, 5):  # no step has more than one before it
        chosen = params("gigpo", gigpo={"history": history})
        assert close(of_steps(gigpo(made, chosen).advantages, made), wanted)
    twice = params("gigpo", gigpo={"weight": 2.0, "history": 1})
    assert close(of_steps(gigpo(made, twice).advantages, made), [[2 * each for each in row] for row in wanted])
    # After state 1 returns are equal, which says nothing: second steps count state 2 alone, 3, 3 and 0, mean 2.
    level = batch([("PAOA", [1, 3]), ("PAOA", [2, 3]), ("PAOA", [0, 0])], states=[1, 2, 1, 2, 3, 2])
    chosen = params("gigpo", gigpo={"history": 1})
    assert close(of_steps(gigpo(level, chosen).advantages, level), [[-0.5, 1], [0.5, 1], [0, -2]])


def test_equal_states_of_two_groups_are_not_compared() -> None:
    rows = [("PA", [0]), ("PA", [2]), ("PA", [10]), ("PA", [20])]
    made = batch(rows, groups=[0, 0, 1, 1], states=[5, 5, 5, 5])
    assert close(of_steps(gigpo(made, params("gigpo")).advantages, made), [[-2], [2], [-10], [10]])


def test_states_are_the_contexts_that_were_read() -> None:
    """Token ids before the step, from where its context starts, and nothing after or before."""
    whole = trajectory("PAOAPOA")  # token ids 0 to 6
    first, second, third = step_states(whole, by_env=True)
    assert len({first, second, third}) == 3
    # The same first action and the same observation, and another second action.
    other = replace(whole, token_ids=np.array([0, 1, 2, 9, 4, 5, 6], np.int32))
    assert step_states(other, by_env=True)[:2].tolist() == [first, second]
    assert step_states(other, by_env=True)[2] != third
    # A context that starts at the fourth token hides what differs before it.
    split, split_other = (replace(each, context_starts=[0, 4]) for each in (whole, other))
    assert step_states(split, by_env=True)[2] == step_states(split_other, by_env=True)[2] != third
    assert len(step_states(trajectory("PP"), by_env=True)) == 0


def test_a_stated_key_is_the_state_if_it_is_asked_for() -> None:
    """Two episodes reach the same board by other ways; a step that states none goes by its context."""
    one = trajectory("PAOAOA", [{}, {"state": "P_G"}, {"state": "_PG"}])
    other = replace(
        trajectory("PAOAOA", [{}, {"state": "_PG"}, {"state": "P_G"}]), token_ids=np.array([0, 9, 2, 3, 4, 5], np.int32)
    )
    (start, there, beyond), found = (step_states(each, by_env=True).tolist() for each in (one, other))
    assert found == [start, beyond, there]
    assert len({start, there, beyond}) == 3
    assert len({*step_states(one, by_env=False).tolist(), *step_states(other, by_env=False).tolist()}) == 5


@pytest.mark.parametrize(("state", "expected"), [("env", [[4, 4], [-4, -4]]), ("context", [[4, 2], [-4, -2]])])
def test_credit_compares_what_it_is_asked_to(state: str, expected: list[list[float]]) -> None:
    """Returns 4 and 0, mean 2, from the same board at both steps, though the first actions differ."""
    last = [{"state": "P", "rewards": {"progress": reward}} for reward in (4, 0)]
    rows = [trajectory("PAOA", [{"state": "_"}, step], name=str(i)) for i, step in enumerate(last)]
    rows[1] = replace(rows[1], token_ids=np.array([0, 9, 2, 3], np.int32))
    chosen = params("gigpo", gigpo={"state": state})
    found = [credit.advantages[[1, 3]].tolist() for credit in assign(rows, None, chosen)[0]]
    assert found == expected
