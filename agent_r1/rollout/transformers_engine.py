"""The policy as a sampler with transformers alone, in this process: for machines without vLLM."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from agent_r1.rollout.decoding import decode, draws
from agent_r1.rollout.sampling import Action, Engine, EngineError, Request, action


class TransformersEngine(Engine):
    """Samples actions in batches, on CUDA where there is one and else on the CPU, with the threads of this process.

    The same requests to an engine of the same weights, threads and `batch_size` give the same ids and logprobs, bit
    for bit, on a CPU. In other company a request gives the same but for the rounding of matrix products.
    """

    def __init__(
        self,
        model: Path | str,
        *,
        end_id: int,
        max_tokens: int,
        temperature: float = 1.0,
        dtype: str = "auto",
        batch_size: int = 64,
        version: int = 0,
    ) -> None:
        """Loads the model.

        Args, besides those of `agent_r1.rollout.engines.open_engine`:
            batch_size: actions sampled at the same time; each holds keys and values of its whole context.

        Raises:
            EngineError: there is no model at `model`, some of its weights are missing, or it reads fewer tokens.
        """
        cuda = torch.cuda.is_available()
        self._device = torch.device("cuda" if cuda else "cpu")
        self._dtype = torch.bfloat16 if dtype == "bfloat16" or (dtype == "auto" and cuda) else torch.float32
        self._end_id, self._temperature, self._batch_size = end_id, temperature, batch_size
        self._model = self._load(model)
        self.version = version
        window = self._model.config.get_text_config().max_position_embeddings
        if window < max_tokens:
            raise EngineError(f"{model} reads {window} tokens at most; lower env.max_tokens, which is {max_tokens}")

    def sample(self, requests: Sequence[Request]) -> list[Action]:
        """One action per request, in their order; none ends later than its `max_tokens`."""
        by_length = sorted(range(len(requests)), key=lambda index: len(requests[index].context))  # little padding
        found: dict[int, Action] = {}
        for start in range(0, len(requests), self._batch_size):
            batch = by_length[start : start + self._batch_size]
            found |= zip(batch, self._act([requests[index] for index in batch]), strict=True)
        return [found[index] for index in range(len(requests))]

    def load_weights(self, folder: Path, version: int) -> None:
        """Replaces the model by the one in a Hugging Face folder; no cache outlives a call of `sample`."""
        del self._model  # before there is another: one may be all that fits
        self._model = self._load(folder)
        self.version = version

    def close(self) -> None:
        """There is nothing but memory to give back, and that goes with the engine."""

    def _act(self, requests: Sequence[Request]) -> list[Action]:
        actions = decode(
            self._model,
            [request.context for request in requests],
            [draws(request.seed, request.max_tokens) for request in requests],
            end_id=self._end_id,
            temperature=self._temperature,
        )
        return [action(ids, logprobs, self._end_id) for ids, logprobs in actions]

    def _load(self, path: Path | str) -> PreTrainedModel:
        try:
            found: Any = AutoModelForCausalLM.from_pretrained(
                path, dtype=self._dtype, attn_implementation="sdpa", output_loading_info=True
            )
        except (OSError, ValueError) as error:
            raise EngineError(f"no model can be loaded from {str(path)!r}: {error}") from error
        model, loaded = found  # a pair, where the loading info is asked for
        if loaded["missing_keys"]:
            raise EngineError(f"{path} lacks weights of its model: {', '.join(sorted(loaded['missing_keys']))}")
        for parameter in model.parameters():  # out of the mapped file: its alignment would change the last bits
            parameter.data = parameter.data.clone(memory_format=torch.contiguous_format)
        settled: PreTrainedModel = model.to(self._device).eval()
        return settled
