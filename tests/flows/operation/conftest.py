"""Versions as the tests of the wing register them: a descriptor of any policy, in a store of the test's own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from agent_r1 import tracking
from agent_r1.tracking import registry
from agent_r1.tracking.registry import Descriptor, Version

Register = Callable[..., Version]


@pytest.fixture(scope="session")
def register_descriptor() -> Register:
    """Registers a policy by its hash, as of a run of its own in MLflow; further fields take the place of plain ones."""

    def register(policy_hash: str, label: str = "ppo", **changes: Any) -> Version:
        fields: dict[str, Any] = {
            "label": label,
            "run": label,
            "seed": 0,
            "sweep": "",
            "mlflow_run_id": tracking.start(label, {}, {"of": policy_hash}).run_id,
            "policy": "outputs/train/ppo/checkpoint/policy",
            "policy_hash": policy_hash,
            "policy_version": 2,
            "dvc_file": "",
            "dvc_hash": "",
            "git_commit": "c0ffee",
            "data_hash": "",
            "questions": "5" * 64,
            "passages": "6" * 64,
            "index": "7" * 64,
            "prompt": "8" * 64,
            "config": "9" * 16,
        }
        return registry.register(Descriptor(**{**fields, **changes}))

    return register
