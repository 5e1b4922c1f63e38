"""vLLM in a process of its own, behind HTTP: its set-up, its loop, and the routes that its clients call.

The process runs this file, and it alone imports vLLM: its environment variables, threads and memory stay away from the
learner's. vLLM's engine runs in the process itself, so that the requests of one call are admitted all at once and
batches do not depend on timing; requests of further calls are admitted at the next token.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import signal
import socket
import sys
import time
import traceback
from collections.abc import Awaitable, Callable, Sequence
from itertools import count
from pathlib import Path
from threading import Thread
from typing import TYPE_CHECKING, Any

import uvicorn
from pydantic import BaseModel
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect
from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.routing import Route

from agent_r1.http.dialects.conversation import Refused
from agent_r1.http.guard import Unsignalled, refusal
from agent_r1.params.places import adapter_in
from agent_r1.replaced import hide_wide_kernels
from agent_r1.rollout import engine_wire as wire
from agent_r1.surroundings import are_pinned

if TYPE_CHECKING:
    import torch  # imported once garbage is no longer collected

_BATCHED_TOKENS = 8192  # in one forward pass: bounds the memory of its activations
_ADAPTER_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)  # vLLM makes room for these; a smaller rank fits as well
_LOOKS = 4  # turns of the loop between two tokens: a request takes as many from its connection to vLLM
_CALLERS = 100_000  # that may wait for their turn
_IDLE_S = 5.0  # that new weights wait for requests whose callers have left


class BusyError(RuntimeError):
    """Other requests are under way where none may be."""


def engine_options(launch: wire.Launch, device: torch.device) -> dict[str, Any]:
    """The fields of vLLM's `EngineArgs`. On a CPU nothing is compiled: that costs more there than it saves."""
    from agent_r1.pretrained import MIXERS, compute_dtype, layer_kinds, read_config

    settings = launch.vllm
    options = dict[str, Any]()
    if rank := launch.adapter_rank:
        room = next((size for size in _ADAPTER_RANKS if size >= rank), rank)  # else vLLM itself refuses the rank
        options |= {"enable_lora": True, "max_loras": 1, "max_lora_rank": room}
    if device.type == "cuda":
        options |= {"gpu_memory_utilization": settings.gpu_memory_utilization, "enable_sleep_mode": settings.sleep}
    else:
        options["enforce_eager"] = True
        options["enable_chunked_prefill"] = False  # a seeded request cut in two rewinds a generator, which no CPU can
        options["kv_cache_memory_bytes"] = int(settings.cpu_cache_gib * 2**30)
        if layer_kinds(read_config(launch.model)) & MIXERS.keys():
            options["enable_prefix_caching"] = False  # it keeps their states at the ends of chunks alone
    return options | {
        "model": launch.model,
        "dtype": str(compute_dtype(launch.dtype, device)).removeprefix("torch."),
        "skip_tokenizer_init": True,
        "trust_remote_code": False,
        "generation_config": "vllm",  # no sampling defaults from the model's folder
        "max_model_len": launch.max_tokens,
        "tensor_parallel_size": settings.tensor_parallel_size,
        "max_num_seqs": settings.max_num_seqs,
        "max_num_batched_tokens": max(_BATCHED_TOKENS, launch.max_tokens),
        "async_scheduling": False,
        "worker_extension_cls": wire.EXTENSION,
        "use_tqdm_on_load": False,
        "disable_log_stats": True,
    }


def open_engine(launch: wire.Launch) -> Any:
    """vLLM's engine."""
    import torch

    if are_pinned():
        hide_wide_kernels()
    from vllm.engine.arg_utils import EngineArgs
    from vllm.usage.usage_lib import UsageContext
    from vllm.v1.engine.llm_engine import LLMEngine

    from agent_r1.pretrained import default_device

    gc.freeze()  # vLLM itself looks for garbage several times as it starts
    gc.enable()
    device = default_device()
    if device.type == "cpu":
        torch._dynamo.config.disable = True
    engine_args = EngineArgs(**engine_options(launch, device))
    return LLMEngine.from_engine_args(engine_args, usage_context=UsageContext.LLM_CLASS)


class Worker:
    """vLLM's engine with its calls. All runs in one thread, and requests are admitted between two tokens."""

    def __init__(self, engine: Any, *, adapters: bool, failure: Exception | None = None) -> None:
        """An engine that could not be opened has a `failure`."""
        self._engine = engine
        self._adapters = adapters
        self.failure = failure
        self._adapter: Any = None  # a vLLM LoRARequest, once there is one
        self._rests = False
        self._waiting = dict[str, asyncio.Future[wire.Sampled]]()  # id of a request -> its action
        self._tickets = count()
        self._asked = asyncio.Event()

    async def run(self) -> None:
        """Samples one token after the other of every request under way, until vLLM fails."""
        while not self.failure:
            if not self._waiting:
                self._asked.clear()
                await self._asked.wait()
            for _ in range(_LOOKS):
                await asyncio.sleep(0)  # requests that have come in are read and admitted
            if self._waiting:
                self._advance()

    async def sample(self, requests: Sequence[wire.Draw]) -> wire.Answered:
        """Admits requests together, and waits for all. A caller that is cancelled takes them out again."""
        if self._rests and not self._adapters:
            raise ValueError("the weights were given up for sleep: load some first")
        self._wake("weights", "kv_cache")
        futures = dict[str, asyncio.Future[wire.Sampled]]()
        try:
            for request in requests:
                ticket = str(next(self._tickets))
                self._engine.add_request(ticket, *_in_vllm(request), lora_request=self._adapter)
                futures[ticket] = self._waiting[ticket] = asyncio.get_running_loop().create_future()
            self._asked.set()
            return wire.Answered(actions=await asyncio.gather(*futures.values()))
        finally:
            if unfinished := [ticket for ticket in futures if self._waiting.pop(ticket, None)]:
                self._engine.abort_request(unfinished)

    async def load_weights(self, weights: wire.Weights) -> None:
        """Loads weights or adapters and drops old caches; waits a while for requests whose callers have left."""
        ends = time.monotonic() + _IDLE_S
        while self._waiting:
            if time.monotonic() > ends:
                raise BusyError(f"{len(self._waiting)} requests are under way")
            await asyncio.sleep(_IDLE_S / 100)
        self._wake("weights")  # the cache of the old ones comes back once the new ones need no room beside them
        if self._adapters:
            self._load_adapter(adapter_in(Path(weights.path).resolve()))
        else:
            self._engine.collective_rpc("take_weights", kwargs={"path": weights.path})
        self._wake("kv_cache")
        if not self._engine.reset_prefix_cache():
            raise BusyError("vLLM keeps its prefix cache of the old weights: a request is still running")

    async def call(self, request: wire.Call) -> wire.Results[Any]:
        """What each of vLLM's workers returns for a call of a method of `WorkerExtension`."""
        return wire.Results[Any](results=self._engine.collective_rpc(request.method, kwargs=request.kwargs))

    async def rest(self) -> None:
        """Frees the GPU's memory. Weights beneath adapters move to the machine's; others are given up for new ones."""
        if not self._rests:
            self._engine.sleep(level=1 if self._adapters else 2)
            self._rests = True

    def _wake(self, *parts: str) -> None:
        """Takes the GPU's memory back, part by part; the cache is the last."""
        if self._rests:
            self._engine.wake_up(list(parts))
            self._rests = "kv_cache" not in parts

    def _advance(self) -> None:
        """Samples a token. A failure goes to every waiting call."""
        try:
            outputs = self._engine.step()
        except Exception as error:
            traceback.print_exc()
            self.failure = error
            for action in self._waiting.values():
                action.set_exception(error)
            self._waiting.clear()
            return
        for output in outputs:
            if output.finished:
                self._waiting.pop(output.request_id).set_result(_sampled(output))

    def _load_adapter(self, folder: Path) -> None:
        """Puts a folder's adapters in the place of the last, under a new number: a policy version may come twice."""
        from vllm.lora.request import LoRARequest

        number = self._adapter.lora_int_id + 1 if self._adapter else 1
        self._adapter = LoRARequest(f"adapter {number}", number, str(folder))
        self._engine.add_lora(self._adapter)


def _in_vllm(request: wire.Draw) -> tuple[Any, Any]:
    """A request in vLLM's types: its prompt and how it is sampled."""
    from vllm import SamplingParams, TokensPrompt
    from vllm.sampling_params import RequestOutputKind

    params = SamplingParams(**request.sampling_params.model_dump(), output_kind=RequestOutputKind.FINAL_ONLY)
    return TokensPrompt(prompt_token_ids=request.token_ids), params


def _sampled(output: Any) -> wire.Sampled:
    """The action in an output of vLLM."""
    [completion] = output.outputs
    ids = list(completion.token_ids)
    logprobs = [at[token].logprob for at, token in zip(completion.logprobs, ids, strict=True)]
    return wire.Sampled(ids=ids, logprobs=logprobs)


def create_app(worker: Worker) -> Starlette:
    """The routes of a worker."""

    async def sample(http: HttpRequest) -> wire.Answered:
        """Ends with the caller's connection."""
        sampling = asyncio.ensure_future(worker.sample(wire.Draws.model_validate_json(await http.body()).requests))
        disconnect = asyncio.ensure_future(http.receive())
        await asyncio.wait({sampling, disconnect}, return_when=asyncio.FIRST_COMPLETED)
        disconnect.cancel()
        if not sampling.done():
            sampling.cancel()
            raise ClientDisconnect
        return sampling.result()

    async def call(http: HttpRequest) -> wire.Results[Any]:
        return await worker.call(wire.Call.model_validate_json(await http.body()))

    async def load_weights(http: HttpRequest) -> None:
        await worker.load_weights(wire.Weights.model_validate_json(await http.body()))

    posts = {
        "/collective_rpc": call,
        "/rest": lambda _: worker.rest(),
        "/sample": sample,
        "/weights": load_weights,
    }
    return Starlette(
        routes=[Route(path, _endpoint(worker, answer), methods=["POST"]) for path, answer in posts.items()]
    )


def _endpoint(worker: Worker, answer: Callable[[HttpRequest], Awaitable[BaseModel | None]]) -> Callable[..., Any]:
    """Answers in JSON, and says faults in words."""

    async def endpoint(http: HttpRequest) -> Response:
        try:
            if worker.failure:
                raise worker.failure
            result = await answer(http)
        except BusyError as error:
            return refusal(Refused(str(error), None, 409, "busy"))
        except ValueError as error:
            return refusal(Refused(str(error), None, 400, "bad_request"))
        except Exception as error:
            return refusal(Refused(f"{type(error).__name__}: {error}", None, 500, "failed"))
        return Response(result.model_dump_json() if result else "{}", media_type="application/json")

    return endpoint


def main(launch: wire.Launch, listening: socket.socket) -> None:
    """Opens the engine and answers at a Unix socket until the process is ended, or its parent is."""
    engine = None
    failure = None
    logging.basicConfig(handlers=[logging.NullHandler()])  # hides vLLM's words before it sets up its own handlers
    Thread(target=_end_with_parent, daemon=True).start()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group
    try:
        engine = open_engine(launch)
    except Exception as error:
        failure = error  # the parent hears it as the answer to its first call
    worker = Worker(engine, adapters=bool(launch.adapter_rank), failure=failure)
    # A Unix socket refuses callers at once that find no place to wait.
    config = uvicorn.Config(create_app(worker), http="h11", lifespan="off", log_level="warning", backlog=_CALLERS)

    async def serve() -> None:
        await asyncio.gather(Unsignalled(config).serve([listening]), worker.run())

    asyncio.run(serve())


def _end_with_parent() -> None:
    """Ends the process when the parent's end of its standard input closes."""
    sys.stdin.buffer.read()
    os._exit(0)  # at once: vLLM takes seconds to clean up, and the next engine wants the memory


if __name__ == "__main__":
    gc.disable()  # imports make a million objects that stay: going through them takes a fifth of the start
    main(wire.Launch.model_validate_json(sys.argv[1]), socket.socket(fileno=int(sys.argv[2])))
