"""The prepare stage: `agent-r1 prepare`."""

from __future__ import annotations

from agent_r1 import params
from agent_r1.data.prepare import prepare as write_data


def prepare() -> None:
    """Writes the questions and the passages of the configured data sets."""
    settings = params.load()
    write_data(settings.prepare, settings.places.prepared)
