"""The process of vLLM around an engine that the test plays by hand."""

import asyncio
import json
from collections.abc import Callable, Coroutine
from types import SimpleNamespace
from typing import Any

import pytest
from starlette.testclient import TestClient

from agent_r1.rollout import vllm_process
from agent_r1.rollout.engine_wire import Draw, Sampled, Sampling, Weights
from agent_r1.rollout.vllm_process import BusyError, Worker, create_app
from tests.cases import cases

SAMPLING = Sampling(seed=0, max_tokens=2, temperature=1.0, stop_token_ids=[0])
ASKED = [Draw(token_ids=[index], sampling_params=SAMPLING) for index in range(4)]
WEIGHTS = Weights(path="folder")
PATIENCE_S = 20.0


class ByHand:
    """vLLM's engine: a step finishes the requests that `finish` names by their contexts, and notes what it is told."""

    def __init__(self) -> None:
        self.told: list[str] = []
        self.running: dict[str, int] = {}  # id -> context
        self.finish: list[int] = []
        self.fault: Exception | None = None
        self.cache_dropped = True

    def add_request(self, ticket: str, asked: Draw, _: None, *, lora_request: None) -> None:
        if asked.token_ids == [3]:
            raise ValueError("a context of 3 is too long")
        self.told.append("add")
        self.running[ticket] = asked.token_ids[0]

    def abort_request(self, tickets: list[str]) -> None:
        self.told += [f"abort {self.running.pop(ticket)}" for ticket in tickets]

    def step(self) -> list[Any]:
        if self.fault:
            raise self.fault
        done = [ticket for ticket, context in self.running.items() if context in self.finish]
        return [SimpleNamespace(request_id=ticket, finished=True, context=self.running.pop(ticket)) for ticket in done]

    def collective_rpc(self, method: str, **_: object) -> None:
        self.told.append(method)

    def reset_prefix_cache(self) -> bool:
        return self.cache_dropped

    def sleep(self, level: int) -> None:
        self.told.append(f"sleep {level}")

    def wake_up(self, tags: list[str]) -> None:
        self.told += [f"wake {tag}" for tag in tags]

    def add_lora(self, _: object) -> None:
        self.told.append("add_lora")


@pytest.fixture(autouse=True)
def _plain(monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests and outputs are not vLLM's, whose import takes ten seconds."""
    monkeypatch.setattr(vllm_process, "_in_vllm", lambda asked: (asked, None))
    monkeypatch.setattr(vllm_process, "_sampled", lambda output: Sampled(ids=[output.context], logprobs=[0.0]))
    monkeypatch.setattr(vllm_process, "_IDLE_S", 0.1)


def play(engine: ByHand, script: Callable[[Worker], Coroutine[Any, Any, Any]], *, adapters: bool = False) -> Any:
    """Runs a script beside the worker's loop."""

    async def both() -> Any:
        worker = Worker(engine, adapters=adapters)
        loop = asyncio.create_task(worker.run())
        try:
            return await asyncio.wait_for(script(worker), PATIENCE_S)
        finally:
            loop.cancel()

    return asyncio.run(both())


async def turns(count: int = 20) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


def test_a_failure_of_vllm_reaches_all_who_wait_and_all_who_come() -> None:
    async def script(worker: Worker) -> Any:
        waiting = asyncio.gather(*(worker.sample([asked]) for asked in ASKED[:3]), return_exceptions=True)
        await turns()
        engine.fault = MemoryError("out of memory")
        return await waiting, worker.failure

    engine = ByHand()
    errors, failure = play(engine, script)
    assert [str(error) for error in errors] == ["out of memory"] * 3
    with TestClient(create_app(Worker(None, adapters=False, failure=failure)), "http://localhost") as client:
        answer = client.post("/sample", content=json.dumps({"requests": []}))
    assert (answer.status_code, answer.json()["error"]["message"]) == (500, "MemoryError: out of memory")


def test_a_call_with_a_request_that_vllm_refuses_leaves_nothing_behind() -> None:
    engine = ByHand()
    with pytest.raises(ValueError, match="a context of 3 is too long"):
        play(engine, lambda worker: worker.sample(ASKED))
    assert (engine.told, engine.running) == (["add"] * 3 + ["abort 0", "abort 1", "abort 2"], {})


def test_new_weights_wait_for_requests_whose_callers_have_left() -> None:
    """They are refused while others sample, and while vLLM keeps its cache of the old ones."""

    async def script(worker: Worker) -> Any:
        sampling = asyncio.create_task(worker.sample(ASKED[:1]))
        await turns()
        with pytest.raises(BusyError, match="1 requests are under way"):
            await worker.load_weights(WEIGHTS)
        loading = asyncio.create_task(worker.load_weights(WEIGHTS))
        await turns()
        sampling.cancel()
        await loading
        engine.finish = [1]
        return await worker.sample(ASKED[1:2])

    engine = ByHand()
    assert [action.ids for action in play(engine, script).actions] == [[1]]
    engine.cache_dropped = False
    with pytest.raises(BusyError, match="keeps its prefix cache"):
        play(engine, lambda worker: worker.load_weights(WEIGHTS))


@cases("adapters, samples, told")
def test_sleep_ends_on_request(monkeypatch: pytest.MonkeyPatch, adapters: bool, samples: bool, told: list[str]) -> None:
    """Only weights beneath adapters are kept, and the cache waits until new ones are loaded, as vLLM documents it."""

    def load_adapter(worker: Worker, _: object) -> None:
        worker._engine.add_lora(None)

    async def script(worker: Worker) -> None:
        engine.finish = [0]
        await worker.rest()
        await worker.rest()
        for _ in range(2):
            await (worker.sample(ASKED[:1]) if samples else worker.load_weights(WEIGHTS))

    monkeypatch.setattr(Worker, "_load_adapter", load_adapter)
    engine = ByHand()
    play(engine, script, adapters=adapters)
    assert engine.told == told


def test_weights_that_were_given_up_sample_nothing() -> None:
    async def script(worker: Worker) -> Any:
        engine.finish = [0]
        await worker.rest()
        with pytest.raises(ValueError, match="the weights were given up"):
            await worker.sample(ASKED[:1])
        await worker.load_weights(WEIGHTS)
        return await worker.sample(ASKED[:1])

    engine = ByHand()
    assert [action.ids for action in play(engine, script).actions] == [[0]]
