"""`prepare`: the data sets, generated, from files, or worlds that are drawn by seeds."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from agent_r1.params.games import GameWorld
from agent_r1.params.outside import OthersParams
from agent_r1.params.sections import Count, Names, Natural, Refusals, Section, Share, nearest, repeated
from agent_r1.params.worlds import SPLITS

BUILT_IN = "atlas"
ROUNDING = 1e-9  # by which a sum of shares may miss 1

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

    def refusals(self) -> Refusals:
        total = sum(self.model_dump().values())
        if abs(total - 1) > ROUNDING:
            yield f"the kinds of questions together make {total:.4g} of all; give them shares that add up to 1"


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


WorldParams = GameWorld | OthersParams
World = Annotated[WorldParams, Field(discriminator="env")]


class PrepareParams(Section):
    datasets: Names
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

    def refusals(self) -> Refusals:
        names = [BUILT_IN, *self.files, *self.worlds]
        if BUILT_IN in {*self.files, *self.worlds}:
            yield f"files and worlds: {BUILT_IN!r} is the built-in data set; name yours differently"
        for name, files in self.files.items():
            if name in self.worlds:
                yield f"{name!r} stands under files and under worlds; name one of them differently"
            if not files.splits:
                yield f"files.{name}: a data set needs a file of questions; give it train, dev or test"
            if files.format == "generic" and files.corpus is None:
                yield f"files.{name}: rows of format generic bring no passages along; name a corpus to search"
        for name in self.datasets:
            if name not in names:
                yield f"datasets names {name!r}, which neither files nor worlds define{nearest(name, names)}"
        yield from repeated(datasets=self.datasets)
