"""Commands that show the results of runs."""

from __future__ import annotations

import io
import json
import logging
import re
import sys
from pathlib import Path
from typing import Annotated, Literal

from typer import Argument, Option

from agent_r1 import params
from agent_r1.files import write_text
from agent_r1.params.places import IMPORTED, RunId
from flows.commands import options
from flows.commands.options import Imported, Label, Model, OfPolicy, Served, Sweep, Temperature, Word, app
from flows.made_of import SHIPPED
from flows.stage import run_stage
from flows.terminal import show

PANEL = "Look at what came of it"

logger = logging.getLogger(__name__)
SomeIterations = Annotated[
    list[str] | None,
    Option(
        "--iteration",
        metavar="N",
        help="A number, or all; may be given again. Else the last that the warm start sampled, and the last.",
    ),
]
RECIPES = SHIPPED / "recipes"
PATIENCE_S = 600.0  # with a served agent, for one answer
Form = Literal["verl", "trl", "verifiers", "nemo_gym", "atif", "openai"]
NARROW = ("agent", "all", "greedily")  # columns
INTERVAL = re.compile(r"(\d\.\d+) \[(\S+), (\S+)\]")
NEXT = """\
- the whole report: `{page}`; by kinds of questions, with costs: `agent-r1 results --whole`
- the runs side by side in MLflow: `agent-r1 serving --only-mlflow`
- {agent}: `agent-r1 chat{word}`
"""


@app.command(rich_help_panel=PANEL)
def results(
    sweep: Sweep = None,
    whole: Annotated[bool, Option("--whole", help="Also by kinds of questions, and the costs of the runs.")] = False,
    html: Annotated[
        Path | None, Option(metavar="FILE", help="Writes the report as one page, with the viewer of the best run.")
    ] = None,
) -> None:
    """Prints the head of the last report."""
    from rich.markdown import Markdown

    settings = params.load()
    page = settings.places.report(sweep or "") / "report.md"
    if not page.exists():
        command = f"agent-r1 pipeline{f' --sweep {sweep}' * bool(sweep)}"
        raise ValueError(f"{page} does not exist; the stage `report` writes it, at the end of `{command}`")
    best = best_run(settings, sweep or "")
    if html:
        from agent_r1.inspection.report_page import report_page

        write_text(html, report_page(page.parent, _viewer(settings, best) if best else ""))
        return
    agent = "the best run of the report" if best else "the untrained warm start"
    commands = NEXT.format(page=page, agent=agent, word=f" {best.word}" if best else "")
    show(Markdown("\n\n".join([*_head(page, whole=whole), commands])))


def _head(page: Path, *, whole: bool) -> list[str]:
    """The paragraph and the table with which a report begins; the `whole` table, with the costs, or what a line has."""
    from agent_r1.harmless import harmless_lines

    _, about, *parts = harmless_lines(page.read_text()).split("\n\n")
    tables = [part for part in parts if part.startswith("|")][:1]
    if not whole:
        return [about, *map(_narrow, tables)]
    costs = page.with_name("costs.md")
    return [about, *tables, *(harmless_lines(costs.read_text()).split("\n\n")[1:] if costs.exists() else [])]


def _viewer(settings: params.Params, run: RunId) -> str:
    """The page of a training's trajectories. Raises ValueError, with the command that makes it, if there is none."""
    viewer = settings.places.page(run)
    if not viewer.exists():
        raise ValueError(f"{viewer} is not there to be part of it; `agent-r1 view {run.word}` makes it")
    return viewer.read_text()


def _narrow(table: str) -> str:
    """The columns of a report's table that stand on a line of 80 characters, with half of each interval's width."""

    def short(cell: re.Match[str]) -> str:
        low, high = map(float, cell.group(2, 3))
        return f"{cell[1]} ±{(high - low) / 2:.2f}".replace("0.", ".")

    rows = [row.split("|") for row in INTERVAL.sub(short, table).splitlines()]
    columns = [place for place, name in enumerate(rows[0]) if name.strip() in NARROW]
    return "\n".join("|".join(["", *(row[place] for place in columns), ""]) for row in rows)


def best_run(settings: params.Params, sweep: str) -> RunId | None:
    """The training of the report with the highest success, the first of several; None if no run was evaluated."""
    from agent_r1.evaluation.scores import BASELINES, SUCCESS

    runs = [RunId.parse(label, sweep) for label in settings.reported(sweep) if label not in BASELINES]
    files = {run: settings.places.evaluation(run.label, sweep) / "scores.json" for run in runs}
    scores = {run: json.loads(file.read_text())[SUCCESS] for run, file in files.items() if file.exists()}
    return max(scores, key=lambda run: scores[run], default=None)


@app.command(rich_help_panel=PANEL)
def compare(
    a: Annotated[str, Argument(help="A label under outputs/evaluate, or the folder of an evaluation.")],
    b: Annotated[str, Argument(help="The other: differences are A less B.")],
    sweep: Sweep = None,
    anyway: Annotated[bool, Option("--anyway", help="Also if they were not measured alike.")] = False,
) -> None:
    """Compares two evaluations."""
    from agent_r1.inspection.printed import compare_labels, comparison_tables

    show(comparison_tables(compare_labels(params.load(), a, b, sweep=sweep or "", anyway=anyway)))


@app.command(cls=OfPolicy, rich_help_panel=PANEL)
def chat(
    policy: Word = "",
    endpoint: Annotated[
        str | None, Option(metavar="URL", help="Of `agent-r1 serve-agent`; its key: AGENT_R1_ENDPOINT_KEY.")
    ] = None,
    temperature: Temperature = 0.0,
    question: Annotated[str | None, Option(metavar="TEXT", help="Answers this one and ends.")] = None,
    draws: Annotated[int | None, Option(metavar="SEED", help="Seeds the draws at a temperature above 0.")] = None,
) -> None:
    """Asks an agent.

    Questions are typed, or one per line of standard input. Without POLICY the warm start answers. Engine servers
    must not be those of a training.
    """
    from agent_r1.http.endpoint import Endpoint
    from agent_r1.serving.conversation import chat as talk
    from agent_r1.serving.conversation import introduction, local_answerer, remote_answerer

    for stream in (sys.stdin, sys.stdout):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # bytes that are no text, text that the terminal cannot show
    logging.getLogger("agent_r1").setLevel(logging.WARNING)  # it has a line per engine
    if draws is not None and not temperature:
        raise ValueError("--draws has no effect at temperature 0; give --temperature")
    if endpoint and temperature:
        raise ValueError("--temperature is said where the agent is served, not to --endpoint")
    if endpoint:
        remote = Endpoint(endpoint, timeout_s=PATIENCE_S)
        talk(remote_answerer(remote, policy or None), question)
        return
    from flows.operation.answering import agent_of  # torch and MLflow take seconds
    from flows.policies import policy_of

    settings = params.load()
    acting_policy = policy_of(settings, policy)
    title = acting_policy.title if policy else f"{acting_policy.title}, untrained (`chat RUN` asks a run),"
    built_in = acting_policy.seed is not None and not settings.model.path
    about = introduction(settings, Path(acting_policy.path), built_in=built_in)
    talk(local_answerer(agent_of(acting_policy, settings, temperature), draws or 0, title, *about), question)


@app.command("try", rich_help_panel=PANEL)
def try_run(
    run: Label,
    model: Model = "",
    endpoint: Served = None,
    episodes: Annotated[int, Option("--episodes", "-n", min=1, help="Of different training questions, at most.")] = 5,
    seed: Annotated[int, Option(min=0, help="Draws the questions.")] = 0,
    prompt: Annotated[bool, Option("--prompt", help="Shows the whole prompt of each episode.")] = False,
) -> None:
    """Plays a few episodes of a run and shows what they earn.

    Without --model the run's policy plays, and before its training the warm start.
    """
    if endpoint and not model:
        raise ValueError("--endpoint is where --model NAME acts; give its name")
    logger.info("loading")  # torch takes seconds
    from flows.tryout import play

    logging.getLogger("agent_r1").setLevel(logging.WARNING)  # it has a line per engine
    for text in play(RunId.meant(run), model, endpoint, episodes=episodes, seed=seed, prompt=prompt):
        show(text)


@app.command(rich_help_panel=PANEL)
def profile(
    run: Label,
    model: Model = "",
    questions: Annotated[int, Option(min=2, help="Training questions, at most.")] = 50,
    samples: Annotated[int, Option(min=2, max=64, help="Of each question, at temperature 1.")] = 8,
) -> None:
    """Plays a run's training questions before it is trained.

    The policy that it begins with, chance and a solver play: shows their success, in how many groups of samples the
    returns differ, tokens and time.
    """
    from agent_r1.evaluation.protocols import training_questions
    from agent_r1.inspection.profile import players_of, profile_tables
    from flows.policies import policy_of
    from flows.stage import accelerator
    from flows.terminal import counted

    label = RunId.meant(run)
    settings = params.load().of(label)
    sampled = settings.evaluate.model_copy(update={"samples": samples, "temperature": 1.0})
    settings = settings.model_copy(update={"evaluate": sampled})
    drawn = training_questions(settings, questions)
    policy = policy_of(settings, model)
    chat = policy.chat(settings)
    weights = policy.weights(settings)
    lock = accelerator(settings.operate.side_by_side, settings.engine.gpus)
    with lock, counted("playing", samples * len(drawn)) as on_end:
        players = players_of(settings, drawn, chat, lambda exam: exam.by_policy(weights, on_end))
    show(*profile_tables(players, drawn, settings.run(label), settings))


@app.command("plan", rich_help_panel=PANEL)
def plan_sweep(
    seeds: Annotated[int, Option(min=0, max=1000, help="Of each run; 0: as in `ablations`.")] = 0,
    questions: Annotated[int, Option(min=0, help="0: as in `evaluate`, or as many as the evidence has.")] = 0,
    samples: Annotated[int, Option(min=0, help="Of each question; 0: as in `evaluate`.")] = 0,
    imported: Imported = None,
) -> None:
    """Says how small a difference a sweep can show."""
    from rich.markdown import Markdown

    from agent_r1.evaluation.plan import plan
    from flows.imported import evaluations_of, imported_runs

    settings = params.load()
    runs = evaluations_of(settings, imported_runs(settings, imported)) if imported else None
    show(Markdown(plan(settings, seeds, questions, samples, runs)))


@app.command("view", cls=OfPolicy, rich_help_panel=PANEL)
def run_view(
    run: Label,
    out: Annotated[Path | None, Option(metavar="FILE", help="In place of outputs/view/LABEL.html.")] = None,
    trajectories: Annotated[int, Option(help="On the page, at most.")] = 200,
    traces: Annotated[int, Option(help="Of them in MLflow, at most; 0 for none.")] = 20,
) -> None:
    """Makes the page of a training's trajectories."""
    from agent_r1.inspection.viewer import view

    run_stage(view, run=RunId.meant(run), out=out, trajectories=trajectories, traces=traces)


@app.command(cls=OfPolicy, rich_help_panel=PANEL)
def health(run: Label) -> None:
    """Names the failures of a training, by their cost."""
    from agent_r1.inspection.health import audit
    from agent_r1.inspection.printed import health_tables
    from agent_r1.inspection.stored import ImportedRun, open_run

    run_id = RunId.meant(run)
    settings = params.load().of(run_id)
    stored, config = open_run(settings, run_id)
    kinds = audit(stored, config.credit, settings.env.max_tokens)
    if isinstance(stored, ImportedRun):
        show(f"{run_id.label}: {stored.about}.")
    show(*health_tables(kinds, run_id, settings.places.page(run_id)))


@app.command(rich_help_panel=PANEL)
def recipe(
    action: Annotated[
        Literal["check", "band"], Argument(help="Holds runs against a band, or makes it of their seeds.")
    ],
    runs: Annotated[list[str], Argument(help="Labels such as ppo-seed3, or JSON files that somebody sent.")],
    name: Annotated[str, Option("--recipe", help="In docs/measured/recipes, without .csv.")] = "ppo",
    sweep: Sweep = None,
) -> None:
    """Says whether a training goes as its recipe does.

    Every run gets a picture in outputs/recipe, and a small JSON of its curve, which can be sent to somebody else.
    """
    from agent_r1.evaluation.plots import recipe_band
    from agent_r1.inspection.recipes import check, curve_of, read_curves, write_band

    places = params.load().places
    curves = {}
    band = RECIPES / f"{name}.csv"
    for run in runs:
        file = Path(places.outputs, "recipe", Path(run).stem)
        if run.endswith(".json"):
            curves[file] = read_curves(Path(run))
        else:
            curves[file] = curve_of(places.training(RunId.parse(run, sweep or "")))
            write_text(file.with_suffix(".json"), json.dumps(curves[file].to_dict("list")))
    if action == "band":
        write_band(band, [*curves.values()])
        return
    for file, curve in curves.items():
        verdict, panels = check(curve, read_curves(band))
        recipe_band(file.with_suffix(".png"), f"{file.stem}: {verdict}", panels)
        show(f"{file.stem}: {verdict} ({file}.png)")


@app.command(cls=OfPolicy, rich_help_panel=PANEL)
def replay(
    run: Label,
    others: Annotated[
        list[str] | None,
        Option("--as", metavar="RUN", autocompletion=options.completed_runs, help="May be given again."),
    ] = None,
    changes: Annotated[
        list[str] | None, Option("--set", metavar="KEY=VALUE", help="credit.lam=1.0, ...; may be given again.")
    ] = None,
    iterations: SomeIterations = None,
    folder: Annotated[Path | None, Option(help="Of the run's files, if not outputs/train/RUN.")] = None,
    gradient: Annotated[bool, Option("--gradient/--no-gradient", help="Or compares credit alone.")] = True,
) -> None:
    """Credits stored trajectories under other settings.

    The settings are those of other runs, or changed values. Nothing is written, and nothing is sampled.
    """
    from agent_r1.inspection import replay as stored
    from agent_r1.inspection.printed import replay_tables
    from flows.policies import teacher_of

    logging.getLogger("agent_r1.credit").setLevel(logging.WARNING)  # it has a line per iteration and configuration
    settings = params.load()
    run_id = RunId.meant(run)
    numbers = iterations or []
    teacher = "" if run_id.sweep == IMPORTED else teacher_of(settings, run_id)
    compared = stored.configurations(settings, run_id, others or [], changes or [], teacher)
    replays = stored.replay(settings, run_id, compared, folder=folder, iterations=numbers, with_gradient=gradient)
    show(*replay_tables(replays))


@app.command(rich_help_panel=PANEL)
def lineage(
    model: Annotated[
        str, Argument(help="models:/agent_r1@champion, models:/agent_r1/3, or a training such as ppo-seed3.")
    ],
) -> None:
    """Shows the origins of a model."""
    from flows.operation.lineage import lineage as tree_of

    show(tree_of(model))


@app.command("import", rich_help_panel=PANEL)
def import_rollouts(
    path: Annotated[str, Argument(help="A file, a folder, or a pattern in quotation marks, of another trainer.")],
    name: Annotated[
        str, Option("--as", metavar="NAME", help="Such as grpo-seed3. A * has what the one in PATH stands for.")
    ],
    form: Annotated[Form | None, Option("--format", help="Else as the first row looks.")] = None,
    success: Annotated[str, Option(metavar="FIELD", help="Says what is right, by 1 or 0; or FIELD>=0.5.")] = "reward",
    reward: Annotated[
        list[str] | None, Option(metavar="FIELD", help="Adds up to the reward, in place of the format's own.")
    ] = None,
    tokenizer: Annotated[
        str, Option(metavar="FOLDER", help="Or hub id: of the model whose ids are in the files.")
    ] = "",
) -> None:
    """Takes over rollouts that another trainer wrote.

    They lie in outputs/imported/NAME then, and `imported/NAME` names them: to view, health, compare, report, plan,
    replay and promote.
    """
    from agent_r1.imported.store import Choices
    from flows.imported import import_runs

    run_stage(
        import_runs, path=path, name=name, choices=Choices(form or "", success, reward or []), tokenizer=tokenizer
    )


@app.command("export-trajectories", rich_help_panel=PANEL)
def export_trajectories(
    name: Annotated[str, Argument(help="Such as imported/grpo-seed3.")],
    into: Annotated[Path, Option("--to", metavar="FILE", help="JSON lines; not there yet.")],
    form: Annotated[Literal["openai", "atif"], Option("--format", help="Chat messages, or ATIF.")] = "openai",
) -> None:
    """Writes an imported run's trajectories for others."""
    from agent_r1.imported.exported import export

    run = RunId.parse(name.removeprefix(f"{IMPORTED}/"), IMPORTED)
    count = export(params.load().places.training(run), form, into)
    show(f"{count} trajectories are in {into}")
