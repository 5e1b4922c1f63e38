"""Descriptors of policies, as trainings register them."""

from typing import Any

from agent_r1 import tracking
from agent_r1.params.places import RunId
from agent_r1.tracking.registry import Descriptor


def describe(policy_hash: str, label: str = "ppo", **changes: Any) -> Descriptor:
    """A policy by its hash, of a run of its own in MLflow; further fields take the place of plain ones."""
    run = RunId.parse(label)
    fields: dict[str, Any] = {
        "label": label,
        "run": run.run,
        "seed": run.seed or 0,
        "sweep": "",
        "mlflow_run_id": changes.get("mlflow_run_id") or tracking.start(label, {}, {"of": policy_hash}).run_id,
        "policy": f"outputs/train/{label}/checkpoint/policy",
        "policy_hash": policy_hash,
        "policy_version": 2,
        "git_commit": "c0ffee",
        **dict.fromkeys(("dvc_file", "dvc_hash", "data_hash"), ""),
        **{name: f"{number}" * 64 for number, name in enumerate(("questions", "passages", "index", "prompt"), start=5)},
        "config": "9" * 16,
    }
    return Descriptor(**{**fields, **changes})
