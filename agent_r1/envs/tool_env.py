"""Multi-hop question answering with tools (Agent-R1, arXiv 2511.14460), and from passages in the prompt."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Mapping, Sequence
from functools import partial
from textwrap import shorten
from typing import Any, NamedTuple

from agent_r1.answers import exact_match, f1, occurs
from agent_r1.envs.base import Attempt, Conversation, Env, ParsedAction, ParsedCall, Transition, hermes, parse_action
from agent_r1.envs.shared import Shared
from agent_r1.faults import WorldFault
from agent_r1.params.env import Answers, EnvParams
from agent_r1.records import Call, CallStatus, Json, Outcome, Passage, Question
from agent_r1.tools.base import Tool, ToolResult
from agent_r1.tools.journal import CallPlace, Journal
from agent_r1.tools.search import render_passages

SYSTEM = "Answer the question. Search when facts are missing."
FROM_PASSAGES = "Answer the question from the passages."
CLOSED_BOOK = "Answer the question."
ANSWER_PLACES: dict[Answers, str] = {"tagged": "an answer between <answer> and </answer>", "plain": "an answer alone"}
_LONGEST_EXAMPLE = 80  # characters of a question
_EXAMPLES: Json = {"integer": 1, "number": 1, "boolean": True, "array": [], "object": {}}  # by JSON type


class ToolEnv(Env):
    """One question, answered in at most `max_steps` actions. It may be a text alone, whose answer nobody knows.

    An action calls a tool or answers. A call that fails in any way, and an action that is neither, gets an error
    message, and the episode goes on. It ends as ANSWERED; as MALFORMED where the last step allowed is malformed; as
    ABORTED where the other side of a call failed; else, out of steps, as TURN_LIMIT.

    Rewards, unweighted: on every step `think`; on every step whose call succeeds and whose result is read `progress`,
    the number of gold passages seen for the first time; on the step that answers `em`, `f1`, and `grounded` in the
    results of calls that succeeded. An error message grounds nothing: it repeats the policy's words. Without gold
    answers and passages there is no `progress`, `em` or `f1`. The call of the last step is made too: its success is a
    fact, though nobody reads its result.
    """

    def __init__(
        self,
        question: Question | str,
        tools: Sequence[Tool],
        *,
        max_steps: int,
        parallel_calls: int = 1,
        answers: Answers = "tagged",
        system: str = SYSTEM,
        journal: Journal | None = None,
        seed: int = 0,
    ) -> None:
        """With a journal, calls that wait for the world are made once for the episode of this seed."""
        self.system = system
        self.user = question if isinstance(question, str) else question.text
        self.tools = [tool.schema for tool in tools]
        self._tools = {tool.name: tool for tool in tools}
        self.gold = None if isinstance(question, str) else question
        self.unseen = set(self.gold.gold_titles) if self.gold else set()  # gold titles that no result has shown
        self.shown: list[str] = []  # the results so far
        self._read = ""
        self._step = 0
        self._max_steps = max_steps
        self._parallel_calls = parallel_calls
        self._answers: Answers = answers
        self._journal = journal
        self._seed = seed

    @property
    def example_call(self) -> str:
        """A call of the first tool, which a search understands: its texts are the question."""
        return example_call(self.tools[0], self.user) if self.tools else ""

    @property
    def state(self) -> str:
        """The last observation."""
        return self._read

    @property
    def steps_left(self) -> int:
        """The actions that the episode may still take."""
        return self._max_steps - self._step

    async def step(self, action: str) -> Transition:
        """Takes an action's text, without its end token."""
        if self._step == self._max_steps:
            raise RuntimeError("the episode is over: no step is left")
        self._step += 1
        parsed = parse_action(action, self._parallel_calls, self._answers)
        facts = {"think": think(parsed)}
        if parsed.answer is not None:
            return answered(parsed.answer, self.gold, self.shown, facts)
        exchanges = await self._make(parsed)
        calls = tuple(exchange.call for exchange in exchanges)
        if faults := [exchange.fault for exchange in exchanges if exchange.fault]:
            return Transition(outcome=Outcome.ABORTED, fault=faults[0], calls=calls)
        if self._step == self._max_steps:
            last = Outcome.MALFORMED if parsed.problem else Outcome.TURN_LIMIT
            return Transition(outcome=last, calls=calls, rewards=facts)
        observations = tuple(exchange.observation for exchange in exchanges)
        self._read = "\n".join(observations)
        return Transition(
            observations=observations,
            calls=calls,
            rewards=facts,
            rewards_when_read=self._take_in([exchange.result for exchange in exchanges]),
        )

    def redraw(self, seed: int) -> None:
        """Changes nothing: there is no chance in it."""

    async def close(self) -> None:
        for tool in self._tools.values():
            await tool.close()

    async def _make(self, parsed: ParsedAction) -> list[_Exchange]:
        """Makes an action's calls at the same time and returns their results."""
        if parsed.problem:
            text = f"{parsed.problem}. {advice(self.example_call, self._answers)}"
            result = ToolResult(text=text, call_status=CallStatus.MALFORMED)
            return [_Exchange(Call(status=CallStatus.MALFORMED), result)]
        coroutines = [self._call(place, *call) for place, call in enumerate(parsed.calls)]
        return [await coroutines[0]] if len(coroutines) == 1 else list(await asyncio.gather(*coroutines))

    async def _call(self, place: int, tool: str, arguments: Json) -> _Exchange:
        arguments_json = canonical(arguments)
        if tool not in self._tools:
            problem = f"there is no tool {tool!r}, only {', '.join(self._tools)}"
            result = ToolResult(text=problem, call_status=CallStatus.UNKNOWN_TOOL)
            return _Exchange(Call(tool=tool, arguments=arguments_json, status=result.call_status), result)
        instance = self._tools[tool]
        at = CallPlace(self._seed, self._step, place)
        journal = self._journal if instance.waits else None
        entry = journal.find(at, tool, arguments_json) if journal else None
        if entry:
            await instance.recall(arguments, entry.result)
            return _Exchange(entry.made, entry.result)
        exchange = await _timed(instance, arguments, arguments_json)
        if journal and not exchange.fault:
            journal.add(at, exchange.call, exchange.result)
        return exchange

    def _take_in(self, results: Sequence[ToolResult]) -> dict[str, float]:
        """Remembers the results of calls that succeeded; returns their `progress`."""
        successes = [result for result in results if result.call_status is CallStatus.OK]
        self.shown += [result.text for result in successes]
        if self.gold is None or not successes:
            return {}
        titles = self.unseen.intersection(title for result in successes for title in result.titles)
        self.unseen -= titles
        return {"progress": float(len(titles))}


class _Exchange(NamedTuple):
    """A call, and what came back."""

    call: Call
    result: ToolResult
    fault: str = ""  # of the world

    @property
    def observation(self) -> str:
        """The text that the policy reads."""
        return self.result.text if self.call.status is CallStatus.OK else f"Error: {self.result.text}"


async def _timed(tool: Tool, arguments: Json, arguments_json: str) -> _Exchange:
    fault = ""
    start = time.perf_counter()
    try:
        result = await tool.call(arguments)
    except WorldFault as error:
        fault = error.words
        status = CallStatus.TIMEOUT if isinstance(error, TimeoutError) else CallStatus.FAILED
        result = ToolResult(text=fault, call_status=status)
    latency_s = time.perf_counter() - start
    call = Call(tool=tool.name, arguments=arguments_json, status=result.call_status, latency_s=latency_s)
    return _Exchange(call, result, fault)


def answered(answer: str, gold: Question | None, texts: Sequence[str], facts: dict[str, float]) -> Transition:
    """The end of an episode with an answer: `em`, `f1`, and `grounded`, 1.0 where the answer's words stand in a text.

    Without a gold answer to compare with there is neither `em` nor `f1`; `facts` are further reward parts.
    """
    rewards = {"em": exact_match(answer, gold.answers), "f1": f1(answer, gold.answers)} if gold else {}
    rewards["grounded"] = float(any(occurs(answer, text) for text in texts))
    return Transition(outcome=Outcome.ANSWERED, answer=answer, rewards=rewards | facts)


def example_call(tool: Json, question: str) -> str:
    """A call of a tool, in Hermes, with the arguments that its schema requires; texts among them are the question."""
    function = tool["function"]
    parameters = function["parameters"]
    text = shorten(question, _LONGEST_EXAMPLE, placeholder="")
    required = parameters.get("required")
    names = [name for name in required if isinstance(name, str)] if isinstance(required, list) else []
    arguments = {name: _example(parameters["properties"].get(name), text) for name in names}
    return hermes([ParsedCall(function["name"], arguments)])


def _example(schema: Any, text: str) -> Any:
    """A value of an argument: the schema's first choice, or one of its type."""
    match schema:
        case {"enum": [first, *_]}:
            return first
        case {"type": str(kind)}:
            return _EXAMPLES.get(kind, text)
    return text


def advice(call: str, answers: Answers) -> str:
    """The end of the error message for an action that is neither call nor answer; the call is an example, or ""."""
    return f"Write {' or '.join(filter(None, [call, ANSWER_PLACES[answers]]))}."


def think(parsed: ParsedAction) -> float:
    """1.0 for a well-formed action that opens with a thought which says something, else 0.0."""
    return float(bool(parsed.thought) and not parsed.problem)


def calls_without_tools(parsed: ParsedAction) -> tuple[Call, ...]:
    """The calls of an action that does not answer, in an environment without tools."""
    unknown = ((call.tool, canonical(call.arguments)) for call in parsed.calls)
    calls = tuple(
        Call(tool=tool, arguments=arguments_json, status=CallStatus.UNKNOWN_TOOL) for tool, arguments_json in unknown
    )
    return calls or (Call(status=CallStatus.MALFORMED),)


def canonical(arguments: Json) -> str:
    """Arguments as JSON; equal arguments give equal text."""
    return json.dumps(arguments, ensure_ascii=False, sort_keys=True)


class AnswerEnv(Env):
    """One question below some passages, or none, answered in one action.

    Anything but an answer ends the episode as MALFORMED. Rewards: `think`; `progress`, the number of gold passages
    among those shown; with an answer `em`, `f1`, and `grounded` in the passages.
    """

    def __init__(
        self,
        question: Question,
        passages: Sequence[Passage],
        *,
        system: str = FROM_PASSAGES,
        answers: Answers = "tagged",
    ) -> None:
        self.system = system
        self._answers: Answers = answers
        self._shown = [render_passages(passages)] if passages else []
        self.user = "\n\n".join([*self._shown, question.text])
        self._question = question
        self._found = float(len({passage.title for passage in passages}.intersection(question.gold_titles)))

    async def step(self, action: str) -> Transition:
        """Takes the one action's text, without its end token."""
        parsed = parse_action(action, answers=self._answers)
        facts = {"think": think(parsed), "progress": self._found}
        if parsed.answer is not None:
            return answered(parsed.answer, self._question, self._shown, facts)
        return Transition(outcome=Outcome.MALFORMED, calls=calls_without_tools(parsed), rewards=facts)


def with_tools(question: Question | str, shared: Shared, seed: int) -> ToolEnv:
    """One question's environment, with the stage's tools; `seed` is of their chance."""
    limits = shared.limits
    return ToolEnv(
        question,
        shared.tools(seed),
        max_steps=limits.max_steps,
        parallel_calls=limits.parallel_calls,
        answers=limits.answers,
        system=told(SYSTEM, limits),
        journal=shared.journal,
        seed=seed,
    )


def asked_attempt(text: str, shared: Shared, *, sample: int = 0, earlier: Sequence[Conversation] = ()) -> Attempt:
    """An attempt at a question that a person asks, with the stage's tools; `sample` tells repetitions apart.

    The exchanges `earlier` in the conversation stand before the question, behind the examples.
    """

    def env(seed: int) -> ToolEnv:
        opening = with_tools(text, shared, seed)
        opening.examples = [*shared.examples, *earlier]
        return opening

    return Attempt(question_id=shorten(text, 80), group=0, sample=sample, env=env)


def naive_rag_attempts(questions: Sequence[Question], shared: Shared) -> list[Attempt]:
    """One attempt at each question, from the passages that the question itself finds."""
    passages = shared.index.search([question.text for question in questions], shared.limits.top_k)
    return _answer_attempts(questions, passages, FROM_PASSAGES, shared)


def closed_book_attempts(questions: Sequence[Question], shared: Shared) -> list[Attempt]:
    """One attempt at each question, with nothing to read."""
    return _answer_attempts(questions, [[] for _ in questions], CLOSED_BOOK, shared)


def gold_passages_attempts(
    questions: Sequence[Question], gold: Mapping[str, Sequence[Passage]], shared: Shared
) -> list[Attempt]:
    """One attempt at each question with gold passages, from those; `gold` has them by question_id."""
    subset = [question for question in questions if question.question_id in gold]
    return _answer_attempts(subset, [gold[question.question_id] for question in subset], FROM_PASSAGES, shared)


def _answer_attempts(
    questions: Sequence[Question], passages: Sequence[Sequence[Passage]], task: str, shared: Shared
) -> list[Attempt]:
    def answering(question: Question, evidence: Sequence[Passage], _: int) -> AnswerEnv:
        return AnswerEnv(question, evidence, system=told(task, shared.limits), answers=shared.limits.answers)

    return [
        Attempt(question_id=question.question_id, group=group, sample=0, env=partial(answering, question, evidence))
        for group, (question, evidence) in enumerate(zip(questions, passages, strict=True))
    ]


def told(task: str, limits: EnvParams) -> str:
    """The system message: the task, and the configured instructions."""
    return f"{task} {limits.instructions}" if limits.instructions else task
