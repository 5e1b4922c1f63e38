"""Which episodes are shown, and how they are fenced."""

from __future__ import annotations

from typing import Any

from agent_r1.evaluation.transcript import examples, worth_reading


def test_the_hardest_right_and_wrong_ones_are_chosen(make_question: Any, make_trajectory: Any) -> None:
    questions = [make_question("easy"), make_question("hard", hops=3), make_question("harder", hops=3)]
    easy, hard = make_trajectory("easy"), make_trajectory("hard", calls=[])
    harder, wrong = make_trajectory("harder"), make_trajectory("easy", answer="Veld")
    # Both have three hops, and only `harder` was answered with a search before.
    assert worth_reading([easy, hard, harder, wrong], questions) == {"right": harder, "wrong": wrong}
    assert worth_reading([easy], questions) == {"right": easy}
    assert worth_reading([], questions) == {}


def test_without_a_trained_agent_or_a_baseline(make_question: Any, make_trajectory: Any, decode: Any) -> None:
    questions, episodes = [make_question("a")], [make_trajectory("a")]
    assert examples({"naive_rag": episodes}, [], questions, decode) == []
    assert len(examples({"ppo": episodes}, ["ppo"], questions, decode)) == 3  # the section, one heading, one episode


def test_a_fence_in_the_text_gets_a_longer_one(make_question: Any, make_trajectory: Any, decode: Any) -> None:
    episode = make_trajectory("a", answer="```")
    section = examples({"ppo": [episode]}, ["ppo"], [make_question("a")], decode)[-1]
    assert section.startswith("````text\n")
    assert section.endswith("\n````")
