"""The whole graph on the small project, in one process: a trained run, its version, both baselines, and the page."""

import dataclasses
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from huggingface_hub import ModelCard
from mlflow import MlflowClient
from transformers import AutoModelForCausalLM

from agent_r1 import tracking
from agent_r1.answers import exact_match
from agent_r1.envs.tool_env import SYSTEM
from agent_r1.evaluation.protocols import open_exam
from agent_r1.files import read_metrics, sha256
from agent_r1.identity import read_start
from agent_r1.inspection.printed import compare_labels
from agent_r1.learn.model import load_tokenizer
from agent_r1.params import Params, load
from agent_r1.params.places import RunId, policy_in
from agent_r1.params.sections import override, validated
from agent_r1.params.stages import Protocol
from agent_r1.records import GREEDY, Question, Trajectory
from agent_r1.rollout.chat import Chat
from agent_r1.tables import read_rows
from agent_r1.training.assembly import Assembly
from flows.commands.look import chat, profile
from flows.evaluate import EvaluationRequest, evaluate
from flows.operation.answering import agent_of
from flows.operation.export import NOT_SCORED, export, model_card, prompt_of
from flows.operation.register import register
from flows.policies import policy_of, version_of
from flows.report import report
from flows.train import train
from tests.fixtures import PLACES, Inside, WriteParams
from tests.reading import predictions

COMMIT = "a1" * 20
NAMES = ["ppo", "base_tool_call", "naive_rag"]
ASKED = 12
SAMPLING = ("samples", "temperature")
pytestmark = pytest.mark.walk


@pytest.fixture(scope="module")
def evaluated(small_project: Path, ppo: Path, inside: Inside) -> Path:
    with inside(small_project):
        evaluate(EvaluationRequest(RunId("ppo")))
        for baseline in NAMES[1:]:
            evaluate(EvaluationRequest(baseline))
        report()
    return small_project


def trajectories(project: Path, name: str) -> list[Trajectory]:
    return read_rows(project / PLACES.evaluation(name) / "trajectories.parquet", Trajectory)


def content(project: Path, name: str, file: str) -> dict[str, Any]:
    return json.loads((project / PLACES.evaluation(name) / file).read_text())


def test_policy_leaves_project_whole_with_a_card(evaluated: Path, ppo: Path, inside: Inside, tmp_path: Path) -> None:
    with inside(evaluated):
        settings = load()
        policy = policy_of(settings, RunId("ppo"))
        tracked = tracking.run_of(PLACES.training(RunId("ppo")))
        tracked.tag("git_commit", COMMIT)  # the project of the tests is in no repository
        export(settings, policy, tmp_path / "agent", "mit")
        tracked.tag("git_commit", "")
        with pytest.raises(ValueError, match="agent is there already; name another folder, nothing is replaced"):
            export(settings, policy, tmp_path / "agent", "mit")
        shutil.copytree(PLACES.warm_start, tmp_path / "unscored")
        (tmp_path / "unscored/other").write_text("makes other weights of it")
        bare = policy_of(settings, str(tmp_path / "unscored"))
        unscored = model_card(settings, bare, "other", prompt_of(settings, bare))
    exported = AutoModelForCausalLM.from_pretrained(tmp_path / "agent")
    learned = AutoModelForCausalLM.from_pretrained(policy_in(ppo))
    assert all(torch.equal(a, b) for a, b in zip(exported.parameters(), learned.parameters(), strict=True))
    card, scores = ModelCard.load(tmp_path / "agent/README.md"), content(evaluated, "ppo", "scores.json")
    assert (card.data.license, card.data.tags[0]) == ("mit", "agent_r1")
    [result] = card.data.eval_results
    assert (result.metric_type, result.metric_value) == ("exact_match", scores["success"])
    assert f"- this policy: exact match {scores['success']:.3f} [" in card.text
    assert "- `base_tool_call`, before reinforcement learning: exact match " in card.text
    assert f"- sha256 of the weights' folder: {content(evaluated, 'ppo', 'hashes.json')['policy']}" in card.text
    assert (unscored.data.eval_results, NOT_SCORED in unscored.text) == (None, True)
    started = read_start(ppo)
    assert f"- commit of the code: {COMMIT}\n" in card.text
    assert f"- sha256 of the passages: {started.inputs['passages']}" in card.text
    assert f"- fingerprint of the configuration: {started.fingerprint}" in card.text


@pytest.mark.slow  # a process that imports transformers
def test_card_says_how_to_ask_the_policy_without_the_project(evaluated: Path, inside: Inside, tmp_path: Path) -> None:
    """Its snippet runs where the project cannot be imported, and acts as the project's own agent does."""
    with inside(evaluated):
        settings = load()
        policy = policy_of(settings, RunId("ppo"))
        export(settings, policy, tmp_path / "agent", "mit")
        question = "Where was the director of the film born?"  # of the card's snippet
        with agent_of(policy, settings, 0.0) as agent:
            first = next(agent.ask(question, seed=0)).action
    card = (tmp_path / "agent/README.md").read_text()
    [schema], [code] = (re.findall(rf"```{name}\n(.*?)```", card, re.DOTALL) for name in ("json", "python"))
    assert json.loads(schema) == json.loads((tmp_path / "agent/prompt.json").read_text())
    assert json.loads(schema)["messages"][0] == {"role": "system", "content": SYSTEM}
    assert [name["function"]["name"] for name in json.loads(schema)["tools"]] == ["search"]
    alone = f"import sys\nsys.modules |= dict.fromkeys(('agent_r1', 'flows'))\n{code}"
    process = subprocess.run([sys.executable, "-c", alone], cwd=tmp_path / "agent", capture_output=True, text=True)
    assert (process.returncode, process.stdout.startswith(f"{first}\n")) == (0, True), (first, process)


def test_nothing_breaks_out_of_a_card(evaluated: Path, inside: Inside) -> None:
    hostile = "\n```\n---\nlicense: none\n---\n<script>[x](y)\x1b\u202e"
    with inside(evaluated):
        settings = load()
        env = settings.env.model_copy(update={"instructions": hostile})
        bare = dataclasses.replace(policy_of(settings, ""), title=hostile)
        prompt = prompt_of(settings.model_copy(update={"env": env}), bare)
        model = settings.model.model_copy(update={"path": hostile})
        card = model_card(settings.model_copy(update={"model": model}), bare, "mit", prompt)
    assert json.loads(prompt[0])["messages"][0]["content"].endswith(hostile)
    assert (card.data.license, card.data.base_model) == ("mit", hostile)
    assert [line for line in str(card).splitlines() if line.startswith(("```", "---"))] == [
        *["---"] * 2,
        *["```json", "```"],
        *["```python", "```"],
        *["```"] * 2,
    ]
    assert not re.search("[\x1b\u202e]|(?<!\\\\)<script", card.text.partition("```json")[0])


@pytest.mark.parametrize("name", NAMES)
def test_every_test_question_is_answered_and_graded(evaluated: Path, name: str) -> None:
    questions = {
        row.question_id: row for row in read_rows(evaluated / PLACES.questions, Question) if row.split == "test"
    }
    rows = predictions(evaluated / PLACES.evaluation(name))
    assert len({row.question_id for row in rows}) == len(rows) == ASKED
    for row, trajectory in zip(rows, trajectories(evaluated, name), strict=True):
        assert (row.run, row.seed, row.question_id) == (name, 0, trajectory.question_id)
        assert (row.answer, row.steps) == (trajectory.answer, len(trajectory.steps))
        assert row.policy_version == trajectory.policy_version == (2 if name == "ppo" else 0)
        assert row.success == row.facts["em"] == exact_match(row.answer, questions[row.question_id].answers)
    scores = content(evaluated, name, "scores.json")
    assert scores["em"] == pytest.approx(np.mean([row.success for row in rows]), abs=1e-4)
    assert not [key for key in scores if key.endswith(("/low", "/high"))]
    calls = sum(
        call.tool == "search"
        for episode_row in trajectories(evaluated, name)
        for s in episode_row.steps
        for call in s.calls
    )
    of_search = pytest.approx(calls / ASKED, abs=1e-4) if name != "naive_rag" else None
    assert scores.get("tool/search/calls") == of_search


def test_agents_get_the_same_questions_and_differ_in_prompt_and_policy(evaluated: Path) -> None:
    hashes = {name: content(evaluated, name, "hashes.json") for name in NAMES}
    settings = {"questions", "passages", "index", "protocol", "prompt", "limits", "policy", *SAMPLING}
    assert [set(names) for names in hashes.values()] == [settings] * 3
    differing = {key for key in hashes["ppo"] if hashes["ppo"][key] != hashes["base_tool_call"][key]}
    assert differing == {"policy"}
    differing = {key for key in hashes["naive_rag"] if hashes["naive_rag"][key] != hashes["base_tool_call"][key]}
    assert differing == {"protocol", "prompt"}
    read = {"questions": PLACES.questions, "passages": PLACES.passages}
    assert {name: hashes["ppo"][name] for name in read} == {name: sha256(evaluated / read[name]) for name in read}
    ids = [[row.question_id for row in predictions(evaluated / PLACES.evaluation(name))] for name in NAMES]
    assert ids[0] == ids[1] == ids[2]


@pytest.mark.slow  # two evaluations more
def test_samples_beside_greedy(evaluated: Path, tmp_path: Path, inside: Inside, write_params: WriteParams) -> None:
    shutil.copytree(evaluated, tmp_path / "copy")
    write_params(tmp_path / "copy", {"evaluate": {"samples": 3, "temperature": 1.0}})
    with inside(tmp_path / "copy"):
        for label in ("sampled", "again"):
            evaluate(EvaluationRequest(RunId("ppo"), as_label=label))
        rows, scores = predictions(PLACES.evaluation("sampled")), content(Path(), "sampled", "scores.json")
        assert [row.sample for row in rows] == [*[0, 1, 2] * ASKED, *[GREEDY] * ASKED]
        beside = [(row.question_id, row.answer, row.success) for row in rows[3 * ASKED :]]
        assert beside == [(row.question_id, row.answer, row.success) for row in predictions(PLACES.evaluation("ppo"))]
        assert scores["greedily"] == content(Path(), "ppo", "scores.json")["success"]
        rows = rows[: 3 * ASKED]
        assert [row.question_id for row in rows[::3]] == [row.question_id for row in rows[2::3]]
        assert len(rows) == 3 * scores["questions"] == 3 * ASKED
        right = np.reshape([row.success for row in rows], (ASKED, 3))
        assert scores["success"] == pytest.approx(right.mean(), abs=1e-4)
        assert scores["pass_at_3"] == pytest.approx(right.any(axis=1).mean(), abs=1e-4)
        assert scores["pass_hat_3"] == pytest.approx(right.all(axis=1).mean(), abs=1e-4)
        drawn = [[row.token_ids.tolist() for row in trajectories(Path(), label)] for label in ("sampled", "again")]
        assert drawn[0] == drawn[1]
        with pytest.raises(ValueError, match="they differ in samples, temperature; evaluate both"):
            compare_labels(load(), "sampled", "ppo")
        comparison = compare_labels(load(), "sampled", "ppo", anyway=True)
        assert (len(comparison.pairs), len(comparison.pairs[0].a.answers), len(comparison.pairs[0].b.answers)) == (
            ASKED,
            3,
            1,
        )
        stored = PLACES.evaluation("ppo") / "hashes.json"  # of a version without these two
        old = {name: value for name, value in content(Path(), "ppo", "hashes.json").items() if name not in SAMPLING}
        stored.write_text(json.dumps(old))
        assert compare_labels(load(), "base_tool_call", "ppo").differing == []


def test_world_is_profiled_before_training(evaluated: Path, inside: Inside, capsys: pytest.CaptureFixture[str]) -> None:
    with inside(evaluated):
        profile("ppo", questions=6, samples=2)
    first, *_, groups, smaller, iteration, tool = capsys.readouterr().out.splitlines()
    assert first.startswith("Training questions, exact match with 95 % intervals over questions")
    assert groups.startswith("Of 6 groups of 2 samples ")
    assert smaller.startswith("Success differs in ")
    assert iteration.startswith("An iteration of the run, ")
    assert tool.startswith("search: ")


def test_edited_tool_differs(evaluated: Path, tmp_path: Path, inside: Inside, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where tools are called: from passages in the prompt an agent is measured as before."""
    file = tmp_path / "users_tools.py"
    monkeypatch.syspath_prepend(str(tmp_path))
    with inside(evaluated):
        whole = load().model_dump(mode="json", by_alias=True)
        offered = {"env": {"tools": {"functions": {"double": {"module": "users_tools"}}}}}
        settings = validated(Params, override(whole, offered), "with a tool")

        def told(protocol: Protocol) -> tuple[dict[str, str], dict[str, str]]:
            chat = Chat(load_tokenizer(settings.places.warm_start))
            asked = read_rows(PLACES.questions, Question)[:1]
            with open_exam(protocol, asked, chat, settings) as exam:
                of_a_training = Assembly(settings, RunId("ppo"), settings.places.warm_start).inputs(exam.shared)
                return exam.conditions(), of_a_training

        file.write_text('def double(number: int) -> str:\n    """Doubles."""\n    return str(2 * number)\n')
        before, rag = told("tool_call"), told("naive_rag")
        file.write_text(file.read_text().replace("2 * number", "number << 1"))
        for earlier, now in zip(before, told("tool_call"), strict=True):
            assert {name for name in now if now[name] != earlier[name]} == {"tool double"}
        assert told("naive_rag")[0] == rag[0]


@pytest.mark.slow  # a training and three evaluations more
def test_run_with_an_env_of_its_own_is_trained_measured_and_asked_in_it(
    evaluated: Path, tmp_path: Path, inside: Inside, write_params: WriteParams, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two steps and a calculator; its registered version too. The warm start has what params.yaml says."""
    own = {"env": {"max_steps": 2, "tools": {"calculator": {}}}, "iterations": 2}
    shutil.copytree(evaluated, tmp_path / "copy")
    write_params(tmp_path / "copy", {"runs": {"ppo": {}, "own": own}})
    with inside(tmp_path / "copy"):
        train(RunId("own"))
        register(RunId("own"))
        version = version_of("own", load())
        evaluate(EvaluationRequest(RunId("own")))
        evaluate(EvaluationRequest(version.reference, as_label="registered"))
        evaluate(EvaluationRequest("base_tool_call"))
        for name, steps in (("own", 2), ("registered", 2), ("base_tool_call", 4)):
            limits = content(Path(), name, "hashes.json")["limits"]
            assert (f"max_steps {steps}," in limits, "'calculator': {}" in limits) == (True, steps == 2)
            assert max(row.steps for row in predictions(PLACES.evaluation(name))) <= steps
            client = MlflowClient(f"sqlite:///{Path.cwd()}/.tracking/mlflow.db")
            tracked = client.get_run((PLACES.evaluation(name) / "mlflow_run_id").read_text())
            assert tracked.data.params["env.max_steps"] == str(steps)
            assert ("final/tool/calculator/calls" in tracked.data.metrics) == (steps == 2)
        rows = read_rows(PLACES.training(RunId("own")) / "trajectories/000.parquet", Trajectory)
        assert max(len(row.steps) for row in rows) == 2
        for word in ("own", version.reference):
            asked = []
            monkeypatch.setattr("agent_r1.serving.conversation.chat", lambda *_: None)
            opened = "flows.operation.answering.open_agent"
            monkeypatch.setattr(opened, lambda own, *_, asked=asked, **__: asked.append(own.env))
            chat(word)
            assert asked == [load().of(RunId("own")).env]


def test_mlflow_has_the_final_scores_beside_the_training(evaluated: Path, inside: Inside) -> None:
    with inside(evaluated):
        client = MlflowClient(f"sqlite:///{evaluated}/.tracking/mlflow.db")
        for name in NAMES:
            tracked = client.get_run((evaluated / PLACES.evaluation(name) / "mlflow_run_id").read_text())
            assert tracked.data.params["variant"] == name
            assert tracked.data.metrics["final/em"] == content(evaluated, name, "scores.json")["em"]
            assert ("policy/loss" in tracked.data.metrics) == (name == "ppo")
            assert "report/report.md" in [file.path for file in client.list_artifacts(tracked.info.run_id, "report")]
            assert client.list_artifacts(tracked.info.run_id, "examples")
            [spent] = read_metrics(evaluated / PLACES.evaluation(name))
            assert tracked.data.metrics["final/cost/evaluation_core_s"] == spent["cost/evaluation_core_s"] > 0
        trained = (evaluated / PLACES.training(RunId("ppo")) / "mlflow_run_id").read_text()
        assert (evaluated / PLACES.evaluation("ppo") / "mlflow_run_id").read_text() == trained


def test_report_names_every_agent(evaluated: Path) -> None:
    page = (evaluated / PLACES.report() / "report.md").read_text()
    for name in NAMES:
        assert page.count(f"| `{name}` |") >= 4  # exact match by hops and by kind, F1, tool calls
    assert {path.stem for path in (evaluated / PLACES.scores()).iterdir()} == set(NAMES)
    for picture in ("learning_curves.png", "final_scores.png"):
        assert f"]({picture})" in page
        assert (evaluated / PLACES.report() / picture).read_bytes().startswith(b"\x89PNG")
