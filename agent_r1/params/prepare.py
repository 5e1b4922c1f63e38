"""`prepare`: the data sets and how they are mixed."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import Field, field_validator, model_validator

from agent_r1.params.sections import Count, Natural, Section, nearest

BUILT_IN = "atlas"

Format = Literal["hotpotqa", "2wikimultihopqa", "musique", "generic"]
DatasetName = Annotated[str, Field(pattern=r"^[A-Za-z0-9_.-]+$")]  # part of the names of metrics


class AtlasParams(Section):
    people: Annotated[int, Field(ge=20)]
    films: Annotated[int, Field(ge=10)]
    companies: Annotated[int, Field(ge=5)]
    cities: Annotated[int, Field(ge=5)]
    countries: Annotated[int, Field(ge=3)]
    train_questions: Count
    dev_questions: Count
    test_questions: Count


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

    @model_validator(mode="after")
    def _holds_something(self) -> Self:
        if not self.splits:
            raise ValueError("a data set needs a file of questions: give it train, dev or test")
        if self.format == "generic" and self.corpus is None:
            raise ValueError("rows of format generic bring no passages along; name a corpus to search")
        return self

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

    @field_validator("files")
    @classmethod
    def _built_in_name_is_taken(cls, files: dict[str, FilesParams]) -> dict[str, FilesParams]:
        if BUILT_IN in files:
            raise ValueError(f"{BUILT_IN!r} is the built-in data set; name the one in files differently")
        return files

    @model_validator(mode="after")
    def _datasets_exist(self) -> Self:
        known = [BUILT_IN, *self.files]
        for name in self.datasets:
            if name not in known:
                raise ValueError(f"datasets names {name!r}, which prepare.files does not define{nearest(name, known)}")
            if self.datasets.count(name) > 1:
                raise ValueError(f"datasets names {name!r} twice; name each data set once")
        return self

    @property
    def dataset(self) -> str:
        """All data sets as one name, such as `hotpotqa+musique`."""
        return "+".join(self.datasets)
