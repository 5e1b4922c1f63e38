"""The BM25 index: ranking by hand, ties, what is on disk, and recall on real questions."""

from __future__ import annotations

import gzip
import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from agent_r1.records import Passage
from agent_r1.search import bm25
from agent_r1.search.bm25 import BM25

HOTPOTQA = Path(__file__).parents[2].parent / "shared/data/multihop/hotpotqa"

PASSAGES = [
    Passage(passage_id="0", title="Tesk", text="Tesk is a city in Veld."),
    Passage(passage_id="1", title="Mara Quill", text="Mara Quill was born in Tesk."),
    Passage(passage_id="2", title="Veld", text="Veld is a country."),
    Passage(passage_id="3", title="Norn", text="Twin."),
    Passage(passage_id="4", title="Norn", text="Twin."),
]


@pytest.fixture
def index(tmp_path: Path) -> BM25:
    bm25.build(PASSAGES, tmp_path / "bm25", k1=1.2, b=0.75)
    return BM25.load(tmp_path / "bm25")


def ids(results: list[list[Passage]]) -> list[list[str]]:
    return [[passage.passage_id for passage in result] for result in results]


def test_best_passages_come_first_and_titles_count(index: BM25) -> None:
    # "tesk" twice in passage 0 (title and text), once in 1; "country" only in 2
    assert ids(index.search(["Tesk", "COUNTRY!", "mara quill"], k=2)) == [["0", "1"], ["2"], ["1"]]


def test_found_passages_are_whole(index: BM25) -> None:
    assert index.search(["country"], k=1) == [[PASSAGES[2]]]


def test_equal_scores_rank_in_passage_order(index: BM25) -> None:
    assert ids(index.search(["norn twin"], k=2)) == [["3", "4"]]
    assert ids(index.search(["norn twin"], k=1)) == [["3"]]


@pytest.mark.parametrize("query", ["", "  ?! ", "unheard"])
def test_a_query_without_a_known_word_finds_nothing(index: BM25, query: str) -> None:
    assert index.search([query], k=2) == [[]]


def test_scores_follow_the_formula(tmp_path: Path) -> None:
    """Two passages of 2 and 4 words (average 3); "x" occurs once in the first and twice in the second.

    Lucene's BM25: ln(1 + (2 - 2 + .5) / (2 + .5)) x tf / (tf + 1.2 x (1 - .75 + .75 x length / 3)).
    """
    passages = [Passage(passage_id="0", title="x", text="y"), Passage(passage_id="1", title="x", text="x y z")]
    bm25.build(passages, tmp_path / "bm25", k1=1.2, b=0.75)
    idf = math.log(1 + 0.5 / 2.5)
    expected = [idf * 1 / (1 + 1.2 * (0.25 + 0.75 * 2 / 3)), idf * 2 / (2 + 1.2 * (0.25 + 0.75 * 4 / 3))]
    found = BM25.load(tmp_path / "bm25")._index.get_scores(["x"])
    np.testing.assert_allclose(found, expected, rtol=1e-6)


def test_words_fold_case_accents_and_plurals_but_keep_short_words() -> None:
    assert bm25.words("Émile's Films, a boss is U2") == ["emile", "s", "film", "a", "boss", "is", "u2"]


def test_building_again_replaces_and_leaves_nothing_else(tmp_path: Path) -> None:
    bm25.build(PASSAGES, tmp_path / "bm25", k1=1.2, b=0.75)
    bm25.build(PASSAGES[2:3], tmp_path / "bm25", k1=1.2, b=0.75)
    assert ids(BM25.load(tmp_path / "bm25").search(["tesk", "veld"], k=2)) == [[], ["2"]]
    assert [path.name for path in tmp_path.iterdir()] == ["bm25"]


def test_a_failed_build_keeps_the_old_index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bm25.build(PASSAGES, tmp_path / "bm25", k1=1.2, b=0.75)

    def full_disk(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(bm25, "write_rows", full_disk)
    with pytest.raises(OSError, match="No space"):
        bm25.build(PASSAGES[:1], tmp_path / "bm25", k1=1.2, b=0.75)
    assert ids(BM25.load(tmp_path / "bm25").search(["country"], k=2)) == [["2"]]
    assert [path.name for path in tmp_path.iterdir()] == ["bm25"]


def test_a_missing_index_and_an_empty_corpus_are_refused(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="prepare"):
        BM25.load(tmp_path / "bm25")
    with pytest.raises(ValueError, match="nothing to index"):
        bm25.build([], tmp_path / "bm25", k1=1.2, b=0.75)


def test_the_same_passages_give_the_same_bytes_in_another_process(tmp_path: Path) -> None:
    bm25.build(PASSAGES, tmp_path / "here", k1=1.2, b=0.75)
    script = (
        "import sys; from pathlib import Path; from agent_r1.search import bm25; from agent_r1.tables import read_rows;"
        "from agent_r1.records import Passage; passages = read_rows(Path(sys.argv[1]) / 'passages.parquet', Passage);"
        "bm25.build(passages, Path(sys.argv[2]), k1=1.2, b=0.75)"
    )
    subprocess.run(
        [sys.executable, "-c", script, str(tmp_path / "here"), str(tmp_path / "there")],
        check=True,
        env={"PYTHONHASHSEED": "7"},
    )
    for file in (tmp_path / "here").iterdir():
        assert file.read_bytes() == (tmp_path / "there" / file.name).read_bytes(), file.name


@pytest.mark.skipif(not HOTPOTQA.exists(), reason="the shared HotpotQA rows are not here")
def test_recall_on_real_hotpotqa_questions(tmp_path: Path) -> None:
    """Share of gold passages in the top k, at least what another BM25 found (shared data README, 300 questions)."""
    with gzip.open(HOTPOTQA / "corpus.jsonl.gz", "rt") as lines:
        rows = map(json.loads, lines)
        corpus = [Passage(passage_id=row["id"], title=row["title"], text=row["text"]) for row in rows]
    questions = json.loads(gzip.decompress((HOTPOTQA / "hotpot_dev_distractor_v1.subset.json.gz").read_bytes()))
    bm25.build(corpus, tmp_path / "bm25", k1=1.2, b=0.75)
    found = BM25.load(tmp_path / "bm25").search([row["question"] for row in questions], k=10)
    for count in (300, len(questions)):
        for k, least in ((2, 0.535), (5, 0.707), (10, 0.822)):
            assert recall(questions[:count], found, k) >= least, (count, k)


def recall(questions: list[dict[str, Any]], found: list[list[Passage]], k: int) -> float:
    golds = [{title for title, _ in row["supporting_facts"]} for row in questions]
    hits = [len(gold & {passage.title for passage in result[:k]}) for gold, result in zip(golds, found, strict=False)]
    return sum(hits) / sum(len(gold) for gold in golds)
