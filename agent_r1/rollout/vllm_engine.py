"""The policy as a sampler: vLLM in a process of its own, at the near end of a pipe, token ids in and out."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import logging
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from itertools import count
from multiprocessing import Pipe
from pathlib import Path
from typing import Any

from agent_r1.params.stages import VllmParams
from agent_r1.rollout.sampling import Action, Actor, Engine, EngineError, Request
from agent_r1.rollout.vllm_process import ARRIVED, FAILED

log = logging.getLogger(__name__)

SERVER_KEY = "AGENT_R1_ENGINE_KEY"  # what a server asks for, and its clients send

_CLOSE_TIMEOUT_S = 10.0
_QUIET = {  # variables of the engine's process, where the caller's environment has no others
    "VLLM_LOGGING_LEVEL": "CRITICAL",
    "TORCH_CPP_LOG_LEVEL": "ERROR",
    "PYTHONWARNINGS": "ignore",
    "VLLM_NO_USAGE_STATS": "1",
}
_SCRATCH = "agent_r1_engine_"  # short: paths of sockets, which end below, have 108 bytes at most


def claim_scratch() -> tuple[Path, int]:
    """A new temporary folder for a process of vLLM, which leaves files there, and the descriptor that locks it.

    The folder is claimed until the last process that has the descriptor, by inheritance too, is gone. Folders that
    nobody claims were left by processes that were killed, and are removed.
    """
    for left in Path(tempfile.gettempdir()).glob(f"{_SCRATCH}*"):
        with contextlib.suppress(OSError):  # claimed, or another user's
            descriptor = _lock(left)
            shutil.rmtree(left, ignore_errors=True)
            os.close(descriptor)
    unnamed = Path(tempfile.mkdtemp(prefix="agent_r1_"))  # the name comes with the lock: nobody may find it unlocked
    descriptor = _lock(unnamed)
    return unnamed.rename(unnamed.with_name(unnamed.name.replace("agent_r1_", _SCRATCH))), descriptor


def _lock(folder: Path) -> int:
    descriptor = os.open(folder, os.O_RDONLY | os.O_NOFOLLOW)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


class VllmEngine(Engine):
    """Samples actions with vLLM, on CUDA where there is one and else on the CPU.

    The same requests in the same order, to an engine of the same weights and the same `threads`, give the same ids
    and logprobs, bit for bit, on a CPU.
    """

    def __init__(self, settings: VllmParams, actor: Actor) -> None:
        """Starts the process and waits until the model is loaded; an EngineError says why vLLM could not load it."""
        started = time.perf_counter()
        log.info("starting vLLM for %s, which takes up to a minute", actor.model)
        self.version = actor.version
        self._waiting: dict[int, asyncio.Future[Action]] = {}  # by tickets, which count what has arrived
        self._tickets = count()
        self._connection, theirs = Pipe()
        self._scratch, claim = claim_scratch()
        self._process = subprocess.Popen(
            [sys.executable, "-m", "agent_r1.rollout.vllm_process", str(theirs.fileno())],
            pass_fds=[theirs.fileno(), claim],
            env=engine_environment(settings.threads, self._scratch),
        )
        theirs.close()
        os.close(claim)
        try:
            self._exchange((settings, actor))
            if actor.adapters:
                self.load_weights(Path(actor.adapters), actor.version)
        except BaseException:
            self.close()
            raise
        log.info("vLLM is ready after %.0f s", time.perf_counter() - started)

    @property
    def pid(self) -> int:
        """Of the engine's process."""
        return self._process.pid

    def sample(self, requests: Sequence[Request]) -> list[Action]:
        actions: list[Action] = self._exchange(("sample", list(requests)))
        return actions

    async def act(self, request: Request) -> Action:
        """The action of a request that vLLM takes in at its next token; one that is cancelled is taken out again."""
        loop, ticket = asyncio.get_running_loop(), next(self._tickets)
        if not self._waiting:
            loop.add_reader(self._connection.fileno(), self._deliver)
        answer: asyncio.Future[Action] = loop.create_future()
        self._waiting[ticket] = answer
        try:
            self._tell(("arrive", ticket, request))
            return await answer
        finally:
            if answer.cancelled():
                self._tell(("abort", ticket))
            del self._waiting[ticket]
            if not self._waiting:
                loop.remove_reader(self._connection.fileno())

    def load_weights(self, folder: Path, version: int) -> None:
        self._exchange(("load_weights", str(folder)))
        self.version = version

    def close(self) -> None:
        """Ends the process at once, whatever it does, and removes what it left; safe to call twice."""
        self._connection.close()
        self._process.terminate()
        try:
            self._process.wait(_CLOSE_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        shutil.rmtree(self._scratch, ignore_errors=True)

    def _exchange(self, message: object) -> Any:
        """What a call gives. What arrives before it is of requests that were taken out too late."""
        if self._waiting:
            raise RuntimeError(f"{len(self._waiting)} requests are waited for; an engine is called between them")
        self._tell(message)
        while (heard := self._hear())[0] == ARRIVED:
            pass
        return heard[1]

    def _deliver(self) -> None:
        """Gives actions to those who wait for them. What went wrong is told to all who wait."""
        try:
            for ticket, action in self._hear()[1]:
                if ticket in self._waiting and not self._waiting[ticket].done():
                    self._waiting[ticket].set_result(action)
        except Exception as error:
            for answer in self._waiting.values():
                if not answer.done():
                    answer.set_exception(error)

    def _tell(self, message: object) -> None:
        with contextlib.suppress(ConnectionError):  # what the process said last says why: `_hear` comes next
            self._connection.send(message)

    def _hear(self) -> tuple[str, Any]:
        try:
            kind, result = self._connection.recv()
        except (EOFError, ConnectionError) as error:
            raise EngineError(
                f"the engine's process ended with code {self._process.wait()}; a negative code is a signal, and -9 "
                "most often means that memory ran out: lower gpu_memory_utilization, cpu_cache_gib or max_num_seqs"
            ) from error
        if kind == FAILED:
            raise EngineError(f"the engine failed:\n{result}")
        return kind, result


def engine_environment(threads: int, scratch: Path) -> dict[str, str]:
    """The variables of the engine's process, set before torch and vLLM are imported."""
    fixed = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "OMP_NUM_THREADS": str(threads), "TMPDIR": str(scratch)}
    return {**_QUIET, **os.environ, **fixed}
