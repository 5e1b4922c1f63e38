"""Episodes to run for given questions."""

from __future__ import annotations

from collections.abc import Sequence
from textwrap import shorten

from agent_r1.envs.naive_rag import NaiveRagEnv
from agent_r1.envs.tool_env import ToolEnv
from agent_r1.params import EnvParams
from agent_r1.records import Question
from agent_r1.rollout.episodes import Attempt
from agent_r1.search.base import Search
from agent_r1.tools.search import search_tool


def tool_attempts(
    questions: Sequence[Question], index: Search, params: EnvParams, *, samples: int = 1, first_group: int = 0
) -> list[Attempt]:
    """`samples` attempts at each question with the search tool; the attempts of a question are a group.

    Groups are numbered from `first_group`.
    """
    tools = [search_tool(index, top_k=params.top_k)]
    return [
        Attempt(
            question_id=question.question_id,
            group=group,
            sample=sample,
            env=ToolEnv(question, tools, max_steps=params.max_steps),
        )
        for group, question in enumerate(questions, start=first_group)
        for sample in range(samples)
    ]


def asked_attempt(text: str, index: Search, params: EnvParams, *, sample: int = 0) -> Attempt:
    """An attempt at a question that a person asks, with the search tool; `sample` tells repetitions apart."""
    env = ToolEnv(text, [search_tool(index, top_k=params.top_k)], max_steps=params.max_steps)
    return Attempt(question_id=shorten(text, 80), group=0, sample=sample, env=env)


def naive_rag_attempts(questions: Sequence[Question], index: Search, params: EnvParams) -> list[Attempt]:
    """One attempt at each question, from the passages that the question itself finds."""
    return [
        Attempt(
            question_id=question.question_id,
            group=group,
            sample=0,
            env=NaiveRagEnv(question, index, top_k=params.top_k),
        )
        for group, question in enumerate(questions)
    ]
