"""Texts as unit vectors, by any encoder that transformers can load."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import AutoModel, AutoTokenizer

from agent_r1.params import DenseParams

Vectors = NDArray[np.float32]  # [texts, dimensions], each of length 1


class Encoder:
    """A Hugging Face encoder with its prefixes and its pooling, in float32, on CUDA where there is one."""

    def __init__(self, params: DenseParams) -> None:
        """Loads the model.

        Raises:
            OSError: there is no such folder or hub id.
            ValueError: texts of `max_tokens` are longer than the encoder can read.
        """
        self._params = params
        self._tokenizer = AutoTokenizer.from_pretrained(params.encoder)
        if params.max_tokens > self._tokenizer.model_max_length:
            raise ValueError(
                f"search.dense.max_tokens {params.max_tokens} is more than encoder {params.encoder} reads; "
                f"lower it to {self._tokenizer.model_max_length}"
            )
        self._device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self._model = AutoModel.from_pretrained(params.encoder, dtype=torch.float32).eval().to(self._device)

    def passages(self, texts: Sequence[str]) -> Vectors:
        """The vectors of passages, encoded with others of about their length: padding costs as much as text."""
        prefixed = [self._params.passage_prefix + text for text in texts]
        order = sorted(range(len(texts)), key=lambda i: len(prefixed[i]))
        size = self._params.batch_size
        batches = [order[start : start + size] for start in range(0, len(order), size)]
        encoded = np.concatenate([self._encode([prefixed[i] for i in batch]) for batch in batches])
        vectors = np.empty_like(encoded)
        vectors[order] = encoded
        return vectors

    def query(self, text: str) -> Vectors:
        """[1, dimensions] of one query, alone: its last bits would depend on the padding of a batch."""
        return self._encode([self._params.query_prefix + text])

    @torch.no_grad()
    def _encode(self, texts: Sequence[str]) -> Vectors:
        inputs = self._tokenizer(
            list(texts), padding=True, truncation=True, max_length=self._params.max_tokens, return_tensors="pt"
        ).to(self._device)
        hidden = self._model(**inputs).last_hidden_state
        pooled = hidden[:, 0] if self._params.pooling == "cls" else _mean(hidden, inputs["attention_mask"])
        vectors: Any = torch.nn.functional.normalize(pooled, dim=-1).cpu().numpy()
        return np.asarray(vectors, np.float32)


def _mean(hidden: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """The mean over the tokens that are no padding: hidden [B, T, D], mask [B, T] -> [B, D]."""
    weights = mask[..., None].to(hidden.dtype)
    return (hidden * weights).sum(1) / weights.sum(1)
