"""From finished episodes to graded answers."""

from __future__ import annotations

import random
from collections.abc import Sequence

from agent_r1.answers import contains, exact_match, f1
from agent_r1.records import CallStatus, Prediction, Question, Trajectory


def asked_questions(questions: Sequence[Question], count: int, seed: int) -> list[Question]:
    """`count` questions of the test split, drawn by the seed, in their order; all of them for a count of 0.

    Raises:
        ValueError: the test split is empty or has fewer questions.
    """
    test = [question for question in questions if question.split == "test"]
    if not test:
        raise ValueError("there are no test questions; prepare data with a test split")
    if count > len(test):
        raise ValueError(f"evaluate.questions is {count} and the test split has {len(test)}; lower it, or 0 for all")
    chosen = random.Random(seed).sample(range(len(test)), count) if count else range(len(test))
    return [test[i] for i in sorted(chosen)]


def predict(trajectories: Sequence[Trajectory], questions: Sequence[Question], run: str, seed: int) -> list[Prediction]:
    """One prediction per trajectory, in their order.

    An attempted call counts as a tool call whatever became of it; `gold_titles_found` adds up the unweighted
    `progress` rewards, which the environment gives once per gold passage.
    """
    by_id = {question.question_id: question for question in questions}
    return [_prediction(trajectory, by_id[trajectory.question_id], run, seed) for trajectory in trajectories]


def _prediction(trajectory: Trajectory, question: Question, run: str, seed: int) -> Prediction:
    return Prediction(
        run=run,
        seed=seed,
        policy_version=trajectory.policy_version,
        question_id=question.question_id,
        answer=trajectory.answer,
        em=exact_match(trajectory.answer, question.answers),
        f1=f1(trajectory.answer, question.answers),
        contains=contains(trajectory.answer, question.answers),
        steps=len(trajectory.steps),
        tool_calls=sum(step.call_status is not CallStatus.NONE for step in trajectory.steps),
        gold_titles_found=round(sum(step.rewards.get("progress", 0.0) for step in trajectory.steps)),
    )
