"""The folder of a training run, and how the run goes on after a kill. Another run's folder is never deleted."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Self

from agent_r1.costs import Costs, costs_in
from agent_r1.files import (
    METRICS,
    move_aside,
    read_metrics,
    remove_folder,
    remove_unfinished,
    trained_alone,
    write_text,
)
from agent_r1.identity import Identity, read_start, write_start
from agent_r1.learn import checkpoint
from agent_r1.learn.checkpoint import Progress
from agent_r1.params.places import is_copy
from agent_r1.params.same_run import ITERATIONS
from agent_r1.params.train import TrainParams
from agent_r1.records import Metrics
from agent_r1.surroundings import machine

if TYPE_CHECKING:  # who only reads a folder depends on no learner
    from agent_r1.learn.learner import Learner

FAULT = "fault"  # the file that notes in which iteration a device or an engine failed, and under which settings

logger = logging.getLogger(__name__)


class AnotherRunError(ValueError):
    """A folder is another run's, or complete by other code; it can be started over."""

    def __init__(self, reason: str, remedy: str, folder: RunFolder) -> None:
        super().__init__(f"{reason}; {remedy}")
        spent = costs_in(folder._lines()).items()
        self.core_hours = sum(seconds for name, seconds in spent if name.endswith("_core_s")) / 3600
        self.loss = f"{reason}; this gives up {folder.finished} finished iterations, {self.core_hours:.2f} core-hours"


class Iterations:
    """The rows, the journal and the metrics of every iteration, finished or not, in the folder of a run."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.metrics = path / METRICS
        self.costs = Costs()

    def trajectories(self, iteration: int) -> Path:
        return self.path / "trajectories" / f"{iteration:03d}.parquet"

    def demonstrations(self, iteration: int) -> Path:
        """Demonstrations for groups without a right sample, which only the policy's loss and the viewer read."""
        return self.path / "demonstrations" / f"{iteration:03d}.parquet"

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

    def measured(self, iteration: int) -> Metrics:
        """The metrics of an iteration, whether it is finished or not; without costs, which have grown since."""
        line = self._lines()[iteration].items()
        return {name: value for name, value in line if name != "iteration" and not name.startswith("cost/")}

    def forget(self, iteration: int) -> None:
        """Removes the rows and metrics of an iteration and of those after it: they are made anew."""
        lines = self._lines()
        for number in range(iteration, len(lines)):
            self._remove_rows(number)
        if len(lines) > iteration:
            self._write_lines(lines[:iteration])

    def record(self, iteration: int, metrics: Mapping[str, float]) -> None:
        """Adds metrics to an iteration's line in metrics.jsonl, in place of earlier ones of their names."""
        lines = self._lines()
        [line] = lines[iteration : iteration + 1] or [{"iteration": iteration}]
        self._write_lines([*lines[:iteration], {**line, **metrics}, *lines[iteration + 1 :]])

    def _lines(self) -> list[Metrics]:
        return read_metrics(self.path) if self.metrics.exists() else []

    def _write_lines(self, lines: list[Metrics]) -> None:
        write_text(self.metrics, "".join(json.dumps(line) + "\n" for line in lines))

    def _remove_rows(self, iteration: int) -> None:
        for rows in (self.trajectories, self.demonstrations, self.proof, self.credit):
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
        progress = checkpoint.load(self.good, learner)
        self.progress = replace(self.progress, policy_from=progress.policy_from)
        self.save(learner, finished=progress.iterations, rollbacks=self.rollbacks + 1)
        self.forget(progress.iterations)

    def policy(self, learner: Learner, *, halved: bool = False) -> Path:
        """The folder of the learner's policy: the checkpoint's or, if it is older, `sampler`, which may be `halved`."""
        if self.saved and self.saved.policy_version == learner.policy_version:
            return self.checkpoint / checkpoint.POLICY
        weights = learner.policy_version, halved
        if self._in_sampler != weights:
            checkpoint.hand_over(self.sampler, learner, halved=halved)
            self._in_sampler = weights
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
        """The progress after so many finished iterations, with the code and the machines that trained them."""
        return replace(
            self.progress,
            iterations=finished,
            policy_version=learner.policy_version,
            code=self._spans(self.progress.code, self.code, finished),
            machines=self._spans(self.progress.machines, machine(), finished),
        )

    def _spans(self, earlier: Sequence[tuple[int, str]], latest: str, finished: int) -> list[tuple[int, str]]:
        """What trained the finished iterations, each with its first one."""
        spans = [span for span in earlier if span[0] < finished]
        first = min(self.finished, finished)
        if first < finished and (not spans or spans[-1][1] != latest):
            spans.append((first, latest))
        return spans


class RunFolder(Checkpoints):
    """The folder of one training run, for one process at a time.

    A run is told from others by the settings that define it, and by its inputs. Under changed code, and under other
    settings of the other kinds, an unfinished run goes on, with a warning. The folder of another run is refused, and so
    is that of a finished run of other code, until that is accepted.

    Iterations that were finished since the latest checkpoint have their trajectories and metrics here. A process that
    goes on from the checkpoint reads those and updates again, so that a kill costs updates and never bits.
    """

    def __init__(self, path: Path, identity: Identity, config: TrainParams) -> None:
        """`config` is the run's, whose identity this is."""
        super().__init__(path, identity.code_digest)
        self.identity = identity
        self.config = config
        self.mlflow_run_id = path / "mlflow_run_id"
        self.settled = False  # whether it was complete under other settings, which ask nothing more of it

    @contextmanager
    def opened(self, aside: Path, *, fresh: bool = False) -> Iterator[Self]:
        """Takes the folder up: empty, or where an earlier process left it.

        `fresh` starts over; the old folder goes to `aside`, under its name and the time. Raises AnotherRunError for a
        folder that cannot be gone on from, ValueError for a damaged one or a longer run that kept no learner, and
        BlockingIOError for one that a process is training in.
        """
        with trained_alone(self.path):
            remove_unfinished(self.path)
            is_empty = not self.path.is_dir() or not any(self.path.iterdir())
            if fresh and not is_empty:  # a damaged folder too
                target = move_aside(self.path, aside)
                if not is_copy():  # the project keeps its own
                    logger.warning("%s is started over; it was moved to %s", self.path, target)
            elif not is_empty:
                self.saved = checkpoint.progress(self.checkpoint)
                self.progress = self.saved or self.progress
                self._go_on(aside)
            if checkpoint.progress(self.best):
                checkpoint.require_whole(self.best)  # now, and not when days of training are over
            self.remove_sampler()  # of a process that was killed
            self.remove_covered_journals()
            if self.saved and self.is_complete:
                checkpoint.require_whole(self.checkpoint, checkpoint.POLICY)  # nothing loads it any more
            else:
                write_start(self.path, self.identity)
            self.costs.spent |= costs_in(self._lines())
            yield self

    def _go_on(self, aside: Path) -> None:
        """Refuses a folder, or takes it up as an earlier process left it, and notes which settings have changed."""
        reason = self.identity.refusal(self.path, complete=self.is_complete, accepted=self.progress.accepted)
        if reason:
            anew = f"start over with --fresh (in Python fresh=True), which moves the folder to {aside}"
            raise AnotherRunError(reason, f"go back to that, or {anew}", self)
        start = read_start(self.path) or self.identity
        changes = self.identity.changes_since(start)
        if changes and self.saved and not self.is_complete and not (self.checkpoint / checkpoint.LEARNER).exists():
            problem = f"{self.path} was complete, and kept no learner (train.keep.learner) to go on with"
            raise ValueError(f"{problem}; set train.iterations back, or start over with --fresh")
        self.identity.go_on(self.path, f"{self.finished} finished iterations", complete=self.is_complete)
        if self.is_complete or not changes:
            self.settled = bool(changes)
            return
        notes = [f"from iteration {self.finished} on {change}" for change in changes]
        self.progress = replace(self.progress, changes=[*self.progress.changes, *notes])
        if self.saved:
            iterations = start.parameters.get(ITERATIONS, self.config.iterations)
            if iterations != self.config.iterations and not self.progress.decays_over:
                self.progress = replace(self.progress, decays_over=iterations)
            self.saved = self.progress
            checkpoint.amend(self.checkpoint, self.progress)

    @property
    def is_complete(self) -> bool:
        """Whether no iteration is left to train."""
        return self.progress.is_complete(self.config)

    def was_completed(self) -> bool:
        """Whether an earlier process left nothing to train, as far as a folder says that is not open yet."""
        progress = checkpoint.progress(self.checkpoint)
        return progress is not None and progress.is_complete(self.config)

    @property
    def planned(self) -> int:
        """The iterations of the whole run; while the critic's warm-up lasts, at most."""
        return self.progress.planned(self.config)

    def history(self) -> list[Metrics]:
        """The metrics of the finished iterations."""
        return self._lines()[: self.finished]

    def policy_from(self, iteration: int, learner: Learner, explained: Callable[[], float]) -> int | None:
        """The first iteration that trains the policy, where its schedule begins; None while the critic's warm-up lasts.

        `explained` gives `value/explained_return`, and is asked while the warm-up lasts alone.
        """
        first = self.progress.policy_from
        warmup = self.config.update.critic.warmup
        if first is None and not learner.critic:
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
        (self.path / FAULT).unlink(missing_ok=True)
        best = checkpoint.progress(self.best)
        keeps = self.config.keep.learner
        if best:
            self.progress = self.saved = replace(self.progress, policy_version=best.policy_version)
        if best or (not keeps and (self.checkpoint / checkpoint.LEARNER).exists()):
            keeps = keeps and not best  # with another policy nobody goes on from it
            checkpoint.amend(self.checkpoint, self.progress, policy_of=self.best if best else None, learner=keeps)
        remove_folder(self.best)
        for iteration in range(self.finished - 1):
            if iteration % self.config.keep.every:
                self._remove_rows(iteration)


def failed_before(folder: RunFolder) -> bool:
    """Notes that a device or an engine failed; whether one did before, in this iteration under these settings."""
    now = f"{folder.finished} {folder.identity.fingerprint}"
    file = folder.path / FAULT
    again = file.exists() and file.read_text() == now
    write_text(file, now)
    return again
