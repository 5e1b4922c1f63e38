"""Registered versions as users of MLflow load, ask and serve them: the answers are those of `agent-r1 chat`."""

import dataclasses
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import mlflow
import pytest
from mlflow.models import Model, ModelSignature
from mlflow.types.responses import RESPONSES_AGENT_INPUT_SCHEMA, RESPONSES_AGENT_OUTPUT_SCHEMA
from transformers import AutoModelForCausalLM

from agent_r1.envs.kinds import attempts_at
from agent_r1.envs.shared import Shared
from agent_r1.files import sha256
from agent_r1.learn.model import load_tokenizer
from agent_r1.params import Params, load
from agent_r1.params.places import RunId
from agent_r1.records import Passage, Question
from agent_r1.rollout.chat import Chat
from agent_r1.rollout.episode import StepView
from agent_r1.rollout.episodes import ScriptedSampler, collect
from agent_r1.search.index import open_index
from agent_r1.tables import read_rows
from agent_r1.teaching.supervised import Lessons, fit
from agent_r1.tracking import registry
from flows.operation.answering import agent_of
from flows.operation.register import LOADED, register
from flows.policies import policy_of
from tests.answering import process_of
from tests.fixtures import FreePort, Inside

CHAMPION = "models:/agent_r1@champion"


@pytest.fixture(scope="module")
def project(small_project: Path, inside: Inside, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The small project's `ppo` is version 1; the champion, version 2, was taught to search twice for a question."""
    folder = tmp_path_factory.mktemp("registered") / "project"
    shutil.copytree(small_project, folder)
    with inside(folder), pytest.MonkeyPatch.context() as patch:
        settings = load()
        register(RunId("ppo"))
        trained = registry.find("models:/agent_r1/1").descriptor
        taught = Path("outputs/train/taught/checkpoint/policy")
        teach(settings, taught)
        descriptor = dataclasses.replace(trained, label="taught", policy=str(taught), policy_hash=sha256(taught))
        champion = registry.register(descriptor, files=[*LOADED.iterdir(), Path("params.yaml")])
        registry.promote(champion, expected=None)
        patch.delenv("MLFLOW_TRACKING_URI", raising=False)  # put back in the end
        mlflow.set_tracking_uri(f"sqlite:///{folder}/.tracking/mlflow.db")  # sets the variable, too
        yield folder
    mlflow.set_tracking_uri(None)  # type: ignore[arg-type]


def teach(settings: Params, policy: Path) -> None:
    """Fits the warm start to one episode of two searches, and saves it."""
    start, places = settings.places.warm_start, settings.places
    tokenizer = load_tokenizer(str(start))
    chat = Chat(tokenizer)
    titles = [passage.title for passage in read_rows(places.passages, Passage)[:2]]
    searches = [
        f'<tool_call>\n{{"name": "search", "arguments": {{"query": "{title}"}}}}\n</tool_call>' for title in titles
    ]
    index = open_index(settings.search, places.passages, places.index)
    with Shared(settings.env, index) as shared:
        attempts = attempts_at(read_rows(places.questions, Question)[:1], shared)
        sampler = ScriptedSampler([[*searches, "<answer>Tesk</answer>"]], chat)
        rows = collect(sampler, chat, attempts, shared, seed=0)
    model = AutoModelForCausalLM.from_pretrained(start)
    changes = {"batch_size": 4, "steps": 60, "learning_rate": 3e-3}
    fit(model, Lessons.of(rows * 4, [], 0.0), settings.warm_start.model_copy(update=changes))
    model.save_pretrained(policy)
    tokenizer.save_pretrained(policy)


@pytest.fixture(scope="module")
def chatted(project: Path) -> tuple[str, list[StepView]]:
    settings = load()
    question = read_rows(settings.places.questions, Question)[0].text
    with agent_of(policy_of(settings, CHAMPION), settings, 0.0) as agent:
        views = list(agent.ask(question, seed=0))
    assert [call.tool for view in views for call in view.step.calls] == ["search", "search"]
    return question, views


def request(question: str) -> dict[str, Any]:
    return {"input": [{"role": "user", "content": question}]}


def require_same(response: dict[str, Any], views: list[StepView]) -> None:
    items = response["output"]
    calls = [call for view in views for call in view.step.calls]
    observations = [text for view in views for text in view.observations]
    assert [(item["name"], item["arguments"]) for item in items if item["type"] == "function_call"] == [
        (call.tool, call.arguments) for call in calls
    ]
    assert [item["output"] for item in items if item["type"] == "function_call_output"] == observations
    assert items[-1]["content"][0]["text"] == views[-1].answer


def test_loaded_champion_answers_two_searches_as_chat_does(project: Path, chatted: tuple[str, list[StepView]]) -> None:
    question, views = chatted
    model = mlflow.pyfunc.load_model(CHAMPION)
    require_same(model.predict(request(question)), views)
    for messages in ([], [{"role": "system", "content": "Be brief."}, {"role": "user", "content": question}]):
        with pytest.raises(ValueError, match="one question, in one message of role user, and was sent"):
            model.predict({"input": messages})


def test_served_champion_is_as_chat(project: Path, chatted: tuple[str, list[StepView]], free_port: FreePort) -> None:
    question, views = chatted
    command = ["-m", "mlflow", "models", "serve", "-m", CHAMPION, "--env-manager", "local"]
    command += ["--port", str(port := free_port())]
    with process_of(command, f"http://127.0.0.1:{port}", project, "/ping") as url:
        response = httpx.post(f"{url}/invocations", json=request(question), timeout=240)
    assert response.status_code == 200, response.text
    require_same(response.json(), views)


def test_versions_artifact_is_small_and_describes_itself(project: Path) -> None:
    model = Model.load(CHAMPION)
    assert model.mlflow_version == mlflow.__version__
    assert model.signature == ModelSignature(RESPONSES_AGENT_INPUT_SCHEMA, RESPONSES_AGENT_OUTPUT_SCHEMA)
    folder = Path(mlflow.artifacts.download_artifacts(CHAMPION, dst_path=str(project / "downloaded")))
    assert model.load_input_example(str(folder))["input"][0]["role"] == "user"
    assert sum(path.stat().st_size for path in folder.rglob("*") if path.is_file()) < 100_000
    assert (folder / "params.yaml").read_text() == Path("params.yaml").read_text()
    assert f"mlflow=={mlflow.__version__}" in (folder / "requirements.txt").read_text()


def test_champion_without_its_folder_or_its_project_names_the_remedy(
    project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    policy = Path(registry.find(CHAMPION).descriptor.policy)
    policy.rename(policy.with_name("elsewhere"))
    try:
        with pytest.raises(ValueError, match=r"\(taught\) has gone: outputs/train/taught/.*; train it again"):
            mlflow.pyfunc.load_model(CHAMPION)
    finally:
        policy.with_name("elsewhere").rename(policy)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=r"no params.yaml in .*; run from inside the project"):
        mlflow.pyfunc.load_model(CHAMPION)
