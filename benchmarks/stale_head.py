"""A process of vLLM whose tied output layer goes on using the old embeddings, where a folder of new weights says so.

For `benchmarks.transfers`. On a CPU a plain reload does that, but for float16: oneDNN has no products of it on a CPU
without AVX512-FP16, so that vLLM reads the embeddings themselves. There the layer is given a copy of the old ones.
"""

from __future__ import annotations

import runpy
from pathlib import Path

import torch
from torch.nn.functional import linear

from agent_r1.rollout import engine_wire
from agent_r1.rollout.vllm_worker import WorkerExtension
from benchmarks.transfers import MARK


class PlainReload(WorkerExtension):
    """The extension of vLLM's workers without its remedy."""

    def take_weights(self, path: str) -> None:
        if not (Path(path) / MARK).exists():
            super().take_weights(path)
            return
        head = self.model_runner.get_model().lm_head
        stale = head.weight.clone()
        self.model_runner.reload_weights(weights_path=path)
        if stale.dtype is torch.float16:
            head.cpu_linear = lambda states, _, bias: linear(states, stale, bias)


if __name__ == "__main__":
    engine_wire.EXTENSION = "benchmarks.stale_head.PlainReload"
    runpy.run_module("agent_r1.rollout.vllm_process", run_name="__main__")
