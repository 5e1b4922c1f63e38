"""Endpoints that are down, slow, busy, or answer nonsense, over real HTTP on loopback."""

import json
import logging
import socket
from contextlib import closing
from threading import Event
from typing import Any

import pytest
from pydantic import RootModel

from agent_r1.faults import ContextFull, WorldFault
from agent_r1.http.endpoint import ENDPOINT_KEY, Endpoint
from tests.answering import Heard, Said, answering, noted_waits
from tests.cases import cases

SAID = {"choices": [{"message": {"content": "<answer>Tesk</answer>"}, "finish_reason": "stop"}]}
MESSAGES = [("system", "Answer."), ("user", "Who?")]
OPTIONS = {"max_tokens": 9, "temperature": 0}


class Shown(RootModel[Any]):
    """An event of any shape."""


def ask(url: str, *, retries: int = 0, timeout_s: float = 20.0) -> Any:
    return Endpoint(url, timeout_s=timeout_s, retries=retries).complete("m", MESSAGES, OPTIONS)


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


def refusal(message: str, **more: Any) -> Said:
    return 400, json.dumps({"error": {"message": message, "type": "invalid_request_error", **more}}).encode()


def test_an_option_that_a_model_refuses_is_left_out_from_then_on(caplog: pytest.LogCaptureFixture) -> None:
    """OpenAI's models that think take neither; the first words are theirs."""
    told: list[set[str]] = []

    def answer(asked: Heard) -> Said:
        told.append(asked.body.keys() & {"temperature", "max_tokens"})
        if "max_tokens" in asked.body:
            said = "Unsupported parameter: 'max_tokens' is not supported with this model. Use 'max_completion_tokens'"
            return refusal(said, param="max_tokens", code="unsupported_parameter")
        if "temperature" in asked.body:
            said = "Unsupported value: 'temperature' does not support 0 with this model. Only the default (1) value is"
            return refusal(said, param="temperature", code="unsupported_value")
        return 200, json.dumps(SAID).encode()

    with answering(answer) as url:
        asked = Endpoint(url, timeout_s=20.0)
        assert [asked.complete("m", MESSAGES, OPTIONS).text for _ in range(2)] == ["<answer>Tesk</answer>"] * 2
    assert told == [{"temperature", "max_tokens"}, {"temperature"}, set(), set()]
    assert asked.untold == {"temperature", "max_tokens"}
    said = [record.getMessage() for record in caplog.records]
    told_of = [line.partition(" is not told ")[2].partition(":")[0] for line in said]
    assert told_of == ["max_tokens from now on", "temperature from now on"]


@cases("message, more")
def test_long_conversation_is_asked_once_more_without_a_limit(message: str, more: Any) -> None:
    heard: list[bool] = []

    def answer(asked: Heard) -> Said:
        heard.append("max_tokens" in asked.body)
        short = len(asked.body["messages"]) == 2
        return (200, json.dumps(SAID).encode()) if short and not heard[-1] else refusal(message, **more)

    with answering(answer) as url:
        asked = Endpoint(url, timeout_s=20.0, retries=3)
        assert asked.complete("m", MESSAGES, OPTIONS).text
        with pytest.raises(ContextFull, match=r"refused with status 400: .*\w"):
            asked.complete("m", MESSAGES * 2, OPTIONS)
    assert heard == [True, False] * 2
    assert not asked.untold


@cases("message, read")
def test_parts_and_calls_are_text(message: dict[str, Any], read: str) -> None:
    with answering(lambda _: (200, json.dumps({"choices": [{"message": message}]}).encode())) as url:
        assert ask(url) == (read, False)


def test_a_busy_endpoint_is_asked_again_and_one_that_is_down_only_once(monkeypatch: pytest.MonkeyPatch) -> None:
    waits = noted_waits(monkeypatch)
    statuses = [429, 503, 200, 500, 500, 500, 500, 200]
    with answering(lambda _: (statuses.pop(0), json.dumps(SAID).encode())) as url:
        asked = Endpoint(url, timeout_s=20.0, retries=2)
        assert asked.complete("m", MESSAGES, OPTIONS).text
        assert waits == [1.0, 2.0]
        for left in (2, 1):
            with pytest.raises(WorldFault, match="does not answer: status 500"):
                asked.complete("m", MESSAGES, OPTIONS)
            assert len(statuses) == left
        assert asked.complete("m", MESSAGES, OPTIONS).text


@cases("status, body, message")
def test_nonsense_is_the_worlds_fault(status: int, body: str, message: str) -> None:
    with (
        answering(lambda _: (status, body.encode())) as url,
        pytest.raises(WorldFault, match=f"the endpoint {url} .*{message}"),
    ):
        ask(url)


@pytest.mark.parametrize(("status", "remedy"), [(400, "too long"), (401, f"set {ENDPOINT_KEY}"), (404, "too long")])
def test_a_refusal_is_the_users_and_shows_no_key(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, status: int, remedy: str
) -> None:
    monkeypatch.setenv(ENDPOINT_KEY, "s3cret")
    caplog.set_level(logging.DEBUG)
    refused = pytest.raises(ValueError, match=f"status {status}.*{remedy}")
    with answering(lambda _: (status, refusal("too long")[1])) as url, refused as fault:
        ask(url, retries=3)
    assert "s3cret" not in f"{fault.value}{caplog.text}"


def test_an_endpoint_that_is_down_or_silent_is_named() -> None:
    with closing(socket.create_server(("127.0.0.1", 0))) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}/v1"
        with pytest.raises(WorldFault, match=f"{url} does not answer: took longer than 0.1 s"):
            ask(url, timeout_s=0.1)
        with pytest.raises(WorldFault, match=r"took longer than 0\.1 s"):
            next(Endpoint(url, timeout_s=0.1).stream(Shown, {}))
    with pytest.raises(WorldFault, match=f"{url} does not answer: Connect"):
        ask(url)


@cases("url, message")
def test_what_is_no_address_is_refused(url: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ask(url)


def test_what_drips_ends_at_the_limit_of_the_whole_answer() -> None:
    over = Event()

    def drip(asked: Heard) -> None:
        asked.write(b"HTTP/1.1 200 OK\r\n\r\ndata: 1\n")
        while not over.wait(0.05):
            asked.write(b"x")

    with answering(drip) as url:
        for read in (lambda: ask(url, timeout_s=0.5), lambda: list(Endpoint(url, timeout_s=0.5).stream(Shown, {}))):
            with pytest.raises(WorldFault, match=r"took longer than 0\.5 s"):
                read()
        over.set()


EVENT = b'data: {"a": 1}\n\n'


@cases("status, body, fault, message")
def test_a_stream_is_read_to_its_end(status: int, body: str, fault: str, message: str) -> None:
    kind = {"WorldFault": WorldFault, "ValueError": ValueError}[fault]
    with answering(lambda _: (status, body.encode())) as url, pytest.raises(kind, match=message):
        list(Endpoint(url, timeout_s=20.0).stream(Shown, {"model": "m"}))
    with answering(lambda _: (200, b": hello\n" + EVENT + b"data: [DONE]\n\n")) as url:
        assert list(Endpoint(url, timeout_s=20.0).stream(Shown, {"model": "m"})) == [Shown({"a": 1})]
