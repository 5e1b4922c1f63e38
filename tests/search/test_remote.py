"""The client against real servers on loopback: the project's own, and some that misbehave."""

import gzip
import json
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import pytest

from agent_r1.faults import WorldFault, WorldTimeout
from agent_r1.params.search import RemoteParams
from agent_r1.records import Passage
from agent_r1.search.remote import NO_ROUTE, RemoteIndex, connect
from tests.answering import Heard, Said, answering, noted_waits
from tests.cases import cases

PASSAGE = {"passage_id": "0", "title": "Tesk", "text": "a city"}
Answer = Callable[[Heard], Said | None]
HEAD = b"HTTP/1.1 200 OK\r\n"


def say(content: Any, status: int = 200) -> Answer:
    body = content if isinstance(content, bytes) else json.dumps(content).encode()
    return lambda _: (status, body)


def drip(heard: Heard) -> None:
    """A header that never ends, a byte now and then, each in time, all together never."""
    heard.write(HEAD + b"x-slow: ")
    for _ in range(100):
        heard.write(b"x")
        time.sleep(0.05)


def packed(heard: Heard) -> None:
    """A small answer that unpacked would be a thousand times as large."""
    heard.write(HEAD + b"content-encoding: gzip\r\n\r\n" + gzip.compress(bytes(2**20)))


def flood(heard: Heard) -> None:
    """An answer that has no end."""
    heard.write(HEAD + b"\r\n")
    while True:
        heard.write(bytes(2**16))


def count(heard: Heard) -> Said:
    """For each query a passage that is called after it."""
    found = [[{**PASSAGE, "title": query}] for query in heard.body["queries"]]
    return 200, json.dumps({"index_hash": "abc", "results": found}).encode()


def sleep(heard: Heard) -> Said:
    time.sleep(0.5)
    return 200, b""


GOOD = say({"index_hash": "abc", "results": [[PASSAGE]]})


class Server(NamedTuple):
    url: str
    heard: list[Heard]


@contextmanager
def serving(*answers: Answer) -> Iterator[Server]:
    """Answers each request with the next of some answers, the last one again and again."""
    left, heard = list(answers), list[Heard]()

    def answer(asked: Heard) -> Said | None:
        heard.append(asked)
        return (left.pop(0) if len(left) > 1 else left[0])(asked)

    with answering(answer) as url:
        yield Server(url, heard)


def client(url: str, *, index_hash: str = "abc", timeout_s: float = 5.0, retries: int = 2, **more: Any) -> RemoteIndex:
    params = RemoteParams.model_validate(
        {"url": url, "timeout_s": timeout_s, "retries": retries, "backoff_s": 0.01, **more}
    )
    return connect(params, index_hash)


def retriever(url: str) -> RemoteIndex:
    return client(url, protocol="retrieve", version="wiki-18-e5")


@pytest.mark.parametrize(("key", "sent"), [("k3y", "Bearer k3y"), ("", None)])
def test_a_search_is_asked_with_a_key_and_answered(monkeypatch: pytest.MonkeyPatch, key: str, sent: str | None) -> None:
    monkeypatch.setenv("AGENT_R1_SEARCH_KEY", key)
    with serving(GOOD) as server:
        assert client(server.url).search(["tesk?"], 1) == [[Passage(passage_id="0", title="Tesk", text="a city")]]
    [asked] = server.heard
    assert (asked.body, asked.headers.get("authorization")) == ({"queries": ["tesk?"], "k": 1}, sent)


def test_many_queries_go_in_batches_and_come_back_in_order() -> None:
    queries = [f"q{number}" for number in range(1025)]
    with serving(say(b"oh", 500), count) as server:
        found = client(server.url).search(queries, 1)
        assert client(server.url).search([], 1) == []
    assert [passage.title for [passage] in found] == queries
    assert [len(asked.body["queries"]) for asked in server.heard] == [32] * 33 + [1], "the first of them twice"


def test_a_fault_that_passes_is_tried_again() -> None:
    answers = (say(b"oh", 500), say(b"not json"), say(b"slow down", 429), say(b"", 408), say(b"no such host", 404))
    with serving(*answers, GOOD) as server:
        assert client(server.url, retries=5).search(["q"], 1)[0][0].title == "Tesk"
    assert len(server.heard) == 6


@cases("status, content, message")
def test_a_server_that_stays_broken_is_given_up(status: int, content: Any, message: str) -> None:
    body = content.encode() if isinstance(content, str) else content
    with serving(say(body, status) if status else {"packed": packed, "flood": flood}[content]) as server:
        with pytest.raises(WorldFault, match=message):
            client(server.url).search(["q"], 1)
        assert len(server.heard) == 3, "one attempt and two retries"


@pytest.mark.parametrize("slow", [sleep, drip])
def test_a_slow_server_times_out(slow: Answer) -> None:
    with serving(slow) as server:
        started = time.monotonic()
        with pytest.raises(WorldTimeout, match=r"took longer than 0\.2 s"):
            client(server.url, timeout_s=0.2, retries=1).search(["q"], 1)
        assert time.monotonic() - started < 60, "not a hundred drips and never for ever"


def test_a_server_that_is_not_there_is_tried_less_until_it_is_back(monkeypatch: pytest.MonkeyPatch) -> None:
    waits = noted_waits(monkeypatch)
    with socket.socket() as unheard:  # bound and not listening: connections are refused
        unheard.bind(("127.0.0.1", 0))
        remote = client(f"http://127.0.0.1:{unheard.getsockname()[1]}", retries=3)
        with pytest.raises(WorldFault, match="does not answer"):
            remote.search(["q"], 1)
        assert waits == [0.01, 0.02, 0.04]
        with pytest.raises(WorldFault):
            remote.search(["q"], 1)
        assert len(waits) == 3, "known to be down: one attempt"


def test_our_own_faults_are_raised_at_once() -> None:
    with serving(say(NO_ROUTE, 404)) as server:
        with pytest.raises(ValueError, match=r"refused .* 404: .*Not Found.*; check remote\.url"):
            client(server.url).search(["q"], 1)
        with pytest.raises(ValueError, match=r"404: .*without /read: start it anew, or set env\.tools\.read to"):
            client(server.url).read("q")
        assert len(server.heard) == 2
    with serving(GOOD) as server:
        other = client(server.url, index_hash="def")
        for ask in (lambda: other.search(["q"], 1), lambda: other.read("q")):
            with pytest.raises(ValueError, match="serves index abc now, not def"):
                ask()


ROW = {"id": "2", "contents": '"Tesk"\na city'}  # of wiki-18


@cases("result, k, expected")
def test_retrieve_is_asked_as_search_r1_asks_and_each_of_its_servers_is_read(
    result: list[Any], k: int, expected: list[tuple[str, str, str]]
) -> None:
    """`expected`: id, title and text of each passage of the one query. Without an id, the content names it."""
    with serving(say({"result": [result]})) as server:
        [passages] = retriever(server.url).search(["tesk?"], k)
    assert server.heard[0].body == {"queries": ["tesk?"], "topk": k, "return_scores": True}
    assert [[row.passage_id, row.title, row.text] for row in passages] == expected


@cases("result, message")
def test_retrieve_server_that_answers_otherwise_is_given_up(result: Any, message: str) -> None:
    with serving(say({"result": result})) as server:
        with pytest.raises(WorldFault, match=message):
            retriever(server.url).search(["q", "r"], 2)
        assert len(server.heard) == 3


def test_retrieve_server_finds_no_titles_and_its_version_stands_for_its_hash() -> None:
    with serving(say({"result": [[ROW]]})) as server:
        remote = retriever(server.url)
        assert remote.health().index_hash == "wiki-18-e5"
        with pytest.raises(ValueError, match=r"finds no passages by their title; set env\.tools\.read to null"):
            remote.read("Tesk")
