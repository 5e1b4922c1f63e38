"""The three releases' rows and a user's own: worked examples, awkward ones, refusals, and all the shared rows."""

from collections import Counter
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from agent_r1.data.formats import FORMATS
from agent_r1.data.prepare import write
from agent_r1.data.sources import Row, read
from agent_r1.params.prepare import FilesParams, PrepareParams, SplitParams
from agent_r1.records import Passage, Question
from agent_r1.tables import read_rows
from tests.cases import cases, tables
from tests.trajectories import question_fields

HOTPOTQA, WIKI, MUSIQUE, GENERIC, FLASHRAG = (
    FORMATS[name] for name in ("hotpotqa", "2wikimultihopqa", "musique", "generic", "flashrag")
)


def supported_row(**changes: Any) -> Row:
    fields = {
        "_id": "id2",
        "question": "Who directed Kiss?",
        "answer": "Mara",
        "type": "comparison",
        "supporting_facts": [["Kiss", 0], ["Mara", 0], ["Kiss", 1]],
        "context": [["Kiss", ["A film.", " By Mara."]], ["Mara", ["A director."]], ["Other", ["x"]]],
    }
    return Row({key: value for key, value in {**fields, **changes}.items() if value is not ...}, Path("dev.json"), 2)


def paragraph(title: str, is_supporting: bool = False) -> dict[str, Any]:
    return {"idx": 0, "title": title, "paragraph_text": f"On {title}. ", "is_supporting": is_supporting}


def musique_row(**changes: Any) -> Row:
    fields = {
        "id": "3hop1__140786_2053_5289",
        "paragraphs": [paragraph("A", True), paragraph("x"), paragraph("B", True), paragraph("A", True)],
        "question": "Who?",
        "question_decomposition": [{"id": 1}, {"id": 2}, {"id": 3}],
        "answer": "G. Stanley Hall",
        "answer_aliases": ["Stanley Hall", "", "G. Stanley Hall"],
        "answerable": True,
    }
    return Row({key: value for key, value in {**fields, **changes}.items() if value is not ...}, Path("dev.jsonl"), 5)


def own_row(**fields: Any) -> Row:
    return Row({"question": "Who?", **fields}, Path("own/train.jsonl.gz"), 3)


BUILDERS = {
    "musique": (musique_row, r"dev\.jsonl, row 5"),
    **dict.fromkeys(("generic", "flashrag"), (own_row, r"own/train\.jsonl\.gz, row 3")),
}
SUPPORTED = (supported_row, r"dev\.json, row 2")


def asked(form: str, **changes: Any) -> Question:
    build, _ = BUILDERS.get(form, SUPPORTED)
    return FORMATS[form].question(build(**changes), form, "test")


@pytest.mark.parametrize("name", ["hotpotqa", "2wikimultihopqa"])
def test_a_supported_row_becomes_a_question(name: str) -> None:
    """Two gold passages, though three sentences are cited."""
    known = {"gold_titles": ["Kiss", "Mara"], "strata": {"hops": "2", "kind": "comparison"}}
    expected = question_fields("id2", dataset=name, text="Who directed Kiss?", answers=["Mara"], **known)
    assert asked(name) == Question(**expected)
    assert asked(name, _id=37).question_id == "37"


def test_names_of_an_answer_are_accepted_where_they_lie_beside_the_split(tmp_path: Path) -> None:
    """One of three rows has an id that the list knows, one an id that it does not, one none."""
    known, *others = (supported_row(answer_id=name) for name in ("Q1", "Q2", None))
    split = tmp_path / "dev.json"
    assert list(WIKI.complete([known], split)) == [known], "without a list"
    named = '{"Q_id": "Q1", "aliases": ["M. Quill", "Mara"], "demonyms": ["Quillian"]}\n'
    (tmp_path / "id_aliases.json").write_text(named + '{"Q_id": "Q9", "aliases": [], "demonyms": []}\n')
    answers = [WIKI.question(row, "w", "dev").answers for row in WIKI.complete([known, *others], split)]
    assert answers == [["Mara", "M. Quill", "Quillian"], ["Mara"], ["Mara"]]
    assert list(HOTPOTQA.complete([known], split)) == [known]


@cases("content, message")
def test_a_list_of_names_that_is_none_is_refused(tmp_path: Path, content: str, message: str) -> None:
    (tmp_path / "id_aliases.json").write_text(content)
    with pytest.raises(ValueError, match=rf"id_aliases\.json, row 1: {message}"):
        list(WIKI.complete([supported_row()], tmp_path / "dev.json"))


def test_sentences_join_as_each_release_cuts_them() -> None:
    assert HOTPOTQA.paragraphs(supported_row())[0] == ("Kiss", "A film. By Mara.")
    cut = supported_row(context=[["Kiss", ["A film.", "By Mara."]]])
    assert WIKI.paragraphs(cut) == [("Kiss", "A film. By Mara.")]


@cases("facts, titles")
def test_every_gold_passage_is_a_hop(facts: list[Any], titles: list[str]) -> None:
    question = asked("2wikimultihopqa", supporting_facts=facts)
    assert (question.gold_titles, question.strata["hops"]) == (titles, str(len(titles)))


def test_fewer_paragraphs_and_gold_that_was_not_found_are_taken() -> None:
    fullwiki: dict[str, Any] = {"context": [["Elsewhere", ["x"]]]}
    assert asked("hotpotqa", **fullwiki).gold_titles == ["Kiss", "Mara"]
    assert HOTPOTQA.paragraphs(supported_row(**fullwiki)) == [("Elsewhere", "x")]


HUB: dict[str, Any] = {
    "_id": ...,
    "id": "id2",
    "supporting_facts": {"title": ["Kiss", "Mara", "Kiss"], "sent_id": [0, 0, 1]},
    "context": {"title": ["Kiss", "Mara"], "sentences": [["A film.", " By Mara."], ["A director."]]},
}


@pytest.mark.parametrize("layout", [HUB, *tables(Path(__file__).parent)["layouts"]])
def test_the_hubs_layouts_are_the_same_rows(layout: dict[str, Any]) -> None:
    assert asked("hotpotqa", **layout) == asked("hotpotqa")
    assert HOTPOTQA.paragraphs(supported_row(**layout)) == HOTPOTQA.paragraphs(supported_row())[:2]


@pytest.mark.parametrize(
    "context",
    [..., [], "Kiss", [["Kiss", "A film."]], [["Kiss", [7]]], [["Kiss", ["A film."], "x"]], [[7, ["A film."]]]],
)
def test_a_malformed_context_is_named(context: Any) -> None:
    with pytest.raises(ValueError, match=r"^dev\.json, row 2: field 'context' must hold \[title, "):
        HOTPOTQA.paragraphs(supported_row(context=context))


def test_a_row_of_musique_becomes_a_question_with_its_aliases() -> None:
    """Two of the gold passages share a title."""
    found = asked("musique")
    assert (found.question_id, found.text) == ("3hop1__140786_2053_5289", "Who?")
    assert (found.answers, found.gold_titles) == (["G. Stanley Hall", "Stanley Hall"], ["A", "B"])
    assert found.strata == {"hops": "3", "kind": "3hop1"}
    assert MUSIQUE.paragraphs(musique_row()) == [("A", "On A."), ("x", "On x."), ("B", "On B."), ("A", "On A.")]
    # Without aliases or a telling id it is taken too.
    found = asked("musique", id=7, answer_aliases=...)
    assert (found.question_id, found.answers, found.strata["kind"]) == ("7", ["G. Stanley Hall"], "3hop")


@cases("form, changes, message")
def test_a_malformed_question_is_named(form: str, changes: dict[str, Any], message: str) -> None:
    _, where = BUILDERS.get(form, SUPPORTED)
    with pytest.raises(ValueError, match=rf"^{where}: .*{message}"):
        asked(form, **changes)


def test_a_question_and_its_answers_are_enough() -> None:
    found = asked("generic", answers=["Ann", "A. Bell"])
    assert (found.question_id, found.dataset, found.split) == ("generic-test-train.jsonl.gz-3", "generic", "test")
    assert (found.text, found.answers) == ("Who?", ["Ann", "A. Bell"])
    assert (found.gold_titles, found.strata) == ([], {"hops": "1", "kind": "unknown"})
    # What else is known is kept, and the rest passed over.
    found = asked("generic", id=9, answer="Ann", gold_titles=["A", "B"], kind="bridge", source="mine")
    assert (found.question_id, found.answers, found.strata) == ("9", ["Ann"], {"hops": "2", "kind": "bridge"})
    assert asked("generic", answer="Ann", gold_titles=["A"], hops=3).strata["hops"] == "3"
    assert asked("generic", answer="the ann", answers=["Bea", "Ann"]).answers == ["Bea", "Ann"]


def test_cells_of_a_table_make_a_question(tmp_path: Path) -> None:
    rows = ["id,question,answers,gold_titles,hops", "007,Year?,1957|57,Kiss | NA,3", "8,Who?,None,,"]
    (tmp_path / "train.csv").write_text("\n".join(rows))
    first, second = (GENERIC.question(row, "own", "train") for row in read(tmp_path / "train.csv"))
    assert (first.question_id, first.answers, first.gold_titles) == ("007", ["1957", "57"], ["Kiss", "NA"])
    assert (second.answers, second.gold_titles) == (["None"], [])
    assert [each.strata["hops"] for each in (first, second)] == ["3", "1"]


HOTPOT_METADATA = {"type": "comparison", **{key: HUB[key] for key in ("supporting_facts", "context")}}
SENTENCES = [["A film.", "By Mara."], ["A director."]]
WIKI_METADATA = HOTPOT_METADATA | {"context": {"title": ["Kiss", "Mara"], "content": SENTENCES}}


@pytest.mark.parametrize("metadata", [HOTPOT_METADATA, WIKI_METADATA])
def test_a_row_of_flashrag_has_its_metadata(metadata: dict[str, Any]) -> None:
    row = own_row(id="dev_7", golden_answers=["Mara", "M. Quill"], metadata=metadata)
    question = FLASHRAG.question(row, "hotpotqa", "dev")
    assert (question.question_id, question.answers) == ("dev_7", ["Mara", "M. Quill"])
    assert (question.gold_titles, question.strata) == (["Kiss", "Mara"], {"hops": "2", "kind": "comparison"})
    assert FLASHRAG.paragraphs(row) == [("Kiss", "A film. By Mara."), ("Mara", "A director.")]


@pytest.mark.parametrize(
    ("value", "text"),
    [(1957, "1957"), (1957.0, "1957"), (-0.5, "-0.5"), (Decimal("12.50"), "12.50"), (1 << 70, str(1 << 70))],
)
def test_a_number_is_a_text(tmp_path: Path, value: Any, text: str) -> None:
    assert asked("generic", answer=value).answers == asked("generic", answers=[value, text]).answers == [text]
    assert asked("hotpotqa", answer=value).answers == [text]
    if value < 1 << 63:
        pq.write_table(pa.table({"question": ["?"], "answer": [value], "answers": [[value]]}), tmp_path / "x.parquet")
        [row] = read(tmp_path / "x.parquet")
        assert GENERIC.question(row, "own", "test").answers == [text]


def test_null_is_as_good_as_no_field() -> None:
    """An optional column of a Parquet file holds it wherever nothing is known."""
    nothing = dict.fromkeys(("answers", "id", "_id", "gold_titles", "hops", "kind"))
    assert asked("generic", answer="Ann", **nothing) == asked("generic", answer="Ann")
    assert asked("generic", answer="Ann", id=None, _id="7").question_id == "7"


SHARED = Path(__file__).parents[2].parent / "shared/data/multihop"
FILES, KINDS = (tables(Path(__file__).parent)[name] for name in ("files_of_releases", "kinds_of_releases"))
on_the_shared_rows = pytest.mark.skipif(not SHARED.is_dir(), reason="the shared rows are not here")


@on_the_shared_rows
def test_all_rows_of_the_three_become_one_mixture(prepare_params: PrepareParams, tmp_path: Path) -> None:
    files = {name: release(name, corpus=True) for name in FILES}
    write(prepare_params.model_copy(update={"datasets": list(FILES), "files": files}), tmp_path)
    questions = read_rows(tmp_path / "questions.parquet", Question)
    sizes = Counter((question.dataset, question.split) for question in questions)
    assert [sizes[name, split] for name in FILES for split in ("train", "test")] == [300, 1833, 500, 671, 100, 549]
    for name, kinds in KINDS.items():
        test = [question for question in questions if (question.dataset, question.split) == (name, "test")]
        strata = Counter(f"{question.strata['kind']} {question.strata['hops']}" for question in test)
        assert ", ".join(f"{name}: {count}" for name, count in strata.most_common()) == kinds
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


@on_the_shared_rows
def test_rows_bring_gold_texts(prepare_params: PrepareParams, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    files = {name: release(name, corpus=False) for name in ("2wikimultihopqa", "musique")}
    write(prepare_params.model_copy(update={"datasets": list(files), "files": files}), tmp_path)
    assert not [record for record in caplog.records if "gold titles of no passage" in record.message]


def release(name: str, *, corpus: bool) -> FilesParams:
    train, test = (SplitParams(file=SHARED / name / file, questions=0) for file in FILES[name])
    passages = SHARED / name / "corpus.jsonl.gz" if corpus else None
    return FilesParams.model_validate({"format": name, "train": train, "test": test, "corpus": passages})
