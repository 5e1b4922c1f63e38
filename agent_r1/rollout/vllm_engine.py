"""vLLM as an engine of our own, in processes that end with this one."""

from __future__ import annotations

import contextlib
import fcntl
import json
import logging
import math
import os
import shutil
import socket
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

from agent_r1.files import first_error, is_own, lockable
from agent_r1.gpus import visible_gpus
from agent_r1.http.client import MAX_ANSWER_BYTES, Client
from agent_r1.params.stages import VllmParams
from agent_r1.rollout import engine_wire as wire
from agent_r1.rollout.sampling import (
    Action,
    Actor,
    EngineError,
    EngineRestarted,
    EngineUnavailable,
    HeldWeights,
    Request,
)
from agent_r1.rollout.server_engine import ServedEngine, Server, draw
from agent_r1.surroundings import SEALED, is_secret

logger = logging.getLogger(__name__)

_CLOSE_TIMEOUT_S = 10.0
_DEFAULTS = {  # for the environment of an engine's own process
    "VLLM_LOGGING_LEVEL": "CRITICAL",
    "TORCH_CPP_LOG_LEVEL": "ERROR",
    "PYTHONWARNINGS": "ignore",
    # oneDNN keeps code for every shape that it has computed, a mebibyte each; 1024 of them by itself.
    "ONEDNN_PRIMITIVE_CACHE_CAPACITY": "128",
}
_SCRATCH = "agent_r1_engine_"  # short: vLLM may put sockets into it, whose paths have 108 bytes at most
# Of the learner. vLLM's memory has a pool of its own while it sleeps, and is shared by parts of a model.
_LEARNERS = ("PYTORCH_ALLOC_CONF", "expandable_segments:True")

T = TypeVar("T")


def claim_scratch() -> tuple[Path, int]:
    """A new temporary folder for a process of vLLM, and the descriptor that locks it.

    The folder is claimed until the last process with the descriptor, inherited or not, is gone. Unclaimed folders of
    killed processes are removed.
    """
    for leftover in Path(tempfile.gettempdir()).glob(f"{_SCRATCH}*"):
        with contextlib.suppress(OSError):  # claimed
            if is_own(leftover, stat.S_IFDIR, closed=0o077):  # another user's may be a pipe, or without end
                descriptor = _lock(leftover)
                shutil.rmtree(leftover, ignore_errors=True)
                os.close(descriptor)
    unnamed = Path(tempfile.mkdtemp(prefix="agent_r1_"))  # named once locked: no other process may find it unlocked
    descriptor = _lock(unnamed)
    return unnamed.rename(unnamed.with_name(unnamed.name.replace("agent_r1_", _SCRATCH))), descriptor


def _lock(folder: Path) -> int:
    descriptor = os.open(folder, os.O_RDONLY | os.O_NOFOLLOW | os.O_DIRECTORY)
    try:
        with lockable(folder):
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (OSError, ValueError):
        os.close(descriptor)
        raise
    return descriptor


class VllmEngine(ServedEngine):
    """Samples actions with vLLM in `replicas` processes, on `tensor_parallel_size` GPUs each or on the cores of a CPU.

    Timing does not decide which process samples a request. On a CPU, the same requests in the same order to an engine
    of the same weights, `threads` and `replicas` give the same ids and logprobs, bit for bit; with one thread the
    number of replicas changes nothing.
    """

    def __init__(self, settings: VllmParams, actor: Actor) -> None:
        """Waits until every process has loaded the model. Raises EngineError if one cannot, or lacks room."""
        started = time.perf_counter()
        gpus = visible_gpus()
        replicas = places(settings, gpus)
        super().__init__(len(replicas), actor)
        processes = f"{self.homes} processes" if self.homes > 1 else "vLLM"
        lasts = "minutes where it compiles" if gpus else "up to a minute"
        logger.info("starting %s for %s, which takes %s", processes, actor.model, lasts)
        self.rests = settings.sleep and bool(gpus)
        self._processes = list[VllmProcess]()
        launch = wire.Launch(
            vllm=settings,
            model=actor.model,
            max_tokens=actor.max_tokens,
            dtype=actor.dtype,
            adapter_rank=actor.adapter_rank,
        )
        try:
            for place in replicas:
                self._processes.append(VllmProcess(launch, place))
            self.pids = [process.pid for process in self._processes]
            models = self._told_by_all(Process.describe)
            self.halved = models[0].dtype == "bfloat16"
            if actor.adapters:
                self.load_weights(Path(actor.adapters), actor.version)
        except BaseException:
            self.close()
            raise
        logger.info("vLLM is ready after %.0f s", time.perf_counter() - started)

    def rest(self) -> None:
        if self.rests:
            self._told_by_all(Process.rest)
            self.version = self.version if self._actor.adapter_rank else None

    def close(self) -> None:
        """Ends the processes at once, even while they work, and removes their files; safe to call twice."""
        for process in self._processes:
            process.close()
        self._thread.shutdown(wait=False, cancel_futures=True)

    def held(self) -> list[HeldWeights]:
        return self._told_by_all(Process.held)

    async def _load(self, home: int, path: str, version: int) -> None:
        await self._told(home, self._processes[home].server.load_weights(path))

    async def _sample(self, home: int, requests: Sequence[Request]) -> list[Action]:
        async with self._pool:
            return await self._told(home, self._processes[home].server.sample(requests, self._actor))

    def _told_by_all(self, call: Callable[[Process], Awaitable[T]]) -> list[T]:
        return self._wait(self._told(home, call(process.server)) for home, process in enumerate(self._processes))

    async def _told(self, home: int, call: Awaitable[T]) -> T:
        """The result of a call; a process that ended raises EngineRestarted after a signal, else EngineError."""
        process = self._processes[home]
        try:
            return await call
        except EngineUnavailable:
            code = process.wait()
            if code is None:  # it lives: the connection failed
                raise
            kind = EngineRestarted if code < 0 else EngineError
            problem = (
                f"the engine's process ended with code {code}; a negative code is a signal, and -9 most often means "
                "that memory ran out: lower gpu_memory_utilization, cpu_cache_gib or max_num_seqs"
            )
        except EngineError as fault:
            kind = type(fault)
            problem = str(fault)
        logged = first_error(process.errors)
        raise kind(f"{problem}; vLLM's log: {logged}" if logged else problem)


class Process(Server):
    """The client of a process of our own."""

    async def sample(self, requests: Sequence[Request], actor: Actor) -> list[Action]:
        """One action per request, which are admitted at the same time, in their order.

        Raises EngineUnavailable if there is no answer, and EngineError if it is a refusal, or out of shape.
        """
        most_bytes = MAX_ANSWER_BYTES + wire.TOKEN_BYTES * sum(request.max_tokens for request in requests)
        asking = wire.Draws(requests=[draw(request, actor) for request in requests])
        answer = await self._post(wire.Answered, "/sample", asking, most_bytes)
        if len(answer.actions) != len(requests):
            raise self._nonsense("/sample", f"{len(answer.actions)} actions for {len(requests)} requests")
        pairs = zip(requests, answer.actions, strict=True)
        return [self._action("/sample", sampled, request.max_tokens, actor.end_ids) for request, sampled in pairs]

    async def load_weights(self, path: str) -> None:
        """Loads the weights or adapters of a folder, and drops the caches of the old ones."""
        await self._post(wire.Done, "/weights", wire.Weights(path=path))

    async def rest(self) -> None:
        """Frees the GPU's memory until the next call."""
        await self._post(wire.Done, "/rest")


class VllmProcess:
    """A process of vLLM behind a Unix socket in a folder that is its own and its user's."""

    def __init__(self, launch: wire.Launch, place: Mapping[str, str]) -> None:
        """Starts the process with the variables of one of `places`. It answers once it has loaded the model."""
        self._scratch, claim = claim_scratch()
        self.errors = self._scratch / "errors.log"
        self._folder: int | None = os.open(self._scratch, os.O_RDONLY | os.O_DIRECTORY)
        path = f"/proc/self/fd/{self._folder}/http"  # the folder's own may be too long for a socket
        with socket.socket(socket.AF_UNIX) as listening:
            listening.bind(path)
            listening.listen()
            self._process = subprocess.Popen(
                command(launch, listening.fileno()),
                stdin=subprocess.PIPE,  # the process ends when this end closes
                pass_fds=[listening.fileno(), claim],
                env=_DEFAULTS | self._logging() | engine_environment(launch.vllm.threads, self._scratch, place),
            )
        os.close(claim)
        self.pid = self._process.pid
        self.server = Process("the engine's process", Client("http://localhost", math.inf, "", path))

    def _logging(self) -> dict[str, str]:
        """The variable by which all processes of vLLM write errors to a file; none where the user asks for logs."""
        if any(name.startswith("VLLM_") and "LOGGING" in name for name in os.environ):
            return {}
        handlers = {"file": {"class": "logging.FileHandler", "filename": str(self.errors), "delay": True}}
        loggers = {"vllm": {"handlers": ["file"], "level": "ERROR", "propagate": False}}
        configured = {"version": 1, "disable_existing_loggers": False, "handlers": handlers, "loggers": loggers}
        file = self.errors.with_suffix(".json")
        file.write_text(json.dumps(configured))
        return {"VLLM_LOGGING_CONFIG_PATH": str(file)}

    def wait(self) -> int | None:
        """The exit code of a process that is about to end."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_CLOSE_TIMEOUT_S)
        return self._process.returncode

    def close(self) -> None:
        """Ends the process at once, even while it works, and removes its files; safe to call twice."""
        self._process.kill()
        self._process.communicate()
        shutil.rmtree(self._scratch, ignore_errors=True)
        if self._folder is not None:
            os.close(self._folder)
            self._folder = None


def places(settings: VllmParams, gpus: Sequence[str]) -> list[dict[str, str]]:
    """The variables that give each replica its GPUs or cores, if any; EngineError if it takes more than there are."""
    cores = sorted(os.sched_getaffinity(0))
    threads = settings.threads
    replicas = settings.processes(gpus=len(gpus), cores=len(cores))
    parts = settings.tensor_parallel_size
    count = replicas * parts
    if count == 1:
        return [{}]
    needs = f"engine.vllm: replicas {replicas} x tensor_parallel_size {parts}"
    if gpus and count > len(gpus):
        raise EngineError(f"{needs} takes {count} GPUs, and there are {len(gpus)}; lower one of them")
    if not gpus and count * threads > len(cores):
        raise EngineError(f"{needs} x threads {threads} takes more than the {len(cores)} cores; lower one of them")
    if gpus:
        return [{"CUDA_VISIBLE_DEVICES": ",".join(gpus[at : at + parts])} for at in range(0, count, parts)]
    if parts == 1:
        return [{}] * replicas
    bound = [",".join(map(str, cores[at : at + threads])) for at in range(0, count * threads, threads)]
    return [{"VLLM_CPU_OMP_THREADS_BIND": "|".join(bound[at : at + parts])} for at in range(0, count, parts)]


def engine_environment(threads: int, scratch: Path, place: Mapping[str, str]) -> dict[str, str]:
    """The variables of a process of vLLM, set before torch and vLLM are imported."""
    fixed = {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_NO_USAGE_STATS": "1",
        "OMP_NUM_THREADS": str(threads),
        "TMPDIR": str(scratch),
    }
    variables = [pair for pair in os.environ.items() if pair != _LEARNERS]
    if SEALED in os.environ:
        variables = [pair for pair in variables if not is_secret(*pair)]
    return {**dict(variables), **fixed, **place}


def command(launch: wire.Launch, listening: int) -> list[str]:
    """The command line of a process of vLLM that answers on an inherited socket."""
    return [sys.executable, "-m", "agent_r1.rollout.vllm_process", launch.model_dump_json(), str(listening)]
