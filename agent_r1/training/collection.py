"""The sampling side of a training: draws questions, collects trajectories, proves which weights sampled them."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from contextvars import copy_context
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

from agent_r1.costs import Purpose
from agent_r1.credit import own as own_rewards
from agent_r1.credit.assign import groups_to_refill
from agent_r1.envs.base import Attempt
from agent_r1.envs.kinds import attempts_at
from agent_r1.envs.shared import Shared
from agent_r1.learn.learner import Learner
from agent_r1.learn.memory import release
from agent_r1.params import Params
from agent_r1.params.credit import CreditParams
from agent_r1.params.train import TrainParams
from agent_r1.records import Metrics, Proof, Question, Trajectory, of_split, questions_by_id
from agent_r1.rollout.chat import Chat
from agent_r1.rollout.collecting import collect_all
from agent_r1.rollout.engines import open_engine
from agent_r1.rollout.episode import Play
from agent_r1.rollout.episodes import prove_order
from agent_r1.rollout.sampling import Actor, Engine, Request
from agent_r1.seeds import derive
from agent_r1.tables import read_rows, write_rows
from agent_r1.teaching.demonstrator import Demonstrator
from agent_r1.training.folder import RunFolder
from agent_r1.training.questions import draw, draw_further
from agent_r1.training.watch import StaleWeightsError, prove_held, prove_sampled, require_own, with_action

logger = logging.getLogger(__name__)

_INTERRUPT_S = 0.1  # between two attempts


@dataclass(frozen=True, kw_only=True, slots=True)
class QuestionBatch:
    """The questions of one iteration, with the draws, weights and credit for them."""

    iteration: int
    seed: int  # of every draw
    policy_version: int  # of the weights that the sampler runs
    questions: Sequence[Question]
    credit: CreditParams  # as the run is trained by now


class Ahead(NamedTuple):
    """An iteration that is collected while the one before it is learned from."""

    batch: QuestionBatch
    gap: float  # of the weights that sample it, found before the learner changed its own
    sampled: Future[tuple[list[Trajectory], Metrics]]


def start_engine(settings: Params, config: TrainParams, model: str | Path, end_ids: Sequence[int]) -> Engine:
    """Starts an engine with the `model` that the learner began with; `end_ids` end an action."""
    actor = Actor(
        model=str(model),  # later weights are loaded into it: adapters run beside the model they were trained on
        end_ids=end_ids,
        max_tokens=settings.env.max_tokens,
        temperature=1.0,  # the loss assumes actions of the policy's own distribution, uncut
        dtype=settings.model.dtype,
        adapter_rank=settings.model.lora.rank,
    )
    return open_engine(settings.engine, actor)


class TrainedEngine:
    """An engine that answers questions with the learner's weights."""

    def __init__(
        self,
        start: Callable[[Sequence[int]], Engine],
        config: TrainParams,
        *,
        questions: Sequence[Question],
        shared: Shared,
        learner: Learner,
        folder: RunFolder,
        left_out: Collection[str] = (),
        demonstrator: Demonstrator | None = None,
    ) -> None:
        """Starts the engine, by `start` with the tokens that end an action; the rest are arguments of `Training`."""
        self.demonstrator = demonstrator
        self.left_out = left_out
        self.env = shared.limits
        self.config = config
        self.shared = shared
        self.learner = learner
        self.folder = folder
        self.questions = of_split(questions, "train")
        self.own_rewards = own_rewards.functions(config.credit.rewards)
        self._proved = learner.adapter is not None  # those that it starts with change nothing, and are not loaded
        self._unproved = set[str]()  # names of tensors, which a warning has named
        self.chat = Chat(learner.tokenizer, learner.end_ids)
        self.engine = start(self.chat.end_ids)  # last: nothing after it fails and leaves it running
        self.engine.rest()

    @contextmanager
    def awake(self) -> Iterator[None]:
        """Leaves a device that learner and sampler share to the sampler, until the block ends."""
        if self.engine.rests:
            release(self.learner)
        waited = self.shared.waited_s
        yield
        self.engine.rest()
        self.folder.costs.charge(Purpose.SAMPLING, self.shared.waited_s - waited)

    def load_weights(self) -> None:
        """Has the engine run the learner's weights."""
        transferred = self.engine.version != self.learner.policy_version
        if transferred:
            halved = self.engine.halved and self.learner.adapter is None  # adapters stay as they are
            self.engine.load_weights(self.folder.policy(self.learner, halved=halved), self.learner.policy_version)
            self.folder.costs.charge(Purpose.WRITING)
        if transferred or not self._proved:
            self._prove_held()
            self.folder.costs.charge(Purpose.PROOF)

    def _prove_held(self) -> None:
        """Raises StaleWeightsError for a sampler that does not hold the learner's weights."""
        samplers = self.engine.held()
        unproved = set[str]()
        dtypes = dict.fromkeys(weights.dtype for weights in samplers)
        sums = {dtype: self.learner.weight_sums(dtype) for dtype in dtypes}
        for weights in samplers:
            unproved |= prove_held(weights, sums[weights.dtype])
        if unproved - self._unproved:
            name, *_ = sorted(unproved)
            logger.warning(
                "%d tensors have no sums on both sides, %s for one: the canary alone proves them", len(unproved), name
            )
        self._unproved |= unproved
        self._proved = True

    def batch(self, questions: Sequence[Question], iteration: int, *, seed: int, credit: CreditParams) -> QuestionBatch:
        """Questions as they are answered with the learner's present weights."""
        version = self.learner.policy_version
        return QuestionBatch(iteration=iteration, seed=seed, policy_version=version, questions=questions, credit=credit)

    def sample(self, batch: QuestionBatch) -> tuple[list[Trajectory], Metrics]:
        """The trajectories of a batch and its refills, and metrics."""
        started = time.perf_counter()
        waited = self.shared.waited_s
        with self.shared.journaled(self.folder.journal(batch.iteration)):
            trajectories = self.answer(batch.questions, batch)
            refilled = self._refill(trajectories, batch)
            waiting = (self.shared.waited_s - waited) / (time.perf_counter() - started)
            of_tools = self.shared.use_of_tools(trajectories) | self.shared.latencies(trajectories)
            hits = {"rollout/search_cache_hit_share": self.shared.index.take_hit_share()}
            measured = of_tools | self.shared.take_measures()
            demonstrations = self._demonstrate(self.demonstrator, trajectories, batch) if self.demonstrator else {}
        return trajectories, hits | refilled | measured | demonstrations | {"tool/waiting_share": waiting}

    def validate(self, unseen: Sequence[Question], iteration: int, *, seed: int) -> list[Trajectory]:
        """The trajectories of the learner's weights, which the iteration made; greedy if there is one of each."""
        batch = self.batch(unseen, iteration, seed=seed, credit=self.config.credit)
        with self.awake(), self.shared.journaled(self.folder.journal(iteration + 1)):
            self.load_weights()
            samples = self.config.validation.samples
            attempts = attempts_at(unseen, self.shared, samples=samples)
            trajectories = self._play(attempts, batch, greedy=samples == 1)
        self.shared.index.take_hit_share()  # the next rollouts count their own hits alone
        self.shared.take_measures()
        return trajectories

    def answer(self, questions: Sequence[Question], batch: QuestionBatch, first_group: int = 0) -> list[Trajectory]:
        """The trajectories of some questions of a batch, with one's own rewards; groups are counted from the first."""
        samples = self.config.rollout.samples
        attempts = attempts_at(questions, self.shared, samples=samples, first_group=first_group)
        return own_rewards.state(
            self.own_rewards,
            self._play(attempts, batch),
            questions_by_id(questions),
            self.chat.decode,
            aborted_share=self.env.aborted_share,
        )

    def probe(self, trajectories: Sequence[Trajectory], seed: int) -> list[Trajectory]:
        """Samples an action in the first context of each trajectory, in place of all that came after it."""
        requests = list[Request]()
        for index, trajectory in enumerate(trajectories):
            start = trajectory.steps[0].action_start
            request = Request(
                episode=index,
                step=0,
                context=trajectory.token_ids[:start].tolist(),
                seed=derive(seed, "probe", trajectory.trajectory_id),
                max_tokens=min(self.env.max_action_tokens, self.env.max_tokens - start),
            )
            requests.append(request)
        return [*map(with_action, trajectories, self.engine.sample(requests))]

    def proved(self, trajectories: Sequence[Trajectory]) -> Sequence[Trajectory]:
        """The first few, so many that every sampler has a part in them."""
        return trajectories[: max(self.config.update.proved_trajectories, self.engine.homes)]

    def _play(self, attempts: Sequence[Attempt], batch: QuestionBatch, *, greedy: bool = False) -> list[Trajectory]:
        play = Play(iteration=batch.iteration, policy_version=batch.policy_version, greedy=greedy)
        played = collect_all(self.engine, self.chat, attempts, self.shared, seed=batch.seed, play=play)
        self.folder.costs.spent["cost/sampled_tokens"] += sum(
            int(trajectory.action_mask.sum()) for trajectory in played
        )
        return played

    def _demonstrate(
        self, demonstrator: Demonstrator, trajectories: Sequence[Trajectory], batch: QuestionBatch
    ) -> Metrics:
        """Has a demonstration written down for every group in which no sample was right."""
        right = {row.group for row in trajectories if row.success}
        wrong = [row for row in trajectories if row.counts and row.group not in right]
        groups = {row.group: demonstrator.questions[row.question_id] for row in wrong}
        attempts = [
            replace(attempt, group=group, sample=self.config.rollout.samples)
            for group, attempt in zip(groups, attempts_at([*groups.values()], self.shared, outside=False), strict=True)
        ]
        play = Play(iteration=batch.iteration, policy_version=batch.policy_version)
        rows = demonstrator.play(attempts, self.shared, self.chat, seed=batch.seed, play=play)
        write_rows(self.folder.demonstrations(batch.iteration), rows, Trajectory)
        self.shared.index.take_hit_share()  # the next rollouts count their own alone
        self.shared.take_measures()
        return {"demonstrations/wanted": len(groups), "demonstrations/joined": len(rows)}

    def _refill(self, trajectories: list[Trajectory], batch: QuestionBatch) -> Metrics:
        """Adds the trajectories of further questions in place of groups whose returns are all equal."""
        rounds = batch.credit.filter.refill
        added = 0
        count = self.config.rollout.questions
        for refill in range(rounds):
            missing = groups_to_refill(trajectories, count, batch.credit, self.env.max_tokens)
            question_ids = {trajectory.question_id for trajectory in trajectories}
            besides = question_ids.union(self.left_out)
            questions = draw_further(
                self.questions, missing, besides=besides, iteration=batch.iteration, refill=refill, seed=batch.seed
            )
            if questions:
                trajectories += self.answer(questions, batch, first_group=len(question_ids))
                added += len(questions)
        return {"filter/refilled_groups": added} if rounds else {}


class Collector:
    """Collects the iterations of a run into its folder, and proves that its sampler ran the learner's weights.

    Its calls take the `seed` of every draw. Between `begin` and `receive` the engine, the shared world and the journal
    belong to a thread, and the folder to the caller, but for the demonstrations.
    """

    def __init__(self, sampler: TrainedEngine) -> None:
        self.sampler = sampler
        self.config = sampler.config
        self.folder = sampler.folder
        self.learner = sampler.learner
        self.shared = sampler.shared
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
            if self.sampler.demonstrator:
                read_rows(self.folder.demonstrations(iteration), Trajectory)
            current = [
                trajectory for trajectory in self.sampler.proved(trajectories) if trajectory.policy_version == version
            ]
            proved = {"rollout/canary_gap": self.prove(current, iteration)} if current else {}
        except (ValueError, StaleWeightsError) as fault:
            logger.warning("iteration %d and those after it are collected again: %s", iteration, fault)
            return {}
        if iteration != self._received:
            logger.info("iteration %d was collected before: %d trajectories are read", iteration, len(trajectories))
        return self.folder.measured(iteration) | proved | self._lag(version - trajectories[0].policy_version)

    def collect(self, iteration: int, *, seed: int, credit: CreditParams) -> Metrics:
        """Collects an iteration with the learner's weights, and proves that the sampler ran them."""
        with self.sampler.awake():
            batch = self._draw(iteration, seed, credit)
            order: Metrics = {}
            if iteration == 0:  # whether an action depends on the prompts that are sampled at the same time
                attempts = attempts_at(batch.questions, self.shared)
                order = prove_order(self.sampler.engine, self.sampler.chat, attempts, self.shared)
            trajectories, metrics = self.sampler.sample(batch)
        gap = self.prove(self.sampler.proved(trajectories), iteration)
        return self._keep(iteration, trajectories, metrics | order | {"rollout/canary_gap": gap}) | self._lag(0)

    def begin(self, iteration: int, *, seed: int, credit: CreditParams) -> None:
        """Has an iteration collected with the learner's weights while it learns from the one before.

        The proof comes first, on contexts of the iteration before: later the learner's weights are others. Nothing
        that an earlier process collected is collected again. `receive` or `abandon` must follow.
        """
        if self.found(iteration, seed=seed):
            return
        batch = self._draw(iteration, seed, credit)
        trajectories = read_rows(self.folder.trajectories(iteration - 1), Trajectory)
        probed = self.sampler.probe(
            self.sampler.proved([trajectory for trajectory in trajectories if trajectory.steps]), seed
        )
        dtype = self.learner.compute.dtype
        tolerance = self.config.update.canary_tolerance
        gap = prove_sampled(probed, self.learner.logprobs(probed), dtype, tolerance)
        self.folder.costs.charge(Purpose.PROOF)
        context = copy_context()  # logs as this thread does
        self._ahead = Ahead(batch, gap, self._threads.submit(context.run, self.sampler.sample, batch))

    def receive(self) -> Metrics:
        """Waits for the iteration that is collected ahead, if any, and keeps it."""
        if not self._ahead:
            return {}
        started = time.perf_counter()
        ahead = self._ahead
        trajectories, metrics = ahead.sampled.result()
        self.folder.costs.charge(Purpose.SAMPLING)
        waited = {"ahead/waited_s": time.perf_counter() - started}
        self._ahead = None
        self._received = ahead.batch.iteration
        self._keep(self._received, trajectories, metrics | {"rollout/canary_gap": ahead.gap})
        return waited

    def abandon(self) -> None:
        """Ends collecting ahead, and keeps nothing of it."""
        while self._ahead and not self._ahead.sampled.done():
            self._interrupt()
        self._ahead = None

    def prove(self, trajectories: Sequence[Trajectory], iteration: int) -> float:
        """The gap [nats] between sampler and learner at sampled tokens; raises StaleWeightsError for other weights."""
        learners = self.learner.logprobs(trajectories)
        pairs = zip(trajectories, learners, strict=True)
        proofs = [
            Proof(trajectory_id=trajectory.trajectory_id, learner_logprobs=logprobs) for trajectory, logprobs in pairs
        ]
        write_rows(self.folder.proof(iteration), proofs, Proof)
        self.folder.costs.charge(Purpose.PROOF)
        return prove_sampled(trajectories, learners, self.learner.compute.dtype, self.config.update.canary_tolerance)

    def close(self) -> None:
        """Ends the engine, and collecting ahead; safe to call twice."""
        self._interrupt()  # a thread that waits for an action gives it up; one in the engine ends with it
        self.sampler.engine.close()
        self.abandon()
        self._threads.shutdown()

    def _draw(self, iteration: int, seed: int, credit: CreditParams) -> QuestionBatch:
        """Prepares an iteration: clears leftovers, hands over the weights, draws the questions."""
        self.folder.forget(iteration)
        self.shared.verify()
        self.sampler.load_weights()
        count = self.config.rollout.questions
        left_out = self.sampler.left_out
        questions = draw(self.sampler.questions, count, iteration=iteration, seed=seed, left_out=left_out)
        return self.sampler.batch(questions, iteration, seed=seed, credit=credit)

    def _lag(self, versions: int) -> Metrics:
        """How many policies ago an iteration was sampled."""
        return {"ahead/lag": versions} if self.config.rollout.ahead else {}

    def _interrupt(self) -> None:
        if self._ahead:
            self.shared.interrupt()
            wait([self._ahead.sampled], _INTERRUPT_S)

    def _keep(self, iteration: int, trajectories: list[Trajectory], metrics: Metrics) -> Metrics:
        self.folder.record(iteration, metrics)  # before the rows, which say that it is collected
        write_rows(self.folder.trajectories(iteration), trajectories, Trajectory)
        return metrics
