"""Games by RAGEN's protocol, by hand: what is told, what is done, and what comes of it."""

import asyncio
from typing import Any

import pytest

from agent_r1.envs.base import Transition
from agent_r1.envs.game_env import STYLES, GameEnv
from agent_r1.games import bandit, lake, sokoban
from agent_r1.games.kinds import GAMES
from agent_r1.params import SHIPPED, load
from agent_r1.params.env import EnvParams
from agent_r1.params.sections import override, validated
from agent_r1.records import CallStatus, Outcome
from tests.cases import cases

LAKE = lake.Board(rows=("SFH", "FFG")).write()
ROOM = sokoban.Board(rows=("######", "#PX_O#", "######")).write()
V1_TURN = (
    "\nTurn {}:\nState:\n{}\nYou have {} actions left. Always output: <think> [Your thoughts] </think> "
    "<answer> [your answer] </answer> with no extra text. Strictly follow this format. Max response length: 100 words "
    "(tokens).\n"
)


def limits(max_steps: int = 5, **games: Any) -> EnvParams:
    changes = {"max_steps": max_steps, "games": games}
    return validated(EnvParams, override(load(SHIPPED).env.model_dump(), changes), "env")


def opened(setup: str = LAKE, name: str = "frozen_lake", max_steps: int = 5, **games: Any) -> GameEnv:
    return GameEnv(name, setup, limits(max_steps, **games), seed=1)


def does(env: GameEnv, *answers: str) -> Transition:
    transitions = [asyncio.run(env.step(f"<think>so</think><answer>{answer}</answer>")) for answer in answers]
    return transitions[-1]


def statuses(transition: Transition) -> list[tuple[str, str]]:
    return [(call.arguments, call.status.value) for call in transition.calls]


def test_the_opening_of_the_first_version() -> None:
    env = opened()
    assert (env.system, env.tools) == ("You're a helpful assistant. ", ())
    rules, rest = env.user.split("\nThe meaning of each symbol in the state is:\n")
    assert rules == GAMES["frozen_lake"].rules
    assert rest.startswith("P: player, _: ice, O: hole, G: goal, X: player in a hole, √: player on the goal\n")
    assert "\nLeft, Down, Right, Up\nYou can make up to 10 actions" in rest
    assert rest.endswith(V1_TURN.format(1, "P_O\n__G", 10))
    given = limits().model_copy(update={"instructions": "Think aloud."})
    assert GameEnv("frozen_lake", LAKE, given).system == "You're a helpful assistant.  Think aloud."


def test_a_games_state_is_its_board_however_it_was_reached() -> None:
    env, other = opened(), opened()
    assert env.state == other.state == "P_O\n__G"
    does(env, "Down", "Up || Right")
    does(other, "Right")
    assert env.state == other.state == "_PO\n__G"
    assert opened(ROOM, "sokoban").state == "######\n#PX_O#\n######"


def test_the_opening_of_the_second_version_and_of_the_brief_one() -> None:
    env = opened(ROOM, "sokoban", protocol="ragen_v2", moves_per_step=2)
    assert env.system.startswith("You're a helpful assistant. You are solving the Sokoban puzzle.")
    shown = env.user.splitlines()
    assert shown[:4] == ["", "Turn 1:", "State:", "Coordinates (row, column):"]
    assert shown[5:8] == ["Targets: (1, 4)", "Boxes: (1, 2)", "Player: (1, 1)"]
    assert shown[8:12] == ["Grid Map:", "######", "#PX_O#", "######"]
    brief = opened(ROOM, "sokoban", protocol="brief")
    assert (brief.system, brief.user) == ("Play sokoban.", "# # # # # #\n# P X _ O #\n# # # # # #\n10 moves left.")
    arms = opened(bandit.Board(arms=("Clerk", "Pilot"), high="Pilot").write(), "bandit", protocol="brief")
    assert arms.user == "Clerk\nPilot\n1 moves left."


def test_several_moves_in_one_action() -> None:
    """The box is pushed once and left, then pushed on: -.1 each, and 10.9 for the push that solves it."""
    env = opened(ROOM, "sokoban")
    first = does(env, "right || Left||UP")
    assert first.observations == ("Reward:\n-0.3\n" + V1_TURN.format(2, "######\n#P_XO#\n######", 7),)
    assert statuses(first) == [('"Right"', "ok"), ('"Left"', "ok"), ('"Up"', "ok")]
    assert {call.tool for call in first.calls} == {"move"}
    assert (first.rewards["think"], "success" in first.rewards) == (1.0, False)
    last = does(env, "Right || Right || Left || Left")
    assert (last.outcome, last.observations) == (Outcome.ENDED, ())
    assert statuses(last) == [('"Right"', "ok"), ('"Right"', "ok")]  # what comes after the end is not made
    assert last.rewards == {"env": pytest.approx(10.8), "think": 1.0, "success": 1.0}
    with pytest.raises(RuntimeError, match="the episode is over"):
        does(env, "Left")
    lost = does(opened(), "Right || Right || Down")
    assert (lost.outcome, lost.rewards["success"], lost.rewards["env"], len(lost.calls)) == (Outcome.ENDED, 0.0, 0.0, 2)


def test_surplus_moves_are_not_made_and_that_is_said() -> None:
    env = opened(moves_per_step=2, moves=3)
    first = does(env, " || ".join(["Up", "Jump"] + ["Down"] * 498))
    assert statuses(first) == [('"Up"', "ok"), ('"Jump"', "bad_arguments")]
    [text] = first.observations
    told, turn = text.split("\n\nTurn 2:")
    assert told == (
        "Reward:\n0\nThere is no move 'Jump', only Left, Down, Right, Up.\n"
        "498 further moves were not made: 2 are the most in one answer."
    )
    assert "P_O\n__G\nYou have 2 actions left." in turn  # one that is unknown costs none of them
    last = does(env, "Down || Up")
    assert (last.outcome, last.rewards["success"]) == (Outcome.TURN_LIMIT, 0.0)  # no move is left, two turns are


@cases("action, told")
def test_an_action_without_a_move_is_malformed(action: str, told: str) -> None:
    env = opened(protocol="ragen_v2", max_steps=2)
    first = asyncio.run(env.step(action))
    assert [call.status for call in first.calls] == [CallStatus.MALFORMED]
    assert first.rewards == {"env": 0.0, "think": 0.0}
    assert f"{STYLES['ragen_v2'].nothing}{told}<think>" in first.observations[0]
    assert first.observations[0].endswith(V1_TURN.format(2, env.user.split("State:\n")[1].split("\nYou")[0], 10))
    last = asyncio.run(env.step(action))
    assert (last.outcome, last.rewards) == (Outcome.MALFORMED, {"env": 0.0, "think": 0.0, "success": 0.0})


def test_an_action_of_unknown_moves_alone_changes_nothing() -> None:
    env = opened(protocol="ragen_v2")
    tried = does(env, "North || " + "x" * 300)
    assert statuses(tried) == [('"North"', "bad_arguments"), (f'"{"x" * 300}"', "bad_arguments")]
    assert tried.call_status is CallStatus.BAD_ARGUMENTS
    assert tried.observations[0].startswith(f"Reward:\n0\n{STYLES['ragen_v2'].nothing}There is no move 'North', only ")
    assert "x" * 41 not in tried.observations[0]
    assert (env.moves_left, env.steps_left) == (10, 4)


def test_the_chance_is_the_episodes_own() -> None:
    slippery = lake.Board(rows=("FFFFF", "FFSFF", "FFFFG"), intended=1 / 3).write()

    def ends(seed: int) -> str:
        env = GameEnv("frozen_lake", slippery, limits(protocol="brief"), seed)
        return does(env, "Up || Left || Down").observations[0]

    assert [ends(seed) for seed in range(8)] == [ends(seed) for seed in range(8)]
    assert len({ends(seed) for seed in range(8)}) > 2


@cases("changes, message")
def test_what_could_have_no_effect_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        opened(**changes)
