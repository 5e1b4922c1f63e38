"""prefect.yaml against the code: flows that exist, parameters that they take, nothing that only one machine has."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
import yaml
from httpx import HTTPStatusError
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.filters import FlowRunFilter, FlowRunFilterDeploymentId
from prefect.client.schemas.objects import FlowRun
from prefect.client.schemas.sorting import FlowRunSort
from prefect.flows import load_flow_from_entrypoint
from prefect.settings import Settings
from prefect.states import Running

from flows.operation.deploy import CRASH_DETECTION, SILENCE_S, deploy
from flows.operation.deployments import REGISTERED, expired
from flows.operation.doctor import OK, Finding, prefect
from flows.operation.promote import PROMOTION
from flows.operation.serving import POOL, require_server

ROOT = Path(__file__).parents[3]
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
        assert deployment["work_pool"] == {"name": POOL}
    assert CONTENT["pull"] == [{"prefect.deployments.steps.set_working_directory": {"directory": "."}}]


def test_every_deployment_says_what_it_does() -> None:
    assert all(each["description"].endswith(".") and each["tags"] for each in DEPLOYMENTS.values())


def test_the_evaluation_is_on_a_schedule() -> None:
    assert [schedule["cron"] for schedule in DEPLOYMENTS["nightly"]["schedules"]] == ["0 3 * * *"]
    assert {name for name, each in DEPLOYMENTS.items() if "schedules" in each} == {"nightly"}


def test_triggers_follow_events_that_are_sent() -> None:
    followed = {
        (name, event)
        for name, deployment in DEPLOYMENTS.items()
        for trigger in deployment.get("triggers", [])
        for event in trigger["expect"]
    }
    assert followed == {("after-training", REGISTERED)}


def test_a_server_that_answers_is_accepted_and_takes_a_flow(prefect_api: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PREFECT_API_URL", prefect_api)
    require_server(prefect_api)
    assert prefect() == Finding(OK, f"a flow went through {prefect_api}")


@pytest.fixture(scope="module")
def deployed(prefect_api: str) -> Iterator[None]:
    """The project's deployments are on the server."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(ROOT)
        patch.setenv("PREFECT_API_URL", prefect_api)
        deploy()
        yield


@pytest.fixture
def client(deployed: None) -> Iterator[SyncPrefectClient]:
    with get_client(sync_client=True) as client:
        yield client


def on_the_server(client: SyncPrefectClient) -> tuple[set[str], list[str]]:
    """The names of the deployments, and the ids of the automations that detect crashes."""
    names = {found.name for found in client.read_deployments()}
    return names, [str(found.id) for found in client.read_automations_by_name(CRASH_DETECTION.name)]


def test_deploying_again_after_a_restart_closes_what_was_left_and_changes_nothing_else(
    client: SyncPrefectClient,
) -> None:
    names, detectors = on_the_server(client)
    assert set(DEPLOYMENTS) <= names
    assert len(detectors) == 1
    pool = client.read_work_pool(POOL)
    assert (pool.type, pool.concurrency_limit) == ("process", 1)
    assert client.read_global_concurrency_limit_by_name(PROMOTION).limit == 1
    training = client.read_deployment_by_name("training/training")
    run = client.create_flow_run_from_deployment(training.id, parameters={"run": "grpo", "seed": 3})
    for refused in ({"run": "pppo"}, {"run": "ppo", "seed": -1}, {"run": "ppo", "overrides": "iterations"}):
        field = [*refused][-1]
        with pytest.raises(HTTPStatusError) as answer:
            client.create_flow_run_from_deployment(training.id, parameters=refused)
        assert answer.value.response.status_code == 409
        assert f"Validation failed for field '{field}'" in answer.value.response.json()["detail"]
    nightly = client.read_deployment_by_name("evaluation/nightly")
    with pytest.raises(HTTPStatusError):
        client.create_flow_run_from_deployment(nightly.id, parameters={"dataset": "musique"})
    client.create_flow_run_from_deployment(nightly.id, parameters={"dataset": "atlas"})
    client.set_flow_run_state(run.id, Running(), force=True)

    deploy(restarted=True)
    assert on_the_server(client) == (names, detectors)  # anew it would forget which runs it waits for
    assert client.read_flow_run(run.id).state_name == "Crashed"


def test_of_the_nights_that_waited_for_the_worker_one_runs_and_none_of_a_paused_schedule(
    client: SyncPrefectClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    nightly = client.read_deployment_by_name("evaluation/nightly")
    begin, end = (str(datetime.now(UTC) + timedelta(days=days)) for days in (-5, 1))
    wanted = {"start_time": begin, "end_time": end, "min_runs": 6}
    client._client.post(f"/deployments/{nightly.id}/schedule", json=wanted)
    by_hand = client.create_flow_run_from_deployment(nightly.id)

    def nights() -> list[FlowRun]:
        ours = FlowRunFilter(deployment_id=FlowRunFilterDeploymentId(any_=[nightly.id]))
        found = client.read_flow_runs(flow_run_filter=ours, sort=FlowRunSort.EXPECTED_START_TIME_ASC)
        return [run for run in found if run.auto_scheduled]

    first = nights()[0]
    monkeypatch.setenv("PREFECT__RUNTIME__DEPLOYMENT__ID", str(nightly.id))
    monkeypatch.setenv("PREFECT__RUNTIME__FLOW_RUN__ID", str(first.id))
    client.set_flow_run_state(first.id, Running(), force=True)
    assert expired() is None
    past = [run for run in nights() if run.expected_start_time < datetime.now(UTC)]
    assert [run.state_name for run in past] == ["Running", *["Cancelled"] * (len(past) - 1)]
    assert len(past) == 5
    assert f"{first.name}, which waited too, stands for it" in str(past[1].state)
    assert client.read_flow_run(by_hand.id).state_name == "Scheduled"
    assert all(run.state_name == "Scheduled" for run in nights() if run not in past)

    client.update_deployment_schedule(nightly.id, nightly.schedules[0].id, active=False)
    state = expired()
    assert state is not None
    assert (state.name, state.message) == ("Cancelled", "its schedule was paused while it waited")
    monkeypatch.setenv("PREFECT__RUNTIME__FLOW_RUN__ID", str(by_hand.id))
    assert expired() is None


def test_whoever_starts_a_flow_it_gives_two_signs_of_life_before_it_counts_as_crashed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A process in a clone's root finds the setting; test_serving.py asks a worker's."""
    monkeypatch.chdir(ROOT)
    frequency = Settings().flows.heartbeat_frequency
    assert frequency is not None
    assert 2 * frequency < SILENCE_S
