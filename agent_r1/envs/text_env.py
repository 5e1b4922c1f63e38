"""Worlds that others wrote, played with moves in text or with tools: the bases of those in `agent_r1.outside`."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Annotated, Any, NamedTuple, TypeVar

from pydantic import Field

from agent_r1.envs.base import Env, ParsedAction, Transition, parse_action, refuse_constant
from agent_r1.envs.shared import Shared
from agent_r1.envs.tool_env import ToolEnv, calls_without_tools, think, told
from agent_r1.params.env import Answers, EnvParams
from agent_r1.params.sections import Section, nearest, validated
from agent_r1.records import Call, CallStatus, Outcome, Question
from agent_r1.tools.base import Tool, ToolError, ToolResult
from agent_r1.tools.toolbox import Limited, UnderWay, cut

WITH_TOOLS = "Do the task with the tools, and answer when it is done."
SYSTEM = "Act until the task is done, with one action at a time."
FORMATS: dict[Answers, str] = {
    "tagged": "Write one action between <answer> and </answer>.",
    "plain": "Write one action alone.",
}
MOVE = "move"  # the name of the calls in a world without tools
MOST_CHARACTERS = 100_000  # of a row's setup

Seed = Annotated[int, Field(ge=0, strict=True)]


class Setup(Section):
    """A row of data about its world; it names neither code nor an address."""

    name: str  # under which params.yaml declares it


S = TypeVar("S", bound=Setup)
P = TypeVar("P")


def meant(question: Question, kind: type[S], declared: Mapping[str, P]) -> tuple[S, P]:
    """A question's setup, and the world that `env` declares under its name; a ValueError names question and fault."""
    where = f"question {question.question_id!r}: setup"
    if len(question.setup) > MOST_CHARACTERS:
        raise ValueError(f"{where} takes {len(question.setup):,} characters; at most {MOST_CHARACTERS:,} are read")
    try:
        content = json.loads(question.setup, parse_constant=refuse_constant)
    except (ValueError, RecursionError):
        raise ValueError(f"{where} is not JSON") from None
    if not isinstance(content, dict):
        raise ValueError(f'{where} is no JSON object, such as {{"name": "ice"}}')
    setup = validated(kind, content, where)
    if setup.name not in declared:
        close = nearest(setup.name, declared) if declared else ", nor any other"
        raise ValueError(f"{where} names {setup.name[:80]!r}, which env.{question.env} does not define{close}")
    return setup, declared[setup.name]


class Moved(NamedTuple):
    """A world's answer to a move."""

    text: str  # for the policy, if it goes on
    reward: float
    success: bool
    over: Outcome | None = None  # ENDED at its own end, TURN_LIMIT at a limit of its own


class TextEnv(Env):
    """A world in which a move is the text between the answer tags, for at most `env.max_steps` actions.

    A move that the world refuses, and an action without one, gets an error message, and the episode goes on. It ends
    when the world does, as ENDED; else, out of steps, as TURN_LIMIT, and as MALFORMED where the last action is.

    Rewards, unweighted: on every step `think`, and `env`, the world's own, 0.0 without a move; on the last one
    `success`, 1.0 or 0.0.
    """

    moves: Sequence[str] = ()  # all that there are, where they have names

    def __init__(self, task: str, limits: EnvParams) -> None:
        self.system = told(SYSTEM, limits)
        self.user = task
        self._limits = limits
        self._steps = 0

    async def begin(self) -> str:
        """Makes the world ready; returns the first text that the policy is shown."""
        raise NotImplementedError

    async def move(self, text: str) -> Moved:
        """Makes a move. Raises ToolError if the world knows no such move, and WorldFault if it failed."""
        raise NotImplementedError

    async def open(self) -> None:
        self.user = f"{self.user}\n\n{self._shown(await self.begin())}"

    async def step(self, action: str) -> Transition:
        """Takes an action's text, without its end token."""
        if self._steps == self._limits.max_steps:
            raise RuntimeError("the episode is over: no step is left")
        self._steps += 1
        parsed = parse_action(action, answers=self._limits.answers)
        if parsed.answer is None:
            reply = Moved(
                f"Error: {parsed.problem or 'there are no tools'}. {FORMATS[self._limits.answers]}", 0.0, False
            )
            return self._transition(parsed, reply, calls_without_tools(parsed))
        reply, call = await self._moved(parsed.answer)
        return self._transition(parsed, reply, (call,))

    async def _moved(self, text: str) -> tuple[Moved, Call]:
        start = time.perf_counter()
        status = CallStatus.OK
        try:
            reply = await self.move(text)
        except ToolError as refusal:
            reply = Moved(f"Error: {refusal}", 0.0, False)
            status = CallStatus.FAILED
        seconds = time.perf_counter() - start
        move_json = json.dumps(text, ensure_ascii=False)
        return reply, Call(tool=MOVE, arguments=move_json, status=status, latency_s=seconds)

    def _transition(self, parsed: ParsedAction, reply: Moved, calls: tuple[Call, ...]) -> Transition:
        rewards = {"think": think(parsed), "env": reply.reward}
        outcome = reply.over
        if outcome is None and self._steps == self._limits.max_steps:
            outcome = Outcome.MALFORMED if parsed.problem else Outcome.TURN_LIMIT
        if outcome is None:
            return Transition(observations=(self._shown(reply.text),), calls=calls, rewards=rewards)
        return Transition(outcome=outcome, calls=calls, rewards=rewards | {"success": float(reply.success)})

    def _shown(self, text: str) -> str:
        return cut(ToolResult(text=text), self._limits.max_result_characters).text


class ToolWorld(ToolEnv):
    """A world that is played with its own tools."""

    def __init__(self, question: Question, task: str, shared: Shared) -> None:
        """The task, if any, stands in place of the question's text."""
        limits = shared.limits
        super().__init__(
            question if question.answers else question.text,
            [],
            max_steps=limits.max_steps,
            parallel_calls=limits.parallel_calls,
            answers=limits.answers,
            system=told(WITH_TOOLS, limits),
        )
        self.user = task or question.text
        self._most_characters = limits.max_result_characters

    @property
    def state(self) -> str:
        """Unknown: an answer of a world's tool is no state of the world."""
        return ""

    def offer(self, tools: Sequence[Tool]) -> None:
        """Makes these the tools of the episode."""
        self._tools = {tool.name: Limited(tool, self._most_characters, UnderWay()) for tool in tools}
        self.tools = [tool.schema for tool in tools]

    def show(self, text: str) -> None:
        """Puts a text below the task."""
        self.user = f"{self.user}\n\n{cut(ToolResult(text=text), self._most_characters).text}"


def ended(reply: Transition) -> Transition:
    """The reply to an action with which the world has ended."""
    if reply.outcome not in (None, Outcome.TURN_LIMIT):
        return reply
    return replace(reply, outcome=Outcome.ENDED, observations=(), rewards_when_read={})


def number(reward: Any, whose: str) -> float:
    """A reward as a finite number; a ValueError says whose it is if it is none."""
    try:
        value = float(reward)
    except (TypeError, ValueError, OverflowError):
        value = math.nan
    if not math.isfinite(value):
        raise ValueError(f"{whose} gave the reward {str(reward)[:80]}; a reward is a finite number")
    return value
