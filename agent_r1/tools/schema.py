"""What the policy is told about a tool, in the OpenAI function form: within limits, whoever wrote it."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from graphlib import CycleError, TopologicalSorter
from typing import Any

Schema = dict[str, Any]

NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")
MAX_CHARACTERS = 16_384  # of a schema as JSON: the policy reads all of it in every prompt
MAX_DEPTH = 32  # of values inside of each other


def function_schema(name: str, description: str, parameters: Mapping[str, Any]) -> Schema:
    """The schema of a tool whose parameters are a JSON schema of an object.

    A ValueError names the tool and what is wrong: a name that a call could not spell, parameters that are no object,
    a schema that is too large or too deep or no JSON, a reference that leads outside, nowhere or in a circle.
    """
    if not NAME.fullmatch(name):
        raise ValueError(f"tool {name[:80]!r}: a name is made of 1 to 64 letters, digits, _ and -")
    try:
        described = {"name": name, "description": description, "parameters": _object(parameters)}
        _require_small(described)
        _require_resolvable(parameters)
    except ValueError as fault:
        raise ValueError(f"tool {name!r}: {fault}") from None
    return {"type": "function", "function": described}


def _object(parameters: Mapping[str, Any]) -> dict[str, Any]:
    """With its properties, though there are none: templates list them."""
    if parameters.get("type") != "object" or not isinstance(parameters.get("properties", {}), dict):
        raise ValueError("its parameters are no object with properties")
    return {"type": "object", "properties": {}} | dict(parameters)


def _require_small(schema: Schema) -> None:
    if _deeper_than(schema, MAX_DEPTH):
        raise ValueError(f"its schema holds values more than {MAX_DEPTH} deep inside of each other")
    try:
        size = len(json.dumps(schema, ensure_ascii=False, allow_nan=False).encode().decode())
    except (TypeError, ValueError):
        raise ValueError("its schema is no JSON") from None
    if size > MAX_CHARACTERS:
        raise ValueError(f"its schema takes {size:,} characters, more than {MAX_CHARACTERS:,}; shorten its description")


def _deeper_than(value: Any, limit: int) -> bool:
    level = [value]
    for _ in range(limit):
        level = [inner for each in level for inner in _inside(each)]
    return bool(level)


def _inside(value: Any) -> list[Any]:
    match value:
        case dict():
            return list(value.values())
        case list() | tuple():
            return list(value)
    return []


def _require_resolvable(parameters: Mapping[str, Any]) -> None:
    waiting, leads_to = [*_references(parameters)], dict[str, list[str]]()
    while waiting:
        if (reference := waiting.pop()) not in leads_to:
            leads_to[reference] = [*_references(_target(parameters, reference))]
            waiting += leads_to[reference]
    try:
        TopologicalSorter(leads_to).prepare()
    except CycleError as fault:
        raise ValueError(f"its schema refers in a circle: {' to '.join(fault.args[1])[:200]}") from None


def _references(value: Any) -> Iterator[str]:
    if isinstance(value, Mapping) and isinstance(value.get("$ref"), str):
        yield value["$ref"]
    for inner in _inside(value):
        yield from _references(inner)


def _target(parameters: Mapping[str, Any], reference: str) -> Any:
    """What a reference such as `#/$defs/Unit` leads to."""
    where, *keys = reference.split("/")
    found: Any = parameters
    for key in keys:
        key = key.replace("~1", "/").replace("~0", "~")
        found = found.get(key) if isinstance(found, Mapping) else None
    if where != "#" or found is None:
        raise ValueError(f"its schema refers to {reference[:80]!r}, which is not in it")
    return found
