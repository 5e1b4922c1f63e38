"""Programs of the policy in a sandbox: Monty, a Python interpreter that has no files, no network and no clock.

Worker processes run them within limits of time, memory and recursion. All episodes of a stage share the workers:
between calls an episode is a few kilobytes of names, saved by one worker and loaded by any.
"""

from __future__ import annotations

import ast
import asyncio
import ctypes
import resource
import sys
import warnings
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from datetime import datetime
from itertools import accumulate
from typing import Any, Self

from pydantic_monty import (
    CollectString,
    Monty,
    MontyCrashedError,
    MontyRuntimeError,
    MontySyntaxError,
    OSPolicy,
    ResourceLimits,
)

from agent_r1.params.tools import PythonParams
from agent_r1.records import CallStatus, Json
from agent_r1.tools.base import FunctionTool, ToolError, ToolResult, ToolTimeout

NOW = datetime(2024, 7, 26)  # the clock of every program
MAX_CHARACTERS = 20_000  # of a program
MAX_PRINTED = 1 << 20  # bytes
MAX_STATE = 1 << 20  # bytes of an episode's names
MAX_RECURSION = 500
_SPARE_MIB = 1024  # of a worker's addresses, beside several times the memory of a program
_PATIENCE = 10  # times its limit that a call may take, if it once ended within the limit


class Sandbox:
    """The workers, which end with it, after their programs."""

    def __init__(self, params: PythonParams) -> None:
        self._params = params
        self._workers = Monty(min_processes=params.workers, max_processes=params.workers)
        self._threads = ThreadPoolExecutor(params.workers, "sandbox", _give_up_rights)  # each starts workers, and waits

    def __enter__(self) -> Self:
        self._threads.submit(self._workers.__enter__).result()
        return self

    def __exit__(self, *fault: Any) -> None:
        self._threads.shutdown(cancel_futures=True)
        self._workers.__exit__(*fault)

    async def run(self, program: str, state: bytes, *, seed: int, patience: int = 1) -> tuple[str, bytes]:
        """Runs a program in the state of earlier programs, b"" for none; returns its output and the names after it.

        The seed counts if there is no state.

        Raises ToolTimeout if it takes longer than `patience` times its limit, and ToolError for other faults. A worker
        that dies is replaced and the program tried again, once more than there are workers: each of them may have been
        killed from outside.
        """
        code = _showing_its_value(program)
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._threads, self._run, code, state, seed, patience)

    def _run(self, code: str, state: bytes, seed: int, patience: int) -> tuple[str, bytes]:
        for _ in range(self._params.workers + 1):
            try:
                return self._attempt(code, state, seed, patience)
            except MontyCrashedError as fault:
                if fault.timed_out:
                    raise self._too_long() from None
        raise ToolError("the program crashed the interpreter")

    def _attempt(self, code: str, state: bytes, seed: int, patience: int) -> tuple[str, bytes]:
        printed = CollectString(MAX_PRINTED)
        limits: ResourceLimits = {
            "max_feed_duration_secs": patience * self._params.timeout_s,
            "max_memory": self._params.memory_mib << 20,
            "max_recursion_depth": MAX_RECURSION,
        }
        policy: OSPolicy = {"datetime": NOW, "timezone": "utc", "sleep": "zero", "random_start": {"seed": seed}}
        try:
            with self._workers.checkout(limits=limits, os_policy=policy) as session:
                _limit(session.worker_pid, 4 * self._params.memory_mib + _SPARE_MIB)
                if state:
                    session.load_session(state)
                session.feed_run(code, print_callback=printed)
                dump = session.dump()
        except (MontyRuntimeError, MontySyntaxError) as fault:
            raise self._explained(fault, printed.output) from None
        if len(dump) > MAX_STATE:
            raise ToolError(f"the names of the program hold more than {MAX_STATE >> 20} MiB; keep less")
        return printed.output, dump

    def _explained(self, fault: MontyRuntimeError | MontySyntaxError, output: str) -> ToolError:
        """The policy's message. If a limit cut the program short, it shows nothing that depends on the moment."""
        if isinstance(fault.exception(), TimeoutError) and not fault.traceback():
            return self._too_long()
        if isinstance(fault.exception(), MemoryError):
            return ToolError(f"MemoryError: more than {self._params.memory_mib} MiB, or much too long an output")
        return ToolError("\nprinted before that:\n".join(filter(None, (fault.display("type-msg"), output.rstrip()))))

    def _too_long(self) -> ToolTimeout:
        return ToolTimeout(f"the program took longer than {self._params.timeout_s:g} s")


class PythonTool(FunctionTool):
    """One episode's interpreter; the names of a call that succeeds stay for the next."""

    def __init__(self, sandbox: Sandbox, seed: int) -> None:
        async def python(code: str) -> str:
            """Runs Python and shows what it prints and the value of its last line. Names stay for the next call."""
            return await self._run(code)

        super().__init__(python)
        self._sandbox = sandbox
        self._seed = seed
        self._state = b""
        self._one_at_a_time = asyncio.Lock()

    async def recall(self, arguments: Json, result: ToolResult) -> None:
        """Restores the names after a call whose result was kept, by running its program."""
        if result.call_status is CallStatus.OK:
            await self._run(arguments["code"], patience=_PATIENCE)

    async def _run(self, code: str, patience: int = 1) -> str:
        async with self._one_at_a_time:
            output, self._state = await self._sandbox.run(code, self._state, seed=self._seed, patience=patience)
        return output.removesuffix("\n") or "nothing was printed"


def _give_up_rights() -> None:
    """Leaves this thread, and each process that it starts, no capability, and no program that would give it one."""
    if sys.platform == "linux":
        libc = ctypes.CDLL(None)
        words = ctypes.c_uint32
        no_new_privs = 38  # of prctl
        version = 0x20080522  # of capset
        if libc.prctl(no_new_privs, 1, 0, 0, 0) or libc.capset((words * 2)(version, 0), (words * 6)()):
            raise OSError("the sandbox's workers cannot give up their rights")


def _limit(worker: int | None, mebibytes: int) -> None:
    """Lets a worker open no file or socket, write to none, start no process, and leave no core."""
    if worker and sys.platform == "linux":
        limits = {resource.RLIMIT_AS: mebibytes << 20, resource.RLIMIT_NOFILE: 3}  # its pipes are below
        limits |= dict.fromkeys((resource.RLIMIT_FSIZE, resource.RLIMIT_NPROC, resource.RLIMIT_CORE), 0)
        for kind, most in limits.items():
            with suppress(ValueError, ProcessLookupError):  # a lower limit stays; one that has ended is noticed later
                resource.prlimit(worker, kind, (most, most))


def _last_value(program: str) -> ast.expr | None:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            body = ast.parse(program).body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None  # the sandbox names the fault
    return body[-1].value if body and isinstance(body[-1], ast.Expr) else None


def _showing_its_value(program: str) -> str:
    """The program with its last value in `_`, printed inside: brought out, it would be shown in another way."""
    if len(program) > MAX_CHARACTERS:
        raise ToolError(f"the program is longer than {MAX_CHARACTERS:,} characters")
    last = _last_value(program)
    if last is None:
        return program
    text = program.encode()
    line_starts = [0, *accumulate(map(len, text.splitlines(keepends=True)))]
    start = line_starts[last.lineno - 1] + last.col_offset
    stop = line_starts[(last.end_lineno or last.lineno) - 1] + (last.end_col_offset or 0)
    source = b"%b_ = (%b)%b\nif _ is not None:\n    print(repr(_))" % (text[:start], text[start:stop], text[stop:])
    return source.decode()
