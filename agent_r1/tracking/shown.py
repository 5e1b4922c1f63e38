"""What MLflow shows of an agent: its params, the columns to group by first."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from agent_r1.params import Params, TrainParams


def run_params(variant: str, params: Params, train: TrainParams) -> dict[str, Any]:
    """What MLflow shows of a trained run: the columns to group by, then its whole configuration, flattened."""
    switches = train.credit.advantage_mask.model_dump()
    on = [name for name, value in switches.items() if value]
    return {
        "variant": variant,
        "algorithm": train.credit.estimator,
        "loss_mask": train.credit.loss_mask,
        "advantage_mask": "+".join(on) if 0 < len(on) < len(switches) else bool(on),
        "seed": train.seed,
        "engine": params.engine.kind,
        **flatten(params.model_dump(mode="json", include={"model", "warm_start", "env"})),
        **flatten(train.model_dump(mode="json", exclude={"seed", "keep"})),
    }


def baseline_params(variant: str, params: Params) -> dict[str, Any]:
    """The same of the warm-started model."""
    sections = params.model_dump(mode="json", include={"model": True, "warm_start": True, "env": True})
    return _untrained_params(variant, params, params.warm_start.seed) | flatten(sections)


def model_params(variant: str, params: Params, model: str) -> dict[str, Any]:
    """The same of a model that no stage has made, by its folder or hub id; the seed is the evaluation's."""
    shown = {"model": {"path": model, "dtype": params.model.dtype}, "env": params.env.model_dump(mode="json")}
    return _untrained_params(variant, params, params.evaluate.seed) | flatten(shown)


def _untrained_params(variant: str, params: Params, seed: int) -> dict[str, Any]:
    """Of an agent that no reinforcement learning touched: it has no algorithm and no masks."""
    columns = dict.fromkeys(("algorithm", "loss_mask", "advantage_mask"), "none")
    return {"variant": variant, **columns, "seed": seed, "engine": params.engine.kind}


def flatten(nested: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested mappings as one, with dots between the keys: {"a": {"b": 1}} is {"a.b": 1}."""
    flat: dict[str, Any] = {}
    for key, value in nested.items():
        flat |= flatten(value, f"{prefix}{key}.") if isinstance(value, Mapping) else {f"{prefix}{key}": value}
    return flat
