import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent_r1.records import CallStatus
from agent_r1.tools.base import FunctionTool, ToolError
from agent_r1.tools.calculator import calculator


@pytest.mark.parametrize(
    ("expression", "answer"),
    [
        ("1990 - 1958", "32"),
        ("(1990 - 1958) * 2", "64"),
        ("20 / 2 / 5", "2"),
        ("-7 // 2", "-4"),
        ("-7 % 3", "2"),
        ("2 ** 3 ** 2", "512"),
        ("2 ^ 10", "1024"),
        ("9**99", str(9**99)),
        ("-2 ** 2", "-4"),
        ("2 ** -1 * 3", "1.5"),
        ("- - 3", "3"),
        ("0.1 + 0.2", "0.3"),
        (".5 * 3", "1.5"),
        ("-1/8", "-0.125"),
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
        *((each, "too many digits") for each in ("9**9**9", "2**-99999", "10**200 * 10**200")),
        *((each, "divided by zero") for each in ("1/0", "1//0", "1%0", "0**-1", "1 < 1/0")),
        ("2**.5", "the exponent is no whole number"),
        ("__import__('os').system('x')", "'__import__' is no number"),
        *((each, "longer than 256 characters") for each in ("(" * 100_000 + ")" * 100_000, "1" * 300)),
        *((each, "nested too deeply") for each in ("(" * 100 + "1" + ")" * 100, "-" * 200 + "1")),
        *((each, "a number is missing before the end") for each in ("", " ", "1 +")),
        *((each, "a number is missing before") for each in ("()", "* 2")),
        *((each, "does not belong there") for each in ("1 2", "2(3)", "1 < 2 < 3", "1)")),
        *((each, "a bracket is not closed") for each in ("(1 < 2)", "(1")),
        *((each, "is no number") for each in ("1e9", "1,000", "٣ + 1", "<|im_end|>", "1\0")),
    ],
)
def test_what_is_no_sum_is_refused(expression: str, problem: str) -> None:
    with pytest.raises(ToolError, match=problem):
        calculator(expression)


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
