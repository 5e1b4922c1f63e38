from __future__ import annotations  # as in many a module of tools

import asyncio
import enum
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel

from agent_r1.faults import WorldFault
from agent_r1.records import CallStatus
from agent_r1.tools.base import (
    MAX_CHARACTERS,
    MAX_DEPTH,
    FunctionTool,
    Tool,
    ToolError,
    ToolResult,
    ToolTimeout,
    function_schema,
    methods,
)
from tests.cases import cases, tables


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
    tool = FunctionTool(convert).schema
    assert (tool["type"], tool["function"]["name"]) == ("function", "convert")
    assert tool["function"]["description"] == "Converts an amount between units."
    assert tool["function"]["parameters"] == tables(Path(__file__).parent)["parameters_of_convert"]


DEEP: Any = []
for _ in range(100_000):
    DEEP = [DEEP]


@cases("arguments, named")
def test_bad_arguments(arguments: dict[str, Any], named: str) -> None:
    result = call(FunctionTool(convert), **arguments | ({"units": DEEP} if arguments.get("units") == "deep" else {}))
    assert result.call_status is CallStatus.BAD_ARGUMENTS
    assert named in result.text
    assert call(FunctionTool(convert), amount=1, units=["m"], places=2) == ToolResult(text="1.0 ['m'] False 2")


def test_enums_and_models_inside_of_each_other_are_defined_and_can_be_given() -> None:
    def measure(unit: Unit, place: Place) -> str:
        """Measures."""
        return f"{unit} {place.title} {place.units}"

    tool = FunctionTool(measure)
    parameters = tool.schema["function"]["parameters"]
    assert parameters["properties"] == {"unit": {"$ref": "#/$defs/Unit"}, "place": {"$ref": "#/$defs/Place"}}
    assert parameters["$defs"]["Unit"] == {"enum": ["m", "km"], "type": "string"}
    units = {"type": "array", "default": [], "items": {"$ref": "#/$defs/Unit"}}
    assert parameters["$defs"]["Place"]["properties"] == {"title": {"type": "string"}, "units": units}
    assert call(tool, unit="m", place={"title": "Tesk", "units": ["km"]}).text == "Unit.M Tesk [<Unit.KM: 'km'>]"
    assert call(tool, unit="mile", place={"title": "Tesk"}).call_status is CallStatus.BAD_ARGUMENTS


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


def untyped(x) -> str:  # type: ignore[no-untyped-def]
    """Has a parameter without a type."""
    return ""


def undocumented(x: int) -> str:
    return ""


def grow(tree: Tree) -> str:
    """Grows."""
    return ""


def number() -> int:
    """Gives a number, and needs no limit."""
    return 1


@pytest.mark.parametrize(
    ("function", "timeout_s", "message"),
    [
        (untyped, None, "tool 'untyped': parameter 'x' needs a type annotation"),
        (undocumented, None, "'undocumented' needs a docstring"),
        (grow, None, r"tool 'grow': its schema refers in a circle: #/.defs/Tree to"),
        (number, 2, "tool 'number': timeout_s 2 has no effect on a `def`"),
    ],
)
def test_functions_that_are_no_tools(function: Any, timeout_s: float | None, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        FunctionTool(function, timeout_s=timeout_s)
    assert call(FunctionTool(number)).text == "1"


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


def test_the_methods_of_an_episodes_object_are_tools() -> None:
    switch, look = methods(Lamp())
    other, _ = methods(Lamp())
    assert [(tool.name, tool.waits) for tool in (switch, look)] == [("switch", False), ("look", True)]
    assert call(switch, times=2).text == "switched 2 times"
    assert call(look).text == "switched 2 times", "the same object"
    assert call(other).text == "switched 1 times", "another one"
    assert look.schema["function"]["parameters"] == {"type": "object", "properties": {}}
    assert call(look, zone="x").call_status is CallStatus.BAD_ARGUMENTS


def test_the_parameters_that_a_docstring_describes() -> None:
    def paint(color: str, coats: int = 1, dry: bool = True) -> None:
        """
        Paints the wall,
        all of it.

        Args:
            color (`str`):
                Its name: red,
                or blue.
            coats: How many.

        Returns:
            Nothing.
        """

    described = FunctionTool(paint).schema["function"]
    assert described["description"] == "Paints the wall, all of it."
    told = {name: each.get("description") for name, each in described["parameters"]["properties"].items()}
    assert told == {"color": "Its name: red, or blue.", "coats": "How many.", "dry": None}


def nested(depth: int) -> Any:
    value: Any = {}
    for _ in range(depth):
        value = {"items": value}
    return value


def of(**properties: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties}


@cases("parameters, added")
def test_a_schema_is_kept_as_it_is_but_for_properties(parameters: dict[str, Any], added: dict[str, Any]) -> None:
    assert function_schema("look_up-2", "Looks.", parameters)["function"]["parameters"] == parameters | added


@pytest.mark.parametrize("name", ["", "<|im_end|>", "x" * 65, "a\n", "größe", "a.b"])
def test_names_that_no_call_could_spell(name: str) -> None:
    with pytest.raises(ValueError, match="a name is made of 1 to 64 letters, digits, _ and -"):
        function_schema(name, "", of())


CIRCLE = of(a={"$ref": "#/$defs/A"}) | {"$defs": {"A": {"items": {"$ref": "#/$defs/B"}}, "B": {"$ref": "#/$defs/A"}}}
CHAIN = {str(i): {"anyOf": [{"$ref": f"#/$defs/{i + 1}"}] * 2} for i in range(30)} | {"30": {"type": "string"}}


@cases("properties, problem")
def test_schemas_that_are_refused_and_others_within_the_limits(properties: dict[str, Any], problem: str) -> None:
    lists: Any = ({"type": "array"}, {"type": "object", "properties": ["a"]})
    refused = [(of(a=properties), problem), *((schema, "no object with properties") for schema in lists)]
    refused += [(of(a=nested(depth)), "more than 32 deep") for depth in (MAX_DEPTH, 500)]
    for schema, said in (*refused, (CIRCLE, "refers in a circle: #/.defs/")):
        with pytest.raises(ValueError, match=f"tool 'look': its .*{said}"):
            function_schema("look", "", schema)
    function_schema("look", "x" * (MAX_CHARACTERS - 100), of())
    for taken in (of(a=nested(MAX_DEPTH - 4)), of(a={"$ref": "#/$defs/0"}) | {"$defs": CHAIN}):
        function_schema("look", "", taken)
