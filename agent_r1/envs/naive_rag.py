"""The baseline without tools: one search with the question, then one answer."""

from __future__ import annotations

from typing import Any

from agent_r1.envs.actions import parse_action
from agent_r1.envs.base import Transition
from agent_r1.envs.tool_env import answered, canonical, think
from agent_r1.records import CallStatus, Outcome, Question
from agent_r1.search.base import Search
from agent_r1.tools.search import render_passages

SYSTEM = "Answer the question from the passages."


class NaiveRagEnv:
    """One question with the `top_k` passages found for it, answered in one action.

    Anything but an answer ends the episode as MALFORMED. Rewards: `think`; `progress`, the number of gold passages
    among those shown; with an answer `em`, `f1`, and `grounded` in the passages.
    """

    def __init__(self, question: Question, index: Search, *, top_k: int, system: str = SYSTEM) -> None:
        [passages] = index.search([question.text], top_k)
        self.system = system
        self._shown = render_passages(passages)
        self.user = f"{self._shown}\n\n{question.text}"
        self.tools: list[dict[str, Any]] = []
        self._question = question
        self._found = float(len({passage.title for passage in passages}.intersection(question.gold_titles)))

    def step(self, action: str) -> Transition:
        """Takes the one action's text, without its end token."""
        parsed = parse_action(action)
        facts = {"think": think(parsed), "progress": self._found}
        if parsed.answer is not None:
            return answered(parsed.answer, self._question, [self._shown], facts)
        return Transition(
            observation=None,
            outcome=Outcome.MALFORMED,
            tool=parsed.tool,
            arguments="" if parsed.arguments is None else canonical(parsed.arguments),
            call_status=CallStatus.UNKNOWN_TOOL if parsed.tool else CallStatus.MALFORMED,
            rewards=facts,
        )
