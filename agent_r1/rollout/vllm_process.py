"""vLLM in a process of its own: how it is set up, and the calls that come through the pipe of `VllmEngine`.

The process runs this file, and it alone imports vLLM: its environment variables, threads and memory stay away from the
learner's. vLLM's engine runs in the process itself, so that the requests of a round are admitted all at once and
batches do not depend on timing; single requests are admitted at the next token.
"""

from __future__ import annotations

import gc
import logging
import os
import signal
import sys
import traceback
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from queue import SimpleQueue
from threading import Thread
from typing import Any

from agent_r1.params.places import adapter_in
from agent_r1.params.stages import VllmParams
from agent_r1.rollout.sampling import Action, Actor, EngineError, Request

DONE, ARRIVED, FAILED = "done", "arrived", "failed"  # kinds of messages from the process

_BATCHED_TOKENS = 8192  # in one forward pass: bounds the memory of its activations
_ADAPTER_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)  # vLLM makes room for these; a smaller rank fits as well


def model_options(settings: VllmParams, *, model: str, max_tokens: int, dtype: str, cuda: bool) -> dict[str, Any]:
    """The keyword arguments of vLLM's `LLM`; with dashes, the options of its server.

    On a CPU nothing is compiled: that costs more there than it saves.
    """
    common = {
        "model": model,
        "skip_tokenizer_init": True,
        "trust_remote_code": False,
        "generation_config": "vllm",  # no sampling defaults from the model's folder
        "max_model_len": max_tokens,
        "tensor_parallel_size": settings.tensor_parallel_size,
        "max_num_seqs": settings.max_num_seqs,
        "max_num_batched_tokens": max(_BATCHED_TOKENS, max_tokens),
        "async_scheduling": False,
        "worker_extension_cls": "agent_r1.rollout.vllm_process.WorkerExtension",
        "use_tqdm_on_load": False,
    }
    if cuda:
        dtype = "bfloat16" if dtype == "auto" else dtype
        return {**common, "dtype": dtype, "gpu_memory_utilization": settings.gpu_memory_utilization}
    return {
        **common,
        "dtype": "float32" if dtype == "auto" else dtype,
        "enforce_eager": True,
        "enable_chunked_prefill": False,  # a seeded request cut in two rewinds its generator, which none on a CPU can
        "kv_cache_memory_bytes": int(settings.cpu_cache_gib * 2**30),
    }


def sampling_options(actor: Actor, request: Request) -> dict[str, Any]:
    """The fields of vLLM's `SamplingParams` for a request."""
    return {
        "seed": request.seed,
        "max_tokens": request.max_tokens,
        "temperature": 0.0 if request.greedy else actor.temperature,
        "stop_token_ids": [actor.end_id],
        "ignore_eos": True,
        "logprobs": 0,
        "detokenize": False,
    }


def read_shape(config: Any) -> dict[str, Any]:
    """The fields of a Hugging Face text configuration that size a model and tell models apart."""
    fields = config.to_dict()
    return {name: fields.get(name) for name in ("model_type", "vocab_size", "hidden_size", "num_hidden_layers")}


class WorkerExtension:
    """An extension of vLLM's worker, called by name through `collective_rpc`."""

    model_runner: Any
    model_config: Any

    def refresh_embeddings(self) -> None:
        """Derives the output layers anew: on a CPU a tied one would go on using the old embeddings."""
        from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding

        for module in self.model_runner.get_model().modules():
            if isinstance(module, VocabParallelEmbedding):
                module.quant_method.process_weights_after_loading(module)

    def describe(self) -> dict[str, Any]:
        """The model's shape and limits, in JSON's types: see `read_shape`."""
        return {
            **read_shape(self.model_config.hf_text_config),
            "max_tokens": self.model_config.max_model_len,
            "dtype": str(self.model_config.dtype).removeprefix("torch."),
        }


class Worker:
    """The calls that come through the pipe."""

    def __init__(self, settings: VllmParams, actor: Actor) -> None:
        import torch
        from vllm import LLM

        gc.freeze()  # vLLM itself looks for garbage several times as it starts
        gc.enable()
        cuda = torch.cuda.is_available()
        if not cuda:
            torch._dynamo.config.disable = True
        options = model_options(settings, model=actor.model, max_tokens=actor.max_tokens, dtype=actor.dtype, cuda=cuda)
        if rank := actor.adapter_rank:
            room = next((size for size in _ADAPTER_RANKS if size >= rank), rank)  # else vLLM itself refuses the rank
            options |= {"enable_lora": True, "max_loras": 1, "max_lora_rank": room}
        if cuda and settings.sleep:
            options["enable_sleep_mode"] = True
        self._actor = actor
        self._llm = LLM(**options)
        self._adapter: Any = None  # a vLLM LoRARequest, once there is one
        self._rests = False

    def rest(self, _: None) -> None:
        """Frees the GPU's memory. The weights move to the machine's: the next call may bring no new ones."""
        if not self._rests:
            self._llm.sleep(level=1)
            self._rests = True

    def wake(self) -> None:
        """Takes the GPU's memory back, before sampling or loading."""
        if self._rests:
            self._llm.wake_up()
            self._rests = False

    def sample(self, requests: Sequence[Request]) -> list[Action]:
        self.wake()
        asked = [self._asked(request) for request in requests]
        prompts, params = [prompt for prompt, _ in asked], [params for _, params in asked]
        outputs = self._llm.generate(prompts, params, use_tqdm=False, lora_request=self._adapter)
        return [self._action(output) for output in outputs]

    def arrive(self, ticket: int, request: Request) -> None:
        """Hands a request to vLLM, which takes it in at its next token."""
        self.wake()
        self.engine.add_request(str(ticket), *self._asked(request), lora_request=self._adapter)

    def advance(self) -> list[tuple[int, Action]]:
        """Samples one token of every request under way; gives the tickets and actions of the finished ones."""
        return [(int(output.request_id), self._action(output)) for output in self.engine.step() if output.finished]

    @property
    def engine(self) -> Any:
        """The engine inside vLLM's `LLM`."""
        return self._llm.llm_engine

    def _asked(self, request: Request) -> tuple[Any, Any]:
        """A request in vLLM's types."""
        from vllm import SamplingParams, TokensPrompt
        from vllm.sampling_params import RequestOutputKind

        options = sampling_options(self._actor, request)
        params = SamplingParams(**options, output_kind=RequestOutputKind.FINAL_ONLY)
        return TokensPrompt(prompt_token_ids=request.context), params

    def _action(self, output: Any) -> Action:
        [completion] = output.outputs
        ids = list(completion.token_ids)
        logprobs = [position[token].logprob for position, token in zip(completion.logprobs, ids, strict=True)]
        return Action.of(ids, logprobs, self._actor.end_id)

    def load_weights(self, folder: str) -> None:
        """Loads the weights of a Hugging Face folder, or its adapters, and drops the caches of the old ones."""
        self.wake()
        if self._actor.adapter_rank:
            self._load_adapter(adapter_in(Path(folder).resolve()))
        else:
            self._llm.collective_rpc("reload_weights", kwargs={"weights_path": folder})
            self._llm.collective_rpc("refresh_embeddings")
        if not self._llm.reset_prefix_cache():
            raise EngineError("vLLM keeps its prefix cache of the old weights: a request is still running")

    def _load_adapter(self, folder: Path) -> None:
        """Puts the adapters of a folder in the place of the last ones, under a number of their own.

        The policy version is no such number: it comes twice where a training goes back.
        """
        from vllm.lora.request import LoRARequest

        number = self._adapter.lora_int_id + 1 if self._adapter else 1
        self._adapter = LoRARequest(f"adapter {number}", number, str(folder))
        self.engine.add_lora(self._adapter)


def serve(connection: Connection) -> None:
    """Answers calls, and requests as they arrive, until the other end closes. A failure sends its traceback."""
    try:
        worker = Worker(*connection.recv())
        calls: dict[str, Callable[[Any], Any]] = {
            "sample": worker.sample,
            "load_weights": worker.load_weights,
            "rest": worker.rest,
        }
        connection.send((DONE, None))
        inbox: SimpleQueue[Any] = SimpleQueue()
        Thread(target=_listen, args=(connection, inbox), daemon=True).start()
        while True:
            while not worker.engine.has_unfinished_requests() or not inbox.empty():
                match inbox.get():
                    case None:
                        return
                    case "arrive", ticket, request:
                        worker.arrive(ticket, request)
                    case "abort", ticket:
                        worker.engine.abort_request([str(ticket)])  # unless it was answered
                    case name, argument:
                        connection.send((DONE, calls[name](argument)))
            if actions := worker.advance():
                connection.send((ARRIVED, actions))
    except (EOFError, ConnectionError):
        return
    except Exception:
        connection.send((FAILED, traceback.format_exc()))


def _listen(connection: Connection, inbox: SimpleQueue[Any]) -> None:
    """Reads messages as they come, so that the two ends never wait for each other to read. None is the last."""
    try:
        while True:
            inbox.put(connection.recv())
    except (EOFError, ConnectionError):
        return
    finally:
        inbox.put(None)


if __name__ == "__main__":
    logging.basicConfig(
        handlers=[logging.NullHandler()]
    )  # hides vLLM's first words, before it sets up its own handlers
    gc.disable()  # imports make a million objects that stay: going through them takes a fifth of the start
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the parent closes the pipe
    serve(Connection(int(sys.argv[1])))
    os._exit(0)  # at once: vLLM takes seconds to clean up, and the next engine wants the memory
