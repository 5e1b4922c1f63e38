"""The agent of docs/agents.md, run as the page says, and a training with an agent outside beside the built-in one."""

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
from agent_r1.params.agents import AgentParams
from agent_r1.params.stages import TransformersParams
from agent_r1.records import Credit, Outcome, Trajectory
from agent_r1.rollout.chat import Chat
from agent_r1.rollout.engines import TransformersEngine
from agent_r1.rollout.episode import PLAY
from agent_r1.rollout.sampling import Action, Actor, Engine, Request
from agent_r1.tables import read_rows
from agent_r1.tools.search import search_tool
from agent_r1.training import loop
from agent_r1.training.loop import Training, iterate
from tests.agents.conftest import QUESTION, InProcess, Policy, require_logged
from tests.agents.test_playing import as_built_in, bits
from tests.fixtures import ONE_ACTION

ROOT = Path(__file__).parents[2]
CALL = '<think>Who made it?</think><tool_call>{"name": "search", "arguments": {"query": "Low Tide"}}</tool_call>'


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
    """Rows, credit of `agent_r1` and weights of two iterations, with one action an episode."""

    def start(settings: Any, config: Any, model: Any, end_ids: Sequence[int]) -> Engine:
        actor = Actor(model=str(model), end_ids=end_ids, max_tokens=128, temperature=1.0, dtype="auto")
        return OneByOne(TransformersParams(batch_size=1), actor)

    monkeypatch.setattr(loop, "start_engine", start)
    task = one_action_task(dict.fromkeys(["A?", "B?", "C?", "D?"], "yes"), lambda _: "<answer>yes</answer>", steps=30)
    agent = as_built_in([search_tool(task.index, top_k=ONE_ACTION.top_k)])
    monkeypatch.setattr(playing, "Programs", type("One", (InProcess,), {"agent": staticmethod(agent)}))
    own = ONE_ACTION.model_copy(update={"order": "exact_arrival"})
    agents = {"mine": AgentParams(function="tests.agents.conftest:solve", timeout_s=120.0)}
    results = []
    for env in (own, own.model_copy(update={"agents": agents, "agent": "mine"})):
        with open_training(task, {"iterations": 2, "credit": {"estimator": "grpo"}}, env) as training:
            iterate(training)
            rows = [row for each in range(2) for row in read_rows(training.folder.trajectories(each), Trajectory)]
            credits_ = [row for each in range(2) for row in read_rows(training.folder.credit(each), Credit)]
            advantages = [(each.return_, each.advantages.tolist()) for each in credits_]
            weights = {name: each.tolist() for name, each in training.learner.policy.state_dict().items()}
        assert {Outcome.ANSWERED, Outcome.MALFORMED} <= {each.outcome for each in rows}
        results.append((bits(rows), advantages, weights))
        shutil.move(tmp_path / "run", tmp_path / f"run{len(results)}")
    assert results[0] == results[1]
