"""What should fit into a GPU of 24 GiB, by the estimate that checks trainings: `python -m benchmarks.memory`."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from agent_r1.learn.memory import Demand, estimate
from agent_r1.params.stages import LoraParams
from benchmarks.stored import Row, options, show
from benchmarks.synthetic import SHAPES, config_of

SIZES = ("0.5B", "1.5B", "3B")
CARD_GIB = 24
TOKENS = 4096  # of a micro-batch
LORA = LoraParams(rank=64, alpha=32, targets=["all-linear"])
SET: dict[str, dict[str, Any]] = {
    "all weights": {},
    "and `engine.vllm.sleep`": {"sampler_sleeps": True},
    "and `learner.optimizer_offload`": {"sampler_sleeps": True, "optimizer_offload": True},
    "adapters": {"adapter": LORA},
    "adapters and `engine.vllm.sleep`": {"adapter": LORA, "sampler_sleeps": True},
}


def row(size: str) -> Row:
    """GiB at the peak of an update without a critic, in bfloat16 with gradient checkpointing, by what is set."""
    demand = Demand(
        model=config_of(SHAPES[size], TOKENS),
        tokens=TOKENS,
        device="cuda",
        dtype=torch.bfloat16,
        gradient_checkpointing=True,
        sampler_gib=0.4 * CARD_GIB,  # the default of engine.vllm.gpu_memory_utilization
    )
    needed = {name: sum(estimate(replace(demand, **changes)).values()) for name, changes in SET.items()}
    return {"Qwen2.5": size, "GPU": f"{CARD_GIB} GiB"} | {name: f"{gib:.1f} GiB" for name, gib in needed.items()}


def main() -> None:
    parser = options("Says what should fit into a GPU of 24 GiB.")
    show("memory", [*map(row, SIZES)], store=parser.parse_args().store)


if __name__ == "__main__":
    main()
