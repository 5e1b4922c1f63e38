"""The engine behind URLs: faults on the way to a server, how requests are shared out, how a server is started."""

from __future__ import annotations

import asyncio
import json
import os
import re
import resource
import socket
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, closing
from pathlib import Path
from typing import Any

import pytest
import torch
from starlette.testclient import TestClient, WebSocketDenialResponse
from transformers import AutoConfig

from agent_r1.http.client import Answer, Client
from agent_r1.params import load
from agent_r1.rollout import server_engine
from agent_r1.rollout.engine_wire import FRESH, SERVER_KEY, Launch, read_shape
from agent_r1.rollout.episodes import flowing
from agent_r1.rollout.sampling import Actor, Engine, EngineError, EngineRestarted, EngineUnavailable, Request
from agent_r1.rollout.server_engine import VllmServer, connect
from agent_r1.rollout.vllm_engine import serve
from agent_r1.rollout.vllm_process import Worker, create_app, engine_options
from tests.answering import Heard, Said, answering, noted_waits

Reply = tuple[int, dict[str, Any]]
Open = Callable[..., Engine]

PARAMS = Path(__file__).parents[2] / "params.yaml"

DESCRIPTION = {
    "model_type": "qwen2",
    "vocab_size": 512,
    "hidden_size": 1,
    "num_hidden_layers": 1,
    "max_tokens": 512,
    "dtype": "float32",
}
ACTOR = Actor(model="", end_ids=[9], max_tokens=512, temperature=1.0, dtype="auto")
REQUESTS = [Request(episode=i, step=0, context=[100 + i, 7], seed=i, max_tokens=2) for i in range(20)]


def serving(answer: Callable[[str, dict[str, Any]], Reply]) -> AbstractContextManager[str]:
    """The URL of a server that answers a path and a body by a status and JSON."""

    def say(heard: Heard) -> Said:
        status, content = answer(heard.path, heard.body)
        return status, json.dumps(content).encode()

    return answering(say)


class Echo:
    """Speaks as the process of vLLM does; an action is the context's first id and the end token, 9."""

    def __init__(self, model: Path) -> None:
        self.shape = read_shape(AutoConfig.from_pretrained(model))
        self.weights = FRESH
        self.fault = 0  # the status of every answer, where it is not 0
        self.loaded: list[str] = []
        self.asked: list[int] = []

    def __call__(self, path: str, body: dict[str, Any]) -> Reply:
        if self.fault:
            return self.fault, {"error": "EngineDeadError"}
        match path:
            case "/describe":
                return 200, {**self.shape, "max_tokens": 512, "dtype": "float32"}
            case "/weights":
                self.loaded.append(body["path"])
                self.weights = body["label"]
            case "/sample":
                firsts = [request["context"][0] for request in body["requests"]]
                self.asked += firsts
                actions = [{"ids": [first, 9], "logprobs": [-float(first), -0.5]} for first in firsts]
                return 200, {"weights": self.weights, "actions": actions}
        return 200, {}


@pytest.fixture
def opened(opener: Callable[..., Open]) -> Open:
    """Opens an engine of a model on servers whose actions end with token 9."""

    def build(model: Path, urls: Sequence[str], **others: Any) -> Engine:
        return opener("server", urls=list(urls), retries=0)(model, **{"end_ids": [9]} | others)

    return build


def connected(url: str, timeout_s: float = 5.0, retries: int = 0) -> VllmServer:
    return VllmServer(f"the engine server {url}", connect(url, timeout_s), retries, server_engine.START)


def described(server: VllmServer) -> dict[str, Any]:
    return asyncio.run(server.describe()).model_dump()


def test_an_episode_stays_with_its_home_and_answers_come_in_order(opened: Open, tiny_model: Path) -> None:
    first, second = Echo(tiny_model), Echo(tiny_model)
    with serving(first) as here, serving(second) as there, opened(tiny_model, [here, there], version=3) as engine:
        actions = engine.sample(REQUESTS)
        assert [action.token_ids for action in actions] == [[100 + i, 9] for i in range(20)]
        assert [action.logprobs.tolist() for action in actions] == [[-100.0 - i, -0.5] for i in range(20)]
        assert engine.version == 3
    assert first.asked == [100 + i for i in range(0, 20, 2)]
    assert second.asked == [101 + i for i in range(0, 20, 2)]


def test_no_more_connections_are_open_than_there_is_room_for(
    opened: Open, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Episodes by arrival may ask all at once, and from several loops."""
    monkeypatch.setattr(server_engine, "room", lambda: 3)
    echo, open_ones, most = Echo(tiny_model), list[None](), list[int]()

    def answer(path: str, body: dict[str, Any]) -> Reply:
        open_ones.append(None)
        most.append(len(open_ones))
        try:
            time.sleep(0.02)
            return echo(path, body)
        finally:
            open_ones.pop()

    async def all_at_once(engine: Engine) -> list[list[int]]:
        actions = await asyncio.gather(*(flowing(engine, "arrival").act(request) for request in REQUESTS))
        return [action.token_ids for action in actions]

    with serving(answer) as url, opened(tiny_model, [url]) as engine:
        for _ in range(2):
            assert asyncio.run(all_at_once(engine)) == [[100 + i, 9] for i in range(20)]
    assert max(most) == 3


@pytest.mark.parametrize("where", ["port", "socket"])
def test_a_connection_that_cannot_be_opened_says_why(where: str, tmp_path: Path) -> None:
    client = connect("http://127.0.0.1:1", 5.0, str(tmp_path / "none") if where == "socket" else None)
    nobody = "FileNotFoundError" if where == "socket" else "ConnectionRefusedError"
    server = VllmServer("the engine's process", client)
    before = resource.getrlimit(resource.RLIMIT_NOFILE)

    async def ask(files: int) -> str:
        resource.setrlimit(resource.RLIMIT_NOFILE, (files, before[1]))
        try:
            with pytest.raises(EngineUnavailable) as fault:
                await server.rest()
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, before)
        return str(fault.value)

    said = "the engine's process did not answer /rest in 1 attempts"
    assert re.fullmatch(rf"{said} \({nobody}: .*\)", asyncio.run(ask(before[0])))
    assert asyncio.run(ask(3)) == f"{said} (OSError: [Errno 24] Too many open files)"


def restart(echo: Echo) -> None:
    echo.weights = FRESH


def take_over(echo: Echo) -> None:
    echo.weights = "other-1"


def fail(echo: Echo) -> None:
    echo.fault = 500


def vanish(echo: Echo) -> None:
    echo.fault = 503


Harm = Callable[[Echo], None]


@pytest.mark.parametrize("harm", [restart, take_over, fail, vanish])
def test_a_server_that_fails_is_left_out_until_the_next_weights(
    opened: Open, tiny_model: Path, caplog: pytest.LogCaptureFixture, harm: Harm
) -> None:
    first, second = Echo(tiny_model), Echo(tiny_model)
    with serving(first) as here, serving(second) as there, opened(tiny_model, [here, there]) as engine:
        harm(second)
        assert [action.token_ids[0] for action in engine.sample(REQUESTS)] == [100 + i for i in range(20)]
        asked = len(second.asked)
        assert [action.token_ids[0] for action in engine.sample(REQUESTS)] == [100 + i for i in range(20)]
        assert len(second.asked) == asked
        assert caplog.text.count(f"{there} is left out until the next weights: the engine server {there} ") == 1
        second.fault = 0
        engine.load_weights(tiny_model, 1)
        engine.sample(REQUESTS)
    assert sorted(second.asked[-10:]) == [101 + i for i in range(0, 20, 2)]


@pytest.mark.parametrize(
    ("harms", "kind"),
    [
        ([vanish, fail], EngineUnavailable),
        ([fail, restart], EngineRestarted),
        ([take_over, fail], EngineError),
    ],
)
def test_a_call_fails_when_no_server_is_left(
    opened: Open, tiny_model: Path, harms: list[Harm], kind: type[EngineError]
) -> None:
    """The error says that it may work later, or in a stage that begins again, if a server gives hope of that."""
    echoes = [Echo(tiny_model), Echo(tiny_model)]
    with (
        serving(echoes[0]) as here,
        serving(echoes[1]) as there,
        opened(tiny_model, [here, there]) as engine,
    ):
        for echo, harm in zip(echoes, harms, strict=True):
            harm(echo)
        with pytest.raises(EngineError, match=f"{here} .*; .*{there} ") as caught:
            engine.sample(REQUESTS[:2])
    assert type(caught.value) is kind
    assert isinstance(caught.value, ConnectionError) == (kind is not EngineError)


def test_a_server_that_comes_back_as_another_stays_out(opened: Open, tiny_model: Path) -> None:
    first, second = Echo(tiny_model), Echo(tiny_model)
    with serving(first) as here, serving(second) as there, opened(tiny_model, [here, there]) as engine:
        restart(second)
        engine.sample(REQUESTS)
        second.shape["hidden_size"] *= 2
        engine.load_weights(tiny_model, 1)
        engine.sample(REQUESTS)
    assert len(second.loaded) == 1
    assert len(first.loaded) == 2


def test_a_request_that_is_refused_is_no_servers_fault(opened: Open, tiny_model: Path) -> None:
    echoes = [Echo(tiny_model), Echo(tiny_model)]
    with serving(echoes[0]) as here, serving(echoes[1]) as there, opened(tiny_model, [here, there]) as engine:
        echoes[0].fault = 400
        with pytest.raises(EngineError, match=f"{here} refused"):
            engine.sample(REQUESTS[:1])
        echoes[0].fault = 0
        assert len(engine.sample(REQUESTS[:1])) == 1
    assert echoes[0].asked
    assert not echoes[1].asked


def test_one_server_that_answers_is_enough_to_begin(opened: Open, tiny_model: Path) -> None:
    first, second = Echo(tiny_model), Echo(tiny_model)
    vanish(second)
    with serving(first) as here, serving(second) as there, opened(tiny_model, [here, there]) as engine:
        assert len(engine.sample(REQUESTS)) == 20
    assert not second.loaded


def test_every_server_takes_every_weight(opened: Open, tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the folder's full path: a server's current folder is another one."""
    first, second = Echo(tiny_model), Echo(tiny_model)
    monkeypatch.chdir(tiny_model.parent)
    with serving(first) as here, serving(second) as there, opened(tiny_model, [here, there]) as engine:
        engine.load_weights(Path(tiny_model.name), 1)
    assert first.loaded == second.loaded == [str(tiny_model.resolve())] * 2
    assert first.weights == second.weights
    assert first.weights.endswith("-1")


@pytest.mark.parametrize("size", ["vocab_size", "hidden_size"])
def test_a_server_of_another_model_is_refused(opened: Open, tiny_model: Path, tmp_path: Path, size: str) -> None:
    config = json.loads((tiny_model / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, size: config[size] // 2}))
    wrong = f"{size} {config[size]}, not {config[size] // 2}"
    with (
        serving(Echo(tiny_model)) as url,
        pytest.raises(EngineError, match=f"runs another model than .*: {wrong}; start it with"),
    ):
        opened(tmp_path, [url])


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"end_ids": [100_000]}, "ends an action with token 100000: its vocabulary is larger than the model"),
        ({"dtype": "bfloat16"}, r"runs float32, and model\.dtype is bfloat16"),
    ],
)
def test_a_server_that_does_not_fit_is_refused(
    opened: Open, tiny_model: Path, asked: dict[str, Any], message: str
) -> None:
    with serving(Echo(tiny_model)) as url, pytest.raises(EngineError, match=message):
        opened(tiny_model, [url], **asked)


def test_a_server_that_is_down_is_told(opened: Open, tiny_model: Path) -> None:
    with closing(socket.socket()) as unused:
        unused.bind(("127.0.0.1", 0))  # and never listens
        with pytest.raises(EngineError, match=r"did not answer .* in 1 attempts .*; start it with `agent-r1 serve_eng"):
            opened(tiny_model, [f"http://127.0.0.1:{unused.getsockname()[1]}"])


def test_a_server_that_says_nothing_is_given_up() -> None:
    with closing(socket.create_server(("127.0.0.1", 0))) as silent:
        server = connected(f"http://127.0.0.1:{silent.getsockname()[1]}", timeout_s=0.1)
        with pytest.raises(EngineError, match=r"did not answer .*took longer than 0.1 s.*engine\.server\.timeout_s"):
            described(server)


def test_a_busy_server_is_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """The seconds between are not waited here. A server that stayed down is asked once."""
    waits = noted_waits(monkeypatch)
    statuses = [503, 408, 200, 503, 503, 503, 503]
    with serving(lambda *_: (statuses.pop(0), DESCRIPTION)) as url:
        server = connected(url, retries=2)
        assert described(server) == DESCRIPTION
        assert waits == [1.0, 2.0]
        for attempts in (3, 1):
            with pytest.raises(EngineError, match=rf"in {attempts} attempts \(status 503, "):
                described(server)
    assert not statuses


@pytest.mark.parametrize(
    ("status", "message"),
    [
        (404, "has no /describe: it was not started with"),
        (500, "refused /describe: .*dead"),
        (409, "is answering others; give every training its own servers"),
        (400, "dead"),
        (401, "has another key; set AGENT"),
    ],
)
def test_an_error_is_not_asked_for_twice(status: int, message: str) -> None:
    asked: list[str] = []

    def answer(path: str, body: dict[str, Any]) -> Reply:
        asked.append(path)
        return status, {"error": "dead"}

    with serving(answer) as url, pytest.raises(EngineError, match=message):
        described(connected(url, retries=5))
    assert len(asked) == 1


def of(**changes: Any) -> dict[str, Any]:
    """An answer with one action, whose fields may be changed."""
    return {"weights": "own", "actions": [{"ids": [5, 9], "logprobs": [-1.0, -0.5], **changes}]}


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        ([], "Input should be an object"),
        ({"weights": "own"}, "actions: Field required"),
        ({**of(), "weights": 1}, "weights: Input should be a valid string"),
        ({"weights": "own", "actions": []}, "0 actions for 1 requests"),
        ({"weights": "own", "actions": [None]}, r"actions\.0: Input should be an object"),
        (of(ids="ab"), "ids: Input should be a valid (array|list)"),
        (of(ids=[5, -9]), r"ids\.1: .* greater than or equal to 0"),
        (of(ids=[512, 9]), "token 512, of a vocabulary of 512"),
        (of(ids=[9, 9]), "tokens after 9, which ends an action"),
        (of(ids=[]), "0 tokens and 2 logprobs, of 1 to 2 of each"),
        (of(ids=[5, 6, 7]), "3 tokens and 2 logprobs"),
        (of(logprobs=None), "logprobs: Input should be a valid (array|list)"),
        (of(logprobs=[float("nan")] * 2), "logprobs that are not all finite"),
        (of(logprobs=[3, -1]), "a logprob of 3"),
    ],
)
def test_an_answer_that_vllm_does_not_give_is_named(
    monkeypatch: pytest.MonkeyPatch, answer: dict[str, Any], message: str
) -> None:
    bodies = [DESCRIPTION, answer]

    async def say(*_: object) -> Answer:
        return Answer(200, json.dumps(bodies.pop(0)).encode())

    monkeypatch.setattr(Client, "answer", say)
    server = connected("http://there:1")
    described(server)
    with pytest.raises(EngineError, match=rf"http://there:1 answered /sample with .*: .*{message}"):
        asyncio.run(server.sample(REQUESTS[:1], ACTOR, "own"))


def launched(**changes: Any) -> Launch:
    return Launch(vllm=load(PARAMS).engine.vllm, model="model", max_tokens=512, dtype="auto", **changes)


def test_a_cpu_gets_a_cache_and_no_compiler() -> None:
    found = engine_options(launched(), torch.device("cpu"))
    expected = {
        "model": "model",
        "max_model_len": 512,
        "max_num_seqs": 256,
        "dtype": "float32",
        "kv_cache_memory_bytes": 2**29,
        "enforce_eager": True,
        "enable_chunked_prefill": False,
        "async_scheduling": False,
        "generation_config": "vllm",
        "worker_extension_cls": "agent_r1.rollout.vllm_process.WorkerExtension",
    }
    assert expected.items() <= found.items()
    assert not found.keys() & {"gpu_memory_utilization", "enable_lora"}


def test_a_gpu_gets_a_share_of_the_memory_and_adapters_their_room() -> None:
    found = engine_options(launched(adapter_rank=9), torch.device("cuda"))
    assert {"dtype": "bfloat16", "gpu_memory_utilization": 0.4, "max_lora_rank": 16}.items() <= found.items()
    assert not found.keys() & {"kv_cache_memory_bytes", "enforce_eager"}


ROUTES = ("/sample", "/weights", "/describe", "/rest", "/health", "/")


INSIDE = {"/health": 405, "/": 404}  # what a POST to a route gets that the guard lets in; of the others 500


def guarded(host: str = "127.0.0.1:8001") -> TestClient:
    """A client of the server of an engine that could not be opened."""
    worker = Worker(None, FRESH, adapters=False, failure=RuntimeError("inside"))
    return TestClient(create_app(worker), base_url=f"http://{host}")


@pytest.mark.parametrize("path", ROUTES)
def test_every_route_asks_for_the_key(monkeypatch: pytest.MonkeyPatch, path: str) -> None:
    monkeypatch.setenv(SERVER_KEY, "s3cret")
    client = guarded("node-3:8001")
    assert client.post(path, headers={"authorization": "Bearer s3cret"}).status_code == INSIDE.get(path, 500)
    for wrong in (b"Bearer s3cre", b"Bearer s3cret2", b"s3cret", b"Bearer", b"Bearer s3cr\xe9t"):
        assert client.post(path, headers={"authorization": wrong}).status_code == 401
    assert client.post(path).status_code == 401
    with pytest.raises(WebSocketDenialResponse), client.websocket_connect(path):
        pass


@pytest.mark.parametrize("path", ROUTES)
def test_without_a_key_no_web_page_is_answered(path: str) -> None:
    client, inside = guarded(), INSIDE.get(path, 500)
    asked: list[tuple[dict[str, str], int]] = [
        ({}, inside),
        ({"host": "[::1]:8001"}, inside),
        ({"origin": "http://evil.example"}, 403),
        ({"host": "evil.example:8001"}, 400),
    ]
    assert [client.post(path, headers=headers).status_code for headers, _ in asked] == [status for _, status in asked]


def test_the_key_is_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []

    def refuse(heard: Heard) -> Said:
        seen.append(heard.headers["authorization"])
        return 401, b""

    monkeypatch.setenv(SERVER_KEY, "s3cret")
    with answering(refuse) as url, pytest.raises(EngineError, match=f"has another key; set {SERVER_KEY}"):
        described(connected(url))
    assert seen == ["Bearer s3cret"]


@pytest.mark.parametrize(
    ("key", "host", "message"),
    [
        ("", "0.0.0.0", "--host 0.0.0.0: without AGENT_R1_ENGINE_KEY all who reach this"),
        ("two words", "127.0.0.1", "AGENT_R1_ENGINE_KEY holds a blank"),
    ],
)
def test_a_server_for_everybody_is_not_started(
    monkeypatch: pytest.MonkeyPatch, key: str, host: str, message: str
) -> None:
    monkeypatch.setenv(SERVER_KEY, key)
    monkeypatch.setattr(os, "execve", lambda *_: pytest.fail("was started"))
    with pytest.raises(ValueError, match=message):
        serve(load(), "model", host, 8001)
