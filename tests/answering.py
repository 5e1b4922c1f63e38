"""A server on loopback whose answers a test decides."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import Any, NamedTuple


class Heard(NamedTuple):
    """What a server is asked."""

    path: str
    headers: dict[str, str]
    body: Any  # of JSON; {} where nothing was sent


Said = tuple[int, bytes]  # the status and the body of an answer


class _Patient(ThreadingHTTPServer):
    """Lets so many connections wait for it as an engine opens at once."""

    request_queue_size = 64


@contextmanager
def answering(answer: Callable[[Heard], Said]) -> Iterator[str]:
    """The URL of a server that answers what it hears."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            body = self.rfile.read(int(self.headers.get("content-length", 0)))
            status, content = answer(Heard(self.path, dict(self.headers), json.loads(body or "{}")))
            self.send_response(status)
            self.end_headers()
            with suppress(ConnectionError):  # who asked has heard enough
                self.wfile.write(content)

        do_POST = do_GET

        def log_message(self, *_: object) -> None:
            pass

    with _Patient(("127.0.0.1", 0), Handler) as server:
        Thread(target=server.serve_forever).start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
