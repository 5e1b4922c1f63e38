"""The ranks of a stage that learns. The leader starts the others, or a launcher has started all.

A rank that ends early ends the others, and its exit code becomes the stage's.
"""

from __future__ import annotations

import logging
import os
import platform
import secrets
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from importlib.metadata import version
from pathlib import Path

from agent_r1.devices.meeting import INTERFACE, KEY, Place, require_alike, require_interface, watched
from agent_r1.devices.sharing import ALONE, Group, Ranks
from agent_r1.files import sha256
from agent_r1.gpus import visible_gpus
from agent_r1.params import Params, fingerprint
from agent_r1.params.sections import Section
from agent_r1.params.stages import LearnerParams
from flows.made_of import CODE, code_as_begun, members, read_yaml
from flows.processes import end_with_parent
from flows.stage import INTERRUPTED, TERMINATED, UNAVAILABLE, accelerator, leave_code, run_stage
from flows.terminal import HarmlessFormatter

LEADER = "AGENT_R1_LEADER"  # the variable in which a rank finds the process that started it
LOOK_S = 0.2  # between two looks at the ranks that were started here
GRACE_S = 20.0  # for a leader that lost a rank to end like after any fault, with its engine and its tracking
BLAME_S = 5.0  # for a fault of communication to be traced to a lost rank

logger = logging.getLogger(__name__)


@contextmanager
def leading(
    params: LearnerParams, command: Sequence[str], alike: Callable[[], Mapping[str, str]], seed: int | None
) -> Iterator[Ranks]:
    """The ranks that share this process's learner while the block lasts; this process alone if params ask for one.

    `command` is the stage's with its options. `alike` gives the facts that must be equal in all ranks. All get the
    `seed`; None tells them that there is nothing to do. Raises ValueError if this machine or the launcher does not fit
    the params, and OSError if a rank is late or lost.
    """
    place = given_place(params)
    if params.ranks == 1:
        yield ALONE
        return
    with ExitStack() as ends:
        watch = ends.enter_context(Watch.set())
        place = place or ends.enter_context(_started(params.ranks, command, watch))
        own = {rank: process.pid for rank, process in enumerate(watch.processes, 1)}
        group = ends.enter_context(watched(place, own, params.silence_s, watch.lost_sight_of))
        for name in place.environment:  # the children of this process have no rank
            os.environ.pop(name, None)
        with watch.blamed():
            require_alike(group, alike())
            group.gather([seed])
            logger.info("%d ranks share the learner, on %s", group.size, group.device.type)
            yield group
            watch.over.set()  # nothing is asked of the other ranks any more
            if seed is not None:
                group.dismiss()


@contextmanager
def following(params: LearnerParams, alike: Callable[[], Mapping[str, str]]) -> Iterator[tuple[Group, int | None]]:
    """The ranks behind the leader that this process follows, and the seed; arguments as in `leading`.

    A follower holds nothing to put away, so it ends at once when it is told to, or has lost the leader.
    """
    place = given_place(params)
    if place is None:
        raise ValueError("this process was given no rank to be; set RANK, or let the leader start it")
    HarmlessFormatter.label = f"rank {place.rank}: "
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)
    leader = int(os.environ.get(LEADER, 0))
    if leader:  # it may have gone already
        end_with_parent(leader)
    with ExitStack() as ends:
        if place.local_rank == 0 and visible_gpus():  # the first one of another machine holds the GPUs there
            ends.enter_context(accelerator(1, params.processes))
        group = ends.enter_context(watched(place, {0: leader} if leader else {}, params.silence_s, _leave))
        try:
            require_alike(group, alike())  # the leader has written the files by now
            [seed, *_] = group.gather([None])
            yield group, seed
        except RuntimeError:  # if a rank was lost, the leader ends this one too, before it says anything
            threading.Event().wait(2 * BLAME_S)
            raise


def start(stage: Callable[..., None], follow: Callable[[], None], **parameters: object) -> None:
    """Runs a stage with its parameters, or `follow` if this process was given a rank behind the leader."""
    place = Place.given()
    if place and place.rank:
        follow()
    else:
        run_stage(stage, **parameters)


def facts_of(stage: str, parameters: Sequence[Section], model: str, begun: Path | None = None) -> dict[str, str]:
    """The facts that all ranks of a stage must share, by name.

    `model` is the hash of the model that it starts from, and `begun` the file that tells the run the leader began.
    """
    return {
        "parameters": fingerprint(*parameters),
        "model": model,
        "folder of the run": fingerprint(begun.read_text()) if begun and begun.exists() else "nothing",
        "code": fingerprint(code_of(stage)),
        "Python": platform.python_version(),
        **{name: version(name) for name in ("torch", "transformers", "peft")},
    }


def code_of(stage: str) -> dict[str, str]:
    """The sha256 of every code file that a stage of dvc.yaml depends on, by its path, as this process began with it.

    Raises FileNotFoundError if the code is installed without its dvc.yaml.
    """
    graph = CODE / "dvc.yaml"
    if not graph.exists():
        raise FileNotFoundError(f"{graph} does not exist; install the project from its clone with `pip install -e .`")
    defined = read_yaml(graph)["stages"][stage]
    listed = defined.get("do", defined)["deps"]
    rooms = [CODE / path for path in listed if path.startswith(("agent_r1/", "flows/"))]
    files, begun = [file for room in rooms for file in members(room)], code_as_begun()
    return {str(file.relative_to(CODE)): begun.get(file) or sha256(file) for file in files}


def given_place(params: LearnerParams) -> Place | None:
    """The place that a launcher gave this process; None if no launcher started it.

    Raises ValueError if the place does not fit the params, if they need a launcher and there is none, and if this
    machine has fewer devices than processes.
    """
    place = Place.given()
    require_devices(params, place)
    if place and (place.size != params.ranks or place.local_rank >= params.processes):
        given = f"rank {place.rank} of {place.size}, on its machine {place.local_rank}"
        asked = f"{params.processes} processes on {params.nodes} machines"
        remedy = "correct learner.processes and learner.nodes, or unset RANK"
        raise ValueError(f"a launcher gave this process {given}, and learner asks for {asked}; {remedy}")
    if place:
        place.require_key()
        if params.nodes > 1:
            require_interface(place)
    if place is None and params.nodes > 1:
        raise ValueError(
            f"learner.nodes is {params.nodes}, and this process was given no rank; start it on every machine, with the "
            f"same {KEY}, as `torchrun --nnodes {params.nodes} --nproc-per-node {params.processes} --node-rank N "
            "--master-addr HOST -m flows -- train ...` (or warm_start), or under SLURM"
        )
    return place


def require_devices(params: LearnerParams, place: Place | None = None) -> str:
    """The devices of this machine in words. Raises ValueError if there are fewer than processes.

    A launcher that gives a place may show one GPU, or some cores, to each.
    """
    gpus = len(visible_gpus())
    here, kind = (gpus, "GPUs") if gpus else (len(os.sched_getaffinity(0)), "cores")
    if params.processes > here and not (place and gpus < 2):
        raise ValueError(f"learner.processes is {params.processes}, and there are {here} {kind} here; lower it")
    return f"{here} {kind}"


def shortfalls(settings: Params) -> Iterator[str]:
    """The cores that a training lacks on this machine, and the GPUs that learn and do not sample, with remedies."""
    learner, kind, vllm = settings.learner, settings.engine.kind, settings.engine.vllm
    cores, gpus, parts = len(os.sched_getaffinity(0)), len(visible_gpus()), vllm.tensor_parallel_size
    engines = vllm.processes(gpus=gpus, cores=cores) * parts if kind == "vllm" else 0
    here = 1 if Place.given() else learner.processes
    busy = max(here, 1 + engines) if gpus else here * settings.model.threads
    if busy > cores:
        allow = f"allow it more: under SLURM by `srun --cpus-per-task {busy}`, which is 1 unless asked for"
        yield f"{busy} processes or threads share the {cores} of {os.cpu_count()} cores that are allowed here; {allow}"
    if gpus and kind != "server" and learner.ranks - max(1, engines) >= parts:
        sample = f"set engine.kind: vllm and engine.vllm.replicas: {learner.processes // parts}"
        if learner.nodes > 1 or gpus < learner.processes:  # engines of this process do not see them
            sample = "set engine.kind: server, with one on each: docs/devices.md"
        yield f"{learner.ranks} GPUs learn, and actions are sampled on {max(1, engines)} of them; {sample}"


class Watch:
    """Ends the leader when a rank is lost, as any fault does, and by force if it is stuck."""

    def __init__(self) -> None:
        self.processes: list[subprocess.Popen[bytes]] = []  # started here, rank 1 first
        self._fault: BaseException | None = None
        self._raised = False
        self.over = threading.Event()  # set once the ranks may end, or one was lost

    @classmethod
    @contextmanager
    def set(cls) -> Iterator[Watch]:
        watch = cls()
        before = signal.signal(signal.SIGUSR1, watch._raise)
        try:
            yield watch
        finally:
            watch.over.set()
            signal.signal(signal.SIGUSR1, signal.SIG_IGN if watch._fault else before)  # it may be on its way

    def look(self) -> None:
        """Watches the ranks that were started here; the body of a thread."""
        while not self.over.wait(LOOK_S):
            ended = {rank: code for rank, each in enumerate(self.processes, 1) if (code := each.poll())}
            if ended:
                first = min(ended, key=lambda rank: (ended[rank] == UNAVAILABLE, rank))
                self._lose(fault_of(first, ended[first]))

    def lost_sight_of(self, rank: int) -> None:
        """Gives up a rank that gives no sign of life, on whichever machine it is."""
        self._lose(ChildProcessError(f"rank {rank} gives no sign of life any more; look at its machine, start again"))

    @contextmanager
    def blamed(self) -> Iterator[None]:
        """Turns a fault of communication into that of the rank that was lost, if one was.

        It may be the cause of another fault: a checkpoint takes it for one of the disk.
        """
        try:
            yield
        except (RuntimeError, OSError) as error:
            if not isinstance(error, RuntimeError) and not isinstance(error.__cause__, RuntimeError):
                raise
            self.over.wait(BLAME_S)
            if self._fault:  # which `_raise` may have raised in vain, within a `suppress`
                self._raised = True
                raise self._fault from error
            raise

    def _lose(self, fault: BaseException) -> None:
        if self.over.is_set():
            return
        self._fault = fault
        self.over.set()
        forced = threading.Timer(GRACE_S, _end_by_force, [fault])
        forced.daemon = True
        forced.start()
        end(self.processes)  # a collective call that waits for them fails then
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGUSR1)

    def _raise(self, *_: object) -> None:
        if self._fault and not self._raised:
            self._raised = True
            raise self._fault


def end(processes: Sequence[subprocess.Popen[bytes]]) -> None:
    """Kills ranks that were started here; they have nothing to put away."""
    for process in processes:
        process.kill()
    for process in processes:
        process.wait()


@contextmanager
def _started(ranks: int, command: Sequence[str], watch: Watch) -> Iterator[Place]:
    """Starts all other ranks on this machine; gives this one's place.

    They meet in a file without a name, which only they, and processes of the same user, can open.
    """
    meeting = os.memfd_create("ranks")
    path, key = f"/proc/self/fd/{meeting}", secrets.token_hex()
    places = [Place(rank=rank, size=ranks, local_rank=rank, address=path, port=1, key=key) for rank in range(ranks)]
    os.environ[INTERFACE] = "lo"  # else any machine can reach their messages
    try:
        for place in places[1:]:
            environment = {**os.environ, **place.environment, LEADER: str(os.getpid())}
            start, nothing = [sys.executable, "-m", "flows", *command], subprocess.DEVNULL
            watch.processes.append(subprocess.Popen(start, env=environment, stdin=nothing, pass_fds=[meeting]))
        threading.Thread(target=watch.look, name="ranks", daemon=True).start()
        yield places[0]
        with suppress(subprocess.TimeoutExpired):
            for process in watch.processes:
                process.wait(GRACE_S)
    finally:
        end(watch.processes)
        os.close(meeting)
        os.environ.pop(INTERFACE, None)


def fault_of(rank: int, code: int) -> BaseException:
    """The fault that ends this process after a rank ended with a code."""
    if code in (INTERRUPTED, -signal.SIGINT):
        return SystemExit(INTERRUPTED)
    if code in (TERMINATED, -signal.SIGTERM):
        return SystemExit(TERMINATED)
    if code < 0 or code == UNAVAILABLE:
        how = f"signal {-code}" if code < 0 else f"exit code {code}"
        return ChildProcessError(f"rank {rank} was lost, by {how}; start again, and it goes on from its checkpoint")
    return ValueError(f"rank {rank} failed with exit code {code}; its own lines above say why")


def _end_by_force(fault: BaseException) -> None:
    """Ends a leader that is stuck where the fault cannot reach it."""
    code = fault.code if isinstance(fault, SystemExit) else UNAVAILABLE if isinstance(fault, OSError) else 1
    logger.error("%s (ended by force)", fault)
    leave_code(int(code or 0))
    os._exit(int(code or 0))


def _leave(_: int) -> None:
    """Ends a follower that lost its leader. Kills the leader if it is the parent: a stopped one would never exit."""
    logger.error("the leader gives no sign of life any more")
    if os.environ.get(LEADER) == str(os.getppid()):
        leave_code(UNAVAILABLE)
        with suppress(ProcessLookupError):
            os.kill(os.getppid(), signal.SIGKILL)
    os._exit(UNAVAILABLE)
