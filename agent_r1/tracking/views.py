"""A saved view of the runs, grouped by variant, and MLflow's pages for trainings.

MLflow's own button *Share* saves a view in the same way: as a tag of the experiment, which the page's address names.
"""

from __future__ import annotations

import json
import os
from typing import TYPE_CHECKING, Any

from agent_r1.harmless import without_password
from agent_r1.tracking.store import SERVER, open_store

if TYPE_CHECKING:
    from mlflow import MlflowClient

PORT = 5000  # of MLflow's UI, as `make ui` starts it
MLFLOW_UI = "AGENT_R1_MLFLOW_UI"  # set by `make serve` for its worker: where a browser finds MLflow
NOTE, KIND = "mlflow.note.content", "mlflow.experimentKind"  # MLflow's own tags
VIEW = "comparison"
FINAL = "final/success"
INTERVAL = "interval"  # a tag: the bounds of a run's final success, as text
CHARTS = ("rollout/success", "reward/total", "validation/success", "value/explained_variance")
CREATED, DURATION = "runDateAndNestInfo", "duration"  # MLflow's, which it always shows
COLUMNS = {  # in their order, with the pixels that they take: all but the last fit a window of 1,280
    "attributes.`Run Name`": 220,
    CREATED: 48,  # how the run ended; when it began is told by pointing there
    f"metrics.`{FINAL}`": 92,
    f"tags.`{INTERVAL}`": 98,
    "metrics.`rollout/success`": 106,
    "params.`seed`": 46,
    "attributes.`Dataset`": 140,
    DURATION: 66,
    "attributes.`Source`": 130,
    "params.`variant`": 150,
}
ABOUT = """Trainings, and evaluations of what was not trained here, a run each. `final/success` is the share of the test
questions with a right answer (exact match), or of worlds with their goal reached; `interval` is its 95 % interval, of
which `/low` and `/high` are the bounds. `rollout/success` is the same of the sampled episodes, iteration by iteration.

Group by `variant` to compare runs over their seeds. Baselines alone: `tags.kind = 'baseline'`; a sweep:
`tags.sweep = 'ablations'`."""


def comparison(port: int = PORT) -> str:
    """The address of the page that compares the runs of the experiment, grouped by variant."""
    client, experiment = open_store()
    lay_view(client, experiment)
    return f"{address(port)}/#/experiments/{experiment}/runs?viewStateShareKey={VIEW}"


def address(port: int = PORT) -> str:
    """A browser's way to MLflow: the one that `make serve` says, the tracking server, or this port of this machine."""
    server = without_password(os.environ.get(SERVER, ""))
    return os.environ.get(MLFLOW_UI) or (server if server.startswith("http") else f"http://127.0.0.1:{port}")


def lay_view(client: MlflowClient, experiment: str) -> None:
    """Gives the experiment the saved view, and if it has none a description and the kind of its pages."""
    there = client.get_experiment(experiment).tags
    own = {NOTE: ABOUT, KIND: "custom_model_development"}  # which opens on trainings, not on chats
    laid = {name: value for name, value in own.items() if name not in there}
    laid[f"mlflow.sharedViewState.{VIEW}"] = json.dumps(_view())
    for name, value in laid.items():
        if there.get(name) != value:
            client.set_experiment_tag(experiment, name, value)


def _view() -> dict[str, Any]:
    """The state of MLflow's page of runs: which columns, how grouped, and which charts come first."""
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
        "groupBy": {"aggregateFunction": "average", "groupByKeys": [{"mode": "param", "groupByData": "variant"}]},
        "isAccordionReordered": True,  # else sections stand in the order of their names
        "compareRunSections": [
            {"uuid": section, "name": "Comparison", "display": True, "isReordered": True, "deleted": False}
        ],
        "compareRunCharts": [each | shared for each in (lines[0], bar, *lines[1:])],
    }
