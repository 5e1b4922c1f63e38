"""The engine behind URLs: what goes wrong on the way to a server, and how requests are shared out."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig

from agent_r1.rollout import server_engine
from agent_r1.rollout.sampling import EngineError, Request
from agent_r1.rollout.server_engine import ServerEngine, VllmServer
from agent_r1.rollout.vllm_engine import shape

Answer = tuple[int, dict[str, Any]]

REQUESTS = [Request(episode=i, step=0, context=[100 + i, 7], seed=i, max_tokens=2) for i in range(20)]


@contextmanager
def serving(answer: Callable[[str, dict[str, Any]], Answer]) -> Iterator[str]:
    """The URL of a server on loopback that answers a path and a body by a status and a body."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            status, content = answer(self.path, body)
            self.send_response(status)
            self.end_headers()
            self.wfile.write(json.dumps(content).encode())

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever).start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()


class Echo:
    """Speaks as a vLLM server does; an action is the context's first id and the end token, 9."""

    def __init__(self, model: Path) -> None:
        self.shape = shape(AutoConfig.from_pretrained(model))
        self.weights = "default"
        self.loaded: list[str] = []
        self.asked: list[int] = []

    def __call__(self, path: str, body: dict[str, Any]) -> Answer:
        if path == "/inference/v1/generate":
            self.asked.append(body["token_ids"][0])
            return 200, {"choices": [self._choice(body["token_ids"][0])]}
        if path == "/update_weight_version":
            self.weights = body["new_version"]
        if body.get("method") == "describe":
            return 200, {"results": [{**self.shape, "max_tokens": 512, "dtype": "float32"}]}
        if body.get("method") == "reload_weights":
            self.loaded.append(body["kwargs"]["weights_path"])
        return 200, {"results": [None], "success": True}

    def _choice(self, first: int) -> dict[str, Any]:
        logprobs = {"content": [{"logprob": -float(first)}, {"logprob": -0.5}]}
        spans = [{"version": self.weights, "start": 0, "end": 2}]
        return {"token_ids": [first, 9], "logprobs": logprobs, "weight_versions": spans}


def opened(model: Path, urls: Sequence[str], **settings: Any) -> ServerEngine:
    return ServerEngine(model, urls, end_id=9, max_tokens=512, **{"retries": 0, **settings})


def connected(url: str, timeout_s: float = 5.0, retries: int = 0) -> VllmServer:
    return VllmServer(url, connections=1, timeout_s=timeout_s, retries=retries)


def test_requests_are_spread_and_answered_in_order(tiny_model: Path) -> None:
    first, second = Echo(tiny_model), Echo(tiny_model)
    with (
        serving(first) as here,
        serving(second) as there,
        opened(tiny_model, [here, there], concurrency=2, version=3) as engine,
    ):
        actions = engine.sample(REQUESTS)
        assert [action.token_ids for action in actions] == [[100 + i, 9] for i in range(20)]
        assert [action.logprobs.tolist() for action in actions] == [[-100.0 - i, -0.5] for i in range(20)]
        assert engine.version == 3
    assert first.asked
    assert second.asked
    assert sorted(first.asked + second.asked) == [100 + i for i in range(20)]


def test_every_server_takes_every_weight(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the folder's full path: a server's current folder is another one."""
    first, second = Echo(tiny_model), Echo(tiny_model)
    monkeypatch.chdir(tiny_model.parent)
    with serving(first) as here, serving(second) as there, opened(tiny_model, [here, there]) as engine:
        engine.load_weights(Path(tiny_model.name), 1)
    assert first.loaded == second.loaded == [str(tiny_model.resolve())] * 2
    assert first.weights == second.weights
    assert first.weights.endswith("-1")


def test_weights_that_another_training_loaded_are_noticed(tiny_model: Path, engine_server: str) -> None:
    """A real server; the second engine takes it over, and the first one says so instead of going on."""
    with opened(tiny_model, [engine_server]) as first, opened(tiny_model, [engine_server]) as second:
        assert len(second.sample(REQUESTS)) == 20
        with pytest.raises(EngineError, match=r"has other weights than it was given.* give every training its own"):
            first.sample(REQUESTS)


@pytest.mark.parametrize("size", ["vocab_size", "hidden_size"])
def test_a_server_of_another_model_is_refused(engine_server: str, tiny_model: Path, tmp_path: Path, size: str) -> None:
    config = json.loads((tiny_model / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, size: config[size] // 2}))
    wrong = f"{size} {config[size]}, not {config[size] // 2}"
    with pytest.raises(EngineError, match=f"runs another model than .*: {wrong}; start it with"):
        opened(tmp_path, [engine_server])


def test_a_tokenizer_with_more_tokens_than_the_model_is_refused(engine_server: str, tiny_model: Path) -> None:
    with pytest.raises(EngineError, match="ends an action with token 100000: its vocabulary is larger than the model"):
        ServerEngine(tiny_model, [engine_server], end_id=100_000, max_tokens=512)


def test_a_server_of_another_type_is_refused(engine_server: str, tiny_model: Path) -> None:
    with pytest.raises(EngineError, match=r"runs float32, and model\.dtype is bfloat16"):
        opened(tiny_model, [engine_server], dtype="bfloat16")


def test_what_the_server_refuses_is_told(engine_server: str, tiny_model: Path) -> None:
    too_long = Request(episode=0, step=0, context=[1] * 1024, seed=0, max_tokens=1)
    with opened(tiny_model, [engine_server]) as engine, pytest.raises(EngineError, match=r"refused /inference.*1024"):
        engine.sample([too_long])


def test_a_server_that_is_down_is_told(tiny_model: Path) -> None:
    with closing(socket.socket()) as unused:
        unused.bind(("127.0.0.1", 0))  # and never listens
        with pytest.raises(EngineError, match=r"did not answer .* in 1 attempts .*; start it with `python -m agent_r1"):
            opened(tiny_model, [f"http://127.0.0.1:{unused.getsockname()[1]}"])


def test_a_server_that_says_nothing_is_given_up() -> None:
    with closing(socket.create_server(("127.0.0.1", 0))) as silent:
        server = connected(f"http://127.0.0.1:{silent.getsockname()[1]}", timeout_s=0.1)
        with pytest.raises(EngineError, match=r"did not answer .*ReadTimeout.*engine\.server\.timeout_s"):
            server.describe()


def test_a_busy_server_is_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Twice 503, then the answer; the seconds between are not waited here."""
    waits: list[float] = []
    monkeypatch.setattr(server_engine.time, "sleep", waits.append)
    statuses = [503, 503, 200, 503, 503, 503]
    with serving(lambda *_: (statuses.pop(0), {"results": [{"vocab_size": 1}]})) as url:
        server = connected(url, retries=2)
        assert server.describe() == {"vocab_size": 1}
        assert waits == [1.0, 2.0]
        with pytest.raises(EngineError, match=r"in 3 attempts \(status 503\)"):
            server.describe()
    assert not statuses


@pytest.mark.parametrize(
    ("status", "message"),
    [(404, "has no /collective_rpc: it was not started with"), (500, "refused /collective_rpc: .*dead"), (400, "dead")],
)
def test_an_error_is_not_asked_for_twice(status: int, message: str) -> None:
    asked: list[str] = []

    def answer(path: str, body: dict[str, Any]) -> Answer:
        asked.append(path)
        return status, {"error": "dead"}

    with serving(answer) as url, pytest.raises(EngineError, match=message):
        connected(url, retries=5).describe()
    assert len(asked) == 1


def test_one_failed_request_fails_the_call(tiny_model: Path) -> None:
    echo = Echo(tiny_model)

    def failing(path: str, body: dict[str, Any]) -> Answer:
        return (500, {"error": "out of memory"}) if body.get("token_ids", [0])[0] == 101 else echo(path, body)

    with (
        serving(failing) as url,
        opened(tiny_model, [url], concurrency=1) as engine,
        pytest.raises(EngineError, match="out of memory"),
    ):
        engine.sample(REQUESTS)


def test_a_cache_that_cannot_be_dropped_is_told(tiny_model: Path) -> None:
    echo = Echo(tiny_model)

    def busy(path: str, body: dict[str, Any]) -> Answer:
        return (200, {"success": False}) if path == "/reset_prefix_cache" else echo(path, body)

    with serving(busy) as url, pytest.raises(EngineError, match="is answering others"):
        opened(tiny_model, [url])
