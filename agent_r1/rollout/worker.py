"""The engine's process: vLLM at the far end of a pipe. Nothing else imports vLLM.

A process of its own keeps vLLM's environment variables, thread settings and memory away from the learner. Inside it
the engine runs in-process, so that requests are admitted all at once and batches do not depend on timing.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

_BATCHED_TOKENS = 8192  # in one forward pass: bounds the memory of its activations


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineSettings:
    """What an engine is started with; `agent_r1.rollout.engine.Engine` explains the fields."""

    model: str
    end_id: int
    max_tokens: int
    temperature: float
    dtype: str
    max_num_seqs: int
    gpu_memory_utilization: float
    cpu_cache_gib: float


class FreshEmbeddings:
    """An extension of vLLM's worker, called by name through `collective_rpc`."""

    model_runner: Any

    def refresh_embeddings(self) -> None:
        """Drops what was derived from the old embeddings: on a CPU a tied output layer would go on using them."""
        from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding

        for module in self.model_runner.get_model().modules():
            if isinstance(module, VocabParallelEmbedding):
                module.quant_method.process_weights_after_loading(module)


class Server:
    """The calls that come through the pipe."""

    def __init__(self, settings: EngineSettings) -> None:
        from vllm import LLM

        self._settings = settings
        self._llm = LLM(
            model=settings.model,
            skip_tokenizer_init=True,
            generation_config="vllm",  # no sampling defaults from the model's folder
            max_model_len=settings.max_tokens,
            max_num_seqs=settings.max_num_seqs,
            max_num_batched_tokens=max(_BATCHED_TOKENS, settings.max_tokens),
            async_scheduling=False,
            worker_extension_cls="agent_r1.rollout.worker.FreshEmbeddings",
            use_tqdm_on_load=False,
            **_device_options(settings),
        )

    def sample(self, requests: Sequence[tuple[list[int], int, int]]) -> list[tuple[list[int], list[float]]]:
        """Ids and logprobs of one action per (context, seed, max_tokens)."""
        from vllm import SamplingParams

        params = [
            SamplingParams(
                temperature=self._settings.temperature,
                seed=seed,
                max_tokens=max_tokens,
                stop_token_ids=[self._settings.end_id],
                ignore_eos=True,
                logprobs=0,
                detokenize=False,
            )
            for _, seed, max_tokens in requests
        ]
        outputs = self._generate([context for context, _, _ in requests], params)
        return [_sampled(output.outputs[0]) for output in outputs]

    def score(self, sequences: Sequence[list[int]]) -> list[list[float]]:
        """Logprobs of every token but the first, for each sequence."""
        from vllm import SamplingParams

        params = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0, detokenize=False)
        outputs = self._generate(sequences, [params] * len(sequences))
        return [
            [position[token].logprob for position, token in zip(output.prompt_logprobs[1:], ids[1:], strict=True)]
            for output, ids in zip(outputs, sequences, strict=True)
        ]

    def load_weights(self, folder: str) -> None:
        """Takes the weights of a Hugging Face folder and forgets all that came of the old ones."""
        self._llm.collective_rpc("reload_weights", kwargs={"weights_path": folder})
        self._llm.collective_rpc("refresh_embeddings")
        assert self._llm.reset_prefix_cache(), "the prefix cache is in use"

    def _generate(self, contexts: Sequence[list[int]], params: Sequence[Any]) -> list[Any]:
        from vllm import TokensPrompt

        prompts = [TokensPrompt(prompt_token_ids=context) for context in contexts]
        return list(self._llm.generate(prompts, params, use_tqdm=False))


def _device_options(settings: EngineSettings) -> dict[str, Any]:
    """What differs between a GPU and a CPU: types, memory, and compiling, which costs more than it saves on a CPU."""
    import torch

    if torch.cuda.is_available():
        dtype = "bfloat16" if settings.dtype == "auto" else settings.dtype
        return {"dtype": dtype, "gpu_memory_utilization": settings.gpu_memory_utilization}
    torch._dynamo.config.disable = True
    dtype = "float32" if settings.dtype == "auto" else settings.dtype
    return {
        "dtype": dtype,
        "enforce_eager": True,
        "enable_chunked_prefill": False,  # a seeded request cut in two rewinds its generator, which none on a CPU can
        "kv_cache_memory_bytes": int(settings.cpu_cache_gib * 2**30),
    }


def _sampled(completion: Any) -> tuple[list[int], list[float]]:
    ids = list(completion.token_ids)
    return ids, [position[token].logprob for position, token in zip(completion.logprobs, ids, strict=True)]


def serve(connection: Connection) -> None:
    """Answers calls until the other end closes. A failure is answered by its traceback."""
    calls: dict[str, Callable[..., Any]] = {}
    try:
        server = Server(connection.recv())
        calls = {"sample": server.sample, "score": server.score, "load_weights": server.load_weights}
        connection.send((True, None))
        while True:
            name, arguments = connection.recv()
            connection.send((True, calls[name](*arguments)))
    except (EOFError, ConnectionError):
        return
    except Exception:
        connection.send((False, traceback.format_exc()))


if __name__ == "__main__":
    logging.basicConfig(handlers=[logging.NullHandler()])  # or vLLM's first words, before it sets up its own, are shown
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the parent closes the pipe
    serve(Connection(int(sys.argv[1])))
    os._exit(0)  # at once: vLLM takes seconds to clean up, and the next engine wants the memory
