"""params.yaml as typed values: every knob, its range, and the combinations that are refused."""

from __future__ import annotations

import hashlib
import json
import re
from collections import Counter
from collections.abc import Iterator
from copy import deepcopy
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Any, Self, get_args

import yaml
from pydantic import BaseModel, Field

from agent_r1.params.credit import OF_ANSWERS, RewardWeights
from agent_r1.params.env import EnvParams
from agent_r1.params.places import PARAMS, SWEEP, Places, RunId
from agent_r1.params.prepare import PrepareParams
from agent_r1.params.sections import Natural, Section, flatten, nearest, override, validated
from agent_r1.params.stages import (
    Baseline,
    EngineParams,
    EvaluateParams,
    LearnerParams,
    ModelParams,
    OperateParams,
    PromoteParams,
    SearchParams,
    WarmStartParams,
)
from agent_r1.params.train import TrainParams
from agent_r1.params.worlds import OthersParams

SHIPPED = Path(__file__).with_name("shipped.yaml")  # the project's params.yaml, which travels with the package
ENV = "env"  # the section that a run may override beside `train`
Seeds = list[Annotated[Natural, Field(strict=True)]]  # as they go into commands
_RUN_NAME = re.compile(r"\w+", re.ASCII)


class CloserParams(Section):
    """Runs of the sweep that get further seeds."""

    runs: list[str]
    seeds: Seeds

    def objections(self) -> Iterator[str]:
        yield from _repeated(runs=self.runs, seeds=self.seeds)
        if bool(self.runs) != bool(self.seeds):
            yield "runs and seeds belong together; give both, or [] for both"


class AblationsParams(Section):
    """The sweep: every run with every seed, some with further ones, and baselines without."""

    runs: Annotated[list[str], Field(min_length=1)]
    seeds: Annotated[Seeds, Field(min_length=1)]
    baselines: Annotated[list[Baseline], Field(min_length=1)]
    references: list[str]  # what all are compared with; []: the first run and the first baseline
    closer: CloserParams
    train: dict[str, Any]  # over the `train` section of every run

    def seeds_of(self, run: str) -> list[int]:
        """The seeds that a run is trained with."""
        return self.seeds + (self.closer.seeds if run in self.closer.runs else [])

    def objections(self) -> Iterator[str]:
        yield from _repeated(
            runs=self.runs, seeds=self.seeds, baselines=list(self.baselines), references=self.references
        )
        for name in self.references:
            if name not in (agents := [*self.runs, *self.baselines]):
                yield f"references names {name!r}, which is none of its runs and baselines{nearest(name, agents)}"
        for run in self.closer.runs:
            if run not in self.runs:
                yield f"closer.runs names {run!r}, which runs does not{nearest(run, self.runs)}"
        for seed in self.closer.seeds:
            if seed in self.seeds:
                yield f"closer.seeds names {seed}, which every run has already; give it further ones"
        if "seed" in self.train:
            yield "train.seed has no effect, every run is trained with each of `seeds`; leave it out"


def _repeated(**lists: list[Any]) -> Iterator[str]:
    for what, values in lists.items():
        repeated = [value for value, count in Counter(values).items() if count > 1]
        if repeated:
            yield f"{what} names {repeated[0]!r} more than once; leave one of them"


class Params(Section):
    """All of params.yaml."""

    places: Places
    prepare: PrepareParams
    search: SearchParams
    model: ModelParams
    learner: LearnerParams
    engine: EngineParams
    warm_start: WarmStartParams
    env: EnvParams
    train: TrainParams
    evaluate: EvaluateParams
    promote: PromoteParams
    runs: dict[str, dict[str, Any] | None]
    repro_runs: list[str]
    repro_baselines: list[Baseline]
    ablations: AblationsParams
    operate: OperateParams

    @property
    def gpus(self) -> int:
        """How many GPUs of a machine a training holds, 0 for all; its learner and its sampler share them."""
        return self.engine.gpus and max(self.engine.gpus, self.learner.processes)

    def run(self, run: RunId) -> TrainParams:
        """The `train` section with the overrides of one run, and then with those of its variant, seed and sweep.

        A ValueError names a run, variant or sweep that there is not, or an override that is unknown, refused or without
        effect.
        """
        return self._resolved(run, self._further(run))

    def varied(self, run: RunId, further: dict[str, Any]) -> RunId:
        """A variant of a run, with further overrides of `train`; it is found once they are in its file.

        A ValueError names an override that is unknown, refused, without effect, or not to be had in this way.
        """
        where = f"overrides of {run.name}"
        if "seed" in further:
            raise ValueError(f"{where}: seed is no override; give the training its seed")
        if own := [key for key in flatten(further) if key.endswith(".function")]:
            raise ValueError(f"{where}: {own[0]} names code to run; add it to a run in params.yaml")
        present = self.run(run)
        validated(TrainParams, override(present.model_dump(), further), where)
        flat = flatten(present.model_dump(mode="json"))
        for key, value in flatten(further).items():
            if flat.get(key) == value:
                raise ValueError(f"{where}: {key} is {value} already, which would change nothing; leave that out")
        if not flatten(further):
            raise ValueError(f"{where} change nothing; name a value of train, or leave them out")
        variant = replace(run, variant=variant_of(further))
        self._resolved(variant, further)
        return variant

    def _further(self, run: RunId) -> dict[str, Any]:
        """The overrides of a variant, from its file."""
        if not run.variant:
            return {}
        file = self.places.variant(run)
        if not file.exists():
            raise ValueError(f"{file} is not here, which says how {run.name} differs from {run.run}; train it here")
        further: dict[str, Any] = json.loads(file.read_text())
        if variant_of(further) != run.variant:
            raise ValueError(f"{file} was changed: it holds other overrides than its name stands for; bring it back")
        return further

    def _resolved(self, run: RunId, further: dict[str, Any]) -> TrainParams:
        if run.sweep not in ("", SWEEP):
            raise ValueError(f"there is no sweep {run.sweep!r}; the one that params.yaml defines is {SWEEP!r}")
        overrides, max_tokens = override(self._overrides(run.run), further), self.of(run).env.max_tokens
        overrides.pop(ENV, None)
        merged = override(self.train.model_dump(), overrides)
        of_the_seed = {} if run.seed is None else {"seed": run.seed}
        if run.sweep:
            merged = override(merged, self.ablations.train)
        where = f"{run.sweep}: runs.{run.name}" if run.sweep else f"runs.{run.name}"
        resolved = validated(TrainParams, merged | of_the_seed, where)
        resolved.require_read(overrides, where)
        self._require_stated(resolved.credit.rewards, where)
        if resolved.credit.overlong_buffer >= max_tokens:
            raise ValueError(
                f"{where}: credit.overlong_buffer {resolved.credit.overlong_buffer} leaves nothing of env.max_tokens "
                f"{max_tokens} that is not too long; lower it"
            )
        if resolved.rollout.ahead and self.engine.kind == "transformers":
            raise ValueError(
                f"{where}: rollout.ahead: 1 needs an engine that samples while the learner learns, and engine.kind is "
                "transformers, which samples in the learner's process; set engine.kind: vllm, or ahead: 0"
            )
        if resolved.rollout.ahead and self.engine.kind == "vllm" and self.engine.vllm.sleep:
            raise ValueError(
                f"{where}: rollout.ahead: 1 samples while the learner learns, and with engine.vllm.sleep: true the "
                "sampler sleeps then; set one of them back"
            )
        return resolved

    def _require_stated(self, rewards: RewardWeights, where: str) -> None:
        """Raises ValueError for a weight of what no environment of the prepared data sets states."""
        unstated = ([] if self.prepare.asks else OF_ANSWERS) + ([] if self.prepare.plays else ["env"])
        for part in unstated:
            if weight := rewards.weights[part]:
                asked = ", ".join(self.prepare.datasets)
                raise ValueError(
                    f"{where}: credit.rewards.{part} {weight} has no effect, because no environment of the data sets "
                    f"{asked} states it; set it to 0, and weigh {'success' if self.prepare.asks else 'env or success'}"
                )

    def of(self, run: RunId) -> Self:
        """All of it as it holds for one run, whose overrides may change `env` too.

        A ValueError names a run that there is not, or an override of `env` that is unknown or refused.
        """
        given = {key: value for key, value in self._overrides(run.run).items() if key == ENV}
        env = override({ENV: self.env.model_dump()}, given)[ENV]
        return self.model_copy(update={ENV: validated(EnvParams, env, f"runs.{run.run}: {ENV}")})

    def _overrides(self, run: str) -> dict[str, Any]:
        if run not in self.runs:
            raise ValueError(f"there is no run {run!r} under runs:{nearest(run, self.runs)}")
        return {**(self.runs[run] or {})}

    def objections(self) -> Iterator[str]:
        if self.warm_start.fine_tune and not self.model.path:
            yield (
                "warm_start.fine_tune: true has no effect on the built-in model, which is trained on the "
                "demonstrations anyway; set model.path, or fine_tune: false"
            )
        passed_through = self.model.path and not self.warm_start.fine_tune
        if self.warm_start.conversations and passed_through:
            yield (
                f"warm_start.conversations {self.warm_start.conversations!r} has no effect on the model of model.path, "
                'which is passed through; set warm_start.fine_tune: true, or conversations: ""'
            )
        for name in self.prepare.datasets:
            match self.prepare.worlds.get(name):
                case OthersParams(env=env, name=meant) if meant not in (known := self.env.declared[env]):
                    close = nearest(meant, known) if known else "; declare it there"
                    yield f"prepare.worlds.{name}.name is {meant!r}, which env.{env} does not define{close}"
        if self.engine.kind == "transformers" and self.env.order != "rounds":
            yield (
                f"env.order: {self.env.order} needs an engine that takes requests in while it samples, and "
                "engine.kind is transformers; set env.order: rounds, or engine.kind: vllm"
            )
        if self.warm_start.demonstrations and self.prepare.asks and self.env.tools.search is None:
            yield (
                f"warm_start.demonstrations {self.warm_start.demonstrations} show how to search, and env.tools.search "
                "is null; set it to {}, or demonstrations: 0"
            )
        if self.warm_start.demonstrations and not passed_through and self.env.context.kind == "summary":
            yield (
                f"warm_start.demonstrations {self.warm_start.demonstrations} hold no summaries, and env.context.kind "
                "is summary; set it for single runs, as runs.NAME.env.context, or set demonstrations: 0"
            )
        if not (self.warm_start.teaches or passed_through):
            yield (
                "warm_start has nothing to learn from: set demonstrations or naive_rag_demonstrations above 0, or "
                "conversations to a file"
            )
        for name in self.runs:
            if not _RUN_NAME.fullmatch(name):
                yield f"runs: {name!r} is to be a folder and a DVC stage; use letters, digits and _ only"
            if name in get_args(Baseline):
                yield f"runs: {name!r} is the name of a baseline; name the run differently"
            self.run(RunId(name))
        for where, names in (("repro_runs", self.repro_runs), ("ablations.runs", self.ablations.runs)):
            for name in names:
                if name not in self.runs:
                    yield f"{where} names {name!r}, which runs: does not define{nearest(name, self.runs)}"
        for name in self.ablations.runs:
            self.run(RunId(name, sweep=SWEEP))


def load(path: Path = Path(PARAMS)) -> Params:
    """Reads and checks a parameter file.

    A FileNotFoundError says that there is none; a ValueError names what is unknown, missing or out of range in it.
    """
    if not path.exists():
        raise FileNotFoundError(f"{path.absolute()} does not exist; run from the project's root")
    try:
        content = deepcopy(_parsed(path.read_text()))
    except (yaml.YAMLError, ValueError, RecursionError, AttributeError, LookupError) as fault:  # PyYAML on odd scalars
        mark = getattr(fault, "problem_mark", None)
        where = f" at line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        problem = str(getattr(fault, "problem", None) or fault).splitlines()[0]
        raise ValueError(f"{path} cannot be read as YAML{where}: {problem}") from fault
    if not isinstance(content, dict):
        raise ValueError(f"{path}: expected a mapping of sections, found {type(content).__name__}")
    return validated(Params, content, str(path))


@lru_cache(maxsize=8)
def _parsed(text: str) -> Any:
    """What YAML says; a stage asks several times, and its reader takes longer than all checks."""
    return yaml.safe_load(text)


def fingerprint(*parts: Any) -> str:
    """A short stable hash of parameters and other JSON-like values."""
    plain = [part.model_dump(mode="json") if isinstance(part, BaseModel) else part for part in parts]
    return hashlib.sha256(json.dumps(plain, sort_keys=True).encode()).hexdigest()[:16]


def variant_of(further: dict[str, Any]) -> str:
    """The name of a variant, by its overrides."""
    return fingerprint(further)[:8]
