"""Nine worlds that others wrote, held against their success: `python -m benchmarks.worlds --minigrid FOLDER [--store]`.

Each is played through the project's own environment from 200 starts by random moves, which is its floor, and by a
scripted good policy. The stated success is compared with the world's own state. FOLDER gets MiniGrid where it is not.
"""

from __future__ import annotations

import asyncio
import math
import random
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import cache
from importlib import import_module
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple

import gymnasium

from agent_r1.data.worlds import draw
from agent_r1.envs.scripts import any_move, said
from agent_r1.envs.shared import Shared
from agent_r1.evaluation.statistics import interval
from agent_r1.outside.gym_env import GymEnv, require_gymnasium
from agent_r1.params import SHIPPED, load
from agent_r1.params.env import EnvParams
from agent_r1.params.outside import OthersParams
from agent_r1.params.sections import override, validated
from agent_r1.seeds import derive
from benchmarks.stored import Row, options, show

PLAYS = 200
RIGHT, FORWARD, EAST, DOWN, UP = 1, 2, 0, 1, 3  # moves and directions in a grid


class Held(NamedTuple):
    """A world, and one play of it; functions are given the world without wrappers."""

    moves: str
    success: Any  # its key of params.yaml
    steps: int  # of an episode, its own limit where it has one
    shows: str  # the definition of success in words
    reached: Callable[[Any, int], bool]  # the same of a world's state, after so many moves
    good: Callable[[Any], Iterator[int]]  # the moves of a good policy


def by_rule(choose: Callable[[Any], int]) -> Callable[[Any], Iterator[int]]:
    return lambda world: (choose(world) for _ in count())


@cache
def best_moves(name: str) -> dict[int, int]:
    """The best move of every state, by value iteration over the world's own table of chances."""
    table: Any = vars(gymnasium.make(name).unwrapped)["P"]
    values, change = dict.fromkeys(table, 0.0), math.inf

    def worth(leads: list[tuple[float, int, float, bool]]) -> float:
        return sum(chance * (reward + 0.999 * values[to] * (not over)) for chance, to, reward, over in leads)

    while change > 1e-6:
        fresh = {state: max(map(worth, moves.values())) for state, moves in table.items()}
        change, values = max(abs(fresh[state] - values[state]) for state in fresh), fresh
    return {state: max(moves, key=lambda move: worth(moves[move])) for state, moves in table.items()}


def hits(world: Any) -> int:
    """The moves of Sutton and Barto's figure 5.2: 0 sticks, 1 hits."""
    points, dealer = sum(world.player), world.dealer[0]
    if 1 in world.player and points + 10 <= 21:
        return int(points + 10 < 18 or (points + 10 == 18 and dealer in (9, 10, 1)))
    return int(points < (17 if dealer in (1, 7, 8, 9, 10) else 12 if dealer in (4, 5, 6) else 13))


def beats(world: Any, _: int) -> bool:
    """Points up to 21, where an ace and a ten count a half more, as they beat any other 21 in Sutton and Barto."""
    hands = (world.player, world.dealer)
    points = (sum(hand) + (10 if 1 in hand and sum(hand) <= 11 else 0) for hand in hands)
    mine, theirs = (each + (sorted(hand) == [1, 10]) / 2 for each, hand in zip(points, hands, strict=True))
    return mine < 22 and (theirs >= 22 or theirs < mine)


def through_the_gap(world: Any) -> int:
    """To the gap in the lava, through it, and then along the far walls; it turns to the right alone."""
    (x, y), (gap_x, gap_y) = world.agent_pos, world.gap_pos
    far = EAST if x < world.width - 2 else DOWN
    wanted = far if x >= gap_x or y == gap_y else DOWN if gap_y > y else UP
    return FORWARD if world.agent_dir == wanted else RIGHT


def by_bot(world: Any) -> Iterator[int]:
    bot, move = import_module("minigrid.utils.baby_ai_bot").BabyAIBot(world), None
    while True:
        move = bot.replan(move)
        yield int(move)


def faces_the_named(world: Any, _: int) -> bool:
    cell = world.grid.get(*world.front_pos)
    return bool(cell) and [cell.color, cell.type] == world.mission.split()[-2:]


def on_goal(world: Any, _: int) -> bool:
    cell = world.grid.get(*world.agent_pos)
    return bool(cell) and cell.type == "goal"


def balanced(world: Any, moves: int) -> bool:
    x, _, angle, _ = world.state
    return moves == 500 and abs(x) <= world.x_threshold and abs(angle) <= world.theta_threshold_radians


def delivered(world: Any, _: int) -> bool:
    _, _, passenger, destination = world.decode(world.s)
    return passenger == destination


def is_high(world: Any, _: int) -> bool:
    return -math.cos(world.state[0]) - math.cos(world.state[0] + world.state[1]) > 1


by_values = by_rule(lambda world: best_moves(world.spec.id)[int(world.s)])
leaning = by_rule(lambda world: int(3 * world.state[2] + world.state[3] > 0))
rocking = by_rule(lambda world: 2 if world.state[1] >= 0 else 0)
swinging = by_rule(lambda world: 0 if world.state[2] > 0 else 2)
GOAL, HILL, PUSHES, ICE = "goal reached", "flag reached", "Left, None, Right", "Left, Down, Right, Up"
TURNS = "Up, Right, Down, Left"
GRID, RIDES = "left, right, forward, pick up, drop, toggle, done", "South, North, East, West, Pick up, Drop off"
ONE, TWENTY, TENTH = ({"last_reward": least} for least in (1, 20, 0.1))
WORLDS = {
    "CartPole-v1": Held("Left, Right", "truncated", 500, "balanced for 500 moves", balanced, leaning),
    "CliffWalking-v1": Held(TURNS, "terminated", 200, GOAL, lambda world, _: world.s == 47, by_values),
    "MountainCar-v0": Held(PUSHES, "terminated", 200, HILL, lambda world, _: world.state[0] >= 0.5, rocking),
    "Acrobot-v1": Held("-1, 0, 1", "terminated", 500, "tip above the line", is_high, swinging),
    "Taxi-v4": Held(RIDES, TWENTY, 200, "passenger delivered", delivered, by_values),
    "Blackjack-v1": Held("Stick, Hit", ONE, 20, "the dealer is beaten", beats, by_rule(hits)),
    "FrozenLake8x8-v1": Held(ICE, ONE, 200, GOAL, lambda world, _: world.desc.flat[world.s] == b"G", by_values),
    "MiniGrid-LavaGapS6-v0": Held(GRID, TENTH, 144, GOAL, on_goal, by_rule(through_the_gap)),
    "BabyAI-GoToLocal-v0": Held(GRID, TENTH, 64, "stands before what it was told", faces_the_named, by_bot),
}


async def played(env: GymEnv, world: Held, chance: random.Random | None) -> list[bool]:
    """Whether a play succeeded as the environment says, and by the state in which it left the world."""
    try:
        await env.open()
        inner: Any = env.world and env.world.unwrapped
        moves = any_move(env, chance) if chance else (said([env.moves[move]]) for move in world.good(inner))
        for number, move in enumerate(moves, start=1):
            found = await env.step(move)
            if found.outcome:
                return [bool(found.rewards["success"]), bool(world.reached(inner, number))]
        raise ValueError("the policy stopped before the play was over")
    finally:
        await env.close()


def held(name: str, world: Held) -> Row:
    """The success of random moves and of the good policy, and how often it is as the world's state has it."""
    declared = {"id": name, "actions": world.moves.split(", "), "success": world.success}
    changes = {"gymnasium": {"w": declared}, "max_steps": world.steps}
    limits = validated(EnvParams, override(load(SHIPPED).env.model_dump(by_alias=True), changes), "benchmarks.worlds")
    rows = draw("w", OthersParams(env="gymnasium", name="w", test=[0, PLAYS]))["test"]
    require_gymnasium(rows, limits)

    def play(at: int, by_chance: bool) -> list[bool]:
        env = GymEnv(rows[at], Shared(limits), derive(0, name, at))
        return asyncio.run(played(env, world, random.Random(derive(1, name, at)) if by_chance else None))

    found = [[play(at, by_chance) for at in range(PLAYS)] for by_chance in (True, False)]
    means = [interval([float(stated) for stated, _ in each], 10_000, 0) for each in found]
    floor, ceiling = (f"{each.mean:.3f} [{each.low:.2f}, {each.high:.2f}]" for each in means)
    return {
        "world": f"`{name}`",
        "`success`": f"`{world.success}`".replace("'", ""),
        "one play": world.shows,
        "`random`": floor,
        "good policy": ceiling,
        "stated as it is": f"{sum(stated == true for each in found for stated, true in each)} of {2 * PLAYS}",
    }


def main() -> None:
    parser = options("Holds nine worlds against their definitions of success.")
    parser.add_argument("--minigrid", type=Path, required=True, help="a folder with MiniGrid; made where there is none")
    given = parser.parse_args()
    if not given.minigrid.exists():
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(given.minigrid)]
        subprocess.run([*pip, "minigrid==3.2.0", "pygame-ce==2.5.8"], check=True)
    sys.path.append(str(given.minigrid))
    gymnasium.register_envs(import_module("minigrid"))
    show("worlds", [held(name, world) for name, world in WORLDS.items()], store=given.store)


if __name__ == "__main__":
    main()
