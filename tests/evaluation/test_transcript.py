"""A trajectory as a person reads it, and which ones are shown."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from agent_r1.evaluation.transcript import WIDTH, examples, transcript, worth_reading
from tests.cases import tables

Told = Callable[..., str]


@pytest.fixture
def told(make_question: Any, make_trajectory: Any, decode: Any) -> Told:
    def tell(
        *, calls: Any = ("ok",), answer: str = "Tesk", tool: str = "search", decode: Any = decode, **more: Any
    ) -> str:
        trajectory = make_trajectory("a", calls=calls, answer=answer)
        first = replace(trajectory.steps[0], calls=[replace(call, tool=tool) for call in trajectory.steps[0].calls])
        restart = [trajectory.steps[0].action_stop] if more.pop("restarts", False) else []
        changed = replace(trajectory, steps=[first, *trajectory.steps[1:]], context_starts=[0, *restart])
        return transcript(changed, make_question("a"), decode, **more)

    return tell


def test_golden(told: Told) -> None:
    assert told() == tables(Path(__file__).parent)["golden"]


def test_a_rewritten_context_is_shown_as_it_is_read(told: Told) -> None:
    lines = told(restarts=True).splitlines()
    begins = lines.index("a new context")
    assert lines[begins - 2].startswith("search")
    assert lines[begins + 1] == "reads      user"
    assert lines.index("           Tesk: Tesk is a city in Veld.") < lines.index("step 2")
    assert not any(line.startswith("passages") for line in lines)
    assert told().count("a new context") == 0


def test_the_prompt_is_shown_on_request_and_long_lines_wrap(told: Told) -> None:
    assert "Q a" not in told()
    text = told(answer="Tesk " * 60, with_prompt=True)
    assert "Q a" in text
    assert max(map(len, text.splitlines())) <= WIDTH


def test_the_hardest_right_and_wrong_ones_are_chosen(make_question: Any, make_trajectory: Any) -> None:
    questions = [make_question("easy"), make_question("hard", hops=3), make_question("harder", hops=3)]
    easy, hard = make_trajectory("easy"), make_trajectory("hard", calls=[])
    harder, wrong = make_trajectory("harder"), make_trajectory("easy", answer="Veld")
    # Both have three hops, and only `harder` was answered with a search before.
    assert worth_reading([easy, hard, harder, wrong], questions) == {"right": harder, "wrong": wrong}
    assert worth_reading([easy], questions) == {"right": easy}
    assert worth_reading([], questions) == {}


def test_a_fence_in_the_text_gets_a_longer_one(make_question: Any, make_trajectory: Any, decode: Any) -> None:
    episode = make_trajectory("a", answer="```")
    section = examples({"ppo": [episode]}, ["ppo"], [make_question("a")], decode)[-1]
    assert section.startswith("````text\n")
    assert section.endswith("\n````")
