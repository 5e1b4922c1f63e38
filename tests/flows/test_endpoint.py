"""A model behind an endpoint among the evaluations, and the small project's agent behind one of its own."""

import json
import re
import shutil
import subprocess
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
from mlflow import MlflowClient

from agent_r1.evaluation.scores import asked_questions
from agent_r1.faults import TooManyAborted
from agent_r1.http.endpoint import ENDPOINT_KEY
from agent_r1.inspection.printed import compare_labels
from agent_r1.params import load
from agent_r1.params.places import RunId
from agent_r1.records import Outcome, Prediction, Question, Trajectory
from agent_r1.tables import read_rows, write_rows
from flows.commands import execute
from flows.commands.look import chat
from flows.commands.operate import serve_agent
from flows.evaluate import EvaluationRequest, evaluate
from flows.report import report
from tests.answering import Heard, Said, answering, wait_until_healthy
from tests.cases import cases
from tests.fixtures import PLACES, FreePort, Inside, WriteParams

PATIENCE_S = 300.0


@pytest.fixture
def project(small_project: Path, tmp_path: Path, write_params: WriteParams) -> Path:
    """The small project's data and warm start, and what is evaluated in a folder of its own."""
    for name in ("data", PLACES.warm_start, Path(PLACES.outputs) / "train"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).symlink_to(small_project / name)
    changes = {"repro_baselines": ["base_tool_call"]}
    write_params(tmp_path, changes | {"env": {"aborted_share": 0.1}, "engine": {"server": {"retries": 0}}})
    return tmp_path


def said(text: str) -> Said:
    return 200, json.dumps({"choices": [{"message": {"content": text}, "finish_reason": "stop"}]}).encode()


def test_model_that_somebody_serves_stands_beside_a_baseline(project: Path, inside: Inside) -> None:
    """It searches for the question, and answers with the last word that it read."""
    heard: list[list[dict[str, str]]] = []

    def play(request: Heard) -> Said:
        messages = request.body["messages"]
        heard.append(messages)
        if len(messages) > 2:
            return said(f"<answer>{messages[-1]['content'].split()[-2].strip('.')}</answer><|im_end|>")
        call = {"name": "search", "arguments": {"query": messages[1]["content"]}}
        return said(f"<think>Look.</think><tool_call>{json.dumps(call)}</tool_call>")

    settings = load(project / "params.yaml")
    with inside(project):
        with answering(play) as url:
            evaluate(EvaluationRequest("org/big", endpoint=url))
        evaluate(EvaluationRequest("base_tool_call"))
        evaluate(EvaluationRequest(RunId("ppo")))
        report(beside="org--big")
        page = (PLACES.report().with_name("report_beside") / "report.md").read_text()
        with pytest.raises(FileNotFoundError, match="there is no evaluation 'org' in outputs/evaluate; evaluate it"):
            report(beside="org")
        rows = read_rows(PLACES.evaluation("org--big") / "trajectories.parquet", Trajectory)
        comparison = compare_labels(settings, "org--big", "base_tool_call", anyway=True)
        client = MlflowClient(f"sqlite:///{project}/.tracking/mlflow.db")
        tracked = client.get_run((PLACES.evaluation("org--big") / "mlflow_run_id").read_text()).data
        hashes = json.loads((PLACES.evaluation("org--big") / "hashes.json").read_text())
    assert comparison.differing == ["limits"]
    labels = ["ppo", "base_tool_call", "org--big"]
    assert [name for name in labels if f"\n| `{name}`" in page] == labels
    assert "limits" in page
    assert not (project / PLACES.report()).exists()
    assert len(comparison.pairs) == 12
    assert hashes["policy"] == tracked.params["model.path"] == f"org/big at {url}"
    assert hashes["limits"].endswith("engine endpoint: text, not token-exact")
    assert tracked.params["engine"] == "endpoint: text, not token-exact"
    assert tracked.metrics["final/tool_calls"] == 1.0
    assert not any(row.logprobs.any() for row in rows)
    assert {(row.outcome, len(row.steps)) for row in rows} == {(Outcome.ANSWERED, 2)}
    first, second = (messages for messages in heard if messages[1] == heard[0][1])
    assert [message["role"] for message in second] == ["system", "user", "assistant", "user"]
    assert second[:2] == first
    assert '"name": "search"' in first[0]["content"]
    assert second[2]["content"].startswith("<think>Look.</think><tool_call>{")
    assert re.fullmatch(r"<tool_response>\n.*\n</tool_response>", second[3]["content"], re.DOTALL)


def test_outage_is_the_worlds_fault_and_too_many_end_the_stage(project: Path, inside: Inside) -> None:
    """One question of twelve is never answered; then none is."""
    with inside(project):
        questions = asked_questions(read_rows(PLACES.questions, Question), 12, seed=0)
        unlucky = questions[0].text

        def play(heard: Heard) -> Said:
            return (503, b"busy") if heard.body["messages"][1]["content"] == unlucky else said("<answer>x</answer>")

        with answering(play) as url:
            evaluate(EvaluationRequest("m", endpoint=url, as_label="all"))
            aborted = json.loads((PLACES.evaluation("all") / "scores.json").read_text())["aborted"]
            outages = pytest.raises(TooManyAborted, match=r"cut \d+ of 12 .*the endpoint .*does not answer: status 503")
            with answering(lambda _: (503, b"busy")) as down, outages:
                evaluate(EvaluationRequest("m", endpoint=down, as_label="down"))
    assert aborted == 1.0
    assert not (project / PLACES.evaluation("down")).exists()


def test_evaluation_that_is_cut_short_asks_for_the_rest_alone(project: Path, inside: Inside) -> None:
    """The endpoint refuses after 9 answers, and is asked again; one conversation is too long for its model."""
    heard: list[str] = []

    def play(request: Heard) -> Said:
        text = request.body["messages"][1]["content"]
        if text == long:
            return 400, b'{"error": {"message": "no", "code": "context_length_exceeded"}}'
        heard.append(text)
        return (402, b"no credit") if len(heard) > most else said("<answer>x</answer>")

    with inside(project), answering(play) as url:
        long = asked_questions(read_rows(PLACES.questions, Question), 12, seed=0)[0].text
        answers, most = PLACES.evaluation("m").with_name("m.answers.jsonl"), 9
        with pytest.raises(ValueError, match="refused with status 402: no credit"):
            evaluate(EvaluationRequest("m", endpoint=url))
        for _ in range(200):  # an answer that was under way is kept as soon as it is there
            if len(answers.read_bytes().split()) == 9:
                break
            time.sleep(0.05)
        answered, most = set(heard[:9]), 99
        heard.clear()
        evaluate(EvaluationRequest("m", endpoint=url))
        scores = json.loads((PLACES.evaluation("m") / "scores.json").read_text())
    assert len(heard) == 2
    assert not answered & {*heard}
    assert not (project / answers).exists()
    assert (scores["questions"], scores["outcome/token_limit"]) == (12, round(1 / 12, 4))


def test_question_without_room_counts_as_no_answer_and_more_of_them_are_refused(
    project: Path, inside: Inside, write_params: WriteParams, caplog: pytest.LogCaptureFixture
) -> None:
    """One of twelve, of which two samples and a greedy answer are asked for; the score keeps its twelve questions."""
    (project / "data").unlink()
    shutil.copytree(small := (project / PLACES.warm_start).resolve().parents[1] / "data", project / "data")
    rows, heard = read_rows(small.parent / PLACES.questions, Question), list[str]()
    long = asked_questions(rows, 12, seed=0)[3].question_id
    grown = [replace(row, text=f"{row.text} " * 200) if row.question_id == long else row for row in rows]
    write_rows(project / PLACES.questions, grown, Question)

    def play(request: Heard) -> Said:
        heard.append(request.body["messages"][1]["content"])
        return said("<answer>x</answer>")

    shares = {"env": {"too_long_share": 0.1}, "evaluate": {"samples": 2, "temperature": 1.0}}
    with inside(project), answering(play) as url:
        with pytest.raises(ValueError, match=rf"1 of 12 test questions .* '{long}'; .*env.too_long_share 0.01"):
            evaluate(EvaluationRequest("m", endpoint=url))
        assert heard == []
        write_params(project, shares)
        evaluate(EvaluationRequest("m", endpoint=url))
        scores = json.loads((PLACES.evaluation("m") / "scores.json").read_text())
        answers = read_rows(PLACES.evaluation("m") / "predictions.parquet", Prediction)
        limits = json.loads((PLACES.evaluation("m") / "hashes.json").read_text())["limits"]
    assert "each counts as an answer of nothing (token_limit); raise env.max_tokens to ask them" in caplog.text
    assert len(heard) == 3 * 11
    assert (scores["questions"], scores["outcome/token_limit"], scores["aborted"]) == (12, round(1 / 12, 4), 0)
    assert "share" not in limits  # no answer depends on it
    assert [(row.answer, row.success, row.steps) for row in answers if row.question_id == long] == [("", 0.0, 0)] * 3


@cases("arguments, message")
def test_unfit_endpoint_options_refused(project: Path, inside: Inside, arguments: dict[str, str], message: str) -> None:
    with inside(project), pytest.raises(ValueError, match=message):
        execute.evaluate(**arguments)  # type: ignore[arg-type]


def test_served_agent_answers_as_chat_does(
    project: Path,
    inside: Inside,
    start: Callable[..., subprocess.Popen[str]],
    free_port: FreePort,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """As users start both, with a key; what chat shows of an episode is the same but for the seconds it took."""
    monkeypatch.setenv(ENDPOINT_KEY, "s3cret")
    url = f"http://127.0.0.1:{(port := free_port())}/v1"
    server = start("-m", "flows", "serve-agent", "--port", str(port))
    model = await_model(server, url, "s3cret")
    with inside(project):
        questions = [row.text for row in read_rows(PLACES.questions, Question)][:3]

        def chatted(**agent: str) -> list[str]:
            lines = []
            for text in questions:
                chat(**agent, question=text)
                who, _, episode = re.sub(r"\d+\.\d s", "", capsys.readouterr().out).partition("\n")
                assert who == (
                    f"warm_start at {url} answers"
                    if agent
                    else "the warm start, untrained (`chat RUN` asks a run), answers"
                )
                lines.append(episode)
            return lines

        assert chatted(endpoint=url) == chatted(endpoint=url, policy="warm_start") == chatted()
        chat(endpoint=url, question="word " * 500)
        shorter = "tokens with the agent's prompt, and the limit is 448; ask a shorter one"
        assert shorter in capsys.readouterr().out
        with pytest.raises(ValueError, match="is called 'warm_start', not 'ppo'"):
            chat(endpoint=url, policy="ppo", question="Who?")
    assert model["id"] == "warm_start"
    errors = terminated(server)
    assert f"warm_start answers at {url}" in errors
    assert "s3cret" not in errors


def test_served_policy_answers_an_agent_that_has_a_loop_of_its_own(
    project: Path,
    write_params: WriteParams,
    inside: Inside,
    start: Callable[..., subprocess.Popen[str]],
    free_port: FreePort,
) -> None:
    agents = {"agents": {"mine": {"function": "mine:solve", "timeout_s": 60}}}
    write_params(project, {"env": {**agents, "agent": "mine", "order": "arrival"}, "engine": {"kind": "vllm"}})
    with inside(project), pytest.raises(ValueError, match=r"env\.agent is 'mine', .* `agent-r1 serve-policy`"):
        serve_agent()
    write_params(project, {"env": agents})
    url = f"http://127.0.0.1:{(port := free_port())}/v1"
    server = start("-m", "flows", "serve_policy", "--agent", "mine", "--port", str(port))
    assert await_model(server, url)["id"] == "policy"
    query = {"type": "object", "properties": {"query": {"type": "string"}}, "required": ["query"]}
    tool = {"type": "function", "function": {"name": "search", "description": "Finds passages.", "parameters": query}}
    [question, *_] = [row.text for row in read_rows(project / PLACES.questions, Question)]
    asked = {"model": "policy", "messages": [{"role": "user", "content": question}], "tools": [tool]}
    [first, again] = [httpx.post(f"{url}/chat/completions", json=asked, timeout=PATIENCE_S).json() for _ in range(2)]
    message = first["choices"][0]["message"]
    assert message["role"] == "assistant"
    assert first["usage"]["completion_tokens"] > 0
    assert again["choices"][0]["message"].get("content") == message.get("content"), "it is greedy"
    assert "all who reach this server may ask it" in terminated(server)


def await_model(server: subprocess.Popen[str], url: str, key: str = "none") -> dict[str, Any]:
    sent = {"authorization": f"Bearer {key}"}
    wait_until_healthy(url, server, server.communicate, "/models", **sent)
    [model] = httpx.get(f"{url}/models", headers=sent, timeout=PATIENCE_S).json()["data"]
    return dict(model)


def terminated(server: subprocess.Popen[str]) -> str:
    server.terminate()
    output, errors = server.communicate(timeout=PATIENCE_S)
    assert (server.returncode, output) == (143, ""), errors
    return errors
