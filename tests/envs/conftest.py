"""A small index that finds passages by title words."""

from collections.abc import Sequence

import pytest

from agent_r1.records import Passage, Question
from agent_r1.search.base import Search
from tests.trajectories import question_fields

PASSAGES = [
    Passage(passage_id="0", title="Low Tide", text="Low Tide is a film\nby Mara Quill."),
    Passage(passage_id="1", title="Mara Quill", text="Mara Quill was born in Tesk."),
    Passage(passage_id="2", title="Tesk", text="Tesk is a city in Veld."),
]
TEXT = "Where was the director of Low Tide born?"
QUESTION = Question(**question_fields("q1", text=TEXT, gold_titles=["Low Tide", "Mara Quill"]))


class TitleSearch(Search):
    """Finds the passages whose title occurs in the query, in corpus order."""

    def search(self, queries: Sequence[str], k: int) -> list[list[Passage]]:
        return [[passage for passage in PASSAGES if passage.title in query][:k] for query in queries]


@pytest.fixture
def index() -> TitleSearch:
    return TitleSearch()


@pytest.fixture
def question() -> Question:
    return QUESTION
