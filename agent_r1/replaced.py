"""What the project replaces inside packages that others wrote: each part with its reason, for the versions it pins.

Nothing is replaced on import: whoever needs a replacement calls its function. A test holds the source of each part
against the one that its replacement was written for, and so names what an upgrade changed.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from functools import partial
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn
from urllib.parse import urlsplit

if TYPE_CHECKING:
    import torch
    from torch import Tensor

logger = logging.getLogger(__name__)


class Part(NamedTuple):
    """A part of a package, and the version for which its replacement was written."""

    package: str
    version: str
    module: str
    path: str

    def __str__(self) -> str:
        return f"{self.module}.{self.path}"


_of_dvc = partial(Part, "dvc", "3.67.1")
_of_mlflow = partial(Part, "mlflow", "3.17.2")
_of_prefect = partial(Part, "prefect", "3.7.7")

DVC_OPEN = _of_dvc("dvc.fs", "LocalFileSystem.open")
DVC_DUMP = _of_dvc("dvc.utils.serialize._common", "_dump_data")
DVC_RUN_CACHE = _of_dvc("dvc.stage.cache", "StageCache._load_cache")
MLFLOW_CHECK = _of_mlflow("mlflow.server.handlers", "_validate_artifact_uri_scheme")
MLFLOW_REPOSITORY = _of_mlflow(
    "mlflow.store.artifact.artifact_repository_registry", "_artifact_repository_registry.get_artifact_repository"
)
MLFLOW_PAGE = _of_mlflow("mlflow.server", "serve")
MLFLOW_RUN = _of_mlflow("mlflow.store.tracking.dbmodels.models", "SqlRun.to_mlflow_entity")
PREFECT_RESULTS = tuple(
    _of_prefect("prefect.results", path)
    for path in ("ResultStore._read", "ResultStore._aread", "resolve_result_storage", "aresolve_result_storage")
)
PREFECT_LIBRARY = _of_prefect("prefect._internal.schemas.validators", "from_qualified_name")
PREFECT_AUTOMATIONS = _of_prefect("prefect.server.events.models.automations", "run_coro_as_sync")
TORCH_SETS = tuple(
    Part("torch", "2.13.0", "torch.cpu", path) for path in ("_is_avx512_supported", "_is_amx_tile_supported")
)
TRANSFORMERS_READ = Part("transformers", "5.19.0", "transformers.core_model_loading", "_materialize_copy")

_warned = set[str]()  # packages
_scheduled = set[asyncio.Task[None]]()  # the event loop itself keeps no task alive


def owner_of(part: Part) -> Any:
    """The module or class that has a part. Logs a warning for a package of another version than the pinned one.

    Raises ImportError where the package has no such part.
    """
    installed = version(part.package).partition("+")[0]  # torch ends with the place that its kernels run on
    (*parents, name) = part.path.split(".")
    remedy = f"which agent_r1 replaces as {part.package} {part.version} has it; install that version, as `make` does"
    try:
        owner: Any = import_module(part.module)
        for parent in parents:
            owner = getattr(owner, parent)
        getattr(owner, name)
    except (ImportError, AttributeError):
        raise ImportError(f"{part.package} {installed} has no {part}, {remedy}") from None
    if installed != part.version and part.package not in _warned:
        logger.warning("%s %s is installed, with its own %s, %s", part.package, installed, part, remedy)
        _warned.add(part.package)
    return owner


def replace(part: Part, new: object) -> None:
    """Puts something else in the place of a part."""
    setattr(owner_of(part), part.path.rpartition(".")[2], new)


def keep_dvc_records_whole() -> None:
    """Has DVC put a new file in the place of an old one once it is on disk, and outlive a run cache without an entry.

    DVC writes dvc.lock, .dvc files and its list of running stages in place: an end or a full disk leaves them empty. A
    kill leaves a folder of the run cache without an entry.
    """
    from dvc.stage.cache import StageCache

    @contextmanager
    def replacing(path: str, mode: str, encoding: str | None) -> Iterator[Any]:
        target = Path(path).resolve()
        fresh = target.with_name(f"{target.name}.tmp")
        with fresh.open(mode, encoding=encoding) as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        fresh.replace(target)

    def open_whole(path: str, mode: str = "r", encoding: str | None = None, **_: object) -> Any:
        return replacing(path, mode, encoding) if mode in ("w", "w+") else open(path, mode, encoding=encoding)  # noqa: PTH123

    load = StageCache._load_cache
    replace(DVC_OPEN, staticmethod(open_whole))
    owner_of(DVC_DUMP).open = open_whole  # in the place of the built-in function, for this module alone
    replace(DVC_RUN_CACHE, lambda cache, key, entry: entry and load(cache, key, entry))


def keep_results_own() -> None:
    """Has Prefect refuse every result that this process has not made itself.

    A state of the server's names how a result is read: from where, by which module, and whether it is unpickled.
    """
    from prefect._internal.schemas import validators

    load_by_name: Callable[[str], Any] = validators.from_qualified_name  # type: ignore[attr-defined]

    def refuse(*_: object, **__: object) -> NoReturn:
        raise ValueError("the Prefect server names a result that this process has not made; is the server your own?")

    for part in PREFECT_RESULTS:
        replace(part, refuse)
    # Prefect looks for the library of a state as soon as it hears of it; its own states name the one that it has.
    replace(PREFECT_LIBRARY, lambda name: load_by_name(name) if name == "cloudpickle" else refuse())


def schedule_automations() -> None:
    """Has Prefect's server update automations in its own event loop.

    Prefect 3.7 stops that loop until a lock is free that the same loop may hold, and answers nobody any more: issue
    23055. 3.8.6 does not.
    """

    def schedule(update: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(update)
        _scheduled.add(task)
        task.add_done_callback(_scheduled.discard)

    replace(PREFECT_AUTOMATIONS, schedule)


def keep_artifacts_home(home: str) -> None:
    """Has MLflow refuse, with 403, to read, write or note artifacts outside of this folder, or address."""
    from mlflow.exceptions import MlflowException
    from mlflow.protos.databricks_pb2 import PERMISSION_DENIED
    from mlflow.server import handlers
    from mlflow.store.artifact.artifact_repository_registry import _artifact_repository_registry as registry
    from mlflow.utils.file_utils import local_file_uri_to_path

    checked = handlers._validate_artifact_uri_scheme
    get_repository = registry.get_artifact_repository
    path_of: Callable[[str], str] = local_file_uri_to_path
    folder = Path(path_of(home)).resolve()

    def own(uri: str) -> str:
        local = Path(path_of(uri)).resolve() if urlsplit(uri).scheme in ("", "file") else None
        if not (local.is_relative_to(folder) if local else f"{uri}/".startswith(f"{home}/")):
            raise MlflowException(f"artifacts of this server are in {home}, and {uri} is not", PERMISSION_DENIED)
        return uri

    def check(uri: str, field_name: str) -> None:
        """MLflow itself holds a source that is no address against its run or model."""
        checked(uri if field_name == "source" and "://" not in uri else own(uri), field_name)

    replace(MLFLOW_CHECK, check)
    replace(MLFLOW_REPOSITORY, lambda uri, *options: get_repository(own(uri), *options))


def hide_wide_kernels() -> None:
    """Has torch tell vLLM, which looks for nothing else, that this processor has neither AVX-512 nor AMX."""
    for part in TORCH_SETS:
        replace(part, lambda: False)


def begin_mlflows_page(with_script: str) -> None:
    """Puts a script at the head of MLflow's page."""
    from mlflow.server import app

    owner_of(MLFLOW_PAGE)
    page = Path(str(app.static_folder), "index.html").read_text()
    app.view_functions["serve"] = lambda: page.replace("<head>", f"<head>{with_script}", 1)


def begin_mlflows_metrics(with_metric: str) -> None:
    """Has MLflow's server name a metric before the others of a run. Its pages compare and show the first."""
    read = owner_of(MLFLOW_RUN).to_mlflow_entity

    def in_order(run: Any) -> Any:
        run.latest_metrics.sort(key=lambda metric: metric.key != with_metric)
        return read(run)

    replace(MLFLOW_RUN, in_order)


@contextmanager
def mapped_weights(enabled: bool) -> Iterator[dict[int, torch.dtype]]:
    """Has transformers map weights as their file has them. Gives the types that it would cast them to, by address."""
    from transformers import core_model_loading

    types = dict[int, "torch.dtype"]()
    read = core_model_loading._materialize_copy

    def leave(tensor: Any, device: Any = None, dtype: torch.dtype | None = None) -> Tensor:
        mapped: Tensor = tensor[...]
        types[mapped.data_ptr()] = dtype or mapped.dtype
        return mapped

    if enabled:
        replace(TRANSFORMERS_READ, leave)
    try:
        yield types
    finally:
        if enabled:
            replace(TRANSFORMERS_READ, read)
