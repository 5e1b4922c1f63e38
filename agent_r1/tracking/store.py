"""MLflow's store, a file of the project or a tracking server, with the experiment and its saved view of the runs.

MLflow's own button *Share* saves a view in the same way: as a tag of the experiment, which the page's address names.
"""

from __future__ import annotations

import functools
import json
import logging
import os
import sqlite3
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, closing, contextmanager
from importlib.metadata import version
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote, urlsplit

from agent_r1 import files
from agent_r1.harmless import without_password
from agent_r1.params import fingerprint
from agent_r1.params.places import tracking_folder

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities import Experiment, Run

EXPERIMENT = "agent_r1"
SERVER = "MLFLOW_TRACKING_URI"
ARTIFACTS = "artifacts"  # the folder beside the store
LOCATED = (  # columns of MLflow's tables that name files
    ("experiments", "artifact_location"),
    ("runs", "artifact_uri"),
    ("logged_models", "artifact_location"),
    ("model_versions", "source"),
    ("model_versions", "storage_location"),
    ("trace_tags", "value"),
)
BUSY_S = 20.0  # to wait for another process that writes, as MLflow does
PASSING = {"TEMPORARILY_UNAVAILABLE", "REQUEST_LIMIT_EXCEEDED", "RESOURCE_EXHAUSTED"}  # MLflow's error codes
FORBIDDEN = {  # MLflow's error codes of a server that refuses who asks, or what is asked, with their remedies
    "UNAUTHENTICATED": "set MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD to those of an account there",
    "PERMISSION_DENIED": "ask who runs it for EDIT on this experiment and on the models and prompts agent_r1",
    "ENDPOINT_NOT_FOUND": f"run MLflow {version('mlflow')} there, or one that offers it",
}
READONLY = "attempt to write a readonly database"  # SQLite's words
PASSING_IN_SQLITE = {sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED, sqlite3.SQLITE_IOERR, sqlite3.SQLITE_FULL}
QUIET = {
    "DO_NOT_TRACK": "true",
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "MLFLOW_LOGGING_LEVEL": "WARNING",
    "MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR": "false",
    "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",  # which a server's runs print at their ends
    "MLFLOW_ENABLE_ASYNC_TRACE_LOGGING": "false",  # its threads write spans over the question that the list shows
    "GIT_PYTHON_REFRESH": "quiet",
}
IMPATIENT = {"MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1", "MLFLOW_HTTP_REQUEST_TIMEOUT": "10"}  # seconds
PORT = 5000  # of MLflow's UI, as `agent-r1 serving` starts it
MLFLOW_UI = "AGENT_R1_MLFLOW_UI"  # set by `agent-r1 serving` for its worker: where a browser finds MLflow
NOTE = "mlflow.note.content"  # MLflow's own tag
KIND = "mlflow.experimentKind"  # so is this
VIEW = "comparison"
SHARED = "mlflow.sharedViewState."  # begins tags of views
SHARED_VIEW = f"{SHARED}{VIEW}"
TESTED = " test questions "  # in a data set's name
MOST_TESTED = 4  # such sets that the description leads to
FINAL = "final/success"
SCORE = "score"  # a tag: the final success as text
INTERVAL = "interval"  # a tag: its bounds
CHARTS = ("rollout/success", "reward/total", "validation/success", "value/explained_return")
GRID = {"columns": 2, "cardHeight": 300}  # of the charts, beside the list of runs in a window of 1,280 by 800
LATEST = 200  # runs that decide how the table is grouped
MOST = 100  # rows of several runs that are closed
CREATED = "runDateAndNestInfo"  # MLflow's column, which it always shows
DURATION = "duration"  # so is this
COLUMNS = {  # in their order, with the pixels that they take: all but the last fit a window of 1,280
    "attributes.`Run Name`": 220,
    CREATED: 48,  # how the run ended; when it began is told by pointing there
    f"metrics.`{FINAL}`": 104,
    f"tags.`{INTERVAL}`": 98,
    "metrics.`final/greedily`": 104,
    "metrics.`rollout/success`": 122,
    "params.`seed`": 52,
    "attributes.`Dataset`": 126,
    DURATION: 76,
    "params.`variant`": 150,
}
ABOUT = """One row is one training, or one evaluation of an agent that was not trained here. `final/success`: the share
of the test questions that it answers right, or of worlds in which it reaches the goal, with its 95 % `interval`. Where
it is a mean of samples, `final/greedily` is the same of its likeliest answers.
`rollout/success`: the same of the episodes that were sampled in training, iteration by iteration.

Group by `variant` to compare trainings over their seeds. Baselines alone: `tags.kind = 'baseline'`; a sweep:
`tags.sweep = 'ablations'`."""

logger = logging.getLogger(__name__)


def open_store() -> tuple[MlflowClient, str]:
    """A client and the experiment's id; both are created under a file lock, which parallel stages wait for.

    A project that was moved or copied keeps its files with itself from then on, those of earlier runs too. A store that
    cannot be used raises faults that `mendable_fault` knows, here and at every call of the client.
    """
    for name, value in QUIET.items():
        os.environ.setdefault(name, value)  # mlflow reads them when it is imported
    from mlflow import MlflowClient

    logging.getLogger("alembic").setLevel(logging.WARNING)
    logging.getLogger("mlflow.store.db.utils").setLevel(logging.CRITICAL)  # tells each fault, which it also raises
    with locked("lock"):
        if not _server() and not store_file().exists():
            _make_store(store_file())
        client = MlflowClient(store_uri())
        experiment = _experiment(client)
        if experiment is None:
            return client, client.create_experiment(EXPERIMENT, None if _server() else _artifacts().as_uri())
        old_home = None if _server() else _old_home(experiment.artifact_location)
        if old_home:
            _bring_home(old_home)
        return client, experiment.experiment_id


def _make_store(file: Path) -> None:
    """Makes the store under another name, and renames it when it is whole.

    MLflow takes an empty file through all its schemas, for seconds and without a transaction: killed meanwhile, it
    would leave a store that it never opens again.
    """
    from mlflow.store.tracking.sqlalchemy_store import SqlAlchemyStore

    for unfinished in file.parent.glob(f".{file.name}.*"):
        unfinished.unlink()  # of a process that was killed in here, since the lock is held
    journal = file.with_name(f"{file.name}-journal")
    if journal.exists():
        files.move_aside(journal, file.parent)  # of a store that was moved away: SQLite would put it into this one
    with files.replacing(file) as new:
        new.touch(0o600)
        store = SqlAlchemyStore(f"sqlite:///{new}", _artifacts().as_uri())  # type: ignore[no-untyped-call]
        store.engine.dispose()


def _experiment(client: MlflowClient) -> Experiment | None:
    """The project's experiment; one that was renamed is known by the view that is saved in it, and goes on."""
    from mlflow.entities import ViewType

    experiment = client.get_experiment_by_name(EXPERIMENT)
    for renamed in () if experiment else client.search_experiments(ViewType.ALL, 1, f"tags.`{SHARED_VIEW}` LIKE '%'"):
        experiment = renamed
    if experiment is None:
        return None
    shell = f"`{'' if _server() else f'{SERVER}={quote(store_uri())} '}mlflow experiments"
    if experiment.lifecycle_stage != "active":
        remedy = f"{shell} restore --experiment-id {experiment.experiment_id}` brings it back with its runs"
        raise ValueError(f"MLflow's experiment {experiment.name} is in the trash; {remedy}")
    if experiment.name != EXPERIMENT:
        remedy = f"{shell} rename --experiment-id {experiment.experiment_id} --new-name {EXPERIMENT}` names it back"
        warn_once(f"MLflow's experiment {EXPERIMENT} is called {experiment.name} now, and runs go there; {remedy}")
    return experiment


@functools.cache
def warn_once(message: str) -> None:
    """Warns once in a process, however often the store is read."""
    logger.warning("%s", message)


@contextmanager
def allowed(what: str, client: MlflowClient) -> Iterator[None]:
    """Goes on without what a server forbids or does not have, and says so once.

    The client's store is MLflow's default meanwhile, the only one that traces and evaluation data sets know.
    """
    import mlflow

    variables = {SERVER: os.environ[SERVER]} if SERVER in os.environ else {}
    mlflow.set_tracking_uri(client.tracking_uri)  # sets the variable, too
    try:
        yield
    except mlflow.MlflowException as refusal:
        if refusal.error_code not in FORBIDDEN:
            raise
        warn_once(f"{what} cannot be kept: {mendable_fault(refusal)}")
    finally:
        os.environ.pop(SERVER, None)
        os.environ.update(variables)


def mendable_fault(fault: BaseException) -> OSError | ValueError | None:
    """One message for MLflow's faults that a user can mend; None for any other fault.

    A ConnectionError is for a store that cannot be used for now: a server that does not answer or is overloaded, a
    database that is locked, a full disk. A ValueError is for one that is gone or damaged, and for a run in the trash.
    MLflow has one class of exceptions for them and for wrong requests.
    """
    if "mlflow" not in sys.modules:
        return None
    from mlflow.exceptions import MlflowException
    from sqlalchemy.exc import DBAPIError, OperationalError

    origin = fault.__cause__ if isinstance(fault, MlflowException) else fault
    cause = origin.orig if isinstance(origin, DBAPIError) else origin
    reason = _first_line(cause or fault)
    of_sqlite = type(cause) in (sqlite3.OperationalError, sqlite3.DatabaseError)  # other classes are of wrong requests
    if of_sqlite and vars(cause).get("sqlite_errorcode", 0) & 0xFF not in PASSING_IN_SQLITE:
        return ValueError(_explained(_server(), store_file(), reason))
    if "must be in the 'active' state" in str(fault):
        return ValueError(f"{reason} Restore it in MLflow, or start again, which makes a new run")
    code = fault.error_code if isinstance(fault, MlflowException) else ""
    if code in FORBIDDEN:
        return ValueError(f"MLflow at {without_password(store_uri())} refuses this ({reason}); {FORBIDDEN[code]}")
    # MLflow gives a request that ended without an answer no code of its own.
    unanswered = code == "INTERNAL_ERROR" and isinstance(fault.__context__, OSError)
    if not (unanswered or code in PASSING or of_sqlite or isinstance(fault, OperationalError)):
        return None
    remedy = "see that it is up, that nothing locks it, and that its disk has room"
    return ConnectionError(
        f"MLflow's store {without_password(store_uri())} cannot be used for now ({reason}); {remedy}"
    )


def store_file() -> Path:
    """The store of a project without a tracking server."""
    return tracking_folder() / "mlflow.db"


def store_uri() -> str:
    """The store of this process."""
    return _server() or f"sqlite:///{store_file()}"


def locked(name: str) -> AbstractContextManager[None]:
    """Holds a lock of this project's clone on this machine; the kernel frees it when the process ends."""
    # Others may still have files without the dot open, from before they were kept out, and could hold them.
    return files.locked(files.closed_folder(tracking_folder()) / f".{name}")


def _artifacts() -> Path:
    return tracking_folder() / ARTIFACTS


def _old_home(location: str) -> Path | None:
    """The folder of artifacts of the project that a store came from; None for this project.

    A location of another kind is none: it was chosen when the experiment was made.
    """
    folder = Path(unquote(urlsplit(location).path))
    of_a_project = location.startswith("file:") and folder.parts[-2:] == (tracking_folder().name, ARTIFACTS)
    return folder if of_a_project and folder.resolve() != _artifacts().resolve() else None


def _named_by(file: Path) -> Path | None:
    """The folder of `_old_home`, before a store is opened; None if the file is no store."""
    try:
        with closing(sqlite3.connect(file, timeout=BUSY_S)) as store:
            row = store.execute("SELECT artifact_location FROM experiments WHERE name = ?", (EXPERIMENT,)).fetchone()
    except sqlite3.Error:
        return None
    return _old_home(row[0]) if row else None


def _bring_home(old_home: Path) -> None:
    """Replaces the project that the store came from by this one in all locations, in one transaction."""
    old_uri = old_home.as_uri()
    new_uri = _artifacts().as_uri()
    with closing(sqlite3.connect(store_file(), timeout=BUSY_S)) as store, store:
        for table, column in LOCATED:
            store.execute(
                f"UPDATE {table} SET {column} = ?1 || substr({column}, length(?2) + 1)"
                f" WHERE {column} = ?2 OR substr({column}, 1, length(?2) + 1) = ?2 || '/'",
                (new_uri, old_uri),
            )
    logger.info("MLflow's store came here from %s, and keeps what is logged here from now on", old_home.parents[1])


def require_store() -> str:
    """Opens the store that stages write to, and names it; does not make a missing one.

    A tracking server gets ten seconds in place of MLflow's minutes, in this process from now on. Raises ValueError,
    whose remedy follows the first semicolon, if the store cannot be opened: another schema, no file of SQLite's, a
    server that does not answer.
    """
    server = _server()
    file = store_file()
    if not server and not file.exists():
        return f"{file} is not there yet, the first training makes it"
    os.environ.update(IMPATIENT)
    old_home = None if server else _named_by(file)
    try:
        open_store()
    except ValueError:
        raise  # one of this project's, with its remedy
    except Exception as fault:  # of MLflow, SQLAlchemy, Alembic or SQLite
        mendable = mendable_fault(fault)
        if mendable and (isinstance(mendable, ValueError) or not server):
            raise mendable from fault
        raise ValueError(_explained(server, file, _first_line(fault))) from fault
    moved = f", which came from {old_home.parents[1]} and keeps here what is logged from now on" if old_home else ""
    return without_password(server) or f"{file}{moved}"


def _server() -> str:
    return os.environ.get(SERVER, "")


def _first_line(fault: BaseException) -> str:
    return without_password(str(fault).strip().partition("\n")[0])


def _explained(server: str, file: Path, reason: str) -> str:
    if server:
        setting = f"MLFLOW_TRACKING_URI {without_password(server)}"
        return f"{setting} cannot be used ({reason}); start the server there, or unset the variable"
    if "schema" in reason or "revision" in reason:
        other = f"{file} was written by another version of MLflow ({reason.partition(' Take a backup')[0]})"
        remedy = f"copy it, then `mlflow db upgrade sqlite:///{file}`, or install the MLflow that wrote it"
        return f"{other}; {remedy}, if that is newer"
    if reason == READONLY:
        remedy = f"`chmod u+w {file}` if it is there, and start again, which makes a missing one"
        return f"{file} was removed while it was in use, or is read-only; {remedy}"
    name = quote(str(file))
    damaged = quote(f"{file.parent}/damaged")
    remedy = f"move it away (`mkdir {damaged} && mv {name}* {damaged}`), and the next start makes a new one"
    return f"{file} cannot be used ({reason}), perhaps because a start was killed while it made it; {remedy}"


def comparison(port: int = PORT) -> str:
    """The address of the page that compares the runs of the experiment, grouped by variant."""
    client, experiment = open_store()
    lay_view(client, experiment)
    return f"{address(port)}/#/experiments/{experiment}/runs?viewStateShareKey={VIEW}"


def address(port: int = PORT) -> str:
    """A browser's way to MLflow: the one that `agent-r1 serving` says, a server, or this port of this machine."""
    server = without_password(os.environ.get(SERVER, ""))
    return os.environ.get(MLFLOW_UI) or (server if server.startswith("http") else f"http://127.0.0.1:{port}")


def lay_view(client: MlflowClient, experiment: str) -> None:
    """Gives the experiment the saved views, and if it has none a description and the kind of its pages.

    One view is of all runs, and one of those that were measured on a data set, to which the description leads.
    """
    stored = client.get_experiment(experiment).tags
    latest = client.search_runs([experiment], max_results=LATEST)
    view = _view([run.data.params.get("variant", "") for run in latest])
    tags = {SHARED_VIEW: json.dumps(view)}
    if KIND not in stored:
        tags[KIND] = "custom_model_development"  # which opens on trainings, not on chats
    links = list[str]()
    for name in [*dict.fromkeys(name for run in latest for name, _ in tested(run))][:MOST_TESTED]:
        key = f"{VIEW}-{fingerprint(name)}"
        tags[f"{SHARED}{key}"] = json.dumps(view | {"searchFilter": f"dataset.name = '{name}'"})
        links.append(f"[{name}](#/experiments/{experiment}/runs?viewStateShareKey={key})")
    if stored.get(NOTE, ABOUT).endswith(ABOUT):
        tags[NOTE] = "\n\n".join([f"Measured on {', '.join(links)}."] * bool(links) + [ABOUT])
    with allowed("the view that compares runs", client):
        for name, value in tags.items():
            if stored.get(name) != value:
                client.set_experiment_tag(experiment, name, value)


def tested(run: Run) -> list[tuple[str, str]]:
    """Name and digest of the test questions that a run was measured on."""
    datasets = [entry.dataset for entry in run.inputs.dataset_inputs] if run.inputs else []
    return [(dataset.name, dataset.digest) for dataset in datasets if TESTED in dataset.name]


def _view(variants: list[str]) -> dict[str, Any]:
    """The state of MLflow's page of runs: which columns, how grouped, and which charts come first.

    Runs of one variant, its seeds, are a row that opens. If no variant has several, every run is a row of its own.
    """
    by_variant = {"aggregateFunction": "average", "groupByKeys": [{"mode": "param", "groupByData": "variant"}]}
    section = "agent_r1"
    bar: dict[str, Any] = {"type": "BAR", "uuid": FINAL, "metricKey": FINAL}
    lines: list[dict[str, Any]] = [
        {"type": "LINE", "uuid": metric, "metricKey": metric, "selectedMetricKeys": [metric], "xAxisKey": "step"}
        for metric in CHARTS
    ]
    shared = {"metricSectionId": section, "isGenerated": False, "deleted": False, "runsCountToCompare": 20}
    return {
        "orderByKey": f"metrics.`{FINAL}`",
        "orderByAsc": False,
        "selectedColumns": [name for name in COLUMNS if name not in (CREATED, DURATION)],
        "columnOrder": list(COLUMNS),
        "columnWidths": COLUMNS,
        "groupBy": by_variant if len(variants) > len(set(variants)) else None,
        "groupsExpanded": dict.fromkeys((f"param.variant.{name}" for name in sorted(set(variants))[:MOST]), False),
        "isAccordionReordered": True,  # else sections stand in the order of their names
        "compareRunSections": [
            {"uuid": section, "name": "Comparison", "display": True, "isReordered": True, "deleted": False, **GRID}
        ],
        "compareRunCharts": [chart | shared for chart in (lines[0], bar, *lines[1:])],
    }
