"""The engine on stock servers: faults on the way to one, how requests are shared out, what it may answer."""

import asyncio
import json
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, closing
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from transformers import AutoConfig

from agent_r1.http.client import Answer, Client
from agent_r1.params import load
from agent_r1.rollout import server_engine
from agent_r1.rollout.engine_wire import Launch, read_shape
from agent_r1.rollout.episodes import flowing
from agent_r1.rollout.sampling import Actor, Engine, EngineError, EngineUnavailable, Request
from agent_r1.rollout.server_engine import SERVER_KEY, StockServer
from agent_r1.rollout.vllm_process import engine_options
from tests.answering import Heard, Said, answering
from tests.cases import cases, tables

Reply = tuple[int, dict[str, Any]]
Open = Callable[..., Engine]

PARAMS = Path(__file__).parents[2] / "params.yaml"

DESCRIPTION = tables(Path(__file__).parent)["description"]
ACTOR = Actor(model="", end_ids=[9], max_tokens=512, temperature=1.0, dtype="auto")
REQUESTS = [Request(episode=i, step=0, context=[100 + i, 7], seed=i, max_tokens=2) for i in range(20)]


def serving(answer: Callable[[str, dict[str, Any]], Reply]) -> AbstractContextManager[str]:
    """The URL of a server that answers a path and a body by a status and JSON."""

    def say(heard: Heard) -> Said:
        status, content = answer(heard.path, heard.body)
        return status, json.dumps(content).encode()

    return answering(say)


class Echo:
    """Speaks as a stock server of vLLM does; an action is the context's first id and the end token, 9."""

    def __init__(self, model: Path) -> None:
        self.shape = read_shape(AutoConfig.from_pretrained(model))
        self.version = "default"
        self.fault = 0  # the status of every answer, where it is not 0
        self.cache_dropped = True
        self.loaded: list[str] = []
        self.asked: list[int] = []

    def __call__(self, path: str, body: dict[str, Any]) -> Reply:
        if self.fault:
            return self.fault, {"error": {"message": "EngineDeadError"}}
        match path, body.get("method"):
            case "/collective_rpc", "describe":
                return 200, {"results": [{**self.shape, "max_tokens": 512, "dtype": "float32"}]}
            case "/collective_rpc", "take_weights":
                self.loaded.append(body["kwargs"]["path"])
                return 200, {"results": [None]}
            case "/collective_rpc", "weight_sums":
                return 200, {"results": [[["head", 0, 0, 7]], [["head", 8, 0, 1]]]}
            case "/update_weight_version", _:
                self.version = body["new_version"]
            case "/inference/v1/generate", _:
                first = body["token_ids"][0]
                self.asked.append(first)
                return 200, generated([first, 9], [-float(first), -0.5], version=self.version)
        return 200, {"success": self.cache_dropped}


def generated(ids: Any, logprobs: Any, *, version: str = "own") -> dict[str, Any]:
    """A stock server's answer, with fields that nobody reads."""
    content = [{"token_id": token, "logprob": logprob, "rank": 1} for token, logprob in zip(ids, logprobs, strict=True)]
    spans = [{"version": version, "start": 0, "end": len(ids)}]
    choice = {"token_ids": ids, "logprobs": {"content": content}, "weight_versions": spans, "finish_reason": "stop"}
    return {"request_id": "generate-tokens-1", "choices": [choice]}


@pytest.fixture
def opened(opener: Callable[..., Open]) -> Open:
    """Opens an engine of a model on servers whose actions end with token 9."""

    def build(model: Path, urls: Sequence[str], **others: Any) -> Engine:
        return opener("server", urls=list(urls), retries=0)(model, **{"end_ids": [9]} | others)

    return build


def connected(url: str, timeout_s: float = 5.0, retries: int = 0) -> StockServer:
    settings = load(PARAMS).engine.server
    return StockServer(url, settings.model_copy(update={"timeout_s": timeout_s, "retries": retries}))


def described(server: StockServer) -> dict[str, Any]:
    return asyncio.run(server.describe()).model_dump()


class Two(NamedTuple):
    """An engine of the third version on two servers."""

    engine: Engine
    echoes: list[Echo]
    urls: list[str]


@pytest.fixture
def two(opened: Open, tiny_model: Path) -> Iterator[Two]:
    echoes = [Echo(tiny_model), Echo(tiny_model)]
    with (
        serving(echoes[0]) as here,
        serving(echoes[1]) as there,
        opened(tiny_model, [here, there], version=3) as engine,
    ):
        yield Two(engine, echoes, [here, there])


def test_an_episode_stays_with_its_home_and_answers_come_in_order(two: Two) -> None:
    actions = two.engine.sample(REQUESTS)
    assert [action.token_ids for action in actions] == [[100 + i, 9] for i in range(20)]
    assert [action.logprobs.tolist() for action in actions] == [[-100.0 - i, -0.5] for i in range(20)]
    assert two.engine.version == 3
    assert [sorted(echo.asked) for echo in two.echoes] == [[*range(100, 120, 2)], [*range(101, 120, 2)]]


def test_open_connections_have_room_for_all(opened: Open, tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Episodes by arrival may ask all at once, and from several loops."""
    monkeypatch.setattr(server_engine, "room", lambda: 3)
    echo, asking, counts = Echo(tiny_model), list[str](), list[int]()

    def crowd(path: str, body: dict[str, Any]) -> Reply:
        asking.append(path)
        counts.append(len(asking))
        time.sleep(0.02)
        asking.pop()
        return echo(path, body)

    async def all_at_once(engine: Engine) -> list[list[int]]:
        actions = await asyncio.gather(*(flowing(engine, "arrival").act(request) for request in REQUESTS))
        return [action.token_ids for action in actions]

    with serving(crowd) as url, opened(tiny_model, [url]) as engine:
        for _ in range(2):
            assert asyncio.run(all_at_once(engine)) == [[100 + i, 9] for i in range(20)]
    assert max(counts) == 3


@cases("harm, kind")
def test_a_server_that_fails_is_left_out_until_the_next_weights(
    two: Two, tiny_model: Path, caplog: pytest.LogCaptureFixture, harm: dict[str, Any], kind: str
) -> None:
    """Without any that is left a call fails: the error says whether it may work later, or in a stage that begins again.

    A ConnectionError may.
    """
    _, second = two.echoes
    vars(second).update(harm)
    for _ in range(2):
        assert [action.token_ids[0] for action in two.engine.sample(REQUESTS)] == [*range(100, 120)]
    left_out = f"{two.urls[1]} is left out until the next weights: the engine server {two.urls[1]} "
    assert caplog.text.count(left_out) == 1
    second.fault = 0
    second.asked.clear()
    two.engine.load_weights(tiny_model, 4)
    two.engine.sample(REQUESTS)
    assert sorted(second.asked) == [*range(101, 120, 2)]
    for echo in two.echoes:
        vars(echo).update(harm)
    with pytest.raises(EngineError, match=f"the engine server ({'|'.join(two.urls)}) ") as caught:
        two.engine.sample(REQUESTS[:2])
    assert type(caught.value).__name__ == kind
    assert isinstance(caught.value, ConnectionError) == (kind != "EngineError")


def test_a_server_that_comes_back_as_another_stays_out(two: Two, tiny_model: Path) -> None:
    first, second = two.echoes
    second.version = "default"  # as one that has started again
    two.engine.sample(REQUESTS)
    second.shape["hidden_size"] *= 2
    two.engine.load_weights(tiny_model, 4)
    two.engine.sample(REQUESTS)
    assert (len(first.loaded), len(second.loaded)) == (2, 1)


def test_a_request_that_is_refused_is_no_servers_fault(two: Two) -> None:
    first, second = two.echoes
    first.fault = 400
    with pytest.raises(EngineError, match=f"{two.urls[0]} refused"):
        two.engine.sample(REQUESTS[:1])
    first.fault = 0
    assert len(two.engine.sample(REQUESTS[:1])) == 1
    assert (len(first.asked), second.asked) == (1, [])


def test_one_answering_server_is_enough_to_begin(opened: Open, tiny_model: Path, free_port: Callable[[], int]) -> None:
    with serving(Echo(tiny_model)) as url, opened(tiny_model, [url, f"http://127.0.0.1:{free_port()}"]) as engine:
        assert len(engine.sample(REQUESTS)) == 20


def test_every_server_takes_every_weight(two: Two, tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the folder's full path: a server's current folder is another one."""
    monkeypatch.chdir(tiny_model.parent)
    two.engine.load_weights(Path(tiny_model.name), 4)
    assert [echo.loaded for echo in two.echoes] == [[str(tiny_model.resolve())] * 2] * 2
    [version] = {echo.version for echo in two.echoes}
    assert version.endswith("-4")


def test_weights_wait_for_requests_of_others(opened: Open, tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    echo = Echo(tiny_model)
    monkeypatch.setattr(server_engine, "_RELEASE_S", 0.1)
    with serving(echo) as url, opened(tiny_model, [url]) as engine:
        before = echo.version
        echo.cache_dropped = False
        with pytest.raises(EngineError, match=r"is answering others; give every training its own"):
            engine.load_weights(tiny_model, 1)
        assert echo.version == before


def test_the_sums_of_every_server_with_the_latest_weights_are_asked_for(two: Two) -> None:
    held = [(f"the engine server {url}", {"head": 8}) for url in two.urls]
    assert [(each.sampler, each.sums) for each in two.engine.held()] == held
    two.echoes[1].fault = 503
    assert len(two.engine.held()) == 1
    two.echoes[0].fault = 503
    with pytest.raises(EngineUnavailable, match=f"the engine server {two.urls[0]} did not answer"):
        two.engine.held()


@cases("shape, asked, message")
def test_a_server_that_does_not_fit_is_refused(
    opened: Open, tiny_model: Path, shape: dict[str, int], asked: dict[str, Any], message: str
) -> None:
    echo = Echo(tiny_model)
    echo.shape |= shape
    with serving(echo) as url, pytest.raises(EngineError, match=message):
        opened(tiny_model, [url], **asked)


def test_a_server_that_is_down_or_says_nothing_is_told(free_port: Callable[[], int]) -> None:
    with pytest.raises(EngineError, match=r"did not answer .* in 1 attempts .*; start it with `VLLM_SERVER_DEV"):
        described(connected(f"http://127.0.0.1:{free_port()}"))
    with closing(socket.create_server(("127.0.0.1", 0))) as silent:
        server = connected(f"http://127.0.0.1:{silent.getsockname()[1]}", timeout_s=0.1)
        with pytest.raises(EngineError, match=r"did not answer .*took longer than 0.1 s.*engine\.server\.timeout_s"):
            described(server)


@cases("status, message")
def test_an_error_is_not_asked_for_twice(status: int, message: str) -> None:
    asked: list[str] = []

    def answer(path: str, body: dict[str, Any]) -> Reply:
        asked.append(path)
        return status, {"error": "dead"}

    with serving(answer) as url, pytest.raises(EngineError, match=message):
        described(connected(url, retries=5))
    assert len(asked) == 1


def of(ids: Any = (5, 9), logprobs: Any = (-1.0, -0.5), **changes: Any) -> dict[str, Any]:
    """An answer with one action, whose fields may be changed."""
    answer = generated([*ids], [*logprobs])
    answer["choices"][0] |= changes
    return answer


@cases("changes, message")
def test_foreign_answers_are_named(monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any], message: str) -> None:
    bodies = [{"results": [DESCRIPTION]}, of(**changes)]

    async def say(*_: object) -> Answer:
        return Answer(200, json.dumps(bodies.pop(0)).encode())

    monkeypatch.setattr(Client, "answer", say)
    server = connected("http://there:1")
    described(server)
    server.version = "own"
    with pytest.raises(EngineError, match=rf"http://there:1 answered /inference/v1/generate with .*: .*{message}"):
        asyncio.run(server.sample(REQUESTS[0], ACTOR))


def test_a_gpu_gets_a_share_of_the_memory_and_adapters_their_room() -> None:
    launch = Launch(vllm=load(PARAMS).engine.vllm, model="model", max_tokens=512, dtype="auto", adapter_rank=9)
    found = engine_options(launch, torch.device("cuda"))
    assert {"dtype": "bfloat16", "gpu_memory_utilization": 0.4, "max_lora_rank": 16}.items() <= found.items()
    assert not found.keys() & {"kv_cache_memory_bytes", "enforce_eager"}


def test_the_key_is_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []

    def refuse(heard: Heard) -> Said:
        seen.append(heard.headers["authorization"])
        return 401, b""

    monkeypatch.setenv(SERVER_KEY, "s3cret")
    with answering(refuse) as url, pytest.raises(EngineError, match=f"has another key; set {SERVER_KEY}"):
        described(connected(url))
    assert seen == ["Bearer s3cret"]
