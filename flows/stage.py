"""The rim of every command: logging, faults, signals, threads, tracking, and the lock of the accelerator."""

from __future__ import annotations

import ctypes
import functools
import gc
import logging
import os
import platform
import signal
import stat
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any, ParamSpec, TypeVar
from uuid import UUID

import psutil

from agent_r1 import params
from agent_r1.files import closed_folder, is_own, locked_some
from agent_r1.params.places import NAMED_BY_DVC, RunId, project_root, tracking_folder
from agent_r1.replaced import keep_results_own
from agent_r1.surroundings import keep_inside, pin_kernels
from flows import processes
from flows.dvc_files import keep_records
from flows.made_of import OF_STAGE, Edited, require_unedited, stage_of
from flows.package import finish_update, require_current
from flows.terminal import HarmlessFormatter, configure_logging, show_traceback

P = ParamSpec("P")
R = TypeVar("R")

EXIT_CODE_FILE = "AGENT_R1_EXIT_CODE_FILE"  # set by a flow: where a stage that fails leaves its code, DVC hides it
PARENT_TASK_RUN = "AGENT_R1_PARENT_TASK_RUN"  # set by the pipeline: the task run that shows the stage as its subflow
UNSAID = ("into", "out", "trajectories", "traces")  # parameters that say where and how much, left out of the name
OF_DVC = "DVC_ROOT"  # set by DVC for its stages
SHOW_TRACEBACK = "AGENT_R1_TRACEBACK"
INTERRUPTED = 128 + signal.SIGINT
TERMINATED = 128 + signal.SIGTERM
UNAVAILABLE = os.EX_TEMPFAIL  # 75
EDITED = os.EX_DATAERR  # 65
# A file that is not there, or in the way, stays so however often it is asked for.
LASTING = (FileNotFoundError, FileExistsError, NotADirectoryError, IsADirectoryError, PermissionError)
ENVIRONMENT = {
    "DO_NOT_TRACK": "1",  # vLLM, Prefect and Hugging Face
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "DVC_NO_ANALYTICS": "1",
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",  # transformers draws one for every checkpoint it reads or writes
    "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
    # torch lays tensors from 2 MiB on at the borders of pages, in huge pages where the kernel lends them. Else glibc
    # seldom finds the place of one fit for the next, and with large vocabularies the heap doubles.
    "THP_MEM_ALLOC_ENABLE": "1",
    "PYTORCH_ALLOC_CONF": "expandable_segments:True",  # of a GPU's memory; vLLM's processes go without it
    # A thread that waits for others of its process at a barrier gives its core to other stages, and does not spin.
    "OMP_WAIT_POLICY": "passive",
    "KMP_BLOCKTIME": "0",
}
# The drivers of GPUs. Where there is one, the memory that loading and checkpoints free is given back.
DRIVERS = ("/dev/nvidiactl", "/dev/kfd")
# For child processes where there is none; this one calls `keep_freed_memory`.
KEEPING = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": str(16 * 2**30)}
# Where nothing runs beside the stage, it first looks this often whether the others are there: most come sooner than one
# that sleeps is woken. Beside other stages that would cost more than it saves.
ALONE = {"GOMP_SPINCOUNT": "3000"}

M_TRIM_THRESHOLD = -1  # of malloc.h
M_MMAP_MAX = -4
COLLECTING = gc.get_threshold()  # new objects before Python looks for garbage, once all is imported

logger = logging.getLogger(__name__)


def run_stage(stage: Callable[..., None], **parameters: object) -> None:
    """Runs a stage as the whole of its command. Raises Edited at its end if DVC would record other parts of it.

    The stage is a tracked Prefect flow if `PREFECT_API_URL` is set and answers. Otherwise it is the plain function, and
    Prefect is not imported. Its name and parameters are the flow's, and begin every line that it logs.
    """

    @functools.wraps(stage)
    def recorded(**arguments: object) -> None:
        if address := os.environ.get(OF_STAGE):
            require_current(stage_of(address).removesuffix("_closer"))
        stage(**arguments)
        require_unedited()

    gc.set_threshold(*COLLECTING)
    if started_by_another():
        processes.end_with_parent()
    if OF_DVC in os.environ:
        keep_records()
    HarmlessFormatter.label = f"{shown_name(stage, parameters)}: "
    if processes.server_answers():
        _run_tracked(recorded, parameters)
    else:
        recorded(**parameters)


def shown_name(stage: Callable[..., None], parameters: Mapping[str, object]) -> str:
    """The name of a stage in logs and in Prefect, such as `train ppo 3`.

    Inside a DVC experiment it ends with the experiment's name, `train ppo (slow)`, as the run in MLflow does.
    """
    options = {name: value for name, value in typed(parameters).items() if value is not None and value is not False}
    words = {name: name if value is True else str(value) for name, value in options.items()}
    experiment = os.environ.get(NAMED_BY_DVC)
    suffix = [f"({experiment})"] if experiment else []
    return " ".join([stage.__name__, *(word for name, word in words.items() if word and name not in UNSAID), *suffix])


def typed(parameters: Mapping[str, object]) -> dict[str, object]:
    """Parameters as options of the command line: a record is replaced by its fields, a `RunId` by its options."""
    options: dict[str, object] = {}
    for name, value in parameters.items():
        if isinstance(value, RunId):
            options |= {"run": value.name, "seed": value.seed, "sweep": value.sweep}
        elif is_dataclass(value):
            options |= typed({field.name: getattr(value, field.name) for field in fields(value)})
        else:
            options[name] = value
    return options


def report_to_own_server() -> None:
    """Reports this process and its children to the server of `agent-r1 serving`, if it serves this project.

    Must be called before Prefect is imported. A `PREFECT_API_URL` that is set stays.
    """
    if "PREFECT_API_URL" in os.environ:
        return
    api_url = processes.own_server()
    if not api_url:
        return
    os.environ["PREFECT_API_URL"] = api_url
    if processes.OF_CLIENTS not in os.environ and (password := kept_password()):
        keep_inside({processes.OF_CLIENTS: password})


def kept_password() -> str:
    """The password of this clone's Prefect server; "" if there is none, or others may know or have written it."""
    is_safe = processes.PASSWORD.exists() and is_own(processes.PASSWORD, stat.S_IFREG, closed=0o077)
    return processes.PASSWORD.read_text().strip() if is_safe else ""


def started_by_another() -> bool:
    """Whether DVC or a flow started this process, so that there is no user to ask."""
    return OF_DVC in os.environ or PARENT_TASK_RUN in os.environ


@contextmanager
def clean_end() -> Iterator[None]:
    """Sets up logging, and turns faults and signals into exit codes.

    A fault that a user can mend (ValueError, OSError, EngineError) ends as one line and exit code 1. The code is 75 if
    the same may work later: a server that does not answer, MLflow's included, or a disk or GPU that fails. It is 65 if
    parameters, code or data of a stage were edited while it ran. An interrupt ends as 130, a termination as 143. Any
    other fault keeps its traceback.
    """
    configure_logging()
    sys.excepthook = show_traceback
    # Neither raises a KeyboardInterrupt, which would end an interpreter that meets it late by the signal itself.
    signal.signal(signal.SIGINT, lambda *_: sys.exit(INTERRUPTED))
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(TERMINATED))
    try:
        yield
    except SystemExit as end:
        if end.code == INTERRUPTED:
            logger.warning("interrupted")
        raise
    except Exception as fault:
        mendable = fault if isinstance(fault, (ValueError, OSError)) else _mendable(fault)
        if mendable is None or os.environ.get(SHOW_TRACEBACK):
            raise
        origin = traceback.extract_tb(fault.__traceback__)[-1]
        where = f"{os.path.relpath(origin.filename)}:{origin.lineno}"
        logger.error("%s (raised at %s; %s=1 shows the whole traceback)", mendable, where, SHOW_TRACEBACK)
        passing = isinstance(mendable, OSError) and not isinstance(mendable, LASTING)
        code = EDITED if isinstance(mendable, Edited) else UNAVAILABLE if passing else 1
        leave_code(code)
        sys.exit(code)


def leave_code(code: int) -> None:
    """Writes a stage's exit code to the file that the flow that started it reads."""
    if EXIT_CODE_FILE in os.environ:
        Path(os.environ[EXIT_CODE_FILE]).write_text(str(code))


def prepare_process() -> params.Params | None:
    """Makes a command the same process wherever it is started: in the project's root, with `model.threads` threads.

    Returns the parameters, or None where they cannot be read.

    Imports look in the root first, for the project's own tools, rewards and worlds; Python itself would look in the
    current folder for `python -m flows`, and in the script's folder for `agent-r1`. Must be called before torch is
    imported. If params.yaml cannot be read, the command itself says so. Other users may not enter the folders of locks.
    Raises ValueError where `model.portable` asks for what the processor lacks.
    """
    on_cores = not any(map(os.path.exists, DRIVERS))
    for name, value in (ENVIRONMENT | KEEPING if on_cores else ENVIRONMENT).items():
        os.environ.setdefault(name, value)
    if on_cores:
        keep_freed_memory()
    gc.set_threshold(*processes.IMPORTING)
    try:
        root = project_root()
        os.chdir(root)
        finish_update()
    except (ValueError, OSError):
        return None
    sys.path.insert(0, str(root))
    for folder in (tracking_folder(), Path(".dvc/tmp").resolve()):  # the locks of the clone, and DVC's
        if folder.parent.exists() and is_own(folder.parent, stat.S_IFDIR, closed=0):
            with suppress(OSError):  # of a disk that can only be read
                closed_folder(folder)
    try:
        settings = params.load()
    except (ValueError, OSError):
        return None
    for library in ("MKL", "OPENBLAS"):  # which these two would follow before it
        os.environ.pop(f"{library}_NUM_THREADS", None)
    # Without it a vLLM engine cuts torch to one thread in this process.
    os.environ["OMP_NUM_THREADS"] = str(settings.model.threads)
    if settings.model.portable:
        pin_kernels()
    return settings


@contextmanager
def accelerator(side_by_side: int, gpus: int = 1) -> Iterator[None]:
    """Holds `gpus` GPUs, or all if that is 0 or more than there are; this process and its engine see no others.

    On a machine without a GPU it holds one of `side_by_side` places on the CPU. Waits while other stages hold them. The
    kernel frees the locks when the process ends, however it ends. A rank has what the process that started it holds.
    """
    if "RANK" in os.environ:
        yield
        return
    from agent_r1.gpus import visible_gpus  # imports torch, which reads the number of threads

    devices = visible_gpus()
    # One per machine and user, so that two clones of the project queue up as well.
    locks = processes.own_folder() / f"accelerator-{platform.node()}"
    # Optimizers make torch's folder of compiled code: not in the temporary folder, where others could have made it.
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(locks.with_name("torchinductor")))
    paths = [locks.with_name(f"{locks.name}-{place}.lock") for place in devices or range(side_by_side)]
    count = min(gpus or len(devices), len(devices)) if devices else 1

    def tell() -> None:
        owners = [path.read_text() for path in paths if path.exists()]
        holders = [pid for pid in dict.fromkeys(owners) if pid.isdigit() and psutil.pid_exists(int(pid))]
        logger.info("waiting for the accelerator, held by process %s", ", ".join(holders))

    with locked_some(paths, count, locks.with_name(f"{locks.name}.lock"), tell) as holders:
        for path in holders:
            path.write_text(str(os.getpid()))
        if devices:
            os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(devices[paths.index(path)] for path in holders)
        yield


def task(function: Callable[P, R]) -> Callable[P, R]:
    """Makes each call of a function a Prefect task while a tracked flow runs; otherwise a plain call.

    Prefect sees neither arguments nor results: it would look into each argument, and keep each result until the end.
    """

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        if "prefect" not in sys.modules:
            return function(*args, **kwargs)
        from prefect import task as prefect_task
        from prefect.cache_policies import NO_CACHE
        from prefect.context import FlowRunContext

        if FlowRunContext.get() is None:
            return function(*args, **kwargs)

        results: list[R] = []
        numbers = [str(argument) for argument in args if isinstance(argument, int)]
        title = " ".join([function.__name__, *numbers])  # rollout 7

        @prefect_task(name=function.__name__, task_run_name=title, cache_policy=NO_CACHE, retries=0)
        def body() -> None:
            results.append(function(*args, **kwargs))

        body()
        return results[0]

    return call


def _mendable(fault: Exception) -> Exception | None:
    """The fault as a message, if the engine or a GPU raised it, or it is one of MLflow's store that a user can mend."""
    from agent_r1.rollout.sampling import EngineError  # all bring numpy, which is to find the number of threads set
    from agent_r1.tracking.store import mendable_fault

    if "torch" in sys.modules:
        from agent_r1.learn.memory import DEVICE_FAULTS, REMEDIES

        if isinstance(fault, DEVICE_FAULTS):
            return OSError(f"{fault}; {REMEDIES}")
    return fault if isinstance(fault, EngineError) else mendable_fault(fault)


def keep_freed_memory() -> None:
    """Lets glibc keep freed memory, which every training step on cores would fault in again.

    Works like MALLOC_MMAP_MAX_=0 and no trimming, on a running process; see mallopt(3).
    """
    if platform.libc_ver()[0] == "glibc":
        libc = ctypes.CDLL(None)
        libc.mallopt(M_MMAP_MAX, 0)
        libc.mallopt(M_TRIM_THRESHOLD, -1)


def _run_tracked(stage: Callable[..., None], parameters: dict[str, Any]) -> None:
    """Runs a stage as a flow whose page shows its parameters as the command line has them."""
    from prefect import flow
    from prefect.client.orchestration import get_client
    from prefect.exceptions import TerminationSignal
    from prefect.flow_engine import run_flow

    keep_results_own()
    tracked = flow(name=stage.__name__, validate_parameters=False)(stage)
    parent = UUID(os.environ[PARENT_TASK_RUN]) if os.environ.get(PARENT_TASK_RUN) else None
    name = shown_name(stage, parameters)
    options = typed(parameters)
    with get_client(sync_client=True) as client:
        run = client.create_flow_run(tracked, name=name, parameters=options, parent_task_run_id=parent)
    try:
        run_flow(tracked, flow_run=run, parameters=parameters)
    except (TerminationSignal, SystemExit) as end:  # Prefect takes SIGTERM over, calls it a crash, and passes it on
        if isinstance(end, SystemExit) and end.code != TERMINATED:
            raise
        if parent:
            _end_as_the_parent(run.id, parent)
        sys.exit(TERMINATED)


def _end_as_the_parent(run: UUID, parent: UUID) -> None:
    """Shows a flow run as cancelled if it was ended because the flow run above it is cancelled."""
    from httpx import HTTPError
    from prefect.client.orchestration import get_client
    from prefect.client.schemas.objects import State, StateType
    from prefect.exceptions import PrefectException
    from prefect.states import Cancelled

    cancelled: State[None] = Cancelled(message="the run that it is a part of was cancelled")
    with suppress(HTTPError, PrefectException), get_client(sync_client=True) as client:  # else it stays as it is
        flow_run_id = client.read_task_run(parent).flow_run_id
        state = client.read_flow_run(flow_run_id).state if flow_run_id else None
        if state and state.type in (StateType.CANCELLING, StateType.CANCELLED):
            client.set_flow_run_state(run, cancelled, force=True)
