"""A comparison of two evaluations, shown on a terminal."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rich.console import Group
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from agent_r1.evaluation.comparison import AnswerPair, Comparison, compare, read_evaluation
from agent_r1.evaluation.statistics import Interval
from agent_r1.harmless import harmless
from agent_r1.params import Params
from agent_r1.params.places import Places
from agent_r1.params.sections import nearest
from agent_r1.records import Question
from agent_r1.tables import read_rows

EXAMPLES = 3  # questions shown of each kind


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
    found = nearest(given, known) if known else "; evaluate it first, with `agent-r1 evaluate`"
    raise FileNotFoundError(f"there is no evaluation {given!r} in {labelled.parent}, and no such folder{found}")


def rendered(found: Comparison) -> Group:
    """The measures with their differences, and some questions that only one answers right."""
    one, other = len(found.only_a_right), len(found.only_b_right)
    right = sum(pair.a.success == pair.b.success == 1 for pair in found.pairs)
    counts = (
        f"Of {len(found.pairs)} questions {one} are right in {found.a} alone, {other} in {found.b} alone, {right} in "
        f"both and {len(found.pairs) - one - other - right} in neither."
    )
    unlike = [f"Not measured alike: {', '.join(found.differing)} differ."] if found.differing else []
    shorter = [f"Cut short by the world: {found.aborted}."] if found.aborted else []
    return Group(
        *(Text(harmless(warning), style="bold red") for warning in [*unlike, *shorter]),
        _scores(found),
        Text(counts),
        *_examples(found.a, found.only_a_right, found),
        *_examples(found.b, found.only_b_right, found),
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


def _examples(name: str, pairs: Sequence[AnswerPair], found: Comparison) -> list[Table]:
    """A table of some questions that only one answers right; none without such a question."""
    shown = pairs[:EXAMPLES]
    title = escape(f"{len(shown)} of the {len(pairs)} right in {name} alone")
    headings = map(escape, ("question", "gold", found.a, found.b))
    table = Table(*headings, title=title, title_justify="left", show_lines=True)
    for question, one, other in shown:
        cells = (question.text, " | ".join(question.answers), one.answer, other.answer)
        table.add_row(*(Text(harmless(cell) or "(none)") for cell in cells))
    return [table] if shown else []
