"""Models as they are loaded, refused, recomputed; and the critic beside the policy."""

import io
import json
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    Ernie4_5_MoeConfig,
    Gemma2Config,
    Gemma3Config,
    Gemma3TextConfig,
    OPTConfig,
    OPTForCausalLM,
    PreTrainedConfig,
    Qwen3_5Config,
)

from agent_r1.files import load_pretrained
from agent_r1.learn.model import Critic, load_policy, load_tokenizer, recompute_activations
from agent_r1.learn.scoring import token_logprobs
from agent_r1.pretrained import end_tokens, load_model, waiting
from tests.cases import cases
from tests.learn.learning import CPU, same_bits, weights

SHAPE = {"hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 12}
EXPERTS = {"moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 20, "moe_layer_start_index": 1}


def test_weights_do_not_change_with_the_file_they_came_from(tiny_model: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(tiny_model, tmp_path / "model")
    model = load_policy(folder, device=CPU)
    before = weights(model)
    with (folder / "model.safetensors").open("r+b") as file:
        file.write(b"\0" * (folder / "model.safetensors").stat().st_size)
    assert same_bits(before, weights(model))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "config",
    [
        Gemma3TextConfig(vocab_size=31, intermediate_size=40, **SHAPE),  # scales its words by a number that it rounds
        Ernie4_5_MoeConfig(vocab_size=31, intermediate_size=40, **SHAPE, **EXPERTS),  # has gates that stay in float32
    ],
    ids=["Gemma", "Ernie"],
)
def test_weights_that_wait_are_those_of_a_process(config: PreTrainedConfig, dtype: torch.dtype, tmp_path: Path) -> None:
    """To the bit, in the types that a process gives them, with buffers and configuration. The file is in bfloat16."""
    AutoModelForCausalLM.from_config(config).bfloat16().save_pretrained(tmp_path)
    drawn = torch.random.get_rng_state()
    whole, waits = load_model(tmp_path, dtype, CPU), load_model(tmp_path, dtype, CPU, waits=True)
    assert waits.config.to_dict() == whole.config.to_dict()
    assert waiting(waits).keys() == {name for name, _ in whole.named_parameters(remove_duplicate=False)}
    found = {name: weight.to(waits.get_parameter(name).dtype) for name, weight in waiting(waits).items()}
    found |= dict(waits.named_buffers())
    for name, tensor in [*whole.named_parameters(), *whole.named_buffers()]:
        assert found[name].dtype is tensor.dtype
        assert torch.equal(found[name], tensor)
    assert torch.equal(torch.random.get_rng_state(), drawn)


@cases("missing, part, remedy")
def test_a_folder_without_a_part_is_refused(
    tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch, missing: str, part: str, remedy: str
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    folder = shutil.copytree(tiny_model, tmp_path / "model")
    for path in folder.glob(missing):
        path.unlink()
    if missing == "*":
        folder.rmdir()
    load: Any = load_policy if part == "policy" else load_tokenizer
    with pytest.raises(ValueError, match=remedy):
        load(folder if folder.exists() else Path("outputs/nowhere"))


def test_a_folder_that_lacks_some_weights_or_words_is_refused(tmp_path: Path, tiny_model: Path) -> None:
    model = load_policy(tiny_model, device=CPU)
    state = {name: weight for name, weight in model.state_dict().items() if "layers.1.mlp.down_proj" not in name}
    model.save_pretrained(tmp_path, state_dict=state)
    with pytest.raises(ValueError, match=r"lacks the weights of 1 tensors of its Qwen2.*layers\.1\.mlp\.down_proj"):
        load_policy(tmp_path, device=CPU)
    rows = model.get_input_embeddings().num_embeddings
    model.resize_token_embeddings(rows - 3)
    model.save_pretrained(tmp_path)
    load_tokenizer(tiny_model).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=f"a vocabulary of {rows - 3} tokens and its tokenizer has {rows};"):
        load_tokenizer(tmp_path)


@pytest.mark.parametrize(
    "config",
    [
        Gemma3Config(
            text_config={"vocab_size": 31, "intermediate_size": 40, **SHAPE},
            vision_config={"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 28},
            image_token_index=30,
        ),
        Qwen3_5Config(
            text_config={"vocab_size": 31, "intermediate_size": 40, **SHAPE, "head_dim": 16},
            vision_config={"depth": 1, "hidden_size": 16, "num_heads": 2, "out_hidden_size": 24},
            image_token_id=30,
        ),
    ],
    ids=["Gemma", "Qwen"],
)
def test_text_model_of_one_that_reads_images_is_loaded_and_saved(config: PreTrainedConfig, tmp_path: Path) -> None:
    full = AutoModelForImageTextToText.from_config(config).eval()
    full.save_pretrained(tmp_path / "full")
    model = load_policy(tmp_path / "full", device=CPU)
    ids = torch.arange(12)[None]
    assert torch.allclose(
        model(input_ids=ids, use_cache=False).logits, full(input_ids=ids, use_cache=False).logits, atol=1e-5
    )
    model.save_pretrained(tmp_path / "text")
    saved = load_pretrained(AutoConfig, tmp_path / "text")
    assert saved.get_text_config() is saved
    assert same_bits(weights(load_policy(tmp_path / "text", device=CPU)), weights(model))


def test_soft_caps_of_attention_are_kept_or_refused(tmp_path: Path) -> None:
    """The fused kernel drops them: with a cap of .01 the learner would be far from the model."""
    config = Gemma2Config(vocab_size=31, intermediate_size=40, attn_logit_softcapping=0.01, **SHAPE)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    for weight in model.parameters():
        torch.nn.init.normal_(weight)  # attention is far from even then
    model.save_pretrained(tmp_path)
    ids = torch.arange(12).reshape(1, 12)
    expected = model(ids).logits
    assert torch.equal(load_policy(tmp_path, device=CPU)(ids).logits, expected)
    model.set_attn_implementation("sdpa")
    assert not torch.allclose(model(ids).logits, expected, atol=0.01)
    with pytest.raises(ValueError, match=r"has soft caps of 0\.01.*set model\.packing: false"):
        load_policy(tmp_path, device=CPU, packed=True)


def test_end_tokens_are_those_of_generation_config_else_of_config(tmp_path: Path, tiny_model: Path) -> None:
    shutil.copy(tiny_model / "config.json", tmp_path)
    own = json.loads((tmp_path / "config.json").read_text())["eos_token_id"]
    assert end_tokens(tmp_path) == [own]
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [1, own]}))
    assert end_tokens(tmp_path) == [1, own]
    (tmp_path / "config.json").unlink()
    assert end_tokens(tmp_path) == []


def test_a_tokenizer_is_read_as_it_was_saved(tmp_path: Path, tiny_model: Path) -> None:
    """Whatever class its configuration names: that of Llama would lose all blanks of this one."""
    folder = shutil.copytree(tiny_model, tmp_path / "model")
    (folder / "config.json").unlink()
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps(settings | {"tokenizer_class": "LlamaTokenizer"}))
    text = "Who is\n it?"
    assert load_tokenizer(folder).encode(text) == load_tokenizer(tiny_model).encode(text)


CODE = """
from pathlib import Path
from transformers import PreTrainedConfig as Config, PreTrainedTokenizerFast as Tokenizer, Qwen2ForCausalLM as Model
Path("ran").touch()
"""


@pytest.mark.parametrize(
    "load",
    [load_policy, load_tokenizer, lambda path: Critic(path, torch.float32, CPU), partial(load_pretrained, AutoConfig)],
)
def test_no_foreign_code_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, load: Callable[[Path], object]) -> None:
    brought = {"AutoConfig": "own.Config", "AutoModel": "own.Model", "AutoModelForCausalLM": "own.Model"}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "own", "auto_map": brought}))
    own = {"tokenizer_class": "Own", "auto_map": {"AutoTokenizer": [None, "own.Tokenizer"]}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(own))
    (tmp_path / "own.py").write_text(CODE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.stdin", io.StringIO("y\n" * 9))
    with pytest.raises(ValueError, match=f"'{tmp_path}' brings code of its own"):
        load(tmp_path)
    assert not (tmp_path / "ran").exists()


def test_gradient_checkpointing_changes_no_bit_of_a_gradient(tiny_model: Path) -> None:
    ids = torch.randint(20, 300, (2, 24), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(ids, dtype=torch.bool)
    mask[:, 0] = False
    gradients, kept = [], []
    for recompute in (False, True):
        model = load_policy(tiny_model, device=CPU)
        if recompute:
            recompute_activations(model)
        saved: list[int] = []
        with torch.autograd.graph.saved_tensors_hooks(lambda x, saved=saved: saved.append(x.numel()) or x, lambda x: x):
            loss = -token_logprobs(model, ids, mask).sum()
        loss.backward()
        gradients.append([parameter.grad for parameter in model.parameters()])
        kept.append(sum(saved))
        assert not any(module.training for module in model.modules() if isinstance(module, torch.nn.Dropout))
    assert same_bits(*gradients)
    assert kept[1] < 0.6 * kept[0], "something must have been computed again"


def test_gradient_checkpointing_drops_nothing_where_layers_drop_out_themselves() -> None:
    shape = {"vocab_size": 64, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "ffn_dim": 16}
    config = OPTConfig(**shape, max_position_embeddings=32, word_embed_proj_dim=16, dropout=0.5)
    model, ids = OPTForCausalLM(config).eval(), torch.arange(8, 24)[None]
    plain = model(ids).logits
    recompute_activations(model)
    assert torch.equal(model(ids).logits, plain)


IDS = torch.tensor([[30, 31, 32, 33], [40, 41, 42, 43]])


def values(critic: Critic, ids: Tensor = IDS) -> Tensor:
    everywhere = torch.ones_like(ids, dtype=torch.bool)
    return critic(ids, everywhere).reshape(ids.shape)  # type: ignore[no-any-return]


def test_the_backbone_starts_as_the_policys_with_weights_of_its_own(tiny_model: Path) -> None:
    critic, policy = Critic(tiny_model, torch.float32, CPU), load_policy(tiny_model, device=CPU)
    for ours, theirs in zip(critic.backbone.parameters(), policy.base_model.parameters(), strict=True):
        assert torch.equal(ours, theirs)
        assert ours is not theirs


def test_values_come_from_the_hidden_state_one_earlier(tiny_model: Path) -> None:
    critic = Critic(tiny_model, torch.float32, CPU)
    torch.nn.init.normal_(critic.head.weight, generator=torch.Generator().manual_seed(0))
    hidden = critic.backbone(input_ids=IDS).last_hidden_state
    assert values(critic)[:, 0].tolist() == [0.0, 0.0]
    assert torch.allclose(values(critic)[:, 2], hidden[:, 1] @ critic.head.weight[0], atol=1e-6)
