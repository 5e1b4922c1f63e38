"""Pages of flows in Prefect: artifacts, and the message of the last state."""

from __future__ import annotations

import re
from pathlib import Path

from prefect.artifacts import create_link_artifact, create_markdown_artifact, create_table_artifact

from agent_r1.evaluation.comparison import interval_of, markdown_table, mean_cell, read_scores
from agent_r1.evaluation.scores import BOUNDS, in_words
from agent_r1.evaluation.verdicts import Decision, Drift, decision_table, explain, verdict
from agent_r1.files import read_metrics
from agent_r1.harmless import harmless, in_markdown
from agent_r1.params import Params
from agent_r1.params.places import Places
from agent_r1.records import Question, words_of
from agent_r1.tables import read_rows
from agent_r1.tracking.registry import Version
from agent_r1.tracking.store import address

COLUMNS = ("iteration", "rollout/success", "reward/total", "rollout/valid_call_share", "rollout/tool_calls")


def show_training(folder: Path, places: Places) -> str:
    """Shows the scores by iteration, and a link to the run in MLflow; returns the first and last score in words."""
    rows = scores(folder)
    create_table_artifact(rows, key=_key("scores", folder.name), description=f"Scores of {folder.name}, by iteration")
    create_link_artifact(
        run_page(_mlflow_run(folder)),
        link_text=f"{folder.name} in MLflow",
        key=_key("mlflow", folder.name),
        description=f"The run of {folder.name}: curves, parameters, viewer",
    )
    first, last = (rows[place]["rollout/success"] for place in (0, -1))
    count = f"{len(rows)} iteration{'s' if len(rows) > 1 else ''}"
    return f"{_success(places)} {first:.3f} -> {last:.3f} while it trained, {count}"


def scores(folder: Path) -> list[dict[str, float | None]]:
    """Reads a run's table of scores: a row per finished iteration."""
    return [{name: line.get(name) for name in COLUMNS} for line in read_metrics(folder)]


def show_evaluation(version: Version, folder: Path, settings: Params, found: Drift | None) -> str:
    """Shows a version's scores, and the drift since the previous evaluation; returns the overall score in words."""
    questions = read_rows(settings.places.questions, Question)
    measured = read_scores(folder, questions, settings.evaluate)
    means = (name for name in measured if not name.endswith(BOUNDS))
    rows = [[in_markdown(name), _cell(measured, name)] for name in means]
    parts = [
        f"{folder.parent.name}, of {version.descriptor.label}. {_link(_mlflow_run(folder), 'In MLflow')}",
        markdown_table(["", "mean [95 % interval]"], rows),
        in_markdown(explain(found, 0)) if found else "There is no earlier evaluation that was measured alike.",
    ]
    changed = f", {len(found.changed)} answers changed" if found and found.changed else ""
    said = f"{in_words(measured, words_of(questions).right)}{changed}"
    create_markdown_artifact("\n\n".join(parts) + "\n", key=_key("evaluation", folder.parent.name), description=said)
    return f"{version.name}: {said}"


def show_decision(decision: Decision, mlflow_run_id: str) -> None:
    """Shows the verdict on a challenger with its table, and a link to the MLflow run of its training."""
    text = f"{decision_table(decision)}\n{_link(mlflow_run_id, f'The training of {decision.challenger} in MLflow')}\n"
    create_markdown_artifact(text, key=_key("decision", decision.challenger), description=harmless(verdict(decision)))


def run_page(run_id: str) -> str:
    """The address of a run's page in MLflow."""
    return f"{address()}/#/runs/{run_id}"


def _link(run_id: str, text: str) -> str:
    return f"[{text}]({run_page(run_id)})"


def _mlflow_run(folder: Path) -> str:
    return (folder / "mlflow_run_id").read_text()


def _success(places: Places) -> str:
    return words_of(read_rows(places.questions, Question)).right


def _cell(measured: dict[str, float], name: str) -> str:
    if f"{name}/low" not in measured:
        return f"{measured[name]:.3f}"
    return mean_cell(interval_of(measured, name))


def _key(kind: str, name: str) -> str:
    """The key of an artifact: Prefect takes lower case letters, digits and dashes."""
    return re.sub("[^a-z0-9]+", "-", f"{kind}-{name}".lower())
