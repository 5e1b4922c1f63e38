"""The data sets of params.yaml that are neither generated text nor files: worlds, each drawn by a seed."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import Field

from agent_r1.params.sections import Count, Natural, Section, Share

SPLITS = ("train", "dev", "test")

Seeds = Annotated[list[Natural], Field(min_length=2, max_length=2)]  # from the first up to, and without, the second
Chance = Annotated[float, Field(gt=0, le=1)]


class _SeedsParams(Section):
    """Which seeds a world is drawn by. A split that is left out has no questions."""

    train: Seeds | None = None
    dev: Seeds | None = None
    test: Seeds | None = None

    def seeds_of(self, split: str) -> tuple[int, int]:
        """The first, and the one after the last; the same twice where there are none."""
        first, stop = getattr(self, split) or (0, 0)
        return first, stop

    def objections(self) -> Iterator[str]:
        given = {split: getattr(self, split) for split in SPLITS if getattr(self, split)}
        if not given:
            yield "a world needs seeds: give it train, dev or test, such as test: [123, 379]"
        for split, (first, stop) in given.items():
            if first >= stop:
                yield f"{split} {[first, stop]} holds no seed; the second is the one after the last"


class LakeParams(_SeedsParams):
    """FrozenLake; see `agent_r1.games.lake`."""

    env: Literal["frozen_lake"]
    size: Annotated[int, Field(ge=2, le=12)]
    frozen: Chance  # of a cell to be ice, where there is no hole
    intended: Chance  # of a move to go where it was meant to; else it goes to one of the sides


class SokobanParams(_SeedsParams):
    """Sokoban with one box; see `agent_r1.games.sokoban`."""

    env: Literal["sokoban"]
    size: Annotated[int, Field(ge=5, le=12)]
    walls: Share  # chance of a cell inside to be one
    most_moves: Annotated[int, Field(ge=1, le=12)]  # of the best solution
    test_lengths: dict[Count, Count] = Field(default={})  # of the test's best solutions, how many boards of each length

    def objections(self) -> Iterator[str]:
        yield from super().objections()
        if self.walls > 1 / 2:
            yield f"walls {self.walls} leaves no room to push; take at most .5"
        first, stop = self.seeds_of("test")
        if self.test_lengths and sum(self.test_lengths.values()) != stop - first:
            yield (
                f"test_lengths are {sum(self.test_lengths.values())} boards and test {[first, stop]} holds "
                f"{stop - first} seeds; make them as many"
            )
        if self.test_lengths and max(self.test_lengths) > self.most_moves:
            yield f"test_lengths names {max(self.test_lengths)} moves and most_moves is {self.most_moves}; raise that"


class BanditParams(_SeedsParams):
    """The bandit of two arms, which the test has not seen so; see `agent_r1.games.bandit`."""

    env: Literal["bandit"]
    test_pairs: Literal["others", "turned"] = "others"  # RAGEN's of the test, or those of training, in the other order


class OthersParams(_SeedsParams):
    """An environment that others wrote, which `env` declares under a name."""

    env: Literal["gymnasium", "openenv", "toolbox"]
    name: str


WorldParams = LakeParams | SokobanParams | BanditParams | OthersParams
World = Annotated[WorldParams, Field(discriminator="env")]
