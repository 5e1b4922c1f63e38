"""params.yaml as typed values: every knob, its range, and the combinations that are refused."""

from __future__ import annotations

import hashlib
import json
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, get_args

import yaml
from pydantic import BaseModel, Field

from agent_r1.params.places import PARAMS, Places, RunId
from agent_r1.params.sections import Count, Natural, Section, nearest, override, validated
from agent_r1.params.stages import (
    PROTOCOLS,
    AtlasParams,
    Baseline,
    BM25Params,
    DenseParams,
    EngineParams,
    EnvParams,
    EvaluateParams,
    FilesParams,
    HybridParams,
    LoraParams,
    ModelParams,
    OperateParams,
    PrepareParams,
    PromoteParams,
    Protocol,
    RemoteParams,
    SearchParams,
    SplitParams,
    WarmStartParams,
)
from agent_r1.params.train import (
    CanaryTolerance,
    CreditParams,
    FilterParams,
    KeepParams,
    MonitorParams,
    RewardWeights,
    TrainParams,
    UpdateParams,
)

SHIPPED = Path(__file__).with_name("shipped.yaml")  # the project's params.yaml, which travels with the package
SWEEP = "ablations"  # the section that lists runs and seeds, and the name of its outputs
_RUN_NAME = re.compile(r"\w+", re.ASCII)


class AblationsParams(Section):
    """The sweep: every run with every seed."""

    runs: Annotated[list[str], Field(min_length=1)]
    seeds: Annotated[list[Natural], Field(min_length=1)]
    iterations: Count

    def objections(self) -> Iterator[str]:
        for what, values in (("runs", self.runs), ("seeds", self.seeds)):
            repeated = [value for value, count in Counter(values).items() if count > 1]
            if repeated:
                yield f"{what} names {repeated[0]!r} more than once; leave one of them"


class Params(Section):
    """All of params.yaml."""

    places: Places
    prepare: PrepareParams
    search: SearchParams
    model: ModelParams
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

    def run(self, run: RunId) -> TrainParams:
        """The `train` section with the overrides of one run, and then with those of its seed and its sweep.

        Raises:
            ValueError: no such run or sweep, or an override is unknown, refused or without effect.
        """
        if run.run not in self.runs:
            raise ValueError(f"there is no run {run.run!r} under runs:{nearest(run.run, self.runs)}")
        if run.sweep not in ("", SWEEP):
            raise ValueError(f"there is no sweep {run.sweep!r}; the one that params.yaml defines is {SWEEP!r}")
        overrides = self.runs[run.run] or {}
        merged = override(self.train.model_dump(), overrides)
        of_the_seed = {} if run.seed is None else {"seed": run.seed}
        of_the_sweep = {"iterations": self.ablations.iterations} if run.sweep else {}
        where = f"{run.sweep}: runs.{run.run}" if run.sweep else f"runs.{run.run}"
        resolved = validated(TrainParams, merged | of_the_seed | of_the_sweep, where)
        resolved.require_read(overrides, where)
        return resolved

    def objections(self) -> Iterator[str]:
        if self.warm_start.fine_tune and not self.model.path:
            yield (
                "warm_start.fine_tune: true has no effect on the built-in model, which is trained on the "
                "demonstrations anyway; set model.path, or fine_tune: false"
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

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: a key is unknown or missing, or a value is out of range; the message names it.
    """
    if not path.exists():
        raise FileNotFoundError(f"{path.absolute()} does not exist; run from the project's root")
    content = yaml.safe_load(path.read_text())
    if not isinstance(content, dict):
        raise ValueError(f"{path}: expected a mapping of sections, found {type(content).__name__}")
    return validated(Params, content, str(path))


def fingerprint(*parts: Any) -> str:
    """A short stable hash of parameters and other JSON-like values."""
    plain = [part.model_dump(mode="json") if isinstance(part, BaseModel) else part for part in parts]
    return hashlib.sha256(json.dumps(plain, sort_keys=True).encode()).hexdigest()[:16]
