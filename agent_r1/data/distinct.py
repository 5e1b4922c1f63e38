"""What was written so far, in a few dozen bytes per row, whatever the length of the rows."""

from __future__ import annotations

from agent_r1.data.corpus import content_id
from agent_r1.records import Passage, Question


class Distinct:
    """Holds every id to one meaning, and lets every passage through once."""

    def __init__(self) -> None:
        self._questions: set[str] = set()
        self._contents: set[str] = set()  # content_id of every passage
        self._passages: set[str] = set()  # ids that passages brought along

    def take_question(self, question: Question, where: str) -> None:
        """Notes a question.

        Raises:
            ValueError: its id is taken, in its own or in another data set.
        """
        if question.question_id in self._questions:
            raise ValueError(
                f"{where}: the id {question.question_id!r} is that of an earlier question; take one of the two out, "
                "or give it another id"
            )
        self._questions.add(question.question_id)

    def is_new(self, passage: Passage, where: str) -> bool:
        """Whether no earlier passage has the same title and text; notes the passage.

        Raises:
            ValueError: its id is that of an earlier passage with another title or text.
        """
        content = content_id(passage.title, passage.text)
        if content in self._contents:
            return False
        self._contents.add(content)
        if passage.passage_id != content:
            if passage.passage_id in self._passages:
                raise ValueError(
                    f"{where}: the id {passage.passage_id!r} is that of an earlier passage with another text; give it "
                    "another id, or leave out the ids of that file: passages are then named by their content"
                )
            self._passages.add(passage.passage_id)
        return True
