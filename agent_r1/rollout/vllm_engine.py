"""vLLM as an engine of our own, in processes that end with this one; and as a server for trainings elsewhere."""

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
from collections.abc import Awaitable, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

from agent_r1.files import first_error, is_own, lockable
from agent_r1.gpus import visible_gpus
from agent_r1.params import Params
from agent_r1.params.stages import VllmParams
from agent_r1.rollout.engine_wire import SERVER_KEY, Launch
from agent_r1.rollout.sampling import Action, Actor, EngineError, EngineRestarted, EngineUnavailable, Request
from agent_r1.rollout.server_engine import ServedEngine, VllmServer, connect

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
_RISK = "sample from it, and replace its weights by any that this account can read"

T = TypeVar("T")


def claim_scratch() -> tuple[Path, int]:
    """A new temporary folder for a process of vLLM, and the descriptor that locks it.

    The folder is claimed until the last process with the descriptor, inherited or not, is gone. Unclaimed folders of
    killed processes are removed.
    """
    for left in Path(tempfile.gettempdir()).glob(f"{_SCRATCH}*"):
        with contextlib.suppress(OSError):  # claimed
            if is_own(left, stat.S_IFDIR, closed=0o077):  # another user's may be a pipe, or without end
                descriptor = _lock(left)
                shutil.rmtree(left, ignore_errors=True)
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
        started, gpus = time.perf_counter(), visible_gpus()
        replicas = places(settings, gpus)
        super().__init__(len(replicas), actor)
        processes = f"{self.homes} processes" if self.homes > 1 else "vLLM"
        lasts = "minutes where it compiles" if gpus else "up to a minute"
        logger.info("starting %s for %s, which takes %s", processes, actor.model, lasts)
        self.rests = settings.sleep and bool(gpus)
        self._processes: list[VllmProcess] = []
        launch = Launch(
            vllm=settings,
            model=actor.model,
            max_tokens=actor.max_tokens,
            dtype=actor.dtype,
            adapter_rank=actor.adapter_rank,
            weights=self._label,
        )
        try:
            for place in replicas:
                self._processes.append(VllmProcess(launch, place))
            self._servers += [process.server for process in self._processes]
            self.pids = [process.pid for process in self._processes]
            self._wait(self._told(home, server.describe()) for home, server in enumerate(self._servers))
            self.halved = self._are_halved()
            if actor.adapters:
                self.load_weights(Path(actor.adapters), actor.version)
        except BaseException:
            self.close()
            raise
        logger.info("vLLM is ready after %.0f s", time.perf_counter() - started)

    def rest(self) -> None:
        if self.rests:
            self._wait(self._told(home, server.rest()) for home, server in enumerate(self._servers))
            self.version = self.version if self._actor.adapter_rank else None

    def close(self) -> None:
        """Ends the processes at once, even while they work, and removes their files; safe to call twice."""
        for process in self._processes:
            process.close()
        self._thread.shutdown(wait=False, cancel_futures=True)

    async def _load(self, home: int, path: str) -> None:
        await self._told(home, self._servers[home].load_weights(path, self._label))

    async def _sample(self, home: int, requests: Sequence[Request]) -> list[Action]:
        return await self._told(home, self._servers[home].sample(requests, self._actor, self._label))

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
            said = (
                f"the engine's process ended with code {code}; a negative code is a signal, and -9 most often means "
                "that memory ran out: lower gpu_memory_utilization, cpu_cache_gib or max_num_seqs"
            )
        except EngineError as fault:
            kind, said = type(fault), str(fault)
        logged = first_error(process.errors)
        raise kind(f"{said}; vLLM's log: {logged}" if logged else said)


class VllmProcess:
    """A process of vLLM behind a Unix socket in a folder that is its own and its user's."""

    def __init__(self, launch: Launch, place: Mapping[str, str]) -> None:
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
        self.server = VllmServer("the engine's process", connect("http://localhost", math.inf, path))

    def _logging(self) -> dict[str, str]:
        """The variable by which all processes of vLLM write errors to a file; none where the user asks for logs."""
        if any(name.startswith("VLLM_") and "LOGGING" in name for name in os.environ):
            return {}
        handlers = {"file": {"class": "logging.FileHandler", "filename": str(self.errors), "delay": True}}
        loggers = {"vllm": {"handlers": ["file"], "level": "ERROR", "propagate": False}}
        configured = {"version": 1, "disable_existing_loggers": False, "handlers": handlers, "loggers": loggers}
        (file := self.errors.with_suffix(".json")).write_text(json.dumps(configured))
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
    """The variables of a process of vLLM, set before torch and vLLM are imported."""
    fixed = {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_NO_USAGE_STATS": "1",
        "OMP_NUM_THREADS": str(threads),
        "TMPDIR": str(scratch),
    }
    own = {name: value for name, value in os.environ.items() if (name, value) != _LEARNERS}
    return {**own, **fixed, **place}


def command(launch: Launch, listening: int) -> list[str]:
    """The command line of a process of vLLM that answers on an inherited socket."""
    return [sys.executable, "-m", "agent_r1.rollout.vllm_process", launch.model_dump_json(), str(listening)]


def serve(settings: Params, model: str, host: str, port: int, further: Sequence[str] = ()) -> None:
    """Replaces this process by a server for `engine.kind: server`: `agent-r1 serve_engine MODEL --port 8001`.

    It has the limits of `env`, the memory and the GPUs of `engine.vllm`, and a temporary folder that the next engine or
    server removes. `further` are options of vLLM's engine, `--ssl-certfile` and `--ssl-keyfile`. Raises ValueError if
    other machines could reach it without a key.
    """
    from agent_r1.http import guard  # brings a web server, which a training does without

    if warning := guard.open_to_all(SERVER_KEY, host, _RISK):
        logger.warning(warning)
    launch = Launch(
        vllm=settings.engine.vllm,
        model=model,
        max_tokens=settings.env.max_tokens,
        dtype=settings.model.dtype,
        further=list(further),
    )
    listening = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listening.bind((host, port))
    scratch, claim = claim_scratch()
    for descriptor in (listening.fileno(), claim):
        os.set_inheritable(descriptor, True)
    line = command(launch, listening.fileno())
    os.execve(line[0], line, engine_environment(launch.vllm.threads, scratch, {}))
