"""The process in which an agent's function is called, beside the stage: `python -m agent_r1.agents.functions`.

Calls of an `async def` share its event loop. Each call of a plain `def` has a process of its own, forked from it.
"""

from __future__ import annotations

import asyncio
import faulthandler
import gc
import inspect
import json
import os
import signal
import socket
import sys
import traceback
from collections.abc import Callable, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

from agent_r1.agents.supervisor import KEPT, serve
from agent_r1.agents.task import Task

READY = b"r"  # is sent over the socket from which episodes come, once the function is there


def main(root: str, module: str, name: str) -> None:
    """Serves calls of a function, imported in `root`, which come over descriptor 3."""
    control = socket.socket(fileno=3)
    folder = Path.cwd()
    control.set_inheritable(False)
    os.chdir(root)
    sys.path.insert(0, root)
    function = getattr(import_module(module), name)
    os.chdir(folder)
    gc.freeze()  # forks share these objects, and nothing looks for garbage among them
    control.send(READY)
    if inspect.iscoroutinefunction(function):
        faulthandler.register(signal.SIGTERM, chain=True)  # says where a call blocks
        asyncio.run(_serve_calls(control, function))
        return

    def run(order: Mapping[str, Any]) -> None:
        with open(0, closefd=False) as file:
            last = _outcome(function(Task(**json.load(file))))
        sys.stdout.flush()
        os.write(1, f"\n{last}\n".encode())
        os._exit(0)

    sys.stdout.flush()
    serve(control, run)


async def _serve_calls(control: socket.socket, function: Callable[[Task], Any]) -> None:
    loop = asyncio.get_running_loop()
    closing = asyncio.Event()
    calls = set[asyncio.Task[None]]()

    def take() -> None:
        descriptors = socket.recv_fds(control, 1, 1, socket.MSG_CMSG_CLOEXEC)[1]
        if not descriptors:
            closing.set()
        for descriptor in descriptors:
            call = loop.create_task(_answer(socket.socket(fileno=descriptor), function))
            calls.add(call)
            call.add_done_callback(calls.discard)

    loop.add_reader(control, take)
    await closing.wait()


async def _answer(connection: socket.socket, function: Callable[[Task], Any]) -> None:
    """Awaits one call, and cancels it when the stage closes its end of the connection."""
    reader, writer = await asyncio.open_unix_connection(sock=connection, limit=1 << 30)
    line = await reader.readline()
    if not line:
        return  # the stage has gone
    order = json.loads(line)
    call = asyncio.create_task(_called(function, Task(**json.loads(order["input"]))))
    gone = asyncio.create_task(reader.read(1))
    await asyncio.wait({call, gone}, return_when=asyncio.FIRST_COMPLETED)
    call.cancel()
    writer.write(json.dumps(await call).encode())
    gone.cancel()
    writer.close()


async def _called(function: Callable[[Task], Any], task: Task) -> dict[str, Any]:
    """A report like that of a process."""
    try:
        return {"code": 0, "last": _outcome(await function(task)), "words": ""}
    except BaseException:  # SystemExit of one call would end all
        return {"code": 1, "last": "", "words": traceback.format_exc()}


def _outcome(result: object) -> str:
    """A function's result as the last line of a command: nothing, an answer, or a mapping."""
    text = json.dumps({"answer": result} if result is None or isinstance(result, str) else result)
    if len(text) > KEPT:
        raise ValueError(f"it returned {len(text)} characters; return at most {KEPT}")
    return text


if __name__ == "__main__":
    main(*sys.argv[1:])
