"""Contexts that are rewritten: what the policy still reads of an episode that goes on.

Each way is an environment around another one, which knows nothing of it.
"""

from __future__ import annotations

from dataclasses import replace

from agent_r1.envs.base import Env, Restart, Transition, split_action
from agent_r1.params.env import ContextParams

ASK = "Now sum up what you know so far: you go on with your summary and the text above alone."
SO_FAR = "What you know so far:"


def in_context(env: Env, context: ContextParams) -> Env:
    """The environment with its episode read as `env.context` says."""
    match context.kind:
        case "window":
            return Window(env, context.every)
        case "summary":
            return Summary(env, context.every)
    return env


class _Around(Env):
    def __init__(self, env: Env, every: int) -> None:
        self._env, self._every, self._steps = env, every, 0

    async def open(self) -> None:
        await self._env.open()
        self.system, self.user, self.tools = self._env.system, self._env.user, self._env.tools

    async def close(self) -> None:
        await self._env.close()

    async def _answer(self, action: str) -> Transition:
        """The environment's own answer."""
        transition = await self._env.step(action)
        if transition.restart:
            raise ValueError(
                f"{type(self._env).__name__} rewrites its contexts itself; set env.context: {{kind: append, every: 0}}"
            )
        self._steps += 1
        return transition


class Window(_Around):
    """The opening and the last `every` exchanges: from then on, every step begins a new context."""

    async def step(self, action: str) -> Transition:
        """The environment's answer; see `Env.step`."""
        transition = await self._answer(action)
        if transition.outcome is not None or self._steps <= self._every:
            return transition
        return replace(transition, restart=Restart(user=self.user, keep=self._every))


class Summary(_Around):
    """After every so many steps of the environment, with what it says, the policy is asked for a summary.

    The next context opens with the question, the summary without its thought, and what the environment said last. The
    summary is an action like any other, and a step of the trajectory; it is none of the environment, counts for no
    limit of steps, and earns nothing: it states what the step before stated, as 0.

    Source: SUPO (arXiv 2510.06727), whose summaries are asked for where the context is full.
    """

    _said: Transition | None = None  # what the environment answered, while a summary is asked for

    @property
    def asks(self) -> bool:
        """Whether a summary is asked for, and no action."""
        return self._said is not None

    async def step(self, action: str) -> Transition:
        """The environment's answer, or after a summary the new context; see `Env.step`."""
        if self._said:
            said, self._said = self._said, None
            user = "\n\n".join([self.user, f"{SO_FAR}\n{_summary(action)}", *said.observations])
            return Transition(restart=Restart(user=user), rewards=dict.fromkeys(said.rewards, 0.0))
        transition = await self._answer(action)
        if transition.outcome is not None or self._steps % self._every:
            return transition
        self._said = transition
        *others, last = transition.observations
        return replace(transition, observations=(*others, f"{last}\n\n{ASK}"))


def _summary(action: str) -> str:
    """What an action says, without its thought."""
    return "".join(piece.text for piece in split_action(action) if piece.kind != "thought").strip()
