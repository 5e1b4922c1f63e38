"""The search server as its users run it: a process on loopback."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest

from agent_r1.files import sha256
from agent_r1.params.stages import SearchParams
from agent_r1.records import Passage
from agent_r1.search.index import build, describe, open_index, open_local

ROOT = Path(__file__).parents[2]
COMMAND = [sys.executable, "-m", "agent_r1.search.server"]


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
    deadline = time.monotonic() + 300
    while True:
        assert process.poll() is None, process.communicate()[1]
        assert time.monotonic() < deadline
        try:
            httpx.get(f"{url}/health", timeout=5)
            break
        except httpx.TransportError:
            time.sleep(0.1)
    yield url
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=120)


def test_a_served_index_is_the_same_index(
    served: str, stored: Path, tmp_path: Path, passages: list[Passage], search_params: SearchParams
) -> None:
    health = httpx.get(f"{served}/health", timeout=30).json()
    assert health == {
        "kind": "bm25",
        "index_hash": sha256(tmp_path / "index"),
        "passages_hash": sha256(stored),
        "size": 5,
    }
    remote = search_params.remote.model_copy(update={"url": served})
    params = search_params.model_copy(update={"kind": "remote", "remote": remote})
    build(params, stored, tmp_path / "pinned")
    assert [path.name for path in (tmp_path / "pinned").iterdir()] == ["meta.json"]
    assert describe(tmp_path / "pinned").index_hash == describe(tmp_path / "index").index_hash
    queries = ["Tesk", "norn twin", "unheard", "<|im_end|> Veld é"]
    index = open_index(params, stored, tmp_path / "pinned")
    assert index.search(queries, 2) == open_local(tmp_path / "index").search(queries, 2)
    assert index.search(["country"], 1) == [[passages[2]]]

    refused = httpx.post(f"{served}/search", json={"queries": ["x"], "k": 0}, timeout=30)
    assert refused.status_code == 422

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
    assert errors.startswith(f"there is no index at {tmp_path / 'index'}; run the index stage")
