"""What a policy that is paid for one part alone would learn, played against the real environment.

Every case is a farm and what it earns. It ends at a cap, at another part that takes the pay back, or at the number of
steps alone, which is why such a part must weigh little beside the answer.
"""

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from agent_r1.credit.rewards import step_rewards
from agent_r1.envs.base import Attempt
from agent_r1.envs.shared import Shared
from agent_r1.envs.tool_env import ToolEnv
from agent_r1.params import SHIPPED, load
from agent_r1.params.credit import RewardWeights
from agent_r1.records import Trajectory
from agent_r1.rollout.chat import Chat
from agent_r1.rollout.episodes import ScriptedSampler, collect
from agent_r1.tools.search import search_tool
from tests.cases import cases
from tests.envs.conftest import QUESTION, TitleSearch

PARAMS = load(Path(__file__).parents[2] / "params.yaml")
CREDIT = PARAMS.train.credit
MAX_STEPS = 5
LIMITS = load(SHIPPED).env.model_copy(
    update={"top_k": 2, "max_steps": MAX_STEPS, "max_tokens": 4096, "max_action_tokens": 256, "aborted_share": 0.0}
)
HONEST = ("<think>By whom?</think>? Low Tide", "<think>Born where?</think>? Mara Quill", "<think>Found.</think>= Tesk")
Play = Callable[..., Trajectory]


@pytest.fixture
def play(chat: Chat) -> Play:
    def _play(*script: str) -> Trajectory:
        env = ToolEnv(QUESTION, [search_tool(TitleSearch(), top_k=2)], max_steps=MAX_STEPS)
        attempt = Attempt(question_id="q", group=0, sample=0, env=lambda _: env)
        with Shared(LIMITS) as shared:
            [trajectory] = collect(ScriptedSampler([[*map(spelled, script)]], chat), chat, [attempt], shared, seed=0)
        assert len(trajectory.steps) == len(script)
        return trajectory

    return _play


def spelled(action: str) -> str:
    """An action of a case: `? QUERY` searches, `= TEXT` answers, behind a thought or none; others stand as they are."""
    thought, mark, text = re.fullmatch(r"((?:<think>.*</think>)?)([?=]?) ?(.*)", action).groups()  # type: ignore[union-attr]
    call = json.dumps({"name": "search", "arguments": {"query": text}})
    return thought + {"?": f"<tool_call>{call}</tool_call>", "=": f"<answer>{text}</answer>", "": text}[mark]


def earned(trajectory: Trajectory, **weights: float) -> float:
    chosen = RewardWeights.model_validate({**dict.fromkeys(RewardWeights.model_fields, 0.0), **weights})
    params = CREDIT.model_copy(update={"rewards": chosen})
    return float(step_rewards(trajectory, params, LIMITS.max_tokens)[0].sum())


def test_what_an_honest_episode_earns(play: Play) -> None:
    honest = play(*HONEST)
    parts = {name: earned(honest, **{name: 1.0}) for name in RewardWeights.model_fields}
    tokens = sum(step.action_stop - step.action_start for step in honest.steps)
    ones = dict.fromkeys(("agent_r1", "success", "em", "f1", "grounded", "think"), 1.0)
    others = {"valid_call": 2.0, "progress": 2.0, "length": -float(tokens)}
    assert parts == pytest.approx(dict.fromkeys(RewardWeights.model_fields, 0.0) | ones | others)


@cases("times, script, totals")
def test_farms_earn_by_hand(play: Play, times: int, script: list[str], totals: dict[str, float]) -> None:
    played = play(*script * times)
    for parts, total in totals.items():
        assert earned(played, **dict.fromkeys(parts.split(), 1.0)) == pytest.approx(total), parts
