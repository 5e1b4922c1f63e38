"""The page and the traces of a real small run."""

import base64
import gzip
import json
import re
import shutil
from collections import Counter
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs

import pytest
from mlflow import MlflowClient

from agent_r1.files import sha256
from agent_r1.inspection.viewer import view
from agent_r1.params.places import RunId
from agent_r1.records import Prediction, Trajectory
from agent_r1.tables import read_rows, write_rows
from agent_r1.tracking import registry
from flows.commands.look import health
from flows.operation.register import register
from flows.train import train
from tests.fixtures import Inside, WriteParams


@pytest.fixture
def project(ppo: Path, small_project: Path, tmp_path: Path) -> Path:
    """A copy of the project in which `ppo` was trained and nothing evaluated; its store is the copy's own."""
    copy = tmp_path / "project"
    shutil.copytree(small_project, copy)
    (copy / "outputs/train/ppo/mlflow_run_id").unlink()
    for made in (".tracking", "outputs/evaluate"):
        shutil.rmtree(copy / made, ignore_errors=True)
    return copy


def content(page: Path) -> dict[str, Any]:
    found = re.search(r'id="data">([A-Za-z0-9+/=]*)<', page.read_text())
    return json.loads(gzip.decompress(base64.b64decode(found[1])))


def evaluated(project: Path, ppo_policy: str) -> None:
    """Stands in for the evaluations of both policies: rows of training, put to test questions that they are not of."""
    rows = read_rows(project / "outputs/train/ppo/trajectories/000.parquet", Trajectory)[:4]
    for name, policy in (("base_tool_call", "warm"), ("ppo", ppo_policy)):
        folder = project / "outputs/evaluate" / name
        write_rows(folder / "trajectories.parquet", rows, Trajectory)
        write_rows(folder / "predictions.parquet", list[Prediction](), Prediction)
        hashes = {"questions": sha256(project / "data/prepared/questions.parquet"), "limits": "l", "policy": policy}
        (folder / "hashes.json").write_text(json.dumps(hashes))


def test_page_shows_training_and_is_refused_by_other_weights(
    project: Path, inside: Inside, write_params: WriteParams
) -> None:
    with inside(project):
        view(RunId("ppo"), trajectories=12)
    page = content(project / "outputs/view/ppo.html")
    episodes = page["episodes"]
    assert {episode["when"] for episode in episodes} == {"training"}
    assert sorted(episode["iteration"] for episode in episodes) == [0] * 6 + [2] * 6, "12 are for two iterations"
    assert all("gap" in episode and "advantages" in episode for episode in episodes)
    letters = {letter for episode in episodes for letter in episode["gap"]}
    assert max(abs(page["numbers"][ord(letter) - ord("]")]) for letter in letters) < 1e-4
    assert page["weights"] == {"agent_r1": 1.0}
    write_params(project, {"train": {"credit": {"rewards": {"valid_call": 5.0}}}})
    with inside(project), pytest.raises(ValueError, match=r"with the reward weights of ppo in params\.yaml; set them"):
        view(RunId("ppo"), trajectories=6)


def test_health_names_failures_with_links(project: Path, inside: Inside, capsys: pytest.CaptureFixture[str]) -> None:
    """The commands, links and kinds fit: the page holds the latest episode of each kind."""
    with inside(project):
        health("ppo")
        printed = capsys.readouterr().out
        [command] = re.findall("`agent-r1 (.+?)`", printed)
        assert command == "view ppo"
        view(RunId("ppo"), trajectories=16)
        with pytest.raises(ValueError, match="there is no run 'pppo' under runs:; did you mean 'ppo'"):
            health("pppo")
        with pytest.raises(FileNotFoundError, match="ppo-seed7 holds no finished iteration"):
            health("ppo-seed7")
    page = content(project / "outputs/view/ppo.html")
    links = re.findall(r"file://(\S+)#(\S+)", printed)
    assert {Path(path) for path, _ in links} == {project / "outputs/view/ppo.html"}
    kinds = [parse_qs(fragment)["kind"][0] for _, fragment in links]
    assert kinds
    assert kinds == [*page["failures"]]
    shown = {episode["id"] for episode in page["episodes"]}
    assert len(shown) == 16
    assert all(shown.intersection(page["failures"][kind]) for kind in kinds[:2])


def shown(project: Path) -> Counter[str]:
    """How many episodes of each time a page shows."""
    view(RunId("ppo"), trajectories=12)
    return Counter(episode["when"] for episode in content(project / "outputs/view/ppo.html")["episodes"])


def test_latest_answers_before_and_after_stand_side_by_side_and_no_other_policys(
    project: Path, inside: Inside, caplog: pytest.LogCaptureFixture
) -> None:
    with inside(project):
        evaluated(project, sha256(project / "outputs/train/ppo/checkpoint/policy"))
        assert shown(project) == {"before": 3, "after": 3, "training": 6}
        evaluated(project, "another")
        assert shown(project) == {"training": 12}
        assert "outputs/evaluate/ppo is of another policy" in caplog.text
        train(RunId("ppo"))  # is complete, and takes up an MLflow run
        register(RunId("ppo"))
        version = registry.of_policy(sha256(project / "outputs/train/ppo/checkpoint/policy"))
        evaluated(project, version.descriptor.policy_hash)
        again = project / "outputs/history" / version.name / "20261121T030000.000000Z"
        again.parent.mkdir(parents=True)
        (project / "outputs/evaluate/ppo").rename(again)
        assert shown(project) == {"before": 3, "after": 3, "training": 6}, "of the registered policy"


def test_page_and_traces_go_to_the_run(ppo: Path, small_project: Path, inside: Inside, tmp_path: Path) -> None:
    with inside(small_project):
        for _ in range(2):
            view(RunId("ppo"), out=tmp_path / "page.html", trajectories=12, traces=3)
        client = MlflowClient(f"sqlite:///{small_project}/.tracking/mlflow.db")
        run = client.get_run((ppo / "mlflow_run_id").read_text())
        stored = client.download_artifacts(run.info.run_id, "viewer.html", str(tmp_path))
        traces = client.search_traces(locations=[run.info.experiment_id], run_id=run.info.run_id)
    assert Path(stored).read_text() == (tmp_path / "page.html").read_text()
    assert len(traces) == 3
    assert all(trace.data.spans[0].inputs["question"] for trace in traces)
