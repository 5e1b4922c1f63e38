"""vLLM as an engine: processes of its own at the far ends of pipes, token ids in and out."""

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
from collections.abc import Mapping, Sequence
from itertools import count
from multiprocessing import Pipe
from pathlib import Path
from typing import Any

from agent_r1.devices.gpus import visible_gpus
from agent_r1.params.stages import VllmParams
from agent_r1.rollout.sampling import Action, Actor, Engine, EngineError, Request
from agent_r1.rollout.vllm_process import ARRIVED, FAILED

logger = logging.getLogger(__name__)

SERVER_KEY = "AGENT_R1_ENGINE_KEY"  # the key of the engine servers, which their clients send

_CLOSE_TIMEOUT_S = 10.0
_QUIET = {  # defaults for the environment of the engine's process
    "VLLM_LOGGING_LEVEL": "CRITICAL",
    "TORCH_CPP_LOG_LEVEL": "ERROR",
    "PYTHONWARNINGS": "ignore",
    "VLLM_NO_USAGE_STATS": "1",
}
_SCRATCH = "agent_r1_engine_"  # short: the paths of sockets in it have 108 bytes at most


def claim_scratch() -> tuple[Path, int]:
    """A new temporary folder for a process of vLLM, and the descriptor that locks it.

    The folder is claimed until the last process with the descriptor, inherited or not, is gone. Unclaimed folders of
    killed processes are removed.
    """
    for left in Path(tempfile.gettempdir()).glob(f"{_SCRATCH}*"):
        with contextlib.suppress(OSError):  # claimed, or another user's
            descriptor = _lock(left)
            shutil.rmtree(left, ignore_errors=True)
            os.close(descriptor)
    unnamed = Path(
        tempfile.mkdtemp(prefix="agent_r1_")
    )  # renamed once it is locked: no other process may find it unlocked
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
    """Samples actions with vLLM in `replicas` processes, on `tensor_parallel_size` GPUs each or on the cores of a CPU.

    An episode stays with one process, which caches its prefix; timing does not decide which. On a CPU, the same
    requests in the same order to an engine of the same weights, `threads` and `replicas` give the same ids and
    logprobs, bit for bit; with one thread the number of replicas changes nothing.
    """

    def __init__(self, settings: VllmParams, actor: Actor) -> None:
        """Waits until every process has loaded the model. Raises EngineError if one cannot, or lacks room."""
        started, gpus = time.perf_counter(), visible_gpus()
        replicas = places(settings, gpus)
        processes = f"{len(replicas)} processes" if len(replicas) > 1 else "vLLM"
        logger.info("starting %s for %s, which takes up to a minute", processes, actor.model)
        self.version, self.homes = actor.version, len(replicas)
        self.rests = settings.sleep and bool(gpus)
        self._processes: list[VllmProcess] = []
        try:
            for place in replicas:
                self._processes.append(VllmProcess(settings.threads, place))
            self._exchange(dict.fromkeys(range(self.homes), (settings, actor)))
            if actor.adapters:
                self.load_weights(Path(actor.adapters), actor.version)
        except BaseException:
            self.close()
            raise
        logger.info("vLLM is ready after %.0f s", time.perf_counter() - started)

    @property
    def pids(self) -> list[int]:
        """The ids of the engine's processes."""
        return [process.pid for process in self._processes]

    def sample(self, requests: Sequence[Request]) -> list[Action]:
        own: dict[int, list[int]] = {}  # process -> its requests
        for index, request in enumerate(requests):
            own.setdefault(request.home(self.homes), []).append(index)
        found = self._exchange({at: ("sample", [requests[index] for index in asked]) for at, asked in own.items()})
        actions = {index: action for at, asked in own.items() for index, action in zip(asked, found[at], strict=True)}
        return [actions[index] for index in range(len(requests))]

    async def act(self, request: Request) -> Action:
        """The action of a request that vLLM takes in at its next token, and out again if the caller is cancelled."""
        return await self._processes[request.home(self.homes)].act(request)

    def rest(self) -> None:
        if self.rests:
            self._exchange(dict.fromkeys(range(self.homes), ("rest", None)))

    def load_weights(self, folder: Path, version: int) -> None:
        self._exchange(dict.fromkeys(range(self.homes), ("load_weights", str(folder))))
        self.version = version

    def close(self) -> None:
        """Ends the processes at once, even while they work, and removes their files; safe to call twice."""
        for process in self._processes:
            process.terminate()
        for process in self._processes:
            process.bury()

    def _exchange(self, messages: Mapping[int, object]) -> dict[int, Any]:
        """The answers of processes to messages, sent at the same time. The first error is raised when all are over."""
        for at, message in messages.items():
            self._processes[at].begin(message)
        answers, errors = {}, []
        for at in messages:
            try:
                answers[at] = self._processes[at].finish()
            except EngineError as error:
                errors.append(error)
        if errors:
            raise errors[0]
        return answers


class VllmProcess:
    """The near end of the pipe to one process of vLLM."""

    def __init__(self, threads: int, place: Mapping[str, str]) -> None:
        """Starts the process with the variables of one of `places`; the first message names the model."""
        self._waiting: dict[int, asyncio.Future[Action]] = {}  # ticket -> the answer; tickets number the arrivals
        self._tickets = count()
        self._connection, theirs = Pipe()
        self._scratch, claim = claim_scratch()
        self._process = subprocess.Popen(
            [sys.executable, "-m", "agent_r1.rollout.vllm_process", str(theirs.fileno())],
            pass_fds=[theirs.fileno(), claim],
            env=engine_environment(threads, self._scratch, place),
        )
        self.pid = self._process.pid
        theirs.close()
        os.close(claim)

    def begin(self, message: object) -> None:
        """Sends a message; its answer is read with `finish`."""
        if self._waiting:
            raise RuntimeError(f"{len(self._waiting)} requests are under way; call the engine between them")
        self._tell(message)

    def finish(self) -> Any:
        """The answer to the message. Arrivals before it belong to requests that were taken out too late."""
        while (heard := self._hear())[0] == ARRIVED:
            pass
        return heard[1]

    async def act(self, request: Request) -> Action:
        """The action of a request; for cancelling see `VllmEngine.act`."""
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

    def terminate(self) -> None:
        """Ends the process at once, even while it works."""
        self._connection.close()
        self._process.terminate()

    def bury(self) -> None:
        """Waits until the process is gone, and removes its files."""
        try:
            self._process.wait(_CLOSE_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        shutil.rmtree(self._scratch, ignore_errors=True)

    def _deliver(self) -> None:
        """Gives each action to its waiter. An error goes to all waiters."""
        try:
            for ticket, action in self._hear()[1]:
                if ticket in self._waiting and not self._waiting[ticket].done():
                    self._waiting[ticket].set_result(action)
        except Exception as error:
            for answer in self._waiting.values():
                if not answer.done():
                    answer.set_exception(error)

    def _tell(self, message: object) -> None:
        with contextlib.suppress(ConnectionError):  # `_hear` comes next, and the process's last words say why
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


def places(settings: VllmParams, gpus: Sequence[str]) -> list[dict[str, str]]:
    """The variables that give every replica its GPUs, or on a CPU its parts their cores; none for a single process.

    Raises EngineError if the replicas take more GPUs, or on a CPU more cores, than there are.
    """
    cores, threads = sorted(os.sched_getaffinity(0)), settings.threads
    replicas, parts = settings.processes(gpus=len(gpus), cores=len(cores)), settings.tensor_parallel_size
    wanted = replicas * parts
    if wanted == 1:
        return [{}]
    needs = f"engine.vllm: replicas {replicas} x tensor_parallel_size {parts}"
    if gpus and wanted > len(gpus):
        raise EngineError(f"{needs} takes {wanted} GPUs, and there are {len(gpus)}; lower one of them")
    if not gpus and wanted * threads > len(cores):
        raise EngineError(f"{needs} x threads {threads} takes more than the {len(cores)} cores; lower one of them")
    if gpus:
        return [{"CUDA_VISIBLE_DEVICES": ",".join(gpus[at : at + parts])} for at in range(0, wanted, parts)]
    if parts == 1:
        return [{}] * replicas
    bound = [",".join(map(str, cores[at : at + threads])) for at in range(0, wanted * threads, threads)]
    return [{"VLLM_CPU_OMP_THREADS_BIND": "|".join(bound[at : at + parts])} for at in range(0, wanted, parts)]


def engine_environment(threads: int, scratch: Path, place: Mapping[str, str]) -> dict[str, str]:
    """The variables of the engine's process, set before torch and vLLM are imported."""
    fixed = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "OMP_NUM_THREADS": str(threads), "TMPDIR": str(scratch)}
    return {**_QUIET, **os.environ, **fixed, **place}
