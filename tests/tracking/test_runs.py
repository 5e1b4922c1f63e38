"""Tracking against a real SQLite store in a temporary project."""

import json
import os
import re
import shutil
import sqlite3
import subprocess
import sys
import time
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from mlflow import MlflowClient
from mlflow.exceptions import MlflowException
from sqlalchemy import TextClause

from agent_r1 import tracking
from agent_r1.params import load
from agent_r1.params.agents import AgentParams
from agent_r1.params.outside import OthersParams
from agent_r1.params.places import RunId
from agent_r1.tracking.store import ABOUT, comparison, mendable_fault
from tests.cases import cases
from tests.neighbour import UID, needs_root, open_folder

ROOT = Path(__file__).parents[2]
TAGS = {"dataset": "atlas", "git_commit": "abc", "data_hash": "def"}
RACE = """
import sys
from agent_r1 import tracking
with tracking.start(f"race-seed{sys.argv[1]}", {"seed": sys.argv[1]}, {}) as run:
    run.log({"rollout/em": 0.5}, step=0)
"""


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A project whose store two processes created at the same time, one run in each."""
    project = tmp_path_factory.mktemp("project")
    shutil.copy(ROOT / "params.yaml", project)
    variables = {"DVC_ROOT", "MLFLOW_TRACKING_URI"}
    env = {name: value for name, value in os.environ.items() if name not in variables}
    racers = [subprocess.Popen([sys.executable, "-c", RACE, str(number)], cwd=project, env=env) for number in range(2)]
    assert [racer.wait(timeout=240) for racer in racers] == [0, 0]
    return project


@pytest.fixture
def project(store: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(store)
    return store


def client(project: Path) -> MlflowClient:
    return MlflowClient(f"sqlite:///{project}/.tracking/mlflow.db")


def steps(project: Path, run: tracking.Run, metric: str = "rollout/em") -> list[int]:
    return [point.step for point in client(project).get_metric_history(run.run_id, metric)]


def resume(run: tracking.Run) -> tracking.Run:
    return tracking.resume(run.run_id)


def test_parallel_creation_makes_one_experiment_and_every_run(project: Path) -> None:
    (experiment,) = [e for e in client(project).search_experiments() if e.name != "Default"]
    assert experiment.name == "agent_r1"
    runs = client(project).search_runs([experiment.experiment_id], "attributes.run_name LIKE 'race-%'")
    assert sorted(run.info.run_name or "" for run in runs) == ["race-seed0", "race-seed1"]


def test_run_holds_its_name_params_tags_and_metrics(project: Path) -> None:
    params = {"variant": "ppo", "seed": 0, **{f"many.p{i}": i for i in range(150)}}  # more than one call takes
    with tracking.start("ppo-seed0", params, TAGS) as run:
        assert client(project).get_run(run.run_id).info.status == "RUNNING"
        run.log({"rollout/em": 0.25, "reward/total": -0.5}, step=0)
        run.log({"rollout/em": 0.5, "reward/total": 0.5}, step=1)
        for value in ("entropy_fall", "entropy_fall, reward_std_fall"):
            run.tag("monitor/signs", value)
    stored = client(project).get_run(run.run_id)
    assert (stored.info.run_name, stored.info.status) == ("ppo-seed0", "FINISHED")
    assert stored.data.params == {key: str(value) for key, value in params.items()}
    assert {**TAGS, "monitor/signs": "entropy_fall, reward_std_fall"}.items() <= stored.data.tags.items()
    points = client(project).get_metric_history(run.run_id, "rollout/em")
    assert [(point.step, point.value) for point in points] == [(0, 0.25), (1, 0.5)]


BOTH = "musique+own test questions abababab, 9"


@cases("killed, again")
def test_resumed_run_logs_nothing_twice(project: Path, killed: list[Any], again: list[Any]) -> None:
    first = tracking.start(f"resumed-{len(killed)}", {"variant": "resumed"}, TAGS)
    for name, step in killed:
        first.log({name: 0.5}, step)
    resumed = resume(first)
    for name, step in again:
        resumed.log({name: 0.5}, step)
    assert all(steps(project, first, name) == [0, 1, 2] for name, _ in again)


def test_run_that_went_back_logs_its_iterations_again(project: Path) -> None:
    """Steps 0, 1, 2; back to 1; 1 again, killed, and 1 and 2 again: the store has the second 1 and lacks the second 2.

    A kill right after going back, with nothing logged again, makes no difference.
    """
    first = tracking.start("rewound-seed0", {"variant": "rewound"}, TAGS)
    for step in range(3):
        first.log({"rollout/em": step / 10}, step)
    first.rewind()
    killed = resume(first)
    time.sleep(0.002)  # the store's clock counts milliseconds
    killed.log({"rollout/em": 0.5}, step=1)
    again = resume(first)
    for step in (1, 2):
        again.log({"rollout/em": 0.5}, step)
    history = client(project).get_metric_history(first.run_id, "rollout/em")
    assert history == sorted(history, key=lambda point: (point.timestamp, point.step))
    assert steps(project, first) == [0, 1, 2, 1, 2]


def test_repeated_run_takes_the_earlier_ones_place(project: Path) -> None:
    earlier = tracking.start("twice-seed0", {"variant": "twice"}, TAGS)
    later = tracking.start("twice-seed0", {"variant": "twice"}, TAGS)
    other = tracking.start("twice-seed0", {"variant": "twice"}, {**TAGS, "data_hash": "changed"})
    assert tracking.resume(earlier.run_id) is tracking.resume("0" * 32) is None
    assert client(project).get_run(earlier.run_id).info.lifecycle_stage == "deleted"  # in the trash, not gone
    assert None not in (tracking.resume(later.run_id), tracking.resume(other.run_id))
    first, second = (tracking.start("nightly", {"variant": "nightly"}, TAGS, recurring=True) for _ in range(2))
    by_hand = tracking.start("nightly", {"variant": "nightly"}, TAGS)
    assert all(tracking.resume(run.run_id) for run in (first, second, by_hand)), "a recurring one takes no place"


def test_final_scores_have_no_step_and_artifacts_are_files_of_the_project(project: Path) -> None:
    run = tracking.start("final-seed0", {"variant": "final"}, TAGS)
    run.final({"em": 0.75, "em/hops_1": 1.0})
    page = project / "report.md"
    page.write_text("# Report")
    run.artifact(page, "report")
    run.text("question ...", "examples/right.txt")
    entry = client(project).get_run(run.run_id)
    assert entry.data.metrics == {"final/em": 0.75, "final/em/hops_1": 1.0}
    assert steps(project, run, "final/em") == [0]
    stored = {str(path.relative_to(project)) for path in project.rglob("artifacts/*/artifacts/*/*")}
    files = ("report/report.md", "examples/right.txt")
    assert stored == {f".tracking/artifacts/{run.run_id}/artifacts/{file}" for file in files}
    resume(run).log({"rollout/em": 0.1}, step=0)
    assert "rollout/em" in client(project).get_run(run.run_id).data.metrics, "final scores hide no iteration"


def test_row_of_first_table_describes_run(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["agent-r1 train", "--run", "ppo_no_masks"])
    run = tracking.start("row-seed0", {}, {**TAGS, "kind": "training"}, about="credit.loss_mask False")
    run.uses({"atlas questions": (Path("data/prepared/questions.parquet"), "ab" * 32)}, "training")
    run.log({"rollout/canary_gap": 0.0, "reward/total": 0.0, "rollout/success": 0.5}, step=0)
    measured = client(project).get_run(run.run_id).data.metrics
    assert list(measured) == ["rollout/success", "reward/total", "rollout/canary_gap"], "no score yet"
    for success in (0.25, 0.5):  # evaluated again
        run.final({"success": success, "success/low": 0.125, "success/high": 0.75})
    stored = client(project).get_run(run.run_id)
    assert {
        "mlflow.source.name": "agent-r1 train --run ppo_no_masks",
        "mlflow.note.content": "Success 0.500 [0.12, 0.75] on the test questions. credit.loss_mask False",
        "interval": "[0.12, 0.75]",
        "kind": "training",
    }.items() <= stored.data.tags.items()
    [data] = stored.inputs.dataset_inputs
    assert (data.dataset.name, data.dataset.digest, data.tags[0].value) == ("atlas questions", "abababab", "training")


def test_policy_is_a_model_with_its_scores_by_data_set(project: Path) -> None:
    scores = {"success": 0.5, "success/low": 0.4, "success/high": 0.6, "tool_calls": 2.0, "em/dataset_musique": 0.25}
    for _ in range(2):  # the second takes the place of the first
        run = tracking.start("ranked-seed0", {"variant": "ranked", "seed": 0}, {**TAGS, "kind": "training"})
        run.uses({BOTH: (Path("data/prepared/questions.parquet"), "ab" * 32)}, "test")
        for _ in range(2):  # the report scores again
            run.final(scores)
    store = client(project)
    [model] = store.search_logged_models([store.get_run(run.run_id).info.experiment_id], "name = 'ranked-seed0'")
    assert (model.name, model.source_run_id, model.status) == ("ranked-seed0", run.run_id, "READY")
    metrics = {(metric.key, metric.dataset_name, metric.dataset_digest, metric.value) for metric in model.metrics or []}
    of_all = {("success", 0.5), ("success/low", 0.4), ("success/high", 0.6)}
    of_both = {(f"final/{name}", BOTH, "abababab", value) for name, value in of_all}
    assert metrics == {*of_both, ("final/em/dataset_musique", "musique questions", "abababab", 0.25)}
    other = tracking.start("asked", {"variant": "asked"}, {**TAGS, "kind": "evaluation"}, recurring=True)
    other.uses({BOTH: (Path("data/prepared/questions.parquet"), "ab" * 32)}, "test")
    other.final(scores)
    assert not store.get_run(other.run_id).outputs.model_outputs, "the policy of a version is ranked once"


def test_description_leads_to_the_policies_that_were_measured_on_a_data_set(project: Path) -> None:
    """Until somebody writes another; a run that read the questions to train on them was not measured on them."""
    trained, measured = tracking.start("trained-on-own", {}, TAGS), tracking.start("measured-on-own", {}, TAGS)
    trained.uses({"own questions": (Path("questions.parquet"), "cd" * 32)}, "training")
    name = "own test questions cdcdcdcd, 9"
    measured.uses({name: (Path("questions.parquet"), "cd" * 32)}, "test")
    comparison()
    store = client(project)
    experiment = store.get_experiment_by_name("agent_r1")
    description = experiment.tags["mlflow.note.content"]
    key = re.findall(rf"\[{name}\]\(#/experiments/1/runs\?viewStateShareKey=([\w-]+)\)", description.splitlines()[0])[0]
    view = json.loads(experiment.tags[f"mlflow.sharedViewState.{key}"])
    runs = store.search_runs([experiment.experiment_id], view["searchFilter"])
    assert [run.info.run_name for run in runs] == ["measured-on-own"]
    assert description.endswith(ABOUT)
    comparison()
    assert client(project).get_experiment(experiment.experiment_id).tags["mlflow.note.content"] == description
    store.set_experiment_tag(experiment.experiment_id, "mlflow.note.content", "of my own")
    comparison()
    assert client(project).get_experiment(experiment.experiment_id).tags["mlflow.note.content"] == "of my own"
    store.set_experiment_tag(experiment.experiment_id, "mlflow.note.content", ABOUT)


def test_run_of_an_experiment_of_dvcs_carries_its_name(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = tracking.start("named-seed0", {}, TAGS)
    monkeypatch.setenv("DVC_EXP_NAME", "slow")
    stored = client(project).get_run(tracking.start("named-seed0", {}, TAGS).run_id)
    assert (stored.info.run_name, stored.data.tags["dvc_experiment"]) == ("named-seed0 (slow)", "slow")
    assert tracking.resume(plain.run_id) is not None, "it takes no place but that of the same experiment"


def test_experiment_opens_on_the_comparison(project: Path) -> None:
    link = comparison(5001)
    experiment = client(project).get_experiment_by_name("agent_r1")
    assert link == f"http://127.0.0.1:5001/#/experiments/{experiment.experiment_id}/runs?viewStateShareKey=comparison"
    view = json.loads(experiment.tags["mlflow.sharedViewState.comparison"])
    assert view["columnOrder"][:5] == [
        *("attributes.`Run Name`", "runDateAndNestInfo"),
        *("metrics.`final/success`", "tags.`interval`", "metrics.`final/greedily`"),
    ]
    assert {*view["columnOrder"]} - {*view["selectedColumns"]} == {"runDateAndNestInfo", "duration"}
    width_shown = sum(width for name, width in view["columnWidths"].items() if name != "params.`variant`")
    assert width_shown <= 952, "a laptop's window has room for so many pixels beside the boxes that are ticked"


@pytest.mark.parametrize(
    ("fault", "status"), [(KeyboardInterrupt, "KILLED"), (SystemExit, "KILLED"), (RuntimeError, "FAILED")]
)
def test_fault_ends_the_run_as_such(project: Path, fault: type[BaseException], status: str) -> None:
    run = tracking.start(f"fault-{status}", {}, TAGS)
    with pytest.raises(fault), run:
        raise fault
    assert client(project).get_run(run.run_id).info.status == status


def test_server_that_does_not_answer_is_a_fault_that_passes(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://me:secret@127.0.0.1:9")
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    with pytest.raises(MlflowException) as refusal:
        tracking.start("lost", {}, {})
    passing = mendable_fault(refusal.value)
    assert isinstance(passing, ConnectionError)
    assert "MLflow's store http://127.0.0.1:9 cannot be used for now" in str(passing)
    assert "secret" not in str(passing)


def test_locked_database_is_a_fault_that_passes(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Locked by another process for longer than MLflow waits, which is shortened here."""
    run = tracking.start("locked-seed0", {}, TAGS)
    monkeypatch.setattr("sqlalchemy.sql.text", lambda text: TextClause(text.replace("20000", "10")))
    with closing(sqlite3.connect(project / ".tracking/mlflow.db")) as other:
        other.execute("BEGIN EXCLUSIVE")
        with pytest.raises(MlflowException) as refusal:
            run.log({"rollout/em": 0.5}, step=0)
    assert re.search(r"cannot be used for now \(.*database is locked\)", str(mendable_fault(refusal.value)))
    run.log({"rollout/em": 0.5}, step=0)


def test_root_and_subfolders_share_one_store(project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An experiment that DVC runs elsewhere, and one started in a folder of the project."""
    run = tracking.start("found-seed0", {}, TAGS)
    (project / "below").mkdir()
    monkeypatch.chdir(project / "below")
    assert tracking.resume(run.run_id) is not None
    shutil.copy(ROOT / "params.yaml", tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("DVC_ROOT", str(project))
    assert tracking.resume(run.run_id) is not None
    assert not (tmp_path / ".tracking").exists()


@cases("agent, rows_of, said")
def test_run_says_agent_does_not_repeat_itself(agent: str | None, rows_of: str | None, said: bool | None) -> None:
    params = load(ROOT / "params.yaml")
    agents = {name: AgentParams(command=["own"], timeout_s=1, repeats=name == "calm") for name in ("web", "calm")}
    worlds = {"rows": OthersParams(env="agent", name=rows_of, train=(0, 1))} if rows_of else {}
    changed = params.model_copy(
        update={
            "env": params.env.model_copy(update={"agents": agents, "agent": agent}),
            "prepare": params.prepare.model_copy(update={"worlds": worlds}),
        }
    )
    assert tracking.run_params("grpo", changed, params.run(RunId("grpo"))).get("reproducible") is said


def test_run_params_name_the_ablation() -> None:
    params = load(ROOT / "params.yaml")
    parameters = {name: tracking.run_params(name, params, params.run(RunId(name))) for name in params.runs}
    columns = {name: (row["algorithm"], row["loss_mask"], row["advantage_mask"]) for name, row in parameters.items()}
    expected = {
        "ppo": ("gae", True, True),
        "ppo_no_advantage_mask": ("gae", True, False),
        "ppo_no_masks": ("gae", False, False),
        "grpo": ("grpo", True, True),
        "grpo_no_loss_mask": ("grpo", False, "whitening+critic"),
    }
    assert expected.items() <= columns.items()
    assert not any(name.startswith(("credit.estimator", "credit.loss_mask")) for name in parameters["ppo"]), "twice"
    assert parameters["grpo"]["variant"] == "grpo"
    beside = params.model_copy(update={"places": params.places.model_copy(update={"scale": "lake"})})
    assert tracking.run_params("grpo", beside, params.run(RunId("grpo")))["variant"] == "grpo-lake"
    assert tracking.untrained_params("random", beside)["variant"] == "random-lake"
    assert tracking.untrained_params("agent_r1-lake-v1", beside)["variant"] == "agent_r1-lake-v1", "said once"
    assert parameters["grpo"]["rollout.samples"] == 8
    assert parameters["ppo"]["env.top_k"] == params.env.top_k


def git(*arguments: str) -> str:
    identity = ["-c", "user.name=test", "-c", "user.email=test@example.org"]
    return subprocess.run(["git", *identity, *arguments], check=True, capture_output=True, text=True).stdout.strip()


def test_provenance_names_commit_and_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    lock = tmp_path / "dvc.lock"
    (tmp_path / "params.yaml").write_text("{}")
    outs = "[{path: a, md5: 12ab.dir}, {path: b, md5: 34cd}]"
    lock.write_text(f"schema: '2.0'\nstages: {{prepare: {{outs: {outs}}}}}\n")
    git("init", "-q")
    git("add", ".")
    git("commit", "-qm", "start")
    commit = git("rev-parse", "HEAD")
    assert tracking.provenance("atlas") == {"dataset": "atlas", "git_commit": commit, "data_hash": "12ab.dir+34cd"}
    lock.write_text("schema: '2.0'\nstages: {}\n")  # the pipeline itself rewrites the lock: not a change
    assert tracking.provenance("atlas") == {"dataset": "atlas", "git_commit": commit, "data_hash": ""}
    (tmp_path / "params.yaml").write_text("{a: 1}")
    assert tracking.provenance("atlas")["git_commit"] == f"{commit}+changes"


def test_foreign_project_warns_once_of_git(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    needs_root()
    with open_folder() as folder:
        monkeypatch.chdir(folder)
        monkeypatch.setenv("HOME", str(folder))  # whose .gitconfig has no remedy yet
        (folder / "params.yaml").write_text("{}")
        git("init", "-q")
        git("add", ".")
        git("commit", "-qm", "start")
        for path in (folder, folder / ".git"):
            os.chown(path, UID, UID)
        assert [tracking.provenance("atlas")["git_commit"] for _ in range(2)] == ["", ""]
        assert caplog.text.count(f"git config --global --add safe.directory {folder}") == 1
