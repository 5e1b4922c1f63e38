"""Serves an agent with its tools: `python -m flows serve_agent --model models:/agent_r1@champion`.

It speaks OpenAI's chat completions, and holds no lock: it may last for months, and trainings would wait for it.
"""

from __future__ import annotations

import argparse
import logging

from agent_r1 import params
from agent_r1.endpoint import ENDPOINT_KEY
from agent_r1.params import Params
from agent_r1.server import open_to_all
from agent_r1.serving.agent import open_agent
from agent_r1.serving.app import serve
from flows.policies import Policy, add_policy_arguments, add_temperature, policy_of

PORT = 8710

logger = logging.getLogger(__name__)


def serve_agent(settings: Params, policy: Policy, host: str, port: int, temperature: float) -> None:
    """Answers until the process is told to end; who asks it needs no file of the project."""
    if warning := open_to_all(ENDPOINT_KEY, host, "ask it, and have it use its tools as you"):
        logger.warning(warning)
    own, beneath = policy.as_trained(settings), policy.beneath(settings)
    with open_agent(own, policy.path, policy.updates, beneath=beneath, temperature=temperature) as agent:
        serve(agent, policy.name, host=host, port=port, temperature=temperature)


def main() -> None:
    parser = argparse.ArgumentParser(
        description="Serves an agent with its tools at http://HOST:PORT/v1, as OpenAI's chat completions.",
        epilog=f"Without --run and --model the warm start answers. {ENDPOINT_KEY} holds the key that clients send.",
    )
    add_policy_arguments(parser)
    add_temperature(parser)
    parser.add_argument("--host", default="127.0.0.1", help=f"another than this machine's own needs {ENDPOINT_KEY}")
    parser.add_argument("--port", type=int, default=PORT)
    given = parser.parse_args()
    settings = params.load()
    serve_agent(settings, policy_of(parser, given, settings), given.host, given.port, given.temperature)
