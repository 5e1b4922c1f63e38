"""The training loop: collect, assign credit, update, judge, log."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from functools import wraps
from itertools import islice
from pathlib import Path
from typing import Self

import numpy as np
from numpy.typing import NDArray

from agent_r1.credit.assign import assign, groups_to_refill, value_metrics
from agent_r1.envs.base import Attempt
from agent_r1.envs.kinds import attempts_at
from agent_r1.envs.shared import Shared
from agent_r1.params import Params
from agent_r1.params.credit import CreditParams
from agent_r1.params.train import TrainParams
from agent_r1.policy import checkpoint
from agent_r1.policy.learner import Learner, reference_of
from agent_r1.policy.peak import measure
from agent_r1.records import Credit, Proof, Question, Trajectory, words_of
from agent_r1.rollout.chat import Chat
from agent_r1.rollout.engines import open_engine
from agent_r1.rollout.episodes import collect, prove_order
from agent_r1.rollout.sampling import Actor
from agent_r1.seeds import derive
from agent_r1.tables import read_rows, write_rows
from agent_r1.training import own_rewards
from agent_r1.training.folder import RunFolder
from agent_r1.training.validation import VALIDATED, is_best, is_due, is_exhausted, validation_scores
from agent_r1.training.watch import (
    Decision,
    Record,
    StaleWeightsError,
    Unrecorded,
    Verdict,
    account,
    announce,
    as_it_trains,
    judge,
    prove,
    require_own,
    reseeded,
)

logger = logging.getLogger(__name__)

Metrics = dict[str, float]
Verb = Callable[..., Metrics]


def iterate(
    training: Training, record: Record | None = None, as_task: Callable[[Verb], Verb] = lambda verb: verb
) -> None:
    """The main loop, up to the run's last iteration; goes on where an earlier process was interrupted.

    A run that its collapse monitor stops, or whose validations get no better, is a finished run with fewer iterations.
    Metrics and alarms go to the run's folder and to the record; `as_task` wraps each verb, to show it elsewhere.
    """
    config, folder, record = training.config, training.folder, record or Unrecorded()
    verbs = (training.rollout, training.credit, training.update, training.conclude, training.validate)
    rollout, credit, update, conclude, validate = (as_task(timed(verb)) for verb in verbs)
    while leaves_work(folder, config):
        iteration = folder.finished
        if awaits_validation(folder, config):
            validated = validate(iteration - 1)
            record.log(validated, step=iteration - 1)  # first: what the folder has is not measured again
            folder.record(iteration - 1, validated)
            logger.info("iteration %d: %s %.3f on dev questions", iteration - 1, training.success, validated[VALIDATED])
        if is_exhausted(folder.history(), config.validation.patience):
            folder.stop(training.learner)
        if folder.is_complete(config.iterations):
            return
        metrics = rollout(iteration) | credit(iteration) | update(iteration)
        verdict = judge([*folder.history(), metrics], config, folder.rollbacks)
        metrics |= verdict.metrics
        folder.record(iteration, metrics)
        record.log(metrics, step=iteration)
        logger.info("%s", account([*folder.history(), metrics], config.iterations, training.success))
        announce(verdict, record, iteration)
        concluded = conclude(iteration, verdict)
        if folder.finished > iteration:  # unless the run went back
            folder.record(iteration, concluded)
            record.log(concluded, step=iteration)


def leaves_work(folder: RunFolder, config: TrainParams) -> bool:
    """Whether a run has an iteration to train or a policy to validate."""
    return not folder.is_complete(config.iterations) or awaits_validation(folder, config)


def awaits_validation(folder: RunFolder, config: TrainParams) -> bool:
    """Whether the latest policy is to be validated and was not yet."""
    return is_due(folder.history(), config, complete=folder.is_complete(config.iterations))


class Training:
    """The verbs of an iteration. They meet in the run's folder: each reads what the one before has written."""

    def __init__(
        self,
        settings: Params,
        config: TrainParams,
        *,
        questions: Sequence[Question],
        shared: Shared,
        model: str | Path,
        folder: RunFolder,
    ) -> None:
        """Loads the model that the run starts from, a Hugging Face folder or hub id, as an earlier process left it.

        `config` is that of the run, `settings.run(...)`; `folder` is opened for it; iterations draw from the questions
        of the train split, validations from those of the dev split. A ValueError says that questions are missing or
        lack what a weighted reward is made of, or that the model cannot be loaded or needs more memory than there is.
        """
        require_gold_titles(questions, config.credit)
        self.own_rewards = own_rewards.load(config.credit.rewards)
        self.env, self.config, self.folder, self.shared = settings.env, config, folder, shared
        self.questions = [question for question in questions if question.split == "train"]
        self.unseen = draw_unseen(questions, config) if config.validation.every else []
        self.success = words_of(questions).right
        for remark in config.credit.remarks:
            logger.info("%s", remark)
        with_critic = config.credit.needs_critic
        merges = settings.engine.kind == "server"  # the others sample with the adapters themselves
        self.learner = Learner(
            model, config.update, settings.model, with_critic=with_critic, seed=self.seed, merges=merges
        )
        self.reference = reference_of(self.learner, model) if config.needs_reference else None
        if folder.resumed:
            checkpoint.load(folder.checkpoint, self.learner)
        elif self._may_roll_back:
            folder.save(self.learner, finished=0)
        self.chat = Chat(self.learner.tokenizer)
        actor = Actor(
            model=str(model),  # `rollout` loads what was learned since: adapters run beside what they were trained on
            end_id=self.chat.end_id,
            max_tokens=self.env.max_tokens,
            temperature=config.rollout.temperature,
            dtype=settings.model.dtype,
            adapter_rank=settings.model.lora.rank,
        )
        self.engine = open_engine(settings.engine, actor)

    def rollout(self, iteration: int) -> Metrics:
        """Collects trajectories with the current policy, and proves that the sampler ran it.

        Those that an earlier process collected are read, under the same proof.
        """
        if collected := self._collected(iteration):
            return collected
        started, waited = time.perf_counter(), self.shared.waited_s
        self.folder.forget(iteration)
        self.shared.verify()
        self._hand_over_weights()
        questions = draw(self.questions, self.config.rollout.questions, iteration=iteration, seed=self.seed)
        order = self._prove_order(questions) if iteration == 0 else {}
        with self.shared.journaled(self.folder.journal(iteration)):
            trajectories = self._collect(questions, iteration)
            gap = self._prove(self._proved(trajectories), iteration)
            refilled = self._refill(trajectories, iteration)
        hit_share = self.shared.index.take_hit_share()
        metrics = {"rollout/canary_gap": gap, "rollout/search_cache_hit_share": hit_share, **refilled, **order}
        waiting = (self.shared.waited_s - waited) / (time.perf_counter() - started)
        of_tools = self.shared.use_of_tools(trajectories) | self.shared.latencies(trajectories)
        metrics |= of_tools | {"tool/waiting_share": waiting}
        self.folder.record(iteration, metrics)  # before the rows, which say that it is collected
        write_rows(self.folder.trajectories(iteration), trajectories, Trajectory)
        return metrics

    def credit(self, iteration: int) -> Metrics:
        """Turns the rewards of the trajectories into returns, advantages and value targets."""
        trajectories = read_rows(self.folder.trajectories(iteration), Trajectory)
        values = self.learner.values(trajectories) if self.learner.critic else None
        reference, questions = self._reference_logprobs(trajectories), self.config.rollout.questions
        credits_, metrics = assign(
            trajectories,
            values,
            self.current.credit,
            reference=reference,
            questions=questions,
            max_tokens=self.env.max_tokens,
        )
        write_rows(self.folder.credit(iteration), credits_, Credit)
        return metrics

    def update(self, iteration: int) -> Metrics:
        """Improves the policy and the critic."""
        trajectories = read_rows(self.folder.trajectories(iteration), Trajectory)
        credits_ = read_rows(self.folder.credit(iteration), Credit)
        rate, self.learner.params = self.config.rate(iteration), self.current.update
        explained = value_metrics(credits_).get("value/explained_variance", 0.0)
        return self.learner.update(trajectories, credits_, iteration, rate=rate, explained_variance=explained)

    def conclude(self, iteration: int, verdict: Verdict) -> Metrics:
        """Makes the iteration a finished one, with a checkpoint where one is due, or goes back to the last good one."""
        if verdict.decision is Decision.ROLL_BACK:
            self.folder.go_back(self.learner)
            self.learner.seed = self.seed
            return {}
        if self._may_roll_back and verdict.clean:
            self.folder.set_aside()
        finished, stopped = iteration + 1, verdict.decision is Decision.STOP
        if stopped or finished == self.config.iterations or finished % self.config.checkpoint.every == 0:
            self.folder.save(self.learner, finished=finished, stopped=stopped)
        else:
            self.folder.finish(self.learner, finished=finished)
        return {}

    def validate(self, iteration: int) -> Metrics:
        """Has the policy that the iteration made answer dev questions greedily, and keeps it where it is the best."""
        self._hand_over_weights()
        trajectories = self._play(attempts_at(self.unseen, self.shared), iteration, greedy=True)
        self.shared.index.take_hit_share()  # that of the next rollouts is theirs alone
        scores = validation_scores(trajectories)
        if self.config.validation.keep_best and is_best(self.folder.history(), scores[VALIDATED]):
            self.folder.set_best_aside(self.learner)
        return scores

    @property
    def current(self) -> TrainParams:
        """The run's configuration as it trains now."""
        return as_it_trains(self.config, self.folder.history(), self.folder.rollbacks)

    @property
    def seed(self) -> int:
        """Of every draw: another one after each rollback."""
        return reseeded(self.config.seed, self.folder.rollbacks)

    @property
    def _may_roll_back(self) -> bool:
        return self.current.monitor.goes_back

    def _collected(self, iteration: int) -> Metrics:
        """What was measured of an iteration that an earlier process collected; nothing where it is to be collected.

        That is also where its file is damaged, or another seed or other weights than the learner's sampled it.
        """
        if not self.folder.is_collected(iteration):
            return {}
        try:
            trajectories = read_rows(self.folder.trajectories(iteration), Trajectory)
            require_own(trajectories, iteration, seed=self.seed, policy_version=self.learner.policy_version)
            gap = self._prove(self._proved(trajectories), iteration)
        except (ValueError, StaleWeightsError) as fault:
            logger.warning("iteration %d and those after it are collected again: %s", iteration, fault)
            return {}
        logger.info("iteration %d was collected before: %d trajectories are read", iteration, len(trajectories))
        return self.folder.measured(iteration) | {"rollout/canary_gap": gap}

    def _hand_over_weights(self) -> None:
        """Has the sampler run the learner's weights."""
        if self.engine.version != self.learner.policy_version:
            self.engine.load_weights(self.folder.policy(self.learner), self.learner.policy_version)

    def _collect(self, questions: list[Question], iteration: int, first_group: int = 0) -> list[Trajectory]:
        samples = self.config.rollout.samples
        attempts = attempts_at(questions, self.shared, samples=samples, first_group=first_group)
        trajectories = self._play(attempts, iteration)
        return own_rewards.state(
            self.own_rewards,
            trajectories,
            {question.question_id: question for question in questions},
            self.chat.decode,
            aborted_share=self.env.aborted_share,
        )

    def _play(self, attempts: Sequence[Attempt], iteration: int, *, greedy: bool = False) -> list[Trajectory]:
        """The trajectories of the current policy."""
        return collect(
            self.engine,
            self.chat,
            attempts,
            self.shared,
            seed=self.seed,
            iteration=iteration,
            policy_version=self.learner.policy_version,
            greedy=greedy,
        )

    def _refill(self, trajectories: list[Trajectory], iteration: int) -> Metrics:
        """Adds the trajectories of further questions in place of those whose returns are all equal."""
        credit, added = self.current.credit, 0
        rounds = credit.filter.refill
        for refill in range(rounds):
            wanted = self.config.rollout.questions
            missing = groups_to_refill(trajectories, wanted, credit, self.env.max_tokens)
            asked = {trajectory.question_id for trajectory in trajectories}
            further = draw_further(
                self.questions, missing, besides=asked, iteration=iteration, refill=refill, seed=self.seed
            )
            if further:
                trajectories += self._collect(further, iteration, first_group=len(asked))
                added += len(further)
        return {"filter/refilled_groups": added} if rounds else {}

    def _reference_logprobs(self, trajectories: list[Trajectory]) -> list[NDArray[np.float32]] | None:
        """What the warm-started model thinks of the tokens that were sampled; None without a KL."""
        if self.reference is None or not self.current.needs_reference:
            return None
        return self.reference.logprobs(trajectories, [each.action_mask for each in trajectories])

    def _prove_order(self, questions: list[Question]) -> Metrics:
        """Whether an action depends on who is sampled at the same time, on the prompts of some questions."""
        return prove_order(self.engine, self.chat, attempts_at(questions, self.shared), self.shared)

    def _proved(self, trajectories: Sequence[Trajectory]) -> Sequence[Trajectory]:
        """Some that every sampler has a part in."""
        return trajectories[: max(self.config.update.proved_trajectories, self.engine.homes)]

    def _prove(self, trajectories: Sequence[Trajectory], iteration: int) -> float:
        """How far apart sampler and learner are about the tokens that the sampler drew."""
        learners = self.learner.logprobs(trajectories)
        proofs = [
            Proof(trajectory_id=each.trajectory_id, learner_logprobs=logprobs)
            for each, logprobs in zip(trajectories, learners, strict=True)
        ]
        write_rows(self.folder.proof(iteration), proofs, Proof)
        return prove(
            [trajectory.logprobs[trajectory.action_mask] for trajectory in trajectories],
            [logprobs[each.action_mask] for logprobs, each in zip(learners, trajectories, strict=True)],
            dtype=self.learner.compute.dtype,
            tolerance=self.config.update.canary_tolerance,
        )

    def __enter__(self) -> Self:
        """On a GPU, measures whether the largest update fits beside the sampler."""
        if self.learner.compute.device.type == "cuda":
            try:
                measure(self.learner, self.env)
            except BaseException:
                self.engine.close()
                raise
        return self

    def __exit__(self, *_: object) -> None:
        self.engine.close()


def timed(verb: Verb) -> Verb:
    """Adds the seconds that a verb takes to its metrics."""

    @wraps(verb)
    def timed_verb(*arguments: object) -> Metrics:
        started = time.perf_counter()
        metrics = verb(*arguments)
        return {**metrics, f"time/{verb.__name__}_s": time.perf_counter() - started}

    return timed_verb


def require_gold_titles(questions: Iterable[Question], credit: CreditParams) -> None:
    """Raises ValueError, which names them, for data sets without gold passages where `progress` pays for those.

    It is paid in training: questions of other splits are let pass.
    """
    asked: dict[str, bool] = {}
    for question in (each for each in questions if each.split == "train"):
        asked[question.dataset] = asked.get(question.dataset, False) or bool(question.gold_titles)
    bare = [dataset for dataset, has_titles in asked.items() if not has_titles]
    if credit.rewards.progress and bare:
        raise ValueError(
            f"credit.rewards.progress {credit.rewards.progress} pays for gold passages, and no question of "
            f"{', '.join(bare)} names any; set it to 0, or leave that out of prepare.datasets"
        )


def draw(questions: Sequence[Question], count: int, *, iteration: int, seed: int) -> list[Question]:
    """The `count` questions of an iteration, no question twice.

    Successive iterations pass through all questions in a random order, then in another one; what is left at the end of
    a pass and does not fill an iteration is left out of it. Raises ValueError if there are fewer questions than an
    iteration needs.
    """
    if count > len(questions):
        raise ValueError(
            f"train.rollout.questions is {count} and there are {len(questions)} training questions; "
            "lower it or prepare more"
        )
    passed, position = divmod(iteration, len(questions) // count)
    order = np.random.default_rng(derive(seed, "questions", passed)).permutation(len(questions))
    return [questions[index] for index in order[position * count : (position + 1) * count]]


def draw_unseen(questions: Sequence[Question], config: TrainParams) -> list[Question]:
    """The questions of all validations: so many of every data set's dev split, the same for every run and seed.

    Raises ValueError if there is no dev split, or one has fewer questions.
    """
    dev = [question for question in questions if question.split == "dev"]
    if not dev:
        raise ValueError("train.validation asks dev questions and none are prepared; set train.validation.every: 0")
    count, chosen = config.validation.questions, list[Question]()
    for dataset in dict.fromkeys(question.dataset for question in dev):
        own = [question for question in dev if question.dataset == dataset]
        if count > len(own):
            raise ValueError(
                f"train.validation.questions is {count} and the dev split of {dataset} has {len(own)}; lower it, or "
                "set it to 0 for all"
            )
        order = np.random.default_rng(derive("validation", dataset)).permutation(len(own))
        chosen += [own[index] for index in sorted(order[: count or len(own)])]
    return chosen


def draw_further(
    questions: Sequence[Question], count: int, *, besides: Collection[str], iteration: int, refill: int, seed: int
) -> list[Question]:
    """At most `count` questions beside those whose ids are given, for the `refill`-th refill of an iteration.

    They come in a random order of their own: the passes of `draw` do not depend on how many refills there were, and
    meet these questions again.
    """
    order = np.random.default_rng(derive(seed, "refill", iteration, refill)).permutation(len(questions))
    others = (questions[index] for index in order if questions[index].question_id not in besides)
    return list(islice(others, count))
