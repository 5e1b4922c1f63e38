"""Classes whose public methods are tools, as TRL's GRPO trainer takes them for its `environment_factory`."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Protocol, runtime_checkable

from pydantic import Field

from agent_r1 import own_code
from agent_r1.envs.base import Transition
from agent_r1.envs.shared import Shared
from agent_r1.envs.text_env import Setup, meant, number
from agent_r1.envs.tool_env import ToolEnv, told
from agent_r1.faults import WorldTimeout
from agent_r1.params.env import EnvParams, ToolboxParams
from agent_r1.records import Outcome, Question
from agent_r1.tools.base import Tool, ToolResult, methods, within
from agent_r1.tools.toolbox import Limited, UnderWay, cut

SYSTEM = "Do the task with the tools, and answer when it is done."


class ToolboxSetup(Setup):
    """The row is the arguments of `reset`."""

    row: dict[str, Any] = Field(default={})


@runtime_checkable
class Box(Protocol):
    """An object of one episode; its other public methods are tools."""

    def reset(self, **row: Any) -> Any:
        """Begins the episode, now or when awaited; a result other than None is shown below the question."""
        ...


@runtime_checkable
class Rewarding(Protocol):
    """A Box that rewards the episode at its end."""

    def get_reward(self) -> Any:
        """A finite number, now or when awaited."""
        ...


class ToolboxEnv(ToolEnv):
    """An episode whose tools are the methods of an object of its own.

    Rewards at the end are `env`, the result of `get_reward`, and `success`: whether that is above `success_above`. For
    a class without `get_reward`, success is an exactly right answer.
    """

    def __init__(self, question: Question, shared: Shared, seed: int) -> None:
        """`seed` is not used: all chance of such a class comes from the row."""
        limits = shared.limits
        self._setup, self._params = meant(question, ToolboxSetup, limits.toolbox)
        self._box = _made(self._setup.name, self._params)
        super().__init__(
            question if question.answers else question.text,
            _tools(self._box, self._params, limits),
            max_steps=limits.max_steps,
            parallel_calls=limits.parallel_calls,
            system=told(SYSTEM, limits),
        )
        self.user = self._params.task or question.text
        self._max_characters = limits.max_result_characters

    async def open(self) -> None:
        said = await self._told("reset", self._box.reset(**self._setup.row))
        if said is not None:
            self.user = f"{self.user}\n\n{cut(ToolResult(text=str(said)), self._max_characters).text}"

    async def step(self, action: str) -> Transition:
        """Takes an action's text, without its end token."""
        transition = await super().step(action)
        if transition.outcome in (None, Outcome.ABORTED):
            return transition
        return replace(transition, rewards=transition.rewards | await self._earned(transition))

    async def _earned(self, end: Transition) -> dict[str, float]:
        if not isinstance(self._box, Rewarding):
            return {"success": end.rewards.get("em", 0.0)}
        reward = number(await self._told("get_reward", self._box.get_reward()), f"env.toolbox.{self._setup.name}")
        return {"env": reward, "success": float(reward > self._params.success_above)}

    async def _told(self, method: str, said: Any) -> Any:
        if not inspect.isawaitable(said):
            return said
        where = f"env.toolbox.{self._setup.name}: {method}"
        return await within(self._params.timeout_s, said, lambda late: WorldTimeout(f"{where} {late}"))


def require_toolbox(questions: Sequence[Question], limits: EnvParams) -> None:
    """Makes one object of each class that the questions name.

    Raises ValueError for a question whose class is not declared, whose row `reset` does not take, or whose success is
    undefined; and for a class that is not there, cannot be made, or has no `reset`.
    """
    boxes: dict[str, Box] = {}
    for question in questions:
        setup, params = meant(question, ToolboxSetup, limits.toolbox)
        if setup.name not in boxes:
            boxes[setup.name] = _made(setup.name, params)
            _require_tools(setup.name, boxes[setup.name], params, limits)
        _require_row(question, setup, boxes[setup.name])


def _require_row(question: Question, setup: ToolboxSetup, box: Box) -> None:
    where = f"question {question.question_id!r}: setup.row"
    try:
        inspect.signature(box.reset).bind(**setup.row)
    except TypeError as fault:
        raise ValueError(f"{where} does not fit env.toolbox.{setup.name}.reset: {fault}") from None
    if not question.answers and not isinstance(box, Rewarding):
        raise ValueError(
            f"question {question.question_id!r} has no answers, and {type(box).__name__} has no get_reward: its "
            "success is undefined; give it one of the two"
        )


def _require_tools(name: str, box: Box, params: ToolboxParams, limits: EnvParams) -> None:
    try:
        tools = _tools(box, params, limits)
    except ValueError as fault:
        raise ValueError(f"env.toolbox.{name}: {fault}") from None
    if not tools:
        raise ValueError(f"env.toolbox.{name}: {params.class_} has no public method that could be a tool")
    if _waits(box, tools) != (params.timeout_s is not None):
        mend = "a method waits, and for ever; set" if params.timeout_s is None else "no method waits; leave out"
        raise ValueError(f"env.toolbox.{name}: {mend} timeout_s")


def _waits(box: Box, tools: Sequence[Tool]) -> bool:
    methods = [box.reset, *([box.get_reward] if isinstance(box, Rewarding) else [])]
    return any(tool.waits for tool in tools) or any(map(inspect.iscoroutinefunction, methods))


def _made(name: str, params: ToolboxParams) -> Box:
    made = own_code.load(f"env.toolbox.{name}", params.class_)
    try:
        box = made()
    except Exception as fault:
        told = f"{type(fault).__name__}: {fault}"
        raise ValueError(f"env.toolbox.{name}: {params.class_}() cannot be made ({told})") from fault
    if not isinstance(box, Box):
        raise ValueError(f"env.toolbox.{name}: {params.class_} has no method reset")
    return box


def _tools(box: Box, params: ToolboxParams, limits: EnvParams) -> list[Tool]:
    """The methods as tools. Their ValueErrors are the agent's fault, as in TRL."""
    made = methods(box, timeout_s=params.timeout_s, refusal=ValueError)
    return [Limited(tool, limits.max_result_characters, UnderWay()) for tool in made]
