"""Agents without a model: what they say by hand, that they play the best there is, and that they start again."""

import asyncio
import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import get_args

import pytest

from agent_r1.envs.base import Attempt, Env, Transition
from agent_r1.envs.game_env import GameEnv
from agent_r1.envs.kinds import KINDS
from agent_r1.envs.scripts import Script, any_name, by_gold_titles, scripted, spoken
from agent_r1.envs.shared import Shared
from agent_r1.envs.tool_env import ToolEnv
from agent_r1.games import bandit, lake, sokoban
from agent_r1.games.bandit import demonstrated_arm
from agent_r1.games.kinds import GAMES
from agent_r1.games.lake import Ice
from agent_r1.games.players import Habits, Player, demonstrator
from agent_r1.games.sokoban import Room
from agent_r1.params import SHIPPED, load
from agent_r1.params.games import GameWorld
from agent_r1.records import CallStatus, Outcome, Question, Trajectory
from agent_r1.rollout.chat import Chat
from agent_r1.rollout.episodes import ScriptedSampler, collect
from agent_r1.search.base import Search
from agent_r1.tools.search import search_tool
from tests.cases import cases

LIMITS = load(SHIPPED).env.model_copy(update={"max_tokens": 8192, "max_action_tokens": 400, "aborted_share": 0.0})
SCRIPTS = {name: KINDS[name].scripts for name in GAMES}
NONE, ALWAYS = Habits(0.0, 0.0), Habits(1.0, 0.0)
BOARD = {"bandit": bandit.Board, "frozen_lake": lake.Board, "sokoban": sokoban.Board}
LAKE = lake.Board(rows=("SFH", "FFG"))
ROOM = sokoban.Board(rows=("#######", "#_P___#", "#__X_O#", "#_____#", "#######"))

Play = Callable[..., list[Trajectory]]


def turns(name: str, setup: str, seed: int) -> GameEnv:
    return GameEnv(name, setup, LIMITS, seed)


@pytest.fixture
def play(chat: Chat) -> Play:
    def run(name: str, script: Script, setups: list[str], seed: int = 0) -> list[Trajectory]:
        attempts = [
            Attempt(question_id=str(i), group=i, sample=0, env=partial(turns, name, setup))
            for i, setup in enumerate(setups)
        ]
        played, scripts = zip(*(scripted(attempt, script, seed) for attempt in attempts), strict=True)
        with Shared(LIMITS) as shared:
            return collect(ScriptedSampler(scripts, chat), chat, played, shared, seed=seed)

    return run


def success(trajectories: list[Trajectory]) -> float:
    return sum(each.steps[-1].rewards["success"] for each in trajectories) / len(trajectories)


@pytest.mark.parametrize("name", SCRIPTS)
def test_the_oracle_wins_and_every_script_says_what_can_be_done(name: str, play: Play) -> None:
    setups = [BOARD[name].draw(seed).write() for seed in range(6)]
    played = {agent: play(name, script, setups) for agent, script in SCRIPTS[name].items()}
    assert success(played["oracle"]) == 1.0
    for agent, trajectories in played.items():
        calls = [call for each in trajectories for step in each.steps for call in step.calls]
        assert {call.status for call in calls} == {CallStatus.OK}
        thoughts = [step.rewards["think"] for each in trajectories for step in each.steps]
        assert set(thoughts) == {float(agent == "demonstrator")}


def test_each_game_has_a_section_chance_and_a_solver() -> None:
    sections = {name for kind in get_args(GameWorld) for name in get_args(kind.model_fields["env"].annotation)}
    assert sections == GAMES.keys()
    assert all({"random", "oracle"} <= game.players.keys() for game in GAMES.values())


def test_chance_spends_the_whole_budget_and_is_seeded(play: Play) -> None:
    walled = lake.Board(rows=("SFFFF", "FFFFF", "FFFFF", "FFFFF", "FFFFG")).write()
    first, again, other = (play("frozen_lake", SCRIPTS["frozen_lake"]["random"], [walled], seed) for seed in (1, 1, 2))
    assert first[0].token_ids.tolist() == again[0].token_ids.tolist() != other[0].token_ids.tolist()
    assert [len(step.calls) for step in first[0].steps] == [5, 5]
    assert first[0].outcome is Outcome.TURN_LIMIT


def test_the_best_walk_on_slippery_ice_knows_no_draw(play: Play) -> None:
    """Its wins on one board agree with the chance that the plan promises, and chance has fewer."""
    board = lake.Board.draw(124, intended=1 / 3)
    promised = lake.Planner(board, 5).best(board.start, 5, 10).chance
    assert 0.2 < promised < 0.9
    won = success(play("frozen_lake", SCRIPTS["frozen_lake"]["oracle"], [board.write()] * 200))
    assert won == pytest.approx(promised, abs=0.1)


def first_action(name: str, setup: str, player: Player, **changes: int) -> str:
    env = turns(name, setup, 0)
    for key, value in changes.items():
        setattr(env, key, value)
    return next(spoken(player)(env, random.Random(0)))


@cases("habit, steps_left, action")
def test_a_demonstrator_states_the_facts_and_then_its_moves(habit: float, steps_left: int, action: str) -> None:
    told = first_action("frozen_lake", LAKE.write(), demonstrator(Ice, Habits(habit, 0.0)), steps_left=steps_left)
    assert told == action
    hole = lake.Board(rows=("SHFG", "FFFF")).write()
    fallen = first_action("frozen_lake", hole, demonstrator(Ice, ALWAYS), steps_left=1)
    assert fallen.endswith("<answer> Right </answer>")  # into the hole, after which it says no more


def test_it_tells_of_the_box_its_target_and_where_to_push_from() -> None:
    """The box goes right; that is done from its left, one down from the player, and the habit pushes it down."""
    setup, around = ROOM.write(), "Up wall Down floor Left floor Right floor"
    facts = f"box 1 Down 1 Right target 0 Up 2 Right . push Right from 1 Down 0 Left . {around}"
    told = first_action("sokoban", setup, demonstrator(Room, NONE))
    assert told == f"<think> {facts} so Down </think> <answer> Down </answer>"
    env = turns("sokoban", setup, 0)
    asyncio.run(env.step("<answer>Right || Down</answer>"))  # the box is pushed down, from where it can still be solved
    pushed = next(spoken(demonstrator(Room, ALWAYS))(env, random.Random(0)))
    assert pushed.startswith("<think> box 1 Down 0 Left target 1 Up 2 Right . stuck . Up floor Down box Left floor")
    assert pushed.endswith("so Down </think> <answer> Down </answer>")


def test_the_bandits_demonstrator_knows_better_than_it_does() -> None:
    board = bandit.Board(arms=("Pilot", "Clerk"), high="Pilot").write()
    known = "<think> Clerk is safe Pilot pays more so {0} </think> <answer> {0} </answer>"
    assert first_action("bandit", board, demonstrated_arm(ALWAYS)) == known.format("Clerk")
    assert first_action("bandit", board, demonstrated_arm(NONE)) == known.format("Pilot")


class NoGame(Env):
    system, user = "s", "u"


class Failing(GameEnv):
    """A game whose world fails in the second step of the first episode that is played."""

    failures = 1

    async def step(self, action: str) -> Transition:
        if self.steps_left == 4 and Failing.failures:
            Failing.failures -= 1
            return Transition(outcome=Outcome.ABORTED, fault="the world")
        return await super().step(action)


def test_a_script_starts_again_with_its_episode_and_plays_nothing_else(chat: Chat, play: Play) -> None:
    board = lake.Board.draw(124, intended=1 / 3).write()
    [calm] = play("frozen_lake", SCRIPTS["frozen_lake"]["random"], [board])
    failing = Attempt(question_id="0", group=0, sample=0, env=lambda seed: Failing("frozen_lake", board, LIMITS, seed))
    with Shared(LIMITS) as shared:
        attempt, player = scripted(failing, SCRIPTS["frozen_lake"]["random"], 0)
        [again] = collect(ScriptedSampler([player], chat), chat, [attempt], shared, seed=0)
        assert repr(again) == repr(calm)
        other = replace(failing, env=lambda _: NoGame())
        attempt, player = scripted(other, SCRIPTS["frozen_lake"]["random"], 0)
        with pytest.raises(TypeError, match="a script plays games and answers questions, and not in NoGame"):
            collect(ScriptedSampler([player], chat), chat, [attempt], shared, seed=0)
    with pytest.raises(TypeError, match=r"another game than agent_r1\.games\.lake"):
        first_action("frozen_lake", board, sokoban.PLAYERS["oracle"])


def answered(
    script: Callable[..., Iterator[str]], question: Question, index: Search, steps: int, seed: int = 0
) -> ToolEnv:
    env = ToolEnv(question, [search_tool(index, top_k=2)], max_steps=steps)
    actions, transition = script(env, random.Random(seed)), Transition(observations=("?",))
    while transition.outcome is None:
        transition = asyncio.run(env.step(next(actions)))
    assert transition.outcome is Outcome.ANSWERED
    env.user = transition.answer
    return env


@pytest.mark.parametrize(("steps", "answer"), [(3, "Tesk"), (5, "Tesk"), (2, "unknown")])
def test_solver_answers_from_gold_if_steps_suffice(question: Question, index: Search, steps: int, answer: str) -> None:
    """Two gold passages and the answer are three actions, of which the last are left."""
    env = answered(by_gold_titles, question, index, steps)
    assert (env.user, env.steps_left) == (answer, max(0, steps - 3))
    read = ["Low Tide: Low Tide is a film by Mara Quill.", "Mara Quill: Mara Quill was born in Tesk."]
    assert env.shown == read[: steps - 1]
    for titles in ([], ["Jon Hale"]):
        assert answered(by_gold_titles, replace(question, gold_titles=titles), index, 4).user == "unknown"
    chance = {answered(any_name, question, index, 4, seed).user for seed in range(100)}
    assert chance >= {"yes", "no", "Low Tide", "Mara Quill"}, "names that it has read"
