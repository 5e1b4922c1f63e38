"""LoRA adapters: what trains, and what the merged model computes."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoModelForCausalLM

from agent_r1.files import model_hash
from agent_r1.learn import optimizers
from agent_r1.learn.adapter import attach, detached, load_adapter, merge, merged_state, read_stored, require_fit
from agent_r1.learn.model import load_policy
from agent_r1.learn.scoring import token_logprobs
from agent_r1.params.stages import LoraParams
from agent_r1.records import Trajectory
from benchmarks import families
from tests.cases import cases
from tests.learn.learning import CPU, LORA, Samples, contents, move

Make = Callable[..., Any]


def trained_names(model: nn.Module) -> set[str]:
    return {name for name, parameter in model.named_parameters() if parameter.requires_grad}


@pytest.fixture
def changed_model(tiny_model: Path, tmp_path: Path) -> Path:
    model = load_policy(tiny_model, device=CPU)
    model.get_input_embeddings().weight.data += 0.1
    model.save_pretrained(tmp_path / "changed")
    return tmp_path / "changed"


def test_one_layer_by_hand() -> None:
    """y = W x + alpha / rank B A x; nothing but A and B trains, and the merged weight is W + alpha / rank B A."""
    model = nn.Sequential(nn.Linear(2, 2, bias=False))
    with torch.no_grad():
        model[0].weight.copy_(torch.tensor([[1.0, 2.0], [3.0, 4.0]]))
    attach(model, LoraParams(rank=1, alpha=3.0, targets=["0"]), seed=0)
    x = torch.tensor([[1.0, 1.0]])
    assert model(x).tolist() == [[3.0, 7.0]]  # B starts at zero
    with torch.no_grad():
        model[0].lora_A["default"].weight.copy_(torch.tensor([[1.0, 0.0]]))
        model[0].lora_B["default"].weight.copy_(torch.tensor([[1.0], [2.0]]))
    assert model(x).tolist() == [[6.0, 13.0]]
    assert merged_state(model)["0.weight"].tolist() == [[4.0, 2.0], [9.0, 4.0]]
    assert trained_names(model) == {"0.lora_A.default.weight", "0.lora_B.default.weight"}
    with detached(model):
        assert model(x).tolist() == [[3.0, 7.0]]
    assert model(x).tolist() == [[6.0, 13.0]]


@pytest.mark.parametrize(("dtype", "unit"), [(torch.bfloat16, 2**-7), (torch.float16, 2**-10)])
def test_adapters_are_merged_in_float32_and_rounded_once(dtype: torch.dtype, unit: float) -> None:
    """1 + unit / 2 + a little lies nearer to 1 + unit. An update that was rounded first would be unit / 2, a tie to 1.

    A second merge begins from the weights as they were: nothing adds up over transfers.
    """
    model = nn.Sequential(nn.Linear(1, 1, bias=False))
    nn.init.ones_(model[0].weight)
    model.to(dtype)
    attach(model, LoraParams(rank=1, alpha=1.0, targets=["0"]), seed=0)
    with torch.no_grad():
        model[0].lora_A["default"].weight.fill_(1.0)
        model[0].lora_B["default"].weight.fill_(unit / 2 + 2**-20)
    for _ in range(2):
        merged = merged_state(model)["0.weight"]
        assert (merged.item(), merged.dtype) == (1 + unit, dtype)
        assert model[0].base_layer.weight.item() == 1.0


def test_only_adapters_and_the_critics_head_train(make_learner: Make, samples: Samples) -> None:
    learner = make_learner(adapter=LORA, learning_rate=0.01, critic={"learning_rate": 0.01})
    nn.init.normal_(learner.critic.head.weight, std=0.02)  # at zero, no gradient passes it
    models = nn.ModuleDict({"policy": learner.policy, "critic": learner.critic})
    before = {name: weight.detach().clone() for name, weight in models.named_parameters()}
    learner.update(*samples, 0)
    changed = {name for name, weight in models.named_parameters() if not torch.equal(weight, before[name])}
    adapters = {f"policy.{name}" for name in trained_names(learner.policy)}
    assert changed & {name for name in before if name.startswith("policy.")} <= adapters
    assert all("lora_" in name or name.startswith("critic.head.") for name in changed)
    assert {"critic.head.weight", "critic.head.bias"} <= changed
    assert sum("lora_B" in name for name in changed) == 2 * 2 * 7  # two models of two layers with seven matrices


def test_the_merged_policy_computes_what_the_learner_does(make_learner: Make, samples: Samples, tmp_path: Path) -> None:
    """As the sampler and plain transformers load it, in float32 within the canary's tolerance."""
    learner = make_learner(adapter=LORA, learning_rate=0.03)
    start = learner.logprobs(samples.trajectories)
    learner.update(*samples, 0)
    learner.save_policy(tmp_path)
    merged = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval()
    assert not any("lora" in name for name, _ in merged.named_parameters())
    assert merged.get_output_embeddings().weight is merged.get_input_embeddings().weight
    for each, old, own in zip(samples.trajectories, start, learner.logprobs(samples.trajectories), strict=True):
        ids = torch.from_numpy(each.token_ids.astype(np.int64))[None]
        predicted = torch.arange(len(each.token_ids))[None] > 0
        with torch.no_grad():
            found = token_logprobs(merged, ids, predicted).numpy()
        np.testing.assert_allclose(found, own[1:], atol=1e-4)
        assert np.abs(own - old).max() > 1e-2, "an update that changes nothing would prove nothing"


@pytest.mark.parametrize("targets", [["all-linear"], ["q_proj", "down_proj"]])
def test_peft_puts_the_saved_adapters_beside_the_model_they_were_trained_on(
    make_learner: Make, trajectories: list[Trajectory], tiny_model: Path, tmp_path: Path, targets: list[str]
) -> None:
    learner = make_learner(adapter=LORA.model_copy(update={"targets": targets}))
    move(learner)
    learner.save_policy(tmp_path)
    plain = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)
    found = PeftModel.from_pretrained(plain, tmp_path / "adapter").eval()
    ids = torch.from_numpy(trajectories[0].token_ids.astype(np.int64))[None]
    with torch.no_grad():
        assert torch.equal(found(ids).logits, learner.policy(ids).logits)


def test_layers_that_the_model_lacks_and_the_state_of_other_adapters_are_refused(
    make_learner: Make, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=r"model\.lora\.targets \['nowhere'\] does not fit the model"):
        make_learner(adapter=LoraParams(rank=4, alpha=8.0, targets=["nowhere"]))
    wide, narrow = make_learner(adapter=LORA), make_learner(adapter=LORA.model_copy(update={"targets": ["q_proj"]}))
    wide.save_state(tmp_path)
    stored = optimizers.names(tmp_path, narrow.critic)
    with pytest.raises(ValueError, match=r"trains other weights, .*lora_A"):
        optimizers.restore(tmp_path, stored, narrow.critic, narrow.optimizers)


def test_weights_beneath_adapters_are_kept_and_saved_in_the_compute_dtype(make_learner: Make, tmp_path: Path) -> None:
    learner = make_learner(adapter=LORA, dtype="bfloat16")
    kinds = {parameter.requires_grad: parameter.dtype for parameter in learner.policy.parameters()}
    assert kinds == {True: torch.float32, False: torch.bfloat16}
    learner.save_policy(tmp_path)
    assert {weight.dtype for weight in load_file(tmp_path / "model.safetensors").values()} == {torch.bfloat16}
    adapters = load_file(tmp_path / "adapter/adapter_model.safetensors")
    assert {weight.dtype for weight in adapters.values()} == {torch.float32}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_adapters_merged_later_have_same_bits(make_learner: Make, tiny_model: Path, tmp_path: Path, dtype: str) -> None:
    learner = make_learner(adapter=LORA, dtype=dtype)
    move(learner)
    learner.save_policy(tmp_path / "merged")
    learner.merges = False
    learner.save_policy(tmp_path / "alone")
    names = {path.name for path in (tmp_path / "alone").iterdir()}
    assert {path.name for path in (tmp_path / "merged").iterdir()} - names == {"model.safetensors"}
    merge(tmp_path / "alone", tiny_model, learner.compute.dtype)
    assert contents(tmp_path / "alone") == contents(tmp_path / "merged")


@cases("changes, message")
def test_unknown_peft_keys_refused(make_learner: Make, tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    make_learner(adapter=LORA).save_policy(tmp_path)
    file = tmp_path / "adapter/adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))
    with pytest.raises(ValueError, match=f"holds no adapters that were written here: .*{message}"):
        read_stored(tmp_path)


@pytest.mark.parametrize("name", ["adapter_config.json", "adapter_model.safetensors"])
@pytest.mark.parametrize("content", [None, b"{}", b"\xff" * 100])
def test_files_that_are_none_are_refused(make_learner: Make, tmp_path: Path, name: str, content: bytes | None) -> None:
    make_learner(adapter=LORA).save_policy(tmp_path)
    (tmp_path / "adapter" / name).unlink()
    if content is not None:
        (tmp_path / "adapter" / name).write_bytes(content)
    with pytest.raises(ValueError, match=r"holds no adapters that were written here: .*`dvc checkout --force`"):
        read_stored(tmp_path)


NAME = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"


@pytest.mark.parametrize(
    "change",
    [
        lambda weight: {},
        lambda weight: {NAME: weight, "base_model.model.lm_head.lora_A.weight": torch.zeros(2, 2)},
        lambda weight: {NAME: weight[:, :-1].contiguous()},
    ],
    ids=["missing", "further", "narrower"],
)
def test_unfit_tensors_are_refused(make_learner: Make, tiny_model: Path, tmp_path: Path, change: Make) -> None:
    """Before an evaluation runs them beside the model, and before a training goes on from them."""
    learner = make_learner(adapter=LORA)
    learner.save_policy(tmp_path)
    file = tmp_path / "adapter/adapter_model.safetensors"
    tensors = load_file(file)
    save_file(tensors | change(tensors.pop(NAME)), file)
    stored = read_stored(tmp_path)
    for check in (
        lambda: require_fit(stored, tmp_path, tiny_model),
        lambda: load_adapter(learner.policy, LORA, tmp_path, learner.beneath),
    ):
        with pytest.raises(ValueError, match=r"do not fit: '.*lora_A\.weight' is .*, not .*`dvc checkout --force`"):
            check()


def test_other_adapters_are_refused(make_learner: Make, tmp_path: Path, tiny_model: Path, changed_model: Path) -> None:
    learner = make_learner(adapter=LORA)
    learner.save_policy(tmp_path)
    stored = read_stored(tmp_path)
    assert (stored.params, stored.beneath) == (LORA, model_hash(str(tiny_model)))
    require_fit(stored, tmp_path, tiny_model)
    assert read_stored(tiny_model) is None
    with pytest.raises(ValueError, match="beside another model"):
        require_fit(stored, tmp_path, changed_model)
    with pytest.raises(ValueError, match="beside another model"):
        merge(tmp_path, changed_model, torch.float32)
    with pytest.raises(ValueError, match=r"holds adapters of rank=4 alpha=8 .*model\.lora is rank=4 alpha=16"):
        load_adapter(learner.policy, LORA.model_copy(update={"alpha": 16}), tmp_path, learner.beneath)
    with pytest.raises(ValueError, match=r"holds no adapters, and model\.lora\.rank is 4; set it back to 0"):
        load_adapter(learner.policy, LORA, tmp_path / "elsewhere", learner.beneath)


def test_experts_get_no_adapters_and_are_refused_as_targets(tmp_path: Path) -> None:
    """Their tensors hold a layer's experts at once; the shared one is a layer as any other."""
    families.make_model("Qwen3.5-MoE", tmp_path)
    model = load_policy(tmp_path, device=CPU)
    attach(model, LORA, seed=0)
    adapted = {name.partition(".lora_")[0] for name in trained_names(model)}
    assert any("shared_expert.up_proj" in name for name in adapted)
    assert not any("mlp.experts" in name or name.endswith("mlp.gate") for name in adapted)
    merged = merged_state(model)
    assert merged.keys() == load_policy(tmp_path, device=CPU).state_dict().keys()
    families.make_model("Qwen3-MoE", tmp_path)
    targets = ["q_proj", "gate_proj", "up_proj", "down_proj"]
    model = load_policy(tmp_path, device=CPU)
    with pytest.raises(ValueError, match="names experts, which take no adapters; leave them out"):
        attach(model, LORA.model_copy(update={"targets": targets}), seed=0)
