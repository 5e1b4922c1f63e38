"""Endpoints that are down, slow, busy, or answer nonsense, over real HTTP on loopback."""

from __future__ import annotations

import json
import logging
import socket
from contextlib import closing
from threading import Event
from types import SimpleNamespace
from typing import Any

import pytest

from agent_r1.faults import WorldFault
from agent_r1.http import client as client_module
from agent_r1.http.endpoint import ENDPOINT_KEY, Endpoint
from tests.answering import Heard, Said, answering

SAID = {"choices": [{"message": {"content": "<answer>Tesk</answer>"}, "finish_reason": "stop"}]}
MESSAGES = [("system", "Answer."), ("user", "Who?")]


def ask(url: str, *, retries: int = 0, timeout_s: float = 20.0) -> Any:
    return Endpoint(url, timeout_s=timeout_s, retries=retries).complete("m", MESSAGES, max_tokens=9)


def test_a_model_is_asked_in_openais_form_with_the_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ENDPOINT_KEY, "s3cret")
    heard: list[Heard] = []

    def answer(asked: Heard) -> Said:
        heard.append(asked)
        return 200, json.dumps(SAID).encode()

    with answering(answer) as url:
        assert ask(url) == ("<answer>Tesk</answer>", False)
    [asked] = heard
    assert asked.headers["authorization"] == "Bearer s3cret"
    said = [{"role": "system", "content": "Answer."}, {"role": "user", "content": "Who?"}]
    assert asked.body == {"model": "m", "messages": said, "temperature": 0, "max_tokens": 9}


def test_a_busy_endpoint_is_asked_again_and_one_that_is_down_only_once(monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[float] = []
    monkeypatch.setattr(client_module, "time", SimpleNamespace(sleep=waits.append))
    statuses = [429, 503, 200, 500, 500, 500, 500, 200]
    with answering(lambda _: (statuses.pop(0), json.dumps(SAID).encode())) as url:
        asked = Endpoint(url, timeout_s=20.0, retries=2)
        assert asked.complete("m", MESSAGES, max_tokens=9).text
        assert waits == [1.0, 2.0]
        for left in (2, 1):
            with pytest.raises(WorldFault, match="does not answer: status 500"):
                asked.complete("m", MESSAGES, max_tokens=9)
            assert len(statuses) == left
        assert asked.complete("m", MESSAGES, max_tokens=9).text


@pytest.mark.parametrize(
    ("status", "body", "message"),
    [
        (200, b"<html>", "in another form than OpenAI's: Invalid JSON"),
        (200, b"{}", "choices: Field required"),
        (200, b'{"choices": []}', "choices: List should have at least 1 item"),
        (200, b'{"choices": [{"message": {"content": 3}}]}', "message.content: Input should be a valid string"),
        (200, b'{"choices": [{"message": {"content": "%s"}}]}' % (b"x" * (1 << 21)), "at most 1048576 characters"),
        (200, b" " * ((32 << 20) + 1), "larger than 32 MiB"),
        (502, b"\x1b[31mbad gateway", "status 502, \ufffd\\[31mbad gateway"),
    ],
)
def test_nonsense_is_the_worlds_fault(status: int, body: bytes, message: str) -> None:
    with answering(lambda _: (status, body)) as url, pytest.raises(WorldFault, match=f"the endpoint {url} .*{message}"):
        ask(url)


@pytest.mark.parametrize(("status", "remedy"), [(400, "too long"), (401, f"set {ENDPOINT_KEY}"), (404, "too long")])
def test_a_refusal_is_the_users_and_shows_no_key(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, status: int, remedy: str
) -> None:
    monkeypatch.setenv(ENDPOINT_KEY, "s3cret")
    caplog.set_level(logging.DEBUG)
    body = json.dumps({"error": {"message": "too long"}}).encode()
    with (
        answering(lambda _: (status, body)) as url,
        pytest.raises(ValueError, match=f"status {status}.*{remedy}") as fault,
    ):
        ask(url, retries=3)
    assert "s3cret" not in f"{fault.value}{caplog.text}"


def test_an_endpoint_that_is_down_or_silent_is_named() -> None:
    with closing(socket.create_server(("127.0.0.1", 0))) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}/v1"
        with pytest.raises(WorldFault, match=f"{url} does not answer: took longer than 0.1 s"):
            ask(url, timeout_s=0.1)
        with pytest.raises(WorldFault, match=r"took longer than 0\.1 s"):
            next(Endpoint(url, timeout_s=0.1).stream({}))
    with pytest.raises(WorldFault, match=f"{url} does not answer: Connect"):
        ask(url)
    with pytest.raises(ValueError, match="starts with http"):
        ask("localhost:8000")
    with pytest.raises(ValueError, match="password"):
        ask("http://me:word@localhost:8000")
    with pytest.raises(ValueError, match=r"^http://localhost/v1\?\.\.\. is no address of a server"):
        ask("http://localhost/v1?key=s3cret")


@pytest.mark.parametrize("sent", [b"HTTP/1.1 200 OK\r\n", b"HTTP/1.1 200 OK\r\n\r\ndata: 1\n"])
def test_what_drips_ends_at_the_limit_of_the_whole_answer(sent: bytes) -> None:
    """Headers, and lines of a body: each byte comes sooner than the limit."""
    over = Event()

    def drip(asked: Heard) -> None:
        asked.write(sent)
        while not over.wait(0.05):
            asked.write(b"x")

    with answering(drip) as url:
        try:
            for read in (lambda: ask(url, timeout_s=0.5), lambda: list(Endpoint(url, timeout_s=0.5).stream({}))):
                with pytest.raises(WorldFault, match=r"took longer than 0\.5 s"):
                    read()
        finally:
            over.set()


EVENT = b'data: {"a": 1}\n\n'


@pytest.mark.parametrize(
    ("status", "body", "fault", "message"),
    [
        (200, EVENT, WorldFault, "ended in the middle of an answer"),
        (200, EVENT + b"data: " + b"x" * (33 << 20), WorldFault, "larger than 32 MiB"),
        (503, b'{"error": {"message": "the engine failed"}}', WorldFault, "status 503, the engine failed"),
        (400, b'{"error": {"message": "no room"}}', ValueError, "status 400: no room"),
    ],
)
def test_a_stream_is_read_to_its_end(status: int, body: bytes, fault: type[Exception], message: str) -> None:
    with answering(lambda _: (status, body)) as url, pytest.raises(fault, match=message):
        list(Endpoint(url, timeout_s=20.0).stream({"model": "m"}))
    with answering(lambda _: (200, b": hello\n" + EVENT + b"data: [DONE]\n\n")) as url:
        assert list(Endpoint(url, timeout_s=20.0).stream({"model": "m"})) == [b'{"a": 1}']
