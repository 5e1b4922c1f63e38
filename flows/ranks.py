"""The ranks of a stage that learns: torchrun starts them, and ends all when one has ended early.

On one machine a stage is its own torchrun; on several the user, SLURM or Kubernetes starts one on each.
"""

from __future__ import annotations

import logging
import os
import platform
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from importlib.metadata import version
from pathlib import Path

from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from agent_r1.devices.meeting import MEETING, Place, alive, forget_place, joined, require_alike
from agent_r1.devices.sharing import ALONE, Group, Ranks
from agent_r1.gpus import visible_gpus
from agent_r1.params import Params, fingerprint
from agent_r1.params.sections import Section
from agent_r1.params.stages import LearnerParams
from flows.made_of import code_of
from flows.processes import STARTED_BY, end_with_parent
from flows.stage import UNAVAILABLE, leave_code, run_stage, started_by_another
from flows.terminal import HarmlessFormatter

GRACE_S = 10.0  # for a rank that lost another to end like after any fault, with its engine and its tracking
BLAME_S = 5.0  # for a fault of communication to be traced to a lost rank
# Of one machine: where torchrun and ranks meet, and a network that no other machine reaches. It opens no port.
LOCAL = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", "GLOO_SOCKET_IFNAME": "lo"}
RENEWAL_S = 3600  # between two signs of life that a torchrun without others writes into its file

logger = logging.getLogger(__name__)


@contextmanager
def leading(params: LearnerParams, alike: Callable[[], Mapping[str, str]], seed: int | None) -> Iterator[Ranks]:
    """The ranks that share this process's learner while the block lasts; this process alone if params ask for one.

    `alike` gives the facts that must be equal in all ranks. All get the `seed`; None tells them that there is nothing
    to do. Raises ValueError if the ranks do not fit the params, and OSError if one does not come or is lost.
    """
    place = given_place(params)
    loss = Loss()
    if place is None or params.ranks == 1:
        forget_place()
        yield ALONE
        return
    with (
        joined(place, copies=params.copies, defers=params.defer_reduction) as group,
        alive(params.silence_s, loss.notice, loss.over),
        loss.blamed(),
    ):
        forget_place()
        require_alike(group, alike())
        group.gather([seed])
        logger.info("%d ranks share the learner, on %s", group.size, group.device.type)
        yield group
        if seed is not None:
            group.dismiss()


@contextmanager
def following(params: LearnerParams, alike: Callable[[], Mapping[str, str]]) -> Iterator[tuple[Group, int | None]]:
    """The ranks behind the leader that this process follows, and the seed; arguments as in `leading`.

    A follower holds nothing to put away, so it ends at once when it is told to, or has lost another rank.
    """
    place = given_place(params)
    if place is None:
        raise ValueError("this process was given no rank to be; let torchrun start it")
    HarmlessFormatter.label = f"rank {place.rank}: "
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)
    with (
        joined(place, copies=params.copies, defers=params.defer_reduction) as group,
        alive(params.silence_s, _leave, threading.Event()),
    ):
        try:
            require_alike(group, alike())  # the leader has written the files by now
            [seed, *_] = group.gather([None])
            yield group, seed
        except RuntimeError:  # of a lost rank: torchrun, which may know which one, ends this one meanwhile
            time.sleep(2 * GRACE_S)
            raise


def start(
    stage: Callable[..., None],
    follow: Callable[[], None],
    learner: LearnerParams | None,
    command: Sequence[str],
    lock: Callable[[], AbstractContextManager[None]],
    **parameters: object,
) -> None:
    """Runs a stage with its parameters, or `follow` in a rank behind the leader; None for a stage without a learner.

    Ranks of one machine are started here, by the stage's `command`, while this process has what is `held`.
    """
    place = Place.given()
    if learner and learner.processes > 1 and learner.nodes == 1 and place is None:
        require_devices(learner)
        with lock():
            launch(learner.processes, command)
        return
    if learner:
        given_place(learner)
    if place and place.file:
        end_with_parent()
    if place and place.rank:
        follow()
    else:
        run_stage(stage, **parameters)


def launch(ranks: int, command: Sequence[str]) -> None:
    """Starts the ranks of one machine by torchrun, and waits for them.

    It and they meet in files without a name, which processes of the same user alone can open, and which end with this
    one. Raises SystemExit with the code of the rank that failed first, and ChildProcessError if a signal ended it.
    """
    if started_by_another():
        end_with_parent()
    files = {name: f"/proc/{os.getpid()}/fd/{os.memfd_create(name)}" for name in ("ranks", "torchrun")}
    os.environ.update(LOCAL | {MEETING: files["ranks"], STARTED_BY: str(os.getpid())})
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=ranks,
        run_id="ranks",
        rdzv_backend="c10d",
        rdzv_endpoint=files["torchrun"],
        rdzv_configs={"store_type": "file", "keep_alive_interval": RENEWAL_S},
        local_addr="localhost",
        max_restarts=0,
        logs_specs=DefaultLogsSpecs(log_dir=os.devnull),
        shutdown_timeout=int(2 * GRACE_S),
    )
    try:
        elastic_launch(config, sys.executable)("-m", "flows", *command)
    except SignalException as end:
        raise SystemExit(128 + end.sigval) from None
    except ChildFailedError as failed:
        rank, failure = failed.get_first_failure()
        raise fault_of(rank, failure.exitcode) from None


def facts_of(stage: str, parameters: Sequence[Section], model: str, start: Path | None = None) -> dict[str, str]:
    """The facts that all ranks of a stage must share, by name.

    `model` is the hash of the model that it starts from, and `begun` the file that tells the run the leader began.
    """
    return {
        "parameters": fingerprint(*parameters),
        "model": model,
        "folder of the run": fingerprint(start.read_text()) if start and start.exists() else "nothing",
        "code": fingerprint(code_of(stage)),
        "Python": platform.python_version(),
        **{name: version(name) for name in ("torch", "transformers", "peft")},
    }


def given_place(params: LearnerParams) -> Place | None:
    """The place that torchrun gave this process; None if the params ask for one process and there is none.

    Raises ValueError if the place does not fit the params, if they need one and there is none, and if this machine has
    fewer devices than processes.
    """
    place = Place.given()
    require_devices(params)
    if place is None and params.ranks > 1:
        raise ValueError(
            f"learner.nodes is {params.nodes}, and this process was given no rank; start it on every machine, as "
            f"`torchrun --nnodes {params.nodes} --nproc-per-node {params.processes} --rdzv-backend c10d --rdzv-id NAME "
            "--rdzv-endpoint HOST:29500 -m flows -- train ...` (or warm_start)"
        )
    if place and (place.size != params.ranks or place.local_rank >= params.processes):
        place_words = f"rank {place.rank} of {place.size}, on its machine {place.local_rank}"
        expected = f"{params.processes} processes on {params.nodes} machines"
        remedy = "correct learner.processes and learner.nodes, or unset RANK"
        raise ValueError(f"torchrun gave this process {place_words}, and learner asks for {expected}; {remedy}")
    return place


def require_devices(params: LearnerParams) -> str:
    """The devices of this machine in words. Raises ValueError if there are fewer than processes."""
    gpus = len(visible_gpus())
    count, kind = (gpus, "GPUs") if gpus else (len(os.sched_getaffinity(0)), "cores")
    if params.processes > count:
        raise ValueError(f"learner.processes is {params.processes}, and there are {count} {kind} here; lower it")
    return f"{count} {kind}"


def shortfalls(settings: Params) -> Iterator[str]:
    """The cores that a training lacks on this machine, and the GPUs that learn and do not sample, with remedies."""
    learner = settings.learner
    kind = settings.engine.kind
    vllm = settings.engine.vllm
    cores = len(os.sched_getaffinity(0))
    gpus = len(visible_gpus())
    parts = vllm.tensor_parallel_size
    engines = vllm.processes(gpus=gpus, cores=cores) * parts if kind == "vllm" else 0
    busy = max(learner.processes, 1 + engines) if gpus else learner.processes * settings.model.threads
    if busy > cores:
        allow = f"allow it more: under SLURM by `srun --cpus-per-task {busy}`, which is 1 unless asked for"
        yield f"{busy} processes or threads share the {cores} of {os.cpu_count()} cores that are allowed here; {allow}"
    if gpus and kind != "server" and learner.ranks - max(1, engines) >= parts:
        sample = f"set engine.kind: vllm and engine.vllm.replicas: {learner.processes // parts}"
        if learner.nodes > 1:  # engines of this process do not see them
            sample = "set engine.kind: server, with one on each: docs/devices.md"
        yield f"{learner.ranks} GPUs learn, and actions are sampled on {max(1, engines)} of them; {sample}"


class Loss:
    """The loss of a rank: it ends the leader as any fault does, and by force if that is stuck."""

    def __init__(self) -> None:
        self.over = threading.Event()  # set once the ranks have ended, or the leader ends
        self._noticed = threading.Event()
        self._fault: ChildProcessError | None = None
        self._ending = False

    def notice(self, fault: RuntimeError) -> None:
        """Ends the leader. Waits before, since a torchrun that knows which rank has ended does so itself."""
        self._fault = ChildProcessError(f"a rank was lost; start again, and it goes on from its checkpoint: {fault}")
        self._noticed.set()
        if self.over.wait(GRACE_S):
            return
        self._ending = True
        os.kill(os.getpid(), signal.SIGTERM)
        if not self.over.wait(GRACE_S):
            logger.error("%s (ended by force)", self._fault)
            leave_code(UNAVAILABLE)
            os._exit(UNAVAILABLE)

    @contextmanager
    def blamed(self) -> Iterator[None]:
        """Turns a fault of communication into the loss of a rank, if one was noticed.

        It may be the cause of another fault: a checkpoint takes it for one of the disk.
        """
        try:
            yield
        except (RuntimeError, OSError, SystemExit) as error:
            of_ranks = isinstance(error.__cause__ or error, RuntimeError) and self._noticed.wait(BLAME_S)
            if self._fault and (of_ranks or self._ending):
                raise self._fault from error
            raise


def fault_of(rank: int, code: int) -> BaseException:
    """The fault that ends this process after a rank ended with a code."""
    if code in (-signal.SIGINT, -signal.SIGTERM):
        return SystemExit(128 - code)
    if code < 0:
        return ChildProcessError(
            f"rank {rank} was lost, by signal {-code}; start again, and it goes on from its checkpoint"
        )
    leave_code(code)
    return SystemExit(code)


def _leave(fault: RuntimeError) -> None:
    """Ends a follower that lost another rank, unless torchrun, which may know which one, does so before."""
    time.sleep(GRACE_S)
    logger.error("a rank was lost: %s", fault)
    os._exit(UNAVAILABLE)
