"""Episodes to run for given questions."""

from __future__ import annotations

from collections.abc import Sequence

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
