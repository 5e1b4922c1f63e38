"""Runs of other trainers: `agent-r1 import`, and what is made of several: a report, a plan, a decision."""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from fnmatch import fnmatchcase
from glob import escape
from itertools import chain
from pathlib import Path

from agent_r1 import params, tracking
from agent_r1.evaluation.comparison import Evaluation
from agent_r1.evaluation.plan import told_apart
from agent_r1.evaluation.plots import Curve
from agent_r1.evaluation.runs_report import write_costs
from agent_r1.evaluation.sweep import SweptAgents, render_sweep
from agent_r1.evaluation.verdicts import Decision, decide, decision_table
from agent_r1.files import read_metrics, replaced_folder
from agent_r1.imported.formats import rollout_files
from agent_r1.imported.store import Choices, Importing, read_imported
from agent_r1.imported.tokens import Characters, Tokens
from agent_r1.imported.tracked import track
from agent_r1.params.places import IMPORTED, RunId
from agent_r1.records import Question, questions_by_id
from agent_r1.tables import read_rows

logger = logging.getLogger(__name__)


def import_runs(path: str, name: str, choices: Choices, tokenizer: str) -> None:
    """Imports one run, or where both have a `*` one of each match; all of them or none.

    Raises ValueError for a name that is taken or none, and for what cannot be read.
    """
    settings = params.load()
    tokens = Tokens(tokenizer) if tokenizer else Characters()
    runs = _matches(path, name)
    for run in runs:
        if settings.places.training(run).exists():
            raise ValueError(f"{settings.places.training(run)} is there already; take another --as, or remove it")
    with ExitStack() as folders:
        for run, source in runs.items():
            folder = folders.enter_context(replaced_folder(settings.places.training(run)))
            form, files = rollout_files(source, choices.format)
            importing = Importing(run, replace(choices, format=form), tokens, folder)
            about = importing.take(files)
            track(importing, about, settings.evaluate)
            logger.info("%s: %s", run.word, about)


def _matches(path: str, name: str) -> dict[RunId, Path]:
    """Runs with their paths: what `*` stands for in a path, it stands for in the name."""
    if "*" not in name:
        return {RunId.parse(name, IMPORTED): Path(path)}
    if path.count("*") != 1 or name.count("*") != 1:
        raise ValueError(
            f"--as {name} has a *, and so PATH has one, such as --as 'grpo-seed*' of 'runs/grpo-*'; not {path}"
        )
    before, after = path.split("*")
    home, slash, begin = before.rpartition("/")
    end, _, rest = after.partition("/")
    matches = sorted(Path(home + slash).glob(f"{escape(begin)}*{escape(end)}"))
    if not matches:
        raise FileNotFoundError(f"{path} does not exist; name the files or folders, with one * for their names")
    return {
        RunId.parse(name.replace("*", match.name.removeprefix(begin).removesuffix(end)), IMPORTED): match / rest
        for match in matches
    }


def imported_runs(settings: params.Params, patterns: Sequence[str]) -> dict[str, list[RunId]]:
    """The imported runs of patterns such as `grpo-seed*`, by name, with their seeds in order."""
    home = settings.places.imported
    labels = sorted(folder.name for folder in home.glob("[!.]*"))
    runs = defaultdict[str, list[RunId]](list)
    for pattern in patterns:
        names = [label for label in labels if fnmatchcase(label, pattern.removeprefix(f"{IMPORTED}/"))]
        if not names:
            raise FileNotFoundError(f"no run in {home} is called {pattern}; there are: {', '.join(labels) or 'none'}")
        for run in sorted((RunId.parse(name, IMPORTED) for name in names), key=lambda run: run.seed or 0):
            runs[run.name] += [run] * (run not in runs[run.name])
    return dict(runs)


def evaluations_of(settings: params.Params, runs: dict[str, list[RunId]]) -> dict[str, list[Evaluation]]:
    """What was imported of each run and seed, as evaluations."""
    return {
        name: [read_imported(run.label, settings.places.training(run)) for run in seeds] for name, seeds in runs.items()
    }


def report_imported(patterns: Sequence[str]) -> None:
    """Writes the report of imported runs to outputs/report_imported, and into the MLflow run of each."""
    settings = params.load()
    runs = imported_runs(settings, patterns)
    folders = {name: [settings.places.training(run) for run in seeds] for name, seeds in runs.items()}
    agents = _swept(settings, runs, {name: [*map(read_metrics, seeds)] for name, seeds in folders.items()})
    paths = [*chain(*folders.values())]
    into = settings.places.report().with_name(f"report_{IMPORTED}")
    scores = render_sweep(agents, _questions(paths), into, settings.evaluate)
    write_costs(into, {name: [*zip(seeds, seeds, strict=True)] for name, seeds in folders.items()}, scores, 0)
    for tracked in filter(None, map(tracking.run_of, paths)):
        tracked.report(into)
    logger.info("the report is %s/report.md", into)


def _questions(folders: Sequence[Path]) -> list[Question]:
    """The questions of several runs, each once."""
    rows = chain(*(read_rows(folder / "questions.parquet", Question) for folder in folders))
    return [*questions_by_id(rows).values()]


def _swept(settings: params.Params, runs: dict[str, list[RunId]], curves: dict[str, list[Curve]]) -> SweptAgents:
    evaluations = evaluations_of(settings, runs)
    first = next(iter(evaluations.values()))[0]
    seeds = min(map(len, runs.values()))
    return SweptAgents(
        runs=evaluations,
        baselines=[],
        curves=curves,
        plan=f"{first.hashes['limits']}.\n\n" + told_apart(settings, IMPORTED, seeds, first, evaluations),
        title="Imported runs",
    )


def decide_imported(challenger: str, champion: str, *, anyway: bool) -> Decision:
    """The gate's decision on two imported runs, which the challenger's MLflow run gets. Nothing is registered."""
    settings = params.load()
    new, old = (RunId.meant(word) for word in (challenger, champion))
    first, second = (read_imported(run.label, settings.places.training(run)) for run in (new, old))
    decision = decide(first, second, settings.promote, settings.evaluate, anyway=anyway)
    if tracked := tracking.run_of(settings.places.training(new)):
        tracked.text(decision_table(decision), f"promotion/{new.label}_against_{old.label}/decision.md")
        tracked.tag("promotion", "promoted" if decision.promoted else "refused")
    return decision
