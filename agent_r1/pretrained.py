"""Causal language models as learner and sampler load them, so that the two agree to the last bits."""

from __future__ import annotations

from collections.abc import Callable, MutableMapping
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    GenerationConfig,
    PreTrainedConfig,
    PreTrainedModel,
)

from agent_r1.files import load_pretrained
from agent_r1.gpus import visible_gpus
from agent_r1.params.stages import DtypeName
from agent_r1.replaced import mapped_weights

# The weights that wait in a mapped file, as they are stored, by the parameter that has their shape and type.
_WAITING: MutableMapping[Tensor, Tensor] = WeakTensorKeyDictionary()


def default_device() -> torch.device:
    """The accelerator where there is one, else the CPU. Raises ValueError if the driver is too old for torch."""
    return torch.device("cuda" if visible_gpus() else "cpu")


def compute_dtype(name: DtypeName, device: torch.device) -> torch.dtype:
    """The precision of matrix products; `auto` is bfloat16 on CUDA and float32 elsewhere."""
    halved = name == "bfloat16" or (name == "auto" and device.type == "cuda")
    return torch.bfloat16 if halved else torch.float32


def read_config(path: str | Path) -> PreTrainedConfig:
    """The configuration of a folder or hub id; ValueError for a folder without a model."""
    if Path(path).is_dir() and not (Path(path) / "config.json").exists():
        raise ValueError(f"{path} holds no model (config.json is missing); save one there or correct model.path")
    config: PreTrainedConfig = load_pretrained(AutoConfig, path)
    return config


def end_tokens(path: str | Path) -> list[int]:
    """The token ids with which a model ends, by its generation_config, else its config; none for a tokenizer alone."""
    if Path(path).is_dir() and not (Path(path) / "config.json").exists():
        return []
    try:
        ids = load_pretrained(GenerationConfig, path).eos_token_id
    except OSError:
        ids = load_pretrained(AutoConfig, path).get_text_config().eos_token_id
    return ids if isinstance(ids, list) else [] if ids is None else [ids]


def dropped_by_sdpa(config: PreTrainedConfig) -> str:
    """The part of a model's attention that PyTorch's fused kernel would leave out, in words; "" for none."""
    if cap := getattr(config.get_text_config(), "attn_logit_softcapping", None):
        return f"soft caps of {cap:g} in its attention"
    kind: Any = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)
    return "" if kind is None or kind._supports_sdpa else f"layers of its own kind, as {kind.__name__} computes them"


def require_packable(config: PreTrainedConfig) -> None:
    """Raises ValueError for a model whose attention packed contexts would change."""
    if dropped := dropped_by_sdpa(config):
        raise ValueError(f"{config.name_or_path} has {dropped}, which cannot be packed; set model.packing: false")


def require_full_precision(config: PreTrainedConfig) -> None:
    """Raises ValueError for quantised weights, which cannot be trained."""
    if quantisation := getattr(config, "quantization_config", None):
        method = quantisation.get("quant_method", "unknown") if isinstance(quantisation, dict) else quantisation
        raise ValueError(f"{config.name_or_path} is quantised ({method}); take the release in bfloat16")


def require_window(config: PreTrainedConfig, tokens: int) -> None:
    """Raises ValueError if a model is known to read fewer tokens at once than a context may have."""
    text = config.get_text_config()
    most = getattr(text, "max_position_embeddings", None)
    scaled = (getattr(text, "rope_parameters", None) or {}).get("rope_type") in ("linear", "dynamic")
    if most and most < tokens and not scaled:
        raise ValueError(f"{config.name_or_path} reads {most} tokens at most; lower env.max_tokens, which is {tokens}")


def load_model(
    path: str | Path,
    dtype: torch.dtype | Literal["auto"],
    device: torch.device,
    kind: Any = AutoModelForCausalLM,
    check: Callable[[PreTrainedModel], None] | None = None,
    *,
    waits: bool = False,
) -> PreTrainedModel:
    """Loads a model of a class of transformers without dropout, which would make learner and sampler disagree.

    `dtype` is that of the weights; `auto` leaves them as they are stored. Weights of a model that `waits` stay in the
    mapped file (`waiting`), whose types `check` sees. Their places are on the CPU, and take no memory until they are
    written to. A ValueError says that `path` holds no model, a quantised one, or one that lacks weights.
    """
    model: PreTrainedModel
    try:
        config = read_config(path)
        require_full_precision(config)
        attention = "eager" if dropped_by_sdpa(config) else "sdpa"
        options = {"dtype": dtype, "attn_implementation": attention, "output_loading_info": True}
        with mapped_weights(waits) as types:
            model, about = load_pretrained(kind, path, **options)
    except OSError as error:
        raise ValueError(f"no model can be loaded from {str(path)!r}; correct model.path: {error}") from error
    if missing := sorted(about["missing_keys"]):  # transformers gives them random values, tied ones aside
        lacking = f"{len(missing)} tensors of its {type(model).__name__}, {missing[0]} for one"
        raise ValueError(f"{str(path)!r} lacks the weights of {lacking}; download or save the model again")
    if not waits:
        for parameter in model.parameters():  # a mapped file may be replaced, and its alignment changes the last bits
            parameter.data = parameter.data.clone(memory_format=torch.contiguous_format)
        torch.nn.Module.to(model, device)
    model.eval()
    if check:
        check(model)
    for parameter in model.parameters() if waits else ():
        stored = _WAITING[parameter] = parameter.data
        parameter.data = torch.empty(stored.shape, dtype=types.get(stored.data_ptr(), model.dtype))
    for buffer in model.buffers() if waits else ():
        buffer.data = buffer.to(types.get(buffer.data_ptr(), buffer.dtype), copy=True)
    return model


def waiting(module: torch.nn.Module) -> dict[str, Tensor]:
    """The weights of a module that wait, as its file has them, by name."""
    parameters = module.named_parameters(remove_duplicate=False)
    return {name: _WAITING[parameter] for name, parameter in parameters if parameter in _WAITING}
