"""The environments that questions are attempted in, by the name that a question has for its own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from agent_r1.envs.base import Attempt, Env
from agent_r1.envs.shared import Shared
from agent_r1.envs.tool_env import with_tools
from agent_r1.params.sections import nearest
from agent_r1.records import QA, Question

Kind = Callable[[Question, Shared, int], Env]  # made for one episode, by the seed of its own chance

KINDS: dict[str, Kind] = {
    QA: with_tools,
}


def attempts_at(
    questions: Sequence[Question], shared: Shared, *, samples: int = 1, first_group: int = 0
) -> list[Attempt]:
    """`samples` attempts at each question in its own environment; the attempts of a question are a group.

    Groups are numbered from `first_group`. Raises ValueError for a question whose environment there is not, or cannot
    be made of its setup.
    """
    return [
        Attempt(
            question_id=question.question_id,
            group=group,
            sample=sample,
            env=partial(_kind(question), question, shared),
        )
        for group, question in enumerate(questions, start=first_group)
        for sample in range(samples)
    ]


def _kind(question: Question) -> Kind:
    if question.env not in KINDS:
        raise ValueError(
            f"question {question.question_id!r}: there is no env {question.env!r}{nearest(question.env, KINDS)}"
        )
    return KINDS[question.env]
