"""Two evaluations side by side: `python -m flows compare ppo base_tool_call`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from agent_r1.project import QUESTIONS, evaluate_dir
from rich.console import Console, Group
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from agent_r1 import params
from agent_r1.evaluation import comparison
from agent_r1.evaluation.comparison import Comparison, Pair, read_evaluation
from agent_r1.evaluation.statistics import Interval
from agent_r1.params import SWEEP
from agent_r1.params.sections import nearest
from agent_r1.records import Question
from agent_r1.tables import read_rows

EXAMPLES = 3  # questions shown of each kind


def compare(a: str, b: str, *, sweep: str | None = None, anyway: bool = False) -> Comparison:
    """Compares two evaluations on the same questions.

    Args:
        a: the label of an evaluation, or its folder.
        b: what it is compared with: differences are a less b.
        sweep: whose evaluations the labels are.
        anyway: also where they were not measured alike.

    Raises:
        ValueError: the two are one, or cannot be compared.
        FileNotFoundError: there is no such evaluation.
    """
    settings = params.load()
    folders = [_folder(a, sweep), _folder(b, sweep)]
    if folders[0].resolve() == folders[1].resolve():
        raise ValueError(f"{a} and {b} are the same evaluation; name two")
    return comparison.compare(
        read_evaluation(a, folders[0]),
        read_evaluation(b, folders[1]),
        read_rows(QUESTIONS, Question),
        samples=settings.evaluate.bootstrap_samples,
        seed=settings.evaluate.seed,
        anyway=anyway,
    )


def rendered(found: Comparison) -> Group:
    """The comparison for a terminal."""
    one, other = len(found.only_a_right), len(found.only_b_right)
    right = sum(pair.a.em == pair.b.em == 1 for pair in found.pairs)
    counts = (
        f"Of {len(found.pairs)} questions {one} are right in {found.a} alone, {other} in {found.b} alone, {right} in "
        f"both and {len(found.pairs) - one - other - right} in neither."
    )
    warning = [f"Not measured alike: {', '.join(found.differing)} differ."] if found.differing else []
    return Group(
        *(Text(line, style="bold red") for line in warning),
        _scores(found),
        Text(counts),
        *_examples(f"right in {found.a} alone", found.only_a_right, found),
        *_examples(f"right in {found.b} alone", found.only_b_right, found),
    )


def _folder(given: str, sweep: str | None) -> Path:
    labelled = evaluate_dir(given, sweep=sweep)
    for folder in (labelled, Path(given)):
        if (folder / "predictions.parquet").exists():
            return folder
    known = [path.parent.name for path in sorted(labelled.parent.glob("*/predictions.parquet"))]
    found = nearest(given, known) if known else "; evaluate it first, with `python -m flows evaluate`"
    raise FileNotFoundError(f"there is no evaluation {given!r} in {labelled.parent}, and no such folder{found}")


def _scores(found: Comparison) -> Table:
    table = Table(title=escape(f"{found.a} less {found.b}, 95 % intervals over questions"), title_justify="left")
    table.add_column("measure")
    for heading in (found.a, found.b, "difference"):
        table.add_column(escape(heading), justify="right")
    for row in found.measured:
        decimals = 1 if row.measure.startswith("tokens") else 3
        style = "bold" if row.difference.excludes_zero else ""
        cells = [_cell(row.a, decimals), _cell(row.b, decimals), _cell(row.difference, decimals, sign="+")]
        table.add_row(row.measure, *cells[:2], Text(cells[2], style=style))
    return table


def _cell(value: Interval, decimals: int, sign: str = "") -> str:
    mean, low, high = (f"{number:{sign}.{decimals}f}" for number in (value.mean, value.low, value.high))
    return f"{mean} ({low} to {high})"


def _examples(title: str, pairs: Sequence[Pair], found: Comparison) -> list[Table]:
    """A few of the questions; no table where there is none."""
    if not pairs:
        return []
    shown = pairs[:EXAMPLES]
    table = Table(title=escape(f"{len(shown)} of the {len(pairs)} {title}"), title_justify="left", show_lines=True)
    for heading in ("question", "gold", found.a, found.b):
        table.add_column(escape(heading))
    for pair in shown:
        cells = (pair.question.text, " | ".join(pair.question.answers), pair.a.answer, pair.b.answer)
        table.add_row(*(Text(cell or "(none)") for cell in cells))
    return [table]


def main() -> None:
    """The command line: compares and prints."""
    parser = argparse.ArgumentParser(description="Compares two evaluations on the same questions.")
    parser.add_argument("a", metavar="A", help="a label under outputs/evaluate, or the folder of an evaluation")
    parser.add_argument("b", metavar="B", help="what A is compared with: differences are A less B")
    parser.add_argument("--sweep", choices=[SWEEP], help="the labels are of this sweep's evaluations")
    parser.add_argument("--anyway", action="store_true", help="also where they were not measured alike")
    given = parser.parse_args()
    Console(width=None if sys.stdout.isatty() else 120).print(rendered(compare(**vars(given))))


if __name__ == "__main__":
    from flows.stage import clean_end

    with clean_end():
        main()
