"""Adapters in vLLM: the sampler runs what the learner trains, and not merged weights that rounding has changed."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from agent_r1.params import LoraParams, load
from agent_r1.policy import checkpoint
from agent_r1.policy.adapter import trained_state
from agent_r1.policy.learner import Learner
from agent_r1.policy.model import token_logprobs
from agent_r1.rollout.chat import Chat
from agent_r1.rollout.sampling import Action, Request
from agent_r1.rollout.vllm_engine import VllmEngine

CLOSE = 1e-4  # nats, in float32
PARAMS = Path(__file__).parents[2] / "params.yaml"
REQUESTS = [
    Request(episode=index, step=0, context=[*range(index, index + 20 + index)], seed=index, max_tokens=12)
    for index in range(6)
]

Make = Callable[[], Learner]


@pytest.fixture
def make(tiny_model: Path) -> Make:
    """Learners over the tiny model with fresh adapters of rank 4."""
    adapter = LoraParams(rank=4, alpha=8, targets=["all-linear"])
    settings = load(PARAMS)
    model = settings.model.model_copy(update={"lora": adapter})
    cpu = torch.device("cpu")
    return lambda: Learner(tiny_model, settings.train.update, model, with_critic=False, seed=0, device=cpu)


def move(learner: Learner) -> None:
    """Far enough to change what the policy says."""
    learner.policy_version += 1
    generator = torch.Generator().manual_seed(learner.policy_version)
    for weight in trained_state(learner.policy).values():
        weight += 0.2 * torch.randn(weight.shape, generator=generator)


def save(learner: Learner, folder: Path) -> Path:
    """A checkpoint whose policy is nothing but its adapters, so that nothing else can be what is loaded."""
    checkpoint.save(folder, learner, iterations=learner.policy_version, fingerprint="same")
    (folder / "policy" / "model.safetensors").unlink()
    return folder / "policy"


@torch.no_grad()
def gap(learner: Learner, actions: list[Action]) -> float:
    """The largest difference in nats between what sampler and learner think of the actions."""
    gaps = []
    for request, action in zip(REQUESTS, actions, strict=True):
        ids = torch.tensor([request.context + action.token_ids])
        of_action = torch.arange(ids.shape[1])[None] >= len(request.context)
        found = token_logprobs(learner.policy, ids, of_action).numpy()
        gaps.append(np.abs(found - action.logprobs).max())
    return float(max(gaps))


def test_the_sampler_runs_the_learners_adapters(make: Make, tiny_model: Path, chat: Chat, tmp_path: Path) -> None:
    """From the start, after each of two updates, and back to the first; a fresh engine goes on with the same bits."""
    learner = make()
    with VllmEngine(tiny_model, end_id=chat.end_id, max_tokens=128, adapter_rank=4) as engine:
        before = engine.sample(REQUESTS)
        assert gap(learner, before) < CLOSE
        for version in (1, 2):
            move(learner)
            assert gap(learner, before) > 0.1, "an update that changes nothing would prove nothing"
            engine.load_weights(save(learner, tmp_path / f"{version}"), version)
            before = engine.sample(REQUESTS)
            assert (engine.version, gap(learner, before) < CLOSE) == (version, True)
        good = make()
        assert checkpoint.load(tmp_path / "1", good).policy_version == 1
        engine.load_weights(tmp_path / "1" / "policy", 1)
        shutil.rmtree(tmp_path / "1")  # a checkpoint is replaced while its policy is sampled with
        assert gap(good, engine.sample(REQUESTS)) < CLOSE
    resumed = make()
    checkpoint.load(tmp_path / "2", resumed)
    with VllmEngine(tiny_model, end_id=chat.end_id, max_tokens=128, adapter_rank=4) as engine:
        engine.load_weights(tmp_path / "2" / "policy", resumed.policy_version)
        after = engine.sample(REQUESTS)
    assert gap(resumed, after) < CLOSE
    assert [action.logprobs.tobytes() for action in after] == [action.logprobs.tobytes() for action in before]
