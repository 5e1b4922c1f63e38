"""Causal language models as learner and sampler load them, so that the two agree to the last bits."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import torch
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedModel

from agent_r1.files import load_pretrained
from agent_r1.params.stages import DtypeName


def default_device() -> torch.device:
    """The accelerator where there is one, else the CPU."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def compute_dtype(name: DtypeName, device: torch.device) -> torch.dtype:
    """The precision of matrix products; `auto` is bfloat16 on CUDA and float32 elsewhere."""
    halved = name == "bfloat16" or (name == "auto" and device.type == "cuda")
    return torch.bfloat16 if halved else torch.float32


def load_model(path: str | Path, dtype: torch.dtype | Literal["auto"], device: torch.device) -> PreTrainedModel:
    """Loads a causal language model from a Hugging Face folder or hub id.

    `dtype` is that of the weights; `auto` leaves them as they are stored. A ValueError says that `path` holds no model,
    or that some of its weights are missing.
    """
    folder = Path(path)
    if folder.is_dir() and not (folder / "config.json").exists():
        raise ValueError(f"{path} holds no model (config.json is missing); save one there or correct model.path")
    try:
        loaded = load_pretrained(
            AutoModelForCausalLM, path, dtype=dtype, attn_implementation="sdpa", output_loading_info=True
        )
    except OSError as error:
        raise ValueError(f"no model can be loaded from {str(path)!r}; correct model.path: {error}") from error
    model: PreTrainedModel
    model, about = loaded
    if missing := sorted(about["missing_keys"]):  # transformers gives them random values, tied ones aside
        raise ValueError(
            f"{str(path)!r} lacks the weights of {len(missing)} tensors of its {type(model).__name__}, {missing[0]} "
            "for one; download or save the model again"
        )
    settle(model, device)
    return model


def settle(model: nn.Module, device: torch.device) -> None:
    """Puts a freshly loaded model on its device, without dropout, which would make learner and sampler disagree.

    Copies the weights out of the mapped file: its alignment changes the last bits, and the file may be replaced.
    """
    for parameter in model.parameters():
        parameter.data = parameter.data.clone(memory_format=torch.contiguous_format)
    model.to(device).eval()
