"""Episodes to run for given questions."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from textwrap import shorten

from agent_r1.envs.tool_env import CLOSED_BOOK, FROM_PASSAGES, SYSTEM, AnswerEnv, ToolEnv
from agent_r1.params import EnvParams
from agent_r1.records import Passage, Question
from agent_r1.rollout.episodes import Attempt
from agent_r1.search.base import Search
from agent_r1.tools.search import search_tool


def tool_attempts(
    questions: Sequence[Question], index: Search, params: EnvParams, *, samples: int = 1, first_group: int = 0
) -> list[Attempt]:
    """`samples` attempts at each question with the search tool; the attempts of a question are a group.

    Groups are numbered from `first_group`.
    """
    env = _with_search(index, params)
    return [
        Attempt(question_id=question.question_id, group=group, sample=sample, env=env(question))
        for group, question in enumerate(questions, start=first_group)
        for sample in range(samples)
    ]


def asked_attempt(text: str, index: Search, params: EnvParams, *, sample: int = 0) -> Attempt:
    """An attempt at a question that a person asks, with the search tool; `sample` tells repetitions apart."""
    return Attempt(question_id=shorten(text, 80), group=0, sample=sample, env=_with_search(index, params)(text))


def naive_rag_attempts(questions: Sequence[Question], index: Search, params: EnvParams) -> list[Attempt]:
    """One attempt at each question, from the passages that the question itself finds."""
    found = index.search([question.text for question in questions], params.top_k)
    return _answer_attempts(questions, found, FROM_PASSAGES, params)


def closed_book_attempts(questions: Sequence[Question], params: EnvParams) -> list[Attempt]:
    """One attempt at each question, with nothing to read."""
    return _answer_attempts(questions, [[] for _ in questions], CLOSED_BOOK, params)


def gold_passages_attempts(
    questions: Sequence[Question], gold: Mapping[str, Sequence[Passage]], params: EnvParams
) -> list[Attempt]:
    """One attempt at each question with gold passages, from those; `gold` has them by question_id."""
    known = [question for question in questions if question.question_id in gold]
    return _answer_attempts(known, [gold[question.question_id] for question in known], FROM_PASSAGES, params)


def _with_search(index: Search, params: EnvParams) -> Callable[[Question | str], ToolEnv]:
    """Makes the environment of a question in which the policy can search."""
    tools = [search_tool(index, top_k=params.top_k)]
    return partial(ToolEnv, tools=tools, max_steps=params.max_steps, system=_told(SYSTEM, params))


def _answer_attempts(
    questions: Sequence[Question], passages: Sequence[Sequence[Passage]], task: str, params: EnvParams
) -> list[Attempt]:
    system = _told(task, params)
    return [
        Attempt(question_id=question.question_id, group=group, sample=0, env=AnswerEnv(question, shown, system=system))
        for group, (question, shown) in enumerate(zip(questions, passages, strict=True))
    ]


def _told(task: str, params: EnvParams) -> str:
    """The system message: the task, and the configured instructions."""
    return f"{task} {params.instructions}" if params.instructions else task
