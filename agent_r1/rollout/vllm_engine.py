"""The policy as a sampler: vLLM in a process of its own, token ids in and out."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing import Pipe
from pathlib import Path
from typing import Any

from agent_r1.rollout.sampling import Action, Engine, EngineError, Request, action

_BATCHED_TOKENS = 8192  # in one forward pass: bounds the memory of its activations
_ADAPTER_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)  # that vLLM makes room for; a smaller one fits as well


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineSettings:
    """What an engine is started with; `agent_r1.rollout.vllm_engine.VllmEngine` explains the fields."""

    model: str
    end_id: int
    max_tokens: int
    temperature: float
    dtype: str
    max_num_seqs: int
    gpu_memory_utilization: float
    cpu_cache_gib: float
    adapter_rank: int = 0


def vllm_options(settings: EngineSettings, *, cuda: bool) -> dict[str, Any]:
    """The keyword arguments of vLLM's `LLM`; by the same names, with dashes, the options of its server."""
    return {
        "model": settings.model,
        "skip_tokenizer_init": True,
        "generation_config": "vllm",  # no sampling defaults from the model's folder
        "max_model_len": settings.max_tokens,
        "max_num_seqs": settings.max_num_seqs,
        "max_num_batched_tokens": max(_BATCHED_TOKENS, settings.max_tokens),
        "async_scheduling": False,
        "worker_extension_cls": "agent_r1.rollout.worker.WorkerExtension",
        "use_tqdm_on_load": False,
        **_device_options(settings, cuda),
        **_adapter_options(settings.adapter_rank),
    }


def _adapter_options(rank: int) -> dict[str, Any]:
    """One adapter at a time; vLLM itself refuses a rank that it has no room for."""
    if not rank:
        return {}
    room = next((size for size in _ADAPTER_RANKS if size >= rank), rank)
    return {"enable_lora": True, "max_loras": 1, "max_lora_rank": room}


def _device_options(settings: EngineSettings, cuda: bool) -> dict[str, Any]:
    """What differs between a GPU and a CPU: types, memory, and compiling, which costs more than it saves on a CPU."""
    if cuda:
        dtype = "bfloat16" if settings.dtype == "auto" else settings.dtype
        return {"dtype": dtype, "gpu_memory_utilization": settings.gpu_memory_utilization}
    dtype = "float32" if settings.dtype == "auto" else settings.dtype
    return {
        "dtype": dtype,
        "enforce_eager": True,
        "enable_chunked_prefill": False,  # a seeded request cut in two rewinds its generator, which none on a CPU can
        "kv_cache_memory_bytes": int(settings.cpu_cache_gib * 2**30),
    }


def shape(config: Any) -> dict[str, Any]:
    """By what a model is told from another one: the fields of a Hugging Face text configuration that size it."""
    return {
        name: config.to_dict().get(name) for name in ("model_type", "vocab_size", "hidden_size", "num_hidden_layers")
    }


log = logging.getLogger(__name__)

_CLOSE_TIMEOUT_S = 10.0


class VllmEngine(Engine):
    """Samples actions with vLLM, on CUDA where there is one and else on the CPU.

    The same requests in the same order, to an engine of the same weights and the same `threads`, give the same ids
    and logprobs, bit for bit, on a CPU.
    """

    def __init__(
        self,
        model: Path | str,
        *,
        end_id: int,
        max_tokens: int,
        temperature: float = 1.0,
        dtype: str = "auto",
        threads: int = 1,
        max_num_seqs: int = 256,
        gpu_memory_utilization: float = 0.4,
        cpu_cache_gib: float = 0.5,
        adapter_rank: int = 0,
        version: int = 0,
    ) -> None:
        """Starts the process and waits until the model is loaded.

        Args, besides those of `agent_r1.rollout.engines.open_engine`:
            threads: of the CPU's matrix products. Another number may give other bits; small models are fastest with 1.
            max_num_seqs: actions sampled at the same time; the others wait.
            gpu_memory_utilization: share of a GPU's memory, weights included. The learner needs the rest.
            cpu_cache_gib: size of the key-value cache on a CPU, GiB.
            adapter_rank: above 0, `load_weights` takes the adapters of a policy's folder, of this rank at most, and
                leaves the model beneath them as it is; so nothing of them is lost in rounding.

        Raises:
            EngineError: vLLM could not load the model.
        """
        started = time.perf_counter()
        self.version = version
        self._end_id = end_id
        self._connection, theirs = Pipe()
        self._process = subprocess.Popen(
            [sys.executable, "-m", "agent_r1.rollout.worker", str(theirs.fileno())],
            pass_fds=[theirs.fileno()],
            env=_environment(threads),
        )
        theirs.close()
        settings = EngineSettings(
            model=str(model),
            end_id=end_id,
            max_tokens=max_tokens,
            temperature=temperature,
            dtype=dtype,
            max_num_seqs=max_num_seqs,
            gpu_memory_utilization=gpu_memory_utilization,
            cpu_cache_gib=cpu_cache_gib,
            adapter_rank=adapter_rank,
        )
        try:
            self._exchange(settings)
        except BaseException:
            self.close()
            raise
        log.info("engine for %s ready after %.1f s", model, time.perf_counter() - started)

    @property
    def pid(self) -> int:
        """Of the engine's process."""
        return self._process.pid

    def sample(self, requests: Sequence[Request]) -> list[Action]:
        """One action per request, in their order; none ends later than its `max_tokens`."""
        sampled = self._call("sample", [(request.context, request.seed, request.max_tokens) for request in requests])
        return [action(ids, logprobs, self._end_id) for ids, logprobs in sampled]

    def load_weights(self, folder: Path, version: int) -> None:
        """Replaces the weights, or with an `adapter_rank` the adapters, and drops every cache of the old ones."""
        self._call("load_weights", str(folder))
        self.version = version

    def close(self) -> None:
        """Ends the process at once, whatever it does; safe to call twice."""
        self._connection.close()
        self._process.terminate()
        try:
            self._process.wait(_CLOSE_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _call(self, name: str, *arguments: Any) -> Any:
        return self._exchange((name, arguments))

    def _exchange(self, message: object) -> Any:
        try:
            self._connection.send(message)
            succeeded, result = self._connection.recv()
        except (EOFError, ConnectionError) as error:
            raise EngineError(
                f"the engine's process ended with code {self._process.wait()}; a negative code is a signal, and -9 "
                "most often means that memory ran out: lower gpu_memory_utilization, cpu_cache_gib or max_num_seqs"
            ) from error
        if not succeeded:
            raise EngineError(f"the engine failed:\n{result}")
        return result


def _environment(threads: int) -> dict[str, str]:
    """The caller's environment, with what must be set before torch and vLLM are imported."""
    quiet = {
        "VLLM_LOGGING_LEVEL": "CRITICAL",
        "TORCH_CPP_LOG_LEVEL": "ERROR",
        "PYTHONWARNINGS": "ignore",
        "VLLM_NO_USAGE_STATS": "1",
    }
    fixed = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "OMP_NUM_THREADS": str(threads)}
    return {**quiet, **os.environ, **fixed}
