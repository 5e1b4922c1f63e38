"""All rows of the three releases' subsets, where they are: counts, hops, kinds and the awkward ones."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from agent_r1.answers import normalize
from agent_r1.data.mixture import FORMATS
from agent_r1.data.prepare import write
from agent_r1.data.sources import read
from agent_r1.params import FilesParams, PrepareParams, SplitParams
from agent_r1.records import Passage, Question
from agent_r1.tables import read_rows

SHARED = Path(__file__).parents[2].parent / "shared/data/multihop"
FILES = {
    "hotpotqa": ("hotpot_train_v1.1.subset.json.gz", "hotpot_dev_distractor_v1.subset.json.gz"),
    "2wikimultihopqa": ("train.subset.json.gz", "dev.subset.json.gz"),
    "musique": ("musique_ans_v1.0_train.subset.jsonl.gz", "musique_ans_v1.0_dev.subset.jsonl.gz"),
}
KINDS = {  # of the test split, each with its hops
    "hotpotqa": {("bridge", 2): 1455, ("comparison", 2): 378},
    "2wikimultihopqa": {
        ("compositional", 2): 261,
        ("bridge_comparison", 4): 175,
        ("comparison", 2): 160,
        ("inference", 2): 75,
    },
    "musique": {
        ("2hop", 2): 361,
        ("3hop1", 3): 104,
        ("3hop2", 3): 24,
        ("4hop1", 4): 40,
        ("4hop2", 4): 6,
        ("4hop3", 4): 14,
    },
}
pytestmark = pytest.mark.skipif(not SHARED.is_dir(), reason="the shared rows are not here")


def test_all_rows_of_the_three_become_one_mixture(prepare_params: PrepareParams, tmp_path: Path) -> None:
    files = {name: release(name, corpus=True) for name in FILES}
    write(prepare_params.model_copy(update={"datasets": list(FILES), "files": files}), tmp_path)
    questions = read_rows(tmp_path / "questions.parquet", Question)
    assert Counter((question.dataset, question.split) for question in questions) == {
        ("hotpotqa", "train"): 300,
        ("hotpotqa", "test"): 1833,
        ("2wikimultihopqa", "train"): 500,
        ("2wikimultihopqa", "test"): 671,
        ("musique", "train"): 100,
        ("musique", "test"): 549,
    }
    for name, kinds in KINDS.items():
        test = [question for question in questions if (question.dataset, question.split) == (name, "test")]
        assert Counter((question.kind, question.hops) for question in test) == kinds
    closed = Counter(question.dataset for question in questions if question.answers[0] in ("yes", "no"))
    assert closed["2wikimultihopqa"] == 59 + 166
    passages = read_rows(tmp_path / "passages.parquet", Passage)
    assert len({passage.passage_id for passage in passages}) == len(passages)
    lines = {
        (row.fields["title"], row.fields["text"]) for name in FILES for row in read(SHARED / name / "corpus.jsonl.gz")
    }
    assert {(passage.title, passage.text) for passage in passages} == {(title, text.strip()) for title, text in lines}
    titles = {passage.title for passage in passages}
    assert all(title in titles for question in questions for title in question.gold_titles)


@pytest.mark.parametrize("name", FILES)
def test_without_a_corpus_the_rows_bring_all_gold_passages(
    name: str, prepare_params: PrepareParams, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    params = prepare_params.model_copy(update={"datasets": [name], "files": {name: release(name, corpus=False)}})
    write(params, tmp_path)
    assert not [record for record in caplog.records if record.levelname == "WARNING"]


def test_awkward_rows_of_2wiki_are_there() -> None:
    rows = [row for path in FILES["2wikimultihopqa"] for row in read(SHARED / "2wikimultihopqa" / path)]
    assert sum("answer_id" not in row.fields for row in rows) == 6
    beyond = [row for row in rows if _cites_beyond(row.fields)]
    assert len(beyond) == 3 + 6
    assert [FORMATS["2wikimultihopqa"].question(row, "w", "dev").hops for row in beyond] == [
        len({title for title, _ in row.fields["supporting_facts"]}) for row in beyond
    ]


def test_answers_of_2wiki_are_in_their_context_once_normalised() -> None:
    as_written = normalised = spans = 0
    for row in read(SHARED / "2wikimultihopqa/dev.subset.json.gz"):
        answer = row.fields["answer"]
        text = " ".join(f"{title} {body}" for title, body in FORMATS["2wikimultihopqa"].paragraphs(row))
        if answer not in ("yes", "no"):
            spans += 1
            as_written += answer in text
            normalised += normalize(answer) in normalize(text.replace("- ", "-"))  # its texts say "Saint- Cyr"
    assert as_written < 0.8 * spans
    assert normalised == spans


def _cites_beyond(fields: dict[str, list[list[str]]]) -> bool:
    lengths = {title: len(sentences) for title, sentences in fields["context"]}
    return any(int(number) >= lengths[title] for title, number in fields["supporting_facts"])


def release(name: str, *, corpus: bool) -> FilesParams:
    train, test = (SplitParams(file=SHARED / name / file, questions=0) for file in FILES[name])
    return FilesParams.model_validate(
        {
            "format": name,
            "train": train.model_dump(),
            "test": test.model_dump(),
            "corpus": SHARED / name / "corpus.jsonl.gz" if corpus else None,
        }
    )


def test_the_rows_are_what_the_readme_says() -> None:
    paragraphs = Counter(len(row.fields["paragraphs"]) for row in read(SHARED / "musique" / FILES["musique"][1]))
    assert paragraphs == {20: 548, 19: 1}
    contexts = Counter(len(row.fields["context"]) for row in read(SHARED / "hotpotqa" / FILES["hotpotqa"][1]))
    assert sum(times for length, times in contexts.items() if length < 10) == 9
