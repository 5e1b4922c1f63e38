"""Policies that answer questions with tools: for a chat, a server, and MLflow, which loads a registered version."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

from pydantic import TypeAdapter

from agent_r1 import params
from agent_r1.params.places import project_root
from agent_r1.rollout.episode import StepView
from agent_r1.serving.agent import Agent, open_agent
from agent_r1.tools.toolbox import require_own
from agent_r1.tracking.answering import Ask, Episode
from agent_r1.tracking.registry import Descriptor
from flows.policies import Policy, of_descriptor
from flows.stage import prepare_process


def agent_of(policy: Policy, settings: params.Params, temperature: float) -> AbstractContextManager[Agent]:
    """A policy as an agent with its tools, in the environment that it was trained in.

    It holds no lock: a conversation or a server may last, and trainings would wait for it.
    """
    trained_settings = policy.as_trained(settings)
    require_own(trained_settings.env)
    return open_agent(trained_settings, policy.weights(settings), temperature)


@contextmanager
def opened(descriptor: Path, settings: Path) -> Iterator[Ask]:
    """The agent of a version's `descriptor`, with the parameters that it was registered with and this project's data.

    It answers greedily, as `agent-r1 chat` does. The process works in the project's root from then on. Raises as
    `folder_of`, and ValueError outside of a project.
    """
    registered = TypeAdapter(Descriptor).validate_json(descriptor.read_bytes())
    loaded = params.load(settings)
    project_root()
    prepare_process()
    with agent_of(of_descriptor(registered), loaded, temperature=0.0) as agent:
        yield lambda question: _episode(list(agent.ask(question, seed=0)))


def _episode(views: list[StepView]) -> Episode:
    calls = [pair for view in views for pair in zip(view.step.calls, view.observations, strict=False)]
    return calls, views[-1].answer or views[-1].fault
