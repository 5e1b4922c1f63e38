"""A small Atlas, and the one of params.yaml, each generated once."""

import json
from pathlib import Path

import pytest

from agent_r1.data.atlas import World, build_world
from agent_r1.data.questions import Plan, generate_questions
from agent_r1.params import load
from agent_r1.params.prepare import AtlasParams, AtlasShares, PrepareParams
from agent_r1.records import Question

SEED = 3


def searched(thought: str, query: str, tool: str = "search", argument: str = "query") -> str:
    """The action of a demonstration that thinks and calls."""
    call = json.dumps({"name": tool, "arguments": {argument: query}})
    return f"<think>{thought}</think>\n<tool_call>\n{call}\n</tool_call>"


def ended(thought: str, answer: str) -> str:
    """The last action of a demonstration."""
    return f"<think>{thought}</think>\n<answer> {answer} </answer>"


@pytest.fixture(scope="session")
def prepare_params() -> PrepareParams:
    """The `prepare` section of the project's own params.yaml."""
    return load(Path(__file__).parents[2] / "params.yaml").prepare


@pytest.fixture(scope="session")
def atlas_params() -> AtlasParams:
    shares = AtlasShares(lookup=0.2, two_hops=0.35, three_hops=0.3, yes_no=0.075, earlier=0.075, sum=0.0, age=0.0)
    sizes = {"people": 61, "films": 30, "companies": 12, "cities": 10, "countries": 4}
    questions = {"train_questions": 200, "dev_questions": 40, "test_questions": 40}
    return AtlasParams(**sizes, **questions, shares=shares)


@pytest.fixture(scope="session")
def atlas(atlas_params: AtlasParams) -> World:
    return build_world(atlas_params, SEED)


@pytest.fixture(scope="session")
def rows(atlas: World, atlas_params: AtlasParams) -> list[tuple[Question, Plan]]:
    return generate_questions(atlas, atlas_params, SEED)
