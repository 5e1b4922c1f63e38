from __future__ import annotations

import ast
import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent_r1.records import CallStatus
from agent_r1.tools.base import FunctionTool, ToolError, ToolResult
from agent_r1.tools.calculator import calculator


@pytest.mark.parametrize(
    ("expression", "answer"),
    [
        ("1990 - 1958", "32"),
        ("1958-1990", "-32"),
        ("(1990 - 1958) * 2", "64"),
        ("2 + 3 * 4", "14"),
        ("20 / 2 / 5", "2"),
        ("10 - 4 - 3", "3"),
        ("7 // 2", "3"),
        ("-7 // 2", "-4"),
        ("-7 % 3", "2"),
        ("2 ** 3 ** 2", "512"),
        ("2 ^ 10", "1024"),
        ("9**99", str(9**99)),
        ("-2 ** 2", "-4"),
        ("2 ** -2", "0.25"),
        ("2 ** -1 * 3", "1.5"),
        ("- - 3", "3"),
        ("0.1 + 0.2", "0.3"),
        (".5 * 3", "1.5"),
        ("-1/8", "-0.125"),
        ("1/3", "1/3, about 0.3333333333"),
        ("-2/3", "-2/3, about -0.6666666667"),
        ("1/3 * 3", "1"),
        ("6 \N{MULTIPLICATION SIGN} 7 \N{DIVISION SIGN} 2 \N{MINUS SIGN} 1", "20"),
        ("1 ** 10 ** 9", "1"),
        ("(-1) ** 3", "-1"),
        ("10 ** 30 / 7 ** 30 > 1", "true"),
        ("0.1 + 0.2 = 0.3", "true"),
        ("1958 < 1958", "false"),
        ("1958 <= 1958", "true"),
        ("2 >= 3", "false"),
        ("2 != 3", "true"),
        ("3 == 3", "true"),
    ],
)
def test_sums(expression: str, answer: str) -> None:
    assert calculator(expression) == answer


@pytest.mark.parametrize(
    ("expression", "problem"),
    [
        ("9**9**9", "too many digits"),
        ("2**-99999", "too many digits"),
        ("10**200 * 10**200", "too many digits"),
        ("1/0", "divided by zero"),
        ("1//0", "divided by zero"),
        ("1%0", "divided by zero"),
        ("0**-1", "divided by zero"),
        ("1 < 1/0", "divided by zero"),
        ("2**.5", "the exponent is no whole number"),
        ("__import__('os').system('x')", "'__import__' is no number"),
        ("(" * 100_000 + ")" * 100_000, "longer than 256 characters"),
        ("(" * 100 + "1" + ")" * 100, "nested too deeply"),
        ("-" * 200 + "1", "nested too deeply"),
        ("1" * 300, "longer than 256"),
        ("", "a number is missing before the end"),
        (" ", "a number is missing before the end"),
        ("()", r"a number is missing before \)"),
        ("1 +", "a number is missing before the end"),
        ("* 2", r"a number is missing before \*"),
        ("1 2", "'2' does not belong there"),
        ("2(3)", r"'\(' does not belong there"),
        ("1 < 2 < 3", "'<' does not belong there"),
        ("(1 < 2)", "a bracket is not closed"),
        ("(1", "a bracket is not closed"),
        ("1)", r"'\)' does not belong there"),
        ("1e9", "'e' is no number"),
        ("1,000", "',' is no number"),
        ("٣ + 1", "is no number"),
        ("<|im_end|>", "is no number"),
        ("1\0", "is no number"),
    ],
)
def test_what_is_no_sum_is_refused(expression: str, problem: str) -> None:
    with pytest.raises(ToolError, match=problem):
        calculator(expression)


def test_it_is_a_tool() -> None:
    tool = FunctionTool(calculator)
    assert not tool.waits
    assert asyncio.run(tool.call({"expression": "1 + 1"})) == ToolResult(text="2")
    assert asyncio.run(tool.call({"expression": "1/0"})).call_status is CallStatus.FAILED
    assert asyncio.run(tool.call({"expression": 1})).call_status is CallStatus.BAD_ARGUMENTS


@given(st.text(alphabet="0123456789+-*/%()<>=!.^ ex,", max_size=300))
def test_whatever_it_is_given_it_answers_or_refuses(expression: str) -> None:
    result = asyncio.run(FunctionTool(calculator).call({"expression": expression}))
    assert result.call_status in (CallStatus.OK, CallStatus.FAILED)
    assert 0 < len(result.text) < 1000


SUMS = st.recursive(
    st.integers(0, 99).map(str),
    lambda inner: st.tuples(inner, st.sampled_from("+-*"), inner).map(lambda three: "({}{}{})".format(*three)),
    max_leaves=8,
)


@given(SUMS)
def test_whole_numbers_as_python_has_them(expression: str) -> None:
    assert calculator(expression) == str(eval(compile(ast.parse(expression, mode="eval"), "sum", "eval")))
