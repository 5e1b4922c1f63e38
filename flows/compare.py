"""Two evaluations side by side: `python -m flows compare ppo base_tool_call`."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from rich.console import Console

from agent_r1 import params
from agent_r1.evaluation import comparison
from agent_r1.evaluation.comparison import Comparison, read_evaluation
from agent_r1.inspection.side_by_side import rendered
from agent_r1.params import SWEEP, Places
from agent_r1.params.sections import nearest
from agent_r1.records import Question
from agent_r1.tables import read_rows


def compare(a: str, b: str, *, sweep: str = "", anyway: bool = False) -> Comparison:
    """Compares two evaluations on the same questions, each given by its label (in a sweep) or its folder.

    Raises:
        ValueError: the two are one, or cannot be compared; `anyway` compares also what was not measured alike.
        FileNotFoundError: there is no such evaluation.
    """
    settings = params.load()
    folders = [_folder(settings.places, given, sweep) for given in (a, b)]
    if folders[0].resolve() == folders[1].resolve():
        raise ValueError(f"{a} and {b} are the same evaluation; name two")
    ours, theirs = read_evaluation(a, folders[0]), read_evaluation(b, folders[1])
    questions = read_rows(settings.places.questions, Question)
    return comparison.compare(ours, theirs, questions, settings.evaluate, anyway=anyway)


def _folder(places: Places, given: str, sweep: str) -> Path:
    labelled = places.evaluation(given, sweep)
    for folder in (labelled, Path(given)):
        if (folder / "predictions.parquet").exists():
            return folder
    known = [path.parent.name for path in sorted(labelled.parent.glob("*/predictions.parquet"))]
    found = nearest(given, known) if known else "; evaluate it first, with `python -m flows evaluate`"
    raise FileNotFoundError(f"there is no evaluation {given!r} in {labelled.parent}, and no such folder{found}")


def main() -> None:
    """The command line: compares and prints."""
    parser = argparse.ArgumentParser(description="Compares two evaluations on the same questions.")
    parser.add_argument("a", metavar="A", help="a label under outputs/evaluate, or the folder of an evaluation")
    parser.add_argument("b", metavar="B", help="what A is compared with: differences are A less B")
    parser.add_argument("--sweep", choices=[SWEEP], default="", help="the labels are of this sweep's evaluations")
    parser.add_argument("--anyway", action="store_true", help="also where they were not measured alike")
    given = parser.parse_args()
    Console(width=None if sys.stdout.isatty() else 120).print(rendered(compare(**vars(given))))
