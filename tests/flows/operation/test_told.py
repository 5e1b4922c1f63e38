"""What Prefect stores of every deployment: lines, last state and artifacts, read through its API.

The flows are loaded as a worker loads them, in a process that has configured no logging; short scripts are the stages.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest
import yaml
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.filters import ArtifactFilter, ArtifactFilterFlowRunId, LogFilter, LogFilterFlowRunId

from agent_r1.files import write_text
from agent_r1.params import load
from agent_r1.records import Question
from agent_r1.tables import write_rows
from agent_r1.tracking import registry
from agent_r1.tracking.registry import Version
from tests.flows.operation.evaluations import ASKED, write_evaluation

ROOT = Path(__file__).parents[3]
Inside = Callable[[Path], AbstractContextManager[None]]
RIGHT = {1: 60, 2: 58, 3: 80}  # version -> questions that it answers right
DVC = """
import json

def main(arguments):
    if "dag" in arguments:
        print('"ablations/dvc.yaml:train@ppo-0";' if "ablations" in arguments[-1] else '"prepare";')
    elif "repro" in arguments:
        print("made", arguments[-1])
    elif "status" in arguments:
        print(json.dumps(dict.fromkeys(["prepare", "ablations/dvc.yaml:train@ppo-0", arguments[-1]])))
"""
STAGES = """
import json, pathlib, shutil, sys

stage, *given = sys.argv[1:]
if stage == "train":
    lines = [{"iteration": i, "rollout/success": success} for i, success in enumerate((0.25, 0.5))]
    folder = pathlib.Path("outputs/train/ppo")
    folder.mkdir(parents=True)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\\n" for line in lines))
    (folder / "mlflow_run_id").write_text("0" * 32)
    print("07:00:00 WARNING entropy has fallen", flush=True)
if stage == "register":
    pathlib.Path("outputs/register").mkdir()
    pathlib.Path("outputs/register/ppo.json").write_text('{"version": "models:/agent_r1/7"}')
if stage == "evaluate":
    shutil.copytree("asked/" + given[1][-1], given[3])
"""
RUN = """
import json, sys
from prefect.flows import load_flow_from_entrypoint

for name, (entrypoint, parameters) in json.loads(sys.argv[1]).items():
    state = load_flow_from_entrypoint(entrypoint, use_placeholder_flow=False)(**parameters, return_state=True)
    print("RAN", name, state.state_details.flow_run_id)
"""
PARAMETERS: dict[str, dict[str, Any]] = {  # in this order; the gate decides once with each verdict
    "pipeline": {},
    "ablations": {},
    "training": {"run": "ppo", "seed": None},
    "nightly": {},
    "after-training": {"models": ["models:/agent_r1/2"]},
    "promote": {"challenger": "models:/agent_r1/3"},
}


@pytest.fixture(scope="module")
def project(
    tmp_path_factory: pytest.TempPathFactory,
    write_params: Callable[..., None],
    inside: Inside,
    register_descriptor: Callable[..., Version],
) -> Path:
    """A champion, an equal and a better challenger; short scripts stand where the stages and DVC do."""
    folder = tmp_path_factory.mktemp("told")
    write_params(folder, {})
    shutil.copy(ROOT / "prefect.toml", folder)  # tells Prefect whose lines it is to keep
    shutil.copytree(ROOT / "flows", folder / "flows", ignore=shutil.ignore_patterns("__pycache__"))
    write_text(folder / "flows/__main__.py", STAGES)
    for empty in (
        "__init__",
        "utils/__init__",
        "utils/serialize/__init__",
        "stage/__init__",
    ):
        write_text(folder / f"dvc/{empty}.py", "")
    write_text(folder / "dvc/utils/serialize/_common.py", "_dump_data = None")
    write_text(folder / "dvc/fs.py", "class LocalFileSystem: open = None")
    write_text(folder / "dvc/stage/cache.py", "class StageCache: _load_cache = None")
    write_text(folder / "ablations/graph.yaml", "")
    write_text(folder / "dvc/cli.py", DVC)
    with inside(folder):
        settings = load()
        plain: dict[str, Any] = {"dataset": "atlas", "split": "test", "text": "?", "answers": ["Tesk"], "strata": {}}
        questions = [Question(question_id=f"q{i}", gold_titles=[], **plain) for i in range(ASKED)]
        write_rows(settings.places.questions, questions, Question)
        versions = [
            register_descriptor(letter * 64, f"run_{letter}", policy="outputs/gone/checkpoint/policy")
            for letter in "abc"
        ]
        registry.promote(versions[0], expected=None)
        for version in versions:
            evaluated = Path("asked") / str(version.number)
            write_evaluation(evaluated, version, RIGHT[version.number])
            write_text(evaluated / "mlflow_run_id", version.descriptor.mlflow_run_id)
            write_text(evaluated / "scores.json", json.dumps({"aborted": 0.0}))
    return folder


@pytest.fixture(scope="module")
def ran(project: Path, prefect_api: str) -> dict[str, UUID]:
    """The flow run of every deployment."""
    listed = yaml.safe_load((ROOT / "prefect.yaml").read_text())["deployments"]
    entrypoints = {each["name"]: each["entrypoint"] for each in listed}
    assert entrypoints.keys() == PARAMETERS.keys()
    done = subprocess.run(
        [sys.executable, "-c", RUN, json.dumps({name: (entrypoints[name], PARAMETERS[name]) for name in PARAMETERS})],
        cwd=project,
        env={**os.environ, "PYTHONPATH": str(ROOT), "PREFECT_API_URL": prefect_api},
        capture_output=True,
        text=True,
    )
    found = [line.split()[1:] for line in done.stdout.splitlines() if line.startswith("RAN ")]
    assert len(found) == len(PARAMETERS), done.stdout + done.stderr
    return {name: UUID(number) for name, number in found}


@pytest.fixture
def client(prefect_api: str) -> Iterator[SyncPrefectClient]:
    with get_client(sync_client=True) as client:
        yield client


def state_of(client: SyncPrefectClient, run: UUID) -> tuple[str, str]:
    state = client.read_flow_run(run).state
    assert state is not None
    return str(state.name), str(state.message)


def artifacts(client: SyncPrefectClient, run: UUID) -> dict[str, str]:
    wanted = ArtifactFilter(flow_run_id=ArtifactFilterFlowRunId(any_=[run]))
    return {str(each.key): str(each.data) for each in client.read_artifacts(artifact_filter=wanted) if each.key}


@pytest.mark.parametrize(
    ("deployment", "line"),
    [
        ("pipeline", "made prepare"),
        ("ablations", "made ablations/dvc.yaml:train@ppo-0"),
        ("training", "entropy has fallen"),
        ("nightly", "agent_r1-v1: exact match 0.600 [0.510, 0.680] on 100 questions"),
        ("after-training", "models:/agent_r1/2: there is no earlier evaluation that was measured alike"),
        ("promote", "agent_r1-v3 is promoted against agent_r1-v1: "),
    ],
)
def test_what_a_flow_says_is_on_its_page(
    client: SyncPrefectClient, ran: dict[str, UUID], deployment: str, line: str
) -> None:
    logs = client.read_logs(LogFilter(flow_run_id=LogFilterFlowRunId(any_=[ran[deployment]])))
    assert any(log.message.startswith(line) and log.name.startswith("flows.") for log in logs), logs


def test_a_warning_of_a_stage_is_one_on_the_page(client: SyncPrefectClient, ran: dict[str, UUID]) -> None:
    logs = client.read_logs(LogFilter(flow_run_id=LogFilterFlowRunId(any_=[ran["training"]])))
    assert [log.level for log in logs if log.message == "entropy has fallen"] == [30]


def test_the_last_state_says_what_came_of_it(
    client: SyncPrefectClient,
    ran: dict[str, UUID],
    project: Path,
    inside: Inside,
) -> None:
    score = "exact match 0.600 [0.510, 0.680] on 100 questions"
    assert state_of(client, ran["nightly"]) == ("Completed", f"agent_r1-v1: {score}")
    assert state_of(client, ran["training"]) == (
        "Completed",
        "exact match 0.250 -> 0.500 while it trained, 2 iterations; registered as models:/agent_r1/7",
    )
    name, message = state_of(client, ran["promote"])
    assert name == "Promoted"
    with inside(project):
        assert registry.find(registry.THE_CHAMPION).number == 3
    assert message.startswith("promoted: +0.200 [+0.120, +0.280], the lower bound +0.120 of the difference is above")
    _, message = state_of(client, ran["after-training"])
    assert message.startswith(
        "agent_r1-v2: exact match 0.580 [0.490, 0.670] on 100 questions; agent_r1-v2 refused: -0.020 [-0.050"
    )


def test_a_decision_and_an_evaluation_are_pages_with_tables_that_lead_to_mlflow(
    client: SyncPrefectClient, ran: dict[str, UUID], project: Path
) -> None:
    text = artifacts(client, ran["promote"])["decision-agent-r1-v3"]
    assert text.startswith("agent_r1-v3 is promoted against agent_r1-v1: ")
    assert "| right in agent_r1-v3 alone | 20 |" in text
    run_id = (project / "asked/3/mlflow_run_id").read_text()
    assert f"[The training of agent_r1-v3 in MLflow](http://127.0.0.1:5000/#/runs/{run_id})" in text
    evaluated = artifacts(client, ran["after-training"])["evaluation-agent-r1-v2"]
    assert "| em | 0.580 [0.49, 0.67] |" in evaluated
    assert "agent_r1-v2, of run_b. [In MLflow]" in evaluated
    assert artifacts(client, ran["training"]).keys() == {"scores-ppo", "mlflow-ppo"}
