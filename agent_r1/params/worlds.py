"""The data sets of params.yaml that are neither generated text nor files: worlds, each drawn by a seed."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, ConfigDict, Field, ValidationError, ValidatorFunctionWrapHandler, WrapValidator

from agent_r1.params.sections import Count, Name, Natural, Positive, Section, Share, address

SPLITS = ("train", "dev", "test")

Seeds = Annotated[list[Natural], Field(min_length=2, max_length=2)]  # from the first up to, and without, the second
Chance = Annotated[float, Field(gt=0, le=1)]


class WorldSeeds(Section):
    """Which seeds a world is drawn by. A split that is left out has no questions."""

    train: Seeds | None = None
    dev: Seeds | None = None
    test: Seeds | None = None

    @property
    def given(self) -> dict[str, list[int]]:
        """The splits that have seeds."""
        named = {"train": self.train, "dev": self.dev, "test": self.test}
        return {split: seeds for split, seeds in named.items() if seeds}

    def seeds_of(self, split: str) -> tuple[int, int]:
        """The first, and the one after the last; the same twice where there are none."""
        first, stop = self.given.get(split, (0, 0))
        return first, stop


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


class BanditParams(WorldSeeds):
    """The bandit of two arms, which the test has not seen so; see `agent_r1.games.bandit`."""

    env: Literal["bandit"]
    test_pairs: Literal["others", "turned"] = "others"  # RAGEN's of the test, or those of training, in the other order


class OthersParams(WorldSeeds):
    """An environment that others wrote, which `env` declares under a name."""

    env: Literal["gymnasium", "openenv", "toolbox"]
    name: str


WorldParams = LakeParams | SokobanParams | BanditParams | OthersParams
World = Annotated[WorldParams, Field(discriminator="env")]


Reward = Annotated[float, Field(allow_inf_nan=False)]
_MODULE = r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*"
_WORDS = r"^\S(.*\S)?$"
SUCCESSES = "info, terminated, truncated, {last_reward: R} or {return: R}"


def _one_of_them(given: Any, check: ValidatorFunctionWrapHandler) -> Any:
    try:
        return check(given)
    except ValidationError:
        raise ValueError(f"success is {SUCCESSES}, and R is a number") from None


# A play must show one thing to be a success; see `agent_r1.outside.gym_env`.
Success = Annotated[
    Literal["info", "terminated", "truncated"]
    | Annotated[dict[Literal["last_reward", "return"], Reward], Field(min_length=1, max_length=1)],
    WrapValidator(_one_of_them),
]


def _web(url: str) -> str:
    """A server's address as that of a page; its WebSocket has the same with ws in place of http."""
    return address(f"http{url[2:]}" if url.startswith(("ws://", "wss://")) else url).removesuffix("/ws")


class _WorldParams(Section):
    task: str = ""  # what the policy is told to do, in place of the question's text


class GymnasiumParams(_WorldParams):
    """An environment of gymnasium's, or one that is registered with it; see `agent_r1.outside.gym_env`."""

    id: Annotated[str, Field(pattern=rf"^({_MODULE}:)?([\w-]+/)?[\w.-]+$")]
    success: Success | None = None  # null is info, and refused where the world's info has no success
    kwargs: dict[str, Any] = Field(default={})
    # What its moves are called, from the first on; null where it takes text.
    actions: Annotated[list[Annotated[str, Field(pattern=_WORDS)]], Field(min_length=1)] | None = None


class OpenEnvParams(_WorldParams):
    """A server of OpenEnv's; see `agent_r1.outside.openenv`."""

    url: Annotated[str, AfterValidator(_web)]
    observation: str  # the field of its observation that the policy reads
    action: str  # the field of its action that takes what the policy writes
    timeout_s: Positive  # of one answer
    success_above: Reward = 0.0  # the reward of the last step, beyond which it is a success


class ToolboxParams(_WorldParams):
    """A class whose public methods are tools, as TRL's environments are; see `agent_r1.outside.toolbox_env`."""

    model_config = ConfigDict(serialize_by_alias=True)

    class_: Annotated[str, Field(alias="class", pattern=rf"^{_MODULE}:[A-Za-z_]\w*$")]
    timeout_s: Positive | None = None  # of one call of an `async def`
    success_above: Reward = 0.0  # what `get_reward` says, beyond which it is a success


class OutsideParams(Section):
    """The part of `env` that declares them."""

    gymnasium: dict[Name, GymnasiumParams] = Field(default={})
    openenv: dict[Name, OpenEnvParams] = Field(default={})
    toolbox: dict[Name, ToolboxParams] = Field(default={})

    @property
    def declared(self) -> dict[str, list[str]]:
        """The names under each."""
        return {"gymnasium": [*self.gymnasium], "openenv": [*self.openenv], "toolbox": [*self.toolbox]}
