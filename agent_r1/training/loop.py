"""The training loop: collect, assign credit, update, judge, log."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from functools import partial, wraps
from pathlib import Path
from typing import Self

from agent_r1.costs import Costs, Purpose
from agent_r1.credit.assign import assign, demonstration_credit
from agent_r1.credit.metrics import step_metrics, value_metrics
from agent_r1.credit.rewards import step_rewards
from agent_r1.devices.sharing import ALONE, Ranks
from agent_r1.envs.shared import Shared
from agent_r1.gpus import visible_gpus
from agent_r1.learn import checkpoint
from agent_r1.learn.learner import learner_of
from agent_r1.learn.memory import DEVICE_FAULTS, REMEDIES, measure
from agent_r1.params import Params
from agent_r1.records import Credit, Floats32, Metrics, Proof, Question, Trajectory, of_split, words_of
from agent_r1.rollout.sampling import EngineError, EngineUnavailable
from agent_r1.tables import read_rows, write_rows
from agent_r1.teaching.demonstrator import Demonstrator
from agent_r1.teaching.teacher import ServedTeacher
from agent_r1.training import watch
from agent_r1.training.collection import Collector, TrainedEngine, start_engine
from agent_r1.training.findings import findings, strays
from agent_r1.training.folder import RunFolder, failed_before
from agent_r1.training.questions import (
    VALIDATED,
    draw_unseen,
    is_best,
    is_due,
    is_exhausted,
    require_gold_titles,
    validation_scores,
)
from agent_r1.training.watch import announce, judge

LOST = 0.75  # of an iteration's groups: from this share on it is said that their returns are equal

logger = logging.getLogger(__name__)

Verb = Callable[..., Metrics]


def iterate(
    training: Training, record: watch.Record = watch.UNRECORDED, as_task: Callable[[Verb], Verb] = lambda verb: verb
) -> None:
    """The main loop, up to the run's last iteration; goes on where an earlier process was interrupted.

    A run that its collapse monitor stops, or whose validations get no better, is a finished run with fewer iterations.
    Metrics and alarms go to the run's folder and to the record; `as_task` wraps each verb, to show it elsewhere.
    """
    folder = training.folder
    rollout = as_task(timed(training.rollout, folder.costs, Purpose.WRITING))  # its sampling is charged already
    credit = as_task(timed(training.credit, folder.costs, Purpose.LEARNING))
    update = as_task(timed(training.update, folder.costs, Purpose.LEARNING))
    conclude = as_task(timed(training.conclude, folder.costs, Purpose.WRITING))
    validate = as_task(timed(training.validate, folder.costs, Purpose.WRITING))
    account = watch.Account(training.config, training.success, folder.history())
    while leaves_work(folder):
        iteration = folder.finished
        if awaits_validation(folder):
            keep_scores(training, record, iteration - 1, validate(iteration - 1))
        if is_exhausted(folder.history(), training.config.validation.patience):
            folder.stop(training.learner)
        if folder.is_complete:
            return
        metrics = rollout(iteration) | credit(iteration) | update(iteration)
        verdict = judge([*folder.history(), metrics], training.config, folder.rollbacks)
        metrics |= verdict.metrics
        folder.record(iteration, metrics)
        record.log(metrics, step=iteration)
        logger.info("%s", account.line([*folder.history(), metrics], folder.planned))
        announce(verdict, record, iteration)
        concluded = conclude(iteration, verdict)
        if folder.finished > iteration:  # unless the run went back
            folder.record(iteration, concluded)
            record.log(concluded, step=iteration)


def keep_scores(training: Training, record: watch.Record, iteration: int, scores: Metrics) -> None:
    """Gives the scores of a validation to the record and to the run's folder, which is then not asked for another."""
    record.log(scores, step=iteration)  # before the folder has them: a kill between the two validates again
    training.folder.record(iteration, scores)
    logger.info("iteration %d: %s %.3f on dev questions", iteration, training.success, scores[VALIDATED])


def leaves_work(folder: RunFolder) -> bool:
    """Whether a run has an iteration to train or a policy to validate."""
    return not folder.is_complete or awaits_validation(folder)


def awaits_validation(folder: RunFolder) -> bool:
    """Whether the latest policy is to be validated and was not yet."""
    return not folder.settled and is_due(folder.history(), folder.config, complete=folder.is_complete)


class Training:
    """The verbs of an iteration. They meet in the run's folder: each reads the files of the one before."""

    def __init__(
        self,
        settings: Params,
        *,
        questions: Sequence[Question],
        shared: Shared,
        model: str | Path,
        folder: RunFolder,
        left_out: Collection[str] = (),
        ranks: Ranks = ALONE,
    ) -> None:
        """Loads the model that the run starts from, a Hugging Face folder or hub id, as an earlier process left it.

        The folder is open. Iterations draw from the questions of the train split, but for those whose ids are
        `left_out`, validations from the dev split. The `ranks` share the learner. Raises ValueError for questions that
        are missing or lack a weighted reward's facts, and for a model that cannot be loaded or needs more memory than
        there is.
        """
        self.env = settings.env
        self.folder = folder
        self.config = folder.config
        config = self.config
        require_gold_titles(questions, config.credit)
        self.unseen = draw_unseen(questions, config) if config.validation.every else []
        self.success = words_of(questions).right
        self._questions = questions
        demonstrator = None
        if config.rollout.demonstrate:
            learned = of_split(questions, "train")
            demonstrator = Demonstrator(settings, learned, shared.index)
            demonstrator.require(learned)
        for remark in config.credit.remarks:
            logger.info("%s", remark)
        if ranks.size > 1:
            folder.costs.of_ranks()
        folder.costs.devices = len(visible_gpus()) * settings.learner.nodes or 1
        self.learner = learner_of(settings, config, model, seed=self.seed, ranks=ranks)
        served = config.reference_at
        limits = settings.engine.server
        self.teacher = ServedTeacher(served, limits, self.learner.tokenizer) if served else None
        if folder.resumed:
            checkpoint.load(folder.checkpoint, self.learner)
        elif self.config.monitor.goes_back:
            folder.save(self.learner, finished=0)
        sampler = TrainedEngine(
            partial(start_engine, settings, config, model),
            config,
            questions=questions,
            shared=shared,
            learner=self.learner,
            folder=folder,
            left_out=left_out,
            demonstrator=demonstrator,
        )
        self.collector = Collector(sampler)
        folder.costs.engine |= {*self.collector.sampler.engine.pids}
        folder.costs.charge(Purpose.OTHER)

    def rollout(self, iteration: int) -> Metrics:
        """Collects trajectories with the current policy, and proves that the sampler ran it.

        Trajectories of an earlier process are read, under the same proof. With `rollout.ahead` the same policy begins
        to collect the next iteration, while this one is credited and updated.
        """
        metrics = self.collector.found(iteration, seed=self.seed, ahead=self.config.rollout.ahead)
        if not metrics:
            metrics = self.collector.collect(iteration, seed=self.seed, credit=self.config.credit)
        if self.config.rollout.ahead and iteration + 1 < self.folder.planned:
            self.collector.begin(iteration + 1, seed=self.seed, credit=self.config.credit)
        return metrics

    def credit(self, iteration: int) -> Metrics:
        """Turns the rewards of the trajectories into returns, advantages and value targets."""
        trajectories = read_rows(self.folder.trajectories(iteration), Trajectory)
        values = self.learner.values(trajectories) if self.learner.critic else None
        reference = self._reference(trajectories) if self.config.needs_reference else None
        credits_, metrics = assign(
            trajectories,
            values,
            self.config.credit,
            reference=reference,
            questions=self.config.rollout.questions,
            max_tokens=self.env.max_tokens,
        )
        write_rows(self.folder.credit(iteration), credits_, Credit)
        returns = {credit.trajectory_id: credit.return_ for credit in credits_}
        chat = self.collector.sampler.chat
        reasons = findings(trajectories, returns, self._questions, chat, LOST, tools=self.env.agent is None)
        for reason in (*reasons, *strays(self.folder.history(), self.success)):
            logger.warning("iteration %d: %s", iteration, reason)
        return metrics

    def _reference(self, trajectories: Sequence[Trajectory]) -> list[Floats32]:
        """The reference's logprobs [L] of sampled tokens in nats, 0 elsewhere."""
        if self.teacher:
            return self.teacher.logprobs(trajectories, [trajectory.action_mask for trajectory in trajectories])
        return self.learner.reference_logprobs(trajectories)

    def update(self, iteration: int) -> Metrics:
        """Improves the policy and the critic, or the critic alone while its warm-up lasts."""
        trajectories = read_rows(self.folder.trajectories(iteration), Trajectory)
        credits_ = read_rows(self.folder.credit(iteration), Credit)

        def explained() -> float:
            totals = [
                step_rewards(trajectory, self.config.credit, self.env.max_tokens)[0] for trajectory in trajectories
            ]
            return value_metrics(trajectories, credits_, totals).get("value/explained_return", 0.0)

        first = self.folder.policy_from(iteration, self.learner, explained)
        self.learner.params = self.config.update
        share = partial(self.config.rate, iteration, decays_over=self.folder.progress.decays_over)
        version = self.learner.policy_version
        weight = self.config.rollout.demonstrate
        demonstrations = read_rows(self.folder.demonstrations(iteration), Trajectory) if weight else []
        metrics = self.learner.update(
            [*trajectories, *demonstrations],
            [*credits_, *(demonstration_credit(row, weight) for row in demonstrations)],
            iteration,
            rate=0.0 if first is None else share(first, begun=first),
            critic_rate=share(iteration if first is None else first, begun=0),
        )
        return metrics | (self._step(trajectories, iteration) if self.learner.policy_version > version else {})

    def _step(self, trajectories: Sequence[Trajectory], iteration: int) -> Metrics:
        """How far the update moved the policy, on the trajectories that proved the weights before.

        Nothing of an iteration that was collected ahead, which none proved.
        """
        path = self.folder.proof(iteration)
        if not path.exists():
            return {}
        proofs = {proof.trajectory_id: proof.learner_logprobs for proof in read_rows(path, Proof)}
        rows = [row for row in trajectories if row.trajectory_id in proofs]
        return step_metrics(rows, [proofs[row.trajectory_id] for row in rows], self.learner.logprobs(rows))

    def conclude(self, iteration: int, verdict: watch.Verdict) -> Metrics:
        """Makes the iteration a finished one, with a checkpoint where one is due, or goes back to the last good one.

        First it waits for the iteration that is collected ahead: a later process would not have its weights.
        """
        if verdict.decision is not watch.RunDecision.GO_ON:
            self.collector.abandon()
        waited = self.collector.receive()
        if verdict.decision is watch.RunDecision.ROLL_BACK:
            self.folder.go_back(self.learner)
            self.learner.seed = self.seed
            return {}
        if self.config.monitor.goes_back and verdict.clean:
            self.folder.set_aside()
        finished = iteration + 1
        stopped = verdict.decision is watch.RunDecision.STOP
        if stopped or finished == self.folder.planned or finished % self.config.checkpoint.every == 0:
            self.folder.save(self.learner, finished=finished, stopped=stopped)
        else:
            self.folder.finish(self.learner, finished=finished)
        self.folder.costs.charge(Purpose.WRITING)
        return waited | self.folder.costs.spent

    def validate(self, iteration: int) -> Metrics:
        """Has the policy that the iteration made answer dev questions greedily, and keeps it where it is the best."""
        scores = validation_scores(self.collector.sampler.validate(self.unseen, iteration, seed=self.seed))
        if self.config.validation.keep_best and is_best(self.folder.history(), scores[VALIDATED]):
            self.folder.set_best_aside(self.learner)
        return scores

    @property
    def seed(self) -> int:
        """The seed of every draw, another one after each rollback."""
        return watch.reseeded(self.config.seed, self.folder.rollbacks)

    def __enter__(self) -> Self:
        """On a GPU, measures whether the largest update fits beside the sampler."""
        if self.learner.compute.device.type == "cuda":
            try:
                measure(self.learner, self.env)
            except BaseException:
                self.collector.close()
                raise
        return self

    def __exit__(self, kind: object, fault: BaseException | None, trace: object) -> None:
        """Raises OSError in place of a fault of a device or an engine, and ValueError for the next in an iteration."""
        self.collector.close()
        self.folder.costs.charge(Purpose.OTHER)
        with suppress(OSError):  # a full disk has ended the training with a fault of its own
            self.folder.record(max(0, self.folder.finished - 1), self.folder.costs.spent)
        if isinstance(fault, (*DEVICE_FAULTS, EngineError)) and not isinstance(fault, EngineUnavailable):
            again = failed_before(self.folder)
            problem = f"iteration {self.folder.finished} failed{' again' * again}: {fault}"
            remedy = f"; {REMEDIES}" * isinstance(fault, DEVICE_FAULTS)  # an engine says its own
            raise (ValueError if again else OSError)(problem + remedy) from fault


def timed(verb: Verb, costs: Costs, purpose: Purpose) -> Verb:
    """Adds the seconds that a verb takes to its metrics, and charges the purpose with all that is left."""

    @wraps(verb)
    def timed_verb(*arguments: object) -> Metrics:
        started = time.perf_counter()
        metrics = verb(*arguments)
        costs.charge(purpose)
        return {**metrics, f"time/{verb.__name__}_s": time.perf_counter() - started}

    return timed_verb
