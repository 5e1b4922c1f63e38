"""The prepare stage and the mixture that it writes: sizes, order, ids that mean one thing, passages that stand once."""

import errno
import gzip
import json
import logging
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent_r1.data import prepare as prepare_module
from agent_r1.data import sources
from agent_r1.data.from_titles import make_plans
from agent_r1.data.prepare import Distinct, Hashes, content_id, from_files, interleave, prepare, read_passages, write
from agent_r1.data.quality import Review
from agent_r1.params.prepare import AtlasParams, FilesParams, PrepareParams
from agent_r1.records import Passage, Question
from agent_r1.tables import read_rows
from tests.cases import cases, tables
from tests.trajectories import question_fields


def files(folder: Path, rows: int, questions: int) -> FilesParams:
    drawn_from = split(folder, "train.jsonl", [{"id": i, "question": f"{i}?", "answer": "x"} for i in range(rows)])
    return FilesParams.model_validate(
        {"format": "generic", "train": drawn_from | {"questions": questions}, "corpus": folder}
    )


def drawn(params: FilesParams, seed: int = 0, name: str = "own") -> list[int]:
    size, items = from_files(name, params, "train", seed)
    ids = [int(entry.question.question_id) for entry in items]
    assert size == len(ids)
    return ids


def test_the_seed_and_the_name_draw_a_part(tmp_path: Path) -> None:
    params = files(tmp_path, rows=50, questions=10)
    first = drawn(params)
    assert first == drawn(params) == sorted(set(first))
    assert len(first) == 10
    assert first not in (drawn(params, seed=1), drawn(params, name="other"))
    assert [drawn(files(tmp_path, rows=50, questions=questions)) for questions in (0, 50)] == [[*range(50)]] * 2
    with pytest.raises(ValueError, match=r"train\.jsonl holds 5 rows; prepare\.files\.own\.train\.questions asks"):
        drawn(files(tmp_path, rows=5, questions=6))


@given(st.lists(st.integers(0, 30), min_size=1, max_size=4))
def test_every_data_set_keeps_its_share_and_order(sizes: list[int]) -> None:
    # By hand, of 4: at 1/8, 3/8, 5/8, 7/8 of the way; of 2: at 1/4 and 3/4.
    assert "".join(interleave([(4, "aaaa"), (2, "bb")])) == "abaaba"
    mixed = list(interleave([(size, [(which, i) for i in range(size)]) for which, size in enumerate(sizes)]))
    assert len(mixed) == sum(sizes)
    for which, size in enumerate(sizes):
        places = [at for at, (owner, _) in enumerate(mixed) if owner == which]
        assert [mixed[at][1] for at in places] == list(range(size))
        for taken, at in enumerate(places):  # never ahead or behind by more than one of each other
            assert abs(taken - at * size / len(mixed)) <= len(sizes)


def test_rows_keep_their_ids_or_are_named_by_their_content(tmp_path: Path) -> None:
    rows: list[dict[str, Any]] = [{"id": 5, "title": "A", "text": " x \n"}, {"title": "B", "text": "y", "more": 1}]
    (tmp_path / "corpus.jsonl.gz").write_bytes(gzip.compress("\n".join(map(json.dumps, rows)).encode()))
    where, found = zip(*read_passages(tmp_path / "corpus.jsonl.gz"), strict=True)
    assert where == tuple(f"{tmp_path}/corpus.jsonl.gz, row {number}" for number in (1, 2))
    assert found[0] == Passage(passage_id="5", title="A", text="x")
    assert found[1] == Passage(passage_id=content_id("B", "y"), title="B", text="y")


@pytest.mark.parametrize("title", ["Kiss", '"Kiss"', '""Kiss" (film)"'])
def test_a_passage_may_be_in_its_contents(tmp_path: Path, title: str) -> None:
    (tmp_path / "wiki.jsonl").write_text(json.dumps({"id": "0", "contents": f"{title}\nA film.\nBy Mara."}))
    [(_, found)] = read_passages(tmp_path / "wiki.jsonl")
    bare = title.removeprefix('"').removesuffix('"')
    assert found == Passage(passage_id="0", title=bare, text="A film.\nBy Mara.")


AARON = 'Aaron Aaron ( or ; "Ahärôn") is a prophet, high priest, and the brother of Moses in the Abrahamic religions.'
SINAI = "God at Sinai granted Aaron the priesthood for himself and his male descendants"


def test_corpora_are_read_as_their_makers_write_them(tmp_path: Path) -> None:
    """DPR's psgs_w100.tsv and Search-R1's wiki-18.jsonl, which was made of it; DPR counts from 1, wiki-18 from 0."""
    quoted = AARON.replace('"', '""')
    with gzip.open(tmp_path / "psgs_w100.tsv.gz", "wt", encoding="utf-8") as file:
        file.write(f'id\ttext\ttitle\n1\t"{quoted}"\tAaron\n2\t{SINAI}\t"""Aaron"" (song)"\n')
    wiki = [{"id": "0", "contents": f'"Aaron"\n{AARON}'}, {"id": "1", "contents": f'""Aaron" (song)"\n{SINAI}'}]
    (tmp_path / "wiki-18.jsonl").write_text("".join(json.dumps(row) + "\n" for row in wiki))
    for name, first in (("psgs_w100.tsv.gz", 1), ("wiki-18.jsonl", 0)):
        found = [passage for _, passage in read_passages(tmp_path / name)]
        assert found == [
            Passage(passage_id=str(first), title="Aaron", text=AARON),
            Passage(passage_id=str(first + 1), title='"Aaron" (song)', text=SINAI),
        ]


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_pages_of_kilt_become_passages_of_100_words(tmp_path: Path, kind: str) -> None:
    """Without title and headings, over the ends of paragraphs: 61 + 70 words are 100 and 31."""
    lead = " ".join(["film"] * 61)
    paragraphs = ["Kiss\n", f"{lead}\n", "Section::::Cast.\n", "BULLET::::- Mara " + "x " * 69 + "\n"]
    page = tables(Path(__file__).parent)["page_of_kilt"] | {"text": paragraphs}
    empty = {**page, "wikipedia_id": "7", "wikipedia_title": "Nothing", "text": ["Nothing\n"]}
    file = tmp_path / ("kilt_knowledgesource.json" if kind == "jsonl" else "kilt.parquet")
    if kind == "jsonl":
        file.write_text("".join(json.dumps(row) + "\n" for row in (page, empty)))
    else:  # as the Hub has it
        rows = [{**row, "text": {"paragraph": row["text"]}} for row in (page, empty)]
        pq.write_table(pa.Table.from_pylist(rows), file)
    places, found = zip(*read_passages(file), strict=True)
    assert places == (f"{file}, row 1",) * 2
    assert found == (
        Passage(passage_id="290-0", title="Kiss", text=lead + " Mara" + " x" * 38),
        Passage(passage_id="290-1", title="Kiss", text=" ".join(["x"] * 31)),
    )


def test_a_paragraph_that_is_too_long_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (sources, prepare_module):
        monkeypatch.setattr(module, "LONGEST_ROW", 10)
    for text in ("Fine.\n\n" + "x" * 11, "Fine.\n\n" + "xx\n" * 4):
        (tmp_path / "Kiss.txt").write_text(text)
        with pytest.raises(ValueError, match=r"Kiss\.txt, paragraph 2: longer than 10 characters; part it by blank"):
            list(read_passages(tmp_path / "Kiss.txt"))


def test_every_paragraph_of_a_text_is_a_passage_of_its_files_name(tmp_path: Path) -> None:
    (tmp_path / "Kiss.txt").write_text("\nA film.\nBy Mara.\n \n\nIt is long.\n")
    (tmp_path / "deep").mkdir()
    (tmp_path / "deep/Mara.txt.gz").write_bytes(gzip.compress(b"A director."))
    pq.write_table(pa.table({"title": ["T"], "text": ["z"]}), tmp_path / "more.parquet")
    found = {(where.removeprefix(f"{tmp_path}/"), each.title, each.text) for where, each in read_passages(tmp_path)}
    assert found == {
        ("Kiss.txt, paragraph 1", "Kiss", "A film.\nBy Mara."),
        ("Kiss.txt, paragraph 2", "Kiss", "It is long."),
        ("deep/Mara.txt.gz, paragraph 1", "Mara", "A director."),
        ("more.parquet, row 1", "T", "z"),
    }


@cases("row, field")
def test_a_malformed_row_is_named(tmp_path: Path, row: dict[str, Any], field: str) -> None:
    (tmp_path / "corpus.jsonl").write_text(json.dumps(row))
    with pytest.raises(ValueError, match=rf"corpus\.jsonl, row 1: field '{field}' must be a "):
        list(read_passages(tmp_path / "corpus.jsonl"))


def passage(passage_id: str, text: str) -> Passage:
    return Passage(passage_id=passage_id, title="A", text=text)


def test_hashes_that_were_sorted_are_still_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prepare_module, "LATEST", 3)
    hashes = Hashes()
    values = [2**64 - 1, 0, 5, 5, 7, 0, 2**63, 6, 2**64 - 1, 7, 6, 1]
    assert [value for value in values if hashes.is_new(value)] == [2**64 - 1, 0, 5, 7, 2**63, 6, 1]


def test_equal_passages_come_once_whatever_their_ids() -> None:
    distinct = Distinct()
    several = [passage("1", "x"), passage("2", "x"), passage("3", "y"), passage(content_id("A", "x"), "x")]
    assert [distinct.is_new(each, "") for each in several] == [True, False, True, False]


def test_one_id_for_two_passages_or_questions_is_refused() -> None:
    distinct = Distinct()
    distinct.is_new(passage("1", "x"), "a, row 1")
    with pytest.raises(ValueError, match=r"^b, row 4: the id '1' is that of an earlier passage with another text;"):
        distinct.is_new(passage("1", "y"), "b, row 4")
    question = Question(**question_fields("q", split="dev"))
    distinct.take_question(question, "a, row 1")
    with pytest.raises(ValueError, match=r"^b, row 7: the id 'q' is that of an earlier question; take one"):
        distinct.take_question(question, "b, row 7")
    assert not distinct.shared_ids
    distinct.take_question(replace(question, split="test"), "c, row 1")
    assert distinct.shared_ids == {"q"}


@pytest.fixture
def params(prepare_params: PrepareParams, atlas_params: AtlasParams) -> PrepareParams:
    return prepare_params.model_copy(update={"atlas": atlas_params})


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_same_seed_gives_the_same_bytes(params: PrepareParams, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After a full disk there is what was there before."""

    def full_disk(*_: Any, **__: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    prepare(params, tmp_path)
    (tmp_path / ".gitignore").write_text("/passages.parquet\n")
    first = contents(tmp_path)
    assert sorted(first) == [".gitignore", "passages.parquet", "questions.parquet"]
    prepare(params, tmp_path)
    assert contents(tmp_path) == first
    other = params.model_copy(update={"seed": 1})
    with monkeypatch.context() as patch:
        patch.setattr(pq.ParquetWriter, "write_table", full_disk)
        with pytest.raises(OSError, match="No space left"):
            prepare(other, tmp_path)
    assert contents(tmp_path) == first
    prepare(other, tmp_path)
    assert contents(tmp_path)["questions.parquet"] != first["questions.parquet"]


def hotpotqa_row(number: int, **changes: Any) -> dict[str, Any]:
    return {
        "_id": f"h{number}",
        "question": "Who directed Kiss?",
        "answer": "Mara",
        "type": "bridge",
        "supporting_facts": [["Kiss", 0], [f"Mara {number}", 0]],
        "context": [["Kiss", ["A film."]], [f"Mara {number}", ["A director."]]],
        **changes,
    }


def with_files(params: PrepareParams, **files: dict[str, Any]) -> PrepareParams:
    checked = {name: FilesParams.model_validate(content) for name, content in files.items()}
    return params.model_copy(update={"datasets": list(files), "files": checked})


def split(folder: Path, name: str, rows: list[dict[str, Any]], questions: int = 0) -> dict[str, Any]:
    (folder / name).write_text("\n".join(map(json.dumps, rows)))
    return {"file": folder / name, "questions": questions}


@pytest.fixture
def mixture(params: PrepareParams, tmp_path: Path) -> PrepareParams:
    """Atlas, ten of twelve rows like HotpotQA's, and a data set that is held out and has a corpus."""
    raw = tmp_path / "raw"
    (raw / "corpus").mkdir(parents=True)
    (raw / "corpus/Mara 1.txt").write_text("A director.\n\nShe is tall.")
    (raw / "corpus/more.jsonl").write_text(json.dumps({"id": 7, "title": "Ann", "text": "A person."}))
    own = [{"question": "Who?", "answers": ["Ann", "Anne"], "gold_titles": ["Ann", "Bob"]}]
    train = split(raw, "train.jsonl", [hotpotqa_row(i) for i in range(12)], questions=10)
    mixed = with_files(
        params,
        hotpotqa={"format": "hotpotqa", "train": train},
        own={"format": "generic", "test": split(raw, "test.jsonl", own), "corpus": raw / "corpus"},
    )
    return mixed.model_copy(update={"datasets": ["atlas", "hotpotqa", "own"]})


def test_data_sets_are_mixed_for_training_and_one_is_held_out(mixture: PrepareParams, tmp_path: Path) -> None:
    write(mixture, tmp_path)
    questions = read_rows(tmp_path / "questions.parquet", Question)
    splits = [question.split for question in questions]
    assert splits == ["train"] * 210 + ["dev"] * 40 + ["test"] * 41
    places = [at for at, question in enumerate(questions) if question.dataset == "hotpotqa"]
    assert places == [10 + 21 * i for i in range(10)]  # one after every ten of Atlas's 200, then ten more
    [own] = [question for question in questions if question.dataset == "own"]
    assert (own.split, own.answers) == ("test", ["Ann", "Anne"])


def test_passages_of_all_come_once(mixture: PrepareParams, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    write(mixture, tmp_path)
    passages = read_rows(tmp_path / "passages.parquet", Passage)
    assert len({passage.passage_id for passage in passages}) == len(passages)
    texts = Counter((passage.title, passage.text) for passage in passages)
    assert set(texts.values()) == {1}
    assert len(passages) in (11 + 117 + 2, 11 + 117 + 3)  # "Mara 1" comes with a row, unless that row was not drawn
    titles = {passage.title for passage in passages}
    questions = read_rows(tmp_path / "questions.parquet", Question)
    assert all(title in titles for question in questions for title in question.gold_titles if title != "Bob")
    assert {("Kiss", "A film."), ("Mara 1", "A director."), ("Mara 1", "She is tall.")} <= set(texts)
    assert next(passage for passage in passages if passage.title == "Ann").passage_id == "7"
    *_, warning = [record.message for record in caplog.records if record.levelno == logging.WARNING]
    assert warning == "own: gold titles of no passage, so that no search can find them: 1, such as 'Bob'"


def test_ids_count_within_data_set_and_split(params: PrepareParams, tmp_path: Path) -> None:
    """Those of both splits, of two data sets and of the generated world clash; the others stay."""
    (tmp_path / "corpus.txt").write_text("Text.")

    def own(name: str, *ids: int | str) -> dict[str, Any]:
        rows = [{"id": each, "question": f"{name} {each}?", "answer": "x"} for each in ids]
        return split(tmp_path, f"{name}.jsonl", rows)

    common = {"format": "generic", "corpus": tmp_path / "corpus.txt"}
    first = {**common, "train": own("a", 0, 1, "own"), "test": own("b", 0, "atlas-test-00001")}
    mixed = with_files(params, first=first, second={**common, "test": own("c", 1)})
    write(mixed.model_copy(update={"datasets": ["first", "atlas", "second"]}), tmp_path)
    rows = read_rows(tmp_path / "questions.parquet", Question)
    assert [row.question_id for row in rows if row.dataset != "atlas"] == [
        *("first/train/0", "first/train/1", "own", "first/test/0", "second/test/1", "first/test/atlas-test-00001")
    ]
    generated = {row.question_id: row.text for row in rows if row.dataset == "atlas"}
    assert "atlas-test-00001" in generated
    assert len({row.question_id for row in rows}) == len(rows)
    write(with_files(params, first={**first, "test": own("d", 8)}), tmp_path)
    kept = [row.question_id for row in read_rows(tmp_path / "questions.parquet", Question)]
    assert kept == ["0", "1", "own", "8"]


def test_rows_to_look_at_are_counted_with_an_example(params: PrepareParams, tmp_path: Path) -> None:
    given = tables(Path(__file__).parent)["to_look_at"]
    train, test, _ = (split(tmp_path, f"{name}.jsonl", given[name]) for name in ("train", "test", "corpus"))
    own = {"format": "generic", "corpus": tmp_path / "corpus.jsonl", "train": train}
    other = {**own, "train": None, "test": test}
    mixed = with_files(params, own=own, other=other).model_copy(update={"datasets": ["atlas", "own", "other"]})
    write(mixed, tmp_path)
    review = Review(tmp_path / "questions.parquet", tmp_path / "passages.parquet")
    assert set(review.complaints()) == set(given["complaints"])
    answerable = "the passages have all gold titles of {} of {} questions, and an answer of {} stands in them"
    assert [*review.evidence()] == [
        f"own, train: {answerable.format(3, 5, 3)}",  # those who name Nowhere apart; yes, and an answer in a title
        f"other, test: {answerable.format(1, 1, 0)}",  # one that has no gold titles is not counted
    ]


@cases("rows, corpus, message")
def test_bad_data_are_named_and_nothing_is_written(
    params: PrepareParams, tmp_path: Path, rows: list[dict[str, Any]] | None, corpus: str | None, message: str
) -> None:
    """A row is the hotpotqa_row of its number, with changes; it stands as it is where it has none."""
    test = split(tmp_path, "dev.jsonl", [hotpotqa_row(**row) if "number" in row else row for row in rows or []])
    if rows is None:
        (tmp_path / "dev.jsonl").unlink()
    (tmp_path / "corpus.txt").write_text(corpus or "")
    own = {"format": "hotpotqa", "test": test, "corpus": tmp_path / "corpus.txt" if corpus else None}
    with pytest.raises((ValueError, FileNotFoundError), match=message):
        prepare(with_files(params, hotpotqa=own), tmp_path / "prepared")
    assert list((tmp_path / "prepared").iterdir()) == []


def test_every_question_has_a_plan(mixture: PrepareParams, tmp_path: Path) -> None:
    write(mixture, tmp_path)
    questions = read_rows(tmp_path / "questions.parquet", Question)
    found, facts = make_plans(mixture, questions)
    assert {question_id: plan.answer for question_id, plan in found.items()} == {
        question.question_id: question.answers[0] for question in questions
    }
    atlas = [question for question in questions if question.dataset == "atlas"]
    assert set(facts) >= {title for question in atlas for title in question.gold_titles}
    real = [question for question in questions if question.dataset != "atlas"]
    assert make_plans(mixture, real)[1] == {}, "no world is made where nobody asks about it"
