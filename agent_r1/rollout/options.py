"""What vLLM is started with, whether as a process behind a pipe or as a server."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

_BATCHED_TOKENS = 8192  # in one forward pass: bounds the memory of its activations
_ADAPTER_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)  # that vLLM makes room for; a smaller one fits as well


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineSettings:
    """What an engine is started with; `agent_r1.rollout.engine.VllmEngine` explains the fields."""

    model: str
    end_id: int
    max_tokens: int
    temperature: float
    dtype: str
    max_num_seqs: int
    gpu_memory_utilization: float
    cpu_cache_gib: float
    adapter_rank: int = 0


def vllm_options(settings: EngineSettings, *, cuda: bool) -> dict[str, Any]:
    """The keyword arguments of vLLM's `LLM`; by the same names, with dashes, the options of its server."""
    return {
        "model": settings.model,
        "skip_tokenizer_init": True,
        "generation_config": "vllm",  # no sampling defaults from the model's folder
        "max_model_len": settings.max_tokens,
        "max_num_seqs": settings.max_num_seqs,
        "max_num_batched_tokens": max(_BATCHED_TOKENS, settings.max_tokens),
        "async_scheduling": False,
        "worker_extension_cls": "agent_r1.rollout.worker.WorkerExtension",
        "use_tqdm_on_load": False,
        **_device_options(settings, cuda),
        **_adapter_options(settings.adapter_rank),
    }


def _adapter_options(rank: int) -> dict[str, Any]:
    """One adapter at a time; vLLM itself refuses a rank that it has no room for."""
    if not rank:
        return {}
    room = next((size for size in _ADAPTER_RANKS if size >= rank), rank)
    return {"enable_lora": True, "max_loras": 1, "max_lora_rank": room}


def _device_options(settings: EngineSettings, cuda: bool) -> dict[str, Any]:
    """What differs between a GPU and a CPU: types, memory, and compiling, which costs more than it saves on a CPU."""
    if cuda:
        dtype = "bfloat16" if settings.dtype == "auto" else settings.dtype
        return {"dtype": dtype, "gpu_memory_utilization": settings.gpu_memory_utilization}
    dtype = "float32" if settings.dtype == "auto" else settings.dtype
    return {
        "dtype": dtype,
        "enforce_eager": True,
        "enable_chunked_prefill": False,  # a seeded request cut in two rewinds its generator, which none on a CPU can
        "kv_cache_memory_bytes": int(settings.cpu_cache_gib * 2**30),
    }


def shape(config: Any) -> dict[str, Any]:
    """By what a model is told from another one: the fields of a Hugging Face text configuration that size it."""
    return {
        name: config.to_dict().get(name) for name in ("model_type", "vocab_size", "hidden_size", "num_hidden_layers")
    }
