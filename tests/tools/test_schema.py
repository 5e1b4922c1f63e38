from __future__ import annotations

from typing import Any

import pytest

from agent_r1.tools.base import MAX_CHARACTERS, MAX_DEPTH, function_schema


def nested(depth: int) -> Any:
    value: Any = {}
    for _ in range(depth):
        value = {"items": value}
    return value


def of(**properties: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties}


def test_a_schema_is_kept_as_it_is() -> None:
    parameters = {"type": "object", "properties": {"a": {"$ref": "#/$defs/A~1B"}}, "$defs": {"A/B": {"enum": [1]}}}
    assert function_schema("look_up-2", "Looks.", parameters) == {
        "type": "function",
        "function": {"name": "look_up-2", "description": "Looks.", "parameters": parameters},
    }


def test_parameters_without_properties_have_none() -> None:
    schema = function_schema("now", "", {"type": "object", "additionalProperties": False})
    assert schema["function"]["parameters"] == {"type": "object", "properties": {}, "additionalProperties": False}


@pytest.mark.parametrize("name", ["", "a b", "<|im_end|>", "x" * 65, "a\n", "größe", "a.b"])
def test_names_that_no_call_could_spell(name: str) -> None:
    with pytest.raises(ValueError, match="a name is made of 1 to 64 letters, digits, _ and -"):
        function_schema(name, "", of())


CIRCLE = of(a={"$ref": "#/$defs/A"}) | {"$defs": {"A": {"items": {"$ref": "#/$defs/B"}}, "B": {"$ref": "#/$defs/A"}}}


@pytest.mark.parametrize(
    ("parameters", "problem"),
    [
        ({}, "no object with properties"),
        ({"type": "array"}, "no object with properties"),
        ({"type": "object", "properties": ["a"]}, "no object with properties"),
        (of(a={"description": "x" * 1_000_000}), r"takes 1,000,\d+ characters, more than 16,384; shorten"),
        (of(a=nested(MAX_DEPTH)), "more than 32 deep"),
        (of(a=nested(500)), "more than 32 deep"),
        (of(a={"default": float("nan")}), "no JSON"),
        (of(a={"default": b"x"}), "no JSON"),
        (of(a={"description": "\ud800"}), "no JSON"),
        (of(a={"$ref": "#/$defs/A"}), "refers to '#/.defs/A', which is not in it"),
        (of(a={"$ref": "https://example.com/a.json"}), "refers to 'https://example.com/a.json', which is not in it"),
        (of(a={"$ref": "A"}), "refers to 'A', which is not in it"),
        (of(a={"$ref": "#"}), "refers in a circle: # to #"),
        (of(a={"items": {"$ref": "#/properties/a"}}), "in a circle: #/properties/a to #/properties/a"),
        (CIRCLE, "refers in a circle: #/.defs/"),
    ],
)
def test_schemas_that_are_refused(parameters: dict[str, Any], problem: str) -> None:
    with pytest.raises(ValueError, match=f"tool 'look': its .*{problem}"):
        function_schema("look", "", parameters)


def test_the_limits_are_not_lower() -> None:
    function_schema("look", "", of(a=nested(MAX_DEPTH - 4)))
    function_schema("look", "x" * (MAX_CHARACTERS - 100), of())


def test_references_that_meet_are_no_circle() -> None:
    chain = {str(i): {"anyOf": [{"$ref": f"#/$defs/{i + 1}"}] * 2} for i in range(30)} | {"30": {"type": "string"}}
    function_schema("look", "", of(a={"$ref": "#/$defs/0"}) | {"$defs": chain})
