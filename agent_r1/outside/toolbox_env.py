"""Classes whose public methods are tools, as TRL's GRPO trainer takes them for its `environment_factory`."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Protocol, runtime_checkable

from pydantic import Field

from agent_r1 import own_code
from agent_r1.envs.base import Transition
from agent_r1.envs.shared import Shared
from agent_r1.envs.text_env import Setup, ToolWorld, ended, meant, number
from agent_r1.envs.tool_env import told
from agent_r1.faults import WorldFault, WorldTimeout
from agent_r1.http.client import in_words
from agent_r1.params.env import EnvParams
from agent_r1.params.outside import ToolboxParams
from agent_r1.records import Json, Outcome, Question
from agent_r1.tools.arguments import ArgumentCheck
from agent_r1.tools.base import FunctionTool, function_schema, methods, within

ANSWER = "Answer the question."


class ToolboxSetup(Setup):
    """The row is the arguments of `reset`."""

    row: Json = Field(default={})


@runtime_checkable
class Box(Protocol):
    """An object of one episode; its public methods but `get_reward` and `state_key` are tools.

    `get_reward` gives a finite number at the end, now or when awaited; its parameter `answer`, if any, is the agent's
    answer. Without it `self.reward` is the reward. `self.done = True` ends the episode. `state_key` gives a text, equal
    for equal states. Without tools it is a question, whose `get_reward` takes the answer.
    """

    def reset(self, **row: Any) -> Any:
        """Begins the episode, now or when awaited; a result other than None is shown below the question."""
        ...


@runtime_checkable
class Offering(Protocol):
    """A `Box` that offers tools by their schemas, which may depend on the row, in place of its methods."""

    def tools(self) -> Sequence[Json]:
        """The tools in the OpenAI function form, asked for after `reset`."""
        ...

    def call(self, name: str, arguments: Json) -> Any:
        """The result of a call whose arguments fit, now or when awaited; the policy is told what it raises."""
        ...


class OfferedTool(FunctionTool):
    """A tool of an `Offering`."""

    def __init__(self, tool: Json, box: Offering, timeout_s: float | None) -> None:
        """Raises ValueError if the tool has no name, or a schema that cannot be checked."""
        function = tool.get("function", tool)
        self.name = str(function.get("name") or "")
        parameters = function.get("parameters") or {"type": "object"}
        self.schema = function_schema(self.name, str(function.get("description") or ""), parameters)
        self.waits = inspect.iscoroutinefunction(box.call)
        self._check = ArgumentCheck(parameters)
        self._function = partial(box.call, self.name)
        self._timeout_s = timeout_s
        self._refusal = Exception

    def _values(self, arguments: Json) -> Json:
        if not self._check.fits(arguments):
            raise ValueError("the arguments do not fit the tool's schema")
        return {"arguments": arguments}


class ToolboxEnv(ToolWorld):
    """An episode whose tools are the methods of an object of its own.

    Rewards at the end are `env`, the object's reward, and `success`: whether that is above `success_above`. Without a
    reward, success is an exactly right answer.
    """

    def __init__(self, question: Question, shared: Shared, seed: int) -> None:
        """`seed` is not used: all chance of such a class comes from the row."""
        self._setup, self._params = meant(question, ToolboxSetup, shared.limits.toolbox)
        super().__init__(question, self._params.task, shared)
        self._where = f"env.toolbox.{self._setup.name}"
        self._box = _new_box(self._where, self._params)
        offers = isinstance(self._box, Offering)
        self.offer([] if offers else methods(self._box, timeout_s=self._params.timeout_s, refusal=Exception))
        if not offers and not self.tools:
            self.system = told(ANSWER, shared.limits)

    @property
    def state(self) -> str:
        """The object's `state_key`, if it has one; a ValueError refuses what is no text."""
        key = getattr(self._box, "state_key", str)()
        if not isinstance(key, str):
            raise ValueError(f"{self._where}: state_key gave {key!r:.80}; the key of a state is text")
        return key

    async def open(self) -> None:
        opening = await self._awaited("reset", partial(self._box.reset, **self._setup.row))
        if isinstance(self._box, Offering):
            box = self._box
            self.offer(await self._awaited("tools", lambda: _tools_of(box, self._params.timeout_s)))
        if opening is not None:
            self.show(str(opening))

    async def step(self, action: str) -> Transition:
        """Takes an action's text, without its end token."""
        reply = await super().step(action)
        if getattr(self._box, "done", None) is True:
            reply = ended(reply)
        if reply.outcome in (None, Outcome.ABORTED):
            return reply
        return replace(reply, rewards=reply.rewards | await self._earned(reply))

    async def _earned(self, end: Transition) -> dict[str, float]:
        earned = getattr(self._box, "reward", None)
        get_reward = getattr(self._box, "get_reward", None)
        if get_reward:
            asks = "answer" in inspect.signature(get_reward).parameters
            arguments = {"answer": end.answer} if asks else {}
            earned = await self._awaited("get_reward", partial(get_reward, **arguments))
        elif earned is None:
            return {"success": end.rewards.get("em", 0.0)}
        reward = number(earned, self._where)
        return {"env": reward, "success": float(reward > self._params.success_above)}

    async def _awaited(self, method: str, call: Callable[[], Any]) -> Any:
        """What a method gives, now or when awaited; its fault names the world and the row."""
        try:
            value = call()
            if not inspect.isawaitable(value):
                return value
            limit_s = self._params.timeout_s
            return await within(limit_s, value, lambda late: WorldTimeout(f"{self._where}: {method} {late}"))
        except WorldFault:
            raise
        except Exception as fault:
            row = str(self._setup.row)[:200]
            raise ValueError(f"{self._where}: {method} of the row {row} raised {in_words(fault)}") from fault


def _tools_of(box: Offering, timeout_s: float | None) -> list[OfferedTool]:
    return [OfferedTool(tool, box, timeout_s) for tool in box.tools()]


def require_toolbox(questions: Sequence[Question], limits: EnvParams) -> None:
    """Makes an object of each class that is named; ValueError if class, row or success is undeclared or unfit."""
    boxes: dict[str, Box] = {}
    for question in questions:
        setup, params = meant(question, ToolboxSetup, limits.toolbox)
        if setup.name not in boxes:
            boxes[setup.name] = _new_box(f"env.toolbox.{setup.name}", params)
            _require_tools(f"env.toolbox.{setup.name}", boxes[setup.name], params)
        _require_row(question, setup, boxes[setup.name])


def _require_row(question: Question, setup: ToolboxSetup, box: Box) -> None:
    where = f"question {question.question_id!r}: setup.row"
    try:
        inspect.signature(box.reset).bind(**setup.row)
    except TypeError as fault:
        raise ValueError(f"{where} does not fit env.toolbox.{setup.name}.reset: {fault}") from None
    members = [method.__code__.co_names for _, method in inspect.getmembers(type(box), inspect.isfunction)]
    if not (question.answers or hasattr(box, "get_reward") or any("reward" in names for names in members)):
        raise ValueError(
            f"question {question.question_id!r} has no answers, and {type(box).__name__} has no get_reward and sets no "
            "reward: its success is undefined; give it one of the three"
        )


def _require_tools(where: str, box: Box, params: ToolboxParams) -> None:
    try:
        tools = [box] if isinstance(box, Offering) else methods(box, timeout_s=params.timeout_s)
    except ValueError as fault:
        raise ValueError(f"{where}: {fault}") from None
    get_reward = getattr(box, "get_reward", None)
    scores = get_reward is not None and "answer" in inspect.signature(get_reward).parameters
    if not tools and not scores:
        raise ValueError(f"{where}: {params.class_} has no public method that could be a tool, and scores no answer")
    if bool(inspect.getmembers(type(box), inspect.iscoroutinefunction)) != (params.timeout_s is not None):
        mend = "a method waits, and for ever; set" if params.timeout_s is None else "no method waits; leave out"
        raise ValueError(f"{where}: {mend} timeout_s")


def _new_box(where: str, params: ToolboxParams) -> Box:
    box_class = own_code.load(where, params.class_)
    try:
        box = box_class()
    except Exception as fault:
        reason = f"{type(fault).__name__}: {fault}"
        raise ValueError(f"{where}: {params.class_}() cannot be made ({reason})") from fault
    if not isinstance(box, Box):
        raise ValueError(f"{where}: {params.class_} has no method reset")
    return box
