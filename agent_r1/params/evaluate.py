"""`evaluate`: how policies are measured, and what runs are compared with."""

from __future__ import annotations

from typing import Annotated, Literal, get_args

from pydantic import Field

from agent_r1.params.sections import Natural, Section

# How a policy can be put to the test questions.
Protocol = Literal[
    "tool_call",  # it acts in the environment of the runs
    "naive_rag",  # the passages that the question itself finds are in the prompt, and it answers once
    "closed_book",  # it answers once, with nothing to read
    "gold_passages",  # the gold passages are in the prompt, and it answers once: no search could serve it better
]
PROTOCOLS: tuple[Protocol, ...] = get_args(Protocol)

Baseline = Literal["base_tool_call", "naive_rag", "closed_book", "gold_passages"]


class EvaluateParams(Section):
    seed: Natural
    questions: Natural
    bootstrap_samples: Annotated[int, Field(ge=100)]
