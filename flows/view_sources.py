"""What a run's page shows, gathered from what training and evaluation have stored."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from agent_r1.credit.rewards import step_rewards
from agent_r1.hashes import sha256
from agent_r1.params import RewardWeights
from agent_r1.records import Credit, Question, Trajectory
from agent_r1.tables import read_rows
from agent_r1.viewer.choice import PER_ITERATION, from_iteration, interleaved, pairs, quotas, spread
from agent_r1.viewer.shown import Shown, When
from flows.stored.run import StoredRun

ROUNDING = 1e-6  # by which two sums of a trajectory's rewards may differ

logger = logging.getLogger(__name__)


class Sources:
    """The trajectories of one run: of its iterations, and of the evaluations of the policy before and after them."""

    def __init__(
        self, stored: StoredRun, questions: Mapping[str, Question], weights: RewardWeights, *, seed: int
    ) -> None:
        self._stored, self._questions, self._weights, self._seed = stored, questions, weights, seed

    def groups(self, count: int, before: Path, after: Path) -> list[list[Shown]]:
        """At most `count` trajectories, those of the same question together, test and training questions in turns.

        Half of them are answers to test questions before and after training, as far as the evaluations in these two
        folders are there, are of this very run and are alike; the rest is from training.

        Raises:
            ValueError: a question is no longer prepared, or the weights of the rewards are not those of the run.
        """
        tested = self._tested(count // 4, before, after)
        trained = self._trained(count - 2 * len(tested))
        return interleaved([tested, trained])

    def _tested(self, count: int, before: Path, after: Path) -> list[list[Shown]]:
        policy = self._stored.policy_folder
        if not _comparable(before, after, policy):
            return []
        earlier, later = (
            [self._shown(when, row) for row in read_rows(folder / "trajectories.parquet", Trajectory)]
            for when, folder in ((When.BEFORE, before), (When.AFTER, after))
        )
        return pairs(earlier, later, count, seed=self._seed)

    def _trained(self, count: int) -> list[list[Shown]]:
        """By question, the iterations whose rows were kept in turns."""
        kept = self._stored.kept
        places = [kept[place] for place in spread(len(kept), max(1, count // PER_ITERATION))]
        ends = [{each.question_id for each in self._stored.trajectories(place)} for place in {places[0], places[-1]}]
        recurring = set.intersection(*ends) if len(ends) > 1 else set()
        shares = quotas(len(places), count, len(recurring))
        rows = [self._iteration(place, share, recurring) for place, share in zip(places, shares, strict=True)]
        by_question: dict[str, list[Shown]] = {}
        for shown in interleaved(rows):
            by_question.setdefault(shown.question.question_id, []).append(shown)
        return list(by_question.values())

    def _iteration(self, iteration: int, count: int, recurring: set[str]) -> list[Shown]:
        credits_ = {credit.trajectory_id: credit for credit in self._stored.credits(iteration)}
        proofs = {proof.trajectory_id: proof.learner_logprobs for proof in self._stored.proofs(iteration)}
        chosen = from_iteration(
            self._stored.trajectories(iteration), count, recurring=recurring, proved=proofs, seed=self._seed
        )
        return [
            self._shown(When.TRAINING, each, credits_[each.trajectory_id], proofs.get(each.trajectory_id))
            for each in chosen
        ]

    def _shown(
        self,
        when: When,
        trajectory: Trajectory,
        credit: Credit | None = None,
        learner_logprobs: NDArray[np.float32] | None = None,
    ) -> Shown:
        question = self._questions.get(trajectory.question_id)
        if question is None:
            raise ValueError(
                f"question {trajectory.question_id!r} of {self._stored.run} is not among the prepared ones; "
                "prepare the data that it was trained on (`dvc checkout` brings them back), or train it again"
            )
        totals, parts = step_rewards(trajectory, self._weights)
        if credit is not None and abs(credit.return_ - totals.sum()) > ROUNDING:
            raise ValueError(
                f"trajectory {trajectory.trajectory_id!r} has a return of {credit.return_:g}, and {totals.sum():g} "
                f"with the reward weights of {self._stored.run} in params.yaml; set them as they were or train again"
            )
        return Shown(
            when=when,
            question=question,
            trajectory=trajectory,
            totals=totals,
            parts=parts,
            credit=credit,
            learner_logprobs=learner_logprobs,
        )


def _comparable(before: Path, after: Path, policy: Path) -> bool:
    """Whether `after` is an evaluation of this policy, and `before` one that differs from it in the policy alone."""
    if not all((folder / "hashes.json").exists() for folder in (before, after)):
        logger.info("the page shows no test questions: %s or %s is not there yet", before, after)
        return False
    earlier, later = (json.loads((folder / "hashes.json").read_text()) for folder in (before, after))
    if later["policy"] != sha256(policy):
        logger.warning("the page shows no test questions: %s is of another policy than %s", after, policy)
        return False
    if {**earlier, "policy": ""} != {**later, "policy": ""}:
        logger.warning("the page shows no test questions: %s and %s were not evaluated alike", before, after)
        return False
    return True
