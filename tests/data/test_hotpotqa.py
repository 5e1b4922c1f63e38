"""HotpotQA's and 2WikiMultihopQA's rows: as released, as on the Hub, awkward ones, and refusals that name the field."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from agent_r1.data import formats
from agent_r1.data.rows import Row

FORMATS = {"hotpotqa": formats, "2wikimultihopqa": formats}


def row(**changes: Any) -> Row:
    fields = {
        "_id": "id2",
        "question": "Who directed Kiss?",
        "answer": "Mara",
        "type": "comparison",
        "supporting_facts": [["Kiss", 0], ["Mara", 0], ["Kiss", 1]],
        "context": [["Kiss", ["A film.", " By Mara."]], ["Mara", ["A director."]], ["Other", ["x"]]],
    }
    return Row({key: value for key, value in {**fields, **changes}.items() if value is not ...}, Path("dev.json"), 2)


@pytest.mark.parametrize("name", FORMATS)
def test_a_row_becomes_a_question(name: str) -> None:
    question = FORMATS[name].question(row(), name, "test")
    assert (question.question_id, question.dataset, question.split) == ("id2", name, "test")
    assert (question.text, question.answers, question.kind) == ("Who directed Kiss?", ["Mara"], "comparison")
    assert question.gold_titles == ["Kiss", "Mara"]  # two, though three sentences are cited
    assert question.hops == 2


def test_sentences_join_as_each_release_cuts_them() -> None:
    assert formats.hotpotqa_paragraphs(row())[0] == ("Kiss", "A film. By Mara.")
    cut = row(context=[["Kiss", ["A film.", "By Mara."]]])
    assert formats.wikimultihop_paragraphs(cut) == [("Kiss", "A film. By Mara.")]


@pytest.mark.parametrize(
    "kind", ["bridge_comparison", "compositional", "inference", "comparison"]
)  # 2Wiki's four; HotpotQA shares the last
def test_each_has_its_kinds(kind: str) -> None:
    assert formats.wikimultihop_question(row(type=kind), "w", "dev").kind == kind
    if kind != "comparison":
        with pytest.raises(ValueError, match="field 'type' must be one of bridge, comparison, found"):
            formats.hotpotqa_question(row(type=kind), "h", "dev")
    with pytest.raises(ValueError, match="field 'type' must be one of comparison, bridge_comparison"):
        formats.wikimultihop_question(row(type="bridge"), "w", "dev")


def test_four_gold_passages_are_four_hops() -> None:
    facts = [["A", 0], ["B", 1], ["A", 2], ["C", 0], ["D", 0]]
    question = formats.wikimultihop_question(row(type="bridge_comparison", supporting_facts=facts), "w", "dev")
    assert (question.gold_titles, question.hops) == (["A", "B", "C", "D"], 4)


def test_a_sentence_number_beyond_its_paragraph_does_not_matter() -> None:
    assert formats.wikimultihop_question(row(supporting_facts=[["Kiss", 9], ["Mara", -1]]), "w", "dev").hops == 2


def test_fewer_paragraphs_and_gold_that_was_not_found_are_taken() -> None:
    fullwiki = row(context=[["Elsewhere", ["x"]]])
    assert formats.hotpotqa_question(fullwiki, "h", "dev").gold_titles == ["Kiss", "Mara"]
    assert formats.hotpotqa_paragraphs(fullwiki) == [("Elsewhere", "x")]


def test_answers_stay_as_the_release_writes_them() -> None:
    assert formats.wikimultihop_question(row(answer="The Mask Of Fu Manchu"), "w", "dev").answers == [
        "The Mask Of Fu Manchu"
    ]


HUB = {
    "_id": ...,
    "id": "id2",
    "supporting_facts": {"title": ["Kiss", "Mara", "Kiss"], "sent_id": [0, 0, 1]},
    "context": {"title": ["Kiss", "Mara"], "sentences": [["A film.", " By Mara."], ["A director."]]},
}
TEXTS = {
    "supporting_facts": json.dumps([["Kiss", 0], ["Mara", 0]]),
    "context": json.dumps([["Kiss", ["A film.", " By Mara."]], ["Mara", ["A director."]]]),
}


OBJECTS = {
    "supporting_facts": [{"title": "Kiss", "sent_id": 0}, {"title": "Mara", "sent_id": 0}],
    "context": [
        {"title": "Kiss", "sentences": ["A film.", " By Mara."]},
        {"title": "Mara", "sentences": ["A director."]},
    ],
}


@pytest.mark.parametrize("layout", [HUB, TEXTS, OBJECTS])
def test_the_hubs_layouts_are_the_same_rows(layout: dict[str, Any]) -> None:
    assert formats.hotpotqa_question(row(**layout), "h", "dev") == formats.hotpotqa_question(row(), "h", "dev")
    assert formats.hotpotqa_paragraphs(row(**layout)) == formats.hotpotqa_paragraphs(row())[:2]


def test_a_numbered_row_is_taken() -> None:
    assert formats.hotpotqa_question(row(_id=37), "h", "dev").question_id == "37"


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        *(({field: ...}, field) for field in ("_id", "question", "answer", "type", "supporting_facts")),
        ({"answer": " "}, "answer"),
        ({"answer": None}, "answer"),
        ({"question": 7}, "question"),
        ({"_id": True}, "_id"),
        ({"type": "riddle"}, "type"),
        ({"supporting_facts": []}, "supporting_facts"),
        ({"supporting_facts": ["Kiss"]}, "supporting_facts"),
        ({"supporting_facts": [[7, 0]]}, "supporting_facts"),
        ({"supporting_facts": "no JSON"}, "supporting_facts"),
        ({"supporting_facts": {"title": ["Kiss"], "sent_id": []}}, "supporting_facts"),
        ({"supporting_facts": {"title": ["Kiss"]}}, "supporting_facts"),
    ],
)
def test_a_malformed_question_is_named(changes: dict[str, Any], field: str) -> None:
    with pytest.raises(ValueError, match=rf"^dev\.json, row 2: field '{field}'"):
        formats.hotpotqa_question(row(**changes), "h", "dev")


@pytest.mark.parametrize(
    "context",
    [..., [], "Kiss", [["Kiss", "A film."]], [["Kiss", [7]]], [["Kiss", ["A film."], "x"]], [[7, ["A film."]]]],
)
def test_a_malformed_context_is_named(context: Any) -> None:
    with pytest.raises(ValueError, match=r"^dev\.json, row 2: field 'context' must hold \[title, "):
        formats.hotpotqa_paragraphs(row(context=context))
