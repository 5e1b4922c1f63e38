"""What the overlays of full scale ask of 80 GB GPUs, by the estimate: `python -m benchmarks.overlays [--store]`.

None of them was run. An update is of the overlay's episodes, of 2,300 tokens each. Turns of micro-batches are counted
as they are dealt, now and where they are padded and of 8,192 tokens. Kernels of a layer are counted on a CPU: its
forward pass, the one that checkpointing repeats, and its backward pass. An update takes the longer of their launches,
at the 35 us a kernel of the packed update of an H100 (gpu_updates.csv), and of the products, at half of the card's 792
TFLOP/s. Sampling is not in it. Kernels of linear attention, which are a GPU's own, are not counted.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
import yaml
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import PretrainedConfig, Qwen2ForCausalLM, Qwen3_5TextConfig, Qwen3Config

from agent_r1.learn import adapter
from agent_r1.learn.adapter import count_parameters
from agent_r1.learn.memory import GIB, demand_of, estimate
from agent_r1.learn.model import pack, precision, recompute_activations, see
from agent_r1.learn.scoring import deal
from agent_r1.params import Params
from agent_r1.params.places import RunId
from agent_r1.params.stages import LoraParams
from agent_r1.pretrained import layer_kinds
from benchmarks.stored import ROOT, Row, options, show
from benchmarks.synthetic import SHAPES, config_of, shipped_with

WINDOW = 40960
LENGTH = 2300  # tokens of an episode
BEFORE = 8192  # tokens of a padded micro-batch
CARD_GIB = 79
LAUNCH_S = 35e-6
PRODUCTS = 0.5 * 792e12  # a second
OVERLAYS: dict[str, PretrainedConfig] = {
    "qwen2.5-3b": config_of(SHAPES["3B"], WINDOW),
    "qwen2.5-3b-weights": config_of(SHAPES["3B"], WINDOW),
    "search-r1": config_of(SHAPES["3B"], WINDOW),
    "qwen2.5-7b": config_of(SHAPES["7B"], WINDOW),
    "qwen3-4b": Qwen3Config(
        vocab_size=151936,
        hidden_size=2560,
        intermediate_size=9728,
        num_hidden_layers=36,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=128,
        max_position_embeddings=WINDOW,
        tie_word_embeddings=True,
    ),
    "qwen3.5-4b": Qwen3_5TextConfig(
        hidden_size=2560,
        intermediate_size=9216,
        max_position_embeddings=WINDOW,
        tie_word_embeddings=True,
    ),
}


class Kernels(TorchDispatchMode):
    """Counts the operations that compute or copy something: each is a kernel at least."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += not (func.is_view or func.namespace != "aten" or "empty" in func.name())
        return func(*args, **(kwargs or {}))


def kernels_of(layers: int, lora: LoraParams | None) -> int:
    """The kernels of a small model's update of one context, without the output layer."""
    hidden, _, *others = SHAPES["tiny"]
    model = Qwen2ForCausalLM(config_of((hidden, layers, *others), 64)).eval()
    if lora:
        model.bfloat16()
        adapter.attach(model, lora, seed=0)
    pack(model)
    recompute_activations(model)
    ids = torch.arange(16)[None]
    with Kernels() as counted:
        with precision(ids.device, torch.bfloat16):
            _, hidden_states = see(model.base_model, ids, ids > 0)
        hidden_states.sum().backward()
    return counted.count


def kernels_a_layer(lora: LoraParams | None) -> int:
    return kernels_of(3, lora) - kernels_of(2, lora)


def overlay_of(name: str) -> Params:
    changes = yaml.safe_load((ROOT / f"overlays/{name}.yaml").read_text())
    return shipped_with(changes | {"places": {}})


def turns(episodes: int, tokens: int, ranks: int, *, packed: bool) -> int:
    return len(deal([[LENGTH]] * episodes, tokens, packed=packed, ranks=ranks))


def row(name: str, run: str) -> Row:
    settings = overlay_of(name)
    run_id = RunId(run)
    rollout = settings.run(run_id).rollout
    episodes = rollout.questions * rollout.samples
    config = OVERLAYS[name]
    card = SimpleNamespace(total_memory=CARD_GIB * GIB)
    with patch.object(torch.cuda, "get_device_properties", lambda _: card):
        demand = demand_of(config, settings, run_id, torch.device("cuda"))
    ranks = settings.learner.ranks
    kernels = 0 if "linear_attention" in layer_kinds(config) else kernels_a_layer(demand.adapter)
    passes = 3 if demand.adapter else 4  # forward twice, gradients of activations, and those of weights
    products = passes * 2 * count_parameters(config, None).policy * episodes * LENGTH / ranks / PRODUCTS
    now = turns(episodes, demand.tokens, ranks, packed=settings.model.packing)
    seconds = max(now * kernels * config.num_hidden_layers * LAUNCH_S, products)
    return {
        "overlay": name,
        "run": run,
        "GPUs": f"{ranks}",
        "trains": "adapters" if demand.adapter else "all weights",
        "micro-batch": f"{demand.tokens:,}",
        "memory": f"{sum(estimate(demand).values()):.0f} GiB",
        "kernels a layer": f"{kernels or '-'}",
        "turns of 8,192, padded": f"{turns(episodes, BEFORE, ranks, packed=False)}",
        "turns": f"{now}",
        "an update": f"{seconds:.0f} s",
        "GPU seconds": f"{seconds * ranks:,.0f}",
    }


def main() -> None:
    given = options("Says what the overlays of full scale ask of 80 GB GPUs.").parse_args()
    known = [name for name in OVERLAYS if (ROOT / f"overlays/{name}.yaml").exists()]
    rows = [row(name, run) for name in known for run in ("ppo", "grpo") if run in overlay_of(name).ablations.runs]
    show("overlays", rows, store=given.store, keys=2)


if __name__ == "__main__":
    main()
