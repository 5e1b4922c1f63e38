"""The sandbox, with real workers: its output, its names, and attacks on it."""

import asyncio
import contextlib
import os
import re
import resource
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from agent_r1.outside.sandbox import NOW, PythonTool, Sandbox
from agent_r1.params.tools import PythonParams
from agent_r1.records import CallStatus
from agent_r1.tools.base import ToolResult
from tests.cases import cases

LIMITS = PythonParams(timeout_s=2.0, memory_mib=64, workers=2)


@pytest.fixture(scope="module")
def runner() -> Iterator[asyncio.Runner]:
    with asyncio.Runner() as runner:
        yield runner


@pytest.fixture(scope="module")
def sandbox() -> Iterator[Sandbox]:
    with Sandbox(LIMITS) as sandbox:
        yield sandbox


@pytest.fixture
def run(runner: asyncio.Runner, sandbox: Sandbox) -> Callable[[str], ToolResult]:
    tool = PythonTool(sandbox, seed=7)
    return lambda code: runner.run(tool.call({"code": code}))


@cases("code, shown")
def test_what_is_printed_and_the_last_value_are_shown(run: Callable[[str], ToolResult], code: str, shown: str) -> None:
    assert run(code) == ToolResult(text=shown)


@pytest.mark.parametrize("code", [1, "'\ud800'"])
def test_code_that_is_no_text_is_a_bad_argument(runner: asyncio.Runner, sandbox: Sandbox, code: Any) -> None:
    tool = PythonTool(sandbox, 0)
    assert (tool.name, tool.waits, tool.schema["function"]["parameters"]["required"]) == ("python", True, ["code"])
    assert runner.run(tool.call({"code": code})).call_status is CallStatus.BAD_ARGUMENTS


def texts(runner: asyncio.Runner, tool: PythonTool, *codes: str) -> list[str]:
    async def play() -> list[ToolResult]:
        return await asyncio.gather(*(tool.call({"code": code}) for code in codes))

    return [result.text for result in runner.run(play())]


def test_names_stay_for_an_episode_and_no_other_sees_them(runner: asyncio.Runner, sandbox: Sandbox) -> None:
    async def play(number: int) -> list[str]:
        tool = PythonTool(sandbox, seed=number)
        calls = [f"mine{number} = [{number}]", f"mine{number}.append(1)", f"mine{number}", f"mine{(number + 1) % 40}"]
        return [(await tool.call({"code": code})).text for code in calls]

    async def play_all() -> list[list[str]]:
        return await asyncio.gather(*(play(number) for number in range(40)))

    for number, (*_, own, other) in enumerate(runner.run(play_all())):
        assert own == f"[{number}, 1]"
        assert other == f"NameError: name 'mine{(number + 1) % 40}' is not defined"
    in_order = texts(runner, PythonTool(sandbox, seed=0), "n = 1", "n += 1", "n *= 5", "n")
    assert in_order[-1] == "10", "though all were made at once"


def test_chance_is_seeded_and_time_stands_still(runner: asyncio.Runner, sandbox: Sandbox) -> None:
    draws = ["import random\nrandom.random()"] * 3
    first, again, other = (texts(runner, PythonTool(sandbox, seed), *draws) for seed in (2**63, 2**63, 5))
    assert first == again
    assert len({*first, *other}) == 6
    now = "import datetime, time\ntime.sleep(9e9)\nstr(datetime.datetime.now())"
    shown = texts(runner, PythonTool(sandbox, 0), now, "hash('abc')")
    assert shown == [repr(str(NOW)), "-1222198482973350627"]


@cases("code, status, said")
def test_attacks_have_no_effect(run: Callable[[str], ToolResult], code: str, status: str | None, said: str) -> None:
    """Where no status is given there is a choice of limits that may end it first."""
    run("before = 1; x = [2]")
    result = run(code)
    assert result.call_status in ({status} if status else {CallStatus.OK, CallStatus.FAILED, CallStatus.TIMEOUT})
    assert said in result.text
    assert len(result.text) < 25_000
    assert run("before, x") == ToolResult(text="(1, [2])")


def test_a_known_result_is_recalled_without_being_shown_again(runner: asyncio.Runner, sandbox: Sandbox) -> None:
    called, recalling = PythonTool(sandbox, 3), PythonTool(sandbox, 3)
    for code in ("import random\nx = random.random()", "x = 0\n1/0", "y = 2"):
        arguments = {"code": code}
        runner.run(recalling.recall(arguments, runner.run(called.call(arguments))))
    late = ToolResult(text="", call_status=CallStatus.TIMEOUT)
    runner.run(recalling.recall({"code": "y = 3"}, late))
    first, second = (texts(runner, tool, "x, y, random.random()") for tool in (called, recalling))
    assert first == second


def workers() -> list[psutil.Process]:
    found = []
    for child in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):  # it ended meanwhile
            if "monty" in child.name():
                found.append(child)
    return found


def test_workers_end_with_the_sandbox_and_are_replaced_when_they_die() -> None:
    before = {worker.pid for worker in workers()}

    async def play() -> list[ToolResult]:
        with Sandbox(LIMITS) as sandbox:
            tool = PythonTool(sandbox, 0)
            results = [await tool.call({"code": "x = 5"})]
            own = [worker for worker in workers() if worker.pid not in before]
            assert len(own) == LIMITS.workers
            for worker in own:
                os.kill(worker.pid, signal.SIGKILL)
            return [*results, *[await tool.call({"code": "x"}) for _ in range(3)]]

    assert [result.text for result in asyncio.run(play())] == ["nothing was printed", "5", "5", "5"]
    assert {worker.pid for worker in workers()} == before


def test_a_program_that_crashes_its_worker_has_failed() -> None:
    """The test kills the worker, twice: no known program can."""
    before = {worker.pid for worker in workers()}

    async def kill_a_busy_one() -> None:
        while True:
            for worker in workers():
                if worker.pid not in before and worker.cpu_times().user > 0.2:
                    before.add(worker.pid)
                    return worker.kill()
            await asyncio.sleep(0.02)

    async def play() -> ToolResult:
        with Sandbox(PythonParams(timeout_s=60, memory_mib=64, workers=1)) as sandbox:
            running = asyncio.create_task(PythonTool(sandbox, 0).call({"code": "while True: pass"}))
            await kill_a_busy_one()
            await kill_a_busy_one()
            return await running

    result = asyncio.run(asyncio.wait_for(play(), 50))
    assert result == ToolResult(text="the program crashed the interpreter", call_status=CallStatus.FAILED)


def rights(process: int | str) -> list[str]:
    return re.findall(r"(?:CapInh|CapPrm|CapEff|NoNewPrivs):\t(\w+)", Path(f"/proc/{process}/status").read_text())


@pytest.mark.skipif(sys.platform != "linux", reason="rights and limits of other systems are left alone")
def test_a_worker_has_no_rights_and_opens_starts_and_writes_nothing() -> None:
    """Neither the first nor the one that takes its place; the process of the stage keeps what it has."""
    before, ours = {worker.pid for worker in workers()}, rights("self")

    async def play() -> None:
        with Sandbox(PythonParams(timeout_s=3, memory_mib=64, workers=1)) as sandbox:
            for _ in range(2):
                assert (await PythonTool(sandbox, 0).call({"code": "6 * 7"})).text == "42"
                [worker] = [each for each in workers() if each.pid not in before]
                assert rights(worker.pid) == ["0" * 16] * 3 + ["1"]
                limits = [resource.RLIMIT_NOFILE, resource.RLIMIT_NPROC, resource.RLIMIT_FSIZE, resource.RLIMIT_CORE]
                assert [max(resource.prlimit(worker.pid, each)) for each in limits] == [3, 0, 0, 0]
                assert 0 < max(resource.prlimit(worker.pid, resource.RLIMIT_AS)) <= 2 << 30
                worker.kill()

    asyncio.run(play())
    assert rights("self") == ours
