"""Serves an agent with its tools: `agent-r1 serve_agent --model models:/agent_r1@champion`.

It speaks OpenAI's chat completions, and holds no lock: it may last for months, and trainings would wait for it.
"""

from __future__ import annotations

import logging

from agent_r1 import params
from agent_r1.http.endpoint import ENDPOINT_KEY
from agent_r1.http.guard import open_to_all
from agent_r1.inspection.agent import open_agent
from agent_r1.inspection.served import serve
from agent_r1.tools import own
from flows.policies import chosen

logger = logging.getLogger(__name__)


def serve_agent(
    run: str | None, seed: int | None, sweep: str, model: str | None, *, temperature: float, host: str, port: int
) -> None:
    """Answers until the process is told to end; who asks it needs no file of the project."""
    settings = params.load()
    policy = chosen(settings, run, seed, sweep, model)
    if warning := open_to_all(ENDPOINT_KEY, host, "ask it, and have it use its tools as you"):
        logger.warning(warning)
    trained, beneath = policy.as_trained(settings), policy.beneath(settings)
    own.require(trained.env)
    with open_agent(trained, policy.path, policy.updates, beneath=beneath, temperature=temperature) as agent:
        serve(agent, policy.name, host=host, port=port, temperature=temperature)
