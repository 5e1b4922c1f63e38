"""Causal language models as learner and sampler load them, so that the two agree to the last bits."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, MutableMapping
from importlib.util import find_spec
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

logger = logging.getLogger(__name__)

# The families of docs/families.md, by the type of their text configuration.
FAMILIES = {
    "gemma3_text": "Gemma 3",
    "gemma4_text": "Gemma 4",
    "gpt_oss": "gpt-oss",
    "lfm2": "LFM2",
    "llama": "Llama 3",
    "olmo3": "OLMo 3",
    "qwen2": "Qwen2.5",
    "qwen3": "Qwen3",
    "qwen3_5_moe_text": "Qwen3.5-MoE",
    "qwen3_5_text": "Qwen3.5",
    "qwen3_moe": "Qwen3-MoE",
    "smollm3": "SmolLM3",
}
# Kinds of layers that mix tokens by other means than attention, and the module of a layer that does.
MIXERS = {"linear_attention": "linear_attn", "conv": "conv"}

# The names of a text model's weights begin so in a folder that has other parts too.
TEXT_MODEL = (r"^language_model\.model\.", r"^model\.language_model\.")

# The weights that wait in a mapped file, as they are stored, by the parameter that has their shape and type.
_WAITING: MutableMapping[Tensor, Tensor] = WeakTensorKeyDictionary()


def default_device() -> torch.device:
    """The accelerator where there is one, else the CPU. Raises ValueError if the driver is too old for torch."""
    return torch.device("cuda" if visible_gpus() else "cpu")


def compute_dtype(name: DtypeName, device: torch.device) -> torch.dtype:
    """The precision of matrix products; `auto` is bfloat16 on CUDA and float32 elsewhere."""
    if name == "auto":
        name = "bfloat16" if device.type == "cuda" else "float32"
    dtype: torch.dtype = getattr(torch, name)
    return dtype


def read_config(path: str | Path) -> PreTrainedConfig:
    """The configuration of a folder or hub id; ValueError for a folder without a model."""
    if Path(path).is_dir() and not (Path(path) / "config.json").exists():
        raise ValueError(f"{path} holds no model (config.json is missing); save one there or correct model.path")
    config: PreTrainedConfig = load_pretrained(AutoConfig, path)
    return config


def layer_kinds(config: PreTrainedConfig) -> set[str]:
    """The kinds of a model's layers, where its configuration names them."""
    return {*(getattr(config.get_text_config(), "layer_types", None) or [])}


def experts_of(config: PreTrainedConfig) -> int:
    """The number of experts in a layer; 0 for a dense model."""
    text = config.get_text_config()
    return getattr(text, "num_experts", None) or getattr(text, "num_local_experts", None) or 0


def adaptable(model: torch.nn.Module, targets: Any) -> Any:
    """The layers that peft adapts: of a model with experts its linear ones, since all-linear would mean experts too."""
    if targets != "all-linear" or not isinstance(model, PreTrainedModel) or not experts_of(model.config):
        return targets
    return {*linear_layers(model)}


def linear_layers(model: PreTrainedModel) -> dict[str, torch.nn.Linear]:
    """The linear layers of a model by name, all but the output layer."""
    head = model.get_output_embeddings()
    layers = model.named_modules()
    return {name: layer for name, layer in layers if isinstance(layer, torch.nn.Linear) and layer is not head}


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


def require_sampled(config: PreTrainedConfig, dtype: DtypeName, *, adapters: bool) -> None:
    """Raises ValueError for a model that vLLM cannot sample with in this precision on this machine."""
    remedy = "set engine.kind: transformers"
    kind = config.get_text_config().model_type
    device = default_device()
    if kind.startswith("qwen3_5") and not find_spec("torchvision"):
        raise ValueError(f"vLLM imports torchvision for {kind}, which is not installed; {remedy}, or install it")
    if device.type == "cuda":
        return
    if "linear_attention" in layer_kinds(config) and compute_dtype(dtype, device) is not torch.bfloat16:
        raise ValueError(
            f"vLLM computes the linear attention of {kind} on a CPU in bfloat16 alone; set model.dtype: bfloat16, or "
            "engine.kind: transformers"
        )
    if "conv" in layer_kinds(config):
        raise ValueError(f"vLLM computes the convolutions of {kind} on a CPU otherwise than the learner; {remedy}")
    if kind == "gpt_oss":
        raise ValueError(f"vLLM does not replace the experts of {kind} on a CPU; {remedy}")
    if adapters and experts_of(config):
        raise ValueError(f"vLLM has no kernel of a CPU for experts beside adapters, as {kind} has; {remedy}")


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
        options: dict[str, Any] = {"dtype": dtype, "attn_implementation": attention, "output_loading_info": True}
        text = config.get_text_config()
        if text is not config:
            logger.info("%s: the text model is loaded, and no other part, such as one for images", path)
            options |= {"config": text, "key_mapping": dict.fromkeys(TEXT_MODEL, "model.")}
        with mapped_weights(waits) as types:
            model, about = load_pretrained(kind, path, **options)
    except OSError as error:
        raise ValueError(f"no model can be loaded from {str(path)!r}; correct model.path: {error}") from error
    if missing := sorted(about["missing_keys"]):  # transformers gives them random values, tied ones aside
        lacking = f"{len(missing)} tensors of its {type(model).__name__}, {missing[0]} for one"
        raise ValueError(f"{str(path)!r} lacks the weights of {lacking}; download or save the model again")
    if text is not config:
        del model._weight_conversions  # it would be saved by the names of the whole
    if not waits:
        for parameter in model.parameters():  # a mapped file may be replaced, and its alignment changes the last bits
            parameter.data = parameter.data.clone(memory_format=torch.contiguous_format)
        torch.nn.Module.to(model, device)
    model.eval()
    if check:
        check(model)
    if waits:
        _leave_waiting(model, types)
    return model


def _leave_waiting(model: PreTrainedModel, types: Mapping[int, torch.dtype]) -> None:
    """Leaves the weights of a model in the mapped file, whose `types` stand by address, and makes places for them."""
    for parameter in model.parameters():
        stored = _WAITING[parameter] = parameter.data
        parameter.data = torch.empty(stored.shape, dtype=types.get(stored.data_ptr(), model.dtype))
    for buffer in model.buffers():
        buffer.data = buffer.to(types.get(buffer.data_ptr(), buffer.dtype), copy=True)


def waiting(module: torch.nn.Module) -> dict[str, Tensor]:
    """The weights of a module that wait, as its file has them, by name."""
    parameters = module.named_parameters(remove_duplicate=False)
    return {name: _WAITING[parameter] for name, parameter in parameters if parameter in _WAITING}
