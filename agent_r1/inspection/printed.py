"""Tables that commands print, of comparisons and replays."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain, groupby
from pathlib import Path
from urllib.parse import urlencode

from rich import box
from rich.console import Group
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from agent_r1.evaluation.comparison import LIMITS, AnswerPair, Comparison, Evaluation, compare, read_evaluation
from agent_r1.evaluation.statistics import Interval
from agent_r1.harmless import harmless
from agent_r1.imported.store import ABOUT, TEXT, read_imported
from agent_r1.inspection.health import FailureKind
from agent_r1.inspection.replay import IterationReplay, reads_untrained_values
from agent_r1.params import Params
from agent_r1.params.places import IMPORTED, Places, RunId
from agent_r1.params.sections import nearest
from agent_r1.records import Question
from agent_r1.tables import read_rows

EXAMPLES = 3  # questions shown of each kind
# Heading and metric of every column of a replay.
CREDIT = {
    "return": "reward/total",
    "return std": "reward/std",
    "kept": "advantage/kept_share",
    "adv. mean": "advantage/mean",
    "adv. std": "advantage/std",
    "adv. max": "advantage/abs_max",
    "non-zero": "advantage/nonzero_share",
    "corr.": "advantage/correlation",
}
GRADIENT = {
    "loss": "policy/loss",
    "clipped": "policy/clip_fraction",
    "norm": "policy/grad_norm",
    "cosine": "policy/gradient_cosine",
    "observed loss": "policy/observed_loss_share",
    "observed gradient": "policy/observed_gradient_share",
}
SPREADS = {"norm": "policy/grad_norm", "cosine": "policy/gradient_cosine"}
VALUES = {
    "RMSE, actions": "value/action_rmse",
    "return std, actions": "value/action_std",
    "RMSE, observations": "value/observation_rmse",
    "return std, observations": "value/observation_std",
}
ABOUT_CREDIT = (
    "Adv.: advantages at action tokens, the largest by size. Non-zero: share of the tokens after the prompt that have "
    "one. Corr.: correlation with the advantages of the iteration's first line, at action tokens that both train on."
)
ABOUT_REWARDS = "Weighted parts of the return, mean per trajectory."
ABOUT_GRADIENT = (
    "Policy loss of all kept trajectories of the iteration as one optimiser step; its gradient before clipping and "
    "Adam. Cosine: with the gradient of the iteration's first line. Observed: the part from tokens after the prompt "
    "that the policy did not sample, as a share of the absolute loss and of the squared norms of the gradient's two "
    "parts."
)
ABOUT_SPREADS = (
    "The first line's gradient from a part of the groups, as a step of its own: groups whose returns are equal, and "
    "thirds of the others. Cosine: with the gradient of all groups."
)
ABOUT_VALUES = "Values as the run's critic gave them, against the undiscounted return yet to come."
THOUGHTS = {"information": "thought/information", "retrieved": "thought/retrieved"}
ABOUT_THOUGHTS = (
    "Information of first thoughts about their inputs, in nats; retrieved is the share likeliest under its own."
)
ABOUT_HEALTH = (
    "Lost, per episode of the run: how much more the episodes without the kind earn, times the kind's share; it shows "
    "no cause. Named, in bold: kinds from a fifth of the episodes or a tenth of success lost on, and rewards that rise "
    "in six iterations or more while success (of three validations, else of training) does not. This is an audit after "
    "the fact, and no early warning."
)
KINDS = 20  # of failure, in a table
NAME_WIDTH = 22  # a longer name goes on in another line
ROUNDING = 1e-6  # of metrics, whose scale is 1
Line = tuple[int, str, Mapping[str, float]]  # iteration, name, metrics


def compare_labels(settings: Params, a: str, b: str, *, sweep: str = "", anyway: bool = False) -> Comparison:
    """Compares two evaluations on their shared questions. Each is a label, in a sweep or not, or a folder."""
    folders = [_folder(settings.places, name, sweep) for name in (a, b)]
    if folders[0].resolve() == folders[1].resolve():
        raise ValueError(f"{a} and {b} are the same evaluation; name two")
    first, second = (_read(name, folder) for name, folder in zip((a, b), folders, strict=True))
    files = dict.fromkeys(_questions(settings.places, folder) for folder in folders)
    questions = [*chain(*(read_rows(file, Question) for file in files))]
    comparison = compare(first, second, questions, settings.evaluate, anyway=anyway)
    text = any(TEXT in side.hashes[LIMITS] for side in (first, second) if LIMITS in side.hashes)
    return comparison.without_tokens if text else comparison


def _read(name: str, folder: Path) -> Evaluation:
    return read_imported(name, folder) if (folder / ABOUT).exists() else read_evaluation(name, folder)


def _questions(places: Places, folder: Path) -> Path:
    own = folder / places.questions.name
    return own if own.exists() else places.questions


def _folder(places: Places, name: str, sweep: str) -> Path:
    labelled = places.evaluation(name, sweep)
    of_others = [places.training(RunId.meant(name))] if name.startswith(f"{IMPORTED}/") else []
    for folder in (labelled, *of_others, Path(name)):
        if (folder / "predictions.parquet").exists():
            return folder
    labels = [path.parent.name for path in sorted(labelled.parent.glob("*/predictions.parquet"))]
    remedy = nearest(name, labels) if labels else "; evaluate it first: `agent-r1 evaluate --help`"
    raise FileNotFoundError(f"there is no evaluation {name!r} in {labelled.parent}, and no such folder{remedy}")


def comparison_tables(comparison: Comparison) -> Group:
    """The measures with their differences, and some questions that only one answers right."""
    several = any(len(pair.a.answers) > 1 for pair in comparison.pairs)
    alone = "more often" if several else "alone"
    warnings = [f"Not measured alike: {', '.join(comparison.differing)} differ."] if comparison.differing else []
    if comparison.aborted:
        warnings.append(f"Cut short by the world: {comparison.aborted}.")
    return Group(
        *(Text(harmless(warning), style="bold red") for warning in warnings),
        _scores(comparison),
        Text(_counts(comparison, alone, "as often, or never" if several else "in neither")),
        *_examples(f"{comparison.a} {alone}", comparison.only_a_right, comparison),
        *_examples(f"{comparison.b} {alone}", comparison.only_b_right, comparison),
    )


def _counts(comparison: Comparison, alone: str, rest: str) -> str:
    count = len(comparison.pairs)
    only_a = len(comparison.only_a_right)
    only_b = len(comparison.only_b_right)
    both = sum(pair.a.success == pair.b.success == 1 for pair in comparison.pairs)
    return (
        f"Of {count} questions {only_a} are right in {comparison.a} {alone}, {only_b} in {comparison.b} {alone}, "
        f"{both} in both and {count - only_a - only_b - both} {rest}."
    )


def _scores(comparison: Comparison) -> Table:
    table = Table(
        title=escape(f"{comparison.a} less {comparison.b}, 95 % intervals over questions"), title_justify="left"
    )
    table.add_column("measure")
    for heading in (comparison.a, comparison.b, "difference"):
        table.add_column(escape(heading), justify="right")
    for row in comparison.measured:
        decimals = 1 if row.measure.startswith("tokens") else 3
        difference = Text(_cell(row.difference, decimals, sign="+"), "bold" if row.difference.excludes_zero else "")
        table.add_row(row.measure, _cell(row.a, decimals), _cell(row.b, decimals), difference)
    return table


def _cell(value: Interval, decimals: int, sign: str = "") -> str:
    mean, low, high = (f"{number:{sign}.{decimals}f}" for number in (value.mean, value.low, value.high))
    return f"{mean} ({low} to {high})"


def _examples(where: str, pairs: Sequence[AnswerPair], comparison: Comparison) -> list[Table]:
    examples = pairs[:EXAMPLES]
    title = escape(f"{len(examples)} of the {len(pairs)} right in {where}")
    headings = map(escape, ("question", "gold", comparison.a, comparison.b))
    table = Table(*headings, title=title, title_justify="left", show_lines=True)
    for question, a, b in examples:
        cells = (question.text, " | ".join(question.answers), _answer_counts(a.answers), _answer_counts(b.answers))
        table.add_row(*(Text(harmless(cell) or "(none)") for cell in cells))
    return [table] if examples else []


def _answer_counts(answers: Sequence[str]) -> str:
    """The answers of a question's samples, each once with how often it was given."""
    counts = Counter(answers).most_common()
    return " | ".join(f"{answer or '(none)'}{f' x {times}' * (len(answers) > 1)}" for answer, times in counts)


def replay_tables(replays: Sequence[IterationReplay]) -> Iterator[Table | str]:
    """Tables of credit, of reward parts if weights differ, of gradients and of the critic, with notes."""
    run, *others = [replay.configuration for replay in replays[0].replays]
    lines = [(row.iteration, replay.configuration.name, replay.metrics) for row in replays for replay in row.replays]
    yield from _iterations("Credit", CREDIT, lines, ABOUT_CREDIT)
    if any(other.train.credit.rewards != run.train.credit.rewards for other in others):
        yield from _reward_parts(replays)
    with_gradient = [line for line in lines if "policy/grad_norm" in line[2]]
    yield from _iterations("Gradient", GRADIENT, with_gradient, ABOUT_GRADIENT)
    yield from _spreads(replays)
    yield from _policy_notes(replays)
    values = [(row.iteration, run.name, row.values) for row in replays if row.values]
    yield from _iterations("Critic", VALUES, values, ABOUT_VALUES)
    thoughts = [(row.iteration, run.name, row.thoughts) for row in replays if row.thoughts]
    yield from _iterations("Thoughts", THOUGHTS, thoughts, ABOUT_THOUGHTS)
    for other in others:
        if reads_untrained_values(run.train.credit, other.train.credit):
            yield (
                f"{other.name} reads values at tokens that the critic of {run.name} was never trained at; replay a run "
                "whose critic was to see the effect of the masks alone."
            )


def _policy_notes(replays: Sequence[IterationReplay]) -> Iterator[str]:
    for note in dict.fromkeys(row.policy.note for row in replays):
        sharing = ", ".join(str(row.iteration) for row in replays if row.policy.note == note)
        yield f"Policy of the gradient in iteration {sharing}: {note}."


def _spreads(replays: Sequence[IterationReplay]) -> Iterator[Table]:
    lines = [
        (row.iteration, f"{spread.low:.2f} to {spread.high:.2f}, {spread.groups} groups", spread.metrics)
        for row in replays
        for spread in row.spreads
    ]
    return _iterations("Gradient by the std of a group's returns", SPREADS, lines, ABOUT_SPREADS)


def _reward_parts(replays: Sequence[IterationReplay]) -> Iterator[Table]:
    weights = [replay.configuration.train.credit.rewards.weights for replay in replays[0].replays]
    parts = [part for part in weights[0] if any(of_config[part] for of_config in weights)]
    lines = [
        (row.iteration, configuration.name, {part: of_config[part] * metrics[f"reward/{part}"] for part in parts})
        for row in replays
        for (configuration, metrics), of_config in zip(row.replays, weights, strict=True)
    ]
    return _iterations("Reward parts", {part: part for part in parts}, lines, ABOUT_REWARDS)


def _iterations(title: str, columns: Mapping[str, str], lines: Sequence[Line], about: str) -> Iterator[Table]:
    """A table of lines by iteration; none without lines."""
    if not lines:
        return
    table = Table(title=title, title_justify="left", caption=about, caption_justify="left", box=box.SIMPLE)
    table.add_column("iter.", justify="right")
    table.add_column("", overflow="fold", min_width=min(NAME_WIDTH, max(len(name) for _, name, _ in lines)))
    for heading in columns:
        table.add_column(heading, justify="right", min_width=6)
    for iteration, rows in groupby(lines, lambda line: line[0]):
        for place, (_, name, metrics) in enumerate(rows):
            numbers = [number(metrics.get(metric)) for metric in columns.values()]
            table.add_row("" if place else str(iteration), name, *numbers)
        table.add_section()
    yield table


def number(value: float | None) -> str:
    """A number with three decimals, or two digits if these would be zeros; a dash for None and NaN."""
    if value is None or math.isnan(value):
        return "-"
    if abs(value) < ROUNDING:
        return "0.000"
    return f"{value:.1e}" if abs(value) < 0.0005 else f"{value:.3f}"


def health_tables(kinds: Sequence[FailureKind], run: RunId, page: Path) -> Iterator[Table | str]:
    """The kinds of failure, how gamed rewards rose, and links that open the viewer's page at one kind."""
    names = ", ".join(harmless(kind.kind) for kind in kinds if kind.named)
    yield f"Named in {run.label}: {names or 'nothing; all that follows is merely counted'}."
    yield from (f"{kind.gamed}." for kind in kinds if kind.gamed)
    listed = kinds[:KINDS]
    table = Table(f"kind ({len(listed)} of {len(kinds)})", caption=ABOUT_HEALTH, caption_justify="left")
    for heading in ("episodes", "share", "last iteration", "reward lost", "success lost"):
        table.add_column(heading, justify="right")
    table.add_column("what helps")
    for kind in listed:
        table.add_row(
            Text(harmless(kind.kind), "bold" if kind.named else ""),
            f"{len(kind.episodes):,}",
            f"{kind.share:.1%}",
            f"{kind.at_end:.1%}",
            number(kind.reward_lost),
            number(kind.success_lost),
            kind.remedy,
        )
    yield table
    yield f"`agent-r1 view {run.word}` makes the page that these links open, each at one kind:"
    yield from (f"{page.resolve().as_uri()}#{urlencode({'kind': kind.kind})}" for kind in listed)
