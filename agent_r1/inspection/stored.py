"""Trainings on disk, finished or running, as people look at them: read only."""

from __future__ import annotations

import enum
import logging
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import islice, takewhile, zip_longest
from pathlib import Path
from typing import NamedTuple, TypeVar

from agent_r1.credit.rewards import step_rewards
from agent_r1.evaluation.comparison import POLICY, differences_of_setting, read_evaluation
from agent_r1.files import EVALUATION_HASHES, sha256
from agent_r1.imported.store import read_about, tokens_in
from agent_r1.learn import checkpoint
from agent_r1.learn.model import load_tokenizer
from agent_r1.params import Params
from agent_r1.params.credit import CreditParams
from agent_r1.params.places import IMPORTED, RunId, policy_in
from agent_r1.params.train import TrainParams
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
        self.run = run
        self.folder = folder
        self.warm_start = warm_start
        self.progress = progress
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

    def choose(self, numbers: Sequence[str]) -> list[int]:
        """The wanted iterations, by number or `all`; by default the last that the warm start sampled, and the last."""
        if list(numbers) == ["all"]:
            return list(self.kept)
        if not numbers:
            by_warm_start = takewhile(lambda number: self.trajectories(number)[0].policy_version == 0, self.kept)
            return sorted({max(by_warm_start, default=0), self.kept[-1]})
        for number in numbers:
            if not number.isdecimal() or int(number) not in self.kept:
                there_are = ", ".join(map(str, self.kept))
                raise ValueError(f"{self.run} keeps no iteration {number!r}; choose of {there_are}, or all")
        return sorted(set(map(int, numbers)))

    def policy(self, version: int) -> PolicyOnDisk:
        """The policy of this version, or the one that is a single update later."""
        latest = self.progress.policy_version
        path = self.policy_folder
        on_disk = {
            latest - 1: PolicyOnDisk(path, False, "the checkpoint, one update later than the policy that sampled them"),
            latest: PolicyOnDisk(path, True, "the checkpoint, which sampled them"),
            0: PolicyOnDisk(self.warm_start, True, "the warm start, which sampled them"),
        }
        return on_disk.get(version, PolicyOnDisk(None, False, "none, its weights are no longer on disk"))

    def _rows(self, kind: str, iteration: int) -> Path:
        return self.folder / kind / f"{iteration:03d}.parquet"


class ImportedRun(StoredRun):
    """A run of another trainer, without credit and weights."""

    def __init__(self, run: RunId, folder: Path) -> None:
        """Opens what was imported into a folder."""
        self.about = read_about(folder)
        self.run = run.label
        self.folder = self.policy_folder = folder
        self.progress = checkpoint.Progress(iterations=self.about.steps[-1] + 1, policy_version=0)
        self.kept = sorted(self.about.steps)

    @cached_property
    def decode(self) -> Decode:
        """Token ids as text."""
        return tokens_in(self.folder).decode

    def require_exact(self) -> None:
        """Raises ValueError if an episode of it has no ids and logprobs of its sampler's."""
        if self.about.exact < self.about.rows:
            needed = (
                "a replay needs ids and logprobs of each action, as NeMo Gym's, ATIF's and verifiers' traces have them"
            )
            raise ValueError(f"{self.folder}: {self.about}; {needed}")

    def credits(self, iteration: int) -> list[Credit]:
        """None: its trainer's are not known."""
        return []

    def policy(self, version: int) -> PolicyOnDisk:
        """None: its weights are elsewhere."""
        return PolicyOnDisk(None, False, "none, weights are not imported")


def stored_run(settings: Params, run: RunId, folder: Path | None = None) -> StoredRun:
    """A run on disk, in its own folder or another one."""
    places = settings.of(run).places
    folder = folder or places.training(run)
    return ImportedRun(run, folder) if run.sweep == IMPORTED else StoredRun(run.run, folder, places.warm_start)


def open_run(settings: Params, run: RunId) -> tuple[StoredRun, TrainParams]:
    """A run on disk, and its configuration; of another trainer's, the rewards that it paid are all that is known."""
    stored = stored_run(settings, run)
    if not isinstance(stored, ImportedRun):
        return stored, settings.run(run)
    credit = settings.train.credit.model_copy(update={"rewards": stored.about.rewards, "estimator": "grpo"})
    return stored, settings.train.model_copy(update={"credit": credit, "seed": run.seed or 0})


class When(enum.StrEnum):
    """The phase in which a policy acted."""

    BEFORE = "before"  # the untrained policy, on a test question
    TRAINING = "training"
    DEMONSTRATION = "demonstration"  # no policy, in training
    AFTER = "after"  # the trained policy, on a test question


@dataclass(frozen=True, slots=True)
class PageTrajectory(Rewarded):
    """One trajectory of the page, from one `When`."""

    credit: Credit | None = None  # None outside training
    learner_logprobs: Floats32 | None = None  # [L] nats; None if the learner was not asked


class Selection:
    """Draws the trajectories of one run's page, by the seed."""

    def __init__(
        self, stored: StoredRun, questions: Mapping[str, Question], params: CreditParams, max_tokens: int, seed: int
    ) -> None:
        self._stored = stored
        self._questions = questions
        self._seed = seed
        self._credit = params
        self._max_tokens = max_tokens

    def groups(
        self, count: int, before: Path, after: Path, examples: Collection[str] = ()
    ) -> list[list[PageTrajectory]]:
        """At most `count` trajectories in groups of one question; test and training questions alternate.

        Half of them answer test questions before and after training, if `_tested` finds any. The rest are of training,
        with the `examples`, which are ids.
        """
        tested = self._tested(count // 4, before, after)
        return interleaved([tested, self.trained(count - sum(map(len, tested)), examples)])

    def _tested(self, count: int, before: Path, after: Path) -> list[list[PageTrajectory]]:
        """Pairs of answers before and after training; none, and a line in the log, without two that can be compared."""
        if not all((folder / EVALUATION_HASHES).exists() for folder in (before, after)):
            logger.info("the page shows no test questions: %s or %s is not there yet", before, after)
            return []
        first, second = (read_evaluation(str(folder), folder) for folder in (before, after))
        if second.hashes[POLICY] != sha256(self._stored.policy_folder):
            policy = self._stored.policy_folder
            logger.warning("the page shows no test questions: %s is of another policy than %s", after, policy)
            return []
        differences = differences_of_setting([first, second])
        if differences:
            message = "the page shows no test questions: %s and %s were not evaluated alike, they differ in %s"
            logger.warning(message, before, after, ", ".join(differences))
            return []
        answers = [self._entry(When.AFTER, row) for row in second.trajectories]
        samples = max(map(len, of_questions(answers).values()), default=1)
        untrained = [self._entry(When.BEFORE, row) for row in first.trajectories]
        return pairs(untrained, answers, count // samples, seed=self._seed)

    def trained(self, count: int, examples: Collection[str]) -> list[list[PageTrajectory]]:
        """Groups of one question, whose trajectories are taken from the kept iterations in turns."""
        kept = self._stored.kept
        places = [kept[place] for place in spread(len(kept), max(1, count // PER_ITERATION))]
        ends = [{row.question_id for row in self._stored.trajectories(place)} for place in {places[0], places[-1]}]
        recurring = set.intersection(*ends) if len(ends) > 1 else set()
        shares = Counter(int(name.partition("/")[0]) for name in examples)
        shares.update(dict(zip(places, quotas(len(places), count - len(examples), len(recurring)), strict=True)))
        episodes = [self._iteration(place, share, recurring, examples) for place, share in sorted(shares.items())]
        return list(of_questions(interleaved(episodes)).values())

    def _iteration(
        self, iteration: int, count: int, recurring: set[str], examples: Collection[str]
    ) -> list[PageTrajectory]:
        credits_ = {credit.trajectory_id: credit for credit in self._stored.credits(iteration)}
        proofs = {proof.trajectory_id: proof.learner_logprobs for proof in self._stored.proofs(iteration)}
        rows = self._stored.trajectories(iteration)
        shown = [row for row in rows if row.trajectory_id in examples]
        shown += from_iteration(rows, count, recurring=recurring, proved=proofs, seed=self._seed)
        by_id = {row.trajectory_id: row for row in shown}
        episodes = [
            self._entry(When.TRAINING, row, credits_.get(name), proofs.get(name))
            for name, row in islice(by_id.items(), count)
        ]
        return [*episodes, *self._demonstrations(iteration, {episode.question.question_id for episode in episodes})]

    def _demonstrations(self, iteration: int, questions: Collection[str]) -> Iterator[PageTrajectory]:
        for row in self._stored.demonstrations(iteration):
            if row.question_id in questions:
                yield self._entry(When.DEMONSTRATION, row)

    def _entry(
        self, when: When, trajectory: Trajectory, credit: Credit | None = None, learners: Floats32 | None = None
    ) -> PageTrajectory:
        question = self._questions.get(trajectory.question_id)
        if question is None:
            lacking = f"question {trajectory.question_id!r} of {self._stored.run} is not among the prepared ones"
            remedy = "set prepare: as it was when the run was trained and run `dvc repro prepare`"
            raise ValueError(f"{lacking}; {remedy}, or train the run again")
        params = (
            self._credit
            if when is When.TRAINING
            else self._credit.model_copy(update={"rewards": self._credit.rewards.built_in})
        )
        totals, parts = step_rewards(trajectory, params, self._max_tokens)
        if credit is not None and abs(credit.return_ - totals.sum()) > ROUNDING:
            stored = f"trajectory {trajectory.trajectory_id!r} has a return of {credit.return_:g}"
            now = f"{totals.sum():g} with the reward weights of {self._stored.run} in params.yaml"
            raise ValueError(f"{stored}, and {now}; set them as they were or train again")
        return PageTrajectory(when, question, trajectory, totals, parts, credit, learners)


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


def pairs(
    before: Sequence[PageTrajectory], after: Sequence[PageTrajectory], count: int, *, seed: int
) -> list[list[PageTrajectory]]:
    """All samples of two policies for `count` questions: more or less often right, never or as often, in turns."""
    kinds: dict[tuple[bool, bool, bool], list[list[PageTrajectory]]] = {
        (False, True, True): [],
        (True, False, True): [],
        (False, False, False): [],
        (False, False, True): [],
    }
    first = of_questions(before)
    second = of_questions(after)
    for question_id in sorted(first.keys() & second.keys(), key=lambda name: derive(seed, name)):
        samples = (first[question_id], second[question_id])
        old, new = (sum(bool(sample.trajectory.success) for sample in policy) for policy in samples)
        kinds[old > new, new > old, old + new > 0].append([*samples[0], *samples[1]])
    return interleaved(list(kinds.values()))[:count]


def of_questions(trajectories: Iterable[PageTrajectory]) -> dict[str, list[PageTrajectory]]:
    """The episodes of each question, in their order."""
    groups: dict[str, list[PageTrajectory]] = {}
    for trajectory in trajectories:
        groups.setdefault(trajectory.question.question_id, []).append(trajectory)
    return groups


def interleaved(rows: Sequence[Sequence[T]]) -> list[T]:
    """The first value of every row, then the second of every row, and so on."""
    return [value for turn in zip_longest(*rows, fillvalue=None) for value in turn if value is not None]
