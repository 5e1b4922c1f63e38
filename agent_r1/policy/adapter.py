"""LoRA adapters: small trainable matrices beside weights that stay as they were loaded.

Source: Hu et al. 2021 (arXiv 2106.09685), as peft has it. There is no dropout: sampler and learner would disagree.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, inject_adapter_in_model
from peft.tuners.lora import LoraLayer
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import PreTrainedModel

from agent_r1.params import Params
from agent_r1.params.stages import LoraParams
from agent_r1.policy.model import compute_dtype, default_device

ADAPTER = "default"
WEIGHTS = "adapter_model.safetensors"

logger = logging.getLogger(__name__)


def attach(model: nn.Module, params: LoraParams, *, seed: int) -> None:
    """Freezes a model and puts adapters beside its linear layers, in place; they change nothing at first.

    What trains is float32, whatever the model's weights are in. A ValueError refuses targets that no layer is named by.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        try:
            inject_adapter_in_model(LoraConfig(**_config(params)), model, ADAPTER)
        except ValueError as error:
            raise ValueError(f"model.lora.targets {params.targets} does not fit the model: {error}") from error
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.float()


def merged_state(model: nn.Module) -> dict[str, Tensor]:
    """The weights of the same model without adapters that computes the same, rounded to the weights' own type.

    Merged ones are on the CPU: beside what trains, a GPU may have no room for them. The model's own weights are left
    alone: adding an update and taking it away again would change their last bits.
    """
    adapted: dict[str, Any]  # peft's base class does not declare `get_delta_weight`
    adapted = {name: module for name, module in model.named_modules() if isinstance(module, LoraLayer)}
    state = {
        name.replace(".base_layer.", "."): weight for name, weight in model.state_dict().items() if ".lora_" not in name
    }
    for name, layer in adapted.items():
        weight = state[f"{name}.weight"]
        update = layer.get_delta_weight(ADAPTER).detach()
        state[f"{name}.weight"] = (weight.float() + update).to("cpu", weight.dtype)
    return state


@contextmanager
def detached(model: nn.Module) -> Iterator[None]:
    """The model as it was before its adapters were trained; without adapters, as it is."""
    layers = [module for module in model.modules() if isinstance(module, LoraLayer)]
    for layer in layers:
        layer.enable_adapters(False)
    try:
        yield
    finally:
        for layer in layers:
            layer.enable_adapters(True)


def trained_state(model: nn.Module) -> dict[str, Tensor]:
    """The weights that train, by name: with adapters, what differs from the model that was loaded."""
    return {name: parameter.detach() for name, parameter in model.named_parameters() if parameter.requires_grad}


def load_trained_state(model: nn.Module, state: dict[str, Tensor]) -> None:
    """Takes over the `trained_state` of another model of the same shape, which started from the same weights.

    Raises ValueError if the names of the weights that train are not those of this model.
    """
    if differing := sorted(state.keys() ^ trained_state(model).keys()):
        raise ValueError(f"the state is of a model that trains other weights, {differing[0]} for one; train it again")
    model.load_state_dict(state, strict=False)


def save_merged(model: PreTrainedModel, folder: Path) -> None:
    """Writes a model as an ordinary Hugging Face folder, its adapters, where it has any, merged into its weights."""
    adapted = any(isinstance(module, LoraLayer) for module in model.modules())
    model.save_pretrained(folder, state_dict=merged_state(model) if adapted else None)


def save_adapter(model: nn.Module, params: LoraParams, folder: Path) -> None:
    """Writes the adapters of a model alone, as peft and vLLM read them beside the model they were attached to."""
    folder.mkdir(parents=True)
    config = {"peft_type": "LORA", "task_type": "CAUSAL_LM", **_config(params)}
    (folder / "adapter_config.json").write_text(json.dumps(config, indent=2) + "\n")
    weights = {_peft_name(name): weight.contiguous() for name, weight in trained_state(model).items()}
    save_file(weights, folder / WEIGHTS)


def load_adapter(model: nn.Module, folder: Path) -> None:
    """Takes over what `save_adapter` wrote of another model with the same adapters."""
    stored = load_file(folder / WEIGHTS)
    load_trained_state(model, {name: stored[_peft_name(name)] for name in trained_state(model)})


def warn_of_rounding(settings: Params) -> None:
    """Only vLLM in a process of its own runs adapters as they are; other engines get them merged into the weights."""
    merged = settings.model.adapter is not None and settings.engine.kind != "vllm"
    if merged and compute_dtype(settings.model.dtype, default_device()) is torch.bfloat16:
        logger.warning(
            "engine.kind %s samples with adapters merged into bfloat16 weights: changes below half a unit in the last "
            "place vanish, and at small learning rates those are most; set engine.kind: vllm, raise "
            "train.update.learning_rate, set model.lora.rank: 0, or model.dtype: float32",
            settings.engine.kind,
        )


def _peft_name(name: str) -> str:
    return "base_model.model." + ".".join(part for part in name.split(".") if part != ADAPTER)


def _config(params: LoraParams) -> dict[str, Any]:
    """The adapters in peft's words."""
    targets = "all-linear" if params.targets == ["all-linear"] else params.targets
    return {"r": params.rank, "lora_alpha": params.alpha, "target_modules": targets, "lora_dropout": 0.0}
