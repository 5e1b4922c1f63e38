"""The memory estimate against counts by hand and real allocations, the measurement, and their refusals."""

import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import yaml
from transformers import LlamaConfig, PretrainedConfig, PreTrainedModel

from agent_r1.learn import checkpoint
from agent_r1.learn.adapter import count_parameters
from agent_r1.learn.learner import Learner
from agent_r1.learn.memory import (
    GIB,
    Demand,
    activation_bytes,
    checkpoint_gib,
    demand_of,
    estimate,
    measure,
    require_fit,
)
from agent_r1.learn.model import load_policy
from agent_r1.learn.optimizers import blank_state, take_state
from agent_r1.params import Params, load
from agent_r1.params.places import RunId
from agent_r1.params.sections import override
from agent_r1.params.stages import DtypeName, LoraParams
from benchmarks import families
from benchmarks.synthetic import SHAPES, config_of
from tests.learn.learning import CPU, LORA, Samples, record_of

PARAMS = Path(__file__).parents[2] / "params.yaml"
LIMITS = load(PARAMS).env.model_copy(update={"max_tokens": 30})
QWEN_3B, QWEN_7B = (config_of(SHAPES[size], 4096) for size in ("3B", "7B"))
SHAPE = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
SMALL = LlamaConfig(**SHAPE, vocab_size=100, intermediate_size=48, tie_word_embeddings=False)
DEMAND = Demand(model=SMALL, dtype=torch.float32, critic=True, reference=SMALL, tokens=10, sampler_gib=3.0)
# By hand: embeddings 100 * 32 = 3200; a layer: q and o 32 * 32 each, k and v 32 * 16 each, three MLP matrices of
# 32 * 48, two norms of 32: 2048 + 1024 + 4608 + 64 = 7744; the last norm 32; an output layer of its own, 3200.
BACKBONE = 3200 + 2 * 7744 + 32
POLICY = BACKBONE + 3200


def test_parameters_and_parts_by_hand() -> None:
    """float32: sixteen bytes for a weight that trains, four for one of the reference."""
    count = count_parameters(SMALL, None)
    assert (count.policy, count.backbone, count.adapters) == (POLICY, BACKBONE, 0)
    # rank times the sum of both sides of each matrix: q, o 64; k, v 48; MLP 80 each
    assert count_parameters(SMALL, LORA).adapters == 2 * 4 * (64 + 64 + 48 + 48 + 3 * 80)
    assert count_parameters(SMALL, LORA).policy == POLICY
    parts = {name: round(size * GIB) for name, size in estimate(DEMAND).items()}
    assert parts["policy"] == 16 * POLICY
    assert parts["critic"] == 16 * (BACKBONE + 33)
    assert parts["reference"] == 4 * POLICY
    assert parts["logits"] == 10 * 100 * 4 * 3
    assert parts["sampler"] == 3 * GIB
    assert "weights cast for matrix products" not in parts
    whole, kept = (activation_bytes(replace(DEMAND, gradient_checkpointing=recompute)) for recompute in (False, True))
    assert kept == whole // 2 + 10 * 2 * 4 * 32  # one of two layers, and the inputs of both


def kept_bytes(model: PreTrainedModel, ids: torch.Tensor) -> int:
    """The bytes that a backward pass keeps, but for the weights."""
    kept = dict[int, int]()

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        model.model(ids, use_cache=False)
    for weight in model.parameters():
        kept.pop(weight.untyped_storage().data_ptr(), None)
    return sum(kept.values())


@pytest.mark.parametrize("family", ["Qwen3.5", "gpt-oss", "Qwen3"])
def test_the_activations_of_families_against_what_their_layers_keep(family: str, tmp_path: Path) -> None:
    """Linear attention by its reference, the scores of attention without a kernel, and plain attention."""
    families.make_model(family, tmp_path)
    model = load_policy(tmp_path, device=CPU)
    kept = kept_bytes(model, torch.arange(512)[None] % families.WORDS)
    assert activation_bytes(Demand(model=model.config, tokens=512)) == pytest.approx(kept, rel=0.35)


def test_what_saves_memory_of_a_shared_gpu_by_hand() -> None:
    """Offloaded, a weight takes eight bytes; a sampler that sleeps wants what gradients and activations leave."""
    demand = replace(DEMAND, optimizer_offload=True)
    parts = {name: round(size * GIB) for name, size in estimate(demand).items()}
    assert parts["policy"] == 8 * POLICY
    assert parts["critic"] == 8 * (BACKBONE + 33)
    freed = 4 * (POLICY + BACKBONE + 33) + parts["activations"] + parts["logits"]
    assert estimate(replace(demand, sampler_sleeps=True))["sampler"] * GIB == pytest.approx(3 * GIB - freed)
    assert estimate(replace(demand, sampler_sleeps=True, sampler_gib=freed / GIB / 2))["sampler"] == 0


def test_a_micro_batch_that_is_smaller_than_a_context_is_refused_by_name() -> None:
    settings = load(PARAMS)
    update = settings.train.update.model_copy(update={"max_tokens_per_microbatch": 500})
    small = settings.model_copy(update={"train": settings.train.model_copy(update={"update": update})})
    with pytest.raises(ValueError, match=r"ppo: .*max_tokens_per_microbatch 500 is below .* env\.max_tokens 512"):
        demand_of(SMALL, small, RunId("ppo"), CPU)


def test_adapters_in_bfloat16_by_hand() -> None:
    adapters = count_parameters(SMALL, LORA).adapters
    demand = replace(DEMAND, adapter=LORA, dtype=torch.bfloat16)
    parts = {name: round(size * GIB) for name, size in estimate(demand).items()}
    assert parts["policy"] == 2 * POLICY + 16 * adapters
    assert parts["critic"] == 2 * (BACKBONE + 33) + 16 * adapters
    assert "reference" not in parts, "it is the policy without the adapters"
    assert "weights cast for matrix products" not in parts
    small = {name: size * GIB for name, size in estimate(replace(demand, four_bit=True)).items()}
    saved = (2 - 0.5 - 4 / 64) * (BACKBONE - 3200)  # four bits and a 64th of a scale for a weight of the layers
    assert small == pytest.approx(parts | {name: parts[name] - saved for name in ("policy", "critic")}, rel=1e-6)


def test_what_cannot_fit_is_refused_with_the_numbers() -> None:
    parts = estimate(DEMAND)
    require_fit(parts, 6.0)
    with pytest.raises(ValueError, match=r"needs about 5\.5 GiB and the device has 5\.0:") as refusal:
        require_fit(parts, 5.0)
    assert all(part in str(refusal.value) for part in (*parts, "gradient_checkpointing", "model.lora.rank"))


def test_the_demand_of_the_projects_own_params() -> None:
    settings = load(PARAMS)
    demand = demand_of(SMALL, settings, RunId("ppo"), CPU)
    assert (demand.critic, demand.reference, demand.adapter, demand.tokens) == (True, None, None, 2048)
    weights, cache = 4 * POLICY / GIB, settings.engine.vllm.cpu_cache_gib
    assert demand.sampler_gib == pytest.approx(weights + cache)
    more = settings.engine.vllm.model_copy(update={"replicas": 2, "tensor_parallel_size": 3})
    settings = settings.model_copy(update={"engine": settings.engine.model_copy(update={"vllm": more})})
    assert demand_of(SMALL, settings, RunId("ppo"), CPU).sampler_gib == pytest.approx(2 * (weights + 3 * cache))


@pytest.fixture
def on_80_gb(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Params]:
    """An overlay of the project's parameters, on a machine whose GPUs have 80 GB each."""
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(total_memory=79 * GIB))

    def overlay(name: str) -> Params:
        base, changes = (yaml.safe_load(path.read_text()) for path in (PARAMS, PARAMS.parent / f"overlays/{name}.yaml"))
        return Params.model_validate(override(base, changes | {"places": {}}))

    return overlay


def test_the_full_configuration_fits_one_80_gb_gpu(on_80_gb: Callable[[str], Params]) -> None:
    """Adapters with a critic fit, all weights with a critic do not."""
    settings = on_80_gb("qwen2.5-3b")
    demand = demand_of(QWEN_3B, settings, RunId("ppo"), torch.device("cuda"))
    assert (demand.dtype, demand.critic, demand.reference, demand.tokens) == (torch.bfloat16, True, QWEN_3B, 32768)
    parts = estimate(demand)
    assert sum(parts.values()) == pytest.approx(60, abs=1)  # as the overlay says
    require_fit(parts, 79.0)
    whole = estimate(replace(demand, adapter=None))
    assert sum(whole.values()) == pytest.approx(153, abs=1)
    with pytest.raises(ValueError, match=r"the device has 79\.0"):
        require_fit(whole, 79.0)


@pytest.mark.parametrize(("name", "model"), [("qwen2.5-7b", QWEN_7B), ("qwen2.5-3b-weights", QWEN_3B)])
def test_eight_gpus_hold_their_overlay(on_80_gb: Callable[[str], Params], name: str, model: PretrainedConfig) -> None:
    """All weights with a critic and a sampler on each GPU, which one GPU would not hold."""
    settings = on_80_gb(name)
    for run in settings.ablations.runs:
        demand = demand_of(model, settings, RunId(run), torch.device("cuda"))
        assert (demand.dtype, demand.ranks, demand.sampler_sleeps) == (torch.bfloat16, 8, name == "qwen2.5-7b")
        assert demand.defers is (name != "qwen2.5-7b")
        assert demand.critic == (run == "ppo")
        require_fit(estimate(demand), 79.0)
        with pytest.raises(ValueError, match=r"the device has 79\.0"):
            require_fit(estimate(replace(demand, ranks=1)), 79.0)


@pytest.mark.parametrize(
    ("adapter", "dtype", "critic"), [(None, "float32", True), (LORA, "float32", False), (LORA, "bfloat16", True)]
)
def test_a_checkpoint_takes_the_disk_space_that_is_expected(
    tmp_path: Path, make_learner: Callable[..., Learner], critic: bool, adapter: LoraParams | None, dtype: DtypeName
) -> None:
    """After an update of policy and critic, whose optimisers keep states from then on."""
    learner = make_learner(with_critic=critic, adapter=adapter, dtype=dtype)
    for optimizer in learner.optimizers.values():
        take_state(optimizer, blank_state(optimizer))
    checkpoint.save(tmp_path / "checkpoint", learner, checkpoint.Progress(iterations=1, policy_version=0))
    files = ["learner/shard-00001-model-00001-of-00001.safetensors", "policy/model.safetensors"]
    files += ["policy/adapter/adapter_model.safetensors"] if adapter else []
    demand = replace(DEMAND, model=learner.policy.config, dtype=getattr(torch, dtype), adapter=adapter, critic=critic)
    on_disk = sum((tmp_path / "checkpoint" / name).stat().st_size for name in files) / GIB
    assert on_disk == pytest.approx(checkpoint_gib(demand), rel=0.2)  # names and shapes weigh something at this size


@pytest.mark.parametrize("changes", [{}, {"adapter": LORA, "dtype": "bfloat16"}, {"with_critic": False}], ids=str)
@pytest.mark.parametrize("trained", [False, True])
def test_a_measurement_leaves_no_trace(
    make_learner: Callable[..., Learner], samples: Samples, changes: dict[str, Any], trained: bool
) -> None:
    """In a fresh learner, and in one whose optimisers have states and whose weights have gradients."""
    learner = make_learner(**changes)
    if trained:
        learner.update(*samples, 0)
        for weight in learner.policy.parameters():
            weight.grad = torch.ones_like(weight) if weight.requires_grad else None
    before = record_of(learner)
    assert measure(learner, LIMITS) > 0.05
    assert record_of(learner) == before


@pytest.mark.parametrize(("budget", "shape"), [(64, (3, 21)), (60, (2, 30)), (10, (1, 30))])
def test_the_largest_micro_batch_is_measured(
    make_learner: Callable[..., Learner], caplog: pytest.LogCaptureFixture, budget: int, shape: tuple[int, int]
) -> None:
    """Contexts of at most 30 tokens, as many as the budget allows, at least one; two of them in each of two steps."""
    learner, seen = make_learner(max_tokens_per_microbatch=budget, kl_loss=0.1), list[Any]()

    def see(_: torch.nn.Module, inputs: tuple[torch.Tensor]) -> None:
        seen.append(tuple(inputs[0].shape[:2]))

    learner.policy.base_model.layers[0].register_forward_pre_hook(see)
    with caplog.at_level(logging.INFO, logger="agent_r1"):
        measure(learner, LIMITS)
    assert seen == [shape] * 4
    assert f"GiB for micro-batches of {shape[0] * shape[1]} tokens" in caplog.text


def test_too_little_memory_is_refused(make_learner: Callable[..., Learner], monkeypatch: pytest.MonkeyPatch) -> None:
    """It runs out where policy and critic have been stepped and the second step has gradients."""
    learner = make_learner()
    before, steps = record_of(learner), list[int]()
    real = learner.critic_optimizer.step

    def run_out() -> None:
        steps.append(1)
        if len(steps) == 2:
            raise torch.OutOfMemoryError("tried to allocate 9 GiB")
        real()

    monkeypatch.setattr(learner.critic_optimizer, "step", run_out)
    with pytest.raises(ValueError, match=r"of 63 tokens does not fit .* 9 GiB\nlower train\.update") as refused:
        measure(learner, LIMITS)
    assert refused.value.__context__ is None, "which would hold on to the activations"
    assert record_of(learner) == before


def test_ranks_share_out_what_stays_and_gather_what_is_computed() -> None:
    """Four of a model with 36 layers: a quarter of weights and states, and two layers and the embeddings besides."""
    one, each = (estimate(replace(DEMAND, model=QWEN_3B, critic=True, ranks=ranks)) for ranks in (1, 4))
    for part in ("policy", "critic"):
        assert each[part] == pytest.approx(one[part] / 4)
    for part in ("activations", "logits", "libraries"):
        assert each[part] == one[part]
    words = QWEN_3B.vocab_size * QWEN_3B.hidden_size
    layers = count_parameters(QWEN_3B, None).policy - words
    assert each["weights gathered"] == pytest.approx(8 * (words + layers / 18) / GIB, rel=0.01)
    assert "weights gathered" not in one
    deferred = estimate(replace(DEMAND, model=QWEN_3B, critic=True, ranks=4, defers=True))
    assert deferred["gradients not yet reduced"] == pytest.approx(4 * (words + layers) / GIB, rel=1e-5)
