"""Asks an agent: `python -m flows chat --run NAME`, or `--model` with a reference, folder or hub id.

Nothing is written, and the accelerator's lock is left alone: a conversation may last, and trainings would wait for it.
"""

from __future__ import annotations

import argparse
import io
import logging
import math
import os
import sys

from agent_r1 import params
from agent_r1.harmless import harmless_lines
from agent_r1.inspection.chat import chat
from agent_r1.params import RunId
from agent_r1.rollout.sampling import EngineError
from flows.policies import Policy
from flows.stage import SHOW_TRACEBACK, add_run_arguments


def main() -> None:
    """The command line. What a user can mend ends as one line and exit code 1."""
    given = _arguments()
    for stream in (sys.stdin, sys.stdout):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # bytes that are no text, text that the terminal cannot show
    logging.getLogger("agent_r1").setLevel(logging.WARNING)  # it has a line per engine
    try:
        settings = params.load()
        if given.run:
            policy = Policy.of_run(settings, RunId(given.run, given.seed, given.sweep))
        else:
            policy = Policy.named(given.model) if given.model else Policy.of_warm_start(settings)
        chat(
            policy.as_trained(settings),
            policy.path,
            policy.title,
            policy.updates,
            beneath=policy.beneath(settings),
            question=given.question,
            temperature=given.temperature,
            seed=given.draws or 0,
        )
    except (ValueError, OSError, EngineError) as fault:
        if os.environ.get(SHOW_TRACEBACK):
            raise
        sys.exit(harmless_lines(str(fault)))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Asks an agent questions: typed, or one per line of standard input.",
        epilog="Without --run and --model the warm start answers. Engine servers must not be those of a training.",
    )
    add_run_arguments(parser, required=False)
    of_a_model = "in place of --run: models:/agent_r1@champion, or a folder or hub id with a chat template"
    parser.add_argument("--model", help=of_a_model)
    parser.add_argument("--question", metavar="TEXT", help="answers this one and ends")
    parser.add_argument("--temperature", type=float, default=0.0, help="0, the default, is greedy; training has 1")
    parser.add_argument("--draws", type=int, metavar="SEED", help="of what is drawn with a temperature above 0")
    given = parser.parse_args()
    if given.run and given.model:
        parser.error("argument --model: not allowed with argument --run")
    if not given.run and (given.seed is not None or given.sweep):
        parser.error("--seed and --sweep tell apart runs; give --run")
    if not 0 <= given.temperature < math.inf:
        parser.error(f"--temperature is {given.temperature}; give 0 or more")
    if given.draws is not None and not given.temperature:
        parser.error("--draws has no effect at temperature 0; give --temperature")
    return given
