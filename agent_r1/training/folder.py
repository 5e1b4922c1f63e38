"""The folder of a training run, and how the run goes on after a kill. Another run's folder is never deleted."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Self

from agent_r1.costs import Costs, costs_in
from agent_r1.files import METRICS, read_metrics, remove_folder, remove_unfinished, trained_alone, write_text
from agent_r1.learn import checkpoint
from agent_r1.learn.checkpoint import Progress
from agent_r1.params.train import TrainParams
from agent_r1.training.identity import Identity, write_start

if TYPE_CHECKING:  # who only reads a folder depends on no learner
    from agent_r1.learn.learner import Learner

logger = logging.getLogger(__name__)


class Iterations:
    """The rows, the journal and the metrics of every iteration, finished or not, in the folder of a run."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.metrics = path / METRICS
        self.costs = Costs()

    def trajectories(self, iteration: int) -> Path:
        return self.path / "trajectories" / f"{iteration:03d}.parquet"

    def proof(self, iteration: int) -> Path:
        return self.path / "proof" / f"{iteration:03d}.parquet"

    def credit(self, iteration: int) -> Path:
        return self.path / "credit" / f"{iteration:03d}.parquet"

    def journal(self, iteration: int) -> Path:
        """The world's answers in the validation before an iteration and in its collection."""
        return self.path / "journal" / f"{iteration:03d}.jsonl"

    def is_collected(self, iteration: int) -> bool:
        """Whether all trajectories of an iteration are there, with the metrics of their collection."""
        return self.trajectories(iteration).exists() and len(self._lines()) > iteration

    def measured(self, iteration: int) -> dict[str, float]:
        """The metrics of an iteration, whether it is finished or not; without costs, which have grown since."""
        line = self._lines()[iteration].items()
        return {name: value for name, value in line if name != "iteration" and not name.startswith("cost/")}

    def forget(self, iteration: int) -> None:
        """Removes the rows and metrics of an iteration and of those after it: they are made anew."""
        lines = self._lines()
        for each in range(iteration, len(lines)):
            self._remove_rows(each)
        if len(lines) > iteration:
            self._write_lines(lines[:iteration])

    def record(self, iteration: int, metrics: Mapping[str, float]) -> None:
        """Adds metrics to an iteration's line in metrics.jsonl, in place of earlier ones of their names."""
        lines = self._lines()
        known = lines[iteration : iteration + 1] or [{"iteration": iteration}]
        self._write_lines([*lines[:iteration], {**known[0], **metrics}, *lines[iteration + 1 :]])

    def _lines(self) -> list[dict[str, float]]:
        return read_metrics(self.path) if self.metrics.exists() else []

    def _write_lines(self, lines: list[dict[str, float]]) -> None:
        write_text(self.metrics, "".join(json.dumps(line) + "\n" for line in lines))

    def _remove_rows(self, iteration: int) -> None:
        for rows in (self.trajectories, self.proof, self.credit):
            rows(iteration).unlink(missing_ok=True)


class Checkpoints(Iterations):
    """How far a run is, and the checkpoints that it goes on from.

    Beside the latest checkpoint there may be three more folders. `good` is the checkpoint that an iteration without any
    sign of collapse began with, to go back to. `best` is the best validated policy, which becomes the run's in the end.
    `sampler` is the policy that was handed to the sampler since the checkpoint.
    """

    def __init__(self, path: Path, code: str) -> None:
        """`code` is the short hash of the code that trains the run in this process."""
        super().__init__(path)
        self.code = code
        self.checkpoint, self.good, self.best, self.sampler = (
            path / name for name in ("checkpoint", "good", "best", "sampler")
        )
        self.progress = Progress(iterations=0, policy_version=0)  # the run's in this process
        self.saved: Progress | None = None  # that of the checkpoint
        self._in_sampler: tuple[int, bool] | None = None  # the policy's version there, in bfloat16 or not

    @property
    def resumed(self) -> bool:
        """Whether there is a checkpoint to go on from."""
        return self.saved is not None

    @property
    def finished(self) -> int:
        """Finished iterations, which is the index of the next."""
        return self.progress.iterations

    @property
    def rollbacks(self) -> int:
        """How often the run went back to an earlier checkpoint."""
        return self.progress.rollbacks

    def finish(self, learner: Learner, *, finished: int) -> None:
        """Makes the iterations finished ones without a checkpoint: after a kill their updates are made again."""
        self.progress = self._after(finished, learner)

    def save(self, learner: Learner, *, finished: int, stopped: bool = False, rollbacks: int | None = None) -> None:
        """Writes the checkpoint, which makes the iterations finished ones; `stopped` makes them the last."""
        self.remove_sampler()  # the disk need not hold three policies
        if stopped:
            self.forget(finished)  # an iteration that was collected ahead
        record = replace(self._after(finished, learner), stopped=stopped)
        if rollbacks is not None:
            record = replace(record, rollbacks=rollbacks)
        checkpoint.save(self.checkpoint, learner, record)
        self.progress = self.saved = record
        self.remove_covered_journals()

    def remove_covered_journals(self) -> None:
        """Removes the journals of the iterations that the checkpoint covers: nothing there is asked again."""
        for covered in range(self.saved.iterations if self.saved else 0):
            for path in self.journal(covered).parent.glob(f"{covered:03d}.*"):
                path.unlink()

    def stop(self, learner: Learner) -> None:
        """Makes the finished iterations the last ones."""
        if self.progress.stopped:
            return
        if self.saved != self.progress:
            self.save(learner, finished=self.finished, stopped=True)
            return
        self.forget(self.finished)
        self.progress = self.saved = replace(self.progress, stopped=True)
        checkpoint.amend(self.checkpoint, self.progress)

    def go_back(self, learner: Learner) -> None:
        """Brings the good checkpoint back, as the latest one and into the learner.

        Forgets the iterations after it. A process that is killed in here comes to the same decision again, or finds the
        good checkpoint in its place.
        """
        found = checkpoint.load(self.good, learner)
        self.progress = replace(self.progress, policy_from=found.policy_from)
        self.save(learner, finished=found.iterations, rollbacks=self.rollbacks + 1)
        self.forget(found.iterations)

    def policy(self, learner: Learner, *, halved: bool = False) -> Path:
        """The folder of the learner's policy: the checkpoint's or, if it is older, `sampler`, which may be `halved`."""
        if self.saved and self.saved.policy_version == learner.policy_version:
            return self.checkpoint / checkpoint.POLICY
        wanted = learner.policy_version, halved
        if self._in_sampler != wanted:
            checkpoint.hand_over(self.sampler, learner, halved=halved)
            self._in_sampler = wanted
        return self.sampler

    def set_aside(self) -> None:
        """Makes the latest checkpoint the good one as well."""
        checkpoint.set_aside(self.checkpoint, self.good)

    def set_best_aside(self, learner: Learner) -> None:
        """Makes the latest policy the best one as well."""
        checkpoint.set_aside_policy(self.policy(learner), self.progress, self.best)

    def remove_sampler(self) -> None:
        """Removes the policy that was handed to the sampler."""
        self._in_sampler = None
        remove_folder(self.sampler)

    def _after(self, finished: int, learner: Learner) -> Progress:
        """The progress after so many finished iterations, with the code that trained them."""
        spans = [(first, digest) for first, digest in self.progress.code if first < finished]
        first, known = min(self.finished, finished), spans[-1][1] if spans else None
        if first < finished and known != self.code:
            spans.append((first, self.code))
        version = learner.policy_version
        return replace(self.progress, iterations=finished, policy_version=version, code=spans)


class RunFolder(Checkpoints):
    """The folder of one training run, for one process at a time.

    A run is told from others by its parameters and its inputs. Under changed code an unfinished run goes on, with a
    warning; a finished one is moved aside and trained anew. The folder of another run is refused, or moved aside.

    Iterations that were finished since the latest checkpoint have their trajectories and metrics here. A process that
    goes on from the checkpoint reads those and updates again, so that a kill costs updates and never bits.
    """

    def __init__(self, path: Path, identity: Identity, config: TrainParams) -> None:
        """`config` is the run's, whose identity this is."""
        super().__init__(path, identity.code_digest)
        self.identity, self.config = identity, config
        self.mlflow_run_id = path / "mlflow_run_id"

    @contextmanager
    def opened(self, aside: Path, *, fresh: bool = False, replace: bool = False) -> Iterator[Self]:
        """Takes the folder up: empty, or where an earlier process left it.

        `fresh` starts over in any case, `replace` if the folder is another run's; the old folder goes to `aside`, under
        its name and the time. Raises ValueError for another run's folder, and BlockingIOError for one that a process is
        training in.
        """
        with trained_alone(self.path):
            remove_unfinished(self.path)
            if not fresh:  # a damaged folder can be started over
                self.saved = checkpoint.progress(self.checkpoint)
                self.progress = self.saved or self.progress
            if self.path.is_dir() and any(self.path.iterdir()):
                complete = self.is_complete
                if not self.identity.take_up(self.path, aside, fresh=fresh, replace=replace, complete=complete):
                    self.progress, self.saved = Progress(iterations=0, policy_version=0), None
            if checkpoint.progress(self.best):
                checkpoint.require_whole(self.best)  # now, and not when days of training are over
            if self.saved and self.is_complete:
                checkpoint.require_whole(self.checkpoint, checkpoint.POLICY)  # nothing loads it any more
            if self.path.exists():
                logger.info("%s: going on after %d finished iterations", self.path, self.finished)
            self.remove_sampler()  # of a process that was killed
            self.remove_covered_journals()
            write_start(self.path, self.identity)
            self.costs.spent |= costs_in(self._lines())
            yield self

    @property
    def is_complete(self) -> bool:
        """Whether no iteration is left to train."""
        return self.progress.stopped or self.finished >= self.planned

    @property
    def planned(self) -> int:
        """The iterations of the whole run; while the critic's warm-up lasts, at most."""
        return self.progress.planned(self.config)

    def history(self) -> list[dict[str, float]]:
        """The metrics of the finished iterations."""
        return self._lines()[: self.finished]

    def policy_from(self, iteration: int, learner: Learner, explained: Callable[[], float]) -> int | None:
        """The first iteration that trains the policy, where its schedule begins; None while the critic's warm-up lasts.

        `explained` gives `value/explained_return`, and is asked while the warm-up lasts alone. A policy that an older
        version has trained keeps that version's schedule, which began with iteration 0.
        """
        first, warmup = self.progress.policy_from, self.config.update.critic.warmup
        if first is None and (not learner.critic or learner.policy_version):
            first = 0
        elif first is None and warmup.is_over(iteration, explained()):
            first = iteration
        self.progress = replace(self.progress, policy_from=first)
        return first

    def tidy(self) -> None:
        """Removes the files that a complete run no longer needs, and puts the best policy into the checkpoint.

        Raises ValueError if the best policy is not as it was written.
        """
        remove_folder(self.good)
        remove_folder(self.journal(0).parent)
        best, keeps = checkpoint.progress(self.best), self.config.keep.learner
        if best:
            self.progress = self.saved = replace(self.progress, policy_version=best.policy_version)
        if best or (not keeps and (self.checkpoint / checkpoint.LEARNER).exists()):
            checkpoint.amend(self.checkpoint, self.progress, policy_of=self.best if best else None, learner=keeps)
        remove_folder(self.best)
        for iteration in range(self.finished - 1):
            if iteration % self.config.keep.every:
                self._remove_rows(iteration)

    def describe_code(self) -> str:
        """Which code trained which iterations: `0-11 3fa91c2b, 12-19 77b0e4aa`."""
        spans = self.progress.code
        ends = [first for first, _ in spans[1:]] + [self.finished]
        return ", ".join(f"{first}-{end - 1} {digest}" for (first, digest), end in zip(spans, ends, strict=True))
