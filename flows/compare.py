"""Two evaluations side by side: `python -m flows compare ppo base_tool_call`."""

from __future__ import annotations

import argparse
import sys

from rich.console import Console

from agent_r1 import params
from agent_r1.inspection.side_by_side import compared, rendered
from agent_r1.params import SWEEP


def main() -> None:
    """The command line: compares and prints."""
    parser = argparse.ArgumentParser(description="Compares two evaluations on the same questions.")
    parser.add_argument("a", metavar="A", help="a label under outputs/evaluate, or the folder of an evaluation")
    parser.add_argument("b", metavar="B", help="what A is compared with: differences are A less B")
    parser.add_argument("--sweep", choices=[SWEEP], default="", help="the labels are of this sweep's evaluations")
    parser.add_argument("--anyway", action="store_true", help="also where they were not measured alike")
    found = compared(params.load(), **vars(parser.parse_args()))
    Console(width=None if sys.stdout.isatty() else 120).print(rendered(found))
