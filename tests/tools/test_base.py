from __future__ import annotations

import asyncio
import enum
import json
from typing import Any

import pytest
from pydantic import BaseModel

from agent_r1.faults import WorldFault
from agent_r1.records import CallStatus
from agent_r1.tools.base import FunctionTool, Tool, ToolError, ToolResult, ToolTimeout, methods


class Unit(enum.Enum):
    M = "m"
    KM = "km"


class Place(BaseModel):
    title: str
    units: list[Unit] = []


class Tree(BaseModel):
    branches: list[Tree]


def call(tool: Tool, **arguments: Any) -> ToolResult:
    return asyncio.run(tool.call(arguments))


def convert(amount: float, units: list[str], exact: bool = False, places: int | None = None) -> ToolResult:
    """Converts an amount
    between units.

    This is not for the policy.
    """
    if amount < 0:
        raise ToolError("amount is negative")
    return ToolResult(text=f"{amount} {units} {exact} {places}")


def test_the_schema_is_the_openai_form_of_the_signature() -> None:
    assert FunctionTool(convert).schema == {
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
    result = call(FunctionTool(convert), amount=1, units=["m"], places=2)
    assert result == ToolResult(text="1.0 ['m'] False 2")


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ({}, "amount: Field required; units: Field required"),
        ({"amount": True, "units": []}, "amount"),
        ({"amount": 1, "units": [1]}, "units.0"),
        ({"amount": 1, "units": [], "exact": 1}, "exact"),
        ({"amount": 1, "units": [], "more": 1}, "more"),
        ({"amount": 1, "units": ["\ud800"]}, "Invalid JSON"),
    ],
)
def test_bad_arguments(arguments: dict[str, Any], named: str) -> None:
    result = call(FunctionTool(convert), **arguments)
    assert result.call_status is CallStatus.BAD_ARGUMENTS
    assert named in result.text


def test_arguments_that_are_nested_too_deeply() -> None:
    nested: Any = []
    for _ in range(100_000):
        nested = [nested]
    assert call(FunctionTool(convert), amount=1, units=nested).call_status is CallStatus.BAD_ARGUMENTS


def test_enums_and_models_inside_of_each_other_are_defined_and_can_be_given() -> None:
    def measure(unit: Unit, place: Place) -> str:
        """Measures."""
        return f"{unit} {place.title} {place.units}"

    tool = FunctionTool(measure)
    assert tool.schema["function"]["parameters"] == {
        "type": "object",
        "properties": {"unit": {"$ref": "#/$defs/Unit"}, "place": {"$ref": "#/$defs/Place"}},
        "required": ["unit", "place"],
        "$defs": {
            "Unit": {"enum": ["m", "km"], "type": "string"},
            "Place": {
                "type": "object",
                "properties": {
                    "title": {"type": "string"},
                    "units": {"type": "array", "default": [], "items": {"$ref": "#/$defs/Unit"}},
                },
                "required": ["title"],
            },
        },
    }
    assert call(tool, unit="m", place={"title": "Tesk", "units": ["km"]}).text == "Unit.M Tesk [<Unit.KM: 'km'>]"
    assert call(tool, unit="mile", place={"title": "Tesk"}).call_status is CallStatus.BAD_ARGUMENTS


def test_a_tool_without_parameters_says_so() -> None:
    def now() -> str:
        """Tells the time."""
        return "noon"

    assert FunctionTool(now).schema["function"]["parameters"] == {"type": "object", "properties": {}}
    assert call(FunctionTool(now)).text == "noon"
    assert call(FunctionTool(now), zone="x").call_status is CallStatus.BAD_ARGUMENTS


@pytest.mark.parametrize(
    ("error", "status"), [(ToolError, CallStatus.FAILED), (ToolTimeout, CallStatus.TIMEOUT)], ids=["error", "timeout"]
)
def test_expected_failures_are_results(error: type[ToolError], status: CallStatus) -> None:
    def fail() -> str:
        """Fails."""
        raise error("as expected")

    async def fail_later() -> str:
        """Fails."""
        await asyncio.sleep(0)
        raise error("as expected")

    for function in (fail, fail_later):
        assert call(FunctionTool(function)) == ToolResult(text="as expected", call_status=status)


def test_what_waits_too_long_is_cancelled_and_the_agents_fault() -> None:
    ended = []

    async def wait(for_s: float) -> str:
        """Waits."""
        try:
            await asyncio.sleep(for_s)
        finally:
            ended.append(for_s)
        return "waited"

    tool = FunctionTool(wait, timeout_s=0.05)
    assert tool.waits
    assert call(tool, for_s=0).text == "waited"
    assert call(tool, for_s=3600) == ToolResult(text="wait took longer than 0.05 s", call_status=CallStatus.TIMEOUT)
    assert ended == [0, 3600]


@pytest.mark.parametrize("error", [TimeoutError("of the network"), KeyError("ours"), WorldFault("theirs")], ids=repr)
def test_what_is_no_fault_of_the_agent_is_raised(error: Exception) -> None:
    async def broken() -> str:
        """Breaks."""
        raise error

    with pytest.raises(type(error)) as raised:
        call(FunctionTool(broken, timeout_s=60))
    assert raised.value is error


def test_what_a_tool_may_return() -> None:
    def number() -> int:
        """Gives a number."""
        return 1

    with pytest.raises(TypeError, match="tool 'number' returned int; return a str or a ToolResult"):
        call(FunctionTool(number))  # type: ignore[arg-type]


def test_functions_that_are_no_tools() -> None:
    def untyped(x) -> ToolResult:  # type: ignore[no-untyped-def]
        """Has a parameter without a type."""
        return ToolResult(text="")

    def undocumented(x: int) -> ToolResult:
        return ToolResult(text="")

    def grow(tree: Tree) -> str:
        """Grows."""
        return ""

    def größe() -> str:
        """Has a name that no call could spell."""
        return ""

    def quick() -> str:
        """Needs no limit."""
        return ""

    with pytest.raises(ValueError, match="'x' needs a type annotation"):
        FunctionTool(untyped)
    with pytest.raises(ValueError, match="'undocumented' needs a docstring"):
        FunctionTool(undocumented)
    with pytest.raises(ValueError, match=r"tool 'grow': its schema refers in a circle: #/.defs/Tree to"):
        FunctionTool(grow)
    with pytest.raises(ValueError, match="tool 'größe': a name is made of"):
        FunctionTool(größe)
    with pytest.raises(ValueError, match="tool 'quick': timeout_s 2 has no effect on a `def`"):
        FunctionTool(quick, timeout_s=2)


class Lamp:
    """An episode's own."""

    def __init__(self) -> None:
        self.lit = 0

    def reset(self, **row: Any) -> None:
        self.lit = 0

    def get_reward(self) -> float:
        return float(self.lit)

    @property
    def shown(self) -> str:
        raise AssertionError("nobody asked")

    def switch(self, times: int = 1) -> str:
        """Switches the lamp."""
        self.lit += times
        return self._state()

    async def look(self) -> ToolResult:
        """Looks at it."""
        return ToolResult(text=self._state())

    def _state(self) -> str:
        return f"switched {self.lit} times"


class Torch(Lamp):
    def blink(self) -> str:
        """Blinks."""
        return "blinked"


def test_the_methods_of_an_episodes_object_are_tools() -> None:
    switch, look = methods(Lamp())
    others = methods(Torch())
    assert [tool.name for tool in others] == ["switch", "look", "blink"]
    assert [tool.waits for tool in others] == [False, True, False]
    assert call(switch, times=2).text == "switched 2 times"
    assert call(look).text == "switched 2 times", "the same object"
    assert call(others[0]).text == "switched 1 times", "another one"
    assert json.loads(json.dumps(look.schema))["function"]["parameters"]["properties"] == {}


def test_an_object_with_a_method_that_is_no_tool_is_refused() -> None:
    class Box:
        def open(self, lid) -> str:  # type: ignore[no-untyped-def]
            """Opens it."""
            return ""

    with pytest.raises(ValueError, match="tool 'open': parameter 'lid' needs a type annotation"):
        methods(Box())
