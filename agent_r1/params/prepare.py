"""`prepare`: the data sets, drawn and from files."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from agent_r1.params.sections import Count, Natural, Section, Share
from agent_r1.params.worlds import World

BUILT_IN = "atlas"

Format = Literal["hotpotqa", "2wikimultihopqa", "musique", "generic"]
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
        named = {"train": self.train, "dev": self.dev, "test": self.test}
        return {name: split for name, split in named.items() if split is not None}


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
        """Whether any data set is a world."""
        return any(name in self.worlds for name in self.datasets)
