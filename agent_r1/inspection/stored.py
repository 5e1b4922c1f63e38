"""Trainings on disk, finished or running, as people look at them: read only."""

from __future__ import annotations

import enum
import logging
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import takewhile, zip_longest
from pathlib import Path
from typing import NamedTuple, TypeVar

from agent_r1.credit.rewards import step_rewards
from agent_r1.evaluation.comparison import POLICY, differences_of_setting, read_evaluation
from agent_r1.files import sha256
from agent_r1.learn import checkpoint
from agent_r1.learn.model import load_tokenizer
from agent_r1.params.credit import CreditParams
from agent_r1.params.places import policy_in
from agent_r1.records import Credit, Decode, Floats32, Proof, Question, Trajectory
from agent_r1.seeds import derive
from agent_r1.tables import read_rows
from agent_r1.tracking.traces import Rewarded

PER_ITERATION = 5
ROUNDING = 1e-6  # largest difference between two sums of a trajectory's rewards

T = TypeVar("T")

logger = logging.getLogger(__name__)


class PolicyOnDisk(NamedTuple):
    """The weights that sampled an iteration, or the nearest ones on disk."""

    path: Path | None  # None if neither they nor their successors are on disk
    sampled_it: bool  # whether they are exactly these weights
    note: str  # the weights in words, or why there are none


class StoredRun:
    """The finished iterations of a run, which a training may still extend."""

    def __init__(self, run: str, folder: Path, warm_start: Path) -> None:
        """Opens the run's folder. `warm_start` is the model that it started from."""
        progress = checkpoint.peek(folder / "checkpoint")
        if progress is None or not progress.iterations:
            raise FileNotFoundError(f"{folder} holds no finished iteration of {run}; train it first")
        self.run, self.folder, self.warm_start, self.progress = run, folder, warm_start, progress
        self.policy_folder = policy_in(folder)  # of the latest policy, in Hugging Face's form
        finished = range(progress.iterations)
        self.kept = [number for number in finished if self._rows("trajectories", number).exists()]
        if not self.kept:
            raise FileNotFoundError(f"{folder} has no trajectories of {run}; `dvc checkout {folder}` brings them back")

    @cached_property
    def decode(self) -> Decode:
        """Token ids as text, with special tokens."""
        tokenizer = load_tokenizer(self.policy_folder)
        return lambda token_ids: str(tokenizer.decode(list(token_ids), clean_up_tokenization_spaces=False))

    def trajectories(self, iteration: int) -> list[Trajectory]:
        """The trajectories of one iteration."""
        return read_rows(self._rows("trajectories", iteration), Trajectory)

    def demonstrations(self, iteration: int) -> list[Trajectory]:
        """The demonstrations of an iteration; none without such a file."""
        path = self._rows("demonstrations", iteration)
        return read_rows(path, Trajectory) if path.exists() else []

    def credits(self, iteration: int) -> list[Credit]:
        """The credit that the run assigned in an iteration."""
        return read_rows(self._rows("credit", iteration), Credit)

    def proofs(self, iteration: int) -> list[Proof]:
        """The learner's logprobs of the trajectories that proved the weights; none without such a file."""
        path = self._rows("proof", iteration)
        return read_rows(path, Proof) if path.exists() else []

    def choose(self, wanted: Sequence[str]) -> list[int]:
        """The wanted iterations, by number or `all`; by default the last that the warm start sampled, and the last."""
        if list(wanted) == ["all"]:
            return list(self.kept)
        if not wanted:
            by_warm_start = takewhile(lambda number: self.trajectories(number)[0].policy_version == 0, self.kept)
            return sorted({max(by_warm_start, default=0), self.kept[-1]})
        for number in wanted:
            if not number.isdecimal() or int(number) not in self.kept:
                there_are = ", ".join(map(str, self.kept))
                raise ValueError(f"{self.run} keeps no iteration {number!r}; choose of {there_are}, or all")
        return sorted(set(map(int, wanted)))

    def policy(self, version: int) -> PolicyOnDisk:
        """The policy of this version, or the one that is a single update later."""
        latest, path = self.progress.policy_version, self.policy_folder
        on_disk = {
            latest - 1: PolicyOnDisk(path, False, "the checkpoint, one update later than the policy that sampled them"),
            latest: PolicyOnDisk(path, True, "the checkpoint, which sampled them"),
            0: PolicyOnDisk(self.warm_start, True, "the warm start, which sampled them"),
        }
        return on_disk.get(version, PolicyOnDisk(None, False, "none, its weights are no longer on disk"))

    def _rows(self, kind: str, iteration: int) -> Path:
        return self.folder / kind / f"{iteration:03d}.parquet"


class When(enum.StrEnum):
    """The phase in which a policy acted."""

    BEFORE = "before"  # the untrained policy, on a test question
    TRAINING = "training"
    DEMONSTRATION = "demonstration"  # no policy, in training
    AFTER = "after"  # the trained policy, on a test question


@dataclass(frozen=True, slots=True)
class Shown(Rewarded):
    """One trajectory of the page, from one `When`."""

    credit: Credit | None = None  # None outside training
    learner_logprobs: Floats32 | None = None  # [L] nats; None if the learner was not asked


class Selection:
    """Draws the trajectories of one run's page, by the seed."""

    def __init__(
        self, stored: StoredRun, questions: Mapping[str, Question], params: CreditParams, max_tokens: int, seed: int
    ) -> None:
        self._stored, self._questions, self._seed = stored, questions, seed
        self._credit, self._max_tokens = params, max_tokens

    def groups(self, count: int, before: Path, after: Path, examples: Collection[str] = ()) -> list[list[Shown]]:
        """At most `count` trajectories in groups of one question; test and training questions alternate.

        Half of them answer test questions before and after training, if `_tested` finds any. The rest are of training,
        with the `examples`, which are ids.
        """
        tested = self._tested(count // 4, before, after)
        return interleaved([tested, self._trained(count - sum(map(len, tested)), examples)])

    def _tested(self, count: int, before: Path, after: Path) -> list[list[Shown]]:
        """Pairs of answers before and after training; none, and a line in the log, without two that can be compared."""
        if not all((folder / "hashes.json").exists() for folder in (before, after)):
            logger.info("the page shows no test questions: %s or %s is not there yet", before, after)
            return []
        evaluations = [read_evaluation(str(folder), folder) for folder in (before, after)]
        if evaluations[1].hashes[POLICY] != sha256(self._stored.policy_folder):
            policy = self._stored.policy_folder
            logger.warning("the page shows no test questions: %s is of another policy than %s", after, policy)
            return []
        if unlike := differences_of_setting(evaluations):
            said = "the page shows no test questions: %s and %s were not evaluated alike, they differ in %s"
            logger.warning(said, before, after, ", ".join(unlike))
            return []
        earlier = [self._shown(When.BEFORE, row) for row in evaluations[0].trajectories]
        later = [self._shown(When.AFTER, row) for row in evaluations[1].trajectories]
        samples = max(map(len, of_questions(later).values()), default=1)
        return pairs(earlier, later, count // samples, seed=self._seed)

    def _trained(self, count: int, examples: Collection[str]) -> list[list[Shown]]:
        """Groups of one question, whose trajectories are taken from the kept iterations in turns."""
        kept = self._stored.kept
        places = [kept[place] for place in spread(len(kept), max(1, count // PER_ITERATION))]
        ends = [{each.question_id for each in self._stored.trajectories(place)} for place in {places[0], places[-1]}]
        recurring = set.intersection(*ends) if len(ends) > 1 else set()
        shares = Counter(int(name.partition("/")[0]) for name in examples)
        shares.update(dict(zip(places, quotas(len(places), count - len(examples), len(recurring)), strict=True)))
        rows = [self._iteration(place, share, recurring, examples) for place, share in sorted(shares.items())]
        return list(of_questions(interleaved(rows)).values())

    def _iteration(self, iteration: int, count: int, recurring: set[str], examples: Collection[str]) -> list[Shown]:
        credits_ = {credit.trajectory_id: credit for credit in self._stored.credits(iteration)}
        proofs = {proof.trajectory_id: proof.learner_logprobs for proof in self._stored.proofs(iteration)}
        rows = self._stored.trajectories(iteration)
        drawn = from_iteration(rows, count, recurring=recurring, proved=proofs, seed=self._seed)
        first = [each for each in rows if each.trajectory_id in examples]
        named = [*{each.trajectory_id: each for each in [*first, *drawn]}.items()][:count]
        questions = {row.question_id for _, row in named}
        demonstrations = [row for row in self._stored.demonstrations(iteration) if row.question_id in questions]
        return [
            *(self._shown(When.TRAINING, each, credits_[name], proofs.get(name)) for name, each in named),
            *(self._shown(When.DEMONSTRATION, row) for row in demonstrations),
        ]

    def _shown(
        self, when: When, trajectory: Trajectory, credit: Credit | None = None, learners: Floats32 | None = None
    ) -> Shown:
        question = self._questions.get(trajectory.question_id)
        if question is None:
            lacking = f"question {trajectory.question_id!r} of {self._stored.run} is not among the prepared ones"
            remedy = "set prepare: as it was when the run was trained and run `dvc repro prepare`"
            raise ValueError(f"{lacking}; {remedy}, or train the run again")
        params = self._credit if credit else self._credit.model_copy(update={"rewards": self._credit.rewards.built_in})
        totals, parts = step_rewards(trajectory, params, self._max_tokens)
        if credit is not None and abs(credit.return_ - totals.sum()) > ROUNDING:
            stored = f"trajectory {trajectory.trajectory_id!r} has a return of {credit.return_:g}"
            now = f"{totals.sum():g} with the reward weights of {self._stored.run} in params.yaml"
            raise ValueError(f"{stored}, and {now}; set them as they were or train again")
        return Shown(when, question, trajectory, totals, parts, credit, learners)


def spread(count: int, at_most: int) -> list[int]:
    """At most `at_most` numbers of `range(count)`, evenly apart, with the first and the last."""
    if count <= at_most:
        return list(range(count))
    if at_most < 2:
        return [count - 1][:at_most]
    return [round(place * (count - 1) / (at_most - 1)) for place in range(at_most)]


def quotas(iterations: int, count: int, recurring: int) -> list[int]:
    """How many trajectories iterations give to a page: the ends a quarter for shared questions, all an even rest."""
    if not iterations:
        return []
    extra = min(recurring, count // 4) if iterations > 1 else 0
    share, left = divmod(count - 2 * extra, iterations)
    return [share + (place < left) + extra * (place in (0, iterations - 1)) for place in range(iterations)]


def from_iteration(
    trajectories: Sequence[Trajectory], count: int, *, recurring: Collection[str], proved: Collection[str], seed: int
) -> list[Trajectory]:
    """At most `count`, at random: first of each `recurring` question, in all iterations alike, then proved ones."""

    def rank(trajectory: Trajectory) -> tuple[int, int, int]:
        if trajectory.question_id in recurring:
            return 0, trajectory.sample, derive(seed, trajectory.question_id)
        return 1, trajectory.trajectory_id not in proved, derive(seed, trajectory.trajectory_id)

    return sorted(trajectories, key=rank)[:count]


def pairs(before: Sequence[Shown], after: Sequence[Shown], count: int, *, seed: int) -> list[list[Shown]]:
    """All samples of two policies for `count` questions: more or less often right, never or as often, in turns."""
    kinds: dict[tuple[bool, bool, bool], list[list[Shown]]] = {
        (False, True, True): [],
        (True, False, True): [],
        (False, False, False): [],
        (False, False, True): [],
    }
    earlier, later = of_questions(before), of_questions(after)
    for question_id in sorted(earlier.keys() & later.keys(), key=lambda each: derive(seed, each)):
        was, now = (sum(bool(each.trajectory.success) for each in of[question_id]) for of in (earlier, later))
        kinds[was > now, now > was, was + now > 0].append([*earlier[question_id], *later[question_id]])
    return interleaved(list(kinds.values()))[:count]


def of_questions(shown: Iterable[Shown]) -> dict[str, list[Shown]]:
    """The episodes of each question, in their order."""
    found: dict[str, list[Shown]] = {}
    for each in shown:
        found.setdefault(each.question.question_id, []).append(each)
    return found


def interleaved(rows: Sequence[Sequence[T]]) -> list[T]:
    """The first value of every row, then the second of every row, and so on."""
    return [value for turn in zip_longest(*rows, fillvalue=None) for value in turn if value is not None]
