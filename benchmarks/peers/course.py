"""What all contenders run: the same work, and the signs by which they take turns."""

from __future__ import annotations

import json
import sys
from typing import Any

from agent_r1.params import Params
from agent_r1.params.sections import override
from benchmarks.synthetic import shipped_with

TRL = "1.16.0"  # the release that is raced against
RUN = "grpo"  # of `runs`, but with as many questions as the published laps

_GO, _LAP = "go", "LAP "

_SHAPE: dict[str, Any] = {"runs": {RUN: {"rollout": {"questions": 24}}}}
# A price per token that is next to nothing, so that no group's advantages are all 0 and every trajectory is trained; in
# one optimiser step, as TRL takes it.
_ALL_TRAINED: dict[str, Any] = {"credit": {"rewards": {"length": 1e-3}}, "update": {"minibatches": 1}}
_PACKED: dict[str, Any] = {"packing": True}  # what trajectories begin with alike is computed once
_AHEAD: dict[str, Any] = {"rollout": {"ahead": 1}}
_REPLICAS: dict[str, Any] = {"vllm": {"replicas": 2}}
CONTENDERS: dict[str, dict[str, Any]] = {  # what is other than in params.yaml; the first is TRL
    f"TRL {TRL}": {},
    "all trajectories trained": {"runs": {RUN: _ALL_TRAINED}},
    "as shipped": {},
    "all trained, packed": {"runs": {RUN: _ALL_TRAINED}, "model": _PACKED},
    "as shipped, packed": {"model": _PACKED},
    "all trained, packed, one step ahead, two replicas": {
        "runs": {RUN: _ALL_TRAINED | _AHEAD},
        "model": _PACKED,
        "engine": _REPLICAS,
    },
}
FIRST = next(iter(CONTENDERS))


def settings_of(name: str) -> Params:
    """params.yaml for a contender."""
    return shipped_with(override(_SHAPE, CONTENDERS[name]))


def await_turn() -> None:
    """Waits until this contender is told to go a lap; ends the process where nobody will."""
    if sys.stdin.readline().strip() != _GO:
        sys.exit(0)


def tell_lap(**done: float) -> None:
    """Says that a lap is over, and what was done in it, as `Lap` has it."""
    print(f"{_LAP}{json.dumps(done)}", flush=True)


def turn() -> str:
    """The line that `await_turn` waits for."""
    return f"{_GO}\n"


def told(line: str) -> dict[str, Any] | None:
    """What `tell_lap` said in a line of a contender's output; None of other lines."""
    return json.loads(line.removeprefix(_LAP)) if line.startswith(_LAP) else None
