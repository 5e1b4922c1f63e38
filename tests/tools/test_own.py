from __future__ import annotations

import asyncio
import hashlib
from pathlib import Path
from typing import Any

import pytest

from agent_r1.params import load
from agent_r1.params.env import ToolsParams
from agent_r1.params.sections import validated
from agent_r1.tools.toolbox import own_sources, own_tools

ENV = load(Path(__file__).parents[2] / "params.yaml").env
SOURCE = '''
import asyncio

def double(number: int) -> str:
    """Doubles."""
    return str(2 * number)

async def ask(name: str) -> str:
    """Asks."""
    await asyncio.sleep(3600)

def bare(x):
    """Lacks a type."""

CONSTANT = 1
'''


@pytest.fixture(autouse=True)
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    file = tmp_path / "some_tools.py"
    file.write_text(SOURCE)
    (tmp_path / "broken_tools.py").write_text("1/0")
    monkeypatch.syspath_prepend(str(tmp_path))
    return file


def offering(**functions: dict[str, Any]) -> ToolsParams:
    return validated(ToolsParams, ENV.tools.model_dump() | {"functions": functions}, "env.tools")


def test_functions_are_found_by_module_and_name(module: Path) -> None:
    params = offering(double={"module": "some_tools"}, ask={"module": "some_tools", "timeout_s": 0.01})
    double, ask = own_tools(params)
    assert asyncio.run(double.call({"number": 21})).text == "42"
    assert asyncio.run(ask.call({"name": "x"})).text == "ask took longer than 0.01 s"
    assert (
        own_sources(ENV.model_copy(update={"tools": params}))["tool double"]
        == hashlib.sha256(module.read_bytes()).hexdigest()
    )


@pytest.mark.parametrize(
    ("functions", "message"),
    [
        ({"triple": {"module": "no_tools"}}, r"functions\.triple: module 'no_tools' cannot be imported \(ModuleNot"),
        ({"triple": {"module": "broken_tools"}}, r"module 'broken_tools' cannot be imported \(ZeroDivisionError"),
        ({"doubel": {"module": "some_tools"}}, r"functions\.doubel: some_tools has no 'doubel'; did you mean 'double'"),
        ({"CONSTANT": {"module": "some_tools"}}, "some_tools has no 'CONSTANT'"),
        ({"bare": {"module": "some_tools"}}, "tool 'bare': parameter 'x' needs a type annotation"),
        ({"double": {"module": "some_tools", "timeout_s": 1}}, "timeout_s 1.0 has no effect on a `def`"),
        ({"double": {"module": "some tools"}}, r"functions\.double\.module"),
    ],
)
def test_functions_that_are_refused(functions: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        own_tools(offering(**functions))
