"""A process of vLLM that takes new weights as vLLM itself does, where their folder says so: for `benchmarks.transfers`.

On a CPU its tied output layer then goes on using the old embeddings.
"""

from __future__ import annotations

import runpy
from pathlib import Path

from agent_r1.rollout import engine_wire
from agent_r1.rollout.vllm_worker import WorkerExtension
from benchmarks.transfers import MARK


class PlainReload(WorkerExtension):
    """The extension of vLLM's workers without its remedy."""

    def take_weights(self, path: str) -> None:
        if (Path(path) / MARK).exists():
            self.model_runner.reload_weights(weights_path=path)
        else:
            super().take_weights(path)


if __name__ == "__main__":
    engine_wire.EXTENSION = "benchmarks.stale_head.PlainReload"
    runpy.run_module("agent_r1.rollout.vllm_process", run_name="__main__")
