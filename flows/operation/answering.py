"""A registered version as MLflow loads it, by the files of `version/`, which are among its artifacts."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from pydantic import TypeAdapter

from agent_r1 import params
from agent_r1.params.places import project_root
from agent_r1.rollout.episode import StepView
from agent_r1.tracking.answering import Ask, Episode
from agent_r1.tracking.registry import Descriptor
from flows.policies import of_descriptor
from flows.stage import prepare_process


@contextmanager
def opened(descriptor: Path, settings: Path) -> Iterator[Ask]:
    """The agent of a descriptor, with the parameters that it was registered with and the data of this project.

    It answers greedily, as `agent-r1 chat` does. The process works in the project's root from then on. Raises as
    `folder_of`, and ValueError outside of a project.
    """
    made, stored = TypeAdapter(Descriptor).validate_json(descriptor.read_bytes()), params.load(settings)
    project_root()
    prepare_process()
    with of_descriptor(made).opened(stored, temperature=0.0) as agent:
        yield lambda question: _told(list(agent.ask(question, seed=0)))


def _told(views: list[StepView]) -> Episode:
    calls = [pair for view in views for pair in zip(view.step.calls, view.observations, strict=False)]
    return calls, views[-1].answer or views[-1].fault
