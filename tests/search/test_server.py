"""The search server: its refusals, and a process on loopback, as its users run it."""

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx
import pytest
from starlette.testclient import TestClient

from agent_r1.files import SUMS, sha256
from agent_r1.http.guard import Door
from agent_r1.params.search import SearchParams
from agent_r1.records import Passage
from agent_r1.search.base import Search
from agent_r1.search.index import build, describe, open_index, open_local
from agent_r1.search.remote import NO_ROUTE, Health
from agent_r1.search.together import Together
from agent_r1.serving.search_server import SHARE, create_app
from agent_r1.tables import write_rows
from tests.agents.test_strangers import heads
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
    assert {path.name for path in (tmp_path / "pinned").iterdir()} == {"SHA256SUMS", "meta.json"}
    assert describe(tmp_path / "pinned").index_hash == describe(tmp_path / "index").index_hash
    queries = ["Tesk", "norn twin", "unheard", "<|im_end|> Veld é"]
    index = open_index(params, stored, tmp_path / "pinned")
    assert index.search(queries, 2) == open_local(tmp_path / "index").search(queries, 2)
    assert index.search(["country"], 1) == [[passages[2]]]
    assert index.read(passages[2].title) == [passages[2]]
    assert index.read("nobody") == index.read("x" * 9000) == []

    stated = {"url": f"{served}/", "protocol": "retrieve", "version": "atlas"}
    params = params.model_copy(update={"remote": remote.model_copy(update=stated)})
    build(params, stored, tmp_path / "stated")
    assert describe(tmp_path / "stated").index_hash == "atlas"
    found = open_index(params, stored, tmp_path / "stated").search(queries, 2)
    assert found == open_local(tmp_path / "index").search(queries, 2)
    later = params.model_copy(update={"remote": params.remote.model_copy(update={"version": "atlas-2"})})
    with pytest.raises(ValueError, match="serves index atlas-2, and atlas was pinned"):
        open_index(later, stored, tmp_path / "stated")

    params = search_params.model_copy(update={"kind": "remote", "remote": remote})
    (tmp_path / "pinned" / SUMS).unlink()  # as of an earlier version
    meta = tmp_path / "pinned" / "meta.json"
    meta.write_text(meta.read_text().replace(health["index_hash"], "0" * 64))
    with pytest.raises(ValueError, match=rf"serves index {health['index_hash'][:12]}, and 000000000000 was pinned"):
        open_index(params, stored, tmp_path / "pinned")
    other = tmp_path / "other.parquet"
    write_rows(other, passages[:2], Passage)
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


def test_a_request_of_one_query_does_not_wait_for_all_of_a_long_one(monkeypatch: pytest.MonkeyPatch) -> None:
    class Slow(Echo):
        def search(self, queries: Sequence[str], k: int) -> list[list[Passage]]:
            assert gate.wait(60)
            return super().search(queries, k)

    asked: list[str] = []
    gate = threading.Event()
    search = Together.search

    async def recorded(together: Together, query: str, k: int) -> list[Passage]:
        asked.append(query)
        return await search(together, query, k)

    async def play() -> list[list[str]]:
        transport = httpx.ASGITransport(create_app(Slow(), HEALTH))
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost", timeout=60) as client:
            requests = []
            for queries in (long, ["one"]):
                requests.append(asyncio.create_task(client.post("/search", json={"queries": queries, "k": 1})))
                while queries[0] not in asked:
                    await asyncio.sleep(0.01)
            gate.set()
            replies = await asyncio.gather(*requests)
        return [[found["title"] for [found] in reply.json()["results"]] for reply in replies]

    monkeypatch.setattr(Together, "search", recorded)
    long = [f"long {i}" for i in range(64)]
    assert asyncio.run(play()) == [long, ["one"]]
    assert asked == [*long[:SHARE], "one", *long[SHARE:]]


def test_search_r1s_own_client_is_answered(client: TestClient) -> None:
    """Its payload, and what it reads of the answer (`_passages2string` of generation.py)."""
    payload = {"queries": ["Tesk", "q" * 9000], "topk": 1, "return_scores": True}
    [found, long] = client.post("/retrieve", json=payload).json()["result"]
    title, text = found[0]["document"]["contents"].split("\n")
    assert (title, text, found[0]["score"]) == ('"Tesk"', "", 1.0)
    assert len(long[0]["document"]["contents"]) == len('""\n') + 8192
    plain = {"result": [[{"id": "0", "contents": '"Tesk"\n'}]]}
    for further in ({}, {"topk": None}, {"topk": 0, "return_scores": False}):
        assert client.post("/retrieve", json={"queries": ["Tesk"], **further}).json() == plain


@cases("body, status, message")
def test_a_request_beyond_the_limits_is_refused(client: TestClient, body: str, status: int, message: str) -> None:
    reply = client.post("/search", content=body)
    assert reply.status_code == status
    assert reply.json()["detail"].startswith(message)


@cases("sent, limits")
def test_slow_or_surplus_connection_ends(sent: str, limits: dict[str, Any]) -> None:

    async def attack(port: int) -> None:
        """Waits for the server to hang up."""
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(sent.encode())
        with contextlib.suppress(ConnectionResetError):
            assert await reader.read() == b""
        writer.close()

    asyncio.run(heads(Door(**limits), attack, create_app(Echo(), HEALTH)))
