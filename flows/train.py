"""The train stage: `python -m flows.train --run NAME`."""

from __future__ import annotations

import argparse
import logging
import time
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Self

import numpy as np
import torch
import yaml
from numpy.typing import NDArray
from transformers import AutoConfig

from agent_r1 import params, tracking
from agent_r1.credit.assign import assign, groups_to_refill
from agent_r1.credit.masks import select_tokens
from agent_r1.data.draw import draw, draw_further
from agent_r1.hashes import sha256
from agent_r1.params import Params, TrainParams, fingerprint
from agent_r1.policy import checkpoint, memory
from agent_r1.policy.learner import Learner, reference_of
from agent_r1.policy.model import compute_dtype, default_device
from agent_r1.project import INDEX, PASSAGES, QUESTIONS, WARM_START, label, train_dir
from agent_r1.records import Credit, Proof, Question, Trajectory
from agent_r1.rollout.attempts import tool_attempts
from agent_r1.rollout.canary import prove
from agent_r1.rollout.chat import Chat
from agent_r1.rollout.engines import open_engine
from agent_r1.rollout.episodes import collect
from agent_r1.search.index import describe, open_index
from agent_r1.tables import read_rows, write_rows, write_text
from agent_r1.training.folder import RunFolder
from agent_r1.training.watch import Decision, Verdict, announce, judge, reseeded
from flows.operation.register import push, register
from flows.stage import accelerator, task

ROOT = Path(__file__).parents[2]  # of the code; the project in the current folder may be another


def code_of(stage: str) -> dict[str, str]:
    """Path -> sha256 of every file of code that a foreach stage of dvc.yaml depends on; data is left out.

    Raises:
        FileNotFoundError: the code is installed without its dvc.yaml.
    """
    graph = ROOT / "dvc.yaml"
    if not graph.exists():
        raise FileNotFoundError(f"{graph} does not exist; install the project from its clone with `pip install -e .`")
    listed = yaml.safe_load(graph.read_text())["stages"][stage]["do"]["deps"]
    rooms = [ROOT / path for path in listed if path.startswith(("agent_r1/", "flows/"))]
    files = [file for room in rooms for file in (room.rglob("*") if room.is_dir() else [room]) if file.is_file()]
    return {str(file.relative_to(ROOT)): sha256(file) for file in files if "__pycache__" not in file.parts}


logger = logging.getLogger(__name__)

Metrics = dict[str, float]
PROVED = 16  # trajectories that show which weights the sampler runs


def train(run: str, seed: int | None = None, sweep: str | None = None) -> None:
    """Trains one run: collect, assign credit, update, log; goes on where an earlier attempt was interrupted.

    A seed stands in for the run's own, and a sweep for its number of iterations; both have folders of their own.

    A run that its collapse monitor stops is a finished run with fewer iterations: the process ends like any other, and
    the latest checkpoint is what is evaluated.
    """
    settings = params.load()
    config = settings.run(run, seed, sweep)
    with accelerator():  # before the folder is looked at: the process that holds it may be training this run
        # before the folder is emptied: what cannot run replaces nothing
        memory.check(AutoConfig.from_pretrained(WARM_START), settings, [config])
        _warn_of_rounding(settings)
        folder = RunFolder(train_dir(run, seed, sweep), _identity(settings, config))
        with _tracked(run, settings, config, folder, sweep) as tracked:
            if not folder.is_complete(config.iterations):
                with Training(settings, config, folder) as training:
                    _iterate(training, config, folder, tracked)
            folder.tidy(config.keep)
        version = register(run, seed, sweep, settings=settings, fingerprint=folder.fingerprint, tracked=tracked)
    push(version.descriptor)  # others may compute meanwhile


def _iterate(training: Training, config: TrainParams, folder: RunFolder, tracked: tracking.Run) -> None:
    """The main loop, up to the run's last iteration."""
    verbs = (training.rollout, training.credit, training.update)
    rollout, credit, update = (task(timed(verb)) for verb in verbs)
    conclude = task(training.conclude)
    while not folder.is_complete(config.iterations):
        iteration = folder.finished
        metrics = rollout(iteration) | credit(iteration) | update(iteration)
        verdict = judge([*folder.history(), metrics], config, folder.rollbacks)
        folder.record(iteration, metrics | verdict.metrics)
        tracked.log(metrics | verdict.metrics, step=iteration)
        announce(verdict, tracked, iteration)
        conclude(iteration, verdict)


class Training:
    """The verbs of an iteration. They meet in the run's folder: each reads what the one before has written."""

    def __init__(self, settings: Params, config: TrainParams, folder: RunFolder) -> None:
        self.env, self.config, self.folder = settings.env, config, folder
        self.questions = [row for row in read_rows(QUESTIONS, Question) if row.split == "train"]
        self.index = open_index(settings.search, PASSAGES, INDEX)
        self.learner = Learner(
            WARM_START,
            config.update,
            settings.model,
            with_critic=config.credit.needs_critic,
            seed=self.seed,
        )
        self.reference = reference_of(self.learner, WARM_START) if config.needs_reference else None
        if folder.resumed:
            checkpoint.load(folder.checkpoint, self.learner)
        elif self._may_roll_back:
            folder.save(self.learner, finished=0)
        self.chat = Chat(self.learner.tokenizer)
        self.engine = open_engine(
            settings.engine,
            WARM_START,  # `rollout` loads what was learned since: adapters run beside what they were trained on
            end_id=self.chat.end_id,
            max_tokens=self.env.max_tokens,
            temperature=config.rollout.temperature,
            dtype=settings.model.dtype,
            adapter_rank=settings.model.lora.rank,
        )

    def rollout(self, iteration: int) -> Metrics:
        """Collects trajectories with the current policy, and proves that the sampler ran it."""
        if self.engine.version != self.learner.policy_version:
            self.engine.load_weights(self.folder.checkpoint / "policy", self.learner.policy_version)
        questions = draw(self.questions, self.config.rollout.questions, iteration=iteration, seed=self.seed)
        trajectories = self._collect(questions, iteration)
        gap = self._prove(trajectories[:PROVED], iteration)
        refilled = self._refill(trajectories, iteration)
        write_rows(self.folder.trajectories(iteration), trajectories, Trajectory)
        hit_share = self.index.take_hit_share()
        return {"rollout/canary_gap": gap, "time/search_cache_hit_share": hit_share, **refilled}

    def credit(self, iteration: int) -> Metrics:
        """Turns the rewards of the trajectories into returns, advantages and value targets."""
        trajectories = read_rows(self.folder.trajectories(iteration), Trajectory)
        values = self.learner.values(trajectories) if self.learner.critic else None
        credits_, metrics = assign(
            trajectories,
            values,
            self.config.credit,
            reference=self._reference_logprobs(trajectories),
            questions=self.config.rollout.questions,
        )
        write_rows(self.folder.credit(iteration), credits_, Credit)
        return metrics

    def update(self, iteration: int) -> Metrics:
        """Improves the policy and the critic."""
        trajectories = read_rows(self.folder.trajectories(iteration), Trajectory)
        credits_ = read_rows(self.folder.credit(iteration), Credit)
        return self.learner.update(trajectories, credits_, iteration, rate=self.config.rate(iteration))

    def conclude(self, iteration: int, verdict: Verdict) -> None:
        """Writes the checkpoint, which makes the iteration a finished one, or goes back to the last good one."""
        if verdict.decision is Decision.ROLL_BACK:
            self.folder.go_back(self.learner)
            self.learner.seed = self.seed
            return
        if self._may_roll_back and verdict.clean:
            self.folder.set_aside()
        self.folder.save(self.learner, finished=iteration + 1, stopped=verdict.decision is Decision.STOP)

    @property
    def seed(self) -> int:
        """Of every draw: another one after each rollback."""
        return reseeded(self.config.seed, self.folder.rollbacks)

    @property
    def _may_roll_back(self) -> bool:
        return self.config.monitor.on_collapse == "rollback"

    def _collect(self, questions: list[Question], iteration: int, first_group: int = 0) -> list[Trajectory]:
        samples = self.config.rollout.samples
        return collect(
            self.engine,
            self.chat,
            tool_attempts(questions, self.index, self.env, samples=samples, first_group=first_group),
            max_tokens=self.env.max_tokens,
            max_action_tokens=self.env.max_action_tokens,
            seed=self.seed,
            iteration=iteration,
            policy_version=self.learner.policy_version,
        )

    def _refill(self, trajectories: list[Trajectory], iteration: int) -> Metrics:
        """Adds the trajectories of further questions in place of those whose returns are all equal."""
        rounds, added = self.config.credit.filter.refill, 0
        for refill in range(rounds):
            missing = groups_to_refill(trajectories, self.config.rollout.questions, self.config.credit)
            asked = {trajectory.question_id for trajectory in trajectories}
            further = draw_further(
                self.questions, missing, besides=asked, iteration=iteration, refill=refill, seed=self.seed
            )
            if further:
                trajectories += self._collect(further, iteration, first_group=len(asked))
                added += len(further)
        return {"filter/refilled_groups": added} if rounds else {}

    def _reference_logprobs(self, trajectories: list[Trajectory]) -> list[NDArray[np.float32]] | None:
        """What the warm-started model thinks of the tokens that the policy loss runs over; None without a KL."""
        if self.reference is None:
            return None
        masks = [select_tokens(each.source, self.config.credit.loss_mask) for each in trajectories]
        return self.reference.logprobs(trajectories, masks)

    def _prove(self, trajectories: list[Trajectory], iteration: int) -> float:
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
        return self

    def __exit__(self, *_: object) -> None:
        self.engine.close()


def timed(verb: Callable[[int], Metrics]) -> Callable[[int], Metrics]:
    """Adds the seconds that a verb takes to its metrics."""

    @wraps(verb)
    def timed_verb(iteration: int) -> Metrics:
        started = time.perf_counter()
        metrics = verb(iteration)
        return {**metrics, f"time/{verb.__name__}_s": time.perf_counter() - started}

    return timed_verb


def _warn_of_rounding(settings: Params) -> None:
    """Only vLLM in a process of its own runs adapters as they are; other engines get them merged into the weights."""
    merged = settings.model.adapter is not None and settings.engine.kind != "vllm"
    if merged and compute_dtype(settings.model.dtype, default_device()) is torch.bfloat16:
        logger.warning(
            "engine.kind %s samples with adapters merged into bfloat16 weights: changes below half a unit in the last "
            "place vanish, and at small learning rates those are most; set engine.kind: vllm, raise "
            "train.update.learning_rate, set model.lora.rank: 0, or model.dtype: float32",
            settings.engine.kind,
        )


def _identity(settings: Params, config: TrainParams) -> str:
    """What must not have changed for a run to go on: its configuration, its inputs and its stage's code."""
    trained = config.model_dump(mode="json", exclude={"keep"})  # decides nothing before the run is complete
    inputs = [sha256(QUESTIONS), describe(INDEX).index_hash, sha256(WARM_START)]
    return fingerprint(trained, settings.env, settings.model, settings.engine.identity, inputs, code_of("train"))


def _tracked(run: str, settings: Params, config: TrainParams, folder: RunFolder, sweep: str | None) -> tracking.Run:
    """The run's record in MLflow, found again by the id in its folder."""
    if folder.mlflow_run_id.exists():
        found = tracking.resume(folder.mlflow_run_id.read_text())
        if found is not None:
            return found
    shown = tracking.run_params(run, settings, config)
    tags = tracking.provenance(settings.prepare.dataset, sweep)
    started = tracking.start(label(run, config.seed), shown, tags)
    write_text(folder.mlflow_run_id, started.run_id)
    return started


if __name__ == "__main__":
    from flows.stage import add_member_arguments, run_stage

    parser = argparse.ArgumentParser(description="Trains one run of params.yaml.")
    parser.add_argument("--run", required=True, help="a name under runs: in params.yaml")
    add_member_arguments(parser)
    arguments = parser.parse_args()
    run_stage(train, run=arguments.run, seed=arguments.seed, sweep=arguments.sweep)
