"""The engine on stock servers: faults on the way to one, how requests are shared out, what it may answer."""

from __future__ import annotations

import asyncio
import json
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
from transformers import AutoConfig

from agent_r1.http.client import Answer, Client
from agent_r1.params import load
from agent_r1.rollout import server_engine
from agent_r1.rollout.engine_wire import Launch, read_shape
from agent_r1.rollout.episodes import flowing
from agent_r1.rollout.sampling import Actor, Engine, EngineError, EngineRestarted, EngineUnavailable, Request
from agent_r1.rollout.server_engine import SERVER_KEY, StockServer
from agent_r1.rollout.vllm_engine import Process
from agent_r1.rollout.vllm_process import engine_options
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


def test_an_episode_stays_with_its_home_and_answers_come_in_order(opened: Open, tiny_model: Path) -> None:
    first, second = Echo(tiny_model), Echo(tiny_model)
    with serving(first) as here, serving(second) as there, opened(tiny_model, [here, there], version=3) as engine:
        actions = engine.sample(REQUESTS)
        assert [action.token_ids for action in actions] == [[100 + i, 9] for i in range(20)]
        assert [action.logprobs.tolist() for action in actions] == [[-100.0 - i, -0.5] for i in range(20)]
        assert engine.version == 3
    assert sorted(first.asked) == [100 + i for i in range(0, 20, 2)]
    assert sorted(second.asked) == [101 + i for i in range(0, 20, 2)]




class Crowd:
    """A server that takes its time, and counts how many ask it at once."""

    def __init__(self, server: Echo) -> None:
        self._server, self._asking, self.most = server, list[None](), 0

    def __call__(self, path: str, body: dict[str, Any]) -> Reply:
        self._asking.append(None)
        self.most = max(self.most, len(self._asking))
        try:
            time.sleep(0.02)
            return self._server(path, body)
        finally:
            self._asking.pop()


def test_no_more_connections_are_open_than_there_is_room_for(
    opened: Open, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Episodes by arrival may ask all at once, and from several loops."""
    monkeypatch.setattr(server_engine, "room", lambda: 3)
    crowd = Crowd(Echo(tiny_model))

    async def all_at_once(engine: Engine) -> list[list[int]]:
        actions = await asyncio.gather(*(flowing(engine, "arrival").act(request) for request in REQUESTS))
        return [action.token_ids for action in actions]

    with serving(crowd) as url, opened(tiny_model, [url]) as engine:
        for _ in range(2):
            assert asyncio.run(all_at_once(engine)) == [[100 + i, 9] for i in range(20)]
    assert crowd.most == 3


@pytest.mark.parametrize("where", ["port", "socket"])
def test_a_connection_that_cannot_be_opened_says_why(where: str, tmp_path: Path) -> None:
    client = Client("http://127.0.0.1:1", 5.0, "", str(tmp_path / "none") if where == "socket" else None)
    nobody = "FileNotFoundError" if where == "socket" else "ConnectionRefusedError"
    server = Process("the engine's process", client)
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
    echo.version = "default"


def take_over(echo: Echo) -> None:
    echo.version = "other-1"


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
    ("harm", "kind"),
    [(vanish, EngineUnavailable), (restart, EngineRestarted), (take_over, EngineError), (fail, EngineError)],
)
def test_a_call_fails_when_no_server_is_left(
    opened: Open, tiny_model: Path, harm: Harm, kind: type[EngineError]
) -> None:
    """The error says whether it may work later, or in a stage that begins again."""
    echoes = [Echo(tiny_model), Echo(tiny_model)]
    with (
        serving(echoes[0]) as here,
        serving(echoes[1]) as there,
        opened(tiny_model, [here, there]) as engine,
    ):
        for echo in echoes:
            harm(echo)
        with pytest.raises(EngineError, match=f"the engine server ({here}|{there}) ") as caught:
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
    assert first.version == second.version
    assert first.version.endswith("-1")


def test_weights_are_not_taken_while_a_request_of_others_keeps_the_old_cache(
    opened: Open, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    echo = Echo(tiny_model)
    monkeypatch.setattr(server_engine, "_RELEASE_S", 0.1)
    with serving(echo) as url, opened(tiny_model, [url]) as engine:
        before = echo.version
        echo.cache_dropped = False
        with pytest.raises(EngineError, match=r"is answering others; give every training its own"):
            engine.load_weights(tiny_model, 1)
        assert echo.version == before


def test_the_sums_of_every_server_with_the_latest_weights_are_asked_for(opened: Open, tiny_model: Path) -> None:
    first, second = Echo(tiny_model), Echo(tiny_model)
    with serving(first) as here, serving(second) as there, opened(tiny_model, [here, there]) as engine:
        assert [(held.sampler, held.sums) for held in engine.held()] == [
            (f"the engine server {url}", {"head": 8}) for url in (here, there)
        ]
        vanish(second)
        assert len(engine.held()) == 1
        vanish(first)
        with pytest.raises(EngineUnavailable, match=f"the engine server {here} did not answer"):
            engine.held()


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
        with pytest.raises(EngineError, match=r"did not answer .* in 1 attempts .*; start it with `VLLM_SERVER_DEV"):
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
    with serving(lambda *_: (statuses.pop(0), {"results": [DESCRIPTION]})) as url:
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
        (404, "no such route without VLLM_SERVER_DEV_MODE=1; start it with `VLLM_SERVER_DEV_MODE=1 python -m vllm"),
        (
            500,
            "refused /collective_rpc: .*dead.*; if it lacks the method, start it with .*--worker-extension-cls agent",
        ),
        (400, "dead"),
        (401, "another key; set AGENT_R1_ENGINE_KEY to that of the server, or of the proxy before it"),
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


def of(ids: Any = (5, 9), logprobs: Any = (-1.0, -0.5), **changes: Any) -> dict[str, Any]:
    """An answer with one action, whose fields may be changed."""
    answer = generated([*ids], [*logprobs])
    answer["choices"][0] |= changes
    return answer


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        ([], "Input should be an object"),
        ({"id": "own"}, "choices: Field required"),
        ({"choices": []}, "choices: .*at least 1 item"),
        ({"choices": of()["choices"] * 2}, "choices: .*at most 1 item"),
        ({"choices": [None]}, r"choices\.0: Input should be an object"),
        (of(token_ids="ab"), "token_ids: Input should be a valid (array|list)"),
        (of(ids=[5, -9]), r"token_ids\.1: .* greater than or equal to 0"),
        (of(ids=[512, 9]), "token 512, of a vocabulary of 512"),
        (of(ids=[9, 9]), "tokens after 9, which ends an action"),
        (of(ids=[], logprobs=[]), "0 tokens and 0 logprobs, of 1 to 2 of each"),
        (of(token_ids=[5, 6, 7]), "logprobs of other tokens than it sampled"),
        (of(ids=[5, 6, 7], logprobs=[-1.0] * 3), "3 tokens and 3 logprobs"),
        (of(logprobs=[-9999.0, -1.0]), "logprobs that are not all finite"),
        ({"choices": [{**of()["choices"][0], "logprobs": None}]}, "logprobs: Input should be an object"),
        (of(weight_versions=[]), "weight_versions: .*at least 1 item"),
        (of(weight_versions=[{"version": 1}]), "version: Input should be a valid string"),
        (of(logprobs=[float("nan")] * 2), "logprobs that are not all finite"),
        (of(logprobs=[3, -1]), "a logprob of 3"),
    ],
)
def test_an_answer_that_vllm_does_not_give_is_named(
    monkeypatch: pytest.MonkeyPatch, answer: dict[str, Any], message: str
) -> None:
    bodies = [{"results": [DESCRIPTION]}, answer]

    async def say(*_: object) -> Answer:
        return Answer(200, json.dumps(bodies.pop(0)).encode())

    monkeypatch.setattr(Client, "answer", say)
    server = connected("http://there:1")
    described(server)
    server.version = "own"
    with pytest.raises(EngineError, match=rf"http://there:1 answered /inference/v1/generate with .*: .*{message}"):
        asyncio.run(server.sample(REQUESTS[0], ACTOR))


def test_tokens_of_several_versions_are_another_trainings(opened: Open, tiny_model: Path) -> None:
    echo = Echo(tiny_model)

    def answer(path: str, body: dict[str, Any]) -> Reply:
        status, found = echo(path, body)
        if path == "/inference/v1/generate":
            found["choices"][0]["weight_versions"].append({"version": "other-1", "start": 1, "end": 2})
        return status, found

    with (
        serving(answer) as url,
        opened(tiny_model, [url]) as engine,
        pytest.raises(EngineError, match=r"\(other-1, not"),
    ):
        engine.sample(REQUESTS[:1])


def launched(**changes: Any) -> Launch:
    return Launch(vllm=load(PARAMS).engine.vllm, model="model", max_tokens=512, dtype="auto", **changes)




def test_a_gpu_gets_a_share_of_the_memory_and_adapters_their_room() -> None:
    found = engine_options(launched(adapter_rank=9), torch.device("cuda"))
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
