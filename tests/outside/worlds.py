"""Episodes in worlds that others wrote, played by hand."""

import asyncio
import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from agent_r1.envs.base import Attempt, Env, Transition
from agent_r1.envs.shared import Shared
from agent_r1.params import load
from agent_r1.params.env import EnvParams
from agent_r1.params.sections import override, validated
from agent_r1.records import Question, Trajectory
from agent_r1.rollout.chat import Chat
from agent_r1.rollout.episodes import ScriptedSampler, collect

SHIPPED = load(Path(__file__).parents[2] / "params.yaml").env


def limits(**changes: Any) -> EnvParams:
    return validated(EnvParams, override(SHIPPED.model_dump(), changes), "env")


def shared(**changes: Any) -> Shared:
    return Shared(limits(**changes))


def asked(env: str, setup: Any, **fields: Any) -> Question:
    text = setup if isinstance(setup, str) else json.dumps(setup)
    known = {"question_id": "q1", "dataset": "d", "split": "train", "text": "Win.", "strata": {}}
    return Question(**{**known, "env": env, "setup": text, **fields})


def call(tool: str, **arguments: Any) -> str:
    """An action that calls a tool."""
    return f"<tool_call>{json.dumps({'name': tool, 'arguments': arguments})}</tool_call>"


def collected(
    kind: Callable[..., Env], question: Question, known: Shared, chat: Chat, *scripts: str
) -> list[Trajectory]:
    """The trajectory of each episode in the policies' loop; a script is its answers, with blanks between them."""
    attempts = [
        Attempt(question_id=question.question_id, group=0, sample=sample, env=partial(kind, question, known))
        for sample, _ in enumerate(scripts)
    ]
    written = [[f"<answer>{answer}</answer>" for answer in script.split()] for script in scripts]
    with known:
        return collect(ScriptedSampler(written, chat), chat, attempts, known, seed=0)


async def played(env: Env, *actions: str) -> list[Transition]:
    """The replies of an opened environment; an action without tags gets `<answer>` around it."""
    written = [action if "<" in action or not action else f"<answer>{action}</answer>" for action in actions]
    try:
        await env.open()
        return [await env.step(action) for action in written]
    finally:
        await env.close()


def play(env: Env, *actions: str) -> list[Transition]:
    return asyncio.run(played(env, *actions))
