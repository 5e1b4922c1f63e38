"""Any policy under any protocol, and two evaluations compared: on the warm-started small model."""

import dataclasses
import json
import logging
import re
import shutil
from collections.abc import Callable, Iterator
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from mlflow import MlflowClient
from rich.console import Console
from transformers import AutoTokenizer

from agent_r1.evaluation.protocols import SCRIPTED
from agent_r1.inspection.printed import compare_labels, comparison_tables
from agent_r1.learn import checkpoint
from agent_r1.learn.checkpoint import Progress
from agent_r1.params import load
from agent_r1.params.places import RunId
from agent_r1.params.stages import PROTOCOLS
from agent_r1.records import Prediction, Question, Source, Trajectory
from agent_r1.rollout.sampling import PolicyWeights
from agent_r1.serving.agent import open_policy
from agent_r1.tables import read_rows, write_rows
from agent_r1.training.fitness import require_fit
from flows.evaluate import EvaluationRequest, evaluate
from flows.tryout import play
from tests.cases import laid
from tests.fixtures import PLACES, Inside, WriteParams

ASKING = [each for each in PROTOCOLS if each not in SCRIPTED]  # questions that are answered
CHANGES = laid("evaluated_any")


@pytest.fixture(scope="module")
def project(
    small_project: Path, tmp_path_factory: pytest.TempPathFactory, inside: Inside, write_params: WriteParams
) -> Path:
    """The small project with every second question in another data set, and a run whose policy is the warm start."""
    folder = tmp_path_factory.mktemp("any_policy")
    write_params(folder, CHANGES)
    for part in ("data", PLACES.warm_start):
        shutil.copytree(small_project / part, folder / part)
    policy = folder / PLACES.training(RunId("ppo")) / "checkpoint/policy"
    shutil.copytree(small_project / PLACES.warm_start, policy)
    checkpoint.seal(policy.parent, Progress(iterations=8, policy_version=7))
    rows = read_rows(folder / PLACES.questions, Question)
    write_rows(
        folder / PLACES.questions,
        [dataclasses.replace(row, dataset="other") if i % 2 else row for i, row in enumerate(rows)],
        Question,
    )
    return folder


@pytest.fixture(scope="module")
def evaluated(project: Path, inside: Inside) -> dict[str, list[Trajectory]]:
    with inside(project):
        for protocol in ASKING:
            evaluate(EvaluationRequest(str(PLACES.warm_start), protocol=protocol, as_label=f"of_{protocol}"))
        return {
            protocol: read_rows(PLACES.evaluation(f"of_{protocol}") / "trajectories.parquet", Trajectory)
            for protocol in ASKING
        }


def read_json(project: Path, label: str, file: str) -> dict[str, Any]:
    return json.loads((project / PLACES.evaluation(label) / file).read_text())


def prompts(project: Path, trajectories: list[Trajectory]) -> dict[str, str]:
    tokenizer = AutoTokenizer.from_pretrained(project / PLACES.warm_start)
    return {
        row.question_id: tokenizer.decode(row.token_ids[row.source == Source.PROMPT].tolist()) for row in trajectories
    }


def test_evaluation_of_a_policy_that_never_acts_says_so(
    project: Path, tiny_model: Path, inside: Inside, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with inside(project), caplog.at_level(logging.WARNING):
        evaluate(EvaluationRequest(str(tiny_model), as_label="tiny", into=tmp_path / "tiny"))
    [line] = [line for line in caplog.messages if "has little to learn from" in line]
    assert re.search(r": (\d+) of \1 actions are neither a call nor an answer, .* all returns are equal;", line)


@pytest.fixture
def quantised(
    project: Path, tiny_model: Path, tmp_path: Path, inside: Inside, write_params: WriteParams
) -> Iterator[str]:
    """The folder of a model in four bits, which the project names in `model.path`."""
    folder = shutil.copytree(tiny_model, tmp_path / "awq")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": {"quant_method": "awq"}}))
    write_params(project, CHANGES | {"model": {"threads": 1, "path": str(folder)}})
    with inside(project):
        yield str(folder)
    write_params(project, CHANGES)


OPENING: dict[str, Callable[[str], object]] = {
    "evaluate": lambda folder: evaluate(EvaluationRequest(folder)),
    "baseline": lambda _: evaluate(EvaluationRequest("as_shipped")),
    "try": lambda folder: list(play(RunId("ppo"), folder, None)),
    "serve": lambda folder: open_policy(load(), PolicyWeights(folder), temperature=0.0).__enter__(),
}


@pytest.mark.parametrize("opens", OPENING.values(), ids=OPENING)
def test_unfit_model_refused(opens: Callable[[str], object], quantised: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("agent_r1.rollout.engines.load_model", lambda *_: pytest.fail("it was loaded"))
    with pytest.raises(ValueError, match=r"is quantised \(awq\); take the release in bfloat16") as refused:
        opens(quantised)
    with pytest.raises(ValueError, match=re.escape(str(refused.value))):
        require_fit(quantised, load())


def test_closed_book_shows_no_passage_and_gold_all(project: Path, evaluated: dict[str, list[Trajectory]]) -> None:
    questions = {row.question_id: row for row in read_rows(project / PLACES.questions, Question)}
    for question_id, prompt in prompts(project, evaluated["closed_book"]).items():
        assert f"user\n{questions[question_id].text}" in prompt
    for question_id, prompt in prompts(project, evaluated["gold_passages"]).items():
        assert all(f"{title}: " in prompt for title in questions[question_id].gold_titles)
        assert prompt.count(": ") >= len(questions[question_id].gold_titles)
    recall = {name: read_json(project, f"of_{name}", "scores.json")["gold_recall"] for name in ASKING}
    assert (recall["closed_book"], recall["gold_passages"]) == (0.0, 1.0)
    assert 0 < recall["naive_rag"] < 1
    for name in ("naive_rag", "closed_book", "gold_passages"):
        assert all(len(row.steps) == 1 for row in evaluated[name])


def test_run_is_evaluated_on_one_data_set_under_another_protocol(project: Path, inside: Inside) -> None:
    with inside(project):
        evaluate(EvaluationRequest(RunId("ppo"), protocol="closed_book", dataset="other"))
        rows = read_rows(PLACES.evaluation("ppo-closed_book-other") / "predictions.parquet", Prediction)
        client = MlflowClient(f"sqlite:///{project}/.tracking/mlflow.db")
        shown = client.get_run((PLACES.evaluation("ppo-closed_book-other") / "mlflow_run_id").read_text())
    datasets = {row.question_id: row.dataset for row in read_rows(project / PLACES.questions, Question)}
    assert [datasets[row.question_id] for row in rows] == ["other"] * 6
    assert {(row.run, row.policy_version) for row in rows} == {("ppo-closed_book-other", 7)}
    assert shown.info.run_name == shown.data.params["variant"] == "ppo-closed_book-other"
    assert (shown.data.params["protocol"], shown.data.tags["dataset"]) == ("closed_book", "other")
    assert {"final/tokens_read", "final/tokens_sampled", "final/contains"} <= set(shown.data.metrics)
    assert not (project / PLACES.evaluation("ppo")).exists()


def test_two_evaluations_are_compared(project: Path, evaluated: dict[str, list[Trajectory]], inside: Inside) -> None:
    settings = load(project / "params.yaml")
    with inside(project):
        with pytest.raises(ValueError, match="of_gold_passages and of_closed_book were not measured alike"):
            compare_labels(settings, "of_gold_passages", "of_closed_book")
        found = compare_labels(settings, "of_gold_passages", str(PLACES.evaluation("of_closed_book")), anyway=True)
        scores = [read_json(project, f"of_{name}", "scores.json") for name in ("gold_passages", "closed_book")]
        with pytest.raises(FileNotFoundError, match=r"no evaluation 'of_gold' in .* mean 'of_gold_passages'"):
            compare_labels(settings, "of_gold", "of_closed_book")
        with pytest.raises(ValueError, match="are the same evaluation; name two"):
            compare_labels(settings, "of_closed_book", str(PLACES.evaluation("of_closed_book")))
    assert found.differing == ["prompt", "protocol"]
    for row in found.measured:
        assert (row.a.mean, row.b.mean) == pytest.approx([each[row.measure] for each in scores], abs=1e-4)
    assert len(found.pairs) == 12
    written = StringIO()
    Console(width=200, file=written).print(comparison_tables(found))
    page = written.getvalue()
    assert "Not measured alike: prompt, protocol differ." in page
    assert f"Of 12 questions {len(found.only_a_right)} are right in of_gold_passages alone" in page
    assert "tokens_read" in page
    for pair in found.only_a_right[:3]:
        assert pair.question.text in page
