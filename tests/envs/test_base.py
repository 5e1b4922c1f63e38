from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from agent_r1.envs.base import ParsedCall, parse_action, split_action
from tests.cases import cases

CALL = '<tool_call>\n{"name": "search", "arguments": {"query": "Tesk"}}\n</tool_call>'


@cases("text, thought, calls, answer")
def test_an_action_is_a_call_or_an_answer(text: str, thought: str, calls: list[object], answer: str | None) -> None:
    act = parse_action(text)
    assert (act.thought, [*act.calls], act.answer, act.problem) == (thought, [*map(tuple, calls)], answer, "")


@cases("text, answer, problem")
def test_text_without_call_is_an_answer_where_answers_are_plain(text: str, answer: str | None, problem: str) -> None:
    parsed = parse_action(text, answers="plain")
    assert (parsed.answer, parsed.problem) == (answer, problem)
    assert parse_action(CALL, answers="plain") == parse_action(CALL)


def test_so_many_calls_are_read_as_are_allowed_and_in_their_order() -> None:
    other = CALL.replace("Tesk", "Veld")
    parsed = parse_action(f"<think>Both.</think>{CALL}{other}", most_calls=2)
    assert [call.arguments for call in parsed.calls] == [{"query": "Tesk"}, {"query": "Veld"}]
    assert parse_action(CALL + other).problem == "the tags do not form one tool call or one answer"
    for beyond in (CALL * 3, CALL * 500, f"{CALL}<answer>a</answer>", "<answer>a</answer>" * 2):
        parsed = parse_action(beyond, most_calls=2)
        assert (parsed.calls, parsed.answer) == ((), None)
        assert parsed.problem == "the tags do not form at most 2 tool calls or one answer"
    broken = parse_action(f"{CALL}<tool_call>{{</tool_call>", most_calls=2)
    assert (broken.calls, broken.problem) == ((), "the tool call is not valid JSON")


@cases("text")
def test_malformed(text: str) -> None:
    parsed = parse_action(text)
    assert parsed.problem
    assert (parsed.calls, parsed.answer) == ((), None)


@cases("said, arguments")
def test_a_call_is_read_before_the_tags_in_its_texts(said: str, arguments: dict[str, Any]) -> None:
    parsed = parse_action(f'<tool_call>{{"name": "search", "arguments": {said}}}</tool_call>')
    assert (parsed.problem, parsed.calls) == ("", (ParsedCall("search", arguments),))


@given(st.lists(st.sampled_from(["<think>", "</think>", "<tool_call>", "</tool_call>", "<answer>", "</answer>", "x"])))
def test_every_text_is_read_as_one_thing_and_its_pieces_are_the_text(parts: list[str]) -> None:
    """No text raises; answer, call and malformed exclude each other."""
    parsed = parse_action("".join(parts))
    assert [parsed.answer is not None, bool(parsed.calls), bool(parsed.problem)].count(True) == 1
    assert "".join(piece.text for piece in split_action("".join(parts))) == "".join(parts)


@cases("text, pieces")
def test_an_action_is_shown_piece_by_piece(text: str, pieces: list[list[str]]) -> None:
    assert [[piece.kind, piece.inside] for piece in split_action(text)] == pieces
