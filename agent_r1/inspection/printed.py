"""Tables that commands print, of comparisons and replays."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from urllib.parse import urlencode

from rich import box
from rich.console import Group
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from agent_r1.evaluation.comparison import AnswerPair, Comparison, compare, read_evaluation
from agent_r1.evaluation.statistics import Interval
from agent_r1.harmless import harmless
from agent_r1.inspection.health import FailureKind
from agent_r1.inspection.replay import Replayed, reads_untrained_values
from agent_r1.params import Params
from agent_r1.params.places import Places, RunId
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


def compared(settings: Params, a: str, b: str, *, sweep: str = "", anyway: bool = False) -> Comparison:
    """Compares two evaluations on their shared questions. Each is a label, in a sweep or not, or a folder."""
    folders = [_folder(settings.places, given, sweep) for given in (a, b)]
    if folders[0].resolve() == folders[1].resolve():
        raise ValueError(f"{a} and {b} are the same evaluation; name two")
    ours, theirs = read_evaluation(a, folders[0]), read_evaluation(b, folders[1])
    questions = read_rows(settings.places.questions, Question)
    return compare(ours, theirs, questions, settings.evaluate, anyway=anyway)


def _folder(places: Places, given: str, sweep: str) -> Path:
    labelled = places.evaluation(given, sweep)
    for folder in (labelled, Path(given)):
        if (folder / "predictions.parquet").exists():
            return folder
    known = [path.parent.name for path in sorted(labelled.parent.glob("*/predictions.parquet"))]
    found = nearest(given, known) if known else "; evaluate it first: `agent-r1 evaluate --help`"
    raise FileNotFoundError(f"there is no evaluation {given!r} in {labelled.parent}, and no such folder{found}")


def comparison_tables(found: Comparison) -> Group:
    """The measures with their differences, and some questions that only one answers right."""
    one, other = len(found.only_a_right), len(found.only_b_right)
    right = sum(pair.a.success == pair.b.success == 1 for pair in found.pairs)
    several = any(len(pair.a.answers) > 1 for pair in found.pairs)
    alone, rest = ("more often", "as often, or never") if several else ("alone", "in neither")
    counts = (
        f"Of {len(found.pairs)} questions {one} are right in {found.a} {alone}, {other} in {found.b} {alone}, {right} "
        f"in both and {len(found.pairs) - one - other - right} {rest}."
    )
    unlike = [f"Not measured alike: {', '.join(found.differing)} differ."] if found.differing else []
    shorter = [f"Cut short by the world: {found.aborted}."] if found.aborted else []
    return Group(
        *(Text(harmless(warning), style="bold red") for warning in [*unlike, *shorter]),
        _scores(found),
        Text(counts),
        *_examples(f"{found.a} {alone}", found.only_a_right, found),
        *_examples(f"{found.b} {alone}", found.only_b_right, found),
    )


def _scores(found: Comparison) -> Table:
    table = Table(title=escape(f"{found.a} less {found.b}, 95 % intervals over questions"), title_justify="left")
    table.add_column("measure")
    for heading in (found.a, found.b, "difference"):
        table.add_column(escape(heading), justify="right")
    for row in found.measured:
        decimals = 1 if row.measure.startswith("tokens") else 3
        difference = Text(_cell(row.difference, decimals, sign="+"), "bold" if row.difference.excludes_zero else "")
        table.add_row(row.measure, _cell(row.a, decimals), _cell(row.b, decimals), difference)
    return table


def _cell(value: Interval, decimals: int, sign: str = "") -> str:
    mean, low, high = (f"{number:{sign}.{decimals}f}" for number in (value.mean, value.low, value.high))
    return f"{mean} ({low} to {high})"


def _examples(where: str, pairs: Sequence[AnswerPair], found: Comparison) -> list[Table]:
    shown = pairs[:EXAMPLES]
    title = escape(f"{len(shown)} of the {len(pairs)} right in {where}")
    headings = map(escape, ("question", "gold", found.a, found.b))
    table = Table(*headings, title=title, title_justify="left", show_lines=True)
    for question, one, other in shown:
        cells = (question.text, " | ".join(question.answers), *(_said(each.answers) for each in (one, other)))
        table.add_row(*(Text(harmless(cell) or "(none)") for cell in cells))
    return [table] if shown else []


def _said(answers: Sequence[str]) -> str:
    """The answers of a question's samples, each once with how often it was given."""
    counted = Counter(answers).most_common()
    return " | ".join(f"{answer or '(none)'}{f' x {times}' * (len(answers) > 1)}" for answer, times in counted)


def replay_tables(replayed: Sequence[Replayed]) -> Iterator[Table | str]:
    """Tables of credit, of reward parts if weights differ, of gradients and of the critic, with notes."""
    own, *others = [replay.configuration for replay in replayed[0].replays]
    lines = [(one.iteration, replay.configuration.name, replay.metrics) for one in replayed for replay in one.replays]
    yield _iterations("Credit", CREDIT, lines, ABOUT_CREDIT)
    if any(each.train.credit.rewards != own.train.credit.rewards for each in others):
        yield _reward_parts(replayed)
    if with_gradient := [line for line in lines if "policy/grad_norm" in line[2]]:
        yield _iterations("Gradient", GRADIENT, with_gradient, ABOUT_GRADIENT)
    if spreads := [
        (one.iteration, f"{each.low:.2f} to {each.high:.2f}, {each.groups} groups", each.metrics)
        for one in replayed
        for each in one.spreads
    ]:
        yield _iterations("Gradient by the std of a group's returns", SPREADS, spreads, ABOUT_SPREADS)
    for note in dict.fromkeys(one.policy.note for one in replayed):
        sharing = ", ".join(str(one.iteration) for one in replayed if one.policy.note == note)
        yield f"Policy of the gradient in iteration {sharing}: {note}."
    if values := [(one.iteration, own.name, one.values) for one in replayed if one.values]:
        yield _iterations("Critic", VALUES, values, ABOUT_VALUES)
    if thoughts := [(one.iteration, own.name, one.thoughts) for one in replayed if one.thoughts]:
        yield _iterations("Thoughts", THOUGHTS, thoughts, ABOUT_THOUGHTS)
    for each in others:
        if reads_untrained_values(own.train.credit, each.train.credit):
            yield (
                f"{each.name} reads values at tokens that the critic of {own.name} was never trained at; replay a run "
                "whose critic was to see the effect of the masks alone."
            )


def _reward_parts(replayed: Sequence[Replayed]) -> Table:
    weights = [replay.configuration.train.credit.rewards.weights for replay in replayed[0].replays]
    parts = [part for part in weights[0] if any(each[part] for each in weights)]
    lines = [
        (one.iteration, configuration.name, {part: weighed[part] * metrics[f"reward/{part}"] for part in parts})
        for one in replayed
        for (configuration, metrics), weighed in zip(one.replays, weights, strict=True)
    ]
    return _iterations("Reward parts", {part: part for part in parts}, lines, ABOUT_REWARDS)


def _iterations(title: str, columns: Mapping[str, str], lines: Sequence[Line], about: str) -> Table:
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
    return table


def number(value: float | None) -> str:
    """A number with three decimals, or two digits if these would be zeros; a dash for None and NaN."""
    if value is None or math.isnan(value):
        return "-"
    if abs(value) < ROUNDING:
        return "0.000"
    return f"{value:.1e}" if abs(value) < 0.0005 else f"{value:.3f}"


def health_tables(found: Sequence[FailureKind], run: RunId, page: Path) -> Iterator[Table | str]:
    """The kinds of failure, how gamed rewards rose, and links that open the viewer's page at one kind."""
    named = ", ".join(harmless(each.kind) for each in found if each.named)
    yield f"Named in {run.label}: {named or 'nothing; all that follows is merely counted'}."
    yield from (f"{each.gamed}." for each in found if each.gamed)
    shown = found[:KINDS]
    table = Table(f"kind ({len(shown)} of {len(found)})", caption=ABOUT_HEALTH, caption_justify="left")
    for heading in ("episodes", "share", "last iteration", "reward lost", "success lost"):
        table.add_column(heading, justify="right")
    table.add_column("what helps")
    for each in shown:
        counts = (f"{len(each.episodes):,}", f"{each.share:.1%}", f"{each.at_end:.1%}")
        kind = Text(harmless(each.kind), "bold" if each.named else "")
        table.add_row(kind, *counts, number(each.reward_lost), number(each.success_lost), each.remedy)
    yield table
    yield f"`agent-r1 view {run.word}` makes the page that these links open, each at one kind:"
    yield from (f"{page.resolve().as_uri()}#{urlencode({'kind': each.kind})}" for each in shown)
