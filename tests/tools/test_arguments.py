"""Schemas of strangers and calls of policies: what fits, and what costs no more than it may."""

import sys
from typing import Any

import pytest

from agent_r1.tools.arguments import MAX_WORK, ArgumentCheck
from agent_r1.tools.base import function_schema
from tests.cases import cases


def check(**schema: Any) -> ArgumentCheck:
    function_schema("tool", "", {"type": "object", **schema})
    return ArgumentCheck({"type": "object", **schema})


def doubled(levels: int) -> dict[str, Any]:
    """A schema whose references unfold to 2 ** `levels`."""
    defined = {f"n{at + 1}": {"allOf": [{"$ref": f"#/$defs/n{at}"}] * 2} for at in range(levels)}
    return {"properties": {"a": {"$ref": f"#/$defs/n{levels}"}}, "$defs": {"n0": {"type": "string"}, **defined}}


@cases("schema, fitting, others")
def test_arguments_fit_by_the_rules_of_2020(schema: Any, fitting: list[Any], others: list[Any]) -> None:
    judged = check(**schema)
    assert all(judged.fits(arguments) for arguments in fitting)
    assert not any(judged.fits(arguments) for arguments in others)


def deep(levels: int) -> list[Any]:
    return [deep(levels - 1)] if levels else []


@pytest.mark.parametrize(
    ("schema", "value"),
    [
        ({"properties": {"a": {"multipleOf": 0.5}}}, 10**400),
        ({"properties": {"a": {"pattern": "(a+)+$"}}}, "a" * 100_000 + "b"),
        (doubled(20), "x"),
        ({"properties": {"a": {"uniqueItems": True}}}, [at if at % 2 else {"b": at} for at in range(4000)]),
        ({"properties": {"a": {"enum": [1]}}}, deep(sys.getrecursionlimit() - 200)),
        ({"properties": {"a": {"items": {}}}}, [1] * (MAX_WORK + 1)),
    ],
)
def test_arguments_that_nobody_can_judge_cheaply_do_not_fit(schema: Any, value: Any) -> None:
    """Each of them raises in a plain validator, or takes it seconds, hours or forever."""
    judged = check(**schema)
    assert not judged.fits({"a": value})
    assert judged.fits({}), "the next check has all its work again"


@pytest.mark.parametrize(
    ("schema", "said"),
    [
        ({"$dynamicRef": "http://127.0.0.1:1/x"}, "refers to 'http://127.0.0.1:1/x', which is not in it"),
        ({"$recursiveRef": "#"}, "in a circle"),
        ({"properties": {"a": {"type": "strin"}}}, "no JSON schema: 'strin' is not valid"),
        ({"allOf": [{}] * 1200}, "holds { 1,201 times"),
        ({"properties": {f"p{at}": {"pattern": f"a{at}"} for at in range(40)}}, '"pattern" 40 times'),
    ],
)
def test_schemas_that_lead_outside_or_cost_too_much_are_refused(schema: Any, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        check(**schema)
