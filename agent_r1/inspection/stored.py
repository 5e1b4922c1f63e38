"""What a finished training run has left on disk, for those who only read it."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from itertools import takewhile
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from agent_r1.credit.rewards import step_rewards
from agent_r1.files import sha256
from agent_r1.inspection.viewer import PER_ITERATION, Shown, When, from_iteration, interleaved, pairs, quotas, spread
from agent_r1.params import RewardWeights
from agent_r1.policy import checkpoint
from agent_r1.project import WARM_START, checkpointed_policy
from agent_r1.records import Credit, Proof, Question, Trajectory
from agent_r1.tables import read_rows


class PolicyOnDisk(NamedTuple):
    """Where the weights that sampled an iteration are, or the nearest ones."""

    path: Path | None  # None where neither they nor their successors are on disk
    sampled_it: bool  # whether they are the very weights
    note: str  # which weights they are, or why there are none


class StoredRun:
    """The finished iterations of a run. A training may be adding to them meanwhile."""

    def __init__(self, run: str, folder: Path) -> None:
        """Looks into the run's folder.

        Raises:
            FileNotFoundError: it holds no finished iteration.
        """
        progress = checkpoint.peek(folder / "checkpoint")
        if progress is None or not progress.iterations:
            raise FileNotFoundError(f"{folder} holds no finished iteration of {run}; train it first")
        self.run, self.folder, self.progress = run, folder, progress
        finished = range(progress.iterations)
        self.kept = [number for number in finished if self._rows("trajectories", number).exists()]

    @property
    def policy_folder(self) -> Path:
        """The latest policy, as a Hugging Face folder."""
        return checkpointed_policy(self.folder)

    def trajectories(self, iteration: int) -> list[Trajectory]:
        """The rows of one iteration."""
        return read_rows(self._rows("trajectories", iteration), Trajectory)

    def credits(self, iteration: int) -> list[Credit]:
        """The credit of the same rows, as the run assigned it."""
        return read_rows(self._rows("credit", iteration), Credit)

    def proofs(self, iteration: int) -> list[Proof]:
        """What the learner said of some of them, to prove the weights; of none where there is no such file."""
        path = self._rows("proof", iteration)
        return read_rows(path, Proof) if path.exists() else []

    def choose(self, wanted: Sequence[str]) -> list[int]:
        """Iterations by number, or `all`; the last one that the warm-started model sampled and the last one if empty.

        With a critic that is warmed up, the first of the two is the iteration of the policy's first update.

        Raises:
            ValueError: there is no such iteration, or its rows were not kept.
        """
        if list(wanted) == ["all"]:
            return list(self.kept)
        if not wanted:
            by_warm_start = takewhile(lambda iteration: self._version(iteration) == 0, self.kept)
            return sorted({max(by_warm_start, default=0), self.kept[-1]})
        for number in wanted:
            if not number.isdecimal() or int(number) not in self.kept:
                there_are = ", ".join(map(str, self.kept))
                raise ValueError(f"{self.run} keeps no iteration {number!r}; choose of {there_are}, or all")
        return sorted(set(map(int, wanted)))

    def policy(self, version: int) -> PolicyOnDisk:
        """The policy that sampled trajectories of this version, or the one a single update later."""
        latest, path = self.progress.policy_version, self.policy_folder
        if version == 0:
            return PolicyOnDisk(WARM_START, True, "the warm start, which sampled them")
        if version == latest:
            return PolicyOnDisk(path, True, "the checkpoint, which sampled them")
        if version == latest - 1:
            return PolicyOnDisk(path, False, "the checkpoint, one update later than what sampled them")
        return PolicyOnDisk(None, False, "none, its weights are no longer on disk")

    def _rows(self, kind: str, iteration: int) -> Path:
        return self.folder / kind / f"{iteration:03d}.parquet"

    def _version(self, iteration: int) -> int:
        return self.trajectories(iteration)[0].policy_version


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
