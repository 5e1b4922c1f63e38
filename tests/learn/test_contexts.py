"""A trajectory of several contexts: each is a sequence of its own for the models, all of them one for the credit."""

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from agent_r1.records import Source, Trajectory
from tests.learn.learning import make_credit, make_trajectory

Make = Callable[..., Any]
P, A, O, T = (int(source) for source in (Source.PROMPT, Source.ACTION, Source.OBSERVATION, Source.TEMPLATE))  # noqa: E741
FIRST, SECOND = [P, P, A, A, A], [P, P, P, T, O, T, A, A]


@pytest.fixture
def split() -> Trajectory:
    found: Trajectory = make_trajectory(0, FIRST + SECOND, np.full(13, -6, np.float32), [0, 5])
    return dataclasses.replace(found, logprobs=np.where(found.action_mask, found.logprobs, 0).astype(np.float32))


def alone(whole: Trajectory, span: slice, index: int) -> Trajectory:
    steps = [step for step in whole.steps if span.start <= step.action_start < span.stop]
    places = [(step.action_start - span.start, step.action_stop - span.start) for step in steps]
    pairs = zip(steps, places, strict=True)
    moved = [dataclasses.replace(step, action_start=start, action_stop=stop) for step, (start, stop) in pairs]
    entries = {name: getattr(whole, name)[span] for name in ("token_ids", "source", "logprobs")}
    return dataclasses.replace(whole, trajectory_id=f"alone {index}", context_starts=[0], steps=moved, **entries)


def test_a_context_sees_no_other(make_learner: Make, split: Trajectory) -> None:
    """Logprobs and values are those of each context read alone, whatever stands in the other one."""
    learner = make_learner()
    torch.nn.init.normal_(learner.critic.head.weight, generator=torch.Generator().manual_seed(0))
    parts = [alone(split, span, index) for index, span in enumerate(split.contexts)]
    for score in (learner.logprobs, learner.values):
        [together] = score([split])
        apart = np.concatenate(score(parts))
        np.testing.assert_allclose(together, apart, atol=1e-5)
        assert together[0] == together[5] == 0, "nothing comes before a context's first token"
        assert np.count_nonzero(together) == 11
    changed = split.token_ids.copy()
    changed[:5] = changed[4::-1]
    other = dataclasses.replace(split, token_ids=changed)
    np.testing.assert_array_equal(learner.logprobs([other])[0][5:], learner.logprobs([split])[0][5:])


@pytest.mark.parametrize("ratio", ["token", "step"])
def test_an_update_is_that_of_the_contexts_alone(make_learner: Make, split: Trajectory, ratio: str) -> None:
    """With token_mean the loss is a sum over tokens, so two trajectories of one context each give the same step."""
    credit = make_credit(split)
    parts = [alone(split, span, index) for index, span in enumerate(split.contexts)]
    names = ("advantages", "values", "value_targets", "reference_logprobs", "loss_mask", "critic_mask")
    entries = [{name: getattr(credit, name)[span] for name in names} for span in split.contexts]
    pairs = zip(parts, entries, strict=True)
    credits = [dataclasses.replace(credit, trajectory_id=part.trajectory_id, **each) for part, each in pairs]
    learners = [make_learner(ratio=ratio) for _ in range(2)]
    whole = learners[0].update([split], [credit], 0)
    apart = learners[1].update(parts, credits, 0)
    for name in ("policy/loss", "policy/entropy", "policy/grad_norm", "critic/loss", "critic/grad_norm"):
        assert whole[name] == pytest.approx(apart[name], rel=1e-4), name
    assert whole["update/tokens"] == apart["update/tokens"] == 13


def test_a_sequence_ratio_spans_the_contexts(make_learner: Make, split: Trajectory) -> None:
    """One ratio for the five action tokens of both: the geometric mean over all of them."""
    learner = make_learner(ratio="sequence", learning_rate=1e-9, with_critic=False, clip_high=1e8, dual_clip=1e8)
    credit = make_credit(split)
    own = learner.logprobs([split])[0][split.action_mask].astype(np.float64)
    ratio = np.exp(np.mean(own + 6))
    clipped = np.maximum(-credit.advantages * ratio, -credit.advantages * np.clip(ratio, 0.8, None))
    expected = clipped[split.action_mask].mean()
    metrics = learner.update([split], [dataclasses.replace(credit, critic_mask=np.zeros(13, np.bool_))], 0)
    assert metrics["policy/loss"] == pytest.approx(expected, rel=1e-4)
