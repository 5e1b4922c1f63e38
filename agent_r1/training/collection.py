"""The sampling side of a training: draws questions, collects trajectories, proves which weights sampled them."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from contextvars import copy_context
from dataclasses import dataclass
from pathlib import Path

from agent_r1.credit import own as own_rewards
from agent_r1.credit.assign import groups_to_refill
from agent_r1.envs.base import Attempt
from agent_r1.envs.kinds import attempts_at
from agent_r1.envs.shared import Shared
from agent_r1.learn.learner import Learner
from agent_r1.learn.losses import Metrics
from agent_r1.learn.memory import release
from agent_r1.params import Params
from agent_r1.params.credit import CreditParams
from agent_r1.params.train import TrainParams
from agent_r1.records import Proof, Question, Trajectory
from agent_r1.rollout.chat import Chat
from agent_r1.rollout.engines import open_engine
from agent_r1.rollout.episode import Play
from agent_r1.rollout.episodes import collect, prove_order
from agent_r1.rollout.sampling import Actor, Engine, Request
from agent_r1.seeds import derive
from agent_r1.tables import read_rows, write_rows
from agent_r1.training.folder import RunFolder
from agent_r1.training.questions import draw, draw_further
from agent_r1.training.watch import StaleWeightsError, prove_sampled, require_own, with_action

logger = logging.getLogger(__name__)

_INTERRUPT_S = 0.1  # between two attempts


@dataclass(frozen=True, kw_only=True, slots=True)
class Batch:
    """The questions of one iteration, and how they are sampled."""

    iteration: int
    seed: int  # of every draw
    policy_version: int  # of the weights that the sampler runs
    questions: list[Question]


@dataclass(frozen=True, slots=True)
class Ahead:
    """An iteration that is collected while the one before it is learned from."""

    batch: Batch
    gap: float  # of the weights that sample it, found before the learner changed its own
    sampled: Future[tuple[list[Trajectory], Metrics]]


def start_engine(settings: Params, config: TrainParams, model: str | Path, end_id: int) -> Engine:
    """Starts an engine with the `model` that the learner began with; `end_id` ends an action."""
    actor = Actor(
        model=str(model),  # later weights are loaded into it: adapters run beside the model they were trained on
        end_id=end_id,
        max_tokens=settings.env.max_tokens,
        temperature=config.rollout.temperature,
        dtype=settings.model.dtype,
        adapter_rank=settings.model.lora.rank,
    )
    return open_engine(settings.engine, actor)


class Collector:
    """Has an engine that runs the learner's weights answer questions, and keeps the trajectories in the run's folder.

    Its calls take the `seed` of every draw, and the `credit` that the run is trained with by now. Between `begin` and
    `receive` the engine, the shared world and the journal belong to a thread, and the folder to the caller.
    """

    def __init__(
        self,
        start: Callable[[int], Engine],
        config: TrainParams,
        *,
        questions: Sequence[Question],
        shared: Shared,
        learner: Learner,
        folder: RunFolder,
    ) -> None:
        """Starts the engine, by `start` with the token that ends an action; the rest are arguments of `Training`."""
        self.env, self.config, self.shared, self.learner, self.folder = shared.limits, config, shared, learner, folder
        self.questions = [question for question in questions if question.split == "train"]
        self.own_rewards = own_rewards.load(config.credit.rewards)
        self.chat = Chat(learner.tokenizer)
        self.engine = start(self.chat.end_id)  # last: nothing after it fails and leaves it running
        self.engine.rest()
        self._threads = ThreadPoolExecutor(1, "collect")
        self._ahead: Ahead | None = None
        self._received = -1  # the latest iteration that this process collected ahead

    def found(self, iteration: int, *, seed: int, ahead: int = 0) -> Metrics:
        """The metrics of an iteration that was collected before; empty if it is to be collected.

        It is collected again if its file is damaged, or if another seed or other weights than the learner's sampled it.
        With `ahead`, the policy before may have sampled it; its weights are gone, so nothing is proved then.
        """
        if not self.folder.is_collected(iteration):
            return {}
        version = self.learner.policy_version
        try:
            trajectories = read_rows(self.folder.trajectories(iteration), Trajectory)
            require_own(trajectories, iteration, seed=seed, policy_versions=range(version - ahead, version + 1))
            own = [each for each in self._proved(trajectories) if each.policy_version == version]
            proved = {"rollout/canary_gap": self.prove(own, iteration)} if own else {}
        except (ValueError, StaleWeightsError) as fault:
            logger.warning("iteration %d and those after it are collected again: %s", iteration, fault)
            return {}
        if iteration != self._received:
            logger.info("iteration %d was collected before: %d trajectories are read", iteration, len(trajectories))
        return self.folder.measured(iteration) | proved | self._lag(version - trajectories[0].policy_version)

    def collect(self, iteration: int, *, seed: int, credit: CreditParams) -> Metrics:
        """Collects an iteration with the learner's weights, and proves that the sampler ran them."""
        with self._sampler_awake():
            batch = self._draw(iteration, seed)
            order = self._prove_order(batch) if iteration == 0 else {}
            trajectories, metrics = self._sample(batch, credit)
        gap = self.prove(self._proved(trajectories), iteration)
        return self._keep(iteration, trajectories, metrics | order | {"rollout/canary_gap": gap}) | self._lag(0)

    def begin(self, iteration: int, *, seed: int, credit: CreditParams) -> None:
        """Has an iteration collected with the learner's weights while it learns from the one before.

        That the sampler runs them is proved here, on contexts of the one before: later the learner's are others. What
        an earlier process collected of it is not collected again. To be followed by `receive` or `abandon`.
        """
        if self.found(iteration, seed=seed):
            return
        batch = self._draw(iteration, seed)
        gap = self._probe(read_rows(self.folder.trajectories(iteration - 1), Trajectory), seed)
        context = copy_context()  # what is logged there belongs where this was called
        self._ahead = Ahead(batch, gap, self._threads.submit(context.run, self._sample, batch, credit))

    def receive(self) -> Metrics:
        """Waits for the iteration that is collected ahead, if any, and keeps it."""
        if not self._ahead:
            return {}
        started, ahead = time.perf_counter(), self._ahead
        trajectories, metrics = ahead.sampled.result()
        waited = time.perf_counter() - started
        self._ahead, self._received = None, ahead.batch.iteration
        self._keep(self._received, trajectories, metrics | {"rollout/canary_gap": ahead.gap})
        return {"ahead/waited_s": waited}

    def abandon(self) -> None:
        """Ends collecting ahead, and keeps nothing of it."""
        while self._ahead and not self._ahead.sampled.done():
            self._interrupt()
        self._ahead = None

    def validate(self, unseen: Sequence[Question], iteration: int, *, seed: int) -> list[Trajectory]:
        """The greedy trajectories of the learner's weights."""
        batch = Batch(iteration=iteration, seed=seed, policy_version=self.learner.policy_version, questions=[*unseen])
        with self._sampler_awake():
            self._hand_over_weights()
            trajectories = self._play(attempts_at(batch.questions, self.shared), batch, greedy=True)
        self.shared.index.take_hit_share()  # that of the next rollouts is theirs alone
        return trajectories

    def answer(self, questions: Sequence[Question], batch: Batch, first_group: int = 0) -> list[Trajectory]:
        """The trajectories of some questions of a batch, with one's own rewards; groups are counted from the first."""
        samples = self.config.rollout.samples
        attempts = attempts_at(questions, self.shared, samples=samples, first_group=first_group)
        return own_rewards.state(
            self.own_rewards,
            self._play(attempts, batch),
            {question.question_id: question for question in questions},
            self.chat.decode,
            aborted_share=self.env.aborted_share,
        )

    def prove(self, trajectories: Sequence[Trajectory], iteration: int) -> float:
        """How far apart sampler and learner are about the tokens that the sampler drew [nats].

        Raises StaleWeightsError where the sampler ran other weights.
        """
        learners = self.learner.logprobs(trajectories)
        proofs = [
            Proof(trajectory_id=each.trajectory_id, learner_logprobs=logprobs)
            for each, logprobs in zip(trajectories, learners, strict=True)
        ]
        write_rows(self.folder.proof(iteration), proofs, Proof)
        tolerance = self.config.update.canary_tolerance
        return prove_sampled(trajectories, learners, self.learner.compute.dtype, tolerance)

    def close(self) -> None:
        """Ends the engine, and what is collected ahead; safe to call twice."""
        self._interrupt()  # who waits for an action gives it up; who is in the engine ends with it
        self.engine.close()
        self.abandon()
        self._threads.shutdown()

    def _draw(self, iteration: int, seed: int) -> Batch:
        """Prepares an iteration: clears leftovers, hands over the weights, draws the questions."""
        self.folder.forget(iteration)
        self.shared.verify()
        self._hand_over_weights()
        questions = draw(self.questions, self.config.rollout.questions, iteration=iteration, seed=seed)
        return Batch(iteration=iteration, seed=seed, policy_version=self.learner.policy_version, questions=questions)

    def _sample(self, batch: Batch, credit: CreditParams) -> tuple[list[Trajectory], Metrics]:
        """The trajectories of a batch, those of refills among them, and what was measured meanwhile."""
        started, waited = time.perf_counter(), self.shared.waited_s
        with self.shared.journaled(self.folder.journal(batch.iteration)):
            trajectories = self.answer(batch.questions, batch)
            refilled = self._refill(trajectories, batch, credit)
        waiting = (self.shared.waited_s - waited) / (time.perf_counter() - started)
        of_tools = self.shared.use_of_tools(trajectories) | self.shared.latencies(trajectories)
        hits = {"rollout/search_cache_hit_share": self.shared.index.take_hit_share()}
        return trajectories, hits | refilled | of_tools | {"tool/waiting_share": waiting}

    def _play(self, attempts: Sequence[Attempt], batch: Batch, *, greedy: bool = False) -> list[Trajectory]:
        play = Play(iteration=batch.iteration, policy_version=batch.policy_version, greedy=greedy)
        return collect(self.engine, self.chat, attempts, self.shared, seed=batch.seed, play=play)

    def _refill(self, trajectories: list[Trajectory], batch: Batch, credit: CreditParams) -> Metrics:
        """Adds the trajectories of further questions in place of those whose returns are all equal."""
        rounds, added = credit.filter.refill, 0
        for refill in range(rounds):
            wanted = self.config.rollout.questions
            missing = groups_to_refill(trajectories, wanted, credit, self.env.max_tokens)
            asked = {trajectory.question_id for trajectory in trajectories}
            further = draw_further(
                self.questions, missing, besides=asked, iteration=batch.iteration, refill=refill, seed=batch.seed
            )
            if further:
                trajectories += self.answer(further, batch, first_group=len(asked))
                added += len(further)
        return {"filter/refilled_groups": added} if rounds else {}

    @contextmanager
    def _sampler_awake(self) -> Iterator[None]:
        """Leaves a device that learner and sampler share to the sampler, until the block ends."""
        if self.engine.rests:
            release(self.learner)
        yield
        self.engine.rest()

    def _hand_over_weights(self) -> None:
        """Has the sampler run the learner's weights."""
        if self.engine.version != self.learner.policy_version:
            self.engine.load_weights(self.folder.policy(self.learner), self.learner.policy_version)

    def _prove_order(self, batch: Batch) -> Metrics:
        """Whether an action depends on who is sampled at the same time, on the prompts of some questions."""
        return prove_order(self.engine, self.chat, attempts_at(batch.questions, self.shared), self.shared)

    def _probe(self, trajectories: Sequence[Trajectory], seed: int) -> float:
        """The gap on actions that are sampled in the first contexts of some trajectories, and kept by nobody."""
        opened = self._proved([each for each in trajectories if each.steps])
        requests = [
            Request(
                episode=index,
                step=0,
                context=each.token_ids[: (start := each.steps[0].action_start)].tolist(),
                seed=derive(seed, "probe", each.trajectory_id),
                max_tokens=min(self.env.max_action_tokens, self.env.max_tokens - start),
            )
            for index, each in enumerate(opened)
        ]
        probed = [*map(with_action, opened, self.engine.sample(requests))]
        dtype, tolerance = self.learner.compute.dtype, self.config.update.canary_tolerance
        return prove_sampled(probed, self.learner.logprobs(probed), dtype, tolerance)

    def _lag(self, versions: int) -> Metrics:
        """How many policies ago an iteration was sampled."""
        return {"ahead/lag": versions} if self.config.rollout.ahead else {}

    def _interrupt(self) -> None:
        if self._ahead:
            self.shared.interrupt()
            wait([self._ahead.sampled], _INTERRUPT_S)

    def _proved(self, trajectories: Sequence[Trajectory]) -> Sequence[Trajectory]:
        """The first few, so many that every sampler has a part in them."""
        return trajectories[: max(self.config.update.proved_trajectories, self.engine.homes)]

    def _keep(self, iteration: int, trajectories: list[Trajectory], metrics: Metrics) -> Metrics:
        self.folder.record(iteration, metrics)  # before the rows, which say that it is collected
        write_rows(self.folder.trajectories(iteration), trajectories, Trajectory)
        return metrics
