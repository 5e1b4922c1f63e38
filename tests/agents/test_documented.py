"""The agent of docs/agents.md, run as the page says, and a training with an agent outside beside the built-in one."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest

from agent_r1.agents import playing
from agent_r1.envs.kinds import attempts_at
from agent_r1.envs.shared import Shared
from agent_r1.params import SHIPPED, load
from agent_r1.params.env import AgentParams
from agent_r1.params.stages import TransformersParams
from agent_r1.records import Credit, Outcome, Trajectory
from agent_r1.rollout.chat import Chat
from agent_r1.rollout.engines import TransformersEngine
from agent_r1.rollout.episode import PLAY
from agent_r1.rollout.sampling import Action, Actor, Engine, Request
from agent_r1.tables import read_rows
from agent_r1.training import loop
from agent_r1.training.loop import Training, iterate
from tests.agents.test_gateway import QUESTION, Policy, require_logged
from tests.agents.test_playing import bits
from tests.fixtures import ONE_ACTION

ROOT = Path(__file__).parents[2]
CALL = '<think>Who made it?</think><tool_call>{"name": "search", "arguments": {"query": "Low Tide"}}</tool_call>'
ONE_ANSWER = """
import httpx
from agent_r1.envs.base import parse_action
from agent_r1.envs.tool_env import SYSTEM

TOOLS = [{tool}]

async def solve(task):
    messages = [dict(role="system", content=SYSTEM), dict(role="user", content=task.text)]
    async with httpx.AsyncClient(base_url=task.base_url, headers=dict(authorization=f"Bearer {{task.key}}")) as client:
        for _ in range(2):
            asked = dict(model=task.model, messages=messages, tools=TOOLS)
            answer = (await client.post("/chat/completions", json=asked)).json()
            if "error" in answer:
                return None
            said = answer["choices"][0]["message"]
            parsed = parse_action(said["content"] or "")
            if parsed.answer is not None:
                return parsed.answer
            named = dict(tool_call_id=said["tool_calls"][0]["id"]) if "tool_calls" in said else dict()
            messages += [said, dict(role="tool", content="Error.", **named)]
"""


def test_the_agent_of_the_page_answers(chat: Chat, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code = re.findall(r"```python\n(# my_agent\.py\n.*?)```", (ROOT / "docs/agents.md").read_text(), re.DOTALL)
    assert len(code[0].splitlines()) <= 29
    monkeypatch.chdir(tmp_path)
    Path("my_agent.py").write_text(code[0])
    agents = {"mine": AgentParams(function="my_agent:solve", timeout_s=120.0)}
    changed = {"agents": agents, "agent": "mine", "order": "arrival", "max_tokens": 400, "max_action_tokens": 100}
    policy = Policy(chat, [CALL, "<think>So.</think><answer>Quill</answer>"])
    with Shared(load(SHIPPED).env.model_copy(update=changed)) as shared:
        [row] = playing.collect(policy, chat, attempts_at([QUESTION], shared), shared, seed=3, play=PLAY)
        measured = shared.take_measures()
    assert (row.outcome, row.answer, row.success, row.context_starts) == (Outcome.ANSWERED, "Quill", 1.0, [0])
    assert "Low Tide is a film by Mara Quill." in chat.decode(row.token_ids.tolist())
    assert (measured["agent/requests"], measured["agent/kept_share"]) == (2.0, 1.0)
    require_logged(row, policy)


class OneByOne(TransformersEngine):
    """Takes requests as they come, and samples each alone."""

    async def act(self, request: Request) -> Action:
        [action] = self.sample([request])
        return action


def test_a_training_is_the_built_in_loops_bit_for_bit(
    one_action_task: Callable[..., Any],
    open_training: Callable[..., AbstractContextManager[Training]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Rows, credit of `agent_r1` and weights of three iterations, with one action an episode."""

    def start(settings: Any, config: Any, model: Any, end_ids: Sequence[int]) -> Engine:
        actor = Actor(model=str(model), end_ids=end_ids, max_tokens=128, temperature=1.0, dtype="auto")
        return OneByOne(TransformersParams(batch_size=1), actor)

    monkeypatch.setattr(loop, "start_engine", start)
    monkeypatch.chdir(tmp_path)
    task = one_action_task(dict.fromkeys(["A?", "B?", "C?", "D?"], "yes"), lambda _: "<answer>yes</answer>", steps=30)
    with Shared(ONE_ACTION, task.index) as shared:
        [tool] = [each.schema for each in shared.tools(0)]
    Path("one_answer.py").write_text(ONE_ANSWER.format(tool=tool))
    own = ONE_ACTION.model_copy(update={"order": "exact_arrival"})
    agents = {"mine": AgentParams(function="one_answer:solve", timeout_s=120.0)}
    results = []
    for env in (own, own.model_copy(update={"agents": agents, "agent": "mine"})):
        with open_training(task, {"iterations": 3, "credit": {"estimator": "grpo"}}, env) as training:
            iterate(training)
            rows = [read_rows(training.folder.trajectories(each), Trajectory) for each in range(3)]
            credits_ = [read_rows(training.folder.credit(each), Credit) for each in range(3)]
            weights = {name: each.clone() for name, each in training.learner.policy.state_dict().items()}
        results.append((rows, credits_, weights))
        shutil.move(tmp_path / "run", tmp_path / f"run{len(results)}")
    (rows, credits_, weights), (theirs, their_credits, their_weights) = results
    outcomes = {each.outcome for row in rows for each in row}
    assert {Outcome.ANSWERED, Outcome.MALFORMED} <= outcomes
    for one, other in zip(rows, theirs, strict=True):
        assert bits(one) == bits(other)
    for one, other in zip(credits_, their_credits, strict=True):
        for mine, its in zip(one, other, strict=True):
            assert (mine.return_, mine.advantages.tolist()) == (its.return_, its.advantages.tolist())
    assert all(weights[name].equal(their_weights[name]) for name in weights)
