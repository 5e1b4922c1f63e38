"""A process group leaves nothing behind, however its block ends; the Prefect server does not wait for itself."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
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
    STARTED_BY,
    Supervised,
    await_health,
    known,
    listen,
    prefect_server,
    process_group,
    running,
)
from flows.stage import report_to_own_server
from tests.neighbours import by_neighbour

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
def test_an_exception_ends_the_whole_group(stubborn: str, leader_s: int) -> None:
    with suppress(KeyboardInterrupt), process_group(family(stubborn, leader_s), os.environ, grace_s=0.2) as process:
        assert process.stdout is not None
        child = int(process.stdout.readline())
        assert is_running(child)
        raise KeyboardInterrupt
    assert not is_running(child)
    assert process.returncode is not None


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


def test_a_process_ends_with_the_one_that_started_it(start: Any) -> None:
    parent = start("-c", ORPHAN, stdin=subprocess.PIPE)
    child = int(parent.stdout.readline())
    assert is_running(child)
    parent.stdin.write("\n")
    parent.stdin.flush()
    assert parent.stdout.readline() == "ended\n"


@pytest.mark.parametrize("told", ["by its caller", "by its environment"])
def test_a_process_that_was_too_late_to_see_its_parent_go_ends_too(start: Any, told: str) -> None:
    gone = start("-c", "")
    gone.wait()
    given, environment = (gone.pid, {}) if told == "by its caller" else ("", {STARTED_BY: str(gone.pid)})
    script = f"import time; from flows.processes import end_with_parent; end_with_parent({given}); time.sleep(600)"
    orphan = start("-c", script, **environment)
    orphan.wait(60)
    assert orphan.returncode == -signal.SIGTERM


def test_output_and_errors_are_one_stream() -> None:
    code = "import sys; print('out', flush=True); print('error', file=sys.stderr); sys.exit(3)"
    with process_group([sys.executable, "-c", code], os.environ) as process:
        assert process.stdout is not None
        assert process.stdout.read() == "out\nerror\n"
        assert process.wait() == 3


def test_an_automation_is_saved_while_the_server_reads_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a thread of its own, because Prefect 3.7 itself never comes back."""
    from prefect.server.events import triggers  # the server, for which no other process of the suite is to wait
    from prefect.server.events.models import automations

    from flows import prefect_app

    saved: Any = SimpleNamespace(id=uuid4())
    monkeypatch.setattr(automations, "run_coro_as_sync", automations.run_coro_as_sync)  # which `create` replaces
    prefect_app.create()

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


def test_the_server_of_a_pipeline_answers_its_own_processes_alone(
    tmp_path: Path, inside: Any, caplog: pytest.LogCaptureFixture
) -> None:
    with inside(tmp_path), caplog.at_level("INFO"), prefect_server() as url:
        password = PREFECT_API_AUTH_STRING.value()
        assert f"password {password}" in caplog.text
        assert by_neighbour(lambda: httpx.get(f"{url}/admin/version").status_code) == "401"
        with temporary_settings({PREFECT_API_URL: url}), get_client(sync_client=True) as client:
            assert client.api_version() == version("prefect")
        lines = [" ".join(each.info["cmdline"] or []) for each in psutil.process_iter(["cmdline"])]
        assert not any(password in line for line in lines)
        assert password not in (HOME / "server.log").read_text()


@pytest.mark.parametrize("ends_at_once", [True, False])
def test_nobody_gets_the_port_of_a_server_before_it_answers_or_after_its_end(
    tmp_path: Path, free_port: Callable[[], int], *, ends_at_once: bool
) -> None:
    port = free_port()
    part = Supervised(
        name="server",
        command=[sys.executable, "-c", "pass" if ends_at_once else "import time; time.sleep(600)"],
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
            with pytest.raises(OSError, match=r"did not come up, see .*log"):
                await_health(process, part)
            with suppress(ConnectionRefusedError):
                while True:  # until it is known that the process has ended
                    socket.create_connection(("127.0.0.1", port)).close()
            assert "in use" in by_neighbour(take)
    assert by_neighbour(take) == "None"


def test_commands_find_the_server_that_serves_their_clone_and_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("PREFECT_API_URL", OF_CLIENTS):
        monkeypatch.setenv(name, "")
        del os.environ[name]
    with known("http://127.0.0.1:4200/api"):
        PASSWORD.write_text("secret\n")
        PASSWORD.chmod(0o600)
        with pytest.raises(ValueError, match=r"serves this clone already, at .*:4200/api; end that"):
            known("http://127.0.0.1:4201/api").__enter__()
        report_to_own_server()
        assert (os.environ.pop("PREFECT_API_URL"), os.environ.pop(OF_CLIENTS)) == (SERVED.read_text(), "secret")
    report_to_own_server()
    assert "PREFECT_API_URL" not in os.environ, "it has ended, and the password is for nobody else"
