"""prefect.yaml against the code: flows that exist, parameters that they take, nothing that only one machine has.

And the flow of a training with overrides of its own: its scores are shown, and it trains a run of its own, which has a
lineage, though no dvc.lock knows of it. A cancel is tested where the flow is served, and with the pipeline.
"""

import io
import json
import os
import re
import shlex
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import pytest
import yaml
from httpx import HTTPStatusError
from mlflow import MlflowClient
from prefect import flow
from prefect.blocks.notifications import CustomWebhookNotificationBlock
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.filters import ArtifactFilter, ArtifactFilterKey, FlowRunFilter, FlowRunFilterDeploymentId
from prefect.client.schemas.objects import FlowRun
from prefect.client.schemas.sorting import FlowRunSort
from prefect.flows import load_flow_from_entrypoint
from prefect.settings import PREFECT_API_URL, temporary_settings
from prefect.states import Failed, Running
from rich.console import Console

from agent_r1.files import sha256
from agent_r1.learn import checkpoint
from agent_r1.params import load, variant_of
from agent_r1.params.places import RunId
from agent_r1.tracking import registry
from agent_r1.tracking.registry import Version
from flows.operation.deploy import CRASH_DETECTION, deploy
from flows.operation.deployments import _decide, expired, training
from flows.operation.doctor import prefect
from flows.operation.lineage import lineage
from flows.operation.promote import PROMOTION
from flows.operation.serving import POOL, require_server
from flows.pipeline import IterationsDone
from tests.answering import Heard, answering
from tests.cases import tables
from tests.fixtures import ROOT, Inside, WriteParams

CONTENT = yaml.safe_load((ROOT / "prefect.yaml").read_text())
DEPLOYMENTS: dict[str, dict[str, Any]] = {each["name"]: each for each in CONTENT["deployments"]}

# The stages that a training starts from, as done as the small project has them.
DONE = "stages: {prepare: {cmd: 'true'}, index: {cmd: 'true'}, warm_start: {cmd: 'true'}}"
TRAIN = """
import os
os.chdir({folder!r})
from flows.terminal import configure_logging
from flows.operation.deployments import training
configure_logging()  # shows the stages' lines
training('ppo', 7, {further})
"""
FURTHER = {"credit": {"lam": 0.5}}
LABEL = RunId("ppo", 7, variant=variant_of(FURTHER)).label  # ppo-0a1b2c3d-seed7
ITERATIONS = 2  # one of the critic alone
SCRIPTS, SECRET = Path(sys.executable).parent, "s3cret"
REFUSED = tables(Path(__file__).parent)["refused_trainings"]


def parameters(deployment: dict[str, Any]) -> set[str]:
    triggered = [name for trigger in deployment.get("triggers", []) for name in trigger["parameters"]]
    return {*deployment.get("parameters", {}), *triggered}


@pytest.mark.parametrize("name", DEPLOYMENTS)
def test_deployment_is_a_flow_with_its_parameters(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.chdir(ROOT)
    loaded = load_flow_from_entrypoint(DEPLOYMENTS[name]["entrypoint"], use_placeholder_flow=False)
    properties = loaded.parameters.properties
    assert parameters(DEPLOYMENTS[name]) <= set(properties)
    if {"schedules", "triggers"} & set(DEPLOYMENTS[name]):  # nobody is there to be asked
        assert set(loaded.parameters.required) <= parameters(DEPLOYMENTS[name])


def test_server_that_answers_is_accepted_and_takes_a_flow(prefect_api: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PREFECT_API_URL", prefect_api)
    require_server(prefect_api)
    assert prefect() == f"a flow went through {prefect_api}"


@pytest.fixture(scope="module")
def deployed(prefect_api: str) -> Iterator[None]:
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
    names = {entry.name for entry in client.read_deployments()}
    return names, [str(entry.id) for entry in client.read_automations_by_name(CRASH_DETECTION.name)]


def test_deploy_after_restart_closes_unfinished_runs(client: SyncPrefectClient) -> None:
    names, detectors = on_the_server(client)
    assert set(DEPLOYMENTS) <= names
    assert len(detectors) == 1
    pool = client.read_work_pool(POOL)
    assert (pool.type, pool.concurrency_limit) == ("process", 1)
    assert client.read_global_concurrency_limit_by_name(PROMOTION).limit == 1
    deployed = client.read_deployment_by_name("training/training")
    run = client.create_flow_run_from_deployment(deployed.id, parameters={"run": "grpo", "seed": 3})
    for field, refused in REFUSED.items():
        with pytest.raises(HTTPStatusError) as answer:
            client.create_flow_run_from_deployment(deployed.id, parameters={"run": "ppo"} | refused)
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


def test_notifications_page_keeps_address_secret(client: SyncPrefectClient, prefect_api: str, tmp_path: Path) -> None:
    """With a webhook of one's own in place of Slack's."""
    [commands] = re.findall(r"```\n(.*?)```", (ROOT / "docs/notifications.md").read_text(), re.DOTALL)
    requests = SimpleQueue[Heard]()

    def typed(text: str) -> str:
        env = {**os.environ, "PREFECT_API_URL": prefect_api, "PATH": f"{SCRIPTS}:{os.environ['PATH']}"}
        process = subprocess.run(["bash", "-e", "-c", text], cwd=tmp_path, env=env, capture_output=True, text=True)
        assert process.returncode == 0, process.stdout + process.stderr
        return process.stdout

    with answering(lambda told: (requests.put(told), (200, b""))[1]) as url:
        address: dict[str, Any] = {"url": f"{url}/{{{{where}}}}", "secrets": {"where": SECRET}}
        body = {"text": "{{subject}}; {{body}}"}
        CustomWebhookNotificationBlock(name="team", json_data=body, **address).save("team", _sync=True)
        output = typed(commands.replace("slack-webhook", "custom-webhook"))
        output += typed("prefect block inspect custom-webhook/team; prefect automation inspect 'tell the team'")
        training = client.read_deployment_by_name("training/training")
        run = client.create_flow_run_from_deployment(training.id, parameters={"run": "ppo"}, name="ppo")
        client.set_flow_run_state(run.id, Failed(name="Invalid", message="overrides of ppo"), force=True)
        told = requests.get(timeout=300)
    assert "Created automation 'tell the team'" in output
    assert SECRET not in output + (tmp_path / "notify.yaml").read_text()
    assert told.path == f"/{SECRET}"
    assert re.fullmatch(rf"ppo: Invalid; overrides of ppo http://\S+{run.id}", told.body["text"])


def test_overrides_without_effect(prefect_api: str, tmp_path: Path, write_params: WriteParams, inside: Inside) -> None:
    write_params(tmp_path, {})
    with inside(tmp_path):
        state = training("ppo", overrides={"iterations": 2}, return_state=True)
    assert state.name == "Invalid"
    assert "overrides of ppo: iterations is 2 already" in state.message


def test_promotion_that_may_ask_is_a_run_of_its_own(
    client: SyncPrefectClient,
    tmp_path: Path,
    write_params: WriteParams,
    inside: Inside,
    register_descriptor: Callable[..., Version],
) -> None:
    write_params(tmp_path, {})
    with inside(tmp_path):
        registry.promote(register_descriptor("a" * 64), expected=None)
        challenger = register_descriptor("b" * 64)
        assert [*_decide([challenger], asking=True)] == ["agent_r1-v2 is decided in a run of its own"]
    promotion = client.read_deployment_by_name("promote/promote")
    promotion_runs = FlowRunFilter(deployment_id=FlowRunFilterDeploymentId(any_=[promotion.id]))
    [run] = client.read_flow_runs(flow_run_filter=promotion_runs)
    assert (run.parameters, run.parent_task_run_id) == ({"challenger": "models:/agent_r1/2"}, None)


def test_of_waiting_nights_one_runs_if_scheduled(client: SyncPrefectClient, monkeypatch: pytest.MonkeyPatch) -> None:
    nightly = client.read_deployment_by_name("evaluation/nightly")
    begin, end = (str(datetime.now(UTC) + timedelta(days=days)) for days in (-5, 1))
    wanted = {"start_time": begin, "end_time": end, "min_runs": 6}
    client._client.post(f"/deployments/{nightly.id}/schedule", json=wanted)
    by_hand = client.create_flow_run_from_deployment(nightly.id)

    def nights() -> list[FlowRun]:
        nightly_runs = FlowRunFilter(deployment_id=FlowRunFilterDeploymentId(any_=[nightly.id]))
        runs = client.read_flow_runs(flow_run_filter=nightly_runs, sort=FlowRunSort.EXPECTED_START_TIME_ASC)
        return [run for run in runs if run.auto_scheduled]

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
    assert (state.name, state.message) == ("Cancelled", "its schedule was paused while it waited")
    monkeypatch.setenv("PREFECT__RUNTIME__FLOW_RUN__ID", str(by_hand.id))
    assert expired() is None


@pytest.fixture
def project(tmp_path: Path, small_project: Path, write_params: WriteParams, lay_dvc: Callable[..., None]) -> Path:
    """A copy of the small project as a DVC repository, its engine in the stage's process, which starts at once."""
    folder = tmp_path / "project"
    shutil.copytree(small_project, folder, ignore=shutil.ignore_patterns("train", ".tracking", "evaluate"))
    write_params(folder, {"engine": {"kind": "transformers"}, "train": {"iterations": ITERATIONS - 1}})
    (folder / "dvc.yaml").write_text(DONE)
    lay_dvc(folder)
    return folder


def test_iterations_of_a_training_are_shown_now_and_then(prefect_api: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flows.pipeline.NEWS_S", 0.5)
    seen = []

    @flow
    def followed(port: int) -> None:
        progress = IterationsDone()
        for done, planned in ((4, "at most 12"), (5, "12"), (12, "12")):  # after three; the second comes too soon
            progress.tell(
                f"train again: iteration {done - 1}: exact match 0.5; {done} of {planned} done, about 2 s left"
            )
            seen.append(float(artifacts("progress-train-again")["progress-train-again"]))
        with temporary_settings({PREFECT_API_URL: f"http://127.0.0.1:{port}/api"}):
            IterationsDone().tell("train untold: iteration 0: exact match 0.5; 1 of 12 done")

    with socket.create_server(("127.0.0.1", 0)) as silent:  # takes requests and never answers
        followed(silent.getsockname()[1])
    assert [round(share) for share in seen] == [33, 33, 100]
    assert artifacts("progress-train-untold") == {}


def artifacts(prefix: str) -> dict[str, str]:
    with get_client(sync_client=True) as client:
        stored = client.read_artifacts(artifact_filter=ArtifactFilter(key=ArtifactFilterKey(like_=f"{prefix}%")))
    return {str(artifact.key): str(artifact.data) for artifact in stored}


def test_training_shows_scores_and_trajectories(prefect_api: str, project: Path, start: Any, inside: Inside) -> None:
    folder = project / load(project / "params.yaml").places.training(RunId.parse(LABEL))
    command = TRAIN.format(folder=str(project), further=FURTHER)
    out, errors = start("-c", command, PREFECT_API_URL=prefect_api, TMPDIR=str(project.parent)).communicate()
    finished = checkpoint.progress(folder / "checkpoint")
    assert finished is not None, out + errors
    assert finished.iterations == ITERATIONS
    with get_client(sync_client=True) as client:
        assert "ppo-seed7, 0.5 credit.lam" in {run.name for run in client.read_flow_runs()}
    rows = json.loads(artifacts("scores-ppo-")[f"scores-{LABEL}"])
    assert [row["iteration"] for row in rows] == list(range(ITERATIONS))
    assert float(artifacts("progress-train-ppo-")[f"progress-train-{LABEL.replace('-seed', '-')}"]) == 100
    run_id = (folder / "mlflow_run_id").read_text()
    assert f"/#/runs/{run_id}" in artifacts("mlflow-ppo-")[f"mlflow-{LABEL}"]
    tracked = MlflowClient(f"sqlite:///{project}/.tracking/mlflow.db").get_run(run_id)
    assert (tracked.info.run_name, json.loads(tracked.data.tags["overrides"])) == (LABEL, FURTHER)
    assert tracked.data.params["credit.lam"] == "0.5"

    trajectories = sha256(folder / "trajectories")
    shutil.rmtree(folder)
    console = Console(width=300, file=io.StringIO(), record=True)
    with inside(project):
        console.print(lineage(LABEL))
        [line] = [line for line in console.export_text().splitlines() if "get them" in line]
        command = shlex.split(line.partition("get them ")[2])
        subprocess.run([sys.executable, "-m", *command], check=True)
        assert sha256(Path(command[-1])) == trajectories
