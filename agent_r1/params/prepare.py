"""`prepare`: the data sets, generated, from files, or worlds that are drawn by seeds."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field

from agent_r1.params.sections import Count, Natural, Section, Share

BUILT_IN = "atlas"
SPLITS = ("train", "dev", "test")

Format = Literal["hotpotqa", "2wikimultihopqa", "musique", "generic", "flashrag"]
DatasetName = Annotated[str, Field(pattern=r"^[A-Za-z0-9_.-]+$")]  # part of the names of metrics


class AtlasShares(Section):
    """How many of the questions are of each kind, in the order of the generator."""

    lookup: Share
    two_hops: Share
    three_hops: Share
    yes_no: Share
    earlier: Share
    sum: Share
    age: Share


# The searches that a question of each kind takes.
HOPS = {"lookup": 1, "two_hops": 2, "three_hops": 3, "yes_no": 2, "earlier": 2, "sum": 2, "age": 2}


class AtlasParams(Section):
    people: Annotated[int, Field(ge=20)]
    films: Annotated[int, Field(ge=10)]
    companies: Annotated[int, Field(ge=5)]
    cities: Annotated[int, Field(ge=5)]
    countries: Annotated[int, Field(ge=3)]
    train_questions: Count
    dev_questions: Count
    test_questions: Count
    shares: AtlasShares


class SplitParams(Section):
    file: Path  # or a folder, or a pattern such as train-*.parquet
    questions: Natural = 0  # drawn at random; 0 takes all


class FilesParams(Section):
    """A data set in files. A split that is left out has no questions: without `train` the data set is held out."""

    format: Format
    train: SplitParams | None = None
    dev: SplitParams | None = None
    test: SplitParams | None = None
    corpus: Path | None = None  # passages to search, a file, folder or pattern; without one, the rows' own paragraphs

    @property
    def splits(self) -> dict[str, SplitParams]:
        """The splits that there are, by name."""
        return {name: vars(self)[name] for name in SPLITS if vars(self)[name]}


Seeds = Annotated[list[Natural], Field(min_length=2, max_length=2)]  # from the first up to, and without, the second
Chance = Annotated[float, Field(gt=0, le=1)]


class WorldSeeds(Section):
    """Which seeds a world is drawn by. A split that is left out has no questions."""

    train: Seeds | None = None
    dev: Seeds | None = None
    test: Seeds | None = None

    @property
    def given(self) -> dict[str, list[int]]:
        """The splits that have seeds, with the first of them, and the one after the last."""
        return {split: vars(self)[split] for split in SPLITS if vars(self)[split]}


class LakeParams(WorldSeeds):
    """FrozenLake; see `agent_r1.games.lake`."""

    env: Literal["frozen_lake"]
    size: Annotated[int, Field(ge=2, le=12)]
    frozen: Chance  # of a cell to be ice, where there is no hole
    intended: Chance  # of a move to go where it was meant to; else it goes to one of the sides


class SokobanParams(WorldSeeds):
    """Sokoban with one box; see `agent_r1.games.sokoban`."""

    env: Literal["sokoban"]
    size: Annotated[int, Field(ge=5, le=12)]
    walls: Share  # chance of a cell inside to be one
    most_moves: Annotated[int, Field(ge=1, le=12)]  # of the best solution
    test_lengths: dict[Count, Count] = Field(default={})  # of the test's best solutions, how many boards of each length


class BanditParams(WorldSeeds):
    """The bandit of two arms, which the test has not seen so; see `agent_r1.games.bandit`."""

    env: Literal["bandit"]
    test_pairs: Literal["others", "turned"] = "others"  # RAGEN's of the test, or those of training, in the other order


class OthersParams(WorldSeeds):
    """An environment that others wrote, or an agent outside, which `env` declares under a name."""

    env: Literal["gymnasium", "openenv", "toolbox", "agent"]
    name: str
    reset: dict[str, Any] | None = None  # of openenv, arguments in which {seed}, {index} and {split} are the row's own
    row: dict[str, Any] | None = None  # of toolbox, the same
    file: Path | None = None  # of these and of an agent, rows of further arguments; seeds are their numbers, from 0


WorldParams = LakeParams | SokobanParams | BanditParams | OthersParams
World = Annotated[WorldParams, Field(discriminator="env")]


class PrepareParams(Section):
    datasets: Annotated[list[str], Field(min_length=1)]
    seed: Natural
    atlas: AtlasParams
    files: dict[DatasetName, FilesParams]
    worlds: dict[DatasetName, World]

    @property
    def dataset(self) -> str:
        """All data sets as one name, such as `hotpotqa+musique`."""
        return "+".join(self.datasets)

    @property
    def asks(self) -> bool:
        """Whether any data set asks for answers."""
        return any(name not in self.worlds for name in self.datasets)

    @property
    def plays(self) -> bool:
        """Whether any data set is a world of an environment."""
        return any(name in self.worlds and self.worlds[name].env != "agent" for name in self.datasets)
