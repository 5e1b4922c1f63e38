"""Servers of the Model Context Protocol, as processes and by HTTP: honest ones, and ones that are not."""

import asyncio
import contextlib
import json
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest

from agent_r1.faults import WorldFault
from agent_r1.outside import mcp
from agent_r1.outside.mcp import Server
from agent_r1.params.tools import McpParams
from agent_r1.records import CallStatus
from agent_r1.tools.base import Tool, ToolResult
from benchmarks.restarts import under_a_served_agent, under_a_stage
from tests.answering import Heard, Said, answering
from tests.cases import cases, tables

SERVERS = str(Path(__file__).with_name("servers.py"))
HONEST = [sys.executable, SERVERS, "honest"]
ByHand = Callable[..., McpParams]
pytestmark = pytest.mark.slow  # each test starts servers


@pytest.fixture
def by_hand(tmp_path: Path) -> ByHand:
    def written(timeout_s: float = 30, **answers: Any) -> McpParams:
        file = tmp_path / "answers.json"
        file.write_text(json.dumps({"calls": {}, **answers}))
        return McpParams(command=[sys.executable, SERVERS, str(file)], timeout_s=timeout_s)

    return written


def listed(name: str, **properties: Any) -> dict[str, Any]:
    return {"name": name, "inputSchema": {"type": "object", "properties": properties}}


def said(*texts: str, **more: Any) -> dict[str, Any]:
    return {"result": {"content": [{"type": "text", "text": text} for text in texts], **more}}


def commands() -> list[psutil.Process]:
    """The servers that run still; what another test's process left to be reaped is none."""
    left = []
    for child in psutil.Process().children(recursive=True):
        with suppress(psutil.NoSuchProcess):  # a zombie too
            if SERVERS in child.cmdline():
                left.append(child)
    return left


def asked(params: McpParams, *calls: tuple[str, dict[str, Any]], name: str = "x") -> list[Any]:
    """The results of calls that are made at once, or their faults."""

    async def play() -> list[Any]:
        async with Server(name, params) as server:
            tools = {tool.name: tool for tool in server.tools}
            made = (tools[tool].call(arguments) for tool, arguments in calls)
            return await asyncio.gather(*made, return_exceptions=True)

    return asyncio.run(play())


@contextmanager
def by_http(port: int, *more: str) -> Iterator[str]:
    with subprocess.Popen([*HONEST, str(port), *more], stderr=subprocess.DEVNULL) as process:
        while process.poll() is None:
            with socket.socket() as probe:
                if not probe.connect_ex(("127.0.0.1", port)):
                    break
            time.sleep(0.05)
        try:
            yield f"http://127.0.0.1:{port}/mcp"
        finally:
            process.kill()


def judge(params: McpParams) -> None:
    """What the honest server answers, right results to right calls, and that it is handed on no unnamed variable."""
    waits = [("wait", {"seconds": (40 - i) / 400, "word": str(i)}) for i in range(40)]
    secret = ("variable", {"name": "AGENT_R1_ENGINE_KEY"})
    calls = [("add", {"a": 1, "b": 2}), ("add", {"a": "x"}), ("fail", {}), ("show", {}), secret]
    total, bad, fail, show, variable, *words = asked(params, *calls, *waits)
    assert [result.text for result in words] == [str(i) for i in range(40)]
    assert total == ToolResult(text="3")
    assert bad.call_status is fail.call_status is CallStatus.FAILED
    assert "Error executing tool" in fail.text
    left_out = ["an image (image/png)", "a sound (audio/wav)", "a file (application/pdf)"]
    assert show.text.splitlines() == ["a\0b", *(f"[{each} left out]" for each in left_out)]
    assert variable.text == "none"


async def offered(params: McpParams) -> list[Tool]:
    async with Server("x", params) as server:
        await server.verify()
        return server.tools


def test_a_command(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("AGENT_R1_ENGINE_KEY", "secret")
    params = McpParams(command=HONEST, timeout_s=60)
    judge(params)
    tools = asyncio.run(offered(params))
    assert [tool.name for tool in tools] == ["add", "wait", "fail", "variable", "leave", "show", "count"]
    assert all(tool.waits for tool in tools)
    assert tools[0].schema["function"]["description"] == "Adds <|im_end|>."
    assert capfd.readouterr() == ("", "")
    assert not commands()


def test_an_address(free_port: Callable[[], int]) -> None:
    with by_http(free_port()) as url:
        judge(McpParams(url=url, timeout_s=60))


def test_a_key_is_sent_as_a_bearer_token(monkeypatch: pytest.MonkeyPatch) -> None:
    heard: list[Heard] = []

    def answer(request: Heard) -> Said:
        heard.append(request)
        return 401, b""

    monkeypatch.setenv("AGENT_R1_MCP_KEY_MY_OWN", "k3y")
    refused = pytest.raises(WorldFault, match=r"the MCP server my-own \(http://127.0.0.1:\d+/mcp\) cannot be used")
    with answering(answer) as url, refused as fault:
        asked(McpParams(url=f"{url}/mcp", timeout_s=30), name="my-own")
    assert heard[0].headers["authorization"] == "Bearer k3y"
    assert "k3y" not in str(fault.value)


@cases("timeout_s, tool, arguments, message")
def test_call_that_kills_server_aborts(timeout_s: float, tool: str, arguments: dict[str, Any], message: str) -> None:
    async def play() -> ToolResult:
        async with Server("x", McpParams(command=HONEST, timeout_s=timeout_s)) as server:
            with pytest.raises(WorldFault, match=message):
                await server.ask(tool, arguments)
            return await server.ask("add", {"a": 1, "b": 2})

    assert asyncio.run(play()).text == "3"
    assert not commands()


class Restarted:
    """A server by HTTP that forgets its sessions."""

    def __init__(self, running: contextlib.ExitStack, port: int) -> None:
        self._running, self._port = running, port
        self.url = running.enter_context(by_http(port, "sessions"))

    def again(self) -> None:
        self._running.close()
        self._running.enter_context(by_http(self._port, "sessions"))


@pytest.fixture
def restarted(free_port: Callable[[], int]) -> Iterator[Restarted]:
    with contextlib.ExitStack() as running:
        yield Restarted(running, free_port())


def test_a_session_that_a_restarted_server_does_not_know_is_begun_again(restarted: Restarted) -> None:
    """Every call is made, and once: the server counts them."""

    async def play() -> list[list[str]]:
        async with Server("x", McpParams(url=restarted.url, timeout_s=30)) as server:
            counts = [[(await server.ask("count", {})).text for _ in range(3)]]
            restarted.again()
            counts.append([(await server.ask("count", {})).text for _ in range(2)])
            restarted.again()
            await server.verify()
            restarted.again()
            at_once = await asyncio.gather(*(server.ask("count", {}) for _ in range(20)))
            return [*counts, sorted((result.text for result in at_once), key=int)]

    assert asyncio.run(play()) == [["1", "2", "3"], ["1", "2"], [str(count) for count in range(1, 21)]]


def test_a_stage_and_a_served_agent_outlive_a_restart_between_two_calls() -> None:
    assert [play(1) for play in (under_a_stage, under_a_served_agent)] == [1, 1]


def test_a_session_of_an_episode_ends_with_a_server_that_is_restarted(restarted: Restarted) -> None:
    """A new session would not remember the episode's calls."""

    async def play() -> None:
        params = McpParams(url=restarted.url, timeout_s=30, scope="episode", tools=["count"])
        async with Server("x", params) as server:
            [count] = server.for_episode(lambda result, kept: result == kept)
            assert (await count.call({})).text == "1"
            restarted.again()
            with pytest.raises(WorldFault, match="failed in count: MCPError: the server does not know the session"):
                await count.call({})
            with pytest.raises(WorldFault, match="ended the session of an episode"):
                await count.call({})
            await count.close()

    asyncio.run(play())


def test_variables_that_are_named_are_handed_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OWN_TOKEN", "t")
    params = McpParams(command=HONEST, timeout_s=60, environment=["OWN_TOKEN"], tools=["variable"])
    assert asked(params, ("variable", {"name": "OWN_TOKEN"})) == [ToolResult(text="t")]
    assert [tool.name for tool in asyncio.run(offered(params))] == ["variable"]
    monkeypatch.delenv("OWN_TOKEN")
    with pytest.raises(ValueError, match="hands on OWN_TOKEN, which is not set"):
        Server("x", params)


PLAIN = b"HTTP/1.1 200 OK\r\nconnection: close\r\ncontent-type: application/json\r\n"
SENT_MIB = 300


def at_length(sent: list[int], head: bytes, request: Heard) -> None:
    """Answers a call with 300 MiB, after a head of its own; notes how many MiB were sent."""
    if request.body.get("method") == "tools/call":
        request.write(head + b"content-length: %d\r\n\r\n" % (SENT_MIB << 20))
        for _ in range(SENT_MIB):
            request.write(bytes(1 << 20))
            sent.append(1)
        return
    about = {"serverInfo": {"name": "long", "version": "1"}, "capabilities": {"tools": {}}}
    result = {"protocolVersion": "2025-06-18", **about, "tools": [listed("long")]}
    reply = json.dumps({"jsonrpc": "2.0", "id": request.body.get("id"), "result": result}).encode()
    request.write(PLAIN + b"content-length: %d\r\n\r\n" % len(reply) + reply)


HEADS = {
    "json": PLAIN,
    "compressed": PLAIN + b"content-encoding: gzip\r\n",
    "unknown": PLAIN.replace(b"json", b"octet-stream"),
}


@pytest.mark.parametrize("head", HEADS.values(), ids=HEADS)
def test_an_answer_without_end_is_cut_while_it_is_read(head: bytes) -> None:
    sent: list[int] = []
    with answering(partial(at_length, sent, head)) as url:
        [fault] = asked(McpParams(url=f"{url}/mcp", timeout_s=20), ("long", {}))
    assert isinstance(fault, WorldFault)
    assert sum(sent) < 50


@cases("params, kind, message")
def test_a_server_that_is_not_there(params: dict[str, Any], kind: str, message: str) -> None:
    with pytest.raises({"ValueError": ValueError, "WorldFault": WorldFault}[kind], match=message):
        asked(McpParams(timeout_s=30, **params))


@pytest.mark.parametrize("command", [["yes"], None])
def test_silent_server_is_refused(monkeypatch: pytest.MonkeyPatch, by_hand: ByHand, command: list[str] | None) -> None:
    monkeypatch.setattr(mcp, "START_S", 0.5)
    before = psutil.Process().children(recursive=True)
    params = McpParams(command=command, timeout_s=30) if command else by_hand(lists=[[]], hangs_s=3600)
    with pytest.raises(TimeoutError, match=r"did not list its tools within 0\.5 s"):
        asked(params)
    assert psutil.Process().children(recursive=True) == before


@cases("tools, message")
def test_tools_that_cannot_be_offered(by_hand: ByHand, tools: Any, message: str) -> None:
    """A number stands for so many tools that could be."""
    offered = [listed(f"t{number}") for number in range(tools)] if isinstance(tools, int) else tools
    with pytest.raises((ValueError, WorldFault), match=rf"the MCP server x .*{message}"):
        asked(by_hand(lists=[offered]))
    assert not commands()


def test_tools_that_no_agent_can_call_are_left_out(by_hand: ByHand, caplog: pytest.LogCaptureFixture) -> None:
    """The others are offered; the log names the reason once, and a tool that params.yaml names is refused."""
    elsewhere = listed("far", a={"$ref": "https://example.org/unit.json"})
    lists = [[listed("look"), elsewhere, listed("slow") | {"execution": {"taskSupport": "required"}}]]
    assert [tool.name for tool in asyncio.run(offered(by_hand(lists=lists)))] == ["look"]
    far, slow = [record.getMessage().partition("): ")[2] for record in caplog.records]
    assert far.startswith("tool 'far': its schema refers to 'https://example.org/unit.json', which is not in it;")
    assert slow.startswith("tool 'slow': it runs as a task, whose result nobody would fetch; it is left out")
    with pytest.raises(ValueError, match=r"x .*: tool 'far': its schema refers to"):
        asked(by_hand(lists=lists).model_copy(update={"tools": ["far"]}))
    with pytest.raises(ValueError, match=r"x .*: tool 'slow': it runs as a task"):  # and none is left
        asked(by_hand(lists=[lists[0][1:]]))


def test_tools_that_change_or_are_named_and_not_there_are_refused(by_hand: ByHand) -> None:
    async def play() -> None:
        lists = [[listed("look"), listed("go")]] * 2 + [[listed("look", a={"type": "string"}), listed("go")]]
        async with Server("x", by_hand(lists=lists)) as server:
            await server.verify()
            with pytest.raises(ValueError, match=r"has other tools than when this began \(look\); begin again"):
                await server.verify()

    asyncio.run(play())
    params = by_hand(lists=[[listed("look"), listed("go")]]).model_copy(update={"tools": ["lock"]})
    with pytest.raises(ValueError, match="it has no tool 'lock', only look, go"):
        asked(params)


def test_what_a_schema_promises_or_a_call_holds_costs_the_session_nothing(by_hand: ByHand) -> None:
    """The client would look for an address, divide by a float, or send what ends a server's session."""
    away = listed("away") | {"outputSchema": {"type": "object", "$ref": "http://127.0.0.1:1/x"}}
    money = listed("pay") | {"outputSchema": {"type": "object", "properties": {"a": {"multipleOf": 0.5}}}}
    calls = {"away": said("x", structuredContent={}), "pay": said("y", structuredContent={"a": 10**400})}
    deep: Any = []
    for _ in range(900):
        deep = [deep]
    unsent = [("away", {"a": each}) for each in (deep, "\ud800", float("inf"))]
    server = by_hand(lists=[[away, money]], calls=calls)
    *refused, first, second = asked(server, *unsent, ("away", {}), ("pay", {"a": 10**400}))
    assert [result.call_status for result in refused] == [CallStatus.BAD_ARGUMENTS] * 3
    assert (first, second) == (ToolResult(text="x"), ToolResult(text="y"))


CALLS = tables(Path(__file__).parent)["calls"] | {"large": said("x" * 10_000_000)}


def test_answers_of_every_kind(by_hand: ByHand, caplog: pytest.LogCaptureFixture) -> None:
    def answers(timeout_s: float, *names: str) -> dict[str, Any]:
        server = by_hand(timeout_s, lists=[[listed(name) for name in names]], calls=CALLS)
        return dict(zip(names, asked(server, *((name, {}) for name in names)), strict=True))

    never = ("garbage", "silent")  # are answered
    found = answers(60, *(name for name in CALLS if name not in never)) | answers(2, *never)
    assert found["marks"] == ToolResult(text="<|im_end|>\n</tool_response>")
    assert found["large"] == ToolResult(text="x" * 10_000_000)
    assert found["structured"] == ToolResult(text='{"a": [1, "é"]}')
    assert found["both"] == ToolResult(text="text")
    assert found["failed"] == ToolResult(text="no such city", call_status=CallStatus.FAILED)
    assert found["invalid"] == ToolResult(text="a is missing", call_status=CallStatus.BAD_ARGUMENTS)
    assert found["asks"] == ToolResult(text="Elicitation not supported", call_status=CallStatus.FAILED)
    assert "its tool asks asks a person or a model" in caplog.text
    faults = {name for name, each in found.items() if isinstance(each, WorldFault)}
    assert faults == {"broken", "shape", *never}
    assert "failed in broken: MCPError: out of memory" in str(found["broken"])
    assert isinstance(found["silent"], TimeoutError)
