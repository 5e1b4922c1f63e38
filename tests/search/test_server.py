"""The search server: its refusals, and a process on loopback, as its users run it."""

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import httpx
import pytest
from starlette.testclient import TestClient
from uvicorn import Config
from uvicorn.server import ServerState

from agent_r1.files import sha256
from agent_r1.http.guard import Bounded
from agent_r1.params.stages import SearchParams
from agent_r1.records import Passage
from agent_r1.search.base import Search
from agent_r1.search.index import build, describe, open_index, open_local
from agent_r1.search.remote import NO_ROUTE, Health
from agent_r1.search.server import create_app
from tests.answering import wait_until_healthy
from tests.cases import cases

ROOT = Path(__file__).parents[2]
COMMAND = [sys.executable, "-m", "flows", "serve_search"]


def start(*arguments: str) -> subprocess.Popen[str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.Popen([*COMMAND, *arguments], env=environment, cwd="/", stderr=subprocess.PIPE, text=True)


@pytest.fixture
def served(stored: Path, tmp_path: Path, search_params: SearchParams, free_port: Callable[[], int]) -> Iterator[str]:
    """The address of a server of the passages' BM25 index."""
    build(search_params, stored, tmp_path / "index")
    port = free_port()
    process = start("--index", str(tmp_path / "index"), "--port", str(port))
    url = f"http://127.0.0.1:{port}"
    wait_until_healthy(url, process, process.communicate)
    yield url
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=120)


def test_a_served_index_is_the_same_index(
    served: str, stored: Path, tmp_path: Path, passages: list[Passage], search_params: SearchParams
) -> None:
    health = httpx.get(f"{served}/health", timeout=30).json()
    hashes = {"index_hash": sha256(tmp_path / "index"), "passages_hash": sha256(stored)}
    assert health == {"kind": "bm25", "size": 5, **hashes}
    remote = search_params.remote.model_copy(update={"url": served})
    params = search_params.model_copy(update={"kind": "remote", "remote": remote})
    build(params, stored, tmp_path / "pinned")
    assert [path.name for path in (tmp_path / "pinned").iterdir()] == ["meta.json"]
    assert describe(tmp_path / "pinned").index_hash == describe(tmp_path / "index").index_hash
    queries = ["Tesk", "norn twin", "unheard", "<|im_end|> Veld é"]
    index = open_index(params, stored, tmp_path / "pinned")
    assert index.search(queries, 2) == open_local(tmp_path / "index").search(queries, 2)
    assert index.search(["country"], 1) == [[passages[2]]]
    assert index.read(passages[2].title) == [passages[2]]
    assert index.read("nobody") == index.read("x" * 9000) == []

    meta = tmp_path / "pinned" / "meta.json"
    meta.write_text(meta.read_text().replace(health["index_hash"], "0" * 64))
    with pytest.raises(ValueError, match=rf"serves index {health['index_hash'][:12]}, and 000000000000 was pinned"):
        open_index(params, stored, tmp_path / "pinned")
    other = tmp_path / "other.parquet"
    other.write_bytes(stored.read_bytes() + b" ")
    with pytest.raises(ValueError, match=r"index served at http.* was built from other passages"):
        build(params, other, tmp_path / "pinned")


def test_without_an_index_it_says_so(tmp_path: Path) -> None:
    process = start("--index", str(tmp_path / "index"))
    _, errors = process.communicate(timeout=300)
    assert process.returncode == 1
    assert f"there is no index at {tmp_path / 'index'}; run the index stage" in errors


HEALTH = Health(kind="bm25", index_hash="abc", passages_hash="def", size=1)


class Echo(Search):
    """An index that finds the query itself, once."""

    def search(self, queries: Sequence[str], k: int) -> list[list[Passage]]:
        return [[Passage(passage_id="0", title=query, text="")] for query in queries]

    def read(self, title: str) -> list[Passage]:
        return [Passage(passage_id=str(i), title=title, text=str(i)) for i in range(2)]


@pytest.fixture(scope="module")
def client() -> TestClient:
    return TestClient(create_app(Echo(), HEALTH), base_url="http://localhost")


def test_an_honest_request_is_answered(client: TestClient) -> None:
    reply = client.post("/search", content=b'{"queries": ["Tesk", "Veld"], "k": 1}').json()
    assert [[passage["title"] for passage in found] for found in reply["results"]] == [["Tesk"], ["Veld"]]
    [found] = client.post("/read", content=b'{"title": "Tesk"}').json()["results"]
    assert [(passage["title"], passage["text"]) for passage in found] == [("Tesk", "0"), ("Tesk", "1")]
    long = client.post("/read", content=b'{"title": "%s"}' % (b"q" * 8193))
    assert (long.status_code, long.json()["detail"][:42]) == (422, "title: String should have at most 8192 cha")
    assert client.post("/v2/search", content="{}").content == NO_ROUTE


@cases("body, status, message")
def test_a_request_beyond_the_limits_is_refused(client: TestClient, body: str, status: int, message: str) -> None:
    reply = client.post("/search", content=body)
    assert reply.status_code == status
    assert reply.json()["detail"].startswith(message)


@pytest.mark.parametrize(("limit_s", "connections"), [(0.1, 1), (60.0, 0)])
def test_a_connection_that_is_slow_or_too_many_ends(
    monkeypatch: pytest.MonkeyPatch, limit_s: float, connections: int
) -> None:
    monkeypatch.setattr(Bounded, "seconds", limit_s)
    monkeypatch.setattr(Bounded, "most", connections)

    async def attack() -> None:
        """Sends a header that has no end, and waits for the server to hang up."""
        config, state = Config(create_app(Echo(), HEALTH)), ServerState()
        serving = await asyncio.get_running_loop().create_server(lambda: Bounded(config, state, {}), "127.0.0.1", 0)
        async with asyncio.timeout(30), serving:
            reader, writer = await asyncio.open_connection(*serving.sockets[0].getsockname())
            writer.write(b"POST /search HTTP/1.1\r\nx-slow: ")
            with contextlib.suppress(ConnectionResetError):
                assert await reader.read() == b""
            writer.close()

    asyncio.run(attack())
