"""What others wrote reaches terminals, logs and reports as text and nothing else."""

import logging
import sys
import unicodedata

from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from agent_r1.evaluation.comparison import AnswerPair, Comparison
from agent_r1.evaluation.runs_report import _table
from agent_r1.evaluation.scores import AnsweredQuestion
from agent_r1.harmless import harmless, harmless_lines, in_markdown, without_password
from agent_r1.http.client import Answer
from agent_r1.inspection.printed import comparison_tables
from agent_r1.records import Question
from flows.terminal import HarmlessFormatter
from tests.cases import cases
from tests.trajectories import question_fields

EVIL = "\x1b]52;c;ZXZpbA==\x07\x9b2J \u202edesrever\u2066 \x08\r\x85|<img src=x>`code` [a](b)"
COMMANDS = set("\x1b\x07\x08\r\x85\x9b\u202e\u2066")


@given(st.text())
def test_harmless_text_is_printable_whatever_comes(text: str) -> None:
    found = harmless(text)
    assert found.isprintable()
    assert harmless(found) == found
    kept = [char for char in text if char.isprintable()]
    assert [char for char in found if char not in " \ufffd"] == [char for char in kept if char not in " \ufffd"]


def test_harmless_by_hand() -> None:
    assert harmless("a\tb\nc\u00a0d") == "a b c d"
    assert harmless("soft\u00adhyphen e\u0301 \U0001f600") == "softhyphen e\u0301 \U0001f600"
    assert unicodedata.category("\ud800") == "Cs"
    assert harmless("\ud800") == "\ufffd"
    assert harmless_lines("one\n  two\u2028three\x1b[0m") == "one\n  two\nthree\ufffd[0m"


@cases("text, shown")
def test_markup_is_shown_as_it_is(text: str, shown: str) -> None:
    assert in_markdown(text) == shown


def test_a_kind_of_question_stays_in_its_cell() -> None:
    scores = {"ppo": {"em": 1.0, "em/low": 1.0, "em/high": 1.0, "aborted": 0, f"questions/kind_{EVIL}": 1.0}}
    lines = _table(scores, "em", [f"kind_{EVIL}"]).split("\n")
    assert len(lines) == 3
    assert lines[0].count("|") - lines[0].count(r"\|") == 4
    assert not COMMANDS & set("".join(lines))


def test_a_log_and_an_excerpt_are_text() -> None:
    try:
        raise RuntimeError(EVIL)
    except RuntimeError:
        record = logging.LogRecord("agent_r1", logging.ERROR, "", 0, "it said %s", (EVIL,), sys.exc_info())
    assert not COMMANDS & set(HarmlessFormatter("%(message)s").format(record))
    assert not COMMANDS & set(Answer(500, EVIL.encode()).reason)


def test_a_comparison_is_text() -> None:
    asked = Question(**question_fields(text=EVIL, answers=[EVIL]))
    right, wrong = (AnsweredQuestion(question_id="q", answers=[EVIL], success=each, values={}) for each in (1.0, 0.0))
    pair = AnswerPair(asked, right, wrong)
    console = Console(force_terminal=True, color_system=None, width=100)
    with console.capture() as capture:
        found = Comparison(a="a", b="b", differing=[EVIL], aborted=EVIL, pairs=[pair], measured=[])
        console.print(comparison_tables(found))
    assert not COMMANDS & set(capture.get())


@cases("text, shown")
def test_an_address_is_shown_without_its_password(text: str, shown: str) -> None:
    assert without_password(text) == shown
    assert without_password(shown) == shown


def test_many_addresses_take_time_in_proportion() -> None:
    """A megabyte of beginnings: looked through again from each of them it would take hours."""
    assert without_password("://" * 300_000) == "://" * 300_000
