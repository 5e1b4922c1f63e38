"""A pool as the clone that asks sees it: no worker, errands that end badly, answers that lie. A test is the worker."""

import itertools
import json
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.filters import FlowRunFilter
from prefect.client.schemas.objects import FlowRun, State
from prefect.exceptions import PrefectHTTPStatusError
from prefect.states import Cancelled, Completed, Crashed, Failed, Running
from prefect.utilities.asyncutils import run_coro_as_sync
from prefect.workers.base import BaseJobConfiguration

from flows.dvc_files import require_dvc
from flows.graph import UNAVAILABLE, Pool, StageFailed, StageUnavailable, out_of_date
from flows.operation.deploy import errand, of_processes, offer, offer_containers, work
from flows.pipeline import run_pipeline
from flows.terminal import SideBySide
from tests.cases import graph
from tests.fixtures import WriteParams

NAME = f"cpus-{os.getpid()}"  # of this process of the suite
STAGE = "train@a"
SEEDS = itertools.count(1000)


class InDocker(BaseJobConfiguration):
    """What Prefect's docker worker reads of a template, of which these tests read the image."""

    image: str
    image_pull_policy: str | None = None


class InKubernetes(BaseJobConfiguration):
    job_manifest: dict[str, Any]


JobOf: dict[str, type[BaseJobConfiguration]] = {"docker": InDocker, "kubernetes": InKubernetes}


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory, write_params: WriteParams, lay_dvc: Callable[..., None]) -> Path:
    folder = tmp_path_factory.mktemp("pool")
    (folder / "lead").mkdir()
    write_params(folder / "lead", {})
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder / "lead")
        Path("dvc.yaml").write_text(graph("pooled"))
        Path("source.txt").write_text("1\n")
        lay_dvc(Path(), "../../storage")
        require_dvc("repro", "--quiet", "prepare")
    return folder


@pytest.fixture
def lead(
    built: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, prefect_api: str, write_params: WriteParams
) -> Path:
    """The clone that asks, this process's own; every test asks for something else."""
    shutil.copytree(built / "lead", tmp_path / "lead")
    monkeypatch.chdir(tmp_path / "lead")
    write_params(Path(), {"evaluate": {"seed": next(SEEDS)}})
    monkeypatch.setenv("PREFECT_API_URL", prefect_api)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:1")  # which nothing here asks
    monkeypatch.setattr("flows.graph.POLL_S", 0.01)
    monkeypatch.setattr("flows.graph.TELL_S", 3600.0)  # however long the server of the suite takes for an answer
    return tmp_path / "lead"


@pytest.fixture
def client(lead: Path) -> Iterator[SyncPrefectClient]:
    with get_client(sync_client=True) as client:
        offer(client, of_processes(NAME, None))
        yield client


def errands(client: SyncPrefectClient) -> list[FlowRun]:
    deployment = client.read_deployment_by_name(f"errand/{NAME}").id
    runs = client.read_flow_runs(
        flow_run_filter=FlowRunFilter.model_validate({"deployment_id": {"any_": [deployment]}})
    )
    return sorted(runs, key=lambda run: str(run.created))


class Watched(SideBySide):
    """Asks a function whenever a stage's line would change."""

    def __init__(self, show: Callable[[str], None] = lambda _: None) -> None:
        super().__init__()
        self._show = show

    @contextmanager
    def line(self, _: str) -> Iterator[Callable[[str], None]]:
        yield self._show


def ask(client: SyncPrefectClient, *states: State[Any], outs: Any = None, patience_s: float = 300.0) -> None:
    """Has the stage made. Whenever its errand is looked at it leaves the hashes of outputs, and has the next state."""
    coming = iter(states)

    def answer(_: str) -> None:
        run = errands(client)[-1]
        client.update_flow_run_labels(run.id, outs or {})
        client.set_flow_run_state(run.id, next(coming), force=True)

    Pool(NAME, patience_s).make(STAGE, {"prepare"}, Watched(answer) if states else Watched())


def test_stage_without_worker_waits_and_fails_or_is_left_to_the_pool(
    client: SyncPrefectClient, caplog: pytest.LogCaptureFixture
) -> None:
    """By an interrupt; the same command waits for it."""
    with pytest.raises(StageFailed, match=rf"for 0\.05 s .* `agent-r1 worker --pool {NAME}`; stage train@a stays"):
        ask(client, patience_s=0.05)
    assert caplog.text.count(f"no worker of pool {NAME} is there; start one") == 1
    waiting = errands(client)
    beside = Watched()
    beside.over.set()
    with pytest.raises(StageFailed, match=f"train@a stays with pool {NAME}; the same command waits for it"):
        Pool(NAME, 300.0).make(STAGE, {"prepare"}, beside)
    assert [run.state_name for run in (waiting[-1], errands(client)[-1])] == ["Scheduled"] * 2
    with pytest.raises(StageFailed, match="Cancelled, by hand"):
        ask(client, Running(), Cancelled(message="by hand"))
    assert len(errands(client)) == len(waiting)  # the same one


def test_errand_that_may_work_later_is_sent_again(client: SyncPrefectClient) -> None:
    for ended in (Crashed(message="gone"), Failed(name=UNAVAILABLE, message="on host: no remote")):
        with pytest.raises(StageUnavailable, match=f"train@a of pool {NAME} is {ended.name}, {ended.message}"):
            ask(client, Running(), ended)
    with pytest.raises(StageFailed, match="is Failed, exit code 1") as failed:
        ask(client, Failed(message="exit code 1"))
    assert not isinstance(failed.value, StageUnavailable)
    assert [run.state_name for run in errands(client)[-3:]] == ["Crashed", UNAVAILABLE, "Failed"]


def test_stage_that_changed_meanwhile_is_not_taken_over(client: SyncPrefectClient, write_params: WriteParams) -> None:
    def answer(_: str) -> None:
        client.set_flow_run_state(errands(client)[-1].id, Completed(), force=True)
        write_params(Path(), {"evaluate": {"seed": 77}})

    with pytest.raises(StageFailed, match=r"made of something else there than here: .*evaluate\.seed \d+ -> 77"):
        Pool(NAME, 300.0).make(STAGE, {"prepare"}, Watched(answer))


def test_worker_makes_stage_once_and_refuses_stages_of_other_clones(
    client: SyncPrefectClient, lead: Path, monkeypatch: pytest.MonkeyPatch, write_params: WriteParams
) -> None:
    shutil.copytree(lead, lead.with_name("one"), ignore=shutil.ignore_patterns("cache", "prepared.txt", "dvc.lock"))
    with pytest.raises(StageFailed, match="Cancelled"):
        ask(client, Cancelled())
    parameters = errands(client)[-1].parameters
    monkeypatch.chdir(lead.with_name("one"))
    state = errand(**parameters, return_state=True)
    assert state.is_completed(), state
    assert not out_of_date(STAGE)
    monkeypatch.chdir(lead)
    ask(client, Completed(), outs=client.read_flow_run(state.state_details.flow_run_id).labels)
    assert Path("trained/a/policy").read_text() == "1\n"
    assert not out_of_date(STAGE)
    monkeypatch.chdir(lead.with_name("one"))

    with pytest.raises(ValueError, match=r"on .* has no stage 'rm -rf ~' for a pool"):
        errand(**parameters | {"stage": "rm -rf ~"})
    with pytest.raises(ValueError, match="has no stage 'prepare' for a pool"):
        errand(**parameters | {"stage": "prepare"})
    with pytest.raises(ValueError, match=r"prepared\.txt comes with no hash of DVC's but None"):
        errand(**parameters | {"inputs": {}})
    write_params(Path(), {"evaluate": {"seed": 77}})
    lock = Path("dvc.lock").read_bytes()
    with pytest.raises(ValueError, match=r"evaluate\.seed \d+ -> 77; bring both clones"):
        errand(**parameters)
    assert Path("dvc.lock").read_bytes() == lock


def test_run_chooses_no_command_and_the_pool_has_no_limit(client: SyncPrefectClient) -> None:
    pool = client.read_work_pool(NAME)
    assert pool.concurrency_limit is None
    assert pool.base_job_template["job_configuration"] == {"env": {}, "stream_output": True, "working_dir": "."}
    assert_nothing_is_chosen(client, NAME)


def assert_nothing_is_chosen(client: SyncPrefectClient, pool: str) -> None:
    deployment = client.read_deployment_by_name(f"errand/{pool}").id
    errand_of = {"stage": STAGE, "made_of": {}, "inputs": {}}
    chosen = {"command": "id", "env": {"PYTHONPATH": "/tmp"}, "image": "another", "volumes": ["/:/mnt"]}
    for variable, value in chosen.items():
        with pytest.raises(PrefectHTTPStatusError, match=f"{variable}' (was|were) unexpected"):
            client.create_flow_run_from_deployment(deployment, parameters=errand_of, job_variables={variable: value})


@pytest.mark.parametrize("kind", ["docker", "kubernetes"])
def test_pool_of_containers_makes_stages_in_the_image_alone(client: SyncPrefectClient, kind: str) -> None:
    """A second time with another image, and a template of the operator's."""
    pool = f"{kind}-{NAME}"
    offer_containers(pool, kind, "registry/agent_r1:1a", None)
    first = client.read_work_pool(pool)
    own = client.read_worker_metadata()[f"prefect-{kind}"][kind]["default_base_job_configuration"]
    own["variables"]["properties"]["image_pull_policy"]["default"] = "Always"
    own["variables"]["properties"]["env"]["default"] = {"AWS_PROFILE": "team"}
    Path("pool.json").write_text(json.dumps(own))
    offer_containers(pool, kind, "registry/agent_r1:2b", Path("pool.json"))
    second = client.read_work_pool(pool)
    assert (first.type, second.id) == (kind, first.id)
    tracked = {"MLFLOW_TRACKING_URI": "http://127.0.0.1:1"}
    for found, image, env in (
        (first, "registry/agent_r1:1a", tracked),
        (second, "registry/agent_r1:2b", {"AWS_PROFILE": "team", **tracked}),
    ):
        job = run_coro_as_sync(JobOf[kind].from_template_and_values(found.base_job_template, {}))
        assert (job.command, job.env) == (None, env)
        container = job.job_manifest["spec"]["template"]["spec"]["containers"][0] if kind == "kubernetes" else vars(job)
        assert container["image"] == image
        assert "{{" not in json.dumps(found.base_job_template)
    policies = {"docker": '"image_pull_policy": "Always"', "kubernetes": '"imagePullPolicy": "Always"'}
    assert policies[kind] in json.dumps(second.base_job_template)
    assert_nothing_is_chosen(client, pool)
    with pytest.raises(ValueError, match=f"the pool '{NAME}' of the server is of type 'process'; choose another name"):
        offer_containers(NAME, kind, "registry/agent_r1:1a", None)


def test_clones_without_shared_storage_are_refused(client: SyncPrefectClient, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match=r"no pool 'other' with workers; start one .* `agent-r1 worker --pool other`"):
        Pool("other", 300.0)
    for name in ("agent_r1", "a b", ""):
        with pytest.raises(ValueError, match=f"no pool can be called '{name}'"):
            work(name, 1)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://me:secret@127.0.0.1:1")
    with pytest.raises(ValueError, match="MLFLOW_TRACKING_URI has a password"):
        offer_containers(f"secret-{NAME}", "docker", "agent_r1", None)
    monkeypatch.delenv("MLFLOW_TRACKING_URI")
    with pytest.raises(ValueError, match="set MLFLOW_TRACKING_URI to the same server"):
        Pool(NAME, 300.0)
    require_dvc("remote", "remove", "storage")
    for refused in (lambda: Pool(NAME, 300.0), lambda: work(NAME, 1)):
        with pytest.raises(ValueError, match=r"DVC's default remote, and there is none; `dvc remote add"):
            refused()
    monkeypatch.delenv("PREFECT_API_URL")
    with pytest.raises(ValueError, match="PREFECT_API_URL is not set"):
        work(NAME, 1)
    with pytest.raises(OSError, match="a pool is on a Prefect server, and none answers"):
        run_pipeline(pool=NAME)
