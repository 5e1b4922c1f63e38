"""Child processes that leave nothing behind, and a Prefect server for as long as a pipeline needs one."""

from __future__ import annotations

import functools
import logging
import os
import secrets
import signal
import socket
import stat
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import IO

import psutil
from filelock import FileLock, Timeout

from agent_r1.files import first_error, is_own, locked, write_text
from agent_r1.harmless import without_password
from agent_r1.surroundings import home

GRACE_S = 10.0
WATCH_S = 0.5
HOST = "127.0.0.1"
STARTUP_S = 120.0
ANSWER_S = 5.0
HOME = Path(".tracking/prefect")  # keeps the history of pipelines that had no server of their own
SERVED = HOME / "served"  # the address of the server that holds this lock, and serves this clone
SERVED_LOCK = HOME / ".served.lock"
PASSWORD = HOME / "password"  # of that server
STARTED_BY = "AGENT_R1_STARTED_BY"  # the variable in which a supervised process finds the one that started it
SHELLS = {"sh", "dash", "bash", "zsh", "fish", "ksh"}
PIPELINE = "AGENT_R1_PIPELINE"  # the variable in which a stage finds the process of the pipeline that it is part of
LOCKS = "AGENT_R1_LOCKS"  # a folder in place of ~/.cache/agent_r1, for homes on shared disks without locks
OF_CLIENTS = "PREFECT_API_AUTH_STRING"  # the variable in which Prefect's clients find a server's password
# New objects before Python looks for garbage while a process starts. Imports make a million objects that stay; looking
# at them again and again takes a sixth of a start.
IMPORTING = (100_000, 20, 50)

logger = logging.getLogger(__name__)


@contextmanager
def process_group(
    command: Sequence[str],
    environment: Mapping[str, str],
    output: IO[str] | int = subprocess.PIPE,
    grace_s: float = GRACE_S,
    fds: Sequence[int] = (),
) -> Iterator[subprocess.Popen[str]]:
    """Runs a command in a group of its own, with `fds`; the group ends with the block, after `grace_s` by force."""
    process = subprocess.Popen(
        command,
        env=environment,
        stdout=output,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
        pass_fds=fds,
    )
    try:
        yield process
    finally:
        end_group(process, grace_s)


@contextmanager
def ended_after(process: subprocess.Popen[str], seconds: float, stop: threading.Event) -> Iterator[threading.Event]:
    """Ends a process group once `over` is set, its leader has ended, or after `seconds`, which the event tells."""
    finished = threading.Event()
    late = threading.Event()
    deadline = time.monotonic() + seconds

    def watch() -> None:
        while not (finished.wait(WATCH_S) or stop.is_set() or late.is_set() or process.poll() is not None):
            if time.monotonic() > deadline:
                late.set()
        if not finished.is_set():
            end_group(process, GRACE_S)

    watching = threading.Thread(target=watch)
    watching.start()
    try:
        yield late
    finally:
        finished.set()
        watching.join()


def end_group(process: subprocess.Popen[str], grace_s: float) -> None:
    """Asks a process group to end, and kills it after `grace_s`, or at a second interrupt."""
    try:
        _send(process, signal.SIGTERM, grace_s)
    finally:
        _send(process, signal.SIGKILL, grace_s)
        process.wait()


@functools.cache
def end_with_parent(started_by: int | None = None) -> None:
    """From now on ends this process once its parent is gone, by a SIGTERM, and `GRACE_S` later for good.

    Prefect would try for minutes to tell of the end to a server that has gone too. A parent that is known by its id or
    from the environment may have gone before the call. A stage that DVC started ends with DVC, though a shell such as
    dash stays between them, and with the pipeline for which DVC runs.
    """
    parent = started_by or int(os.environ.pop(STARTED_BY, os.getppid()))
    above = int(os.environ.get(PIPELINE) or _past_a_shell(parent))

    def watch() -> None:
        while os.getppid() == parent and psutil.pid_exists(above):
            time.sleep(WATCH_S)
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(GRACE_S)
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=watch, name="end-with-parent", daemon=True).start()


def _past_a_shell(parent: int) -> int:
    """The parent of a shell that runs one command, as dash does for DVC; else `parent`."""
    with suppress(psutil.Error):
        shell = psutil.Process(parent)
        if shell.name() in SHELLS and "-c" in shell.cmdline():
            return int(shell.ppid())
    return parent


def _send(process: subprocess.Popen[str], number: signal.Signals, grace_s: float) -> None:
    """Signals the group, and waits at most `grace_s` until it is empty."""
    deadline = time.monotonic() + grace_s
    with suppress(ProcessLookupError):
        os.killpg(process.pid, number)
        while time.monotonic() < deadline:
            process.poll()  # reaps the leader: as a zombie it would stay in the group
            os.killpg(process.pid, 0)
            time.sleep(0.02)


@dataclass(frozen=True, kw_only=True, slots=True)
class Supervised:
    """A process that serves, alone or beside others."""

    name: str
    command: Sequence[str]
    environment: Mapping[str, str]
    log: Path
    health: str = ""  # the URL at which a server answers once it is up
    listening: socket.socket | None = None  # the socket of a server, whose command names its descriptor


Running = tuple[Supervised, subprocess.Popen[str]]


@contextmanager
def running(part: Supervised, grace_s: float = GRACE_S) -> Iterator[Running]:
    """Starts a process; at the end asks it to end itself and its children, and then ends its group.

    The group is its own: an interrupt from the terminal must not reach a server before a flow has reported it.
    """
    fds = [part.listening.fileno()] if part.listening else []
    part.log.touch(0o600)
    with (
        part.listening or nullcontext(),
        part.log.open("a") as log,
        process_group(part.command, part.environment, log, grace_s, fds) as process,
    ):
        if part.listening:
            threading.Thread(target=_refuse_after, args=(process, part.listening), daemon=True).start()
        try:
            yield part, process
        finally:
            process.terminate()
            with suppress(subprocess.TimeoutExpired):
                process.wait(grace_s)


def _refuse_after(process: subprocess.Popen[str], listening: socket.socket) -> None:
    """Keeps the port of a server that has ended from everybody else, and refuses connections to it."""
    process.wait()
    with suppress(OSError):  # it is closed with the server's block
        listening.shutdown(socket.SHUT_RDWR)


@contextmanager
def servers(parts: Sequence[Supervised], grace_s: float = GRACE_S) -> Iterator[list[Running]]:
    """Starts servers, and waits until all are up; ends them with the block, the last one first."""
    with ExitStack() as stack:
        for part in parts:
            part.log.unlink(missing_ok=True)
        processes = [stack.enter_context(running(part, grace_s)) for part in parts]
        for part, process in processes:
            await_health(process, part)
            logger.info("the %s is up", part.name)
        yield processes


def first_to_end(processes: Sequence[Running]) -> tuple[Supervised, str]:
    """Waits until a process has ended, and names it, its exit code and its log."""
    while True:
        for part, process in processes:
            if process.poll() is not None:
                return part, f"the {part.name} ended with code {process.returncode}, see {part.log}"
        time.sleep(WATCH_S)


def server_answers() -> bool:
    """Whether `PREFECT_API_URL` names a server that is up."""
    url = os.environ.get("PREFECT_API_URL")
    if not url:
        return False
    from agent_r1.http.client import Client  # it takes user and password from the address

    try:
        Client(url, ANSWER_S, key="").require_health()
    except (OSError, ValueError) as fault:
        words = without_password(url), without_password(str(fault))
        logger.warning("PREFECT_API_URL %s does not answer (%s): going on without it", *words)
        return False
    return True


@contextmanager
def known(api_url: str) -> Iterator[None]:
    """Lets this clone's commands find its server while the block lasts. Raises ValueError if they find another."""

    def refuse() -> None:
        raise ValueError(f"`agent-r1 serving` serves this project already, at {SERVED.read_text()}; end that first")

    with locked(SERVED_LOCK, refuse):
        write_text(SERVED, api_url)
        SERVED.chmod(0o600)
        yield


def own_server() -> str | None:
    """The API of the server that `agent-r1 serving` runs for this project now."""
    if not all(file.exists() and is_own(file, stat.S_IFREG, closed=0o077) for file in (SERVED, SERVED_LOCK)):
        return None  # others may have written the address, or hold the lock
    try:
        with FileLock(SERVED_LOCK).acquire(timeout=0):
            return None  # the server has gone, and anybody may listen at its address
    except Timeout:
        return SERVED.read_text()


@contextmanager
def prefect_server() -> Iterator[str]:
    """The API of PREFECT_API_URL, or of a server for this block alone; if that ends early, exit code 75."""
    if server_answers():
        yield os.environ["PREFECT_API_URL"]
        return
    from prefect.settings import PREFECT_API_AUTH_STRING, temporary_settings

    password = secrets.token_urlsafe(18)
    listening = listen()
    server = server_part(listening, password)
    url = api_on(listening.getsockname()[1])
    server.log.unlink(missing_ok=True)
    with running(server) as process, temporary_settings({PREFECT_API_AUTH_STRING: password}):
        await_health(process[1], server)
        logger.info("Prefect at %s while the pipeline runs, password %s", url.removesuffix("/api"), password)
        stop = threading.Event()
        threading.Thread(target=_give_up_without, args=(process, stop), daemon=True).start()
        try:
            yield url
        finally:
            stop.set()


def _give_up_without(server: Running, stop: threading.Event) -> None:
    """Ends this process, and all that it started, if a server ends before `over`; Prefect would try it for minutes."""
    from flows.terminal import TERMINAL

    end = first_to_end([server])[1]
    if stop.is_set():
        return
    logger.error("%s, and with it all that it served; the same command goes on", end)
    logging.disable()  # Prefect's complaints of the same, and those of stages
    children = psutil.Process().children(recursive=True)
    for number in (signal.SIGTERM, signal.SIGKILL):
        for child in children:
            with suppress(psutil.NoSuchProcess):
                child.send_signal(number)
        psutil.wait_procs(children, GRACE_S)
    TERMINAL.show_cursor()  # which live lines hide
    os._exit(os.EX_TEMPFAIL)


def listen(port: int = 0) -> socket.socket:
    """A socket for a server that is started next: nobody else can have its port of this machine any more."""
    server = socket.socket()
    server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # a port that was used a minute ago is free
    server.bind((HOST, port))
    server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 0)  # a port that was named stays taken after its server
    server.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # uvicorn takes it for a Unix socket
    server.listen(2048)  # connections may wait, as many as uvicorn has it
    return server


def api_on(port: int) -> str:
    """The API URL of a Prefect server on a port of this machine."""
    return f"http://{HOST}:{port}/api"


def prefect_environment(api_url: str) -> dict[str, str]:
    """The environment for a process of Prefect's, which ends with this process and writes below .tracking alone."""
    home = str(HOME.absolute())
    return {
        **os.environ,
        "PREFECT_HOME": home,
        "PREFECT_LOCAL_STORAGE_PATH": f"{home}/storage",
        "PREFECT_API_URL": api_url,
        STARTED_BY: str(os.getpid()),
    }


def server_part(listening: socket.socket, password: str = "") -> Supervised:
    """A Prefect server for this machine alone: no pages of other origins, no request without the password."""
    port = listening.getsockname()[1]
    return Supervised(
        name="Prefect server",
        command=uvicorn("prefect", listening),
        environment={
            **prefect_environment(api_on(port)),
            **({"PREFECT_SERVER_API_AUTH_STRING": password} if password else {}),
            "PREFECT_SERVER_CORS_ALLOWED_ORIGINS": f"http://{HOST}:{port},http://localhost:{port}",
            "PREFECT_SERVER_CSRF_PROTECTION_ENABLED": "true",
            "PREFECT_SERVER_UI_V2_ENABLED": "true",  # as by default from 3.8 on
            "PREFECT_SERVER_UI_SHOW_PROMOTIONAL_CONTENT": "false",
            "PREFECT_SERVER_DATABASE_TIMEOUT": "60",  # seconds; on SQLite requests wait for each other
            "PREFECT_SERVER_DATABASE_CONNECTION_TIMEOUT": "60",
            "PREFECT_SERVER_LOGGING_LEVEL": "ERROR",
            "PREFECT_LOGGING_ROOT_LEVEL": "CRITICAL",  # its task queue fails at every poll on SQLite: issue 23051
            **_pages(),
        },
        log=log_path("server"),
        health=f"{api_on(port)}/health",
        listening=listening,
    )


def _pages() -> dict[str, str]:
    """Where Prefect copies its pages to: beside its code, or to this user's folder where another user installed it."""
    installed = find_spec("prefect")
    if installed and os.access(Path(str(installed.origin)).parent / "server", os.W_OK):
        return {}
    folder = own_folder() / "prefect_pages"
    folder.mkdir(mode=0o700, exist_ok=True)
    return {"PREFECT_UI_STATIC_DIRECTORY": str(folder)}


def uvicorn(app: str, listening: socket.socket, *options: str) -> list[str]:
    """The command that serves an app of `flows.apps`."""
    command = [sys.executable, "-m", "uvicorn", f"flows.apps:{app}", "--factory"]
    command += ["--app-dir", str(Path(__file__).parents[1]), "--log-level", "error"]
    return [*command, "--fd", str(listening.fileno()), *options]


def own_folder() -> Path:
    """The folder of this user's locks, the same for terminals and services; ValueError if others may write there."""
    folder = Path(os.environ.get(LOCKS) or home() / ".cache" / "agent_r1")
    with suppress(FileExistsError):
        folder.mkdir(mode=0o700, parents=True)
    if not is_own(folder, stat.S_IFDIR, closed=0o022):
        raise ValueError(f"{folder} is no folder that you alone may write to; `chmod 700` it, or set {LOCKS} to one")
    return folder


def log_path(part: str) -> Path:
    """The log of a part that runs in the background."""
    HOME.mkdir(0o700, parents=True, exist_ok=True)
    return HOME / f"{part}.log"


def await_health(process: subprocess.Popen[str], part: Supervised) -> None:
    """Waits until a new server answers. Raises OSError if it ends, and TimeoutError if it does not answer in time."""
    deadline = time.monotonic() + STARTUP_S
    while process.poll() is None and time.monotonic() < deadline:
        try:
            with urllib.request.urlopen(part.health, timeout=5):
                return
        except OSError:
            time.sleep(0.2)
    logged = first_error(part.log)
    if "revision" in logged:  # of its database, which its migrations do not have
        raise ValueError(
            f"{HOME} holds the database of a newer Prefect ({logged}); `mv {HOME} {HOME}.newer` and start again, which "
            "begins a history of its own, or install the Prefect that wrote it"
        )
    fault = TimeoutError if process.poll() is None else OSError
    raise fault(f"the server at {part.health} did not come up{logged and f' ({logged})'}, see {part.log}")
