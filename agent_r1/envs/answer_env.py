"""Question answering without tools: what there is to read stands in the prompt, and the agent answers once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from agent_r1.envs.actions import parse_action
from agent_r1.envs.base import Transition
from agent_r1.envs.tool_env import answered, canonical, think
from agent_r1.records import CallStatus, Outcome, Passage, Question
from agent_r1.tools.search import render_passages

FROM_PASSAGES = "Answer the question from the passages."
CLOSED_BOOK = "Answer the question."


class AnswerEnv:
    """One question below some passages, or none, answered in one action.

    Where the passages come from is the caller's affair. Anything but an answer ends the episode as MALFORMED.
    Rewards: `think`; `progress`, the number of gold passages among those shown; with an answer `em`, `f1`, and
    `grounded` in the passages.
    """

    def __init__(self, question: Question, passages: Sequence[Passage], *, system: str = FROM_PASSAGES) -> None:
        self.system = system
        self._shown = [render_passages(passages)] if passages else []
        self.user = "\n\n".join([*self._shown, question.text])
        self.tools: list[dict[str, Any]] = []
        self._question = question
        self._found = float(len({passage.title for passage in passages}.intersection(question.gold_titles)))

    def step(self, action: str) -> Transition:
        """Takes the one action's text, without its end token."""
        parsed = parse_action(action)
        facts = {"think": think(parsed), "progress": self._found}
        if parsed.answer is not None:
            return answered(parsed.answer, self._question, self._shown, facts)
        return Transition(
            observation=None,
            outcome=Outcome.MALFORMED,
            tool=parsed.tool,
            arguments="" if parsed.arguments is None else canonical(parsed.arguments),
            call_status=CallStatus.UNKNOWN_TOOL if parsed.tool else CallStatus.MALFORMED,
            rewards=facts,
        )
