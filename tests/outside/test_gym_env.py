"""Environments of gymnasium: some of its own, and some that nobody should have written."""

import re
from pathlib import Path
from typing import Any

import pytest

from agent_r1.envs.kinds import attempts_at, played_by, warn_of_alike
from agent_r1.outside.gym_env import GymEnv, plain, require_gymnasium
from agent_r1.records import CallStatus, Outcome, Trajectory
from agent_r1.rollout.chat import Chat
from agent_r1.rollout.episodes import ScriptedSampler, collect
from agent_r1.tools.toolbox import own_sources
from tests.cases import cases, tables
from tests.outside.worlds import asked, collected, limits, play, shared

WORLDS = tables(Path(__file__).parent)["gym_worlds"]
ICE, SAID, SEES, TAXI = (WORLDS[name] for name in ("ice", "said", "sees", "taxi"))
SOURCE = """
import itertools

import gymnasium
import numpy as np
from gymnasium import spaces

SECRETS = itertools.count()

class Said(gymnasium.Env):
    action_space = spaces.Text(20, charset="abc! ")
    observation_space = spaces.Text(20)

    def __init__(self, render_mode=None, **drawn):
        self.render_mode, self.drawn = render_mode, drawn

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.secret = self.np_random.integers(1000)
        return f"secret {self.secret}", {}

    def step(self, action):
        reward = float("nan") if "!" in action else float(len(action))
        said = f"you said {action}, I draw {self.np_random.integers(1000)}"
        return said, reward, False, False, {"success": action == "abc"}

    def render(self):
        return 7

class Drawn(Said):
    def reset(self, *, seed=None, options=None):
        return f"secret {next(SECRETS)}", {}

class Stuck(Said):
    def reset(self, *, seed=None, options=None):
        raise KeyError("board")

class Counted(Said):
    action_space = spaces.Discrete(2, start=5)

    def step(self, action):
        return "", action, False, False, {}

class Tenths(Said):
    action_space = spaces.Discrete(1)

    def step(self, action):
        return "", 0.1, False, False, {}

class Grid(Said):
    action_space = spaces.Discrete(3)
    left = 10

    def step(self, action):
        self.left -= 1
        reward = 1 - 0.9 * (10 - self.left) / 10 if action == 1 else 0  # as MiniGrid and BabyAI pay
        return "", reward, action > 0, not self.left, {}

class Sees(Said):
    observation_space = spaces.Dict(image=spaces.Box(0, 255, (9, 9, 20)), at=spaces.Box(0, 9), mission=spaces.Text(9))

    def reset(self, *, seed=None, options=None):
        return {"image": np.arange(1620).reshape(9, 9, 20), "at": np.array([1, 2]), "mission": "go home"}, {}

def told(observed):
    return f"{observed['mission'].upper()}, from {observed['at'][0]}"

class Boxed(Said):
    action_space = spaces.Box(0, 1)

for kind in (Said, Drawn, Stuck, Boxed, Grid, Sees, Counted, Tenths):
    gymnasium.register(f"{kind.__name__}-v0", kind)
"""
ROW = asked("gymnasium", {"name": "w", "seed": 7})


@pytest.fixture(autouse=True)
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "some_worlds.py").write_text(SOURCE)
    monkeypatch.syspath_prepend(str(tmp_path))


def made(params: dict[str, Any], seed: int = 0, row: int = 7, **changes: Any) -> GymEnv:
    known = shared(gymnasium={"w": params}, **{"max_steps": 6, **changes})
    return GymEnv(asked("gymnasium", {"name": "w", "seed": row}), known, seed)


def test_frozen_lake_is_walked_to_its_goal(chat: Chat) -> None:
    env = made(ICE)
    *before, last = play(env, "down", "Down", "RIGHT", "Right", "<think>near</think><answer>Down</answer>", "Right")
    assert env.user == "Win.\n\nActions: Left, Down, Right, Up.\n\n[S]FFF\nFHFH\nFFFH\nHFFG"
    assert before[0].observations == ("  (Down)\nSFFF\n[F]HFH\nFFFH\nHFFG",)
    assert [step.rewards["think"] for step in before] == [0, 0, 0, 0, 1]
    assert [(call.tool, call.arguments, call.status) for call in last.calls] == [("move", '"Right"', CallStatus.OK)]
    assert (last.outcome, last.rewards) == (Outcome.ENDED, {"think": 0.0, "env": 1.0, "success": 1.0})
    # The loop plays two episodes from one row: one walks to the goal, one into a hole.
    known = shared(gymnasium={"w": ICE}, max_steps=6, max_tokens=2000)
    found = collected(GymEnv, ROW, known, chat, "Down Down Right Right Down Right", "Right Down")
    assert {each.outcome for each in found} == {Outcome.ENDED}
    assert [(each.success, len(each.steps)) for each in found] == [(1.0, 6), (0.0, 2)]


def test_chance_plays_it_for_its_floor(chat: Chat) -> None:
    """40 walks on the ice without slips, drawn by their seeds, differ from each other, and most are lost."""

    def play_all(world: dict[str, Any]) -> list[Trajectory]:
        with shared(gymnasium={"w": world}, max_steps=20, max_tokens=4000) as known:
            attempts, scripts = played_by("random", attempts_at([ROW], known, samples=40), [ROW], seed=0)
            return collect(ScriptedSampler(scripts, chat), chat, attempts, known, seed=0)

    found = play_all(ICE)
    moves = {call.arguments for each in found for step in each.steps for call in step.calls}
    assert moves == {'"Left"', '"Down"', '"Right"', '"Up"'}
    assert len({len(each.steps) for each in found}) > 5
    assert sum(each.success for each in found) < 10
    with pytest.raises(ValueError, match="chance has no move in a world that takes text"):
        play_all(SAID)


@cases("world, success, moves, succeeds")
def test_a_play_shows_the_success_that_is_asked_for(world: str, success: Any, moves: list[str], succeeds: bool) -> None:
    env = made(WORLDS[world] | {"success": success}, max_steps=len(moves))
    assert play(env, *moves)[-1].rewards["success"] == float(succeeds)


def test_a_world_without_success_is_refused_at_its_end_at_the_latest() -> None:
    with pytest.raises(ValueError, match=r'env\.gymnasium\.w: the info of FrozenLake-v1 has no "success"; say under'):
        play(made(ICE | {"success": "info"}), "Right", "Down")


def test_all_of_an_observation_is_shown_and_its_mission_is_not_cut() -> None:
    env, short = made(SEES, max_result_characters=9000), made(SEES, max_result_characters=100)
    play(env)
    play(short)
    mission, at, image = env.user.removeprefix("Win.\n\n").split("\n")
    assert (mission, at) == ("mission: go home", "at: [1 2]")
    assert [int(each) for each in re.findall(r"\d+", image)] == [*range(1620)]
    assert "mission: go home\nat: [1 2]\nimage: [[[ 0" in short.user
    assert "characters left out]" in short.user


@cases("observation, shown")
def test_a_key_or_a_function_says_what_is_shown(observation: str, shown: str) -> None:
    env = made(SEES | {"observation": observation})
    play(env)
    assert env.user == f"Win.\n\n{shown}"
    named = "observation w" in own_sources(limits(gymnasium={"w": SEES | {"observation": observation}}))
    assert named == (":" in observation), "another function is another run"


def test_test_rows_that_begin_as_training_rows_are_counted(caplog: pytest.LogCaptureFixture) -> None:
    rows = []
    for name in ("ice", "taxi"):
        for seed, split in enumerate(("train", "train", "dev", "test", "test")):
            fields = {"question_id": f"{name}-{seed}", "dataset": name, "split": split, "text": f"{name}, seed {seed}"}
            rows.append(asked("gymnasium", {"name": name, "seed": seed}, **fields))
    with shared(gymnasium={"ice": ICE, "taxi": TAXI}) as known:
        warn_of_alike(rows, known)
    [record] = caplog.records
    assert record.message.startswith("ice: 2 of 2 test rows begin as a training row does, such as ice-3 and ice-1")


def test_what_is_no_move_is_told_and_costs_a_step() -> None:
    call = '<tool_call>{"name": "go", "arguments": {}}</tool_call>'
    steps = play(made(ICE, max_steps=5), "Jump", call, "", "Left", "")
    assert [step.call_status.value for step in steps] == ["failed", "unknown_tool", "malformed", "ok", "malformed"]
    assert steps[0].observations == ("Error: there is no action 'Jump', only Left, Down, Right, Up",)
    assert steps[1].observations == ("Error: there are no tools. Write one action between <answer> and </answer>.",)
    assert [step.rewards["env"] for step in steps] == [0.0] * 5
    assert (steps[4].outcome, steps[4].rewards["success"]) == (Outcome.MALFORMED, 0.0)
    with pytest.raises(RuntimeError, match="no step is left"):
        play(made(ICE, max_steps=1), "Left", "Left")


def test_its_own_limit_and_ours_are_turn_limits() -> None:
    cut = {**ICE, "kwargs": {**ICE["kwargs"], "max_episode_steps": 2}}
    for env in (made(cut), made(ICE, max_steps=2)):
        assert [step.outcome for step in play(env, "Left", "Left")] == [None, Outcome.TURN_LIMIT]


def test_a_row_decides_the_beginning_and_the_episode_the_rest() -> None:
    envs = [made(SAID, seed=seed, row=row) for seed, row in [(1, 7), (1, 7), (2, 7), (1, 8)]]
    drawn = [play(env, "a", "b")[1].observations[0] for env in envs]
    assert envs[0].user == envs[1].user == envs[2].user != envs[3].user
    assert drawn[0] == drawn[1] == drawn[3] != drawn[2]
    taxi = made(TAXI, max_result_characters=30)
    play(taxi)
    assert taxi.user.startswith("Take them home.\n\nActions: South, North, ")
    assert "characters left out]" in taxi.user


def test_text_is_taken_as_it_is_and_moves_are_counted_from_the_first_of_their_space() -> None:
    steps = play(made(SAID, max_steps=3), "ab", "xyz", "abc")
    assert steps[0].observations[0].startswith("you said ab, I draw")
    assert steps[0].rewards["env"] == 2.0
    assert (steps[1].call_status, steps[1].rewards["env"]) == (CallStatus.FAILED, 0.0)
    assert (steps[2].outcome, steps[2].rewards["success"]) == (Outcome.TURN_LIMIT, 1.0), "its info says so"
    with pytest.raises(ValueError, match=r"env\.gymnasium\.w gave the reward nan; a reward is a finite number"):
        play(made(SAID), "a!")
    counted = made({"id": "some_worlds:Counted-v0", "actions": ["a", "b"], "success": "terminated"})
    assert [step.rewards["env"] for step in play(counted, "b", "a")] == [6.0, 5.0]


@cases("drawn, shown")
def test_colours_become_brackets(drawn: str, shown: str) -> None:
    assert plain(drawn) == shown


@cases("setup, message")
def test_rows_that_are_refused(setup: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        require_gymnasium([asked("gymnasium", setup)], limits(gymnasium={"w": ICE}))
    require_gymnasium([ROW], limits(gymnasium={"w": ICE, "x": {"id": "no-v0"}}))  # what no row names is not made


@cases("name, changes, message")
@pytest.mark.filterwarnings("ignore:.*possible render_modes")
def test_worlds_that_are_refused(name: str, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        require_gymnasium([ROW], limits(gymnasium={"w": WORLDS.get(name, {}) | changes}))
