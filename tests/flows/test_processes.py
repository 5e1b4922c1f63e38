"""A process group leaves nothing behind, however its block ends; the Prefect server does not wait for itself."""

import asyncio
import os
import shutil
import signal
import socket
import sqlite3
import subprocess
import sys
import threading
from contextlib import closing, nullcontext, suppress
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from uuid import uuid4

import httpx
import psutil
import pytest
from prefect.client.orchestration import get_client
from prefect.settings import PREFECT_API_AUTH_STRING, PREFECT_API_URL, temporary_settings
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine

from flows.processes import (
    HOME,
    OF_CLIENTS,
    PASSWORD,
    SERVED,
    SERVED_LOCK,
    STARTED_BY,
    Supervised,
    await_health,
    ended_after,
    known,
    listen,
    own_server,
    prefect_server,
    process_group,
    running,
    server_part,
)
from flows.stage import report_to_own_server
from tests.fixtures import ROOT, FreePort
from tests.neighbour import UID, by_neighbour, holding, needs_root, open_folder

# The leader starts a child that will not end by itself; the child says its process id.
FAMILY = """
import subprocess, sys, time
child = "import os, signal, time; {stubborn}; print(os.getpid(), flush=True); time.sleep(600)"
subprocess.Popen([sys.executable, "-c", child])
time.sleep({leader_s})
"""
STUBBORN = "signal.signal(signal.SIGTERM, signal.SIG_IGN)"


def is_running(pid: int) -> bool:
    """A zombie has ended and only waits to be counted."""
    status = subprocess.run(["ps", "-o", "stat=", "-p", str(pid)], capture_output=True, text=True, check=False).stdout
    return status.strip() != "" and not status.startswith("Z")


def family(stubborn: str, leader_s: int) -> list[str]:
    return [sys.executable, "-c", FAMILY.format(stubborn=stubborn, leader_s=leader_s)]


@pytest.mark.parametrize("leader_s", [0, 600], ids=["leader gone", "leader there"])
@pytest.mark.parametrize("stubborn", ["pass", STUBBORN], ids=["willing", "stubborn"])
def test_exception_ends_the_whole_group(stubborn: str, leader_s: int) -> None:
    with suppress(KeyboardInterrupt), process_group(family(stubborn, leader_s), os.environ, grace_s=0.2) as process:
        child = int(process.stdout.readline())
        assert is_running(child)
        raise KeyboardInterrupt
    assert not is_running(child)
    assert process.returncode is not None


def test_group_ends_with_its_leader() -> None:
    """Though its child holds the pipe, from which lines are read until it is closed."""
    command = family("pass", 600)
    with process_group(command, os.environ) as process, ended_after(process, 60.0, threading.Event()) as late:
        assert process.stdout.readline()
        process.kill()
        assert process.stdout.read() == ""
    assert not late.is_set()


SIGNALLED_AT_ITS_END = """
import atexit, os, signal, sys, weakref
from flows.__main__ import leave

def end():
    weakref.finalize(type("Thing", (), {})(), os.kill, os.getpid(), signal.SIGTERM)

signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
atexit.register(end)
leave(3)
"""


def test_signal_cuts_the_end_of_a_process_short(start: Any) -> None:
    ended = start("-c", SIGNALLED_AT_ITS_END)
    assert ended.communicate() == ("", "")
    assert ended.returncode == 3


ORPHAN = """
import os, signal, sys, time
from flows.processes import end_with_parent

if os.fork():
    sys.stdin.readline()
    os.kill(os.getpid(), signal.SIGKILL)
end_with_parent()
signal.signal(signal.SIGTERM, lambda *_: (print("ended", flush=True), sys.exit()))
print(os.getpid(), flush=True)
time.sleep(600)
"""


def test_process_ends_with_the_one_that_started_it(start: Any) -> None:
    parent = start("-c", ORPHAN, stdin=subprocess.PIPE)
    child = int(parent.stdout.readline())
    assert is_running(child)
    parent.stdin.write("\n")
    parent.stdin.flush()
    assert parent.stdout.readline() == "ended\n"


@pytest.mark.parametrize("told", ["by its caller", "by its environment"])
def test_process_that_was_too_late_to_see_its_parent_go_ends_too(start: Any, told: str) -> None:
    gone = start("-c", "")
    gone.wait()
    given, environment = (gone.pid, {}) if told == "by its caller" else ("", {STARTED_BY: str(gone.pid)})
    script = f"import time; from flows.processes import end_with_parent; end_with_parent({given}); time.sleep(600)"
    orphan = start("-c", script, **environment)
    orphan.wait(60)
    assert orphan.returncode == -signal.SIGTERM


def test_automation_is_saved_while_the_server_reads_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a thread of its own, because Prefect 3.7 itself never comes back."""
    from prefect.server.events import triggers  # the server, for which no other process of the suite is to wait
    from prefect.server.events.models import automations

    from flows import apps

    saved: Any = SimpleNamespace(id=uuid4())
    monkeypatch.setattr(automations, "run_coro_as_sync", automations.run_coro_as_sync)  # which `prefect` replaces
    monkeypatch.setattr(os, "umask", lambda mask: mask)  # which would stay for other tests
    apps.prefect()

    async def save() -> None:
        engine = create_async_engine("sqlite+aiosqlite://")
        async with triggers._automations_lock(), AsyncSession(engine) as session:
            await automations._notify(session, saved, "created")
            await session.execute(text("select 1"))
            await session.commit()
        await engine.dispose()

    thread = threading.Thread(target=asyncio.run, args=(save(),), daemon=True)
    thread.start()
    thread.join(30)
    assert not thread.is_alive()


def test_server_of_a_pipeline_answers_it_alone(tmp_path: Path, inside: Any, caplog: pytest.LogCaptureFixture) -> None:
    with inside(tmp_path), caplog.at_level("INFO"), prefect_server() as url:
        password = PREFECT_API_AUTH_STRING.value()
        assert f"password {password}" in caplog.text
        assert by_neighbour(lambda: httpx.get(f"{url}/admin/version", timeout=60).status_code) == "401"
        with temporary_settings({PREFECT_API_URL: url}), get_client(sync_client=True) as client:
            assert client.api_version() == version("prefect")
        lines = [" ".join(each.info["cmdline"] or []) for each in psutil.process_iter(["cmdline"])]
        assert not any(password in line for line in lines)
        assert password not in (HOME / "server.log").read_text()
    database = tmp_path / HOME / "prefect.db"
    with closing(sqlite3.connect(database)) as store, store:
        store.execute("UPDATE alembic_version SET version_num = 'ffffffffffff'")
    with inside(tmp_path), pytest.raises(ValueError, match=r"newer Prefect \(.*'ffffffffffff'.*; `mv .*newer`"):
        prefect_server().__enter__()


@pytest.mark.parametrize("ends_at_once", [True, False])
def test_no_stranger_gets_the_port_of_a_server(tmp_path: Path, free_port: FreePort, *, ends_at_once: bool) -> None:
    port = free_port()
    part = Supervised(
        name="server",
        command=[
            sys.executable,
            "-c",
            "raise ValueError('no disk')" if ends_at_once else "import time; time.sleep(600)",
        ],
        environment=os.environ,
        log=tmp_path / "log",
        health=f"http://127.0.0.1:{port}",
        listening=listen(port),
    )

    def take() -> None:
        with socket.socket() as mine:
            mine.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            mine.bind(("127.0.0.1", port))

    with running(part) as (_, process):
        assert "in use" in by_neighbour(take)
        if ends_at_once:
            with pytest.raises(OSError, match=r"did not come up \(ValueError: no disk\), see .*log"):
                await_health(process, part)
            with suppress(ConnectionRefusedError):
                while True:  # until it is known that the process has ended
                    socket.create_connection(("127.0.0.1", port)).close()
            assert "in use" in by_neighbour(take)
    assert by_neighbour(take) == "None"


def test_commands_find_the_server_of_their_clone_alone_by_a_lock_that_no_other_may_have_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("PREFECT_API_URL", OF_CLIENTS):
        monkeypatch.setenv(name, "")
        del os.environ[name]
    with known("http://127.0.0.1:4200/api"):
        PASSWORD.write_text("secret\n")
        PASSWORD.chmod(0o600)
        with pytest.raises(ValueError, match=r"serves this project already, at .*:4200/api; end that"):
            known("http://127.0.0.1:4201/api").__enter__()
        report_to_own_server()
        assert (os.environ.pop("PREFECT_API_URL"), os.environ.pop(OF_CLIENTS)) == (SERVED.read_text(), "secret")
        assert own_server() == SERVED.read_text()
        for path, mode in ((SERVED_LOCK, 0o644), (SERVED, 0o620)):
            path.chmod(mode)
            assert own_server() is None
            path.chmod(0o600)
    report_to_own_server()
    assert "PREFECT_API_URL" not in os.environ, "it has ended, and the password is for nobody else"
    with known("http://127.0.0.1:4200/api"):
        needs_root()
        os.chown(SERVED_LOCK, UID, UID)
        assert own_server() is None


COMMAND = """
import os
from flows.stage import prepare_process, report_to_own_server

prepare_process()
report_to_own_server()
print(os.environ.get("PREFECT_API_URL"), os.environ.get("PREFECT_API_AUTH_STRING"))
from agent_r1.tracking.store import locked

with locked("lock"):
    print("went on")
"""


def test_another_user_with_old_locks_gets_no_password_and_holds_nothing_up() -> None:
    """A clone of before: others may enter its folders, and have opened its locks."""
    with open_folder() as project:
        shutil.copy(ROOT / "params.yaml", project)
        for folder in ("prefect", "artifacts/run"):
            (project / ".tracking" / folder).mkdir(parents=True)
        (project / ".dvc/tmp").mkdir(parents=True)
        old = [project / name for name in (".tracking/lock", f"{HOME}/served.lock", ".dvc/tmp/lock")]
        for file in (*old, project / SERVED, project / PASSWORD, project / ".tracking/artifacts/run/page.html"):
            file.write_text("http://127.0.0.1:9/api")
            file.chmod(0o600 if file.name == PASSWORD.name else 0o644)
        locks = [] if os.getuid() else old[:2]

        def run_command() -> str:
            environment = {**os.environ, "PYTHONPATH": str(ROOT)}
            command = [sys.executable, "-c", COMMAND]
            process = subprocess.run(command, cwd=project, env=environment, text=True, stdout=-1, stderr=-1, timeout=60)
            assert process.stdout == "None None\nwent on\n", process.stderr
            return process.stderr

        with holding(locks) if locks else nullcontext(0) as held:
            assert held == len(locks)
            output = run_command()
        assert [f"closed {project / dir} to other users" in output for dir in (".tracking", ".dvc/tmp")] == [True] * 2
        assert run_command() == "", "once is enough"
        files = [*(project / ".tracking").rglob("*"), *(project / ".dvc/tmp").rglob("*")]
        assert [path for path in files if path.stat().st_mode & 0o077] == []
        needs_root()
        with holding(path for path in files if path.is_file()) as held:
            assert held == 0


@pytest.mark.parametrize("writable", [True, False])
def test_installed_pages_lie_in_users_folder(writable: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Root may write everywhere, so that the answer of the system is made up."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("AGENT_R1_LOCKS", str(tmp_path / "own"))
    monkeypatch.setattr(os, "access", lambda path, mode: writable)
    with listen(0) as listening:
        pages = server_part(listening).environment.get("PREFECT_UI_STATIC_DIRECTORY")
    assert pages == (None if writable else str(tmp_path / "own/prefect_pages"))
    assert writable or Path(str(pages)).stat().st_mode & 0o077 == 0
