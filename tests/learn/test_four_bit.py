"""A base in four bits: the learner's, the sampler's and the merged weights are one model, bit for bit."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from agent_r1.learn.adapter import merge, merged_state, trained_state
from agent_r1.learn.gradients import add_policy_gradient
from agent_r1.learn.learner import Learner, Options
from agent_r1.learn.model import load_policy
from tests.learn.learning import CPU, LORA, PARAMS, UPDATE, Samples, gradients, move, weights

pytest.importorskip("bitsandbytes", reason="the extra four_bit is not installed")
from agent_r1.learn.four_bit import FourBit, compress, round_off

Make = Callable[..., Learner]


@pytest.fixture
def rounded(tiny_model: Path, tmp_path: Path) -> Path:
    """The tiny model as the warm start writes it."""
    shutil.copytree(tiny_model, tmp_path / "rounded")
    round_off(tmp_path / "rounded")
    return tmp_path / "rounded"


@pytest.fixture
def make(rounded: Path) -> Make:
    """A learner of adapters over the rounded model."""

    def build(base: str, *, dtype: str = "float32", merges: bool = True, checkpointing: bool = False) -> Learner:
        changes = {"dtype": dtype, "threads": 1, "lora": LORA, "base": base, "gradient_checkpointing": checkpointing}
        model = PARAMS.model.model_copy(update=changes)
        options = Options(device=CPU, merges=merges, with_reference=True)
        return Learner(rounded, UPDATE, model, with_critic=True, seed=3, options=options)

    return build


def test_rounding_is_near_and_happens_once(tiny_model: Path, rounded: Path) -> None:
    """All matrices of the layers change by less than half of the widest gap of NF4, .28 of a block's largest weight."""
    before = load_policy(tiny_model, device=CPU).state_dict()
    after = load_policy(rounded, device=CPU).state_dict()
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert {name.rsplit(".", 2)[-2] for name in changed} == {
        *("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
    }
    for name in changed:
        blocks = torch.stack([state[name].reshape(-1, 64) for state in (before, after)])
        assert ((blocks[0] - blocks[1]).abs().amax(1) <= 0.16 * blocks[0].abs().amax(1)).all()
    round_off(rounded)
    again = load_policy(rounded, device=CPU).state_dict()
    assert all(torch.equal(weight, after[name]) for name, weight in again.items())


@pytest.mark.parametrize("width", [64, 96, 40])
def test_rows_of_any_length_are_rounded_in_blocks_of_64(width: int) -> None:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        layer = torch.nn.Linear(width, 16)
    blocks = layer.weight.data.reshape(-1, 64)
    rounded = FourBit(layer, CPU).matrix().reshape(-1, 64)
    assert ((rounded - blocks).abs().amax(1) <= 0.16 * blocks.abs().amax(1)).all()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("checkpointing", [False, True])
def test_four_bits_learn_as_their_full_weights(make: Make, samples: Samples, dtype: str, checkpointing: bool) -> None:
    full = make("full", dtype=dtype, checkpointing=checkpointing)
    small = make("four_bit", dtype=dtype, checkpointing=checkpointing)
    kinds = [type(module) for module in (*small.policy.modules(), *small.critic.modules())]
    assert kinds.count(FourBit) == 2 * 2 * 7
    move(full)
    small.policy.load_state_dict(trained_state(full.policy), strict=False)
    results = []
    for learner in (full, small):
        logprobs = learner.logprobs(samples.trajectories)
        references = learner.reference_logprobs(samples.trajectories)
        rows = learner.credited(*samples)
        add_policy_gradient(learner.policy, rows, 9.0, learner.params, learner.compute, learn=True)
        results.append((np.concatenate([*logprobs, *references]), gradients(learner.policy)))
    (expected, expected_gradients), (logprobs, own_gradients) = results
    np.testing.assert_array_equal(logprobs, expected)
    assert own_gradients.keys() == expected_gradients.keys()
    for name, gradient in expected_gradients.items():
        assert torch.equal(own_gradients[name], gradient), name


def test_merged_policy_is_that_of_full_weights(make: Make, samples: Samples, rounded: Path, tmp_path: Path) -> None:
    learner = make("four_bit")
    learner.update(*samples, 0)
    learner.save_policy(tmp_path / "policy")
    saved = learner.save_state(tmp_path / "state")
    assert saved
    stored = load_file(tmp_path / "policy" / "model.safetensors")
    assert {weight.dtype for weight in stored.values()} == {torch.float32}
    full = make("full")
    full.take_policy(tmp_path / "policy")
    assert all(torch.equal(weight, merged_state(full.policy)[name]) for name, weight in stored.items())
    assert learner.weight_sums("float32") == full.weight_sums("float32")
    AutoModelForCausalLM.from_pretrained(tmp_path / "policy")

    learner.merges = False
    learner.save_policy(tmp_path / "alone")
    merge(tmp_path / "alone", rounded, torch.float32)
    merged = load_file(tmp_path / "alone" / "model.safetensors")
    assert all(torch.equal(weight, stored[name]) for name, weight in merged.items())

    other = make("four_bit")
    other.restore(tmp_path / "policy", tmp_path / "state")
    for each in (learner, other):
        each.update(*samples, 1)
    for mine, theirs in zip(weights(other.policy, other.critic), weights(learner.policy, learner.critic), strict=True):
        assert torch.equal(mine, theirs)


def test_a_model_that_was_not_rounded_is_refused(tiny_model: Path) -> None:
    with pytest.raises(ValueError, match=r"is not rounded to four bits \(.*q_proj\); make the warm start anew"):
        compress(load_policy(tiny_model, device=CPU), CPU)
