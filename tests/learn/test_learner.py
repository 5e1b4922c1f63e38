import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from agent_r1.learn import scoring
from agent_r1.learn.learner import Learner
from agent_r1.learn.model import load_policy
from agent_r1.params.stages import LoraParams
from agent_r1.records import Credit, Trajectory
from tests.learn.learning import Samples

Make = Callable[..., Any]


def weights(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: parameter.detach().clone() for name, parameter in module.named_parameters()}


def same_bits(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(left[name], right[name]) for name in left)


def gradients(monkeypatch: pytest.MonkeyPatch, learner: Learner) -> dict[str, torch.Tensor]:
    """Collects the policy's and the critic's gradients when their optimiser steps are taken, which are left out."""
    found: dict[str, torch.Tensor] = {}
    assert learner.critic is not None
    assert learner.critic_optimizer is not None
    for part, module, optimizer in (
        ("policy", learner.policy, learner.policy_optimizer),
        ("critic", learner.critic, learner.critic_optimizer),
    ):

        def keep(part: str = part, module: torch.nn.Module = module) -> None:
            for name, parameter in module.named_parameters():
                if parameter.grad is not None:
                    found[f"{part}.{name}"] = parameter.grad.clone()

        monkeypatch.setattr(optimizer, "step", keep)
    return found


def gradients_of(
    monkeypatch: pytest.MonkeyPatch, learner: Learner, trajectories: list[Trajectory], credits: list[Credit]
) -> dict[str, torch.Tensor]:
    assert learner.critic is not None
    torch.nn.init.normal_(learner.critic.head.weight, std=0.02, generator=torch.Generator().manual_seed(0))
    found = gradients(monkeypatch, learner)
    learner.update(trajectories, credits, iteration=0)
    return found


def part(name: str, found: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {key: gradient for key, gradient in found.items() if key.startswith(f"{name}.")}


def assert_close(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor], factor: float = 1.0) -> None:
    """Equal up to float32's rounding, which is relative to the largest gradient that went through the sums."""
    assert left.keys() == right.keys()
    largest = max(gradient.abs().max().item() for gradient in left.values())
    for name in left:
        gap = (left[name] * factor - right[name]).abs().max().item()
        assert gap <= 4e-6 * largest * factor, (name, gap, largest)


def shifted(trajectories: list[Trajectory], *shifts: Any) -> list[Trajectory]:
    """The trajectories of a sampler whose logprobs of the actions differ by a shift of each, or by one of all."""
    pairs = zip(trajectories, shifts * (len(trajectories) // len(shifts)), strict=True)
    moved = [(each, np.where(each.action_mask, each.logprobs + shift, 0)) for each, shift in pairs]
    return [dataclasses.replace(each, logprobs=logprobs.astype(np.float32)) for each, logprobs in moved]


def off_policy(trajectories: list[Trajectory]) -> list[Trajectory]:
    """The trajectories of a policy that differs at every token: no ratio is 1."""
    noise = np.random.default_rng(0)
    return shifted(trajectories, *(noise.normal(0, 0.2, len(each.logprobs)) for each in trajectories))


EVERYTHING = {"kl_loss": 0.3, "entropy_bonus": 0.2, "importance_cap": 1.5}
RATIOS = ["token", "step", "sequence"]
AGGREGATIONS = [("token_mean", 0), ("sequence_mean", 0), ("constant_length", 10)]


@pytest.mark.parametrize("terms", [{}, EVERYTHING], ids=["plain", "everything"])
@pytest.mark.parametrize(("aggregation", "length"), AGGREGATIONS)
@pytest.mark.parametrize("ratio", RATIOS)
def test_two_micro_batches_equal_one(
    make_learner: Make,
    trajectories: list[Trajectory],
    make_credit: Make,
    monkeypatch: pytest.MonkeyPatch,
    ratio: str,
    aggregation: str,
    length: int,
    terms: dict[str, float],
) -> None:
    stale = off_policy(trajectories)
    credits = [make_credit(each, loss_mask=np.arange(len(each.token_ids)) > 1) for each in stale]
    options = {"ratio": ratio, "aggregation": aggregation, "constant_length": length, **terms}
    whole, parts = (
        gradients_of(
            monkeypatch,
            make_learner(max_tokens_per_microbatch=tokens, max_grad_norm=1e9, **options),
            stale,
            credits,
        )
        for tokens in (1000, 1)
    )
    assert max(gradient.abs().max().item() for gradient in whole.values()) > 1e-2
    assert_close(whole, parts)


@pytest.mark.parametrize(
    ("aggregation", "length", "share"),
    [
        ("token_mean", 0, 5 / 18),  # the others have 2, 6 and 5 loss tokens
        ("sequence_mean", 0, 1 / 4),
        ("constant_length", 10, 1 / 4),
    ],
)
def test_the_loss_is_divided_by_what_the_whole_step_holds_gradient_or_not(
    make_learner: Make, samples: Samples, monkeypatch: pytest.MonkeyPatch, aggregation: str, length: int, share: float
) -> None:
    """Beside three rows of advantage 0, the policy's gradient of row 0, with 5 loss tokens, shrinks to its share."""
    trajectories, credits = samples
    options = {"aggregation": aggregation, "constant_length": length, "max_grad_norm": 1e9}
    first, *others = credits
    silent = [
        dataclasses.replace(each, advantages=0 * each.advantages, critic_mask=each.critic_mask & False)
        for each in others
    ]
    alone = gradients_of(monkeypatch, make_learner(**options), trajectories[:1], [first])
    beside = gradients_of(monkeypatch, make_learner(**options), trajectories, [first, *silent])
    assert_close(part("policy", alone), part("policy", beside), factor=share)
    assert_close(part("critic", alone), part("critic", beside))


def test_the_importance_cap_weighs_the_gradient(
    make_learner: Make, samples: Samples, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The sampler claims ln 2 less than the learner has: weight 2, capped at 1.5, over a ratio that starts at 1."""
    trajectories, credits = samples
    stale = shifted(trajectories, -np.log(2))
    fresh = gradients_of(monkeypatch, make_learner(max_grad_norm=1e9), trajectories, credits)
    learner = make_learner(max_grad_norm=1e9, importance_cap=1.5)
    assert_close(part("policy", fresh), part("policy", gradients_of(monkeypatch, learner, stale, credits)), factor=1.5)
    metrics = make_learner(importance_cap=1.5).update(stale, credits, 0)
    assert metrics["policy/clip_fraction"] == 0.0
    assert metrics["policy/mismatch_max"] == pytest.approx(np.log(2), abs=1e-4)


@pytest.mark.parametrize("ratio", ["token", "step", "sequence", "sequence_token"])
def test_chunks_of_the_output_layer_change_nothing_but_rounding(
    make_learner: Make, samples: Samples, monkeypatch: pytest.MonkeyPatch, ratio: str
) -> None:
    """Of two tokens each, with every term of the loss in play."""
    trajectories, credits = samples
    terms = {"ratio": ratio, "kl_loss": 0.3, "entropy_bonus": 0.2, "importance_cap": 1.5, "max_grad_norm": 1e9}
    whole = make_learner(**terms)
    expected = gradients_of(monkeypatch, whole, trajectories, credits)
    monkeypatch.setattr(scoring, "CHUNK", 2 * whole.policy.config.vocab_size)
    assert_close(expected, gradients_of(monkeypatch, make_learner(**terms), trajectories, credits))


def without_advantage(credits: list[Credit]) -> list[Credit]:
    return [dataclasses.replace(each, advantages=np.zeros_like(each.advantages)) for each in credits]


def test_the_kl_in_the_loss_pulls_the_policy_to_its_reference(make_learner: Make, samples: Samples) -> None:
    trajectories, credits = samples
    credits = without_advantage(credits)
    learner = make_learner(with_critic=False, kl_loss=1.0, epochs=20)

    def distance() -> float:
        gaps = [
            own[credit.loss_mask] - credit.reference_logprobs[credit.loss_mask]
            for own, credit in zip(learner.logprobs(trajectories), credits, strict=True)
        ]
        return float(np.abs(np.concatenate(gaps)).mean())

    before = distance()
    learner.update(trajectories, credits, 0)
    assert distance() < before / 2


def test_a_kl_in_the_loss_needs_a_reference(make_learner: Make, samples: Samples) -> None:
    trajectories, credits = samples
    bare = [dataclasses.replace(each, reference_logprobs=np.zeros_like(each.advantages)) for each in credits]
    with pytest.raises(ValueError, match=r"kl_loss 0\.1 needs a reference"):
        make_learner(kl_loss=0.1).update(trajectories, bare, 0)


def test_rows_that_are_not_kept_have_no_influence(
    make_learner: Make, trajectories: list[Trajectory], make_credit: Make
) -> None:
    """Not in a denominator, not in the critic's training, not in the split into minibatches: bit for bit."""
    alone, beside = make_learner(minibatches=2), make_learner(minibatches=2)
    credits = [make_credit(each, kept=index in (1, 3)) for index, each in enumerate(trajectories)]
    metrics = beside.update(trajectories, credits, 0)
    expected = alone.update(trajectories[1::2], credits[1::2], 0)
    assert same_bits(weights(alone.policy), weights(beside.policy))
    assert same_bits(weights(alone.critic), weights(beside.critic))
    assert metrics == expected | {"update/trained_share": 0.5}


def left_out(credit: Credit) -> Credit:
    """The credit of a trajectory that the policy loss leaves out."""
    nowhere, zeros = np.zeros_like(credit.loss_mask), np.zeros_like(credit.advantages)
    return dataclasses.replace(credit, loss_mask=nowhere, reference_logprobs=zeros)


def test_rows_left_out_are_in_no_policy_loss_and_in_no_denominator(
    make_learner: Make, trajectories: list[Trajectory], make_credit: Make
) -> None:
    alone, beside = (make_learner(with_critic=False, minibatches=1) for _ in range(2))
    credits = [dataclasses.replace(make_credit(each), critic_mask=each.action_mask & False) for each in trajectories]
    metrics = beside.update(trajectories, [left_out(credits[0]), credits[1], left_out(credits[2]), credits[3]], 0)
    expected = alone.update(trajectories[1::2], credits[1::2], 0)
    # Rows beside them are padded and summed in other ways.
    assert metrics == pytest.approx(expected | {"update/trained_share": 0.5}, abs=1e-6)
    assert same_bits(weights(alone.policy), weights(beside.policy))


def test_where_all_are_left_out_the_critic_trains_alone(
    make_learner: Make, trajectories: list[Trajectory], make_credit: Make
) -> None:
    learner = make_learner(minibatches=2, kl_loss=0.1)
    policy, critic = weights(learner.policy), weights(learner.critic)
    metrics = learner.update(trajectories, [left_out(make_credit(each)) for each in trajectories], 0)
    assert same_bits(policy, weights(learner.policy))
    assert not same_bits(critic, weights(learner.critic))
    assert learner.policy_version == 0
    assert metrics["critic/loss"] > 0
    assert "policy/loss" not in metrics
    assert metrics["update/trained_share"] == 1.0, "they have the critic's gradient"


def test_a_minibatch_that_is_left_out_is_in_no_mean_of_the_metrics(make_learner: Make, samples: Samples) -> None:
    trajectories, credits = samples
    learner = make_learner(minibatches=4)
    metrics = learner.update(trajectories, [credits[0], *map(left_out, credits[1:])], 0)
    assert metrics["policy/entropy"] > 1, "of a model that knows nothing yet, and no mean with steps of none"
    assert learner.policy_version == 1


@pytest.mark.parametrize("kept", [4, 2])
def test_the_number_of_optimiser_steps_is_the_same_whatever_is_kept(
    make_learner: Make,
    trajectories: list[Trajectory],
    make_credit: Make,
    monkeypatch: pytest.MonkeyPatch,
    kept: int,
) -> None:
    learner = make_learner(minibatches=2, epochs=3, critic={"minibatches": 1, "epochs": 4})
    steps: list[str] = []
    monkeypatch.setattr(learner.policy_optimizer, "step", lambda: steps.append("policy"))
    monkeypatch.setattr(learner.critic_optimizer, "step", lambda: steps.append("critic"))
    learner.update(trajectories, [make_credit(each, kept=i < kept) for i, each in enumerate(trajectories)], 0)
    assert steps == ["policy"] * 6 + ["critic"] * 4


def test_the_policy_learns_the_same_however_often_the_critic_learns(make_learner: Make, samples: Samples) -> None:
    once = make_learner(minibatches=2)
    often = make_learner(minibatches=2, critic={"epochs": 4, "minibatches": 2})
    losses = [learner.update(*samples, 0)["critic/loss"] for learner in (once, often)]
    assert same_bits(weights(once.policy), weights(often.policy))
    assert losses[1] < losses[0], "the mean over four passes"


def test_where_nothing_is_kept_nothing_changes(
    make_learner: Make, trajectories: list[Trajectory], make_credit: Make
) -> None:
    learner = make_learner()
    before = weights(learner.policy)
    metrics = learner.update(trajectories, [make_credit(each, kept=False) for each in trajectories], 0)
    assert same_bits(before, weights(learner.policy))
    assert learner.policy_version == 0
    rates = {"policy/learning_rate": 1e-3, "critic/learning_rate": 1e-3}
    amounts = ("update/trained_share", "update/episodes", "update/tokens", "cost/gpu_peak_gib")
    assert metrics == {**dict.fromkeys(amounts, 0.0), **rates}


def test_the_version_counts_the_updates_that_took_a_step(
    make_learner: Make, trajectories: list[Trajectory], make_credit: Make
) -> None:
    """Equal returns give advantages of 0, with which GRPO has nothing to learn; the same weights are no new version."""
    learner = make_learner(with_critic=False)
    credits = [
        dataclasses.replace(make_credit(each), critic_mask=np.zeros_like(each.action_mask)) for each in trajectories
    ]
    versions: list[int] = []
    for given in (without_advantage(credits), credits, without_advantage(credits), credits):
        before = weights(learner.policy)
        learner.update(trajectories, given, len(versions))
        versions.append(learner.policy_version)
        assert same_bits(before, weights(learner.policy)) == (given is not credits)
    assert versions == [0, 1, 1, 2]


@pytest.mark.parametrize("ratio", RATIOS)
def test_masked_tokens_change_no_weight_whatever_their_credit(make_learner: Make, samples: Samples, ratio: str) -> None:
    trajectories, credits = samples
    poisoned = [
        dataclasses.replace(
            each,
            advantages=np.where(each.loss_mask, each.advantages, np.nan).astype(np.float32),
            value_targets=np.where(each.critic_mask, each.value_targets, np.inf).astype(np.float32),
            reference_logprobs=np.where(each.loss_mask, each.reference_logprobs, np.nan).astype(np.float32),
        )
        for each in credits
    ]
    clean, dirty = (make_learner(ratio=ratio, **EVERYTHING) for _ in range(2))
    clean.update(*samples, 0)
    dirty.update(trajectories, poisoned, 0)
    assert same_bits(weights(clean.policy), weights(dirty.policy))
    assert same_bits(weights(clean.critic), weights(dirty.critic))


def test_metrics_before_any_change(make_learner: Make, samples: Samples) -> None:
    metrics = make_learner().update(*samples, 0)
    advantages = np.concatenate([each.advantages[each.loss_mask] for each in samples.credits])
    targets = np.concatenate([each.value_targets[each.critic_mask] for each in samples.credits])
    assert metrics["policy/loss"] == pytest.approx(-advantages.mean(), abs=1e-5)  # rho = 1 everywhere
    assert metrics["critic/loss"] == pytest.approx((targets**2).mean() / 2, abs=1e-5)  # V = 0 everywhere
    assert metrics["policy/clip_fraction"] == 0.0
    assert metrics["policy/mismatch_kl"] == pytest.approx(0.0, abs=1e-6)
    assert metrics["policy/mismatch_max"] < 1e-4
    assert 5.0 < metrics["policy/entropy"] < np.log(600)
    assert metrics["policy/grad_norm"] > 0
    assert metrics["critic/grad_norm"] > 0
    assert metrics["update/trained_share"] == 1.0
    assert metrics["update/tokens"] == 9 + 5 + 12 + 9


def test_mismatch_is_measured_at_action_tokens_before_the_first_step(
    make_learner: Make, trajectories: list[Trajectory], make_credit: Make
) -> None:
    # The sampler claims ln 2 less than the learner has: k3 = 2 - 1 - ln 2 at every action token.
    stale = shifted(trajectories, -np.log(2))
    credits = [make_credit(each, loss_mask=np.arange(len(each.token_ids)) > 1) for each in stale]
    metrics = make_learner(epochs=3, learning_rate=0.1).update(stale, credits, 0)
    assert metrics["policy/mismatch_kl"] == pytest.approx(1 - np.log(2), abs=1e-4)
    assert metrics["policy/mismatch_max"] == pytest.approx(np.log(2), abs=1e-4)


def test_what_has_no_gradient_counts_in_the_mismatch_and_among_what_could_be_clipped(
    make_learner: Make, trajectories: list[Trajectory], make_credit: Make
) -> None:
    """Of rows with 5, 2, 6 and 5 action tokens the last two have no advantage; the sampler is off in these alone."""
    credits = [dataclasses.replace(make_credit(each), critic_mask=each.action_mask & False) for each in trajectories]
    credits[2:] = without_advantage(credits[2:])
    stale = shifted(trajectories, 0, 0, -np.log(2), -np.log(2))
    metrics = make_learner(with_critic=False).update(stale, credits, 0)
    assert metrics["update/trained_share"] == 0.5
    assert metrics["policy/mismatch_mean"] == pytest.approx(11 / 18 * np.log(2), abs=1e-4)
    assert metrics["policy/mismatch_ess"] == pytest.approx((7 + 22) ** 2 / (7 + 44) / 18, abs=1e-4)
    far_off = dataclasses.replace(stale[0], logprobs=np.where(stale[0].action_mask, -20, 0).astype(np.float32))
    clipped = make_learner(with_critic=False).update([far_off, *stale[1:]], credits, 0)["policy/clip_fraction"]
    assert clipped == 5 / 18


def test_old_logprobs_of_observations_are_those_before_the_first_step(
    make_learner: Make, trajectories: list[Trajectory], make_credit: Make
) -> None:
    # Only observations have an advantage. Were their ratio taken afresh in the second pass, it would be 1 in both, and
    # the loss minus the mean advantage.
    masks = [(each.source == 2) | (np.arange(len(each.source)) == 2) for each in trajectories[2:]]
    credits = [make_credit(each, loss_mask=mask) for each, mask in zip(trajectories[2:], masks, strict=True)]
    credits = [
        dataclasses.replace(credit, advantages=np.where(each.source == 2, credit.advantages, 0).astype(np.float32))
        for each, credit in zip(trajectories[2:], credits, strict=True)
    ]
    advantages = np.concatenate([each.advantages[each.loss_mask] for each in credits])
    metrics = make_learner(epochs=2, learning_rate=0.05).update(trajectories[2:], credits, 0)
    assert metrics["policy/loss"] < -advantages.mean() - 1e-2


def test_at_a_rate_of_0_the_critic_is_trained_alone(make_learner: Make, samples: Samples) -> None:
    learner = make_learner()
    policy, critic = weights(learner.policy), weights(learner.critic)
    metrics = learner.update(*samples, 0, rate=0.0)
    assert same_bits(policy, weights(learner.policy))
    assert not same_bits(critic, weights(learner.critic))
    assert learner.policy_version == 0
    assert "policy/grad_norm" not in metrics
    assert {"policy/entropy", "policy/mismatch_kl"} <= metrics.keys()
    assert metrics["update/episodes"] == 0
    assert learner.update(*samples, 1)["update/episodes"] == len(samples.trajectories)
    assert not same_bits(policy, weights(learner.policy))
    assert learner.policy_version == 1


def test_a_quarter_of_the_rate_is_a_quarter_of_the_step(make_learner: Make, samples: Samples) -> None:
    """Adam's first step is proportional to its learning rate."""
    steps = []
    for rate in (1.0, 0.25):
        learner = make_learner()
        before = weights(learner.policy), weights(learner.critic)
        learner.update(*samples, 0, rate=rate, critic_rate=rate)
        after = weights(learner.policy), weights(learner.critic)
        steps.append([new[name] - old[name] for old, new in zip(before, after, strict=True) for name in old])
    assert max(step.abs().max() for step in steps[0]) > 1e-4
    for whole, quarter in zip(*steps, strict=True):
        torch.testing.assert_close(quarter, whole / 4, atol=1e-7, rtol=1e-3)


def test_the_optimisers_are_as_configured(make_learner: Make, samples: Samples) -> None:
    """Without a gradient at a row of the embeddings, weight decay alone moves it: by 1 - rate * decay."""
    learner = make_learner(weight_decay=0.5, betas=(0.8, 0.9), learning_rate=0.01)
    for optimizer in (learner.policy_optimizer, learner.critic_optimizer):
        assert {group["betas"] for group in optimizer.param_groups} == {(0.8, 0.9)}
        assert {group["weight_decay"] for group in optimizer.param_groups} == {0.5}
    before = learner.critic.backbone.get_input_embeddings().weight.detach().clone()
    learner.update(*samples, 0)
    after = learner.critic.backbone.get_input_embeddings().weight.detach()
    torch.testing.assert_close(after[0], before[0] * (1 - 1e-3 * 0.5))  # id 0 is in no trajectory


def test_without_a_critic_values_are_zero(make_learner: Make, samples: Samples) -> None:
    learner = make_learner(with_critic=False)
    assert [values.tolist() for values in learner.values(samples.trajectories[:1])] == [[0.0] * 9]
    metrics = learner.update(*samples, 0)
    assert learner.policy_version == 1
    assert not any(name.startswith("critic/") for name in metrics)


@pytest.mark.parametrize("key", ["learning_rate", "epochs", "minibatches", "value_clip"])
def test_what_is_the_critics_changes_nothing_without_one(make_learner: Make, samples: Samples, key: str) -> None:
    plain, other = make_learner(with_critic=False), make_learner(with_critic=False, critic={key: 3})
    assert plain.update(*samples, 0) == other.update(*samples, 0)
    assert same_bits(weights(plain.policy), weights(other.policy))


@pytest.mark.parametrize(("model", "field"), [("policy", "advantages"), ("critic", "value_targets")])
def test_a_loss_that_is_not_finite_names_its_trajectory_and_changes_nothing(
    make_learner: Make, samples: Samples, model: str, field: str
) -> None:
    trajectories, credits = samples
    learner = make_learner()
    before = weights(getattr(learner, model))
    broken = getattr(credits[2], field).copy()
    broken[credits[2].loss_mask] = np.nan
    credits[2] = dataclasses.replace(credits[2], **{field: broken})
    with pytest.raises(FloatingPointError, match=r"loss is not finite in trajectories 0/q2/0;"):
        learner.update(trajectories, credits, 0)
    assert same_bits(before, weights(getattr(learner, model)))


def test_a_gradient_that_is_not_finite_names_the_step_and_changes_nothing(make_learner: Make, samples: Samples) -> None:
    trajectories, credits = samples
    learner = make_learner()
    before = weights(learner.critic)
    huge = np.full_like(credits[0].value_targets, 1.8e19)  # its square is a float32, that of the gradient is not
    credits[0] = dataclasses.replace(credits[0], value_targets=huge, values=huge / 2)
    with pytest.raises(FloatingPointError, match=r"critic gradient is not finite in trajectories .*0/q0/0"):
        learner.update(trajectories, credits, 0)
    assert same_bits(before, weights(learner.critic))


def test_bfloat16_compute_keeps_float32_weights(make_learner: Make, samples: Samples) -> None:
    learner = make_learner(dtype="bfloat16")
    metrics = learner.update(*samples, 0)
    assert {parameter.dtype for parameter in learner.policy.parameters()} == {torch.float32}
    assert 0 < metrics["policy/mismatch_max"] < 0.2
    assert np.isfinite(list(metrics.values())).all()


@pytest.mark.parametrize("adapter", [None, LoraParams(rank=2, alpha=4, targets=["all-linear"])])
def test_the_output_layer_alone_computes_in_float32(
    make_learner: Make, samples: Samples, tmp_path: Path, adapter: LoraParams | None
) -> None:
    """Its logits are those of float32 weights times what bfloat16 layers gave it, and it learns and is saved."""
    learner = make_learner(dtype="bfloat16", float32_output=True, adapter=adapter)
    seen: list[torch.Tensor] = []
    output = learner.policy.get_output_embeddings()
    output.register_forward_hook(lambda _, given, logits: seen.extend([given[0], logits.clone()]))
    [logprobs, *_] = learner.logprobs(samples.trajectories)
    hidden, logits = seen[:2]
    assert logits.dtype == torch.float32
    torch.testing.assert_close(logits, hidden.float() @ output.weight.float().T, atol=1e-5, rtol=1e-5)
    assert (
        logprobs.tolist() != make_learner(dtype="bfloat16", adapter=adapter).logprobs(samples.trajectories)[0].tolist()
    )
    learner.update(*samples, 0)
    learner.save_policy(tmp_path / "policy")
    saved = load_policy(tmp_path / "policy", device=torch.device("cpu")).get_output_embeddings().weight
    torch.testing.assert_close(saved, output.weight.float())


def test_in_float32_there_is_no_output_layer_to_widen(make_learner: Make, caplog: pytest.LogCaptureFixture) -> None:
    assert not make_learner(dtype="auto", float32_output=True).compute.float32_output
    assert "float32_output: true has no effect" in caplog.text


@pytest.mark.parametrize("adapter", [None, LoraParams(rank=2, alpha=4, targets=["all-linear"])])
def test_another_model_is_the_reference(
    make_learner: Make, trajectories: list[Trajectory], tmp_path: Path, adapter: LoraParams | None
) -> None:
    """On-policy distillation: its own logprobs of what the policy sampled, also where that trains adapters."""
    teacher = make_learner()
    torch.nn.init.normal_(teacher.policy.get_input_embeddings().weight, generator=torch.Generator().manual_seed(1))
    teacher.save_policy(tmp_path)
    learner = make_learner(reference=str(tmp_path), adapter=adapter)
    told, own = learner.reference_logprobs(trajectories), learner.logprobs(trajectories)
    for each, found, taught, student in zip(trajectories, told, teacher.logprobs(trajectories), own, strict=True):
        assert found[each.action_mask].tolist() == taught[each.action_mask].tolist()
        assert abs(found - student)[each.action_mask].max() > 0.1


def test_a_reference_with_other_tokens_is_refused(make_learner: Make, tmp_path: Path) -> None:
    """As many, of which two have each other's numbers."""
    make_learner().save_policy(tmp_path)
    content = json.loads((tmp_path / "tokenizer.json").read_text())
    vocab = content["model"]["vocab"]
    one, other = list(vocab)[-2:]
    vocab[one], vocab[other] = vocab[other], vocab[one]
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    with pytest.raises(ValueError, match=r"train.reference \S+ has other tokens than \S+; take a model with the same"):
        make_learner(reference=str(tmp_path))
