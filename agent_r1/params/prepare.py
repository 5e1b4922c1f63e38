"""`prepare`: the data sets, drawn and from files."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, field_validator

from agent_r1.params.sections import Count, Natural, Section, Share, nearest
from agent_r1.params.worlds import World

BUILT_IN = "atlas"
ROUNDING = 1e-9  # by which a sum of shares may miss 1

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

    def objections(self) -> Iterator[str]:
        total = sum(self.model_dump().values())
        if abs(total - 1) > ROUNDING:
            yield f"the kinds of questions together make {total:.4g} of all; give them shares that add up to 1"


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
    questions: Natural  # drawn at random; 0 takes all


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

    def objections(self) -> Iterator[str]:
        if not self.splits:
            yield "a data set needs a file of questions: give it train, dev or test"
        if self.format == "generic" and self.corpus is None:
            yield "rows of format generic bring no passages along; name a corpus to search"


class PrepareParams(Section):
    datasets: Annotated[list[str], Field(min_length=1)]
    seed: Natural
    atlas: AtlasParams
    files: dict[DatasetName, FilesParams]
    worlds: dict[DatasetName, World]

    @field_validator("files", "worlds")
    @classmethod
    def _built_in_name_is_taken(cls, named: dict[str, Any]) -> dict[str, Any]:
        if BUILT_IN in named:
            raise ValueError(f"{BUILT_IN!r} is the built-in data set; name yours differently")
        return named

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

    def objections(self) -> Iterator[str]:
        known = [BUILT_IN, *self.files, *self.worlds]
        for name in self.files.keys() & self.worlds.keys():
            yield f"{name!r} stands under files and under worlds; name one of them differently"
        for name in self.datasets:
            if name not in known:
                yield f"datasets names {name!r}, which neither files nor worlds define{nearest(name, known)}"
            if self.datasets.count(name) > 1:
                yield f"datasets names {name!r} twice; name each data set once"
