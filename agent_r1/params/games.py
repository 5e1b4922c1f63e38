"""Of `env` how the games of `agent_r1.games` are played, and of `prepare.worlds` how each one is drawn."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from agent_r1.params.sections import Count, Refusals, Section, Share
from agent_r1.params.worlds import WorldSeeds

Chance = Annotated[float, Field(gt=0, le=1)]


class GamesParams(Section):
    """How the games of `agent_r1.games` are played; see `agent_r1.envs.game_env`."""

    protocol: Literal["ragen_v1", "ragen_v2", "brief"]
    moves_per_step: Count
    moves: Count

    def refusals(self) -> Refusals:
        if self.moves_per_step > self.moves:
            setting = f"moves_per_step {self.moves_per_step}"
            yield f"{setting} has no effect above an episode's moves, {self.moves}; lower it, or raise moves"


class LakeParams(WorldSeeds):
    """FrozenLake; see `agent_r1.games.lake`."""

    env: Literal["frozen_lake"]
    size: Annotated[int, Field(ge=2, le=12)]
    frozen: Chance  # of a cell to be ice, where there is no hole
    intended: Chance  # of a move to go where it was meant to; else it goes to one of the sides


class SokobanParams(WorldSeeds):
    """Sokoban with one box; see `agent_r1.games.sokoban`."""

    env: Literal["sokoban"]
    size: Annotated[int, Field(ge=5, le=12)]
    walls: Share  # chance of a cell inside to be one
    most_moves: Annotated[int, Field(ge=1, le=12)]  # of the best solution
    test_lengths: dict[Count, Count] = Field(default={})  # of the test's best solutions, how many boards of each length

    def refusals(self) -> Refusals:
        yield from super().refusals()
        boards = sum(self.test_lengths.values())
        first, stop = self.given.get("test", (0, 0))
        if self.walls > 1 / 2:
            yield f"walls {self.walls} leaves no room to push; take at most .5"
        if boards and boards != stop - first:
            seeds = f"test {[first, stop]} holds {stop - first} seeds"
            yield f"test_lengths are {boards} boards and {seeds}; make them as many"
        if boards and max(self.test_lengths) > self.most_moves:
            yield f"test_lengths names {max(self.test_lengths)} moves and most_moves is {self.most_moves}; raise that"


class BanditParams(WorldSeeds):
    """The bandit of two arms, which the test has not seen so; see `agent_r1.games.bandit`."""

    env: Literal["bandit"]
    test_pairs: Literal["others", "turned"] = "others"  # RAGEN's of the test, or those of training, in the other order


GameWorld = LakeParams | SokobanParams | BanditParams
