"""The prepare stage: `python -m flows.prepare`."""

from __future__ import annotations

from agent_r1 import params
from agent_r1.data.prepare import prepare as write_data
from agent_r1.project import PREPARED


def prepare() -> None:
    """Writes the questions and the passages of the configured data set."""
    write_data(params.load().prepare, PREPARED)


if __name__ == "__main__":
    from flows.stage import run_stage

    run_stage(prepare)
