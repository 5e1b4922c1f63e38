"""Asks an agent: `agent-r1 chat --run NAME`, or `--model` with a reference, folder or hub id, or `--endpoint`.

Nothing is written, and the accelerator's lock is left alone: a conversation may last, and trainings would wait for it.
"""

from __future__ import annotations

import io
import logging
import sys

from agent_r1 import params
from agent_r1.http.endpoint import Endpoint
from agent_r1.inspection.agent import open_agent
from agent_r1.inspection.chat import Remote, Session, chat
from agent_r1.tools import own
from flows.policies import chosen

PATIENCE_S = 600.0  # with an agent that is served, for one answer


def ask(
    run: str | None = None,
    seed: int | None = None,
    sweep: str = "",
    model: str | None = None,
    endpoint: str | None = None,
    *,
    temperature: float = 0.0,
    question: str | None = None,
    draws: int | None = None,
) -> None:
    """Asks a policy of this project, or `model` at an `endpoint`. Raises ValueError for what does not go together."""
    for stream in (sys.stdin, sys.stdout):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # bytes that are no text, text that the terminal cannot show
    logging.getLogger("agent_r1").setLevel(logging.WARNING)  # it has a line per engine
    if draws is not None and not temperature:
        raise ValueError("--draws has no effect at temperature 0; give --temperature")
    if endpoint and (run or seed is not None or sweep or temperature):
        raise ValueError(
            "--run, --seed, --sweep and --temperature are said where the agent is served, not to --endpoint"
        )
    if endpoint:
        served = Endpoint(endpoint, timeout_s=PATIENCE_S)
        chat(Remote.opened(served, model), question)
        return
    settings = params.load()
    policy = chosen(settings, run, seed, sweep, model)
    trained, beneath = policy.as_trained(settings), policy.beneath(settings)
    own.require(trained.env)
    agent = open_agent(trained, policy.path, policy.updates, beneath=beneath, temperature=temperature)
    title = policy.title if run or model else f"{policy.title}, untrained (see --run),"
    chat(Session.opened(agent, draws or 0, title), question)
