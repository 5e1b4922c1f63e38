"""Worlds that others wrote: which one a row of data means, and how one is played in text.

What they can do beyond that, and what can go wrong with them, is in `gym_env`, `openenv` and `toolbox_env`.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, NamedTuple, TypeVar

from pydantic import Field

from agent_r1.envs.base import Env, ParsedAction, Transition, parse_action, refuse_constant
from agent_r1.envs.tool_env import canonical, think, told
from agent_r1.params.env import EnvParams
from agent_r1.params.sections import Section, nearest, validated
from agent_r1.records import Call, CallStatus, Outcome, Question
from agent_r1.tools.base import ToolError, ToolResult
from agent_r1.tools.toolbox import cut

SYSTEM = "Act until the task is done, with one action at a time."
FORMAT = "Write one action as <answer>...</answer>."
MOVE = "move"  # what the calls of a world without tools are called
MOST_CHARACTERS = 100_000  # of a row's setup

Seed = Annotated[int, Field(ge=0, strict=True)]


class Setup(Section):
    """What a row of data may say of its world; it names neither code nor an address."""

    name: str  # under which params.yaml declares it


S = TypeVar("S", bound=Setup)
P = TypeVar("P")


def meant(question: Question, kind: type[S], declared: Mapping[str, P]) -> tuple[S, P]:
    """A question's setup, and what `env.<question.env>` of params.yaml declares under its name.

    A ValueError names the question and what is wrong with its setup: no JSON, an unknown key, a name that nobody
    declares.
    """
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


class Reply(NamedTuple):
    """A world's answer to a move."""

    text: str  # for the policy, if it goes on
    reward: float
    success: bool
    over: Outcome | None = None  # ENDED at its own end, TURN_LIMIT at a limit of its own


class TextEnv(Env):
    """A world in which a move is the text between the answer tags, for at most `env.max_steps` actions.

    A move that the world refuses, and an action without one, is told what is wrong and the episode goes on. It ends
    where the world does, as ENDED; else, out of steps, as TURN_LIMIT, and as MALFORMED where the last action is.

    Rewards, unweighted: on every step `think`, and `env`, the world's own, 0.0 for what was no move; on the last one
    `success`, 1.0 or 0.0.
    """

    moves: Sequence[str] = ()  # all that there are, where they have names

    def __init__(self, task: str, limits: EnvParams) -> None:
        self.system, self.user = told(SYSTEM, limits), task
        self._limits, self._steps = limits, 0

    async def begin(self) -> str:
        """Makes the world ready, and says what the policy is shown of it at first."""
        raise NotImplementedError

    async def move(self, text: str) -> Reply:
        """Makes a move; a ToolError says why the world knows no such move, and a WorldFault that it failed."""
        raise NotImplementedError

    async def open(self) -> None:
        self.user = f"{self.user}\n\n{self._shown(await self.begin())}"

    async def step(self, action: str) -> Transition:
        """Takes an action's text, without its end token."""
        if self._steps == self._limits.max_steps:
            raise RuntimeError("the episode is over: no step is left")
        self._steps += 1
        parsed = parse_action(action)
        if parsed.answer is None:
            reply = Reply(f"Error: {parsed.problem or 'there are no tools'}. {FORMAT}", 0.0, False)
            return self._transition(parsed, reply, _without_move(parsed))
        return self._transition(parsed, *await self._moved(parsed.answer))

    async def _moved(self, text: str) -> tuple[Reply, Call]:
        started, status = time.perf_counter(), CallStatus.OK
        try:
            reply = await self.move(text)
        except ToolError as refusal:
            reply, status = Reply(f"Error: {refusal}", 0.0, False), CallStatus.FAILED
        seconds = time.perf_counter() - started
        spelled = json.dumps(text, ensure_ascii=False)
        return reply, Call(tool=MOVE, arguments=spelled, status=status, latency_s=seconds)

    def _transition(self, parsed: ParsedAction, reply: Reply, call: Call) -> Transition:
        rewards = {"think": think(parsed), "env": reply.reward}
        over = reply.over
        if over is None and self._steps == self._limits.max_steps:
            over = Outcome.MALFORMED if parsed.problem else Outcome.TURN_LIMIT
        if over is None:
            return Transition(observations=(self._shown(reply.text),), calls=(call,), rewards=rewards)
        return Transition(outcome=over, calls=(call,), rewards=rewards | {"success": float(reply.success)})

    def _shown(self, text: str) -> str:
        return cut(ToolResult(text=text), self._limits.max_result_characters).text


def number(reward: Any, whose: str) -> float:
    """A reward as a number; a ValueError says whose it is if it is none."""
    try:
        value = float(reward)
    except (TypeError, ValueError, OverflowError):
        value = math.nan
    if not math.isfinite(value):
        raise ValueError(f"{whose} gave the reward {str(reward)[:80]}; a reward is a finite number")
    return value


def _without_move(parsed: ParsedAction) -> Call:
    """Its first call, where it is one of a tool: an action has one at most."""
    for call in parsed.calls:
        return Call(tool=call.tool, arguments=canonical(call.arguments), status=CallStatus.UNKNOWN_TOOL)
    return Call(status=CallStatus.MALFORMED)
