from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from agent_r1.faults import WorldFault
from agent_r1.records import CallStatus, Passage
from agent_r1.search.base import SearchUnavailable
from agent_r1.tools.base import Tool, ToolError, ToolResult, search_tool


def convert(amount: float, units: list[str], exact: bool = False, places: int | None = None) -> ToolResult:
    """Converts an amount
    between units.

    This is not for the policy.
    """
    if amount < 0:
        raise ToolError("amount is negative")
    return ToolResult(text=f"{amount} {units} {exact} {places}")


def test_the_schema_is_the_openai_form_of_the_signature() -> None:
    assert Tool(convert).schema == {
        "type": "function",
        "function": {
            "name": "convert",
            "description": "Converts an amount between units.",
            "parameters": {
                "type": "object",
                "properties": {
                    "amount": {"type": "number"},
                    "units": {"items": {"type": "string"}, "type": "array"},
                    "exact": {"default": False, "type": "boolean"},
                    "places": {"anyOf": [{"type": "integer"}, {"type": "null"}], "default": None},
                },
                "required": ["amount", "units"],
            },
        },
    }


def test_a_good_call() -> None:
    result = Tool(convert).call({"amount": 1, "units": ["m"], "places": 2})
    assert result == ToolResult(text="1.0 ['m'] False 2")


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ({}, "amount: Field required; units: Field required"),
        ({"amount": True, "units": []}, "amount"),
        ({"amount": 1, "units": [1]}, "units.0"),
        ({"amount": 1, "units": [], "exact": 1}, "exact"),
        ({"amount": 1, "units": [], "more": 1}, "more"),
    ],
)
def test_bad_arguments(arguments: dict[str, Any], named: str) -> None:
    result = Tool(convert).call(arguments)
    assert result.call_status is CallStatus.BAD_ARGUMENTS
    assert named in result.text


def test_expected_failures_are_results() -> None:
    result = Tool(convert).call({"amount": -1, "units": []})
    assert result == ToolResult(text="amount is negative", call_status=CallStatus.FAILED)


def test_functions_that_are_no_tools() -> None:
    def untyped(x) -> ToolResult:  # type: ignore[no-untyped-def]
        """Has a parameter without a type."""
        return ToolResult(text="")

    def undocumented(x: int) -> ToolResult:
        return ToolResult(text="")

    with pytest.raises(ValueError, match="'x' needs a type annotation"):
        Tool(untyped)
    with pytest.raises(ValueError, match="'undocumented' needs a docstring"):
        Tool(undocumented)


def test_search_shows_passages_and_keeps_their_titles() -> None:
    asked: list[tuple[list[str], int]] = []

    class Recorded:
        def search(self, queries: Sequence[str], k: int) -> list[list[Passage]]:
            asked.append((list(queries), k))
            return [[Passage(passage_id=str(i), title=f"T{i}", text=f"a\nb {i}") for i in range(k)]]

    tool = search_tool(Recorded(), top_k=2)
    assert tool.schema["function"]["parameters"]["properties"] == {"query": {"type": "string"}}
    assert tool.call({"query": "x y"}) == ToolResult(text="T0: a b 0\nT1: a b 1", titles=("T0", "T1"))
    assert asked == [(["x y"], 2)]


def test_a_search_that_cannot_be_served_is_nothing_the_policy_did() -> None:
    class Down:
        def search(self, queries: Sequence[str], k: int) -> list[list[Passage]]:
            raise SearchUnavailable("the server at http://x is down")

    with pytest.raises(WorldFault, match="the server at http://x is down"):
        search_tool(Down(), top_k=2).call({"query": "x"})
