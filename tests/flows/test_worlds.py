"""A world from its boards to its report: a small model is shown how, trained, and stands between floor and ceiling."""

import base64
import gzip
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from agent_r1.inspection.viewer import view
from agent_r1.params.places import RunId
from agent_r1.records import Outcome, Question, Trajectory
from agent_r1.tables import read_rows
from flows.commands.execute import index, prepare
from flows.evaluate import EvaluationRequest, evaluate
from flows.report import report
from flows.train import train
from flows.warm_start import warm_start
from tests.fixtures import Inside, WriteParams
from tests.reading import predictions

ICE: dict[str, Any] = yaml.safe_load(Path(__file__).with_name("ice.yaml").read_text())


@pytest.fixture(scope="module")
def ice(tmp_path_factory: pytest.TempPathFactory, write_params: WriteParams, inside: Inside) -> Path:
    folder = tmp_path_factory.mktemp("ice")
    write_params(folder, ICE)
    with inside(folder):
        prepare()
        index()
        warm_start()
        train(RunId("grpo"))
        evaluate(EvaluationRequest(RunId("grpo")))
        for baseline in ("base_tool_call", "random", "oracle"):
            evaluate(EvaluationRequest(baseline))
        report()
    return folder


def test_chance_is_the_floor_and_the_solver_the_ceiling_of_the_same_worlds(ice: Path) -> None:
    assert {row.success for row in predictions(ice / "outputs/evaluate/oracle")} == {1.0}
    assert 0 <= np.mean([row.success for row in predictions(ice / "outputs/evaluate/random")]) < 0.6
    scores = json.loads((ice / "outputs/evaluate/oracle/scores.json").read_text())
    assert (scores["success"], scores["return"], scores["outcome/ended"]) == (1.0, 1.0, 1.0)
    assert scores["success/solution_4-6"] == 1.0
    names = ("grpo", "base_tool_call", "random", "oracle")
    found = [json.loads((ice / "outputs/evaluate" / name / "hashes.json").read_text()) for name in names]
    assert len({each.pop("policy") for each in found}) == 4
    assert found == found[:1] * 4


def test_run_trains_in_a_world(ice: Path) -> None:
    rows = read_rows(ice / "outputs/train/grpo/trajectories/001.parquet", Trajectory)
    assert {row.outcome for row in rows} <= {*Outcome} - {Outcome.ANSWERED, Outcome.ABORTED}
    assert all("env" in step.rewards for row in rows for step in row.steps)
    metrics = [json.loads(line) for line in (ice / "outputs/train/grpo/metrics.jsonl").read_text().splitlines()]
    assert metrics[1]["rollout/success"] == np.mean([row.success for row in rows])
    assert metrics[1]["reward/env"] == pytest.approx(metrics[1]["rollout/success"])
    assert "rollout/em" not in metrics[1]


def test_report_speaks_of_goals(ice: Path, inside: Inside) -> None:
    page = (ice / "outputs/report/report.md").read_text()
    assert "Highest goal reached: `grpo`" in page
    assert "## Scores by solution" in page
    assert re.search(r"\| `oracle` \| 1\.000 \[0\.\d\d, 1\.00\] \|", page)
    assert "Not measured alike" not in page
    assert "hop" not in page
    with inside(ice):
        view(RunId("grpo"))
    data = re.search(r'id="data">([^<]*)', (ice / "outputs/view/grpo.html").read_text())
    assert b'"goal not reached"' in gzip.decompress(base64.b64decode(data[1]))


def test_protocol_for_answers_and_malformed_board_are_refused_before_loading(
    ice: Path, inside: Inside, monkeypatch: pytest.MonkeyPatch
) -> None:
    with inside(ice), pytest.raises(ValueError, match=r"naive_rag has no question to put, .* are frozen_lake; leave"):
        evaluate(EvaluationRequest("naive_rag"))
    rows = [Question(question_id="q", dataset="ice", split="train", text="?", env="frozen_lake", setup="{", strata={})]
    monkeypatch.setattr("agent_r1.training.assembly.read_rows", lambda *_: rows)
    with inside(ice), pytest.raises(ValueError, match=r"question 'q': a setup that is not JSON: '\{'"):
        train(RunId("grpo"), fresh=True)
