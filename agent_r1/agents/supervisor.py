"""Runs agents' programs so that nothing of them outlives its episode, or the stage, however that ends.

Started as a file, with the standard library alone. It removes the folder of all episodes in the end.
Each episode has a socket, of which the stage holds one end, and `watch`, a process between the stage and the program,
the other. When the stage closes its end or is killed, the program is ended. `watch` is a subreaper: children whose
parent has gone become its own, also where they left their group.
"""

from __future__ import annotations

import ctypes
import fcntl
import json
import os
import select
import selectors
import signal
import socket
import subprocess
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

FOLDER = "EPISODES"  # the variable that names the folder of all episodes
GRACE_S = 2.0  # between the request to end and the end by force
KEPT = 1 << 20  # bytes of the last line of standard output
_LAST_WORDS = 4000  # bytes of standard error
_STUBBORN_S = 30.0  # after which a process that cannot be ended, such as another user's, is left
_CHILD_SUBREAPER = 36  # of prctl
_DUMPABLE = 4  # of prctl


def serve(control: socket.socket, run: Callable[[Mapping[str, Any]], None]) -> None:
    """Has each episode watched whose socket comes over `control`, with files for its program, until that is closed.

    `run` becomes the program of an order, in a process of its own.
    """
    _prctl(_CHILD_SUBREAPER, 1)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGCHLD):  # the last, so that no child stays as a zombie
        signal.signal(number, signal.SIG_IGN)
    while descriptors := socket.recv_fds(control, 1, 2, socket.MSG_CMSG_CLOEXEC)[1]:
        if not os.fork():
            control.close()
            try:
                watch(socket.socket(fileno=descriptors[0]), descriptors[1:], run)
            except Exception:
                traceback.print_exc()
            os._exit(0)
        for descriptor in descriptors:
            os.close(descriptor)
    _reap({}, _STUBBORN_S + 3 * GRACE_S, kill=False)  # each `watch` hears of the end too
    _reap({}, _STUBBORN_S)


def watch(connection: socket.socket, files: Sequence[int], run: Callable[[Mapping[str, Any]], None]) -> None:
    """Runs the program of an order, a line of JSON, and answers with its exit code, last line and last words.

    The order has the program's `input`, of at most 1 MiB, its own new `folder`, `grace_s`, and what `run` reads.
    """
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    _prctl(_CHILD_SUBREAPER, 1)
    line = connection.makefile("rb").readline()
    if not line:
        return  # the stage has gone
    order = json.loads(line)
    Path(order["folder"]).mkdir(mode=0o700)
    stdin = _pipe_of(order["input"].encode())
    # Any process of this user may open a pipe in /proc/PID/fd, and none a socket: the policy's writes no last line.
    output, stdout = (end.detach() for end in socket.socketpair())
    errors, stderr = os.pipe()
    leader = os.fork()
    if not leader:
        try:
            connection.close()
            _become([stdin, stdout, stderr, *files], [output, errors], order["folder"])
            run(order)
        except BaseException:
            traceback.print_exc()
        os._exit(1)
    _prctl(_DUMPABLE, 0)  # no other process reads the episode's keys in this one's memory
    for descriptor in (stdin, stdout, stderr, *files):
        os.close(descriptor)
    report = _report(leader, connection.fileno(), {output: b"", errors: b""}, order["grace_s"])
    remove(Path(order["folder"]))
    with suppress(OSError):
        connection.sendall(json.dumps(report).encode())


def _pipe_of(content: bytes) -> int:
    """The end for reading of a pipe that holds a content."""
    reader, writer = os.pipe()
    fcntl.fcntl(writer, fcntl.F_SETPIPE_SZ, max(len(content), select.PIPE_BUF))
    os.write(writer, content)
    os.close(writer)
    return reader


def _report(leader: int, connection: int, written: dict[int, bytes], grace_s: float) -> dict[str, Any]:
    """Waits for a program, or ends it once the stage does; `written` has its standard output and its errors."""
    has_ended = os.pidfd_open(leader)
    _follow({connection, has_ended}, written)
    if not select.select([has_ended], [], [], 0)[0]:
        _signal_group(leader, signal.SIGTERM)
        select.select([has_ended], [], [], grace_s)
    _signal_group(leader, signal.SIGKILL)  # while the leader is not reaped, its number is no other group's
    ends = {leader: int(signal.SIGKILL)}
    _reap(ends, _STUBBORN_S)
    for descriptor in written:
        while _read(descriptor, written):
            pass
    output, errors = written.values()
    return {
        "code": os.waitstatus_to_exitcode(ends[leader]),
        "last": output[-KEPT:].rstrip().rpartition(b"\n")[2].decode(errors="replace"),
        "words": errors[-_LAST_WORDS:].decode(errors="replace"),
    }


def _become(standard: Sequence[int], closed: Sequence[int], folder: str) -> None:
    """Leads a group of its own in a folder, with `standard` as the first descriptors, and the usual signals."""
    os.setsid()
    os.chdir(folder)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGPIPE, signal.SIGXFSZ):
        signal.signal(number, signal.SIG_DFL)
    moved = [fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, 64) for descriptor in standard]
    for descriptor in (*standard, *closed):
        os.close(descriptor)
    for target, descriptor in enumerate(moved):
        os.dup2(descriptor, target)
        os.close(descriptor)


def _follow(ends: set[int], written: dict[int, bytes]) -> None:
    """Keeps the last bytes that are `written` to descriptors, until one of `ends` can be read."""
    with selectors.DefaultSelector() as ready:
        for descriptor in (*ends, *written):
            ready.register(descriptor, selectors.EVENT_READ)
        while True:
            descriptors = {key.fd for key, _ in ready.select()}
            if ends & descriptors:
                return
            for descriptor in descriptors:
                if not _read(descriptor, written):
                    ready.unregister(descriptor)


def _read(descriptor: int, written: dict[int, bytes]) -> bool:
    """Reads a piece, if there is one now, and forgets early ones; whether there was one."""
    os.set_blocking(descriptor, False)
    try:
        piece = os.read(descriptor, 1 << 16)
    except OSError:
        return False
    written[descriptor] = written[descriptor][-KEPT if len(written[descriptor]) > 2 * KEPT else 0 :] + piece
    return bool(piece)


def _signal_group(leader: int, number: signal.Signals) -> None:
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(leader, number)


def _reap(ends: dict[int, int], seconds: float, *, kill: bool = True) -> None:
    """Waits until no child is left, kills each, and notes how it ended."""
    deadline = time.monotonic() + seconds
    with suppress(ChildProcessError):
        while time.monotonic() < deadline:
            child, status = os.waitpid(-1, os.WNOHANG)
            while child:
                ends[child] = status
                child, status = os.waitpid(-1, os.WNOHANG)
            for children in Path("/proc/self/task").glob("*/children") if kill else ():
                for name in children.read_text().split():
                    with suppress(ProcessLookupError, PermissionError):
                        os.kill(int(name), signal.SIGKILL)
            time.sleep(0.002)


def remove(folder: Path) -> None:
    """Removes a folder, however deep and whatever its permissions, and of a link in it the link."""
    if folder.exists():
        for command in (["chmod", "-R", "u+rwx"], ["rm", "-rf"]):
            subprocess.run([*command, str(folder)], stderr=subprocess.DEVNULL, check=False)


def _prctl(option: int, value: int) -> None:
    if ctypes.CDLL(None).prctl(option, value, 0, 0, 0):
        raise OSError(f"prctl({option}) failed")


if __name__ == "__main__":
    serve(socket.socket(fileno=0), lambda order: os.execve(order["command"][0], order["command"], order["environment"]))
    remove(Path(os.environ[FOLDER]))
