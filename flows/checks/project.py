"""Checks of the project: versions, parameters, where things are kept, DVC and its remote."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterable, Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from packaging.requirements import Requirement

from agent_r1 import params
from agent_r1.params import Params
from agent_r1.tracking import store
from flows.checks.finding import Finding, NotTried, Status

CODE = Path(__file__).parents[2]
INSTALL = "pip install --no-deps -r requirements/cpu.txt -e . (or `make`); on CUDA pip install -e .[gpu,dev]"
REMOTE_TIMEOUT_S = 60.0
ADD_REMOTE = "dvc remote add -d storage URL, then dvc remote modify storage verify true; see docs/operating.md, Remotes"


def versions() -> Finding:
    """What is installed, against pyproject.toml, and against the exact pins that it was tested with."""
    project = tomllib.loads((CODE / "pyproject.toml").read_text())["project"]
    lock = (CODE / "requirements" / "cpu.txt").read_text().splitlines()
    pins = [Requirement(line) for line in lines_of(lock)]
    asked = [Requirement(line) for line in project["dependencies"]]
    return versions_finding(asked, pins, installed([*asked, *pins]))


def lines_of(lock: Iterable[str]) -> list[str]:
    """The pins of a requirements file, without comments."""
    return [line.strip() for line in lock if line.strip() and not line.lstrip().startswith("#")]


def installed(requirements: Iterable[Requirement]) -> dict[str, str]:
    """The versions of those that are there, by name."""
    found = {}
    for name in {requirement.name for requirement in requirements}:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def versions_finding(asked: Iterable[Requirement], pins: Iterable[Requirement], there: Mapping[str, str]) -> Finding:
    """Refused: what is missing or outside of its range. Warned of: what is another version than the pinned one."""
    wrong = [
        f"{each.name} {there.get(each.name, 'is missing')} ({each.specifier} is asked for)"
        for each in asked
        if each.name not in there or not each.specifier.contains(there[each.name], prereleases=True)
    ]
    if wrong:
        return Finding(check="versions", status=Status.FAILED, message="; ".join(wrong), remedy=INSTALL)
    others = [
        f"{pin.name} {there[pin.name]} (tested with {pin.specifier})"
        for pin in pins
        if pin.name in there and not pin.specifier.contains(there[pin.name], prereleases=True)
    ]
    if others:
        return Finding(check="versions", status=Status.WARNING, message="; ".join(others), remedy=INSTALL)
    shown = ", ".join(f"{name} {there[name]}" for name in ("torch", "prefect", "mlflow", "dvc") if name in there)
    return Finding(check="versions", status=Status.OK, message=f"as pinned: {shown}")


def parameters() -> Finding:
    """params.yaml, as every stage reads it."""
    try:
        settings = params.load()
    except (ValueError, FileNotFoundError) as fault:
        remedy = "correct params.yaml; the comment beside each knob says what it takes"
        return Finding(check="parameters", status=Status.FAILED, message=str(fault), remedy=remedy)
    return Finding(check="parameters", status=Status.OK, message=f"params.yaml is valid, {len(settings.runs)} runs")


def settings_or_not_tried() -> Params:
    """params.yaml for a check that needs it.

    Raises:
        NotTried: it is refused.
    """
    try:
        return params.load()
    except (ValueError, FileNotFoundError) as fault:
        raise NotTried("params.yaml is refused") from fault


def tracking_folder() -> Finding:
    """Where MLflow and Prefect keep what they know."""
    folder = store.tracking_folder()
    try:
        folder.mkdir(exist_ok=True)
        with tempfile.TemporaryFile(dir=folder) as probe:
            probe.write(b"0" * 2**16)
            probe.flush()
    except OSError as fault:
        message = f"{folder} cannot be written to: {fault.strerror}"
        remedy = "free some disk space, or give this user the right to write there"
        return Finding(check="tracking folder", status=Status.FAILED, message=message, remedy=remedy)
    return Finding(check="tracking folder", status=Status.OK, message=f"{folder} can be written to")


def dvc_project() -> Finding:
    """Whether DVC takes the folder for a project, and dvc.yaml for a graph."""
    listed = _dvc("stage", "list", "--name-only")
    if listed.returncode:
        remedy = "run from the project's root; a copy without git needs `dvc config --local core.no_scm true`"
        return Finding(check="dvc project", status=Status.FAILED, message=complaint(listed), remedy=remedy)
    return Finding(check="dvc project", status=Status.OK, message=f"{len(listed.stdout.split())} stages")


def dvc_remote() -> Finding:
    """The default remote: whether there is one, looks at what it is given, answers, and has everything."""
    config = dict(line.split("=", 1) for line in _dvc("config", "--list").stdout.splitlines() if "=" in line)
    name = config.get("core.remote")
    if name is None:
        message = "there is none: data and checkpoints are on this disk alone"
        return Finding(check="dvc remote", status=Status.WARNING, message=message, remedy=ADD_REMOTE)
    url = config.get(f"remote.{name}.url", "")
    if not is_there(url, store.project_root() / ".dvc"):
        message = f"{name} is the folder {url}, which does not exist"
        remedy = "mount the disk, or make the folder: `dvc push` would make it, here"
        return Finding(check="dvc remote", status=Status.WARNING, message=message, remedy=remedy)
    compared = _dvc("status", "--cloud", "--json")
    return remote_finding(f"{name}, {url},", config.get(f"remote.{name}.verify") == "true", compared)


def is_there(url: str, beside: Path) -> bool:
    """Whether a remote's folder exists, a relative one as of where the configuration is; others may."""
    return "://" in url or (beside / url).is_dir()


def remote_finding(remote: str, verifies: bool, compared: subprocess.CompletedProcess[str]) -> Finding:
    """What `dvc status --cloud --json` says of a remote."""
    if compared.returncode:
        message = f"{remote} cannot be used: {complaint(compared)}"
        remedy = "check url, endpointurl and credentials: docs/operating.md, Remotes"
        return Finding(check="dvc remote", status=Status.FAILED, message=message, remedy=remedy)
    new = sum(state == "new" for state in json.loads(compared.stdout).values())
    if not verifies:
        message = f"{remote} answers, but `dvc pull` would take a corrupted object for a good one"
        remedy = f"dvc remote modify {remote.split(',')[0]} verify true"
        return Finding(check="dvc remote", status=Status.WARNING, message=message, remedy=remedy)
    waiting = f"; {new} files wait for `dvc push`" if new else ""
    return Finding(check="dvc remote", status=Status.OK, message=f"{remote} answers{waiting}")


def complaint(done: subprocess.CompletedProcess[str]) -> str:
    """The error of a DVC command that failed, without its frame."""
    lines = [line.strip() for line in done.stderr.splitlines() if line.strip()]
    errors = [line.removeprefix("ERROR: ") for line in lines if line.startswith("ERROR: ")]
    return " ".join(errors or lines[:1]) or f"exit code {done.returncode}"


def _dvc(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Runs a DVC command in the project; a server that is down is asked once."""
    try:
        return subprocess.run(
            [sys.executable, "-m", "dvc", *arguments],
            cwd=store.project_root(),
            env={**os.environ, "AWS_MAX_ATTEMPTS": "1"},
            capture_output=True,
            text=True,
            check=False,
            timeout=REMOTE_TIMEOUT_S,
        )
    except subprocess.TimeoutExpired as late:
        said = f"ERROR: no answer within {REMOTE_TIMEOUT_S:.0f} s"
        return subprocess.CompletedProcess(late.cmd, returncode=124, stdout="", stderr=said)
