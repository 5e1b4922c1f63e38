"""Versions as the tests of the wing register them: a descriptor of any policy, in a store of the test's own."""

from collections.abc import Callable
from typing import Any

import pytest

from agent_r1.tracking import registry
from agent_r1.tracking.registry import Version
from tests.descriptors import describe

Register = Callable[..., Version]


@pytest.fixture(scope="session")
def register_descriptor() -> Register:
    """Registers a policy by its hash, as of a run of its own in MLflow; further fields take the place of plain ones."""

    def register(policy_hash: str, label: str = "ppo", **changes: Any) -> Version:
        plain = {"policy": "outputs/train/ppo/checkpoint/policy"}
        return registry.register(describe(policy_hash, label, **plain | changes))

    return register
