import asyncio
import hashlib
import sys
import threading
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import psutil
import pytest

from agent_r1.faults import WorldFault
from agent_r1.params import Params, load
from agent_r1.params.env import EnvParams
from agent_r1.params.sections import override, validated
from agent_r1.records import Call, CallStatus, Outcome, Passage, Source, Trajectory
from agent_r1.search.base import Search
from agent_r1.tools.base import ToolResult
from agent_r1.tools.toolbox import Toolbox, UnderWay, cut, latencies, own_sources, own_tools, use_of_tools
from tests.cases import cases
from tests.trajectories import from_parts

SERVERS = str(Path(__file__).parents[1] / "outside/servers.py")
PYTHON = {"timeout_s": 30, "memory_mib": 64, "workers": 1}
HONEST = {"command": [sys.executable, SERVERS, "honest"], "timeout_s": 60}
Env = Callable[..., EnvParams]


class Corpus(Search):
    """Always finds the same."""

    def search(self, queries: Sequence[str], k: int) -> list[list[Passage]]:
        return [[Passage(passage_id=str(i), title=f"T{i}", text="long " * 50) for i in range(k)] for _ in queries]

    def read(self, title: str) -> list[Passage]:
        return []


@pytest.fixture
def env() -> Env:
    shipped = load(Path(__file__).parents[2] / "params.yaml").model_dump(mode="json", by_alias=True)

    def changed(max_result_characters: int = 4000, **tools: Any) -> EnvParams:
        offered = {"env": {"tools": tools, "max_result_characters": max_result_characters}}
        changes = offered | {"warm_start": {"demonstrations": 0}}  # which show how to search
        return validated(Params, override(shipped, changes), "params.yaml").env

    return changed


def called(params: EnvParams, index: Search | None, *calls: tuple[str, dict[str, Any]]) -> list[ToolResult]:
    async def play() -> list[ToolResult]:
        async with Toolbox(params, index) as toolbox:
            tools = {tool.name: tool for tool in toolbox.tools(seed=1)}
            return [await tools[name].call(arguments) for name, arguments in calls]

    return asyncio.run(play())


def names(params: EnvParams, index: Search | None = None) -> list[str]:
    async def play() -> list[str]:
        async with Toolbox(params, index) as toolbox:
            assert [tool.schema for tool in toolbox.tools(0)] == toolbox.schemas
            return [tool.name for tool in toolbox.tools(0)]

    return asyncio.run(play())


def test_tools_are_offered_in_one_order(env: Env) -> None:
    everything = env(calculator={}, read={"part_characters": 100}, python=PYTHON, mcp={"own": HONEST})
    of_the_server = ["add", "wait", "fail", "variable", "leave", "show", "count"]
    assert names(everything, Corpus()) == ["search", "calculator", "read", "python", *of_the_server]
    assert (names(env(), Corpus()), names(env(search=None, calculator={}))) == (["search"], ["calculator"])


def test_what_is_shared_and_what_is_an_episodes_own(env: Env) -> None:
    async def play() -> list[str]:
        async with Toolbox(env(search=None, python=PYTHON), None) as toolbox:
            [one], [other] = toolbox.tools(1), toolbox.tools(2)
            draw = {"code": "import random\nx = random.random()\nx"}
            drawn = [(await tool.call(draw)).text for tool in (one, other, toolbox.tools(1)[0])]
            await other.recall({"code": "y = 1"}, ToolResult(text=""))
            return [*drawn, *[(await tool.call({"code": "y"})).text for tool in (one, other)]]

    first, second, again, *seen = asyncio.run(play())
    assert first == again != second
    assert seen == ["NameError: name 'y' is not defined", "1"]


def test_everything_that_was_started_ends(env: Env) -> None:
    """Also where the stage fails, and where opening does; opened and closed in tasks of their own, as by a stage."""
    before = set(psutil.Process().children(recursive=True))
    threads = threading.active_count()
    with asyncio.Runner() as runner:
        toolbox = Toolbox(env(python=PYTHON, mcp={"own": HONEST}), Corpus())
        runner.run(toolbox.__aenter__())
        tools = {tool.name: tool for tool in toolbox.tools(0)}
        assert runner.run(tools["add"].call({"a": 1, "b": 2})).text == "3"
        assert runner.run(tools["python"].call({"code": "1"})).text == "1"
        assert len(set(psutil.Process().children(recursive=True)) - before) == 2
        runner.run(toolbox.verify())
        runner.run(toolbox.__aexit__(KeyError, KeyError("ours"), None))
    with pytest.raises(ValueError, match=r"env\.tools offers 2 tools of the name 'add'; leave all but one out"):
        names(env(python=PYTHON, mcp={"one": HONEST, "two": HONEST}), Corpus())
    assert set(psutil.Process().children(recursive=True)) == before
    assert threading.active_count() == threads


def test_an_index_is_needed_where_tools_ask_it(env: Env) -> None:
    class Untitled(Search):
        """Reads no titles."""

    with pytest.raises(ValueError, match=r"env\.tools offers search or read, and there is no index"):
        Toolbox(env(), None)
    with pytest.raises(ValueError, match=r"Untitled finds no passages by their title; set env\.tools\.read to null"):
        called(env(read={"part_characters": 100}), Untitled())


def test_long_results_are_cut_in_sight(env: Env) -> None:
    calls = [("search", {"query": "x"}), ("search", {"query": 1})]
    found, failed = called(env(max_result_characters=260), Corpus(), *calls)
    line = "T0: " + "long " * 50
    assert found.text == f"{line.strip()}\nT1: lo [... 247 characters left out]"
    assert found.titles == ("T0", "T1")
    assert failed.call_status is CallStatus.BAD_ARGUMENTS
    [short] = called(env(max_result_characters=200), Corpus(), calls[0])
    assert short.titles == ("T0",), "what was cut off was not shown"


@cases("text, kept")
def test_what_is_cut(text: str, kept: str) -> None:
    result = cut(ToolResult(text=text, call_status=CallStatus.FAILED), 10)
    assert result == ToolResult(text=kept, call_status=CallStatus.FAILED)


@cases("changes, message")
def test_tools_that_are_refused(env: Env, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message) as refusal:
        env(**changes)
    assert "me:k" not in str(refusal.value)


@pytest.mark.slow  # a server for each episode
def test_a_session_with_a_server_can_be_an_episodes_own(env: Env) -> None:
    """Opened by the first call, brought to where it was before a kill, and gone with the episode."""
    before = set(psutil.Process().children(recursive=True))

    def running() -> int:
        return len(set(psutil.Process().children(recursive=True)) - before)

    async def play() -> None:
        own = {**HONEST, "scope": "episode", "tools": ["count", "leave"]}
        async with Toolbox(env(search=None, mcp={"own": own}), None) as box:
            one, other, resumed, changed = (dict(zip(box.names, box.tools(seed), strict=True)) for seed in range(4))
            assert running() == 1
            counts = [(await tools["count"].call({})).text for tools in (one, one, other, one)]
            assert (counts, running()) == (["1", "2", "1", "3"], 3)
            for kept in ("1", "2"):
                await resumed["count"].recall({}, ToolResult(text=kept))
            assert running() == 3
            assert [(await resumed["count"].call({})).text for _ in range(2)] == ["3", "4"]
            await changed["count"].recall({}, ToolResult(text="7"))
            with pytest.raises(WorldFault, match="answers count in another way than before"):
                await changed["count"].call({})
            with pytest.raises(WorldFault, match="Connection closed"):
                await other["leave"].call({})
            with pytest.raises(WorldFault, match="ended the session of an episode"):
                await other["count"].call({})
            for tools in (one, other, resumed, changed):
                for tool in tools.values():
                    await tool.close()
            assert running() == 1

    asyncio.run(play())
    assert running() == 0


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
'''


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    file = tmp_path / "some_tools.py"
    file.write_text(SOURCE)
    monkeypatch.syspath_prepend(str(tmp_path))
    return file


def test_functions_are_found_by_module_and_name(module: Path, env: Env) -> None:
    params = env(functions={"double": {"module": "some_tools"}, "ask": {"module": "some_tools", "timeout_s": 0.01}})
    double, ask = own_tools(params.tools)
    assert asyncio.run(double.call({"number": 21})).text == "42"
    assert asyncio.run(ask.call({"name": "x"})).text == "ask took longer than 0.01 s"
    assert own_sources(params)["tool double"] == hashlib.sha256(module.read_bytes()).hexdigest()


@cases("name, declared, message")
@pytest.mark.usefixtures("module")
def test_functions_that_are_refused(env: Env, name: str, declared: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        own_tools(env(functions={name: declared}).tools)


def call(tool: str, latency_s: float = 0.0, status: CallStatus = CallStatus.OK) -> Call:
    return Call(tool=tool, arguments="{}", status=status, latency_s=latency_s)


def episode(*actions: Sequence[Call], outcome: Outcome = Outcome.ANSWERED) -> Trajectory:
    return from_parts([(Source.ACTION, [0])] * len(actions), [{"calls": calls} for calls in actions], outcome=outcome)


EPISODES = [
    episode([call("search", 0.1), call("search", 0.3, CallStatus.TIMEOUT)], [call("search", 0.2)], []),
    episode([call("search", 1.0, CallStatus.FAILED)], [call("oracle", 0.0, CallStatus.UNKNOWN_TOOL)]),
    episode([Call(status=CallStatus.MALFORMED)], outcome=Outcome.MALFORMED),
    episode([call("search", 60.0, CallStatus.TIMEOUT)], outcome=Outcome.ABORTED),
]


def test_tools_that_are_offered_are_counted_per_episode_and_by_what_became_of_their_calls() -> None:
    """Three episodes lived. Four calls of search: two succeed, one runs out of time, one fails."""
    assert use_of_tools(EPISODES, ["search", "calculator"]) == {
        "tool/search/calls": 4 / 3,
        "tool/search/ok_share": 2 / 4,
        "tool/search/timeout_share": 1 / 4,
        "tool/calculator/calls": 0.0,
    }
    assert use_of_tools(EPISODES[3:], ["search"]) == {"tool/search/calls": 0.0}
    # Of .1, .2, .3 and 1 s the median is .25, and the 95th percentile .85 of the way from .3 to 1.
    percentiles = {"tool/search/latency_p50_s": 0.25, "tool/search/latency_p95_s": 0.895}
    assert latencies(EPISODES, ["search", "calculator"]) == pytest.approx(percentiles)


def test_calls_that_are_under_way_together_are_waited_for_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls from second 1 to 4, 2 to 6 and 8 to 9: 5 s and 1 s."""
    clock = iter([1.0, 6.0, 8.0, 9.0])
    monkeypatch.setattr("agent_r1.tools.toolbox.time.perf_counter", lambda: next(clock))
    waiting = UnderWay()
    with ExitStack() as first:
        first.enter_context(waiting.call())
        with waiting.call():
            first.close()
    with pytest.raises(RuntimeError), waiting.call():
        raise RuntimeError("a bug of the tool")
    assert waiting.seconds == 6.0
