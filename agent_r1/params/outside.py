"""The environments of params.yaml that others wrote: under a name, which is all that a row of data may say of one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, ConfigDict, Field, ValidationError, ValidatorFunctionWrapHandler, WrapValidator

from agent_r1.params.sections import Name, Positive, Section, address

Reward = Annotated[float, Field(allow_inf_nan=False)]
_MODULE = r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*"
_WORDS = r"^\S(.*\S)?$"
SUCCESSES = "info, terminated, truncated, {last_reward: R} or {return: R}"


def _one_of_them(given: Any, check: ValidatorFunctionWrapHandler) -> Any:
    try:
        return check(given)
    except ValidationError:
        raise ValueError(f"success is {SUCCESSES}, and R is a number") from None


# A play must show one thing to be a success; see `agent_r1.envs.gym_env`.
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
    """An environment of gymnasium's, or one that is registered with it; see `agent_r1.envs.gym_env`."""

    id: Annotated[str, Field(pattern=rf"^({_MODULE}:)?([\w-]+/)?[\w.-]+$")]
    success: Success | None = None  # null is info, and refused where the world's info has no success
    kwargs: dict[str, Any] = Field(default={})
    # What its moves are called, from the first on; null where it takes text.
    actions: Annotated[list[Annotated[str, Field(pattern=_WORDS)]], Field(min_length=1)] | None = None

    def objections(self) -> Iterator[str]:
        mode = self.kwargs.get("render_mode", "ansi")
        if mode != "ansi":
            yield f"kwargs.render_mode {mode!r} draws no text; set it to ansi, or leave it out to show what is observed"
        [(name, times)] = Counter(action.casefold() for action in self.actions or ["any"]).most_common(1)
        if times > 1:
            yield f"actions names {name!r} {times} times, in whatever case; give every move a name of its own"


class OpenEnvParams(_WorldParams):
    """A server of OpenEnv's; see `agent_r1.envs.openenv`."""

    url: Annotated[str, AfterValidator(_web)]
    observation: str  # the field of its observation that the policy reads
    action: str  # the field of its action that takes what the policy writes
    timeout_s: Positive  # of one answer
    success_above: Reward = 0.0  # the reward of the last step, beyond which it is a success


class ToolboxParams(_WorldParams):
    """A class whose public methods are tools, as TRL's environments are; see `agent_r1.envs.toolbox_env`."""

    model_config = ConfigDict(serialize_by_alias=True)

    class_: Annotated[str, Field(alias="class", pattern=rf"^{_MODULE}:[A-Za-z_]\w*$")]
    timeout_s: Positive | None = None  # of one call of an `async def`
    success_above: Reward = 0.0  # what `get_reward` says, beyond which it is a success


class OutsideParams(Section):
    """The part of `env` that declares them."""

    gymnasium: dict[Name, GymnasiumParams]
    openenv: dict[Name, OpenEnvParams]
    toolbox: dict[Name, ToolboxParams]

    @property
    def declared(self) -> dict[str, list[str]]:
        """The names under each."""
        return {"gymnasium": [*self.gymnasium], "openenv": [*self.openenv], "toolbox": [*self.toolbox]}
