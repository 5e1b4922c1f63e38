"""What a training run needs of a device's memory, from the model's configuration alone, and whether it fits.

Legend for units: bytes unless a name says GiB. h, q, k, i are a layer's widths: hidden, queries, keys, MLP.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import psutil
import torch
from transformers import AutoModelForCausalLM, PretrainedConfig

from agent_r1.params import EngineParams, EnvParams, LoraParams, ModelParams, Params, TrainParams
from agent_r1.policy.adapter import attach
from agent_r1.policy.model import compute_dtype, default_device

logger = logging.getLogger(__name__)

GIB = 2**30
FLOAT32 = 4
ADAM_STATES = 2
LOGIT_COPIES = 5  # float32 tensors [N, V] at the peak: logits, log-probabilities twice, probabilities, gradient
LIBRARIES_GIB = 2.5  # of two processes: code, and on CUDA contexts and what the allocator holds back


@dataclass(frozen=True, kw_only=True, slots=True)
class Demand:
    """What a run keeps and computes on one device."""

    model: PretrainedConfig
    dtype: torch.dtype  # of the matrix products
    adapter: LoraParams | None
    critic: bool
    reference: bool
    gradient_checkpointing: bool
    microbatch_tokens: int  # padded, at most
    loss_tokens: int  # of a micro-batch, at most: each takes a row of logits
    sampler_gib: float | None  # reserved by the sampler, weights included; None: its weights and its cache
    sampler_cache_gib: float = 0.0


def demand_of(
    config: PretrainedConfig,
    model: ModelParams,
    env: EnvParams,
    train: TrainParams,
    *,
    engine: EngineParams,
    device: torch.device,
) -> Demand:
    """What a run of params.yaml asks of a device.

    A micro-batch holds at least one whole context. How many of its tokens the loss runs over, prompts and observations
    aside, no limit tells: short episodes are almost all action.
    """
    tokens = max(train.update.max_tokens_per_microbatch, env.max_tokens)
    return Demand(
        model=config,
        dtype=compute_dtype(model.dtype, device),
        adapter=model.adapter,
        critic=train.credit.needs_critic,
        reference=train.needs_reference,
        gradient_checkpointing=model.gradient_checkpointing,
        microbatch_tokens=tokens,
        loss_tokens=tokens,
        sampler_gib=_reserved_gib(engine, device),
        sampler_cache_gib=_cache_gib(engine, config, env, compute_dtype(model.dtype, device)),
    )


def demand_of_fit(config: PretrainedConfig, batch_tokens: int) -> Demand:
    """What supervised training of all weights asks for, in batches of at most so many tokens, padding included."""
    return Demand(
        model=config,
        dtype=torch.float32,
        adapter=None,
        critic=False,
        reference=False,
        gradient_checkpointing=False,
        microbatch_tokens=batch_tokens,
        loss_tokens=batch_tokens,
        sampler_gib=0.0,
    )


def _reserved_gib(engine: EngineParams, device: torch.device) -> float | None:
    if engine.kind == "server":
        return 0.0
    if engine.kind == "vllm" and device.type == "cuda":
        return engine.vllm.gpu_memory_utilization * torch.cuda.get_device_properties(device).total_memory / GIB
    return None


def _cache_gib(engine: EngineParams, config: PretrainedConfig, env: EnvParams, dtype: torch.dtype) -> float:
    """Keys and values of the contexts that are sampled at the same time."""
    if engine.kind != "transformers":
        return float(engine.vllm.cpu_cache_gib)
    shape: Any = config.get_text_config()
    heads = getattr(shape, "num_key_value_heads", None) or shape.num_attention_heads
    per_token = 2 * shape.num_hidden_layers * heads * _head_size(shape) * dtype.itemsize
    return float(engine.transformers.batch_size * env.max_tokens * per_token / GIB)


@dataclass(frozen=True, kw_only=True, slots=True)
class Parameters:
    """How many weights there are. Tied ones count once."""

    policy: int  # without adapters
    backbone: int  # without the output layer; the critic's
    adapters: int  # of one backbone


def count_parameters(config: PretrainedConfig, adapter: LoraParams | None) -> Parameters:
    """Builds the model without its weights, on the meta device, and counts."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
        policy = sum(weight.numel() for weight in model.parameters())
        backbone = sum(weight.numel() for weight in model.base_model.parameters())
        if adapter:
            attach(model, adapter, seed=0)
    trained = sum(weight.numel() for weight in model.parameters() if weight.requires_grad)
    return Parameters(policy=policy, backbone=backbone, adapters=trained if adapter else 0)


def estimate(demand: Demand) -> dict[str, float]:
    """GiB by what they are for, at the peak of an update.

    Weights that train are float32, with a gradient and two Adam states of the same size; those beneath adapters and
    those of the reference are in the compute dtype. Policy and critic are updated one after the other, so activations
    count once.
    """
    count, shape = count_parameters(demand.model, demand.adapter), demand.model.get_text_config()
    frozen = demand.dtype.itemsize
    parts = {"policy": _trained(count.policy, count.adapters, frozen)}
    if demand.critic:
        parts["critic"] = _trained(count.backbone + shape.hidden_size + 1, count.adapters, frozen)
    if demand.reference and not demand.adapter:
        parts["reference"] = count.policy * frozen
    if frozen < FLOAT32 and not demand.adapter:
        parts["weights cast for matrix products"] = count.policy * frozen
    parts["activations"] = activation_bytes(demand)
    parts["logits"] = demand.loss_tokens * shape.vocab_size * FLOAT32 * LOGIT_COPIES
    gib = {name: size / GIB for name, size in parts.items()}
    sampler = demand.sampler_gib
    if sampler is None:
        sampler = count.policy * frozen / GIB + demand.sampler_cache_gib
    return gib | {"sampler": sampler, "libraries": LIBRARIES_GIB}


def checkpoint_gib(demand: Demand) -> float:
    """GiB of a run's checkpoint on disk: the policy, adapters merged, and all that goes on learning."""
    count, states = count_parameters(demand.model, demand.adapter), FLOAT32 * ADAM_STATES
    if demand.adapter:
        learners = 2 if demand.critic else 1
        return (count.policy * demand.dtype.itemsize + learners * count.adapters * (FLOAT32 + states)) / GIB
    critic = count.backbone * (FLOAT32 + states) if demand.critic else 0
    return (count.policy * (FLOAT32 + states) + critic) / GIB


def activation_bytes(demand: Demand) -> int:
    """What a micro-batch keeps for its backward pass, the logits aside.

    Per token and layer: the input, the normalised input and the output of two norms, in the residual stream's
    precision and once more for the matrix products (6 h); queries, keys and values as attention reads them, repeated
    to as many heads, and its result twice (5 q); four of the MLP's width (4 i). With gradient checkpointing every
    layer keeps its input alone, and one at a time is computed again.
    """
    config: Any = demand.model.get_text_config()  # its fields are those of the architecture
    compute = demand.dtype.itemsize
    stream = compute if demand.adapter else FLOAT32
    queries = config.num_attention_heads * _head_size(config)
    layer = 4 * stream * config.hidden_size + compute * (2 * config.hidden_size + 5 * queries + 4 * _mlp_size(config))
    if demand.adapter and compute < FLOAT32:  # adapted layers keep their inputs in the adapters' precision too
        layer += FLOAT32 * (2 * config.hidden_size + queries + _mlp_size(config))
    kept = config.num_hidden_layers * layer
    if demand.gradient_checkpointing:
        kept = config.num_hidden_layers * stream * config.hidden_size + layer
    return int(demand.microbatch_tokens * kept)


def available_gib(device: torch.device) -> float:
    """The memory a run may fill: what is free of a GPU's, or of the machine's."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0] / GIB
    return float(psutil.virtual_memory().available / GIB)


def table(parts: Mapping[str, float], available: float) -> str:
    """The estimate as lines of text."""
    rows = [*parts.items(), ("all", sum(parts.values())), ("available", available)]
    width = max(len(name) for name, _ in rows)
    return "\n".join(f"{name:<{width}} {size:8.2f} GiB" for name, size in rows)


def check(config: PretrainedConfig, settings: Params, runs: Sequence[TrainParams]) -> None:
    """Says what the largest of some runs needs of this machine's device, and refuses it where that cannot fit.

    Raises:
        ValueError: as `require_fit`.
    """
    device = default_device()
    parts = max((estimate(each) for each in demands(config, settings, runs)), key=lambda parts: sum(parts.values()))
    available = available_gib(device)
    logger.info("memory at the peak, estimated:\n%s", table(parts, available))
    require_fit(parts, available)


def demands(config: PretrainedConfig, settings: Params, runs: Sequence[TrainParams]) -> list[Demand]:
    """What runs of params.yaml ask of this machine's device."""
    device = default_device()
    return [demand_of(config, settings.model, settings.env, run, engine=settings.engine, device=device) for run in runs]


def require_fit(parts: Mapping[str, float], available: float) -> None:
    """Checks an estimate against a device.

    Raises:
        ValueError: it does not fit; the message holds the numbers and what lowers them.
    """
    if sum(parts.values()) > available:
        raise ValueError(
            f"this run needs about {sum(parts.values()):.1f} GiB and the device has {available:.1f}:\n"
            f"{table(parts, available)}\n"
            "lower train.update.max_tokens_per_microbatch, set model.gradient_checkpointing: true, train adapters "
            "(model.lora.rank), choose an estimator without a critic, give the sampler less, or take a smaller model"
        )


def _trained(weights: int, adapters: int, frozen: int) -> int:
    """Bytes of a model that is trained, or that only its adapters are."""
    with_states = FLOAT32 * (2 + ADAM_STATES)
    return weights * frozen + adapters * with_states if adapters else weights * with_states


def _head_size(config: PretrainedConfig) -> int:
    default = config.hidden_size // config.num_attention_heads
    return int(config.to_dict().get("head_dim") or default)


def _mlp_size(config: PretrainedConfig) -> int:
    """Under the name that the architecture has for it; some have none where it is four times the hidden size."""
    names = ("intermediate_size", "ffn_dim", "ffn_hidden_size", "n_inner")
    return next((int(size) for name in names if (size := getattr(config, name, None))), 4 * config.hidden_size)
