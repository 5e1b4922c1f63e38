"""What a policy that is paid for one part alone would learn, played against the real environment.

Every test shows the farm, what it earns, and where it ends: a cap, another part that takes the pay back, or nothing
but the number of steps, which is why such a part must weigh little beside the answer.
"""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from agent_r1.credit.rewards import step_rewards
from agent_r1.envs.base import Attempt
from agent_r1.envs.shared import Shared
from agent_r1.envs.tool_env import ToolEnv
from agent_r1.params import SHIPPED, load
from agent_r1.params.credit import RewardWeights
from agent_r1.records import Outcome, Trajectory
from agent_r1.rollout.chat import Chat
from agent_r1.rollout.episodes import ScriptedSampler, collect
from agent_r1.tools.search import search_tool
from tests.envs.conftest import QUESTION, TitleSearch

PARAMS = load(Path(__file__).parents[2] / "params.yaml")
CREDIT = PARAMS.train.credit
MAX_STEPS = 5
LIMITS = load(SHIPPED).env.model_copy(
    update={"top_k": 2, "max_steps": MAX_STEPS, "max_tokens": 4096, "max_action_tokens": 256, "aborted_share": 0.0}
)
Play = Callable[..., Trajectory]


@pytest.fixture
def play(chat: Chat) -> Play:
    def _play(*script: str) -> Trajectory:
        env = ToolEnv(QUESTION, [search_tool(TitleSearch(), top_k=2)], max_steps=MAX_STEPS)
        attempt = Attempt(question_id="q", group=0, sample=0, env=lambda _: env)
        with Shared(LIMITS) as shared:
            [trajectory] = collect(ScriptedSampler([script], chat), chat, [attempt], shared, seed=0)
        assert len(trajectory.steps) == len(script)
        return trajectory

    return _play


def search(query: str, thought: str = "") -> str:
    opening = f"<think>{thought}</think>" if thought else ""
    return f"{opening}<tool_call>{json.dumps({'name': 'search', 'arguments': {'query': query}})}</tool_call>"


def answer(text: str, thought: str = "") -> str:
    return f"<think>{thought}</think><answer>{text}</answer>" if thought else f"<answer>{text}</answer>"


HONEST = (search("Low Tide", "By whom?"), search("Mara Quill", "Born where?"), answer("Tesk", "Found."))


def earned(trajectory: Trajectory, **weights: float) -> float:
    chosen = RewardWeights.model_validate({**dict.fromkeys(RewardWeights.model_fields, 0.0), **weights})
    params = CREDIT.model_copy(update={"rewards": chosen})
    return float(step_rewards(trajectory, params, LIMITS.max_tokens)[0].sum())


def test_what_an_honest_episode_earns(play: Play) -> None:
    parts = {name: earned(play(*HONEST), **{name: 1.0}) for name in RewardWeights.model_fields}
    tokens = sum(step.action_stop - step.action_start for step in play(*HONEST).steps)
    ones = dict.fromkeys(("agent_r1", "success", "em", "f1", "grounded", "think"), 1.0)
    others = {"valid_call": 2.0, "progress": 2.0, "length": -float(tokens)}
    assert parts == pytest.approx(dict.fromkeys(RewardWeights.model_fields, 0.0) | ones | others)


def test_think_is_farmed_with_empty_words_and_capped_at_1(play: Play) -> None:
    """Filler earns what thoughts earn; more steps of it, or more blocks in a step, earn no more."""
    assert earned(play(answer("", "x")), think=1.0) == 1
    assert earned(play(*[search("zzz", "x")] * MAX_STEPS), think=1.0) == pytest.approx(1)
    assert earned(play(*["<think>x</think>" * 3] * MAX_STEPS), think=1.0) == 0
    assert earned(play(*["<think>x</think>"] * MAX_STEPS), think=1.0) == 0, "a thought that leads to nothing"


def test_grounded_is_farmed_by_copying_any_word_and_paid_once(play: Play) -> None:
    copied = play(search("Low Tide"), answer("film"))
    assert earned(copied, grounded=1.0) == 1
    assert earned(copied, em=1.0) == 0
    twice = play(search("Low Tide"), search("Mara Quill Low Tide"), answer("Mara Quill"))
    assert earned(twice, grounded=1.0) == 1, "in two observations, of one answer"


def test_grounded_is_not_farmed_by_saying_the_answer_first(play: Play) -> None:
    """An error message repeats the name of a tool that does not exist; the query of a search comes back nowhere."""
    wished = '<tool_call>{"name": "Tesk", "arguments": {}}</tool_call>'
    assert earned(play(wished, answer("Tesk")), grounded=1.0) == 0
    assert earned(play(search("tesk"), answer("Tesk")), grounded=1.0) == 0
    assert earned(play(search("Low Tide"), answer("")), grounded=1.0) == 0


def test_valid_call_is_farmed_by_calls_for_nothing_and_repeat_call_takes_it_back(play: Play) -> None:
    """It has no cap but the number of steps; a letter that changes in every query evades the penalty too."""
    repeated = play(*[search("zzz")] * MAX_STEPS)
    assert earned(repeated, valid_call=1.0) == MAX_STEPS > earned(play(*HONEST), valid_call=1.0)
    assert earned(repeated, valid_call=1.0, repeat_call=1.0) == 1
    varied = play(*[search("z" * n) for n in range(1, MAX_STEPS + 1)])
    assert earned(varied, valid_call=1.0, repeat_call=1.0) == MAX_STEPS


def test_progress_pays_a_gold_passage_once(play: Play) -> None:
    """Repeating earns nothing. Putting every name into one query does, and so does never answering."""
    assert earned(play(*[search("Low Tide")] * MAX_STEPS), progress=1.0) == 1
    assert earned(play(*[search("Low Tide Mara Quill")] * MAX_STEPS), progress=1.0) == len(QUESTION.gold_titles)


@pytest.mark.parametrize("penalty", ["failed_call", "repeat_call"])
def test_penalties_of_calls_are_evaded_by_never_calling(play: Play, penalty: str) -> None:
    broken = '<tool_call>{"name": "seek", "arguments": {}}</tool_call>'
    assert earned(play(*[broken] * MAX_STEPS), **{penalty: 1.0}) == -(MAX_STEPS if penalty == "failed_call" else 4)
    assert earned(play(answer("no idea")), **{penalty: 1.0}) == 0


def test_no_answer_and_agent_r1s_format_are_satisfied_by_answering_anything_at_once(play: Play) -> None:
    """Before it has learnt to find answers, a policy gains by giving up early: 0 is more than -1/2."""
    searched, gave_up = play(*[search("Low Tide")] * MAX_STEPS), play(answer(""))
    assert searched.outcome is Outcome.TURN_LIMIT
    assert (earned(searched, no_answer=1.0), earned(gave_up, no_answer=1.0)) == (-1, 0)
    assert (earned(searched, agent_r1=1.0), earned(gave_up, agent_r1=1.0)) == (-0.5, 0)


def test_f1_is_farmed_by_naming_every_candidate_and_em_is_not(play: Play) -> None:
    # Precision 1/3, recall 1: F1 = 1/2.
    hedged = play(search("Low Tide"), answer("Tesk Mara Quill"))
    assert earned(hedged, f1=1.0) == pytest.approx(0.5)
    assert earned(hedged, em=1.0) == 0


def test_em_is_blind_to_how_an_answer_was_found(play: Play) -> None:
    """A lucky guess and an episode full of malformed calls earn it whole; `grounded` and `agent_r1` tell them apart."""
    guessed, messy = play(answer("Tesk")), play("hm", search("Mara Quill"), answer("Tesk"))
    assert (earned(guessed, em=1.0), earned(messy, em=1.0)) == (1, 1)
    assert (earned(guessed, grounded=1.0), earned(messy, grounded=1.0)) == (0, 1)
    assert (earned(guessed, agent_r1=1.0), earned(messy, agent_r1=1.0)) == (1, -0.5)
