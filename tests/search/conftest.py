"""Passages in files, and settings of every kind of search."""

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from agent_r1.params import load
from agent_r1.params.search import DenseParams, HybridParams, SearchParams
from agent_r1.records import Passage
from agent_r1.tables import write_rows

TEXTS = [
    ("Tesk", "Tesk is a city in Veld."),
    ("Mara Quill", "Mara Quill was born in Tesk."),
    ("Veld", "Veld is a country."),
    ("Norn", "Twin."),
    ("Norn", "Twin."),
]


@pytest.fixture(scope="session")
def passages() -> list[Passage]:
    return [Passage(passage_id=str(i), title=title, text=text) for i, (title, text) in enumerate(TEXTS)]


@pytest.fixture
def stored(tmp_path: Path, passages: list[Passage]) -> Path:
    write_rows(tmp_path / "passages.parquet", passages, Passage)
    return tmp_path / "passages.parquet"


@pytest.fixture(scope="session")
def write_passages() -> Callable[[Path, Sequence[str]], Path]:
    """A Parquet file of untitled passages with some texts."""

    def write(path: Path, texts: Sequence[str]) -> Path:
        rows = [Passage(passage_id=str(i), title="", text=text) for i, text in enumerate(texts)]
        write_rows(path, rows, Passage)
        return path

    return write


@pytest.fixture
def dense_params(tiny_encoder: Path) -> DenseParams:
    return DenseParams(
        encoder=str(tiny_encoder),
        query_prefix="query: ",
        passage_prefix="passage: ",
        pooling="mean",
        max_tokens=32,
        batch_size=2,
        faiss="flat",
        nlist=0,
        nprobe=0,
    )


@pytest.fixture
def search_params(dense_params: DenseParams) -> SearchParams:
    own = load(Path(__file__).parents[2] / "params.yaml").search
    fused = HybridParams(rrf_constant=60, candidates=3)
    return own.model_copy(update={"dense": dense_params, "hybrid": fused})
