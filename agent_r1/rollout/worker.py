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
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from agent_r1.params.stages import VllmParams
from agent_r1.rollout.sampling import Actor
from agent_r1.rollout.vllm_engine import adapter_options, model_options, read_shape, sampling_options


class WorkerExtension:
    """An extension of vLLM's worker, called by name through `collective_rpc`."""

    model_runner: Any
    model_config: Any

    def refresh_embeddings(self) -> None:
        """Drops what was derived from the old embeddings: on a CPU a tied output layer would go on using them."""
        from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding

        for module in self.model_runner.get_model().modules():
            if isinstance(module, VocabParallelEmbedding):
                module.quant_method.process_weights_after_loading(module)

    def describe(self) -> dict[str, Any]:
        """The model's shape and limits, in JSON's types: see `agent_r1.rollout.vllm_engine.read_shape`."""
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

        cuda = torch.cuda.is_available()
        if not cuda:
            torch._dynamo.config.disable = True
        options = model_options(settings, model=actor.model, max_tokens=actor.max_tokens, dtype=actor.dtype, cuda=cuda)
        self._actor = actor
        self._llm = LLM(**options, **adapter_options(actor.adapter_rank))
        self._adapter: Any = None  # what vLLM calls a LoRARequest, once there is one

    def sample(self, requests: Sequence[tuple[list[int], int, int]]) -> list[tuple[list[int], list[float]]]:
        """Ids and logprobs of one action per (context, seed, max_tokens)."""
        from vllm import SamplingParams, TokensPrompt

        options = sampling_options(self._actor)
        params = [SamplingParams(**options, seed=seed, max_tokens=max_tokens) for _, seed, max_tokens in requests]
        prompts = [TokensPrompt(prompt_token_ids=context) for context, _, _ in requests]
        outputs = self._llm.generate(prompts, params, use_tqdm=False, lora_request=self._adapter)
        return [_sampled(output.outputs[0]) for output in outputs]

    def load_weights(self, folder: str) -> None:
        """Takes the weights of a Hugging Face folder, or its adapters, and forgets all that came of the old ones."""
        if self._actor.adapter_rank:
            self._load_adapter(Path(folder).resolve() / "adapter")
        else:
            self._llm.collective_rpc("reload_weights", kwargs={"weights_path": folder})
            self._llm.collective_rpc("refresh_embeddings")
        assert self._llm.reset_prefix_cache(), "the prefix cache is in use"

    def _load_adapter(self, folder: Path) -> None:
        """Puts the adapters of a folder in the place of the last ones: there is room for one, and each has its number.

        A number of its own, because a policy version comes twice where a training goes back.
        """
        from vllm.lora.request import LoRARequest

        number = self._adapter.lora_int_id + 1 if self._adapter else 1
        self._adapter = LoRARequest(f"adapter {number}", number, str(folder))
        self._llm.llm_engine.add_lora(self._adapter)


def _sampled(completion: Any) -> tuple[list[int], list[float]]:
    ids = list(completion.token_ids)
    return ids, [position[token].logprob for position, token in zip(completion.logprobs, ids, strict=True)]


def serve(connection: Connection) -> None:
    """Answers calls until the other end closes. A failure is answered by its traceback."""
    try:
        worker = Worker(*connection.recv())
        calls: dict[str, Callable[[Any], Any]] = {"sample": worker.sample, "load_weights": worker.load_weights}
        connection.send((True, None))
        while True:
            name, argument = connection.recv()
            connection.send((True, calls[name](argument)))
    except (EOFError, ConnectionError):
        return
    except Exception:
        connection.send((False, traceback.format_exc()))


if __name__ == "__main__":
    logging.basicConfig(handlers=[logging.NullHandler()])  # or vLLM's first words, before it sets up its own, are shown
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the parent closes the pipe
    serve(Connection(int(sys.argv[1])))
    os._exit(0)  # at once: vLLM takes seconds to clean up, and the next engine wants the memory
