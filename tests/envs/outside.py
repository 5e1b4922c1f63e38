"""Episodes in worlds that others wrote, played by hand."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

from agent_r1.envs.base import Env, Transition
from agent_r1.envs.shared import Shared
from agent_r1.params import load
from agent_r1.params.sections import override, validated
from agent_r1.params.stages import EnvParams
from agent_r1.records import Question

SHIPPED = load(Path(__file__).parents[2] / "params.yaml").env


def limits(**changes: Any) -> EnvParams:
    return validated(EnvParams, override(SHIPPED.model_dump(), changes), "env")


def shared(**changes: Any) -> Shared:
    return Shared(limits(**changes))


def asked(env: str, setup: Any, **fields: Any) -> Question:
    text = setup if isinstance(setup, str) else json.dumps(setup)
    known = {"question_id": "q1", "dataset": "d", "split": "train", "text": "Win.", "strata": {}}
    return Question(**{**known, "env": env, "setup": text, **fields})


async def played(env: Env, *actions: str) -> list[Transition]:
    """What an opened environment answers; `<answer>` around an action that has no tags."""
    written = [action if "<" in action or not action else f"<answer>{action}</answer>" for action in actions]
    try:
        await env.open()
        return [await env.step(action) for action in written]
    finally:
        await env.close()


def play(env: Env, *actions: str) -> list[Transition]:
    return asyncio.run(played(env, *actions))
