"""Imported runs in MLflow: a run with its curve, final scores and some traces, like one of this project's."""

from __future__ import annotations

import numpy as np

from agent_r1 import tracking
from agent_r1.evaluation.scores import headline, score
from agent_r1.files import write_json, write_text
from agent_r1.imported.store import About, Importing, tokens_in
from agent_r1.params.places import IMPORTED
from agent_r1.params.stages import EvaluateParams
from agent_r1.records import Question, Trajectory
from agent_r1.tracking.runs import KIND_TAG


def track(written: Importing, about: About, params: EvaluateParams) -> None:
    """Has MLflow keep an import that is written, whose folder gets its scores and the run's id."""
    run = written.run
    parameters = {"variant": run.name, "algorithm": about.format, "seed": run.seed or 0, "engine": about.level}
    tags = {KIND_TAG: IMPORTED, "dataset": IMPORTED}
    predictions = written.step.predictions
    with tracking.start(run.label, parameters, tags, about=f"Imported: {about}.") as tracked:
        for line in written.curve:
            tracked.log({name: value for name, value in line.items() if name != "iteration"}, int(line["iteration"]))
        if predictions:
            scores = headline(score(predictions, [*written.questions.values()], params))
            scores = {name: value for name, value in scores.items() if about.exact or not name.startswith("tokens_")}
            write_json(written.folder / "scores.json", scores)
            tracked.final(scores)
        episodes = [_rewarded(written.questions[row.question_id], row) for row in written.step.first]
        tracking.log_traces(tracked.run_id, episodes, tokens_in(written.folder).decode)
    write_text(written.folder / "mlflow_run_id", tracked.run_id)


def _rewarded(question: Question, row: Trajectory) -> tracking.Rewarded:
    stated = row.steps[-1].rewards
    parts = {name: np.array([step.rewards.get(name, 0.0) for step in row.steps]) for name in stated}
    return tracking.Rewarded("training", question, row, parts.pop("env", np.zeros(0)), parts)
