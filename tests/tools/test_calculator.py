import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent_r1.records import CallStatus
from agent_r1.tools.base import FunctionTool, ToolError
from agent_r1.tools.calculator import calculator
from tests.cases import cases


@cases("expression, answer")
def test_sums(expression: str, answer: str) -> None:
    assert calculator(expression) == answer


@cases("expression, problem")
def test_what_is_no_sum_is_refused(expression: str, problem: str) -> None:
    with pytest.raises(ToolError, match=problem):
        calculator(expression)


@given(st.text(alphabet="0123456789+-*/%()<>=!.^ ex,", max_size=300))
def test_whatever_it_is_given_it_answers_or_refuses(expression: str) -> None:
    result = asyncio.run(FunctionTool(calculator).call({"expression": expression}))
    assert result.call_status in (CallStatus.OK, CallStatus.FAILED)
    assert 0 < len(result.text) < 1000
