"""prefect.yaml against the code: flows that exist, parameters that they take, nothing that only one machine has."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from prefect.flows import load_flow_from_entrypoint

from flows.deploy import POOL
from flows.serving import POOL as SERVED_POOL

ROOT = Path(__file__).parents[2]
CONTENT = yaml.safe_load((ROOT / "prefect.yaml").read_text())
DEPLOYMENTS: dict[str, dict[str, Any]] = {each["name"]: each for each in CONTENT["deployments"]}


def parameters(deployment: dict[str, Any]) -> set[str]:
    """Those that it sets, and those that its triggers set."""
    triggered = [name for trigger in deployment.get("triggers", []) for name in trigger["parameters"]]
    return {*deployment.get("parameters", {}), *triggered}


@pytest.mark.parametrize("name", DEPLOYMENTS)
def test_a_deployment_is_a_flow_with_its_parameters(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.chdir(ROOT)
    flow = load_flow_from_entrypoint(DEPLOYMENTS[name]["entrypoint"], use_placeholder_flow=False)
    taken = flow.parameters.properties
    assert parameters(DEPLOYMENTS[name]) <= set(taken)
    if {"schedules", "triggers"} & set(DEPLOYMENTS[name]):  # nobody is there to be asked
        assert set(flow.parameters.required) <= parameters(DEPLOYMENTS[name])


def test_deployments_run_in_the_pool_where_the_worker_was_started() -> None:
    for deployment in DEPLOYMENTS.values():
        assert deployment["work_pool"] == {"name": POOL, "job_variables": {"working_dir": "."}}
    assert CONTENT["pull"] == [{"prefect.deployments.steps.set_working_directory": {"directory": "."}}]
    assert SERVED_POOL == POOL


def test_the_evaluation_is_on_a_schedule() -> None:
    assert [schedule["cron"] for schedule in DEPLOYMENTS["nightly"]["schedules"]] == ["0 3 * * *"]
    assert {name for name, each in DEPLOYMENTS.items() if "schedules" in each} == {"nightly"}


def test_triggers_follow_deployments_that_exist() -> None:
    followed = {
        (name, related["prefect.resource.name"])
        for name, deployment in DEPLOYMENTS.items()
        for trigger in deployment.get("triggers", [])
        for related in trigger["match_related"]
    }
    assert followed == {("after-training", "training")}
