"""Multi-hop question answering with tools (Agent-R1, arXiv 2511.14460), and from passages in the prompt.

At the end stand the episodes to run for given questions, one function for each way of asking them.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from textwrap import shorten
from typing import Any

from agent_r1.answers import exact_match, f1, occurs
from agent_r1.envs.base import Attempt, ParsedAction, Transition, parse_action
from agent_r1.faults import WorldFault
from agent_r1.params.stages import EnvParams
from agent_r1.records import CallStatus, Outcome, Passage, Question
from agent_r1.search.base import Search
from agent_r1.tools.base import Tool, ToolResult
from agent_r1.tools.search import render_passages, search_tool

SYSTEM = "Answer the question. Search when facts are missing."
FROM_PASSAGES = "Answer the question from the passages."
CLOSED_BOOK = "Answer the question."
FORMAT = 'Write <tool_call>{"name": ..., "arguments": {...}}</tool_call> or <answer>...</answer>.'


class ToolEnv:
    """One question, answered in at most `max_steps` actions. It may be a text alone, whose answer nobody knows.

    An action calls a tool or answers. A call that fails in any way, and an action that is neither, is told what is
    wrong and the episode goes on. It ends as ANSWERED; as MALFORMED where the last step allowed is malformed; as
    ABORTED where the other side of a call failed; else, out of steps, as TURN_LIMIT.

    Rewards, unweighted: on every step `think`; on every step whose call succeeds and whose result is read `progress`,
    the number of gold passages seen for the first time; on the step that answers `em`, `f1`, and `grounded` in the
    results of calls that succeeded. An error message grounds nothing: it repeats what the policy wrote. Without gold
    answers and passages to compare with there is no `progress`, `em` or `f1`. The call of the last step allowed is made
    too: whether it succeeds is a fact about it, though nobody reads its result.
    """

    def __init__(
        self, question: Question | str, tools: Sequence[Tool], *, max_steps: int, system: str = SYSTEM
    ) -> None:
        self.system = system
        self.user = question if isinstance(question, str) else question.text
        self.tools: list[dict[str, Any]] = [tool.schema for tool in tools]
        self._tools = {tool.name: tool for tool in tools}
        self._gold = None if isinstance(question, str) else question
        self._unseen = set(self._gold.gold_titles) if self._gold else set()
        self._shown: list[str] = []
        self._steps_left = max_steps

    def step(self, action: str) -> Transition:
        """Takes an action's text, without its end token."""
        if not self._steps_left:
            raise RuntimeError("the episode is over: no step is left")
        self._steps_left -= 1
        parsed = parse_action(action)
        if parsed.answer is not None:
            return answered(parsed.answer, self._gold, self._shown, {"think": think(parsed)})
        started = time.perf_counter()
        try:
            result = self._call(parsed)
        except WorldFault as fault:
            return _aborted(parsed, fault, time.perf_counter() - started)
        latency_s = time.perf_counter() - started
        last = Outcome.MALFORMED if result.call_status is CallStatus.MALFORMED else Outcome.TURN_LIMIT
        over = None if self._steps_left else last
        said = result.text if result.call_status is CallStatus.OK else f"Error: {result.text}"
        return Transition(
            observation=None if over else said,
            outcome=over,
            tool=parsed.tool,
            arguments="" if parsed.arguments is None else canonical(parsed.arguments),
            call_status=result.call_status,
            latency_s=latency_s,
            rewards={"think": think(parsed)},
            rewards_when_read={} if over else self._take_in(result),
        )

    def _call(self, parsed: ParsedAction) -> ToolResult:
        if parsed.arguments is None:
            return ToolResult(text=f"{parsed.problem}. {FORMAT}", call_status=parsed.call_status)
        if parsed.tool not in self._tools:
            return ToolResult(
                text=f"there is no tool {parsed.tool!r}, only {', '.join(self._tools)}",
                call_status=CallStatus.UNKNOWN_TOOL,
            )
        return asyncio.run(self._tools[parsed.tool].call(parsed.arguments))

    def _take_in(self, result: ToolResult) -> dict[str, float]:
        """Remembers what a call that succeeded has shown; returns its `progress`."""
        if result.call_status is not CallStatus.OK:
            return {}
        self._shown.append(result.text)
        if self._gold is None:
            return {}
        found = self._unseen.intersection(result.titles)
        self._unseen -= found
        return {"progress": float(len(found))}


def answered(answer: str, gold: Question | None, shown: Sequence[str], facts: dict[str, float]) -> Transition:
    """The end of an episode with an answer: `em`, `f1`, and `grounded`, 1.0 where the answer's words stand in a text.

    Without a gold answer to compare with there is neither `em` nor `f1`; `facts` are further reward parts.
    """
    rewards = {"em": exact_match(answer, gold.answers), "f1": f1(answer, gold.answers)} if gold else {}
    rewards["grounded"] = float(any(occurs(answer, text) for text in shown))
    return Transition(observation=None, outcome=Outcome.ANSWERED, answer=answer, rewards=rewards | facts)


def _aborted(parsed: ParsedAction, fault: WorldFault, latency_s: float) -> Transition:
    """The end of an episode whose call met a fault of the world: no rewards."""
    return Transition(
        observation=None,
        outcome=Outcome.ABORTED,
        fault=str(fault) or type(fault).__name__,
        tool=parsed.tool,
        arguments=canonical(parsed.arguments or {}),
        call_status=CallStatus.TIMEOUT if isinstance(fault, TimeoutError) else CallStatus.FAILED,
        latency_s=latency_s,
    )


def think(parsed: ParsedAction) -> float:
    """1.0 for a well-formed action that opens with a thought which says something, else 0.0."""
    return float(bool(parsed.thought) and not parsed.problem)


def canonical(arguments: dict[str, Any]) -> str:
    """Arguments as JSON; equal arguments give equal text."""
    return json.dumps(arguments, ensure_ascii=False, sort_keys=True)


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


def tool_attempts(
    questions: Sequence[Question], index: Search, params: EnvParams, *, samples: int = 1, first_group: int = 0
) -> list[Attempt]:
    """`samples` attempts at each question with the search tool; the attempts of a question are a group.

    Groups are numbered from `first_group`.
    """
    env = _with_search(index, params)
    return [
        Attempt(question_id=question.question_id, group=group, sample=sample, open=partial(env, question))
        for group, question in enumerate(questions, start=first_group)
        for sample in range(samples)
    ]


def asked_attempt(text: str, index: Search, params: EnvParams, *, sample: int = 0) -> Attempt:
    """An attempt at a question that a person asks, with the search tool; `sample` tells repetitions apart."""
    env = _with_search(index, params)
    return Attempt(question_id=shorten(text, 80), group=0, sample=sample, open=partial(env, text))


def naive_rag_attempts(questions: Sequence[Question], index: Search, params: EnvParams) -> list[Attempt]:
    """One attempt at each question, from the passages that the question itself finds."""
    found = index.search([question.text for question in questions], params.top_k)
    return _answer_attempts(questions, found, FROM_PASSAGES, params)


def closed_book_attempts(questions: Sequence[Question], params: EnvParams) -> list[Attempt]:
    """One attempt at each question, with nothing to read."""
    return _answer_attempts(questions, [[] for _ in questions], CLOSED_BOOK, params)


def gold_passages_attempts(
    questions: Sequence[Question], gold: Mapping[str, Sequence[Passage]], params: EnvParams
) -> list[Attempt]:
    """One attempt at each question with gold passages, from those; `gold` has them by question_id."""
    known = [question for question in questions if question.question_id in gold]
    return _answer_attempts(known, [gold[question.question_id] for question in known], FROM_PASSAGES, params)


def _with_search(index: Search, params: EnvParams) -> Callable[[Question | str], ToolEnv]:
    """Makes the environment of a question in which the policy can search."""
    tools = [search_tool(index, top_k=params.top_k)]
    return partial(ToolEnv, tools=tools, max_steps=params.max_steps, system=_told(SYSTEM, params))


def _answer_attempts(
    questions: Sequence[Question], passages: Sequence[Sequence[Passage]], task: str, params: EnvParams
) -> list[Attempt]:
    env = partial(AnswerEnv, system=_told(task, params))
    return [
        Attempt(question_id=question.question_id, group=group, sample=0, open=partial(env, question, shown))
        for group, (question, shown) in enumerate(zip(questions, passages, strict=True))
    ]


def _told(task: str, params: EnvParams) -> str:
    """The system message: the task, and the configured instructions."""
    return f"{task} {params.instructions}" if params.instructions else task
