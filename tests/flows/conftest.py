"""A real Prefect server, small scripts that are whole processes, and a small project that is trained.

A stage runs in its project's folder. Actions are sampled in the stage's process, except where a test is about vLLM.
"""

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml
from mlflow.tracking._tracking_service import utils
from prefect.settings import PREFECT_API_URL, PREFECT_FLOWS_HEARTBEAT_FREQUENCY, temporary_settings

from agent_r1.params import load
from agent_r1.params.places import RunId
from flows.commands.execute import index, prepare
from flows.processes import api_on, await_health, listen, server_part
from flows.train import train
from flows.warm_start import warm_start
from tests.answering import wait_until_healthy

ROOT = Path(__file__).parents[2]
PLACES = load(ROOT / "params.yaml").places

OWN_DVC = "[core]\n    no_scm = true\n    analytics = false\n    check_update = false\n"

Start = Callable[..., subprocess.Popen[str]]
Inside = Callable[[Path], AbstractContextManager[None]]
ServeIndex = Callable[[Path], str]
LayDvc = Callable[..., None]
WriteParams = Callable[[Path, dict[str, Any]], None]
BuildOnce = Callable[[str, Callable[[Path], None]], Path]

# Writes its process id into the file that its argument names, and stays.
STAGE_THAT_STAYS = """
import os, pathlib, sys, time
from flows.stage import run_stage

def stay() -> None:
    pathlib.Path(sys.argv[1]).write_text(str(os.getpid()))
    time.sleep(600)

run_stage(stay)
"""

SMALL: dict[str, Any] = yaml.safe_load(Path(__file__).with_name("small.yaml").read_text())


@pytest.fixture(scope="session")
def prefect_api(build_once: BuildOnce) -> Iterator[str]:
    """The API URL of a Prefect server that all processes of the suite share."""

    def build(folder: Path) -> None:
        with pytest.MonkeyPatch.context() as patch:
            patch.chdir(folder)
            part = server_part(listening := listen())
        with (folder / part.log).open("w") as log:
            server = subprocess.Popen(
                part.command,
                cwd=folder,
                env=part.environment,
                stdout=log,
                stderr=log,
                text=True,
                start_new_session=True,
                pass_fds=[listening.fileno()],
            )
        (folder / "pid").write_text(str(server.pid))  # the session ends it
        await_health(server, part)
        (folder / "url").write_text(api_on(listening.getsockname()[1]))
        listening.close()

    url = (build_once("prefect", build) / "url").read_text()
    with temporary_settings({PREFECT_API_URL: url, PREFECT_FLOWS_HEARTBEAT_FREQUENCY: None}):
        yield url


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Starts `python ARGUMENTS` in tmp_path with the project importable; kills it after the test."""
    processes: list[subprocess.Popen[str]] = []

    def start_process(*arguments: str, stdin: int | None = None, **environment: str) -> subprocess.Popen[str]:
        own = dict.fromkeys(("TMPDIR", "AGENT_R1_LOCKS"), str(tmp_path))
        process = subprocess.Popen(
            [sys.executable, *arguments],
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": str(ROOT), **own, **environment},
            stdin=stdin,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        processes.append(process)
        return process

    yield start_process
    for process in processes:
        process.kill()
        process.communicate()


@pytest.fixture
def start_in(start: Start) -> Start:
    """Starts a command of the project in a folder, `start_in(FOLDER, COMMAND, ...)`."""

    def start_command(folder: Path, *arguments: str, **environment: str) -> subprocess.Popen[str]:
        entered = f"import os; os.chdir({str(folder)!r}); from flows.__main__ import main; main()"
        return start("-c", entered, *arguments, **environment)

    return start_command


@pytest.fixture
def serve_index(start: Start, free_port: Callable[[], int]) -> ServeIndex:
    """Starts a search server of an index and waits until it answers; gives its address. It ends with the test."""

    def serve(folder: Path) -> str:
        port = free_port()
        server = start("-m", "flows", "serve_search", "--index", str(folder), "--port", str(port))
        wait_until_healthy(f"http://127.0.0.1:{port}", server, server.communicate)
        return f"http://127.0.0.1:{port}"

    return serve


@pytest.fixture(scope="session")
def inside(lay_store: Callable[[Path], None]) -> Inside:
    """Makes a folder the project of this process: current folder, tracking store and accelerator are its own."""

    @contextmanager
    def enter(folder: Path) -> Iterator[None]:
        lay_store(folder)
        utils._artifact_repos_cache.clear()  # MLflow knows where a run's files are by its id, and copies share that
        with pytest.MonkeyPatch.context() as patch:
            patch.chdir(folder)
            patch.setattr(tempfile, "tempdir", str(folder))
            patch.setenv("AGENT_R1_LOCKS", str(folder))
            yield

    return enter


def _merged(base: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    """The changes over the base; `runs`, `files` and `worlds` as a whole, because their keys are what there is."""
    nested = {
        key: value
        for key, value in changes.items()
        if isinstance(value, dict) and key not in ("runs", "files", "worlds")
    }
    return {**base, **changes, **{key: _merged(base.get(key, {}), value) for key, value in nested.items()}}


@pytest.fixture(scope="session")
def write_params(lay_store: Callable[[Path], None]) -> WriteParams:
    """Writes a folder's params.yaml, the project's own made small with further changes, and gives it a store."""

    small = _merged(yaml.load((ROOT / "params.yaml").read_bytes(), yaml.CSafeLoader), SMALL)

    def write(folder: Path, changes: dict[str, Any]) -> None:
        (folder / "params.yaml").write_text(yaml.dump(_merged(small, changes), Dumper=yaml.CSafeDumper))
        lay_store(folder)

    return write


@pytest.fixture(scope="session")
def lay_dvc() -> LayDvc:
    """Writes what `dvc init --no-scm`, and with a URL `dvc remote add -d storage URL`, leave in a folder.

    A local URL is relative to its .dvc. DVC itself would take a second for either, and without these settings would
    start a process after every command that tells its makers of it.
    """

    def lay(folder: Path, remote: str = "") -> None:
        storage = f"    remote = storage\n['remote \"storage\"']\n    url = {remote}\n" if remote else ""
        (folder / ".dvc").mkdir()
        (folder / ".dvc/config").write_text(OWN_DVC + storage)

    return lay


@pytest.fixture(scope="session")
def small_project(
    tmp_path_factory: pytest.TempPathFactory, build_once: BuildOnce, inside: Inside, write_params: WriteParams
) -> Path:
    """A project with prepared data, a warm-started model of 70,000 parameters, and `ppo` trained; this process's own.

    The run has 3 iterations, the first of which trains the critic alone.
    """

    def build(folder: Path) -> None:
        write_params(folder, {})
        with inside(folder):
            prepare()
            index()
            warm_start()
            train(RunId("ppo"))

    folder = tmp_path_factory.mktemp("small_project")
    shutil.copytree(build_once("small_project", build), folder, dirs_exist_ok=True)
    return folder


@pytest.fixture(scope="session")
def ppo(small_project: Path) -> Path:
    return small_project / PLACES.training(RunId("ppo"))


@pytest.fixture(scope="session")
def grpo(small_project: Path, inside: Inside) -> Path:
    """The folder of a run of 2 iterations with 4 groups of 4."""
    with inside(small_project):
        train(RunId("grpo"))
    return small_project / PLACES.training(RunId("grpo"))
