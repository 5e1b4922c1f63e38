"""Servers on loopback: one whose answers a test decides, and others as processes."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from types import SimpleNamespace
from typing import Any, NamedTuple

import httpx
import pytest

from agent_r1.http import client


class Heard(NamedTuple):
    path: str
    headers: dict[str, str]
    body: Any  # of JSON, a list where it is of lines; {} where nothing was sent
    write: Callable[[bytes], object]  # to the connection


Said = tuple[int, bytes]  # the status and the body of an answer


class _Patient(ThreadingHTTPServer):
    """Lets so many connections wait for it as an engine opens at once."""

    request_queue_size = 64


@contextmanager
def answering(answer: Callable[[Heard], Said | None]) -> Iterator[str]:
    """The URL of a server that answers what it hears; None means that the answer was written, head and all."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            body = self.rfile.read(int(self.headers.get("content-length", 0)))
            lines = [json.loads(line) for line in body.splitlines()] if b"}\n{" in body else json.loads(body or "{}")
            with suppress(ConnectionError):  # who asked has heard enough
                said = answer(Heard(self.path, dict(self.headers), lines, self.wfile.write))
                if said:
                    self.send_response(said[0])
                    self.end_headers()
                    self.wfile.write(said[1])

        do_POST = do_PATCH = do_GET

        def log_message(self, *_: object) -> None:
            pass

    with _Patient(("127.0.0.1", 0), Handler) as server:
        Thread(target=server.serve_forever, args=[0.01]).start()  # seconds until it sees that it is to end
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()


def noted_waits(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The seconds that the HTTP client waits between attempts from now on; it does not wait in truth."""
    waits: list[float] = []

    async def sleep(seconds: float) -> None:
        waits.append(seconds)

    monkeypatch.setattr(client, "asyncio", SimpleNamespace(**{**vars(asyncio), "sleep": sleep}))
    return waits


def wait_for(
    condition: Callable[[], Any],
    *processes: subprocess.Popen[Any],
    said: Callable[[], object] | None = None,
    pause_s: float = 0.1,
) -> Any:
    """What a condition gives once that is true. An AssertionError shows what a process wrote that ended meanwhile."""
    deadline = time.monotonic() + 600
    while not (answer := condition()):
        for process in processes:
            assert process.poll() is None, (said or process.communicate)()
        assert time.monotonic() < deadline, "nothing happened within ten minutes"
        time.sleep(pause_s)
    return answer


def wait_until_healthy(
    url: str, process: subprocess.Popen[Any], said: Callable[[], object], page: str = "/health", **headers: str
) -> None:
    """Waits for a server to answer."""

    def is_healthy() -> bool:
        with suppress(httpx.TransportError):
            return httpx.get(f"{url}{page}", headers=headers, timeout=60).is_success
        return False

    wait_for(is_healthy, process, said=said)


@contextmanager
def process_of(
    arguments: Sequence[str], url: str, folder: Path, page: str = "/health", **environment: str
) -> Iterator[str]:
    """The URL of the server that `python ARGUMENTS` starts in a folder, once a page answers; it ends with its group."""
    log = folder / "server.log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, *arguments],
            cwd=folder,
            env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[1]), **environment},
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        wait_until_healthy(url, process, log.read_text, page)
        yield url
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
