"""The client against real servers on loopback: the project's own, and some that misbehave."""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import json
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from types import SimpleNamespace
from typing import Any

import pytest

from agent_r1.envs.tool_env import ToolEnv
from agent_r1.faults import WorldFault, WorldTimeout
from agent_r1.http import client as client_module
from agent_r1.params.stages import RemoteParams
from agent_r1.records import CallStatus, Outcome, Passage
from agent_r1.search.remote import Remote
from agent_r1.tools.search import search_tool

SEARCH = '<tool_call>{"name": "search", "arguments": {"query": "q"}}</tool_call>'
PASSAGE = {"passage_id": "0", "title": "Tesk", "text": "a city"}
Answer = Callable[["Handler"], None]


class Server(ThreadingHTTPServer):
    """Answers each POST with the next of some answers, the last one again and again."""

    def __init__(self, *answers: Answer) -> None:
        self.answers = list(answers)
        self.requests: list[Any] = []
        super().__init__(("127.0.0.1", 0), Handler)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class Handler(BaseHTTPRequestHandler):
    server: Server

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["content-length"]))
        self.server.requests.append(json.loads(body))
        answer = self.server.answers.pop(0) if len(self.server.answers) > 1 else self.server.answers[0]
        answer(self)

    def log_message(self, *_: object) -> None:
        pass


def say(content: Any, status: int = 200) -> Answer:
    def answer(handler: Handler) -> None:
        body = content if isinstance(content, bytes) else json.dumps(content).encode()
        _begun(handler, status, len(body))
        handler.wfile.write(body)

    return answer


def drip(handler: Handler) -> None:
    """A byte now and then, each in time, all together never."""
    _begun(handler, length=100)
    _slowly(handler, b" ")


def drip_headers(handler: Handler) -> None:
    """A header that never ends, byte by byte."""
    handler.wfile.write(b"HTTP/1.1 200 OK\r\nx-slow: ")
    _slowly(handler, b"x")


def packed(handler: Handler) -> None:
    """A small answer that unpacked would be a thousand times as large."""
    handler.wfile.write(b"HTTP/1.1 200 OK\r\ncontent-encoding: gzip\r\n\r\n" + gzip.compress(bytes(2**20)))


def flood(handler: Handler) -> None:
    """An answer that has no end."""
    _begun(handler)
    with contextlib.suppress(OSError):
        while True:
            handler.wfile.write(bytes(2**16))


def _begun(handler: Handler, status: int = 200, length: int | None = None) -> None:
    handler.send_response(status)
    if length is not None:
        handler.send_header("content-length", str(length))
    handler.end_headers()


def _slowly(handler: Handler, byte: bytes) -> None:
    """A hundred of them, or as many as the client waits for."""
    with contextlib.suppress(OSError):
        for _ in range(100):
            handler.wfile.write(byte)
            time.sleep(0.05)


def count(handler: Handler) -> None:
    """For each query a passage that is called after it."""
    asked = handler.server.requests[-1]["queries"]
    say({"index_hash": "abc", "results": [[{**PASSAGE, "title": query}] for query in asked]})(handler)


def sleep(handler: Handler) -> None:
    time.sleep(1.0)


GOOD = say({"index_hash": "abc", "results": [[PASSAGE]]})


@contextmanager
def serving(*answers: Answer) -> Iterator[Server]:
    with Server(*answers) as server:
        thread = Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()


def client(url: str, *, index_hash: str = "abc", timeout_s: float = 5.0, retries: int = 2) -> Remote:
    return Remote(RemoteParams(url=url, timeout_s=timeout_s, retries=retries, backoff_s=0.01), index_hash)


def test_a_search_is_asked_and_answered() -> None:
    with serving(GOOD) as server:
        assert client(server.url).search(["tesk?"], 1) == [[Passage(passage_id="0", title="Tesk", text="a city")]]
    assert server.requests == [{"queries": ["tesk?"], "k": 1}]


def test_many_queries_go_in_batches_and_come_back_in_order() -> None:
    queries = [f"q{number}" for number in range(1025)]
    with serving(say(b"oh", 500), count) as server:
        found = client(server.url).search(queries, 1)
        assert client(server.url).search([], 1) == []
    assert [passage.title for [passage] in found] == queries
    assert [len(request["queries"]) for request in server.requests] == [32] * 33 + [1], "the first of them twice"


def test_a_fault_that_passes_is_tried_again() -> None:
    with serving(say(b"oh", 500), say(b"not json"), say(b"slow down", 429), say(b"", 408), GOOD) as server:
        assert client(server.url, retries=4).search(["q"], 1)[0][0].title == "Tesk"
    assert len(server.requests) == 5


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (say(b"oh", 500), "does not answer: status 500"),
        (say(b"busy", 503), "does not answer: status 503"),
        (say(b"slow down", 429), "does not answer: status 429"),
        (say(b"<html>"), "in another form than a search server's: "),
        (say({"results": [[PASSAGE]]}), "form than a search server's: index_hash: Field required"),
        (say({"index_hash": "abc", "results": [[7]]}), r"server's: results\.0\.0: Input should be an object"),
        (say(b"x" * 2**17), "server's: it is larger than 0 MiB"),
        (packed, r"server's: it is compressed \(gzip\)"),
        (flood, "server's: it is larger than 0 MiB"),
        (say({"index_hash": "abc", "results": []}), r"answered 1 queries for 1 passages each with \[\]"),
        (say({"index_hash": "abc", "results": [[PASSAGE], []]}), r"answered 1 queries .* with \[1, 0\]"),
        (say({"index_hash": "abc", "results": [[PASSAGE, PASSAGE]]}), r"answered 1 queries .* with \[2\]"),
    ],
)
def test_a_server_that_stays_broken_is_given_up(monkeypatch: pytest.MonkeyPatch, answer: Answer, message: str) -> None:
    monkeypatch.setattr(client_module, "MAX_ANSWER_BYTES", 2**16)
    with serving(answer) as server:
        with pytest.raises(WorldFault, match=message):
            client(server.url).search(["q"], 1)
        assert len(server.requests) == 3, "one attempt and two retries"


@pytest.mark.parametrize("slow", [sleep, drip, drip_headers])
def test_a_slow_server_times_out(slow: Answer) -> None:
    with serving(slow) as server:
        started = time.monotonic()
        with pytest.raises(WorldTimeout, match=r"took longer than 0\.2 s"):
            client(server.url, timeout_s=0.2, retries=1).search(["q"], 1)
        assert time.monotonic() - started < 60, "not a hundred drips and never for ever"


def test_a_server_that_is_not_there_is_tried_less_until_it_is_back(monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[float] = []
    slept = SimpleNamespace(sleep=waits.append, monotonic=time.monotonic)
    monkeypatch.setattr(client_module, "time", slept)  # other threads sleep too
    with socket.socket() as unheard:  # bound and not listening: connections are refused
        unheard.bind(("127.0.0.1", 0))
        remote = client(f"http://127.0.0.1:{unheard.getsockname()[1]}", retries=3)
        with pytest.raises(WorldFault, match="does not answer"):
            remote.search(["q"], 1)
        assert waits == [0.01, 0.02, 0.04]
        with pytest.raises(WorldFault):
            remote.search(["q"], 1)
        assert len(waits) == 3, "known to be down: one attempt"


def test_once_it_answers_again_it_is_trusted_again() -> None:
    """Three attempts fail, then one; then one succeeds, and then the third."""
    broken = say(b"", 500)
    with serving(*[broken] * 4, GOOD, *[broken] * 2, GOOD) as server:
        remote = client(server.url)
        for _ in range(2):
            with pytest.raises(WorldFault):
                remote.search(["q"], 1)
        assert remote.search(["q"], 1) == remote.search(["q"], 1)
    assert len(server.requests) == 8


def test_our_own_faults_are_raised_at_once() -> None:
    with serving(say(b"no such route", 404)) as server:
        with pytest.raises(ValueError, match=r"refused .* 404: no such route; check remote\.url"):
            client(server.url).search(["q"], 1)
        assert len(server.requests) == 1
    with serving(GOOD) as server, pytest.raises(ValueError, match="serves index abc now, not def"):
        client(server.url, index_hash="def").search(["q"], 1)


@pytest.mark.parametrize(
    ("answer", "status"),
    [
        (say(b"", 500), CallStatus.FAILED),
        (say(b"<html>"), CallStatus.FAILED),
        (say(b'{"index_hash": "abc", "results": [[{"title": "no text"}]]}'), CallStatus.FAILED),
        (sleep, CallStatus.TIMEOUT),
    ],
)
def test_a_sick_server_is_not_the_agents_fault(answer: Answer, status: CallStatus) -> None:
    with serving(answer) as server:
        index = client(server.url, timeout_s=0.2 if answer is sleep else 10.0, retries=0)
        ended = asyncio.run(ToolEnv("Who?", [search_tool(index, top_k=1)], max_steps=2).step(SEARCH))
    assert (ended.outcome, ended.call_status, ended.observations) == (Outcome.ABORTED, status, ())


@pytest.mark.parametrize(("key", "sent"), [("k3y", "Bearer k3y"), ("", None)])
def test_a_key_is_sent_to_what_stands_before_the_server(
    monkeypatch: pytest.MonkeyPatch, key: str, sent: str | None
) -> None:
    monkeypatch.setenv("AGENT_R1_SEARCH_KEY", key)
    seen = list[str | None]()

    def look(handler: Handler) -> None:
        seen.append(handler.headers["authorization"])
        GOOD(handler)

    with serving(look) as server:
        client(server.url).search(["q"], 1)
    assert seen == [sent]
