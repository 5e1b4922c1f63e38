"""The recurring evaluation on the warm-started small model: a real server, a real store, and once a real process."""

import dataclasses
import logging
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from mlflow import MlflowClient

from agent_r1 import tracking
from agent_r1.files import sha256
from agent_r1.inspection.stored import PageTrajectory, When
from agent_r1.inspection.viewer import view
from agent_r1.params.places import RunId
from agent_r1.records import Prediction
from agent_r1.tables import write_rows
from agent_r1.tracking import registry
from agent_r1.tracking.registry import Version
from flows.evaluate import EvaluationRequest, evaluate
from flows.graph import StageFailed
from flows.operation.deployments import Drifted, evaluation
from flows.operation.promote import crown
from flows.operation.register import register
from flows.pipeline import run_command
from tests.cases import cases, graph
from tests.fixtures import ROOT, Inside, WriteParams
from tests.reading import predictions

HOME = Path("outputs/history/agent_r1-v1")
POLICY = Path("outputs/train/ppo/checkpoint/policy")


@pytest.fixture(autouse=True)
def project(
    small_project: Path,
    tmp_path: Path,
    write_params: WriteParams,
    inside: Inside,
    prefect_api: str,
    monkeypatch: pytest.MonkeyPatch,
) -> Iterator[Path]:
    write_params(tmp_path, {"engine": {"kind": "transformers"}, "evaluate": {"questions": 12}})
    for name in ("data", "outputs"):
        (tmp_path / name).mkdir()
    for part in ("data/prepared", "data/index", "outputs/warm_start"):
        (tmp_path / part).symlink_to(small_project / part)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    with inside(tmp_path):
        yield tmp_path


@pytest.fixture
def version(register_descriptor: Callable[..., Version]) -> Version:
    shutil.copytree("outputs/warm_start", POLICY)
    return register_descriptor(sha256(POLICY), policy_version=7)


@pytest.fixture
def in_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Evaluates and shows in this process, where imports cost nothing."""

    def run(stage: str, *arguments: str) -> None:
        policy, *options = arguments
        if stage == "view":
            return view(RunId.parse(policy))
        values: dict[str, Any] = {
            option.removeprefix("--"): value for option, value in zip(options[::2], options[1::2], strict=True)
        }
        return evaluate(EvaluationRequest(policy, **values | {"into": Path(values["into"])}))

    monkeypatch.setattr("flows.operation.deployments.run_command", run)


@pytest.fixture
def pages(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, ...]]:
    """What pages are asked for; there is nothing to show of this run, so every one fails."""
    asked: list[tuple[str, ...]] = []

    def run(stage: str, *arguments: str) -> None:
        if stage == "view":
            asked.append(arguments)
            raise StageFailed("stage view failed")
        run_command(stage, *arguments)

    monkeypatch.setattr("flows.operation.deployments.run_command", run)
    return asked


def test_champion_is_compared_with_its_earlier_evaluation(version: Version, in_process: None, project: Path) -> None:
    """Until its policy has gone, which fails the next one."""
    crown("ppo")
    evaluation()
    [first] = HOME.iterdir()
    rows = predictions(first)
    assert [(row.run, row.seed, row.policy_version) for row in rows] == [("agent_r1-v1", 0, 7)] * 12
    evaluation()
    second = max(HOME.iterdir())
    assert predictions(second) == rows
    client = MlflowClient(f"sqlite:///{project}/.tracking/mlflow.db")
    run = client.get_run((second / "mlflow_run_id").read_text())
    assert (run.info.run_name, run.data.tags["model_version"]) == ("agent_r1-v1", "1")
    assert run.data.metrics["final/changed_questions"] == 0.0
    assert run.data.metrics["final/questions"] == 12
    shown = {found.info.run_id for found in client.search_runs([run.info.experiment_id], "tags.model_version = '1'")}
    assert {(folder / "mlflow_run_id").read_text() for folder in (first, second)} < shown  # with the training's own

    was = float(sum(row.success for row in rows) < 6)  # as if every question had been answered right, or wrong
    write_rows(
        second / "predictions.parquet",
        [dataclasses.replace(row, answer="Nowhere", success=was) for row in rows],
        Prediction,
    )
    message = r"answers 12 questions differently from agent_r1-v1 of \w+\.\w+, beyond chance on atlas"
    with pytest.raises(Drifted, match=message) as raised:
        evaluation()
    assert all(f"  {row.question_id}: 'Nowhere' -> " in str(raised.value) for row in rows)
    assert not (project / "outputs/evaluate").exists()  # nothing that the report stage depends on
    evaluations = sorted(HOME.iterdir())
    shutil.rmtree(POLICY)
    with pytest.raises(ValueError, match=r"the policy of models:/agent_r1/1 .* has gone"):
        evaluation([version.reference])
    assert sorted(HOME.iterdir()) == evaluations


def test_challenger_evaluated(version: Version, caplog: pytest.LogCaptureFixture, pages: list[tuple[str, ...]]) -> None:
    with caplog.at_level(logging.WARNING):
        state = evaluation(["ppo"], dataset="atlas", return_state=True)
    assert str(state.message).startswith("agent_r1-v1: exact match ")
    assert pages == [("ppo",)]
    assert len(list(HOME.with_name("agent_r1-v1-atlas").iterdir())) == 1
    assert "has no champion; the first becomes one only by `agent-r1 promote" in caplog.text
    assert registry.champion() is None
    assert "no page shows test questions before and after training: stage baseline@base_tool_call failed" in caplog.text
    assert "ppo has no new page of its trajectories: stage view failed" in caplog.text


def test_page_shows_the_same_questions_before_and_after_training(
    ppo: Path, in_process: None, project: Path, lay_dvc: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where only a training has been made so far, and nobody has evaluated what it started from."""
    shown: list[list[PageTrajectory]] = []

    def page(_title: str, _about: Any, groups: list[list[PageTrajectory]], _decode: Any) -> str:
        shown.extend(groups)
        return ""

    monkeypatch.setattr("agent_r1.inspection.viewer.page", page)
    training = POLICY.parents[1]
    shutil.copytree(ppo, training)
    with tracking.start("ppo-seed0", {}, tracking.provenance("atlas")) as tracked:
        (training / "mlflow_run_id").write_text(tracked.run_id)
    (project / "dvc.yaml").write_text(graph("baseline"))
    lay_dvc(project)
    register(RunId("ppo"))

    evaluation(["ppo"])
    pairs = [group for group in shown if group[0].when is not When.TRAINING]
    assert len(pairs) == 12
    assert {tuple(each.when for each in pair) for pair in pairs} == {(When.BEFORE, When.AFTER)}
    assert all(before.question is after.question for before, after in pairs)


@cases("models, dataset, message")
def test_unknown_model_or_data_set_is_refused(models: list[str] | None, dataset: str | None, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        evaluation(models, dataset)
