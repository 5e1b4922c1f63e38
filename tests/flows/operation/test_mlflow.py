"""MLflow as `make ui` serves it, asked by another user of the machine and by who knows the password."""

import json
import os
import re
import subprocess
import sys
from base64 import b64encode
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from mlflow import MlflowClient

from agent_r1 import tracking
from flows.apps import ROUTES
from tests.answering import Heard, answering, wait_for
from tests.fixtures import ROOT, FreePort
from tests.neighbour import by_neighbour

API, AJAX = "api/2.0/mlflow", "ajax-api/3.0/mlflow"


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory, lay_store: Callable[[Path], None]) -> Path:
    """A folder with a store, which has one run with an artifact. Others may not enter it."""
    folder = tmp_path_factory.mktemp("project")
    lay_store(folder)
    (folder / "params.yaml").write_text((ROOT / "params.yaml").read_text())
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        with tracking.start("ppo", {}, {}) as run:
            run.text("said", "note.txt")
    (folder / "run_id").write_text(str(run.run_id))
    return folder


@contextmanager
def serving(project: Path, port: int, auth: str) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-m", "flows", "serving", "--only-mlflow", "--mlflow-port", str(port), "--auth", auth]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "HOME": str(project)}
    with (project / "said").open("w") as said:
        process = subprocess.Popen(command, cwd=project, env=environment, stderr=said, text=True)
    try:
        yield process
    finally:
        process.terminate()
        process.wait()


@pytest.fixture(scope="module", params=["on", "off"])
def mlflow_server(request: pytest.FixtureRequest, project: Path, free_port: FreePort) -> Iterator[tuple[str, str]]:
    with serving(project, port := free_port(), request.param) as process:
        said = (project / "said").read_text
        wait_for(lambda: "Ctrl-C" in said(), process, said=said)
        password = (project / ".tracking/prefect/password").read_text() if request.param == "on" else ""
        assert password in said()
        yield f"http://127.0.0.1:{port}", password


def knowing(password: str) -> list[dict[str, str]]:
    sent = b64encode(f"me:{password}".encode()).decode()
    return [{}, {"Authorization": f"Basic {sent}"}] if password else [{}]


def test_no_shell_runs_for_others(mlflow_server: tuple[str, str], tmp_path: Path) -> None:
    """Not through an assistant that is told to ask a model of theirs."""
    url, password = mlflow_server
    mark, assistant = tmp_path / "ran", f"{url}/{AJAX}/assistant"
    call = {
        "id": "1",
        "type": "function",
        "function": {"name": "Bash", "arguments": json.dumps({"command": f"touch {mark}"})},
    }

    def answer(heard: Heard) -> tuple[int, bytes]:
        if heard.path == "/api/tags":
            return 200, b'{"models": [{"name": "mine"}]}'
        choice = {"delta": {"tool_calls": [{"index": 0, **call}]}, "finish_reason": "tool_calls"}
        return 200, f"data: {json.dumps({'choices': [choice]})}\n\ndata: [DONE]\n\n".encode()

    with answering(answer) as model:
        mine = {"model": "mine", "selected": True, "base_url": model, "permissions": {"full_access": True}}
        for headers in knowing(password):

            def attack(headers: dict[str, str] = headers) -> list[int]:
                with httpx.Client(headers=headers, timeout=10) as client:
                    set_up = client.put(f"{assistant}/config", json={"providers": {"ollama": mine}})
                    begun = client.post(f"{assistant}/message", json={"message": "go"})
                    if begun.is_success:
                        client.get(f"{url}{begun.json()['stream_url']}")
                    return [set_up.status_code, begun.status_code]

            refused = 403 if headers or not password else 401
            assert by_neighbour(attack) == str([refused, refused])
    assert not mark.exists()


def test_no_file_outside_of_artifacts_is_reached(mlflow_server: tuple[str, str], project: Path, tmp_path: Path) -> None:
    """Not in a folder of the neighbour's with a link, nor where the store names such a folder already."""
    url, password = mlflow_server
    keys, foreign = tmp_path / "keys", tmp_path / "foreign"
    keys.mkdir(mode=0o700)
    (keys / "key").write_text("secret")
    (keys / "key").chmod(0o600)
    foreign.mkdir()
    store = MlflowClient(f"sqlite:///{project}/.tracking/mlflow.db")
    run = store.create_run(store.create_experiment(f"before {url}", foreign.as_uri())).info.run_id
    (foreign / run).mkdir()
    (foreign / run / "artifacts").symlink_to(keys)
    headers = knowing(password)[-1]

    def attack() -> list[Any]:
        with httpx.Client(base_url=url, headers=headers, timeout=30) as client:
            found = []
            for place in (foreign.as_uri(), f"{project.as_uri()}/.tracking/artifacts/../../..", "s3://mine/x"):
                made = client.post(f"{API}/experiments/create", json={"name": place, "artifact_location": place})
                found.append(made.status_code)
            given = {"run_uuid": run, "run_id": run, "path": "key"}
            found.append(client.get(f"{API}/artifacts/list", params={"run_id": run}).status_code)
            read = client.get("/get-artifact", params=given)
            found += [read.status_code, "secret" in read.text]
            found.append(client.post("ajax-api/2.0/mlflow/upload-artifact", params=given, content=b"mine").status_code)
            return found

    assert by_neighbour(attack) == str([*[403] * 5, False, 403])
    assert (keys / "key").read_text() == "secret"


def test_request_without_password_is_refused(mlflow_server: tuple[str, str], project: Path) -> None:
    url, password = mlflow_server
    page, own = f"{url}/{AJAX}/server-info", knowing(password)[-1]
    with httpx.Client(timeout=60) as web:
        for headers in (
            {},
            {"Authorization": "Basic !"},
            {"Authorization": "Bearer x"},
            {"Cookie": f"password={password}"},
        ):
            assert web.get(page, headers=headers).status_code == (401 if password else 200)
        for headers in (own, {"Authorization": f"Bearer {password or 'any'}"}):
            answer = web.get(page, headers=headers)
            assert (answer.status_code, "set-cookie" in answer.headers) == (200, False)
        assert web.get(page, headers=own | {"Host": "evil.example"}).status_code == 400
        for origin in ("https://evil.example", "http://127.0.0.1:9", "null"):
            assert web.get(page, headers=own | {"Origin": origin}).status_code == 403
        assert web.get(page, headers=own | {"Origin": url}).status_code == 200
        assert web.get(f"{url}/health").text == "OK"
    lines = [" ".join(each.info["cmdline"] or []) for each in psutil.process_iter(["cmdline"])]
    assert not password or not any(password in line for line in lines)


CLIENT = """
import mlflow
client = mlflow.MlflowClient()
run = client.get_run("{run}")
client.log_metric(run.info.run_id, "seen", 1.0)
with mlflow.start_run(run_id=run.info.run_id), mlflow.start_span("asked"):
    pass
mlflow.flush_trace_async_logging()
print(client.get_run("{run}").data.metrics, client.download_artifacts("{run}", "note.txt"))
print("traces", len(client.search_traces(locations=[run.info.experiment_id])))
"""


def test_client_with_the_password_reads_and_writes(mlflow_server: tuple[str, str], project: Path) -> None:
    url, password = mlflow_server
    run_id = (project / "run_id").read_text()
    variables = {"MLFLOW_TRACKING_URI": url, "MLFLOW_TRACKING_USERNAME": "me", "MLFLOW_TRACKING_PASSWORD": password}
    command, environment = [sys.executable, "-c", CLIENT.format(run=run_id)], {**os.environ, **variables}
    process = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert process.returncode == 0, process.stderr
    assert re.search(r"'seen': 1.0.*note.txt\ntraces [1-9]", process.stdout)


def test_nobody_gets_the_port_while_the_server_starts(project: Path, free_port: FreePort) -> None:
    port, log = free_port(), project / ".tracking/prefect/mlflow.log"
    log.unlink(missing_ok=True)
    with serving(project, port, "on") as process:
        wait_for(log.exists, process)

        def take() -> str:
            import socket

            with socket.socket() as mine:
                mine.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                mine.bind(("127.0.0.1", port))
                mine.listen()
            return "taken"

        assert "in use" in by_neighbour(take)


DECIDED = Path(__file__).with_name("mlflow_routes.txt")
ROUTED = """
import re
from mlflow.server import app as pages
from mlflow.server.fastapi_app import app

routes = {(method, route.path) for route in app.routes for method in getattr(route, "methods", [])}
routes |= {(method, rule.rule) for rule in pages.url_map.iter_rules() for method in rule.methods - {"HEAD", "OPTIONS"}}
for method, path in sorted(routes):
    print(method, re.sub(r"[<{](\\w+:)?(\\w+)(:path)?[>}]", r"<\\2>", path))
"""


def test_every_route_of_mlflow_is_offered_or_refused_by_decision(tmp_path: Path) -> None:
    """A version of MLflow with another route needs a line in the file, and perhaps one in `ROUTES`."""
    env = {**os.environ, "_MLFLOW_SERVER_FILE_STORE": f"sqlite:///{tmp_path}/mlflow.db"}
    process = subprocess.run([sys.executable, "-c", ROUTED], env=env, capture_output=True, text=True, check=True)
    routes = process.stdout.splitlines()
    decided = [f"{'offered' if ROUTES.fullmatch(line.split()[1]) else 'refused'} {line}" for line in routes]
    assert decided == DECIDED.read_text().splitlines()
    assert not [
        line
        for line in routes
        if re.search("assistant|gateway|jobs|webhooks|upload|mlflow-artifacts", line)
        and ROUTES.fullmatch(line.split()[1])
    ]
