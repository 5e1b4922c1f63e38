"""`prepare`: the data set."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from agent_r1.params.sections import Count, Natural, Section


class AtlasParams(Section):
    people: Annotated[int, Field(ge=20)]
    films: Annotated[int, Field(ge=10)]
    companies: Annotated[int, Field(ge=5)]
    cities: Annotated[int, Field(ge=5)]
    countries: Annotated[int, Field(ge=3)]
    train_questions: Count
    dev_questions: Count
    test_questions: Count


class HotpotParams(Section):
    train: Path
    dev: Path
    max_questions: Natural


class PrepareParams(Section):
    dataset: Literal["atlas", "hotpotqa"]
    seed: Natural
    atlas: AtlasParams
    hotpotqa: HotpotParams
