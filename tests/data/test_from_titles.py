"""Demonstrations of real questions: searches along a row's hops, the passages' words, and what is left out."""

import logging
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from agent_r1.data.formats import FORMATS
from agent_r1.data.from_titles import NotBorneOutError, Pages, Reading, act_from_titles, borne_out, first_written
from agent_r1.data.questions import Hop, Plan, plan_from_titles
from agent_r1.data.sources import Row
from agent_r1.records import Question
from tests.cases import cases, tables
from tests.data.conftest import ended, searched

PASSAGES = {
    "Low Tide (1957 film)": "Low Tide is a film. It was directed by Mara J. Quill in May. It won.",
    "Mara Quill (director)": "Mara J. Quill (born 3 May 1902 in Tesk) is from Orlen. She died in Arvik.",
    "High Tide": "High Tide is a film by Jon Hale.",
    "Jon Hale": "Jon Hale, born 9 June 1899, is from Orlen.",
}
FILM = Hop("Low Tide", "Low Tide (1957 film)", "director", "Mara J. Quill")
DIRECTOR = Hop("Mara Quill", "Mara Quill (director)", "place of death", "arvik")


def search(query: str) -> Pages:
    named = [pair for pair in PASSAGES.items() if first_written([query], pair[0])]
    return named or [pair for pair in PASSAGES.items() if first_written([query], pair[1])]


def question(text: str, answer: str, kind: str = "compositional") -> Question:
    strata = {"hops": "2", "kind": kind}
    return Question(question_id=text, dataset="wiki", split="train", text=text, answers=[answer], strata=strata)


def act(hops: list[Hop], text: str, answer: str, *, quotes: bool = False, max_steps: int = 5) -> list[str]:
    reading = Reading(search, max_steps, quotes)
    return act_from_titles(Plan(tuple(hops), answer), question(text, answer), reading)


def test_a_chain_is_searched_for_in_words_that_were_read() -> None:
    """With quotes the sentence stands before the finding."""
    assert act([FILM, DIRECTOR], "Where did the director of Low Tide die?", "Arvik") == [
        searched("I need the director, then the place of death.", "Low Tide"),
        searched("Found the director Mara J. Quill.", "Mara J. Quill"),
        ended("Found the place of death Arvik. That answers it.", "Arvik"),
    ]
    _, second, last = act([FILM, DIRECTOR], "Where did the director of Low Tide die?", "Arvik", quotes=True)
    assert '"It was directed by Mara J. Quill in May." Found the director Mara J. Quill.' in second
    assert last.startswith('<think>"She died in Arvik." Found the place of death Arvik.')


COMPARED = [Hop(*fields) for fields in tables(Path(__file__).parent)["compared"]]


def test_a_comparison_follows_one_chain_after_the_other_and_sets_their_values_side_by_side() -> None:
    *searches, last = act(COMPARED, "Whose director is older, Low Tide or High Tide?", "high tide")
    queries = re.findall(r'"query": "(.*)"', "".join(searches))
    assert queries == ["Low Tide", "Mara J. Quill", "High Tide", "Jon Hale"]
    assert searches[0].startswith("<think>I need the director, then the date of birth of each.</think>")
    assert searches[2].startswith("<think>Found the date of birth 3 May 1902. Next High Tide.</think>")
    dates = "Low Tide: Mara J. Quill, 3 May 1902. High Tide: Jon Hale, 9 June 1899. 1899 is earlier."
    assert last == ended(f"{dates} That answers it.", "High Tide")


def test_yes_and_no_say_whether_the_values_are_the_same() -> None:
    titles = {"Jon Hale": "Jon Hale", "Mara J. Quill": "Mara Quill (director)"}
    hops = [Hop(name, title, "country", "Orlen") for name, title in titles.items()]
    text = "Are Jon Hale and Mara J. Quill from the same country?"
    same = "Jon Hale: Orlen. Mara J. Quill: Orlen. The same. That answers it."
    assert act(hops, text, "yes")[-1] == ended(same, "yes")
    with pytest.raises(NotBorneOutError, match="do not bear out the yes or no"):
        act(hops, text, "no")


def test_gold_titles_alone_begin_with_the_title_that_the_question_names_or_its_own_words() -> None:
    row = replace(question("Who made the film called high tide?", "Orlen"), gold_titles=["Jon Hale", "High Tide"])
    assert act_from_titles(plan_from_titles(row), row, Reading(search, 5, quotes=False)) == [
        searched("I look it up.", "high tide"),
        searched("Found Jon Hale.", "Jon Hale"),
        ended("Found Orlen. That answers it.", "Orlen"),
    ]
    untitled = replace(row, text="Who was born in Tesk", gold_titles=[], answers=["Mara J. Quill"])
    first, last = act_from_titles(
        plan_from_titles(untitled), untitled, Reading(lambda _: [*PASSAGES.items()], 5, quotes=False)
    )
    assert first == searched("I look it up.", untitled.text)
    assert last.endswith("<answer> Mara J. Quill </answer>")
    unnamed = act([Hop("Jon Hale", "Jon Hale", "", "Orlen")], "born 9 June 1899", "Orlen")
    assert unnamed[0] == searched("I look it up.", "born 9 June 1899")


def test_an_answer_at_once_searches_for_nothing() -> None:
    asked, plan = question("Where did she die?", "Arvik"), Plan((DIRECTOR,), "Arvik")
    reading = Reading(search, 1, quotes=False)
    shown = [*PASSAGES.items()]
    with pytest.raises(NotBorneOutError, match="it takes more than 0"):
        act_from_titles(plan, asked, reading._replace(max_steps=0), shown)
    [action] = act_from_titles(plan, asked, reading, shown)
    assert action.endswith("<answer> Arvik </answer>")
    with pytest.raises(NotBorneOutError, match="is not among the results"):
        act_from_titles(plan, asked, reading, shown[:1])


@cases("hops, text, answer, reason")
def test_what_the_index_does_not_bear_out_is_left_out(hops: list[Any], text: str, answer: str, reason: str) -> None:
    with pytest.raises(NotBorneOutError, match=reason):
        act([Hop(*fields) for fields in hops], text, answer, max_steps=4)


def test_left_out_questions_are_replaced_by_later_ones_and_counted(caplog: pytest.LogCaptureFixture) -> None:
    rows = [question(str(number), "x") for number in range(6)]

    def only_even(row: Question) -> list[str]:
        if int(row.text) % 2:
            raise NotBorneOutError("odd")
        return [row.text]

    with caplog.at_level(logging.INFO, logger="agent_r1.data.from_titles"):
        usable, scripts = borne_out([replace(rows[1], dataset="atlas"), *rows], 3, only_even)
    assert ([row.text for row in usable], scripts) == (["1", "0", "2"], {"0": ["0"], "2": ["2"]})
    assert "1 of 4 questions cannot be demonstrated: odd (1)" in caplog.text


def hops_of(name: str, fields: dict[str, Any]) -> list[Hop]:
    read = FORMATS[name].hops
    return read(Row(fields, Path("rows.json"), 1))


def test_evidences_become_hops_with_the_supporting_title_most_like_their_subject() -> None:
    row = tables(Path(__file__).parent)["row_with_evidences"]
    assert hops_of("2wikimultihopqa", row) == [
        Hop("Joan", "Joan, Lady of Wales", "father", "King John"),
        Hop("John", "John, King of England", "cause of death", "dysentery"),
    ]
    assert hops_of("2wikimultihopqa", row | {"evidences": [["John", "father"]]}) == []
    assert hops_of("2wikimultihopqa", row | {"evidences": None}) == []


def test_sub_questions_become_hops_with_earlier_answers_in_their_places() -> None:
    row = tables(Path(__file__).parent)["row_with_sub_questions"]
    assert hops_of("musique", row) == [
        Hop("Kiss star", "Kiss", "", "Mara"),
        Hop("Where was Mara born?", "Mara Quill", "", "Tesk"),
    ]
    assert hops_of("musique", row | {"question_decomposition": [{"id": 1}]}) == []


def test_words_are_found_whatever_their_case_and_punctuation() -> None:
    assert first_written(["angry?", "I'M NOT angry"], "the film I'm Not Angry! of 2014") == "Angry"
    assert first_written(["Kiss", "maya (1999 film)"], "Maya (1999 Film) it is") == "Maya (1999 Film)"
    assert first_written(["art", "?"], "an artist?") == ""
