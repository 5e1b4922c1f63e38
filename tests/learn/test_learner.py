"""An update of policy and critic: what moves a weight, what moves none, and the reference that stays as it was."""

import dataclasses
import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from agent_r1.learn import scoring
from agent_r1.learn.gradients import policy_pass
from agent_r1.learn.learner import Learner, Reference, reference_of
from agent_r1.learn.model import load_policy
from agent_r1.params.stages import LoraParams
from agent_r1.records import Credit, Trajectory
from tests.learn.learning import CPU, LORA, Samples, make_credit, same_bits, weights

Make = Callable[..., Any]
Named = dict[str, torch.Tensor]


def gradients_of(
    monkeypatch: pytest.MonkeyPatch, learner: Learner, trajectories: list[Trajectory], credits: list[Credit]
) -> Named:
    """The policy's and the critic's gradients when their optimiser steps are taken, which are left out."""
    torch.nn.init.normal_(learner.critic.head.weight, std=0.02, generator=torch.Generator().manual_seed(0))
    found: Named = {}

    def keep(part: str, model: torch.nn.Module) -> None:
        named = model.named_parameters()
        found.update({f"{part}.{name}": weight.grad.clone() for name, weight in named if weight.grad is not None})

    for part, model in {"policy": learner.policy, "critic": learner.critic}.items():
        monkeypatch.setattr(learner.optimizers[f"{part}_optimizer"], "step", partial(keep, part, model))
    learner.update(trajectories, credits, iteration=0)
    return found


def part(name: str, found: Named) -> Named:
    return {key: gradient for key, gradient in found.items() if key.startswith(f"{name}.")}


def assert_close(left: Named, right: Named, factor: float = 1.0) -> None:
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


def changed(credits: list[Credit], rows: slice = slice(None), **changes: Callable[[Credit], Any]) -> list[Credit]:
    """The credits, some of them with fields that are computed from what they were."""
    made = [*credits]
    for index in range(len(made))[rows]:
        fields = {name: change(made[index]) for name, change in changes.items()}
        made[index] = dataclasses.replace(made[index], **fields)
    return made


without_advantage = partial(changed, advantages=lambda credit: 0 * credit.advantages)
without_critic = partial(changed, critic_mask=lambda credit: credit.critic_mask & False)
# What the policy loss leaves out.
left_out = partial(
    changed,
    loss_mask=lambda credit: credit.loss_mask & False,
    reference_logprobs=lambda credit: 0 * credit.reference_logprobs,
)

EVERYTHING = {"kl_loss": 0.3, "entropy_bonus": 0.2, "importance_cap": 1.5}
RATIOS = ["token", "step", "sequence"]
TOKENS, SEQUENCES, LENGTH = AGGREGATIONS = [
    {"aggregation": "token_mean"},
    {"aggregation": "sequence_mean"},
    {"aggregation": "constant_length", "constant_length": 10},
]


@pytest.mark.parametrize("terms", [{}, EVERYTHING], ids=["plain", "everything"])
@pytest.mark.parametrize("aggregation", AGGREGATIONS, ids=str)
@pytest.mark.parametrize("ratio", RATIOS)
def test_two_micro_batches_equal_one(
    make_learner: Make, samples: Samples, monkeypatch: pytest.MonkeyPatch, ratio: str, aggregation: Any, terms: Any
) -> None:
    noise = np.random.default_rng(0)  # no ratio is 1
    stale = shifted(samples.trajectories, *(noise.normal(0, 0.2, len(each.logprobs)) for each in samples.trajectories))
    credits = [make_credit(each, loss_mask=np.arange(len(each.token_ids)) > 1) for each in stale]
    make = partial(make_learner, ratio=ratio, max_grad_norm=1e9, **aggregation, **terms)
    learners = [make(max_tokens_per_microbatch=tokens) for tokens in (1000, 1)]
    whole, parts = (gradients_of(monkeypatch, learner, stale, credits) for learner in learners)
    assert max(gradient.abs().max().item() for gradient in whole.values()) > 1e-2
    assert_close(whole, parts)


@pytest.mark.parametrize(("aggregation", "share"), [(TOKENS, 5 / 18), (SEQUENCES, 1 / 4), (LENGTH, 1 / 4)])
def test_the_loss_is_divided_by_what_the_whole_step_holds_gradient_or_not(
    make_learner: Make, samples: Samples, monkeypatch: pytest.MonkeyPatch, aggregation: Any, share: float
) -> None:
    """Beside three rows of advantage 0, the policy's gradient of row 0, with 5 loss tokens, shrinks to its share.

    The others have 2, 6 and 5 loss tokens.
    """
    trajectories, credits = samples
    make = partial(make_learner, max_grad_norm=1e9, **aggregation)
    silent = without_critic(without_advantage(credits, slice(1, None)), slice(1, None))
    alone = gradients_of(monkeypatch, make(), trajectories[:1], credits[:1])
    beside = gradients_of(monkeypatch, make(), trajectories, silent)
    assert_close(part("policy", alone), part("policy", beside), factor=share)
    assert_close(part("critic", alone), part("critic", beside))


def test_importance_cap_weighs_gradient(make_learner: Make, samples: Samples, monkeypatch: pytest.MonkeyPatch) -> None:
    """The sampler claims ln 2 less than the learner has: weight 2, capped at 1.5, over a ratio that starts at 1."""
    trajectories, credits = samples
    stale = shifted(trajectories, -np.log(2))
    fresh = gradients_of(monkeypatch, make_learner(max_grad_norm=1e9), trajectories, credits)
    learner = make_learner(max_grad_norm=1e9, importance_cap=1.5)
    assert_close(part("policy", fresh), part("policy", gradients_of(monkeypatch, learner, stale, credits)), factor=1.5)
    metrics = make_learner(importance_cap=1.5).update(stale, credits, 0)
    assert metrics["policy/clip_fraction"] == 0.0
    assert metrics["policy/mismatch_max"] == pytest.approx(np.log(2), abs=1e-4)


def test_masked_trajectory_still_divides(make_learner: Make, samples: Samples, monkeypatch: pytest.MonkeyPatch) -> None:
    """The sampler claims ln 2 less at each of 5, 2, 6 and 5 tokens: products 32, 4, 64, 32, of which one is below 5.

    Its gradient is then 4 times itself, and the divisor still counts all 18 tokens.
    """
    trajectories, credits = samples
    learner = make_learner(max_grad_norm=1e9, importance_cap=5.0, importance_rule="mask_sequence")
    masked = gradients_of(monkeypatch, learner, shifted(trajectories, -np.log(2)), credits)
    alone = gradients_of(monkeypatch, make_learner(max_grad_norm=1e9), trajectories[1:2], credits[1:2])
    assert_close(part("policy", alone), part("policy", masked), factor=4 * 2 / 18)


@pytest.mark.parametrize("ratio", ["token", "step", "sequence", "sequence_token"])
def test_chunks_only_round(make_learner: Make, samples: Samples, monkeypatch: pytest.MonkeyPatch, ratio: str) -> None:
    """Of two tokens each, with every term of the loss in play."""
    make = partial(make_learner, ratio=ratio, max_grad_norm=1e9, **EVERYTHING)
    expected = gradients_of(monkeypatch, whole := make(), *samples)
    monkeypatch.setattr(scoring, "CHUNK", 2 * whole.policy.config.vocab_size)
    assert_close(expected, gradients_of(monkeypatch, make(), *samples))


def test_gradients_of_chunks_round_once(make_learner: Make, samples: Samples, monkeypatch: pytest.MonkeyPatch) -> None:
    """256 of the first of nine chunks and 1 of each other: added one by one in bfloat16 they would stay 256."""
    learner = make_learner(with_critic=False, max_tokens_per_microbatch=1000)
    learner.policy.bfloat16()
    monkeypatch.setattr(scoring, "CHUNK", 2 * learner.policy.config.vocab_size)
    head = learner.policy.get_output_embeddings().weight
    rows = learner.credited(*samples)
    passes = policy_pass(learner.policy, rows, learner.params, learner.compute, learn=True)
    for size, (_, terms) in zip([256.0] + [1.0] * 8, passes, strict=True):
        (0 * terms.sum()).backward()
        head.grad = torch.full_like(head, size)
    assert head.grad is not None
    assert head.grad.unique().tolist() == [256 + 8]


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
    bare = changed(credits, reference_logprobs=lambda credit: 0 * credit.reference_logprobs)
    with pytest.raises(ValueError, match=r"kl_loss 1\.0 needs a reference"):
        learner.update(trajectories, bare, 0)


def test_rows_that_are_not_kept_have_no_influence(make_learner: Make, samples: Samples) -> None:
    """Not in a denominator, not in the critic's training, not in the split into minibatches: bit for bit."""
    trajectories, credits = samples
    alone, beside = (make_learner(minibatches=2) for _ in range(2))
    metrics = beside.update(trajectories, changed(credits, slice(0, None, 2), kept=lambda _: False), 0)
    expected = alone.update(trajectories[1::2], credits[1::2], 0)
    assert same_bits(weights(alone.policy, alone.critic), weights(beside.policy, beside.critic))
    assert metrics == expected | {"update/trained_share": 0.5}


def test_rows_left_out_are_in_no_policy_loss_and_in_no_denominator(make_learner: Make, samples: Samples) -> None:
    trajectories, credits = samples[0], without_critic(samples.credits)
    alone, beside = (make_learner(with_critic=False, minibatches=1) for _ in range(2))
    metrics = beside.update(trajectories, left_out(credits, slice(0, None, 2)), 0)
    expected = alone.update(trajectories[1::2], credits[1::2], 0)
    # Rows beside them are padded and summed in other ways.
    assert metrics == pytest.approx(expected | {"update/trained_share": 0.5}, abs=1e-6)
    assert same_bits(weights(alone.policy), weights(beside.policy))


def test_where_all_are_left_out_the_critic_trains_alone(make_learner: Make, samples: Samples) -> None:
    learner = make_learner(minibatches=2, kl_loss=0.1)
    policy, critic = weights(learner.policy), weights(learner.critic)
    metrics = learner.update(samples.trajectories, left_out(samples.credits), 0)
    assert same_bits(policy, weights(learner.policy))
    assert not same_bits(critic, weights(learner.critic))
    assert learner.policy_version == 0
    assert metrics["critic/loss"] > 0
    assert "policy/loss" not in metrics
    assert metrics["update/trained_share"] == 1.0, "they have the critic's gradient"


@pytest.mark.parametrize("kept", [4, 2])
def test_steps_ignore_filters(make_learner: Make, samples: Samples, monkeypatch: pytest.MonkeyPatch, kept: int) -> None:
    learner = make_learner(minibatches=2, epochs=3, critic={"minibatches": 1, "epochs": 4})
    steps: list[str] = []
    monkeypatch.setattr(learner.policy_optimizer, "step", lambda: steps.append("policy"))
    monkeypatch.setattr(learner.critic_optimizer, "step", lambda: steps.append("critic"))
    learner.update(samples.trajectories, changed(samples.credits, slice(kept, None), kept=lambda _: False), 0)
    assert steps == ["policy"] * 6 + ["critic"] * 4


def test_the_version_counts_the_updates_that_took_a_step(make_learner: Make, samples: Samples) -> None:
    """Equal returns give advantages of 0, with which GRPO has nothing to learn; the same weights are no new version."""
    learner = make_learner(with_critic=False)
    credits = without_critic(samples.credits)
    versions: list[int] = []
    for given in (without_advantage(credits), credits, without_advantage(credits), credits):
        before = weights(learner.policy)
        learner.update(samples.trajectories, given, len(versions))
        versions.append(learner.policy_version)
        assert same_bits(before, weights(learner.policy)) == (given is not credits)
    assert versions == [0, 1, 1, 2]


@pytest.mark.parametrize("ratio", RATIOS)
def test_masked_tokens_change_no_weight_whatever_their_credit(make_learner: Make, samples: Samples, ratio: str) -> None:
    trajectories, credits = samples
    poisoned = changed(
        credits,
        advantages=lambda each: np.where(each.loss_mask, each.advantages, np.float32(np.nan)),
        value_targets=lambda each: np.where(each.critic_mask, each.value_targets, np.float32(np.inf)),
        reference_logprobs=lambda each: np.where(each.loss_mask, each.reference_logprobs, np.float32(np.nan)),
    )
    learners = [make_learner(ratio=ratio, **EVERYTHING) for _ in range(2)]
    for learner, given in zip(learners, (credits, poisoned), strict=True):
        learner.update(trajectories, given, 0)
    clean, dirty = (weights(learner.policy, learner.critic) for learner in learners)
    assert same_bits(clean, dirty)


def test_what_has_no_gradient_counts_in_the_mismatch_and_the_clipped_part(make_learner: Make, samples: Samples) -> None:
    """Of rows with 5, 2, 6 and 5 action tokens the last two have no advantage; the sampler is off in these alone."""
    credits = without_advantage(without_critic(samples.credits), slice(2, None))
    stale = shifted(samples.trajectories, 0, 0, -np.log(2), -np.log(2))
    metrics = make_learner(with_critic=False).update(stale, credits, 0)
    assert metrics["update/trained_share"] == 0.5
    assert metrics["policy/mismatch_mean"] == pytest.approx(11 / 18 * np.log(2), abs=1e-4)
    assert metrics["policy/mismatch_ess"] == pytest.approx((7 + 22) ** 2 / (7 + 44) / 18, abs=1e-4)
    far_off = dataclasses.replace(stale[0], logprobs=np.where(stale[0].action_mask, -20, 0).astype(np.float32))
    clipped = make_learner(with_critic=False).update([far_off, *stale[1:]], credits, 0)["policy/clip_fraction"]
    assert clipped == 5 / 18


def test_observations_have_logprobs_of_before_first_step(make_learner: Make, trajectories: list[Trajectory]) -> None:
    # Only observations have an advantage. Were their ratio taken afresh in the second pass, it would be 1 in both, and
    # the loss minus the mean advantage.
    rows, credits = trajectories[2:], []
    for each in rows:
        credit = make_credit(each, loss_mask=(each.source == 2) | (np.arange(len(each.source)) == 2))
        credits += changed([credit], advantages=lambda was, each=each: was.advantages * (each.source == 2))
    advantages = np.concatenate([each.advantages[each.loss_mask] for each in credits])
    metrics = make_learner(epochs=2, learning_rate=0.05).update(rows, credits, 0)
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
        before = weights(learner.policy, learner.critic)
        learner.update(*samples, 0, rate=rate, critic_rate=rate)
        steps.append([new - old for old, new in zip(before, weights(learner.policy, learner.critic), strict=True)])
    assert max(step.abs().max() for step in steps[0]) > 1e-4
    for whole, quarter in zip(*steps, strict=True):
        torch.testing.assert_close(quarter, whole / 4, atol=1e-7, rtol=1e-3)


def test_the_optimisers_are_as_configured(make_learner: Make, samples: Samples) -> None:
    """Without a gradient at a row of the embeddings, weight decay alone moves it: by 1 - rate * decay."""
    learner = make_learner(weight_decay=0.5, betas=(0.8, 0.9), learning_rate=0.01)
    for optimizer in learner.optimizers.values():
        assert {(group["betas"], group["weight_decay"]) for group in optimizer.param_groups} == {((0.8, 0.9), 0.5)}
    before = learner.critic.backbone.get_input_embeddings().weight.detach().clone()
    learner.update(*samples, 0)
    after = learner.critic.backbone.get_input_embeddings().weight.detach()
    torch.testing.assert_close(after[0], before[0] * (1 - 1e-3 * 0.5))  # id 0 is in no trajectory


@pytest.mark.parametrize("key", ["learning_rate", "epochs", "minibatches", "value_clip"])
def test_values_are_zero_without_critic_whatever_its_settings(make_learner: Make, samples: Samples, key: str) -> None:
    plain, other = make_learner(with_critic=False), make_learner(with_critic=False, critic={key: 3})
    assert [values.tolist() for values in plain.values(samples.trajectories[:1])] == [[0.0] * 9]
    metrics = plain.update(*samples, 0)
    assert metrics == other.update(*samples, 0)
    assert not any(name.startswith("critic/") for name in metrics)
    assert same_bits(weights(plain.policy), weights(other.policy))


@pytest.mark.parametrize(("model", "field"), [("policy", "advantages"), ("critic", "value_targets")])
def test_not_finite_loss_names_trajectory_alone(make_learner: Make, samples: Samples, model: str, field: str) -> None:
    trajectories, credits = samples
    learner = make_learner()
    before = weights(getattr(learner, model))
    broken = np.where(credits[2].loss_mask, np.float32(np.nan), getattr(credits[2], field))
    with pytest.raises(FloatingPointError, match=r"loss is not finite in trajectories 0/q2/0;"):
        learner.update(trajectories, changed(credits, slice(2, 3), **{field: lambda _: broken}), 0)
    assert same_bits(before, weights(getattr(learner, model)))


def test_a_gradient_that_is_not_finite_names_the_step_and_changes_nothing(make_learner: Make, samples: Samples) -> None:
    trajectories, credits = samples
    learner = make_learner()
    before = weights(learner.critic)
    huge = np.full_like(credits[0].value_targets, 1.8e19)  # its square is a float32, that of the gradient is not
    credits = changed(credits, slice(1), value_targets=lambda _: huge, values=lambda _: huge / 2)
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
    make_learner: Make, samples: Samples, tmp_path: Path, adapter: LoraParams | None, caplog: pytest.LogCaptureFixture
) -> None:
    """Its logits are those of float32 weights times what bfloat16 layers gave it, and it learns and is saved."""
    assert not make_learner(dtype="auto", float32_output=True).compute.float32_output
    assert "float32_output: true has no effect" in caplog.text
    learner = make_learner(dtype="bfloat16", float32_output=True, adapter=adapter)
    narrow = make_learner(dtype="bfloat16", adapter=adapter)
    seen: list[torch.Tensor] = []
    output = learner.policy.get_output_embeddings()
    output.register_forward_hook(lambda _, given, logits: seen.extend([given[0], logits.clone()]))
    [logprobs, *_] = learner.logprobs(samples.trajectories)
    hidden, logits = seen[:2]
    assert logits.dtype == torch.float32
    torch.testing.assert_close(logits, hidden.float() @ output.weight.float().T, atol=1e-5, rtol=1e-5)
    assert logprobs.tolist() != narrow.logprobs(samples.trajectories)[0].tolist()
    learner.update(*samples, 0)
    learner.save_policy(tmp_path / "policy")
    saved = load_policy(tmp_path / "policy", device=CPU).get_output_embeddings().weight
    torch.testing.assert_close(saved, output.weight.float())


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


@pytest.fixture
def reference(tiny_model: Path, make_learner: Make) -> Reference:
    return reference_of(make_learner(with_critic=False), tiny_model)


def test_adapters_share_reference(reference: Reference, tiny_model: Path, make_learner: Make, samples: Samples) -> None:
    """No second copy, and what it says is what the model said before its adapters were trained."""
    learner = make_learner(adapter=LORA, learning_rate=0.01)
    beneath = reference_of(learner, tiny_model)
    assert beneath.policy is learner.policy
    learner.update(*samples, 0)
    masks = [each.action_mask for each in samples.trajectories]
    scores = [each.logprobs(samples.trajectories, masks) for each in (reference, beneath)]
    for left, right, own, mask in zip(*scores, learner.logprobs(samples.trajectories), masks, strict=True):
        assert left.tolist() == right.tolist()
        assert np.abs(own[mask] - right[mask]).max() > 1e-3, "the adapters are back in place afterwards"


@pytest.mark.parametrize("advantage", [1e-3, 1.0, 1e3, 1e6], ids=["small", "whole", "large", "one that overflows"])
def test_gradients_in_float16_are_those_of_float32(
    make_learner: Make, samples: Samples, monkeypatch: pytest.MonkeyPatch, advantage: float
) -> None:
    """Without a scale the small ones would lose bits below 6e-5; and 1e6 overflows with the scale of the divisor."""
    trajectories, credits = samples
    sized = changed(credits, advantages=lambda credit: credit.advantages * np.float32(advantage))
    expected = gradients_of(monkeypatch, make_learner(max_grad_norm=1e12), trajectories, sized)
    half = gradients_of(monkeypatch, make_learner(max_grad_norm=1e12, dtype="float16"), trajectories, sized)
    for model in ("policy", "critic"):
        exact, rounded = (
            torch.cat([each.flatten() for each in part(model, found).values()]) for found in (expected, half)
        )
        assert (rounded - exact).norm() < 0.01 * exact.norm()


def test_an_advantage_that_no_scale_fits_into_float16_is_named(make_learner: Make, samples: Samples) -> None:
    trajectories, credits = samples
    learner = make_learner(with_critic=False, dtype="float16")
    before = weights(learner.policy)
    endless = changed(credits, advantages=lambda credit: credit.advantages * np.float32(1e30))
    with pytest.raises(FloatingPointError, match="the policy gradient is not finite in trajectories 0/q0/0, "):
        learner.update(trajectories, endless, 0)
    assert same_bits(before, weights(learner.policy))
