"""All of params.yaml: its sections, and each run as they hold for it."""

from __future__ import annotations

import hashlib
import json
import os
import re
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Self

from pydantic import BaseModel, Field, SkipValidation

from agent_r1.params import stages
from agent_r1.params.env import EnvParams
from agent_r1.params.places import RAW, SWEEP, UNREAD, Places, RunId
from agent_r1.params.prepare import OthersParams, PrepareParams
from agent_r1.params.sections import Natural, Section, flatten, nearest, override, validated
from agent_r1.params.train import TrainParams

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

    runs: Annotated[list[str], Field(min_length=1)]
    seeds: Annotated[Seeds, Field(min_length=1)]
    baselines: Annotated[list[stages.Baseline], Field(min_length=1)]
    equal: stages.Budget = "episodes"  # the report names runs that differ in it
    references: list[str]  # all are compared with them; []: with the first run and the first baseline
    closer: CloserParams
    train: dict[str, Any]  # over the `train` section, and under the overrides of each run

    def seeds_of(self, run: str) -> list[int]:
        """The seeds that a run is trained with."""
        return self.seeds + (self.closer.seeds if run in self.closer.runs else [])


class Params(Section):
    """All of params.yaml."""

    places: Places
    prepare: PrepareParams
    search: stages.SearchParams
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
        overrides = {key: value for key, value in self._overrides(run.run).items() if key == ENV}
        env = override({ENV: self.env.model_dump()}, overrides)[ENV]
        return self.model_copy(update={ENV: validated(EnvParams, env, f"runs.{run.run}: {ENV}")})

    def _overrides(self, run: str) -> dict[str, Any]:
        if run not in self.runs:
            raise ValueError(f"there is no run {run!r} under runs:{nearest(run, self.runs)}")
        return {**(self.runs[run] or {})}


class OneRun(Section):
    """A run beside all that holds for it."""

    settings: SkipValidation[Params]
    train: SkipValidation[TrainParams]
