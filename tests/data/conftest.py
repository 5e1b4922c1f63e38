"""A small Atlas, and the one of params.yaml, each generated once."""

from __future__ import annotations

from pathlib import Path

import pytest

from agent_r1.data.atlas import World, build_world
from agent_r1.data.questions import Plan, generate_questions
from agent_r1.params import load
from agent_r1.params.prepare import AtlasParams, AtlasShares, PrepareParams
from agent_r1.records import Question

SEED = 3


@pytest.fixture(scope="session")
def prepare_params() -> PrepareParams:
    """The `prepare` section of the project's own params.yaml."""
    return load(Path(__file__).parents[2] / "params.yaml").prepare


@pytest.fixture(scope="session")
def atlas_params() -> AtlasParams:
    return AtlasParams(
        people=61,
        films=30,
        companies=12,
        cities=10,
        countries=4,
        train_questions=200,
        dev_questions=40,
        test_questions=40,
        shares=AtlasShares(lookup=0.2, two_hops=0.35, three_hops=0.3, yes_no=0.075, earlier=0.075, sum=0.0, age=0.0),
    )


@pytest.fixture(scope="session")
def atlas(atlas_params: AtlasParams) -> World:
    return build_world(atlas_params, SEED)


@pytest.fixture(scope="session")
def rows(atlas: World, atlas_params: AtlasParams) -> list[tuple[Question, Plan]]:
    return generate_questions(atlas, atlas_params, SEED)
