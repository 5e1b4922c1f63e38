"""Atlas, the built-in data set: everything follows from the parameters and a seed."""

from __future__ import annotations

from agent_r1.data import questions, world
from agent_r1.data.plans import Facts, Plan
from agent_r1.params import AtlasParams
from agent_r1.records import Passage, Question


def generate(params: AtlasParams, seed: int) -> tuple[list[Question], list[Passage]]:
    """The questions of all splits and the passages that answer them.

    Raises:
        ValueError: the world is too small for the questions, or the pools of names for the world.
    """
    atlas = world.build(params, seed)
    rows = questions.generate(atlas, params, seed)
    return [question for question, _ in rows], world.passages(atlas, seed)


def plans(params: AtlasParams, seed: int) -> dict[str, Plan]:
    """The plan of every question, by question_id."""
    rows = questions.generate(world.build(params, seed), params, seed)
    return {question.question_id: plan for question, plan in rows}


def facts(params: AtlasParams, seed: int) -> Facts:
    """All that is true in the world."""
    return world.build(params, seed).facts
