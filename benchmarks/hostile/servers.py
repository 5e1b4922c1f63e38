"""What other servers answer, and what callers ask of ours."""

from __future__ import annotations

import asyncio
import gzip
import json
import math
import os
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from random import Random
from typing import Any, NamedTuple
from unittest.mock import AsyncMock

from starlette.responses import PlainTextResponse
from starlette.testclient import TestClient

from agent_r1.http.client import MAX_ANSWER_BYTES, Answer, Client
from agent_r1.http.endpoint import ENDPOINT_KEY, Endpoint
from agent_r1.http.guard import Guard
from agent_r1.params.search import RemoteParams
from agent_r1.params.sections import LOOPBACK
from agent_r1.params.stages import ServerParams
from agent_r1.rollout.engine_wire import Description
from agent_r1.rollout.sampling import Actor, EngineError, Request
from agent_r1.rollout.server_engine import StockServer
from agent_r1.search.remote import Health, RemoteIndex, SearchRequest
from agent_r1.serving.search_server import create_app
from agent_r1.serving.wire import Event
from benchmarks.hostile.kind import Defect, Kind, Refused, require
from benchmarks.hostile.mutations import as_bytes, as_json, mutated, odd_text, odd_value
from benchmarks.hostile.texts import Echo

_URL = "http://127.0.0.1:1"
_STATUSES = (200,) * 9 + (204, 301, 400, 404, 429, 500, 503, 599)
_VOCABULARY, _END, _MOST = 512, 9, 8
_HEALTH = Health(kind="bm25", index_hash="7" * 64, passages_hash="6" * 64, size=5)
_HOSTS = "{}:80", "{}.evil.com", "evil.com:{}", "{}@evil.com", "{} ", "x{}"
_QUERIES, _K = ["Kiss", "Mara"], 2


class Scripted(Client):
    """A client of a server whose answer is known."""

    def __init__(self, answer: Answer) -> None:
        self._scripted = answer

    async def answer(
        self, method: str, path: str, content: str | None = None, most_bytes: int = MAX_ANSWER_BYTES
    ) -> Answer:
        return self._scripted


class SearchAnswers(Kind):
    """What a search server may answer."""

    name, tried = "search answers", 2500

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self._remote = RemoteIndex(RemoteParams(url=_URL, timeout_s=1, retries=0, backoff_s=0), "7" * 64)

    def make(self, rng: Random) -> tuple[str, Answer]:
        passage = {"passage_id": "1", "title": "Kiss", "text": "A film."}
        honest = {
            "search": {"index_hash": "7" * 64, "results": [[passage] * _K, [passage]]},
            "health": _HEALTH.model_dump(),
        }
        asked = rng.choice([*honest])
        return asked, answered(honest[asked], rng)

    def judge(self, made: tuple[str, Answer]) -> None:
        asked, answer = made
        self._remote._client, remote = Scripted(answer), self._remote
        if asked == "health":
            require(type(remote.health().size) is int, "a size that is no number")
            return
        found = remote.search(_QUERIES, _K)
        require(len(found) == len(_QUERIES) and all(len(each) <= _K for each in found), "other passages than asked for")
        texts = [text for each in found for hit in each for text in (hit.passage_id, hit.title, hit.text)]
        require(all(text.encode(errors="replace").decode() == text for text in texts), "a text that no table can keep")

    def names(self, made: tuple[str, Answer]) -> tuple[str, ...]:
        return (_URL,)


class EngineAnswers(Kind):
    """What an engine server may answer."""

    name, tried, refusals = "engine answers", 2500, (EngineError,)

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self._actor = Actor(model="", end_ids=[_END], max_tokens=512, temperature=1.0, dtype="auto")
        self._request = Request(episode=0, step=0, context=[1, 2], seed=0, max_tokens=_MOST)

    def make(self, rng: Random) -> tuple[str, Answer]:
        shape = {"model_type": "qwen2", "vocab_size": _VOCABULARY, "hidden_size": 8, "num_hidden_layers": 2}
        content = [{"token_id": 3, "logprob": -0.5}, {"token_id": _END, "logprob": 0.0}]
        spans = [{"version": "w", "start": 0, "end": 2}]
        choice = {"token_ids": [3, _END], "logprobs": {"content": content}, "weight_versions": spans}
        honest: dict[str, Any] = {
            "sample": {"choices": [choice]},
            "describe": {"results": [{**shape, "max_tokens": 512, "dtype": "float32"}]},
            "held": {"results": [[["head", 0, 0, 7], ["norm", 0, 0, 8]]]},
        }
        asked = rng.choice(("sample", "sample", "describe", "held"))
        return asked, answered(honest[asked], rng)

    def judge(self, made: tuple[str, Answer]) -> None:
        asked, answer = made
        server = StockServer(_URL, ServerParams(urls=[_URL], concurrency=1, timeout_s=1.0, retries=0))
        server._client, server.version = Scripted(answer), "w"
        server.model = Description(
            model_type="qwen2",
            vocab_size=_VOCABULARY,
            hidden_size=8,
            num_hidden_layers=2,
            max_tokens=512,
            dtype="float32",
        )
        if asked == "held":
            held = asyncio.run(server.held())
            require(all(-(2**63) <= each < 2**63 for each in held.sums.values()), f"no sums: {held}")
        elif asked == "describe":
            found = asyncio.run(server.describe())
            require(found.vocab_size >= 0 and type(found.max_tokens) is int, f"no description: {found}")
        else:
            action = asyncio.run(server.sample(self._request, self._actor))
            ids, logprobs = action.token_ids, action.logprobs.tolist()
            require(1 <= len(ids) == len(logprobs) <= _MOST, "more or fewer tokens than asked for")
            require(all(type(index) is int and 0 <= index < _VOCABULARY for index in ids), f"no tokens: {ids}")
            require(all(math.isfinite(each) and each <= 2e-3 for each in logprobs), f"no logprobs: {logprobs}")

    def names(self, made: tuple[str, Answer]) -> tuple[str, ...]:
        return (_URL,)


class Script(NamedTuple):
    """What a server sends, in pieces, to one who reads it whole, or line by line."""

    pieces: tuple[bytes, ...]
    pause_s: float
    in_lines: bool


@contextmanager
def napping(seconds: float) -> Iterator[list[None]]:
    """Gives the naps of a thread meanwhile, as a control: a busy machine holds up the thread as well as the block."""
    naps, over = list[None](), threading.Event()
    thread = threading.Thread(target=lambda: [naps.append(None) for _ in iter(lambda: over.wait(seconds), True)])
    thread.start()
    try:
        yield naps
    finally:
        over.set()
        thread.join()


class Loopback(Kind):
    """Answers as they come over a connection: cut off, endless, packed, dripping from the first header, or no HTTP."""

    name, tried = "loopback", 90
    _timeout_s = 0.5

    def make(self, rng: Random) -> Script:
        body = json.dumps(_HEALTH.model_dump()).encode()
        head = {"content-length": str(len(body)), "content-type": "application/json"}
        status, pause_s = rng.choice(("200 OK", "200", "99 x", "9999 x", "abc", "200 \x1b[2J", "301 Moved")), 0.0
        in_lines = rng.random() < 0.4
        match rng.randrange(9):
            case 0:
                head["content-length"] = rng.choice(("-1", "1e3", "9" * 40, "10000000000", "5", "", "\u0665"))
            case 1:
                head["content-encoding"], body = rng.choice(("gzip", "br", "x" * 9999)), gzip.compress(b" " * 10**6)
            case 2:
                head = {"transfer-encoding": "chunked"}
                body = rng.choice((b"zz\r\n", b"ffffffffffffffff\r\nx", b"-1\r\n", b"5\r\nab", b"1\r\na\r\n" * 1000))
            case 3:
                head[rng.choice(("x" * 70_000, "a\0b", "a b", "\x1b"))] = "x"
            case 4:
                head["location"] = "http://127.0.0.1:1/\x1b"
            case 5:
                pause_s = 0.1  # longer than the limit, byte by byte
            case 6:
                body, head = b"x" * 40_000_000, {}
            case 7:
                return Script((odd_text(rng).encode(errors="replace"),), 0.0, in_lines)
        lines = "".join(f"{name}: {value}\r\n" for name, value in head.items())
        raw = f"HTTP/1.1 {status}\r\n{lines}\r\n".encode("latin-1", "replace") + body
        return Script(tuple(raw[at : at + 1] for at in range(len(raw))) if pause_s else (raw,), pause_s, in_lines)

    def judge(self, made: Script) -> None:
        with socket.create_server(("127.0.0.1", 0)) as listening:
            threading.Thread(target=_serve, args=(listening, made), daemon=True).start()
            url = f"http://127.0.0.1:{listening.getsockname()[1]}"
            params = RemoteParams(url=url, timeout_s=self._timeout_s, retries=0, backoff_s=0)
            with napping(self._timeout_s / 10) as naps:
                try:
                    if made.in_lines:
                        list(Endpoint(url, timeout_s=self._timeout_s).stream(Event, {}))
                    else:
                        require(RemoteIndex(params).health() == _HEALTH, "another answer than the server gave")
                except self.refusals as fault:
                    require(len(naps) < 40, f"held up for {len(naps)} tenths of its limit")
                    require(url in str(fault) and str(fault).isprintable(), f"names no server: {fault!r}")
                    raise


class Asked(NamedTuple):
    """A request."""

    method: str
    path: str
    headers: list[tuple[bytes, bytes]]
    body: bytes


class SearchRequests(Kind):
    """What callers may ask of the search server."""

    name, tried = "search requests", 1500

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self._client = TestClient(create_app(Echo(), _HEALTH), raise_server_exceptions=False)

    def make(self, rng: Random) -> Asked:
        honest = {"queries": _QUERIES, "k": _K}
        made = odd_value(rng) if rng.random() < 0.1 else mutated(honest, rng, rng.choice((0, 1, 2)))
        host = "127.0.0.1" if rng.random() < 0.8 else _host(rng)
        others = ("GET", "/health"), ("GET", "/search"), ("PUT", "/../x")
        method, path = rng.choice((("POST", "/search"),) * 8 + others)
        kind = rng.choice((b"application/json", b"text/plain", b"\xff"))
        headers = [(b"host", host.encode()), (b"content-type", kind)]
        body = as_bytes(as_json(made, rng), rng) * rng.choice((1,) * 40 + (200,))
        return Asked(method, path, headers, body)

    def judge(self, made: Asked) -> None:
        answer = self._client.request(made.method, made.path, headers=made.headers, content=made.body)
        known = _of_this_machine(made)
        if answer.status_code == 200 and made.path == "/search":
            asked = SearchRequest.model_validate_json(made.body)
            require(len(answer.json()["results"]) == len(asked.queries), "other results than asked for")
        _require_refused_or_known(answer.status_code, known, answer.text)


class CutOff(Kind):
    """Requests whose sender leaves in the middle: no fault of the server's, whose log would hold a traceback."""

    name, tried = "requests cut off", 200

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self._app = create_app(Echo(), _HEALTH)

    def make(self, rng: Random) -> list[bytes]:
        return [rng.randbytes(rng.choice((0, 1, 1000))) for _ in range(rng.randrange(4))]

    def judge(self, made: list[bytes]) -> None:
        parts = [{"type": "http.request", "body": each, "more_body": True} for each in made]
        coming, send = AsyncMock(side_effect=[*parts, *[{"type": "http.disconnect"}] * 9]), AsyncMock()
        path: dict[str, Any] = {"path": "/search", "query_string": b"", "headers": [(b"host", b"localhost")]}
        asyncio.run(self._app({"type": "http", "method": "POST", **path}, coming, send))
        status = send.call_args_list[0].args[0]["status"]
        require(status == 400, f"half of a request was answered with {status}")
        raise Refused("cut off")


class GuardedRequests(Kind):
    """What callers may ask of a served policy, with a key and without."""

    name, tried = "guarded requests", 1500

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self._clients = {key: _guarded(key) for key in ("", "key-of-hostile")}

    def make(self, rng: Random) -> tuple[str, Asked]:
        key = rng.choice([*self._clients])
        tricks = (f"bearer {key}", f"Bearer  {key}", key, f"Bearer {key}x", f"Bearer {key[:-1]}", "Bearer", "")
        given = rng.choice((f"Bearer {key}", *tricks))
        given = given if rng.random() < 0.8 else odd_text(rng)[:2000]
        headers = [(b"host", (rng.choice(LOOPBACK[:2]) if rng.random() < 0.4 else _host(rng)).encode())]
        if rng.random() < 0.9:
            headers.append((rng.choice((b"authorization", b"Authorization", b"x-api-key")), _header(given)))
        if rng.random() < 0.3:
            headers.append((b"origin", _header(rng.choice(("null", "http://127.0.0.1", "", odd_text(rng)[:99])))))
        path = rng.choice(("/", "/weights", "/health", "//x", "/%2e%2e/x", "/sample"))
        return key, Asked(rng.choice(("GET", "POST", "OPTIONS", "HEAD")), path, headers, b"{}")

    def judge(self, made: tuple[str, Asked]) -> None:
        key, asked = made
        answer = self._clients[key].request(asked.method, asked.path, headers=asked.headers, content=asked.body)
        headers = {name.lower(): value for name, value in reversed(asked.headers)}
        if key:
            sent = (headers.get(b"authorization"), headers.get(b"x-api-key"))
            known = sent in ((f"Bearer {key}".encode(), None), (None, key.encode()))
        else:
            known = b"origin" not in headers and _of_this_machine(asked)
        _require_refused_or_known(answer.status_code, known, answer.text)


def answered(honest: Any, rng: Random) -> Answer:
    """An answer that is nearly what is asked for, or far from it."""
    made = odd_value(rng) if rng.random() < 0.05 else mutated(honest, rng, rng.choice((0, 1, 1, 2)))
    return Answer(rng.choice(_STATUSES), as_bytes(as_json(made, rng) if rng.random() < 0.6 else json.dumps(made), rng))


def _serve(listening: socket.socket, script: Script) -> None:
    """Sends a script to one caller, who may go away."""
    try:
        connection, _ = listening.accept()
        with connection:
            connection.recv(1 << 16)
            for piece in script.pieces:
                connection.sendall(piece)
                time.sleep(script.pause_s)
    except OSError:
        return


def _guarded(key: str) -> TestClient:
    """A client of a server behind a guard with this key."""
    before = os.environ.get(ENDPOINT_KEY)
    os.environ[ENDPOINT_KEY] = key
    try:
        return TestClient(Guard(PlainTextResponse("inside"), ENDPOINT_KEY), raise_server_exceptions=False)
    finally:
        del os.environ[ENDPOINT_KEY]
        os.environ.update({ENDPOINT_KEY: before} if before is not None else {})


def _host(rng: Random) -> str:
    """The name of a host in a request."""
    known = rng.choice((*LOOPBACK, "[::1]", "LOCALHOST"))
    more = "evil.com", "0.0.0.0", "127.1", ""
    return rng.choice((known, *(each.format(known) for each in _HOSTS), *more))


def _of_this_machine(asked: Asked) -> bool:
    """Whether the host of a request, without its port, is this machine."""
    host = next(value.decode() for name, value in asked.headers if name == b"host").strip().lower()
    name = host[: host.index("]") + 1] if host.startswith("[") and "]" in host else host.partition(":")[0]
    return name in (*LOOPBACK, "[::1]")


def _header(text: str) -> bytes:
    return text.encode("latin-1", "replace").replace(b"\r", b"").replace(b"\n", b"").replace(b"\0", b"").strip()


def _require_refused_or_known(status: int, known: bool, text: str) -> None:
    if status >= 500:
        raise Defect(f"the server failed with {status}: {text:.200}")
    if status >= 400:
        raise Refused(text)
    require(known, f"a request of somebody else was answered with {status}")
