"""All of params.yaml: its sections, and each run as they hold for it."""

from __future__ import annotations

import hashlib
import json
import os
import re
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Self, get_args

from pydantic import BaseModel, Field, SkipValidation

from agent_r1.params import stages
from agent_r1.params.credit import OF_ANSWERS, CreditParams
from agent_r1.params.env import DECLARE, EnvParams
from agent_r1.params.outside import OthersParams
from agent_r1.params.places import IMPORTED, RAW, SWEEP, UNREAD, Places, RunId
from agent_r1.params.prepare import BUILT_IN, HOPS, PrepareParams
from agent_r1.params.search import SearchParams
from agent_r1.params.sections import Names, Natural, Refusals, Section, flatten, nearest, override, repeated, validated
from agent_r1.params.train import TrainParams

ALIKE = ("grpo", "dr_grpo", "rloo", "reinforce_pp_baseline")  # one advantage for a whole trajectory
RUN_NAME = re.compile(r"\w+", re.ASCII)
ENV = "env"  # the section that a run may override beside `train`
Seeds = list[Annotated[Natural, Field(strict=True)]]  # as they go into commands


def fingerprint(*parts: Any) -> str:
    """A short stable hash of parameters and other JSON-like values."""
    plain = [part.model_dump(mode="json") if isinstance(part, BaseModel) else part for part in parts]
    return hashlib.sha256(json.dumps(plain, sort_keys=True).encode()).hexdigest()[:16]


def variant_of(overrides: dict[str, Any]) -> str:
    """The name of a variant, by its overrides."""
    return fingerprint(overrides)[:8]


class CloserParams(Section):
    """Runs of the sweep that get further seeds."""

    runs: list[str]
    seeds: Seeds


class AblationsParams(Section):
    """The sweep: every run with every seed, some with further ones, and baselines without."""

    runs: Names
    seeds: Annotated[Seeds, Field(min_length=1)]
    baselines: Annotated[list[stages.Baseline], Field(min_length=1)]
    equal: stages.Budget = "episodes"  # the report names runs that differ in it
    references: list[str]  # all are compared with them; []: with the first run and the first baseline
    closer: CloserParams
    train: dict[str, Any]  # over the `train` section, and under the overrides of each run

    def seeds_of(self, run: str) -> list[int]:
        """The seeds that a run is trained with."""
        return self.seeds + (self.closer.seeds if run in self.closer.runs else [])

    def refusals(self) -> Refusals:
        agents = [*self.runs, *self.baselines]
        closer = self.closer
        yield from repeated(runs=self.runs, seeds=self.seeds, baselines=self.baselines, references=self.references)
        yield from (f"closer.{refusal}" for refusal in repeated(runs=closer.runs, seeds=closer.seeds))
        if bool(closer.runs) != bool(closer.seeds):
            yield "closer: runs and seeds belong together; give both, or [] for both"
        for name in [name for name in self.references if name not in agents]:
            yield f"references names {name!r}, which is none of its runs and baselines{nearest(name, agents)}"
        for run in [run for run in closer.runs if run not in self.runs]:
            yield f"closer.runs names {run!r}, which runs does not{nearest(run, self.runs)}"
        for seed in [seed for seed in closer.seeds if seed in self.seeds]:
            yield f"closer.seeds names {seed}, which every run has already; give it further ones"
        if "seed" in self.train:
            yield "train.seed has no effect, every run is trained with each of `seeds`; leave it out"


class Params(Section):
    """All of params.yaml."""

    places: Places
    prepare: PrepareParams
    search: SearchParams
    model: stages.ModelParams
    learner: stages.LearnerParams
    engine: stages.EngineParams
    warm_start: stages.WarmStartParams
    env: EnvParams
    train: TrainParams
    evaluate: stages.EvaluateParams
    promote: stages.PromoteParams
    runs: dict[str, dict[str, Any] | None]
    repro_runs: list[str]
    repro_baselines: list[stages.Baseline]
    ablations: AblationsParams
    operate: stages.OperateParams

    @property
    def gpus(self) -> int:
        """The GPUs of a machine that a training holds, 0 for all; its learner and its sampler share them."""
        return self.engine.gpus and max(self.engine.gpus, self.learner.processes)

    @property
    def read_of_raw(self) -> str:
        """The file in RAW that prepare and warm start read, or the folder that holds all; UNREAD for none."""
        files = [self.prepare.files[name] for name in self.prepare.datasets if name in self.prepare.files]
        # 2WikiMultihopQA has a file of aliases beside its splits
        paths = [
            split.file.parent if dataset.format == "2wikimultihopqa" else split.file
            for dataset in files
            for split in dataset.splits.values()
        ]
        paths += [Path(self.warm_start.conversations), *(dataset.corpus for dataset in files if dataset.corpus)]
        drawn = [world for name, world in self.prepare.worlds.items() if name in self.prepare.datasets]
        paths += [world.file for world in drawn if isinstance(world, OthersParams) and world.file]
        inside = [re.sub(r"/[^/]*[*?\[].*", "", str(path)) for path in paths if path.is_relative_to(RAW)]
        return os.path.commonpath(inside) if inside else UNREAD

    def require_watched(self) -> None:
        """Raises ValueError if DVC would not notice an edit of a file that is read."""
        read = self.read_of_raw
        if read != UNREAD and not Path(read).is_relative_to(self.places.raw):
            problem = f"places.raw is {self.places.raw}, so that DVC would not notice an edit of {read}"
            raise ValueError(f"{problem}; set `raw: {read}` under places")

    def reported(self, sweep: str = "") -> list[str]:
        """The labels of the agents in a report: of the main graph's, or of a sweep's."""
        swept = self.ablations
        if not sweep:
            return [*self.repro_runs, *self.repro_baselines]
        return [RunId(run, seed).label for run in swept.runs for seed in swept.seeds_of(run)] + [*swept.baselines]

    def run(self, run: RunId) -> TrainParams:
        """The `train` section with the overrides of its sweep, then those of one run, its variant and its seed.

        A ValueError names a run, variant or sweep that there is not, or an override that is unknown, refused or without
        effect.
        """
        return self._resolved(run, self._further(run))

    def varied(self, run: RunId, overrides: dict[str, Any]) -> RunId:
        """A variant of a run, with further overrides of `train`; it is found once they are in its file.

        A ValueError names an override that is unknown, refused, without effect, or not to be had in this way.
        """
        where = f"overrides of {run.name}"
        changes = flatten(overrides)
        if "seed" in overrides:
            raise ValueError(f"{where}: seed is no override; give the training its seed")
        if functions := [key for key in changes if key.endswith(".function")]:
            raise ValueError(f"{where}: {functions[0]} names code to run; add it to a run in params.yaml")
        present = self.run(run)
        validated(TrainParams, override(present.model_dump(), overrides), where)
        flat = flatten(present.model_dump(mode="json"))
        if same := [key for key, value in changes.items() if flat.get(key) == value]:
            raise ValueError(f"{where}: {same[0]} is {changes[same[0]]} already, which changes nothing; leave that out")
        if not changes:
            raise ValueError(f"{where} change nothing; name a value of train, or leave them out")
        variant = replace(run, variant=variant_of(overrides))
        self._resolved(variant, overrides)
        return variant

    def _further(self, run: RunId) -> dict[str, Any]:
        """The overrides of a variant, from its file."""
        if not run.variant:
            return {}
        file = self.places.variant(run)
        if not file.exists():
            raise ValueError(f"{file} is not here, which says how {run.name} differs from {run.run}; train it here")
        overrides: dict[str, Any] = json.loads(file.read_text())
        if variant_of(overrides) != run.variant:
            raise ValueError(f"{file} was changed: it holds other overrides than its name stands for; bring it back")
        return overrides

    def _resolved(self, run: RunId, variant_overrides: dict[str, Any]) -> TrainParams:
        if run.sweep not in ("", SWEEP):
            raise ValueError(f"there is no sweep {run.sweep!r}; the one that params.yaml defines is {SWEEP!r}")
        overrides = override(self._overrides(run.run), variant_overrides)
        overrides.pop(ENV, None)
        shared = override(self.train.model_dump(), self.ablations.train if run.sweep else {})
        merged = override(shared, overrides)
        if run.seed is not None:
            merged["seed"] = run.seed
        where = f"{run.sweep}: runs.{run.name}" if run.sweep else f"runs.{run.name}"
        train = validated(TrainParams, merged, where)
        train.require_read(overrides, where)
        return validated(OneRun, {"settings": self.of(run), "train": train}, where).train

    def of(self, run: RunId) -> Self:
        """All of it as it holds for one run, whose overrides may change `env` too.

        A ValueError names a run that there is not, or an override of `env` that is unknown or refused.
        """
        if run.sweep == IMPORTED:
            return self
        overrides = {key: value for key, value in self._overrides(run.run).items() if key == ENV}
        env = override({ENV: self.env.model_dump()}, overrides)[ENV]
        return self.model_copy(update={ENV: validated(EnvParams, env, f"runs.{run.run}: {ENV}")})

    def _overrides(self, run: str) -> dict[str, Any]:
        if run not in self.runs:
            raise ValueError(f"there is no run {run!r} under runs:{nearest(run, self.runs)}")
        return {**(self.runs[run] or {})}

    def refusals(self) -> Refusals:
        yield from self._warm_start()
        yield from self._lengths()
        yield from self._worlds()
        yield from self._base()
        if self.engine.kind == "transformers" and self.env.order != "rounds":
            why = "needs an engine that takes requests in while it samples, and engine.kind is transformers"
            rounds = "" if self.env.agent else "env.order: rounds, or "  # in which no agent outside can play
            yield f"env.order: {self.env.order} {why}; set {rounds}engine.kind: vllm"
        baselines = {"as_shipped", "with_examples"}.intersection(self.repro_baselines + self.ablations.baselines)
        if baselines and not self.model.path:
            yield f"{' and '.join(sorted(baselines))} need a model that is shipped; set model.path, or leave them out"
        if ("with_examples" in baselines) != bool(self.evaluate.examples):
            yield "evaluate.examples and the baseline with_examples go together; set both, or neither"
        for name in self.runs:
            if not RUN_NAME.fullmatch(name):
                yield f"runs: {name!r} is to be a folder and a DVC stage; use letters, digits and _ only"
            if name in get_args(stages.Baseline):
                yield f"runs: {name!r} is the name of a baseline; name the run differently"
            self.run(RunId(name))
        for where, names in (("repro_runs", self.repro_runs), ("ablations.runs", self.ablations.runs)):
            for name in [name for name in names if name not in self.runs]:
                yield f"{where} names {name!r}, which runs: does not define{nearest(name, self.runs)}"
        for name in self.ablations.runs:
            self.run(RunId(name, sweep=SWEEP))

    def _warm_start(self) -> Refusals:
        settings = self.warm_start
        passed_through = self.model.path and not settings.fine_tune
        if settings.fine_tune and not self.model.path:
            yield "warm_start.fine_tune: true has no effect on the built-in model; set model.path, or fine_tune: false"
        if settings.conversations and passed_through:
            why = "has no effect on the model of model.path, which is passed through"
            remedy = 'set warm_start.fine_tune: true, or conversations: ""'
            yield f"warm_start.conversations {settings.conversations!r} {why}; {remedy}"
        if settings.demonstrations and self.prepare.asks and self.env.tools.search is None:
            demonstrations = f"warm_start.demonstrations {settings.demonstrations} show how to search"
            yield f"{demonstrations}, and env.tools.search is null; set it to {{}}, or demonstrations: 0"
        for context in settings.contexts:
            yield from (f"warm_start.contexts: {problem}" for problem in context.within(self.env.max_steps))
        lessons = settings.demonstrations or settings.naive_rag_demonstrations or settings.conversations
        if not (lessons or passed_through):
            remedy = "set demonstrations or naive_rag_demonstrations above 0, or conversations to a file"
            yield f"warm_start has nothing to learn from: {remedy}"

    def _lengths(self) -> Refusals:
        """Refuses demonstrations that the limit of steps would cut before their answer."""
        shares = self.prepare.atlas.shares.model_dump()
        actions = max(hops for kind, hops in HOPS.items() if shares[kind]) + 1
        if self.warm_start.demonstrations and BUILT_IN in self.prepare.datasets and actions > self.env.max_steps:
            limit = f"env.max_steps is {self.env.max_steps}"
            remedy = f"raise it to {actions}, or set the shares of longer questions to 0"
            yield f"warm_start.demonstrations take up to {actions} actions, and {limit}; {remedy}"

    def _worlds(self) -> Refusals:
        for name in self.prepare.datasets:
            match self.prepare.worlds.get(name):
                case OthersParams(env="agent", name=meant) if meant in self.env.agents:
                    yield from (f"env.{problem}" for problem in self.env.of_agent(meant))
                case OthersParams(env=kind, name=meant):
                    names = self.env.declared.get(kind, self.env.agents)
                    if meant not in names:
                        section = "agents" if kind == "agent" else kind
                        close = nearest(meant, names) if names else DECLARE
                        yield f"prepare.worlds.{name}.name is {meant!r}, which env.{section} does not define{close}"

    def _base(self) -> Refusals:
        if self.model.base == "four_bit" and not (self.model.adapter and self.learner.ranks == 1):
            settings = f"model.lora.rank is {self.model.lora.rank} and learner has processes times nodes"
            remedy = "set them to 64 and 1, or base: full"
            yield f"model.base: four_bit is for adapters of one process, and {settings}: {self.learner.ranks}; {remedy}"


class OneRun(Section):
    """A run beside all that holds for it."""

    settings: SkipValidation[Params]
    train: SkipValidation[TrainParams]

    def refusals(self) -> Refusals:
        credit = self.train.credit
        tokens = self.settings.env.max_tokens
        if credit.overlong_buffer >= tokens:
            setting = f"credit.overlong_buffer {credit.overlong_buffer} leaves nothing of env.max_tokens {tokens}"
            yield f"{setting} that is not too long; lower it"
        if self.train.rollout.ahead:
            yield from _ahead(self.settings.engine)
        yield from _played_outside(credit, self.settings)
        yield from _unstated_rewards(credit, self.settings)


def _ahead(engine: stages.EngineParams) -> Refusals:
    """Refuses engines that cannot sample an iteration ahead."""
    if engine.kind == "transformers":
        why = "needs an engine that samples while the learner learns, and engine.kind is transformers"
        yield f"rollout.ahead: 1 {why}; set engine.kind: vllm, or ahead: 0"
    if engine.kind == "vllm" and engine.vllm.sleep:
        why = "samples while the learner learns, and with engine.vllm.sleep: true the sampler sleeps then"
        yield f"rollout.ahead: 1 {why}; set one of them back"


def _played_outside(credit: CreditParams, settings: Params) -> Refusals:
    """Refuses credit that the episodes of agents outside do not bear."""
    worlds = [settings.prepare.worlds.get(name) for name in settings.prepare.datasets]
    names = {world.name for world in worlds if isinstance(world, OthersParams) and world.env == "agent"}
    agents = [agent for name, agent in settings.env.agents.items() if name in {settings.env.agent, *names}]
    if any(agent.parallel for agent in agents) and credit.estimator not in ALIKE:
        why = "takes the value of the next step, and steps of requests at the same time have no order"
        yield f"estimator {credit.estimator} {why}; set the agent's parallel: false, or take {' or '.join(ALIKE)}"
    for part in [part for part in ("grounded", "progress") if agents and credit.rewards.weights[part]]:
        yield f"credit.rewards.{part} has no effect: nobody sees what an agent outside shows; set it to 0"


def _unstated_rewards(credit: CreditParams, settings: Params) -> Refusals:
    """Refuses parts of the reward that neither a function nor an environment or agent states."""
    stated = {part for agent in settings.env.agents.values() for part in agent.rewards}
    for part, reward in credit.rewards.own.items():
        if (part in stated) == bool(reward.function):
            why = "a function and a part of an agent's" if reward.function else "no function, and no part of an agent's"
            yield f"credit.rewards.{part} is {why}; give it a function, or name it in rewards of one of env.agents"
    data = settings.prepare
    unstated = ([] if data.asks else OF_ANSWERS) + ([] if data.plays else ["env"])
    for part in [part for part in unstated if credit.rewards.weights[part]]:
        why = f"no environment of the data sets {', '.join(data.datasets)} states it"
        remedy = f"set it to 0, and weigh {'success' if data.asks else 'env or success'}"
        yield f"credit.rewards.{part} {credit.rewards.weights[part]} has no effect, because {why}; {remedy}"
