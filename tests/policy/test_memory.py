"""The memory estimate: counts by hand, against what a small model really allocates, and the refusal."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, Qwen2Config

from agent_r1.params import LoraParams, load
from agent_r1.policy import checkpoint, memory
from agent_r1.policy.adapter import attach
from agent_r1.policy.learner import Learner
from agent_r1.policy.memory import (
    GIB,
    Demand,
    activation_bytes,
    available_gib,
    checkpoint_gib,
    count_parameters,
    demand_of,
    estimate,
    require_fit,
    table,
)
from agent_r1.policy.model import load_policy, precision

CPU = torch.device("cpu")
PARAMS = Path(__file__).parents[2] / "params.yaml"
LORA = LoraParams(rank=4, alpha=8.0, targets=["all-linear"])
QWEN_3B = Qwen2Config(
    vocab_size=151936,
    hidden_size=2048,
    intermediate_size=11008,
    num_hidden_layers=36,
    num_attention_heads=16,
    num_key_value_heads=2,
    tie_word_embeddings=True,
)
SMALL = LlamaConfig(
    vocab_size=100,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    tie_word_embeddings=False,
)
DEMAND = Demand(
    model=SMALL,
    dtype=torch.float32,
    adapter=None,
    critic=True,
    reference=True,
    gradient_checkpointing=False,
    microbatch_tokens=10,
    loss_tokens=4,
    sampler_gib=3.0,
)
# By hand: embeddings 100 * 32 = 3200; a layer: q and o 32 * 32 each, k and v 32 * 16 each, three MLP matrices of
# 32 * 48, two norms of 32: 2048 + 1024 + 4608 + 64 = 7744; the last norm 32; an output layer of its own, 3200.
BACKBONE = 3200 + 2 * 7744 + 32
POLICY = BACKBONE + 3200


def test_parameters_by_hand() -> None:
    count = count_parameters(SMALL, None)
    assert (count.policy, count.backbone, count.adapters) == (POLICY, BACKBONE, 0)
    # rank times the sum of both sides of each matrix: q, o 64; k, v 48; MLP 80 each
    assert count_parameters(SMALL, LORA).adapters == 2 * 4 * (64 + 64 + 48 + 48 + 3 * 80)
    assert count_parameters(SMALL, LORA).policy == POLICY


def test_qwen_3b_has_the_published_number() -> None:
    """3.09 billion, 2.77 billion without the tied embeddings (Qwen2.5 technical report, arXiv 2412.15115)."""
    count = count_parameters(QWEN_3B, None)
    assert count.policy == count.backbone
    assert round(count.policy / 1e9, 2) == 3.09
    assert round((count.policy - 151936 * 2048) / 1e9, 2) == 2.77


def test_counts_are_the_bytes_that_are_allocated(tiny_model: Path) -> None:
    model = load_policy(tiny_model, device=CPU)
    allocated = sum(parameter.untyped_storage().nbytes() for parameter in model.parameters())
    assert count_parameters(model.config, None).policy * 4 == allocated
    attach(model, LORA, seed=0)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    assert count_parameters(model.config, LORA).adapters * 4 == sum(each.untyped_storage().nbytes() for each in trained)


def test_the_parts_by_hand() -> None:
    """float32: sixteen bytes for a weight that trains, four for one of the reference."""
    parts = {name: round(size * GIB) for name, size in estimate(DEMAND).items()}
    assert parts["policy"] == 16 * POLICY
    assert parts["critic"] == 16 * (BACKBONE + 33)
    assert parts["reference"] == 4 * POLICY
    assert parts["logits"] == 4 * 100 * 4 * 5
    assert parts["sampler"] == 3 * GIB
    assert "weights cast for matrix products" not in parts


def test_adapters_in_bfloat16_by_hand() -> None:
    adapters = count_parameters(SMALL, LORA).adapters
    demand = replace(DEMAND, adapter=LORA, dtype=torch.bfloat16)
    parts = {name: round(size * GIB) for name, size in estimate(demand).items()}
    assert parts["policy"] == 2 * POLICY + 16 * adapters
    assert parts["critic"] == 2 * (BACKBONE + 33) + 16 * adapters
    assert "reference" not in parts, "it is the policy without the adapters"
    assert "weights cast for matrix products" not in parts


@pytest.mark.parametrize("adapter", [None, LORA], ids=["weights", "adapters"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_activations_are_near_what_autograd_keeps(
    tiny_model: Path, dtype: torch.dtype, adapter: LoraParams | None
) -> None:
    model = load_policy(tiny_model, dtype if adapter else torch.float32, CPU)
    if adapter:
        attach(model, adapter, seed=0)
    weights = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    tokens, kept = 4 * 64, dict[int, int]()

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if tensor.numel() >= tokens * model.config.hidden_size and storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    ids = torch.randint(20, 300, (4, 64), generator=torch.Generator().manual_seed(0))
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor), precision(CPU, dtype):
        hidden = model.base_model(input_ids=ids, use_cache=False).last_hidden_state
    expected = activation_bytes(
        replace(DEMAND, model=model.config, dtype=dtype, adapter=adapter, microbatch_tokens=tokens)
    )
    assert hidden.shape == (4, 64, 64)
    assert 0.7 < expected / sum(kept.values()) < 1.4, (expected, sum(kept.values()))


def test_gradient_checkpointing_keeps_one_layer_and_the_inputs_of_all() -> None:
    whole, kept = (activation_bytes(replace(DEMAND, gradient_checkpointing=recompute)) for recompute in (False, True))
    assert kept == whole // 2 + 10 * 2 * 4 * 32  # of two layers; ten tokens, float32, hidden size 32


def test_what_cannot_fit_is_refused_with_the_numbers() -> None:
    parts = estimate(DEMAND)
    require_fit(parts, 6.0)
    with pytest.raises(ValueError, match=r"needs about 5\.5 GiB and the device has 5\.0:") as refusal:
        require_fit(parts, 5.0)
    assert all(part in str(refusal.value) for part in (*parts, "gradient_checkpointing", "model.lora.rank"))


def test_the_table_adds_up() -> None:
    assert table({"policy": 1.0, "sampler": 0.25}, 2.0).splitlines() == [
        "policy        1.00 GiB",
        "sampler       0.25 GiB",
        "all           1.25 GiB",
        "available     2.00 GiB",
    ]


def test_the_demand_of_the_projects_own_params() -> None:
    settings = load(PARAMS)
    demand = demand_of(SMALL, settings.model, settings.env, settings.run("ppo"), engine=settings.engine, device=CPU)
    assert (demand.critic, demand.reference, demand.adapter, demand.sampler_gib) == (True, False, None, None)
    assert demand.microbatch_tokens == 4096
    assert demand.loss_tokens == 4096 * 5 * 64 // 512
    unmasked = settings.run("ppo_no_masks")
    everywhere = demand_of(SMALL, settings.model, settings.env, unmasked, engine=settings.engine, device=CPU)
    assert everywhere.loss_tokens == 4096


def test_a_machine_has_memory() -> None:
    assert 0.1 < available_gib(CPU) < 1e5


def test_the_full_configuration_fits_one_80_gb_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Adapters with a critic fit, all weights with a critic do not."""
    monkeypatch.setattr(memory, "available_gib", lambda device: 79.0)
    settings = load(PARAMS.with_name("params.qwen2.5-3b.yaml"))
    demand = demand_of(
        QWEN_3B,
        settings.model,
        settings.env,
        settings.run("ppo"),
        engine=settings.engine,
        device=torch.device("cuda"),
    )
    assert (demand.dtype, demand.critic, demand.reference) == (torch.bfloat16, True, True)
    assert (demand.microbatch_tokens, demand.loss_tokens) == (8192, 5 * 1024)
    parts = estimate(demand)
    assert sum(parts.values()) == pytest.approx(66, abs=1)  # as docs/data_and_models.md says
    require_fit(parts, 79.0)
    whole = estimate(replace(demand, adapter=None))
    assert sum(whole.values()) == pytest.approx(155, abs=1)
    with pytest.raises(ValueError, match=r"the device has 79\.0"):
        require_fit(whole, 79.0)


@pytest.mark.parametrize("critic", [True, False])
@pytest.mark.parametrize("adapter", [None, LORA])
def test_a_checkpoint_takes_the_disk_space_that_is_expected(
    tmp_path: Path, tiny_model: Path, critic: bool, adapter: LoraParams | None
) -> None:
    """After an update of policy and critic, whose optimisers keep states from then on."""
    update = load(PARAMS).train.update
    learner = Learner(tiny_model, update, with_critic=critic, seed=0, device=CPU, adapter=adapter)
    for module, optimizer in ((learner.policy, learner.policy_optimizer), (learner.critic, learner.critic_optimizer)):
        if module and optimizer:
            for weight in module.parameters():
                weight.grad = torch.zeros_like(weight) if weight.requires_grad else None
            optimizer.step()
    checkpoint.save(tmp_path / "checkpoint", learner, iterations=1, fingerprint="same")
    files = ["learner.pt", "policy/model.safetensors"]
    files += ["policy/adapter/adapter_model.safetensors"] if adapter else []
    expected = checkpoint_gib(
        Demand(
            model=learner.policy.config,
            dtype=torch.float32,
            adapter=adapter,
            critic=critic,
            reference=False,
            gradient_checkpointing=False,
            microbatch_tokens=1,
            loss_tokens=1,
            sampler_gib=None,
        )
    )
    on_disk = sum((tmp_path / "checkpoint" / name).stat().st_size for name in files) / GIB
    assert on_disk == pytest.approx(expected, rel=0.15)  # names and shapes weigh something at this size
