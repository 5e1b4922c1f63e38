"""What updates take of a GPU's memory, counted without one: `python -m benchmarks.pretended benchmarks.counted`.

The measurement that opens a training runs whole, on tensors that have a shape alone, and the bytes that live at once
are counted. CUDA's workspaces and gaps that its allocator cannot fill are not among them.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel, Qwen2Config

from agent_r1.learn import builtin, memory
from agent_r1.learn.learner import Learner, Options
from agent_r1.learn.model import PACKED as PACKED_ATTENTION
from benchmarks import pretended_tensors
from benchmarks.pretended_tensors import META
from benchmarks.stored import Row, options, show
from benchmarks.synthetic import SHAPES, config_of, shipped_with

PACKED, LORA = {"packing": True}, {"lora": {"rank": 64}}
RECOMPUTED = {"gradient_checkpointing": True}
CASES: list[tuple[str, str, int, dict[str, Any]]] = [  # size, what trains, tokens of a micro-batch, changes of `model`
    ("0.5B", "all weights", 4096, {}),
    ("0.5B", "all weights, packed", 4096, PACKED),
    ("0.5B", "all weights, gradient checkpointing", 4096, RECOMPUTED),
    ("0.5B", "adapters", 4096, LORA),
    ("3B", "all weights, gradient checkpointing", 4096, RECOMPUTED),
    ("3B", "adapters, packed", 4096, LORA | PACKED),
    ("3B", "adapters, gradient checkpointing", 2048, LORA | RECOMPUTED),
    ("7B", "adapters, gradient checkpointing", 8192, LORA | RECOMPUTED),
    ("7B", "all weights, packed, gradient checkpointing", 4096, PACKED | RECOMPUTED),
]
CONTEXT = 1024  # tokens of the longest


def config_at(size: str, layers: int = 0) -> Qwen2Config:
    """The configuration of a size, with other `layers` if named."""
    hidden, depth, *rest = SHAPES[size]
    return config_of((hidden, layers or depth, *rest), CONTEXT)


def demand_of(size: str, tokens: int, changes: dict[str, Any], layers: int = 0) -> memory.Demand:
    """The demand of a case, without a critic."""
    model = shipped_with({"model": changes}).model
    return memory.Demand(
        model=config_at(size, layers),
        tokens=tokens,
        device="cuda",
        dtype=torch.bfloat16,
        adapter=model.adapter,
        gradient_checkpointing=model.gradient_checkpointing,
    )


def count(demand: memory.Demand, changes: dict[str, Any]) -> float:
    """GiB that live at the peak of an update."""
    settings, device = shipped_with({"model": changes}), torch.device("cuda")
    update = settings.train.update.model_copy(update={"max_tokens_per_microbatch": demand.tokens})
    tokenizer = builtin.train_tokenizer(["a question and an answer"], 400)

    def load_policy(
        path: Path, dtype: torch.dtype, device: torch.device, *, packed: bool, waits: bool
    ) -> PreTrainedModel:
        with META:
            model = AutoModelForCausalLM.from_config(demand.model, dtype=dtype, attn_implementation="sdpa")
        model.to(device).eval()
        if packed:
            model.set_attn_implementation(PACKED_ATTENTION)
        return model

    loaders = {"load_policy": load_policy, "load_tokenizer": lambda path: tokenizer, "model_hash": lambda path: ""}
    with mock.patch.multiple("agent_r1.learn.learner", **loaders):
        options = Options(device=device)
        learner = Learner("", update, settings.model, with_critic=False, seed=0, options=options)
    return memory.measure(learner, settings.env.model_copy(update={"max_tokens": CONTEXT}))


def rows(chosen: str, layers: int) -> Iterator[Row]:
    for size, trains, tokens, changes in CASES:
        if chosen not in f"{size} {trains}":
            continue
        demand = demand_of(size, tokens, changes, layers)
        parts, counted = memory.estimate(demand), count(demand, changes)
        logging.info("%s %s: %s", size, trains, {name: round(part, 2) for name, part in parts.items()})
        estimated = sum(parts.values()) - parts["libraries"]
        yield {
            "Qwen2.5": size,
            "trains": trains,
            "micro-batch": f"{tokens:,}",
            "counted": f"{counted:.2f} GiB",
            "estimated": f"{estimated:.2f} GiB",
            "estimated / counted": f"{estimated / counted:.2f}",
        }


def main() -> None:
    parser = options("Counts the memory of updates without a GPU.")
    parser.add_argument("--cases", default="", help="those whose names contain this")
    parser.add_argument("--layers", type=int, default=0, help="in place of the size's own")
    given = parser.parse_args()
    logging.basicConfig(level=logging.INFO)
    torch.set_num_threads(1)
    pretended_tensors.count_alone()
    show("counted", [*rows(given.cases, given.layers)], store=given.store, keys=2)


if __name__ == "__main__":
    main()
