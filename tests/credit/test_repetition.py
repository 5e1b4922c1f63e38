"""Repetition of answers and thoughts, counted by hand on small batches."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from agent_r1.credit.metrics import answer_repetition, repetition_metrics, thought_repetition
from agent_r1.records import Trajectory
from tests.credit.letters import trajectory


def says(group: int, *actions: Sequence[int], answer: str = "") -> Trajectory:
    """A prompt token 1, and the actions with an observation token 2 between them."""
    letters = "P" + "O".join("A" * len(action) for action in actions)
    ids = [1, *actions[0], *(token for action in actions[1:] for token in (2, *action))]
    return replace(trajectory(letters, group=group), token_ids=np.array(ids, np.int32), answer=answer)


def test_thoughts_by_hand() -> None:
    """Bigrams. Question 0: {56, 67} and {56}; question 1: {56, 89}; question 2: {67}.

    Over the 6 (trajectory, bigram) pairs, the share of the other questions' trajectories with the bigram:
    56 of the first two: 1 of 2 each; 67 of the first: 1 of 2; 56 of the third: 2 of 3; 89: 0; 67 of the fourth: 1 of 3.
    """
    rows = [says(0, [5, 6, 7]), says(0, [5, 6]), says(1, [5, 6], [8, 9]), says(2, [6, 7])]
    expected = (1 / 2 + 1 / 2 + 1 / 2 + 2 / 3 + 0 + 1 / 3) / 6
    assert thought_repetition(rows, 2) == pytest.approx(expected)


def test_ngrams_are_within_actions_and_counted_once() -> None:
    """Across the observation stands 6 2 8, and 56 occurs twice in the first: one shared bigram of 56, 65, 89."""
    rows = [says(0, [5, 6, 5, 6], [8, 9]), says(1, [5, 6])]
    assert thought_repetition(rows, 2) == pytest.approx((1 + 0 + 0 + 1) / 4)


def test_answers_by_hand() -> None:
    """Of three questions: "paris" is half of the first, all of the second, none of the third: (1/2 + 1) / 3."""
    answers = [(0, "Paris"), (0, "Rome"), (1, "the Paris!"), (2, "Oslo")]
    assert answer_repetition([says(group, [5], answer=answer) for group, answer in answers]) == pytest.approx(1.5 / 3)


def test_no_answer_and_one_question_have_nothing_in_common() -> None:
    silent = [says(group, [5]) for group in range(3)]
    assert answer_repetition(silent) == 0
    assert answer_repetition([*silent, says(3, [5], answer="Oslo")]) == 1 / 4
    alike = [says(0, [5, 6, 7, 8], answer="Oslo")] * 2
    assert repetition_metrics(alike) == {}
    other = says(7, [5, 6, 7, 8], answer="Oslo")
    shares = {"rollout/answer_repetition": 1, "rollout/thought_repetition": 1}
    assert repetition_metrics([*alike, other]) == shares
