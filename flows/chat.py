"""Asks an agent: `python -m flows chat --run NAME`, or `--model` with a reference, folder or hub id, or `--endpoint`.

Nothing is written, and the accelerator's lock is left alone: a conversation may last, and trainings would wait for it.
"""

from __future__ import annotations

import argparse
import io
import logging
import os
import sys
from contextlib import AbstractContextManager

from agent_r1 import params
from agent_r1.endpoint import ENDPOINT_KEY, Endpoint
from agent_r1.harmless import harmless_lines
from agent_r1.inspection.chat import Remote, Session, chat
from agent_r1.rollout.sampling import EngineError
from agent_r1.serving.agent import open_agent
from flows.policies import add_policy_arguments, add_temperature, policy_of
from flows.stage import SHOW_TRACEBACK

PATIENCE_S = 600.0  # with an agent that is served, for one answer


def main() -> None:
    """The command line. What a user can mend ends as one line and exit code 1."""
    parser = _parser()
    given = _checked(parser)
    for stream in (sys.stdin, sys.stdout):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # bytes that are no text, text that the terminal cannot show
    logging.getLogger("agent_r1").setLevel(logging.WARNING)  # it has a line per engine
    try:
        if given.endpoint:
            endpoint = Endpoint(given.endpoint, timeout_s=PATIENCE_S)
            chat(Remote.opened(endpoint, given.model), endpoint.url, given.question)
        else:
            chat(*_opening(parser, given), given.question)
    except (ValueError, OSError, EngineError) as fault:
        if os.environ.get(SHOW_TRACEBACK):
            raise
        sys.exit(harmless_lines(str(fault)))


def _opening(parser: argparse.ArgumentParser, given: argparse.Namespace) -> tuple[AbstractContextManager[Session], str]:
    """Who is asked, yet to be loaded, and a name for people."""
    settings = params.load()
    policy = policy_of(parser, given, settings)
    own, beneath = policy.as_trained(settings), policy.beneath(settings)
    agent = open_agent(own, policy.path, policy.updates, beneath=beneath, temperature=given.temperature)
    return Session.opened(agent, given.draws or 0), policy.title


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description="Asks an agent questions: typed, or one per line of standard input.",
        epilog="Without --run and --model the warm start answers. Engine servers must not be those of a training.",
    )
    add_policy_arguments(parser)
    add_temperature(parser)
    of_an_agent = f"in place of a policy of this project: of a `python -m flows serve_agent`; its key: {ENDPOINT_KEY}"
    parser.add_argument("--endpoint", metavar="URL", help=of_an_agent)
    parser.add_argument("--question", metavar="TEXT", help="answers this one and ends")
    parser.add_argument("--draws", type=int, metavar="SEED", help="of what is drawn with a temperature above 0")
    return parser


def _checked(parser: argparse.ArgumentParser) -> argparse.Namespace:
    given = parser.parse_args()
    if given.draws is not None and not given.temperature:
        parser.error("--draws has no effect at temperature 0; give --temperature")
    if given.endpoint and (given.run or given.seed is not None or given.sweep or given.temperature):
        parser.error("--run, --seed, --sweep and --temperature are said where the agent is served, not to --endpoint")
    return given
