"""The gateway among strangers: connections without a key, of other accounts and of web pages, and megabytes."""

import asyncio
import gc
import os
import resource
import subprocess
import sys
import threading
import tracemalloc
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import httpx
import pytest
from starlette.datastructures import Headers
from uvicorn.server import ServerState

from agent_r1.agents import playing
from agent_r1.agents.session import Session
from agent_r1.agents.task import Ending, Task
from agent_r1.envs.kinds import attempts_at
from agent_r1.http.guard import Bounded, Door, Server, configured
from agent_r1.records import Outcome
from agent_r1.rollout.chat import Chat
from agent_r1.rollout.episode import PLAY
from tests.agents.conftest import QUESTION, Policy, http_of
from tests.neighbour import UID, needs_root

SWARM = """
import os, resource, socket, sys, time
port, account, count = map(int, sys.argv[1:])
resource.setrlimit(resource.RLIMIT_NOFILE, (4096, 4096))
os.setuid(account)
idle = [socket.socket() for _ in range(count)]
for place, connection in enumerate(idle):
    connection.settimeout(20)
    try:
        connection.connect(("127.0.0.1", port))
        place % 2 or connection.send(b"POST /v1/chat/completions HTTP/1.1\\r\\nhost: ")
    except OSError:
        pass
print("connected", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def few_files() -> Iterator[None]:
    """As many open files as accounts usually have."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (1024, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, before)


@pytest.mark.parametrize("account", [UID, os.getuid()], ids=["another account", "this account"])
def test_idle_connections_without_a_key_cost_no_episode(
    account: int, chat: Chat, outside: Callable[..., Any], few_files: None
) -> None:
    """1,200 connections, half of them in the middle of a head; the episodes ask while they stay."""
    if account != os.getuid():
        needs_root()
    arrived = asyncio.Event()
    swarm = list[subprocess.Popen[str]]()

    async def solve(task: Task) -> Ending:
        if not swarm:
            command = [sys.executable, "-c", SWARM, str(httpx.URL(task.base_url).port), str(account), "1200"]
            swarm.append(subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True))
            assert await asyncio.to_thread(swarm[0].stdout.readline) == "connected\n"
            arrived.set()
        await arrived.wait()
        async with http_of(task) as http:
            body = {"model": "m", "messages": [{"role": "user", "content": "Who?"}]}
            assert (await http.post("/chat/completions", json=body)).status_code == 200
        return Ending(answer="Quill")

    with outside(solve, env={"max_tokens": 400}) as shared:
        [attempt] = attempts_at([QUESTION], shared)
        attempts = [replace(attempt, sample=sample) for sample in range(16)]
        rows = playing.collect(Policy(chat, ["yes"]), chat, attempts, shared, seed=3, play=PLAY)
    assert [row.outcome for row in rows] == [Outcome.ANSWERED] * 16
    swarm[0].communicate()


async def _hello(scope: Any, receive: Any, send: Any) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
    await send({"type": "http.response.body", "body": b"hi"})


async def heads(door: Door, talk: Callable[[int], Any], app: Any = _hello) -> Any:
    """What comes of talking to a server with this door, at a port."""
    config = configured(app, "127.0.0.1", 0, door)
    state = ServerState()
    serving = await asyncio.get_running_loop().create_server(
        lambda: Bounded(door, config=config, server_state=state, app_state={}), "127.0.0.1", 0
    )
    async with asyncio.timeout(30), serving:
        return await talk(serving.sockets[0].getsockname()[1])


def has_key(headers: Headers) -> bool:
    return headers.get("key") == "right"


def test_a_stranger_is_turned_out_and_who_shows_a_key_stays() -> None:
    """Each of the first three has waited longest once; a head with a wrong key is answered, and changes nothing."""
    door = Door(expected=1, again=True, patience_s=2.0, opens=has_key)

    async def talk(port: int) -> None:
        known, *strangers = [await asyncio.open_connection("127.0.0.1", port) for _ in range(2)]
        known[1].write(b"GET / HTTP/1.1\r\nhost: x\r\nkey: right\r\n\r\n")
        assert (await known[0].readuntil(b"hi")).startswith(b"HTTP/1.1 200")
        strangers += [await asyncio.open_connection("127.0.0.1", port) for _ in range(4)]
        assert await strangers[0][0].read() == b""
        assert len(door.strangers) == 4
        strangers[1][1].write(b"GET / HTTP/1.1\r\nhost: x\r\nkey: wrong\r\n\r\n")
        for reader, _ in strangers[1:]:
            assert (await reader.read())[-2:] in (b"", b"hi")
        assert not door.strangers
        known[1].write(b"GET / HTTP/1.1\r\nhost: x\r\n\r\n")
        await known[0].readuntil(b"hi")
        for _, writer in (known, *strangers):
            writer.close()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(resource, "getrlimit", lambda _: (64, 64))  # room for 8 strangers, but 4 x expected are fewer
        asyncio.run(heads(door, talk))


def test_a_lack_of_files_is_said_once_a_second_and_ends_with_75(
    chat: Chat, outside: Callable[..., Any], caplog: pytest.LogCaptureFixture
) -> None:
    async def starve() -> Server:
        server = Server(configured(_hello, "127.0.0.1", 0, Door()))
        server.config.load()
        server.lifespan = server.config.lifespan_class(server.config)
        await server.startup([])
        for _ in range(2000):
            context = {"message": "socket.accept() out of system resource", "exception": OSError(24, "Too many")}
            asyncio.get_running_loop().call_exception_handler(context)
        return server

    assert asyncio.run(starve()).starved_s > 0
    assert [record.getMessage() for record in caplog.records] == ["no connection can be taken up: [Errno 24] Too many"]

    async def fail(task: Task) -> Ending:
        shared_gateway[0].server.starved_s = 1.0
        return Ending(fault="no connection")

    with outside(fail) as shared:
        shared_gateway = [shared.once(playing.Outside).gateway]
        with pytest.raises(OSError, match="its first 1 episodes all failed"):
            playing.collect(Policy(chat, [""]), chat, attempts_at([QUESTION], shared), shared, seed=3, play=PLAY)


def test_web_pages_are_refused_with_a_key_too(play: Callable[..., Any]) -> None:
    async def solve(task: Task) -> Ending:
        async with http_of(task) as http:
            assert (await http.get("/models")).status_code == 200
            assert (await http.get("/models", headers={"origin": "http://127.0.0.1"})).status_code == 403
            assert (await http.get("/models", headers={"host": "evil.example"})).status_code == 400
        return Ending(answer="Quill")

    assert play(solve, ["yes"])[0].outcome is Outcome.ANSWERED


def test_megabytes_are_refused_by_their_length_and_not_kept(
    play: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ten refused messages of 2 MB leave less than one of them in memory; none is rendered."""
    rendered = list[int]()
    place = Session.place
    monkeypatch.setattr(Session, "place", lambda self, request: rendered.append(0) or place(self, request))
    grown = list[int]()
    codes = list[tuple[int, str]]()

    async def solve(task: Task) -> Ending:
        async with http_of(task) as http:
            tracemalloc.start()
            for number in range(11):
                body = {"model": "m", "messages": [{"role": "user", "content": f"{number}" + "It is. " * 300_000}]}
                answer = await http.post("/chat/completions", json=body)
                codes.append((answer.status_code, answer.json()["error"]["code"]))
                gc.collect()
                grown.append(tracemalloc.get_traced_memory()[0])
            tracemalloc.stop()
        return Ending(answer="Quill")

    play(solve, ["yes"])
    assert not rendered
    assert codes == [(400, "context_length_exceeded")] * 11
    assert grown[-1] - grown[0] < 2_000_000


def test_a_large_request_is_rendered_beside_the_loop(
    chat: Chat, play: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the same tokens as on the loop; a small one stays there."""
    threads = list[bool]()
    place = Session.place

    def watched(self: Session, request: Any) -> Any:
        threads.append(threading.current_thread() is threading.main_thread())
        return place(self, request)

    monkeypatch.setattr(Session, "place", watched)
    text = "Kiss and Mara. " * 3000

    async def solve(task: Task) -> Ending:
        async with http_of(task) as http:
            for content in ("Who?", text):
                body = {"model": "m", "messages": [{"role": "user", "content": content}]}
                assert (await http.post("/chat/completions", json=body, timeout=60)).status_code == 200
        return Ending(answer="Quill")

    row, _ = play(solve, ["yes"], env={"max_tokens": 60_000})
    assert threads == [True, False]
    ids = chat.encode_sampled(text)
    start = row.context_starts[1]
    assert any(row.ids(slice(at, at + len(ids))) == ids for at in range(start, start + 99))
