"""A trajectory as a person reads it."""

from __future__ import annotations

from typing import Any

from agent_r1.evaluation.transcript import WIDTH, transcript


def test_golden(make_question: Any, make_trajectory: Any, decode: Any) -> None:
    assert transcript(make_trajectory("a"), make_question("a"), decode).splitlines() == [
        "question   What is the capital of Veld (a)?",
        "",
        "step 1",
        "thought    Find the director first.",
        "search     capital of Veld",
        "passages   Veld: The capital of Veld is Tesk.",
        "           Tesk: Tesk is a city in Veld.",
        "",
        "step 2",
        "says       <answer>Tesk</answer>",
        "",
        "outcome    answered",
        "answer     Tesk (exact match)",
        "gold       Tesk",
    ]


def test_a_thought_whose_tag_the_prompt_wrote(make_question: Any, make_trajectory: Any, decode: Any) -> None:
    def untagged(ids: Any) -> str:
        return str(decode(ids)).replace("<think>", "")

    for calls in (["ok"], ["failed"]):
        trajectory = make_trajectory("a", calls=calls)
        expected = transcript(trajectory, make_question("a"), decode)
        assert transcript(trajectory, make_question("a"), untagged) == expected


def test_a_malformed_call_is_shown_as_it_is(make_question: Any, make_trajectory: Any, decode: Any) -> None:
    text = transcript(make_trajectory("a", calls=["malformed"], answer=""), make_question("a"), decode)
    assert "call       <tool_call>" in text
    assert "</tool_call> (malformed)" in text
    assert "reply      Veld: The capital" in text  # what came back is no search result
    assert "answer     (none) (no exact match)" in text


def test_the_prompt_is_shown_on_request(make_question: Any, make_trajectory: Any, decode: Any) -> None:
    trajectory, question = make_trajectory("a"), make_question("a")
    assert "Q a" not in transcript(trajectory, question, decode)
    assert "Q a" in transcript(trajectory, question, decode, with_prompt=True)


def test_long_lines_wrap(make_question: Any, make_trajectory: Any, decode: Any) -> None:
    text = transcript(make_trajectory("a", answer="Tesk " * 60), make_question("a"), decode)
    assert max(map(len, text.splitlines())) <= WIDTH
