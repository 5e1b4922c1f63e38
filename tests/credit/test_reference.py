"""What the reference adds to the rewards, worked by hand."""

import math
from dataclasses import replace

import numpy as np
import pytest

from agent_r1.credit.assign import assign, kl_rewards
from agent_r1.credit.metrics import reference_metrics, step_metrics
from agent_r1.records import Trajectory
from tests.credit.letters import params, progress, trajectory

# "PAAOA": sampled with -1, -2 and -3; the reference gives -1.5, -1.75 and -4 there, 7 to the prompt and -9 to the
# observation.
LOGPROBS = np.array([0, -1, -2, 0, -3], np.float32)
REFERENCE = np.array([7, -1.5, -1.75, -9, -4], np.float32)
KL = [0, -0.5, 0.25, 0, -1]


@pytest.fixture
def episode() -> Trajectory:
    return replace(trajectory("PAAOA", progress(1, 2)), logprobs=LOGPROBS)


def test_every_action_token_pays_what_it_is_likelier_by(episode: Trajectory) -> None:
    assert kl_rewards(episode, REFERENCE).tolist() == KL
    assert kl_rewards(episode, np.where(episode.action_mask, REFERENCE, np.nan)).tolist() == KL


@pytest.mark.parametrize("broken", ["sampler", "reference"])
def test_a_logprob_that_is_not_finite_names_the_trajectory(episode: Trajectory, broken: str) -> None:
    wrong = np.where(np.arange(5) == 2, -np.inf, REFERENCE).astype(np.float32)
    of = replace(episode, logprobs=wrong) if broken == "sampler" else episode
    with pytest.raises(ValueError, match=r"trajectory '0/q/0': a logprob .* is not finite"):
        kl_rewards(of, REFERENCE if broken == "sampler" else wrong)


def test_metrics_by_hand(episode: Trajectory) -> None:
    # Sums -5/4 and 0 over two trajectories; k3 over their four action tokens, the last of which has x = 0.
    other = trajectory("PA")
    kl = [kl_rewards(episode, REFERENCE), kl_rewards(other, np.zeros(2, np.float32))]
    k3 = [math.exp(x) - 1 - x for x in (-0.5, 0.25, -1.0, 0.0)]
    found = reference_metrics([episode, other], kl)
    assert found == pytest.approx({"reward/kl": -5 / 8, "policy/reference_kl": sum(k3) / 4})


def test_the_penalty_joins_the_rewards_of_the_tokens(episode: Trajectory) -> None:
    # kl_reward 2; rewards 1 and 2 at the steps' ends: 0, -1, 1 + 1/2, 0, 2 - 2. With V = 0 and gamma = lambda = 1 the
    # value targets are the returns to go. The episode's own return stays 3.
    values = [np.zeros(5, np.float32)]
    [credit], metrics = assign([episode], values, params(kl_reward=2.0), reference=[REFERENCE])
    assert credit.value_targets.tolist() == [0, 0.5, 1.5, 0, 0]
    assert credit.return_ == metrics["reward/total"] == 3
    assert metrics["reward/kl"] == -1.25
    assert metrics["policy/reference_kl"] > 0


def test_a_teacher_alone_gives_every_token_its_own_advantage(episode: Trajectory) -> None:
    """At gamma 0: -1/2, 1/4 and -1, less their mean -5/12, by their std, which is the root of 114/3 twelfths."""
    distilled = params("reinforce_pp", gamma=0.0, kl_reward=1.0, weights={})
    [credit], _ = assign([episode], None, distilled, reference=[REFERENCE])
    expected = [each / math.sqrt(114 / 3) for each in (-1, 8, -7)]
    assert credit.advantages[episode.action_mask].tolist() == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("masks", [True, False])
def test_a_reference_without_a_price_changes_no_credit_and_is_kept(episode: Trajectory, masks: bool) -> None:
    values = [np.array([0, 0.5, 1, 0, -1], np.float32)]
    chosen = params(loss_mask=masks, recursion=masks)
    [bare], metrics = assign([episode], values, chosen)
    [credit], more = assign([episode], values, chosen, reference=[REFERENCE])
    for name in ("advantages", "value_targets"):
        assert getattr(credit, name).tolist() == getattr(bare, name).tolist()
    assert more.keys() - metrics.keys() == {"reward/kl", "policy/reference_kl"}
    assert not bare.reference_logprobs.any()
    assert credit.reference_logprobs.tolist() == [0, -1.5, -1.75, 0, -4]
    assert credit.reference_logprobs.dtype == np.float32


def test_a_penalty_without_a_reference_is_refused(episode: Trajectory) -> None:
    with pytest.raises(ValueError, match=r"kl_reward 0\.1 needs a reference's logprobs"):
        assign([episode], [np.zeros(5, np.float32)], params(kl_reward=0.1))


def test_a_step_by_hand(episode: Trajectory) -> None:
    """The old weights gave the action tokens -1, -2 and -3, the new ones log 2 more, log 2 less, and all there is."""
    after = LOGPROBS + np.array([9, math.log(2), -math.log(2), 9, 3], np.float32)
    k3 = [2 - 1 - math.log(2), 0.5 - 1 + math.log(2), 10]  # e^3 - 4 is 16
    assert step_metrics([episode], [LOGPROBS], [after]) == pytest.approx({"policy/kl_step": sum(k3) / 3})
    assert step_metrics([episode], [LOGPROBS], [LOGPROBS]) == {"policy/kl_step": 0}
    assert step_metrics([], [], []) == {}
