"""A learner shared by two ranks against one that a process has for itself: gradients, metrics, weights, checkpoints."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from torch import Tensor

from agent_r1.params import load
from agent_r1.params.sections import override
from agent_r1.params.stages import LoraParams, ModelParams
from agent_r1.params.update import UpdateParams
from agent_r1.records import Source
from tests.policy.ranked import Case, Found, in_ranks, learned

TOLERANCE = 4e-6  # of the largest gradient
PARAMS = Path(__file__).parents[2] / "params.yaml"
LORA = LoraParams(rank=4, alpha=8, targets=["all-linear"])
LENGTHS = (9, 5, 12, 9, 30, 7, 21)

# What each case changes: of the update, of the model, and whether there is a critic.
CASES: dict[str, tuple[dict[str, Any], dict[str, Any], bool]] = {
    "plain": ({}, {}, True),
    "sequence_mean": ({"aggregation": "sequence_mean", "ratio": "sequence"}, {}, False),
    "constant_length": ({"aggregation": "constant_length", "constant_length": 8, "ratio": "step"}, {}, False),
    "regularised": ({"kl_loss": 0.1, "entropy_bonus": 0.05, "importance_cap": 2.0}, {}, True),
    "cispo": ({"loss": "cispo", "dual_clip": 0.0, "clip_low": 1.0}, {}, False),
    "adapters": ({"kl_loss": 0.1}, {"lora": LORA}, True),
    "recomputed": ({}, {"gradient_checkpointing": True}, True),
}


def sources(length: int) -> list[int]:
    """Of an episode of two steps, or of one where it is short."""
    acting = length // 3
    prompt, action, observation = (int(each) for each in (Source.PROMPT, Source.ACTION, Source.OBSERVATION))
    first = [prompt] * 2 + [action] * acting
    return first + [observation] * (length - len(first) - acting) + [action] * acting


@pytest.fixture(scope="module")
def cases(tiny_model: Path, make_trajectory: Callable[..., Any], make_credit: Callable[..., Any]) -> dict[str, Case]:
    """Seven trajectories, one of which is not kept, and micro-batches that do not come out even among two ranks."""
    update, model = load(PARAMS).train.update, load(PARAMS).model
    small = {"minibatches": 1, "max_tokens_per_microbatch": 32, "learning_rate_decay": "none", "learning_rate": 1e-3}
    own = {"critic": {"epochs": 1, "minibatches": 1, "warmup": {"iterations": 0, "explained_variance": 0, "limit": 0}}}
    drafts = [make_trajectory(index, sources(length)) for index, length in enumerate(LENGTHS)]
    sampled = [
        replace(
            each,
            token_ids=each.token_ids % 380,  # the words of the tiny model
            logprobs=np.where(each.action_mask, np.float32(-6.2), np.float32(0)),
        )
        for each in drafts
    ]
    credits_ = [make_credit(each, kept=index != 1) for index, each in enumerate(sampled)]
    return {
        name: Case(
            path=tiny_model,
            params=UpdateParams.model_validate(override(update.model_dump(), {**small, **own, **changes})),
            model=ModelParams.model_validate(model.model_copy(update={"dtype": "float32", **of_model}).model_dump()),
            with_critic=with_critic,
            trajectories=sampled,
            credits=credits_,
        )
        for name, (changes, of_model, with_critic) in CASES.items()
    }


@pytest.fixture(scope="module")
def shared(
    cases: dict[str, Case], tmp_path_factory: pytest.TempPathFactory, free_port: Callable[[], int]
) -> dict[str, Found]:
    """All cases, learned by two ranks; and `plain` a second time, and with a checkpoint on its way."""
    folder = tmp_path_factory.mktemp("ranks")
    return in_ranks(cases, 2, free_port(), folder)


def largest_difference(left: dict[str, Tensor], right: dict[str, Tensor]) -> float:
    assert left.keys() == right.keys()
    largest = max(tensor.abs().max().item() for tensor in right.values())
    return max((left[name] - right[name]).abs().max().item() for name in right) / largest


@pytest.mark.parametrize("name", CASES)
def test_two_ranks_learn_as_one_does(name: str, cases: dict[str, Case], shared: dict[str, Found]) -> None:
    alone, together = learned(cases[name]), shared[name]
    assert len(together.gradients) == len(alone.gradients) == 1 + cases[name].with_critic
    for left, right in zip(together.gradients, alone.gradients, strict=True):
        assert max(gradient.abs().max() for gradient in right.values()) > 1e-3
        assert largest_difference(left, right) < TOLERANCE
    assert together.metrics == [pytest.approx(each, rel=1e-5, abs=1e-6) for each in alone.metrics]
    for left, right in zip(together.scores, alone.scores, strict=True):
        for ours, theirs in zip(left, right, strict=True):
            np.testing.assert_allclose(ours, theirs, atol=2e-5)
    assert largest_difference(together.weights, alone.weights) < 1e-5
