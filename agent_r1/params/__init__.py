"""params.yaml as typed values: every knob, its range, and the combinations that are refused."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Annotated, Any, Self

import yaml
from pydantic import BaseModel, Field, model_validator

from agent_r1.params.agent import EnvParams, ModelParams, WarmStartParams
from agent_r1.params.credit import CreditParams, FilterParams, RewardWeights
from agent_r1.params.monitor import MonitorParams
from agent_r1.params.prepare import AtlasParams, HotpotParams, PrepareParams
from agent_r1.params.search import BM25Params, DenseParams, HybridParams, RemoteParams, SearchParams
from agent_r1.params.sections import Natural, Section, nearest, override, validated
from agent_r1.params.train import TrainParams
from agent_r1.params.update import UpdateParams

__all__ = [
    "AtlasParams",
    "BM25Params",
    "CreditParams",
    "DenseParams",
    "EnvParams",
    "FilterParams",
    "HotpotParams",
    "HybridParams",
    "ModelParams",
    "MonitorParams",
    "Params",
    "PrepareParams",
    "RemoteParams",
    "RewardWeights",
    "SearchParams",
    "TrainParams",
    "UpdateParams",
    "WarmStartParams",
    "fingerprint",
    "load",
]


class EvaluateParams(Section):
    seed: Natural
    questions: Natural
    bootstrap_samples: Annotated[int, Field(ge=100)]


class Params(Section):
    prepare: PrepareParams
    search: SearchParams
    model: ModelParams
    warm_start: WarmStartParams
    env: EnvParams
    train: TrainParams
    evaluate: EvaluateParams
    runs: dict[str, dict[str, Any] | None]
    repro_runs: list[str]

    @model_validator(mode="after")
    def _runs_resolve(self) -> Self:
        for name in self.runs:
            self.run(name)
        for name in self.repro_runs:
            if name not in self.runs:
                raise ValueError(f"repro_runs names {name!r}, which runs: does not define{nearest(name, self.runs)}")
        return self

    def run(self, name: str) -> TrainParams:
        """The `train` section with the overrides of one run.

        Raises:
            ValueError: no such run, or its overrides are unknown or refused.
        """
        if name not in self.runs:
            raise ValueError(f"there is no run {name!r} under runs:{nearest(name, self.runs)}")
        merged = override(self.train.model_dump(), self.runs[name] or {})
        return validated(TrainParams, merged, f"runs.{name}")


def load(path: Path = Path("params.yaml")) -> Params:
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
