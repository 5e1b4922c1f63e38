"""The memory that a training run takes: estimated before it starts, measured in it; bytes unless a name says GiB."""

from __future__ import annotations

import logging
import os
import resource
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import psutil
import torch
from transformers import AutoConfig, PretrainedConfig

from agent_r1.devices.sharing import led
from agent_r1.files import load_pretrained
from agent_r1.learn.adapter import Parameters, count_parameters
from agent_r1.learn.optimizers import undone
from agent_r1.learn.scoring import room
from agent_r1.params import Params
from agent_r1.params.env import EnvParams
from agent_r1.params.places import RunId
from agent_r1.params.stages import LoraParams
from agent_r1.params.train import TrainParams
from agent_r1.pretrained import compute_dtype, default_device, dropped_by_sdpa
from agent_r1.records import Credit, Outcome, Source, Trajectory

if TYPE_CHECKING:  # an estimate depends on no learner
    from agent_r1.learn.gradients import CreditedTrajectory
    from agent_r1.learn.learner import Learner

logger = logging.getLogger(__name__)

GIB = 2**30
FLOAT32 = 4
FOUR_BITS = 0.5 + 4 / 64  # bytes of a weight, with a scale for 64
ADAM_STATES = 2
LOGIT_COPIES = 3  # of a chunk at the peak, in float32: logits, logprobs, gradient
LIBRARIES_GIB = 2.5  # of two processes: code, and on CUDA contexts and the allocator's reserve
DEVICE_FAULTS = (torch.OutOfMemoryError, torch.AcceleratorError)
REMEDIES = (
    "lower train.update.max_tokens_per_microbatch (of fine_tune: warm_start.max_tokens_per_microbatch), set "
    "model.gradient_checkpointing: true, give the sampler less (engine.vllm.gpu_memory_utilization, "
    "engine.vllm.cpu_cache_gib, engine.vllm.max_num_seqs), set engine.vllm.sleep: true and learner.optimizer_offload: "
    "true on a GPU, or share the learner among more of them (learner.processes), and a training goes on; or begin "
    "another: train adapters (model.lora.rank), choose an estimator without a critic, or take a smaller model"
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Demand:
    """The demands of a run on one device. The defaults are of supervised training of all weights."""

    model: PretrainedConfig
    tokens: int  # of the largest micro-batch, padding included; all count as action tokens, which have logits
    context: int = 0  # tokens of the longest; 0 for those of the micro-batch
    device: str = "cpu"  # kind of device
    dtype: torch.dtype = torch.float32  # of the matrix products
    adapter: LoraParams | None = None
    four_bit: bool = False  # the layers beneath adapters
    critic: bool = False
    reference: PretrainedConfig | None = None  # the model's own lies beneath adapters already
    gradient_checkpointing: bool = False
    optimizer_offload: bool = False
    ranks: int = 1  # that shard the weights, each with a device
    defers: bool = False  # whether ranks keep whole gradients until the last micro-batch of a step
    sampler_gib: float = 0.0  # weights and cache
    sampler_sleeps: bool = False  # during updates


def demand_of(
    config: PretrainedConfig, settings: Params, run_id: RunId, device: torch.device, gpu_gib: float = 0.0
) -> Demand:
    """The demand of a run of params.yaml, where `device` is not here of a GPU with `gpu_gib`.

    A ValueError refuses a micro-batch that is smaller than one context.
    """
    run = settings.run(run_id)
    settings = settings.of(run_id)
    tokens = run.update.max_tokens_per_microbatch
    if tokens < settings.env.max_tokens:
        raise ValueError(
            f"{run_id.run}: train.update.max_tokens_per_microbatch {tokens} is below one context, env.max_tokens "
            f"{settings.env.max_tokens}, which is computed at once; raise the first, or lower the second"
        )
    dtype = compute_dtype(settings.model.dtype, device)
    cuda = device.type == "cuda"
    return Demand(
        model=config,
        device=device.type,
        dtype=dtype,
        adapter=settings.model.adapter,
        four_bit=settings.model.base == "four_bit",
        critic=run.credit.needs_critic,
        reference=_reference_of(config, run),
        gradient_checkpointing=settings.model.gradient_checkpointing,
        optimizer_offload=settings.learner.optimizer_offload and cuda,
        ranks=settings.learner.ranks // settings.learner.copies,
        defers=settings.learner.defer_reduction,
        tokens=tokens,
        context=settings.env.max_tokens,
        sampler_gib=_sampler_gib(config, settings, dtype, device, gpu_gib),
        sampler_sleeps=settings.engine.kind == "vllm" and settings.engine.vllm.sleep and cuda,
    )


def _reference_of(config: PretrainedConfig, run: TrainParams) -> PretrainedConfig | None:
    """The configuration of a run's reference, if it asks one here; a registered version's is taken to be the run's."""
    if not run.needs_reference or run.reference_at:
        return None
    if not run.reference or run.reference_is_registered:
        return config
    reference: PretrainedConfig = load_pretrained(AutoConfig, run.reference)
    return reference


def check(config: PretrainedConfig, settings: Params, runs: Sequence[RunId]) -> None:
    """Logs the memory that the most demanding run needs here. A ValueError refuses too much."""
    device = default_device()
    switches = {
        "learner.optimizer_offload": settings.learner.optimizer_offload,
        "engine.vllm.sleep": settings.engine.vllm.sleep,
    }
    for name in [name for name, on in switches.items() if on and device.type == "cpu"]:
        logger.warning("%s: true has no effect on a CPU, whose memory is all that there is", name)
    demands = [demand_of(config, settings, run, device) for run in runs]
    parts = max(map(estimate, demands), key=lambda parts: sum(parts.values()))
    parts = on_machine(parts, settings.learner.processes, device)
    available = available_gib(device)
    summary = ", ".join(f"{name} {size:.2f}" for name, size in parts.items())
    logger.info("memory at the peak, estimated: %.2f of %.2f GiB (%s)", sum(parts.values()), available, summary)
    require_fit(parts, available)


def on_machine(parts: Mapping[str, float], processes: int, device: torch.device) -> dict[str, float]:
    """Adds to the estimate of a rank those of the others on its device: the `processes` on a CPU share its memory."""
    if device.type != "cpu":
        return dict(parts)
    return {**parts, "other ranks": (processes - 1) * (sum(parts.values()) - parts["sampler"])}


def require_fit(parts: Mapping[str, float], available: float) -> None:
    """Checks an estimate against a device; raises as `check`."""
    if sum(parts.values()) > available:
        raise ValueError(
            f"this run needs about {sum(parts.values()):.1f} GiB and the device has {available:.1f}:\n"
            f"{table(parts, available)}\n{REMEDIES}"
        )


def table(parts: Mapping[str, float], available: float) -> str:
    """The estimate as lines of text."""
    rows = [*parts.items(), ("all", sum(parts.values())), ("available", available)]
    width = max(len(name) for name, _ in rows)
    return "\n".join(f"{name:<{width}} {size:8.2f} GiB" for name, size in rows)


def available_gib(device: torch.device) -> float:
    """The memory that is free on a GPU, or in the machine."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0] / GIB
    return float(psutil.virtual_memory().available / GIB)


def total_gib(demand: Demand) -> float:
    """GiB at the peak of an update, as `estimate` has them."""
    return sum(estimate(demand).values())


def estimate(demand: Demand) -> dict[str, float]:
    """GiB by purpose, at the peak of an update.

    Weights that train are float32, with a gradient and two Adam states of the same size. Weights beneath adapters and
    of the reference are in the compute dtype. Policy and critic take turns, so activations count once. A rank counts
    its shard and the weights that it gathers, in the compute dtype: two layers, and all outside of the layers; their
    gradients are added up in float32. A sleeping sampler counts only with its excess over gradients, activations and
    logits.
    """
    count = count_parameters(demand.model, demand.adapter)
    shape = demand.model.get_text_config()
    learners = {"policy": count.policy}
    if demand.critic:
        learners["critic"] = count.backbone + shape.hidden_size + 1
    parts = _weight_bytes(demand, count, learners)
    parts["activations"] = activation_bytes(demand)
    chunk, _ = room(demand.device)
    parts["logits"] = min(demand.tokens * shape.vocab_size, chunk) * FLOAT32 * LOGIT_COPIES
    gib = {name: size / GIB for name, size in parts.items()}
    sampler = demand.sampler_gib
    if demand.sampler_sleeps:
        gradients = sum(count.adapters or size for size in learners.values()) * FLOAT32 / demand.ranks / GIB
        gradients += gib.get("gradients not yet reduced", 0.0)
        sampler = max(0.0, sampler - gradients - gib["activations"] - gib["logits"])
    return gib | {"sampler": sampler, "libraries": LIBRARIES_GIB}


def _weight_bytes(demand: Demand, count: Parameters, learners: Mapping[str, int]) -> dict[str, float]:
    """A rank's bytes of weights, gradients and optimiser states by purpose; `learners` are the weights of a model."""
    frozen = demand.dtype.itemsize
    states = 0 if demand.optimizer_offload else ADAM_STATES
    shape = demand.model.get_text_config()
    layers = count.backbone - shape.vocab_size * shape.hidden_size
    saved = demand.four_bit * layers * (frozen - FOUR_BITS)
    parts: dict[str, float] = {
        name: (count.adapters or size) * FLOAT32 * (2 + states) + bool(count.adapters) * (size * frozen - saved)
        for name, size in learners.items()
    }
    if demand.reference and not (demand.adapter and demand.reference is demand.model):
        reference = count if demand.reference is demand.model else count_parameters(demand.reference, None)
        parts["reference"] = reference.policy * frozen
    if frozen < FLOAT32 and not demand.adapter and demand.ranks == 1:  # ranks gather them in the compute dtype
        parts["weights cast for matrix products"] = count.policy * frozen
    parts = {name: size / demand.ranks for name, size in parts.items()}
    if demand.ranks > 1:
        layer = layers // shape.num_hidden_layers
        weights = count.policy - (shape.num_hidden_layers - 2) * layer  # one layer, and the next beside it
        parts["weights gathered"] = weights * (frozen if demand.adapter else frozen + FLOAT32)  # and their gradients
    if demand.defers:
        parts["gradients not yet reduced"] = max(count.adapters or size for size in learners.values()) * FLOAT32
    return parts


def checkpoint_gib(demand: Demand) -> float:
    """GiB of a run's checkpoint on disk: the policy with merged adapters, the critic and the optimisers."""
    count = count_parameters(demand.model, demand.adapter)
    states = FLOAT32 * ADAM_STATES
    if demand.adapter:
        learners = 2 if demand.critic else 1
        return (count.policy * demand.dtype.itemsize + learners * count.adapters * (FLOAT32 + states)) / GIB
    return (count.policy + demand.critic * count.backbone) * (FLOAT32 + states) / GIB


def activation_bytes(demand: Demand) -> int:
    """The activations that a micro-batch keeps for its backward pass, without the logits.

    Per token and layer these are 4 h (the hidden size) for input and output of two norms in the residual stream's
    precision, and in that of the matrix products 2 h for their outputs, of which autocast makes 5 h, one copy for each
    product, 5 q for queries, keys and values, repeated to as many heads, and attention's result twice, and 4 i for the
    MLP's width. Attention without a fused kernel adds the softmax, in float32 too, of every head over a context.
    Instead of attention, linear attention of v values keeps 10 v with the kernels of flash-linear-attention, which a
    GPU is taken to have, and elsewhere 32 v in float32, as measured. With gradient checkpointing every layer keeps its
    input alone, and one at a time is computed again.
    """
    config: Any = demand.model.get_text_config()  # its fields are those of the architecture
    compute = demand.dtype.itemsize
    hidden = config.hidden_size
    stream = compute if demand.adapter else FLOAT32
    queries = config.num_attention_heads * _head_size(config)
    copies = 5 if compute < FLOAT32 else 2
    attention = compute * 5 * queries
    if dropped_by_sdpa(config):
        attention += config.num_attention_heads * (demand.context or demand.tokens) * (FLOAT32 + compute)
    linears = (getattr(config, "layer_types", None) or []).count("linear_attention")
    linear = _linear_bytes(config, demand) if linears else 0
    rest = 4 * stream * hidden + compute * (copies * hidden + 4 * _mlp_width(config))
    per_token = config.num_hidden_layers * (rest + attention) + linears * (linear - attention)
    if demand.gradient_checkpointing:
        per_token = config.num_hidden_layers * stream * hidden + rest + max(attention, linear)
    return int(demand.tokens * per_token)


def _linear_bytes(config: Any, demand: Demand) -> int:
    """Of a token in a layer of linear attention."""
    per_value = 10 * demand.dtype.itemsize if demand.device == "cuda" else 32 * FLOAT32
    return int(config.linear_num_value_heads * config.linear_value_head_dim * per_value)


def _mlp_width(config: Any) -> int:
    widths = (getattr(config, name, None) for name in ("intermediate_size", "ffn_dim", "ffn_hidden_size", "n_inner"))
    return int(next(filter(None, widths), 4 * config.hidden_size))


def _sampler_gib(
    config: PretrainedConfig, settings: Params, dtype: torch.dtype, device: torch.device, gpu_gib: float
) -> float:
    """The memory that an engine reserves on a GPU, its weights at least; elsewhere these and the cache of one batch."""
    engine = settings.engine
    if engine.kind == "server":
        return 0.0
    weights = count_parameters(config, None).policy * dtype.itemsize / GIB
    if engine.kind == "vllm" and device.type == "cuda":
        memory_gib = gpu_gib or torch.cuda.get_device_properties(device).total_memory / GIB
        return max(engine.vllm.gpu_memory_utilization * memory_gib, weights / engine.vllm.tensor_parallel_size)
    if engine.kind == "vllm":
        processes = engine.vllm.processes(gpus=0, cores=len(os.sched_getaffinity(0)))
        return processes * (weights + engine.vllm.tensor_parallel_size * engine.vllm.cpu_cache_gib)
    shape: Any = config.get_text_config()
    heads = shape.to_dict().get("num_key_value_heads") or shape.num_attention_heads
    per_token = 2 * shape.num_hidden_layers * heads * _head_size(shape) * dtype.itemsize
    return float(weights + engine.transformers.batch_size * settings.env.max_tokens * per_token / GIB)


def _head_size(config: PretrainedConfig) -> int:
    return int(config.to_dict().get("head_dim") or config.hidden_size // config.num_attention_heads)


@led
def measure(learner: Learner, env: EnvParams) -> float:
    """Runs updates of the largest micro-batches that the limits allow, undoes them, and returns the peak in GiB.

    Call it with the sampler and the reference loaded. It takes two optimiser steps of two micro-batches on every rank:
    in the second, gradients and optimiser states are there while a micro-batch is computed, as in training. Weights,
    gradients, optimiser and random states are restored bit for bit. The peak is the most memory that torch has reserved
    on CUDA, or that this process has ever used on a CPU. Raises ValueError, with remedies, if the device has too little
    memory.
    """
    device = learner.compute.device
    refusal = ""
    with undone(list(learner.optimizers.values()), device):
        try:
            rows = _largest_step(learner, env)
            for _ in range(2):
                learner.policy_step(rows, learn=True, first=True)
                learner.critic_step(rows)
        except torch.OutOfMemoryError as error:  # raised below, once this error has released the activations
            refusal = str(error)
        used = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        peak = (torch.cuda.max_memory_reserved(device) if device.type == "cuda" else used) / GIB
        free = available_gib(device)
    tokens = len(rows) // (2 * learner.ranks.size) * len(rows[0].trajectory.token_ids)
    if refusal:
        raise ValueError(
            f"an update of micro-batches of {tokens} tokens does not fit into the memory of {device}, of which "
            f"{free:.1f} GiB were free beside it: {refusal}\n{REMEDIES}"
        )
    logger.info("memory at the peak, measured: %.2f GiB for micro-batches of %d tokens, %.2f free", peak, tokens, free)
    return peak


@led
def release(learner: Learner) -> None:
    """Returns PyTorch's free memory to a GPU, for a sampler that shares it."""
    if learner.compute.device.type == "cuda":
        torch.cuda.empty_cache()


def _largest_step(learner: Learner, env: EnvParams) -> list[CreditedTrajectory]:
    """An optimiser step of two of the largest micro-batches a rank, whose loss runs over all tokens but the first.

    No context begins like another, so that none is computed with it.
    """
    budget = learner.params.max_tokens_per_microbatch
    contexts = -(-budget // env.max_tokens)  # the fewest and longest; one beyond the budget is a micro-batch
    length = budget // contexts if contexts > 1 else env.max_tokens
    mask = np.arange(length) > 0
    ones = mask.astype(np.float32)
    trajectory = Trajectory(
        trajectory_id="",
        question_id="",
        group=0,
        sample=0,
        seed=0,
        policy_version=0,
        iteration=0,
        token_ids=np.zeros(length, np.int32),
        source=np.where(mask, Source.ACTION, Source.PROMPT).astype(np.uint8),
        logprobs=-ones,
        context_starts=[0],
        steps=[],
        outcome=Outcome.TURN_LIMIT,
        answer="",
    )
    credit = Credit(
        trajectory_id="",
        return_=1.0,
        advantages=ones,
        values=np.zeros(length, np.float32),
        value_targets=ones,
        reference_logprobs=-ones,
        loss_mask=mask,
        critic_mask=mask & bool(learner.critic),
        kept=True,
    )
    count = 2 * contexts * learner.ranks.size
    words = learner.policy.config.get_text_config().vocab_size
    apart = [replace(trajectory, token_ids=trajectory.token_ids + number % words) for number in range(count)]
    return learner.credited(apart, [credit] * count)
