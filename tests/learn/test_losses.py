"""The terms of the loss, and the objective of a step: every option by hand, gradients by finite differences."""

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from agent_r1.learn.losses import (
    LossTokens,
    balance,
    clipped_policy_loss,
    clipped_tokens,
    clipped_value_loss,
    importance_weights,
    k3,
    mismatch_metrics,
    normaliser,
    policy_metrics,
    policy_ratio,
    token_losses,
    token_weight,
)
from agent_r1.learn.scoring import TokenScores
from agent_r1.params import load
from agent_r1.params.train import UpdateParams
from tests.cases import cases, tables
from tests.learn.learning import UPDATE, with_changes

CLIP = load(Path(__file__).parents[2] / "params.yaml").train.update.model_copy(
    update={"clip_low": 0.2, "clip_high": 0.28, "dual_clip": 3.0}
)


def logs(*numbers: float, **options: Any) -> Tensor:
    return torch.tensor([math.log(number) for number in numbers], **options)


def test_logarithms_of_ratios_end_at_20_nats_and_have_no_gradient_there() -> None:
    # 21 and -1000 nats, and a span whose mean is 30; 19 and a span of mean 2 stay as they are.
    logprobs = torch.tensor([21.0, -1000.0, 19.0], requires_grad=True)
    ratio = policy_ratio(logprobs, torch.zeros(3))
    ratio.sum().backward()
    assert ratio.log().tolist() == pytest.approx([20, -20, 19])
    assert logprobs.grad.log().tolist() == pytest.approx([-math.inf, -math.inf, 19])
    assert policy_ratio(torch.tensor([50.0, 10, 3, 1]), torch.zeros(4), [2, 2]).log().tolist() == [20, 20, 2, 2]


@cases("advantage, ratio, loss, slope")
def test_clipped_policy_loss_by_hand(advantage: float, ratio: float, loss: float, slope: float) -> None:
    logprobs = logs(ratio, requires_grad=True)
    value = clipped_policy_loss(torch.exp(logprobs), torch.tensor([advantage]), CLIP)
    value.sum().backward()
    assert value.item() == pytest.approx(loss, abs=1e-6)
    assert logprobs.grad.item() == pytest.approx(slope, abs=1e-6)


@pytest.mark.parametrize(("dual_clip", "loss"), [(2.0, 4.0), (3.0, 6.0), (5.0, 8.0), (0.0, 8.0)])
def test_the_dual_clip_bounds_the_ratio_of_bad_actions(dual_clip: float, loss: float) -> None:
    # A = -2, rho = 4: max(8, 2.56), capped at dual_clip * 2; 0 is no cap
    bounds = CLIP.model_copy(update={"dual_clip": dual_clip})
    assert clipped_policy_loss(torch.tensor([4.0]), torch.tensor([-2.0]), bounds).item() == loss
    assert clipped_tokens(torch.tensor([4.0]), torch.tensor([-2.0]), bounds).item() == (0 < dual_clip < 4)


@cases("rule, floor, cap, ratios, weights")
def test_importance_weights(rule: str, floor: float, cap: float, ratios: list[float], weights: list[float]) -> None:
    params = with_changes(UPDATE, importance_rule=rule, importance_floor=floor, importance_cap=cap)
    assert importance_weights(logs(*ratios), params).tolist() == pytest.approx(weights)


def test_metrics_of_a_mask_are_its_share_and_the_worth_of_the_rest() -> None:
    """Of four action tokens one is left out; (2 + 1 + 1)^2 / (4 + 1 + 1) of 4. The observation counts in neither."""
    made = tokens(
        logprobs=[0.0] * 5,
        importance=[2.0, 1.0, 0.0, 1.0, 0.0],
        sampled=[True, True, True, True, False],
        advantages=[3.0, 0.0, 5.0, 0.0, 0.0],
    )
    metrics = policy_metrics(made, with_changes(UPDATE, importance_cap=4.0, importance_rule="mask_token"), 4, 4)
    assert metrics["policy/importance_masked"] == 1 / 4
    assert metrics["policy/importance_ess"] == pytest.approx(16 / 6 / 4)
    assert metrics["policy/loss"] == pytest.approx(-2 * 3 / 4)
    none = policy_metrics(replace(made, importance=torch.zeros(5)), with_changes(UPDATE, importance_cap=4.0), 4, 4)
    assert (none["policy/importance_masked"], none["policy/importance_ess"]) == (1.0, 0.0)
    assert "policy/importance_masked" not in policy_metrics(made, UPDATE, 4, 4)


@cases("value, old_value, target, loss")
def test_clipped_value_loss_by_hand(value: float, old_value: float, target: float, loss: float) -> None:
    tensors = [torch.tensor([number]) for number in (value, old_value, target)]
    assert clipped_value_loss(*tensors, value_clip=0.5).item() == pytest.approx(loss)


def test_k3_by_hand() -> None:
    # x = ln 2: 2 - 1 - ln 2; x = -ln 2: 1/2 - 1 + ln 2; x = 0: 0
    estimates = k3(torch.zeros(3), logs(2, 0.5, 1))
    assert estimates.tolist() == pytest.approx([1 - math.log(2), math.log(2) - 0.5, 0])
    # An estimate ends at 10, where it has no gradient.
    # Drawn with log q - log p of 12, -100, 3 and 2; e^3 - 1 - 3 > 10; the slope in log p at x = 2 is -(e^2 - 1).
    logprobs = torch.tensor([-12.0, 100.0, -3.0, -2.0], requires_grad=True)
    estimates = k3(logprobs, torch.zeros(4))
    estimates.sum().backward()
    assert estimates.tolist() == pytest.approx([10, 10, 10, math.expm1(2) - 2])
    assert logprobs.grad.tolist() == pytest.approx([0, 0, 0, -math.expm1(2)])


LN2 = math.log(2)


def tokens(spans: list[int] | None = None, **given: Any) -> LossTokens:
    """LossTokens with the given entries; of the others the logprobs are 0, and weights and advantages 1."""
    entries = {name: torch.as_tensor(values) for name, values in given.items()}
    count = len(next(iter(entries.values())))
    zero = ("logprobs", "entropy", "old_logprobs", "sampler_logprobs", "reference_logprobs", "balance")
    defaults = {name: torch.zeros(count) for name in zero}
    ones = {"advantages": torch.ones(count), "weights": torch.ones(count), "sampled": torch.ones(count).bool()}
    ones["importance"] = torch.ones(count)
    none = {"demonstrated": torch.zeros(count).bool()}
    return LossTokens(**{**defaults, **ones, **none, **entries}, spans=spans)


def test_a_span_is_clipped_as_a_whole() -> None:
    # rho of the first span (1/2 * 2)^(1/2) = 1: neither token is clipped, though each alone would be.
    # rho of the second 3/2: clipped at 1.28.
    logprobs = torch.tensor([0.5, 2.0, 1.5]).log()
    of_spans = tokens(spans=[2, 1], logprobs=logprobs, advantages=[1.0, 3.0, 1.0])
    assert token_losses(of_spans, UPDATE).tolist() == pytest.approx([-1, -3, -1.28])
    assert policy_metrics(of_spans, UPDATE, 3, 3)["policy/clip_fraction"] == pytest.approx(1 / 3)


def slopes(given: LossTokens, params: UpdateParams) -> tuple[list[float], list[float]]:
    """The losses, and the gradient of their sum at the logprobs."""
    logprobs = given.logprobs.clone().requires_grad_()
    losses = token_losses(replace(given, logprobs=logprobs), params)
    losses.sum().backward()
    return losses.tolist(), logprobs.grad.tolist()


def test_cispo_by_hand() -> None:
    """-A w log p with the weight w of 1.25, 2 clipped to 1.28, 1/2 to 0.8 and none at A = 0; the slope is -A w."""
    params = with_changes(UPDATE, loss="cispo", dual_clip=0)
    logprobs = torch.tensor([0.25, 0.5, 0.125, 0.25]).log()
    old = torch.tensor([0.2, 0.25, 0.25, 0.25]).log()
    given = tokens(logprobs=logprobs, old_logprobs=old, advantages=[2.0, 1.0, -1.0, 0.0])
    losses, slope = slopes(given, params)
    assert losses == pytest.approx([2.5 * 2 * LN2, 1.28 * LN2, -0.8 * 3 * LN2, 0])
    assert slope == pytest.approx([-2.5, -1.28, 0.8, 0])
    assert policy_metrics(given, params, 4, 4)["policy/clip_fraction"] == 2 / 4
    unbounded = with_changes(params, clip_low=1.0)
    assert slopes(given, unbounded)[1] == pytest.approx([-2.5, -1.28, 0.5, 0])


def test_gspo_token_has_the_sequences_value_and_each_tokens_own_gradient() -> None:
    """Ratios 1/2 and 2.42: 1.1 for both; with advantages 1 and 3 the slopes are -1.1 and -3.3, not -2.2 each.

    The next sequence is clipped as a whole: 3/2 with A > 0 has no gradient at any of its tokens.
    """
    ratios = torch.tensor([0.5, 2.42, 1.5, 1.5])
    given = tokens(spans=[2, 2], logprobs=ratios.log(), advantages=[1.0, 3.0, 1.0, 2.0])
    together = slopes(given, with_changes(UPDATE, ratio="sequence"))
    apart = slopes(given, with_changes(UPDATE, ratio="sequence_token"))
    assert apart[0] == pytest.approx([-1.1, -3.3, -1.28, -2.56])
    assert together[0] == pytest.approx(apart[0])
    assert apart[1] == pytest.approx([-1.1, -3.3, 0, 0])
    assert together[1] == pytest.approx([-2.2, -2.2, 0, 0])


def test_kl_and_entropy_are_of_sampled_tokens_alone() -> None:
    # At the first token k3 is 1 - ln 2 and the entropy 2; the second, an observation, keeps its clipped loss of -1.
    params = with_changes(UPDATE, kl_loss=0.5, entropy_bonus=0.1)
    given = tokens(reference_logprobs=[LN2, LN2], entropy=[2.0, 6.0], sampled=[True, False])
    assert token_losses(given, params).tolist() == pytest.approx([-1 + 0.5 * (1 - LN2) - 0.2, -1])
    assert policy_metrics(given, params, 2, 1)["policy/entropy"] == 2


@cases("aggregation, constant_length, mean")
def test_aggregation_by_hand(aggregation: str, constant_length: int, mean: float) -> None:
    """Losses 1, 3 of one trajectory and 5 of another; a third has no loss token and counts nowhere."""
    params = with_changes(UPDATE, aggregation=aggregation, constant_length=constant_length)
    lengths = [2, 1, 0]
    weights = [token_weight(length, params) for length in lengths for _ in range(length)]
    given = tokens(advantages=[-1.0, -3.0, -5.0], weights=weights)
    assert policy_metrics(given, params, normaliser(lengths, params), 3)["policy/loss"] == pytest.approx(mean)


def test_metrics_by_hand() -> None:
    # Of 8 action tokens in the step two are in the loss, of which the second is clipped; so is the third, an
    # observation, whose entropy and clip are not counted.
    given = tokens(
        logprobs=[LN2, 0.5, 1.0],
        old_logprobs=[LN2, 0.0, 0.0],
        entropy=[1.0, 2.0, 6.0],
        advantages=[1.0, 2.0, 3.0],
        sampled=[True, True, False],
    )
    assert policy_metrics(given, UPDATE, 4, 8) == pytest.approx(
        {"policy/loss": -(1 + 2 * 1.28 + 3 * 1.28) / 4, "policy/clip_fraction": 1 / 8, "policy/entropy": 3 / 2}
    )


def test_the_mismatch_by_hand() -> None:
    # Weights 2 and 1: k3 with x = ln 2 is 1 - ln 2; (2 + 1)^2 / (4 + 1) of 2; (4 + 1) / 2 - 1.
    assert mismatch_metrics(torch.tensor([LN2, 0.0]), torch.zeros(2)) == pytest.approx(
        {
            "policy/mismatch_kl": (1 - LN2) / 2,
            "policy/mismatch_mean": LN2 / 2,
            "policy/mismatch_max": LN2,
            "policy/mismatch_ess": 9 / 5 / 2,
            "policy/mismatch_chi2": 5 / 2 - 1,
        }
    )


# A small case in float64: 6 tokens of 2 trajectories and 3 steps, a vocabulary of 5.
CHOSEN, SEQUENCES = [0, 3, 1, 4, 2, 0], [3, 3]
SPANS: dict[str, list[int] | None] = {"token": None, "step": [2, 1, 3], "sequence": SEQUENCES}
TERMS = tables(Path(__file__).parent)["terms"]
AGGREGATIONS = {"token_mean": 0, "sequence_mean": 0, "constant_length": 7}


def predicted(logits: Tensor) -> dict[str, Tensor]:
    """What logits [N, V] say: the entries of `LossTokens` that carry the gradient."""
    logprobs, entropy = TokenScores.apply(logits.clone(), torch.as_tensor(CHOSEN), True)
    return {"logprobs": logprobs, "entropy": entropy}


def test_a_token_that_cannot_be_drawn_adds_nothing_to_the_entropy() -> None:
    # Probabilities 1/2, 1/2 and 0: ln 2 nats, at its largest, so that no logit has a slope.
    logits = torch.tensor([[0.0, 0.0, -math.inf]], requires_grad=True)
    logprobs, entropy = TokenScores.apply(logits.clone(), torch.tensor([0]), True)
    (entropy.sum() + logprobs.sum()).backward()
    assert entropy.tolist() == pytest.approx([LN2])
    assert logits.grad.tolist() == [pytest.approx([0.5, -0.5, 0])]


def small_case(logits: Tensor, params: UpdateParams) -> LossTokens:
    noise = torch.randn(3, 6, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    first_unlikelier = torch.tensor([0.5, 0.5, 0.5, 0.0, 0.0, 0.0])
    now = predicted(logits)
    old = now["logprobs"] + 0.8 * noise[0] - first_unlikelier
    sampler = now["logprobs"] + noise[1]
    capped = params.importance_cap > 0
    return LossTokens(
        **now,
        old_logprobs=old,
        sampler_logprobs=sampler,
        importance=importance_weights((old - sampler).detach(), params) if capped else torch.ones(6),
        reference_logprobs=now["logprobs"] + noise[2],
        advantages=torch.tensor([2.0, 1.0, 0.5, -1.0, 1.5, -2.0], dtype=torch.float64),
        weights=torch.tensor([token_weight(length, params) for length in SEQUENCES for _ in range(length)]),
        sampled=torch.ones(6).bool(),
        demonstrated=torch.zeros(6).bool(),
        balance=torch.zeros(6),
        spans=SPANS[params.ratio],
    )


def test_the_balance_of_experts_by_hand() -> None:
    """Two experts, one of which a token goes to: three of four choices fall on the first, whose mean share is 5 / 8."""
    even = torch.zeros(4, 2)
    assert balance([torch.tensor([[9.0, -9.0], [-9.0, 9.0]])], 1).item() == pytest.approx(1)
    assert balance([torch.tensor([[50.0, -50.0]])], 1).item() == pytest.approx(2), "all on one of two"
    shares = torch.tensor([[0.75, 0.25], [0.75, 0.25], [0.75, 0.25], [0.25, 0.75]]).log()
    # 2 x (3/4 x 5/8 + 1/4 x 3/8) = 1.125; a layer of even logits has 1 whatever is chosen
    assert balance([shares, even], 1).item() == pytest.approx((1.125 + 1) / 2)


def test_a_demonstrations_token_is_learned_without_a_ratio() -> None:
    """-.5 * -3 with a slope of -.5 at the first token, however far the policy has moved; no bonus for its entropy."""
    logprobs = torch.tensor([-3.0, -1.0], requires_grad=True)
    made = tokens(
        logprobs=logprobs,
        old_logprobs=[-9.0, -1.0],
        entropy=[7.0, 0.0],
        advantages=[0.5, 1.0],
        sampled=[False, True],
        demonstrated=[True, False],
    )
    params = with_changes(UPDATE, entropy_bonus=1.0, kl_loss=1.0)
    losses = token_losses(made, params)
    losses.sum().backward()
    assert losses.tolist()[0] == pytest.approx(1.5)
    assert logprobs.grad.tolist()[0] == pytest.approx(-0.5)
    metrics = policy_metrics(made.detach(), params, 2, 1)
    assert (metrics["policy/demonstration_loss"], metrics["policy/entropy"]) == (3.0, 0.0)
    alone = policy_metrics(tokens(logprobs=[-3.0], sampled=[False], demonstrated=[True]), params, 1, 0)
    assert alone == {"policy/loss": 3.0, "policy/demonstration_loss": 3.0}


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@pytest.mark.parametrize("terms", TERMS)
@pytest.mark.parametrize("ratio", SPANS)
def test_gradients_agree_with_finite_differences(ratio: str, terms: str, aggregation: str) -> None:
    length = AGGREGATIONS[aggregation]
    params = with_changes(UPDATE, ratio=ratio, aggregation=aggregation, constant_length=length, **TERMS[terms])
    logits = torch.randn(6, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    case = small_case(logits, params)
    assert 0 < policy_metrics(case, params, 1, 6)["policy/clip_fraction"] < 1, "both branches of the clip are in play"

    def objective(moved: Tensor) -> Tensor:
        given = replace(case, **predicted(moved))
        return (token_losses(given, params) * given.weights).sum() / normaliser(SEQUENCES, params)

    assert torch.autograd.gradcheck(objective, [logits.requires_grad_()])
