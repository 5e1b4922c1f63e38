"""Conversations with an agent: every question is an episode of its own, whose untrusted text is never a command."""

from __future__ import annotations

import contextlib
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.padding import Padding
from rich.text import Text

from agent_r1.answers import normalize
from agent_r1.envs.base import parse_action
from agent_r1.evaluation.transcript import shown_arguments
from agent_r1.faults import WorldFault
from agent_r1.harmless import harmless
from agent_r1.http.endpoint import Endpoint
from agent_r1.params import Params
from agent_r1.records import CallStatus, Outcome, Passage, Question, StopReason, of_split
from agent_r1.rollout.episode import StepView
from agent_r1.serving.wire import Cards, Event, Limits
from agent_r1.tables import read_rows

if TYPE_CHECKING:  # who asks a served agent loads no engine
    from agent_r1.serving.agent import Agent

LABEL = 8  # columns
EXAMPLES = 3  # test questions that a conversation opens with
CALL = "bold cyan"
ANSWER = "bold green"
THOUGHT = "dim italic"
QUIET = "dim"
FAULT = "yellow"


@dataclass(frozen=True, slots=True)
class Answerer:
    """An agent that answers questions, in this process or elsewhere."""

    title: str  # a name for people
    limits: Limits
    ask: Callable[[str], Iterator[StepView]]  # the steps of a question's episode; ValueError if it has none
    about: Sequence[str] = ()  # what it is, and questions that it can be asked


def introduction(settings: Params, folder: Path, *, built_in: bool) -> tuple[list[str], set[str]]:
    """Lines that say what a policy is, with test questions, and the words that it knows.

    A built-in model knows the words of its world alone. Of any other model the set is empty.
    """
    places = settings.places
    if not places.questions.exists():
        return [], set()
    questions = read_rows(places.questions, Question)
    examples = [row.text for row in of_split(questions, "test")[:EXAMPLES]]
    if not built_in:
        return ["It practised questions such as:", *examples], set()
    texts = [f"{row.title} {row.text}" for row in read_rows(places.passages, Passage)]
    words = normalize(" ".join([*texts, *(row.text for row in questions)])).split()
    weights = sum(file.stat().st_size for file in folder.glob("*.safetensors")) / 4e6
    data = ", ".join(settings.prepare.datasets)
    return [f"It has {weights:.1f} million weights, and knows {data} alone. Ask it such as:", *examples], set(words)


@contextlib.contextmanager
def local_answerer(
    opening: AbstractContextManager[Agent], seed: int, title: str, about: Sequence[str], words: Collection[str]
) -> Iterator[Answerer]:
    """An agent in this process, which knows these `words` alone, if any.

    A repeated question is sampled anew; the seed matters at temperatures above 0.
    """
    counts: Counter[str] = Counter()
    with opening as agent:

        def ask(text: str) -> Iterator[StepView]:
            unknown = [word for word in normalize(text).split() if words and word.isalpha() and word not in words]
            if unknown:
                raise ValueError(f"It never read {unknown[0]!r}. {' '.join(about[:2])}")
            counts[text] += 1
            return agent.ask(text, seed=seed, sample=counts[text] - 1)

        yield Answerer(title, Limits.of(agent.shared.limits), ask, about)


@contextlib.contextmanager
def remote_answerer(endpoint: Endpoint, name: str | None) -> Iterator[Answerer]:
    """An agent behind a server; ValueError for another name or a refused question, WorldFault if it fails."""
    [card] = endpoint.describe(Cards).data
    if name not in (None, card.id):
        raise ValueError(f"the agent at {endpoint.url} is called {harmless(card.id)!r}, not {name!r}")

    def ask(text: str) -> Iterator[StepView]:
        for event in endpoint.stream(Event, {"model": card.id, "messages": [{"role": "user", "content": text}]}):
            if event.error:
                raise WorldFault(f"the agent at {endpoint.url}: {harmless(event.error.message)}")
            if event.agent_r1:
                yield event.agent_r1
                if event.agent_r1.outcome:
                    return
        raise WorldFault(f"the agent at {endpoint.url} ends without a step that ends the episode")

    yield Answerer(f"{card.id} at {endpoint.url}", card.limits, ask)


def chat(opening: AbstractContextManager[Answerer], question: str | None) -> None:
    """Opens an agent, shows its title, and answers one question, typed ones, or the lines of standard input."""
    at_keyboard = question is None and sys.stdin.isatty()
    console = Console(highlight=False, force_terminal=None if at_keyboard or question is not None else False)
    with contextlib.ExitStack() as stack:
        with console.status("loading"):
            agent = stack.enter_context(opening)
        screen = Screen(console, agent.limits)
        screen.say(f"{agent.title} answers{'; Ctrl-D ends' if at_keyboard else ''}", QUIET)
        lines: Iterable[str] = sys.stdin if question is None else [question]
        if at_keyboard:
            for line in agent.about:
                screen.say(line, QUIET, indent=2)
            lines = keyboard_questions(console)
        converse(agent, screen, filter(None, map(str.strip, lines)), echo=not at_keyboard)


def converse(agent: Answerer, screen: Screen, questions: Iterable[str], *, echo: bool) -> None:
    """Asks the questions in turn and shows their episodes, or why a question was refused."""
    for text in questions:
        if echo:
            screen.question(text)
        start = time.perf_counter()
        views = list[StepView]()
        try:
            for view in screen.waiting(agent.ask(text)):
                screen.step(view)
                views.append(view)
        except ValueError as refusal:
            screen.say(str(refusal), FAULT, indent=2)
            screen.console.print()
        else:
            screen.ending(views, time.perf_counter() - start)


def keyboard_questions(console: Console) -> Iterator[str]:
    """Questions from the keyboard, until Ctrl-D or Ctrl-C."""
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401  # gives input() editing and a history

    while True:
        handler = signal.signal(signal.SIGINT, signal.default_int_handler)  # elsewhere it ends the command
        try:
            question = input("question> ")
        except (EOFError, KeyboardInterrupt):
            console.print()
            return
        finally:
            signal.signal(signal.SIGINT, handler)
        yield question


class Screen:
    """Prints episodes step by step."""

    def __init__(self, console: Console, limits: Limits) -> None:
        self.console = console
        self._limits = limits

    def say(self, text: str, style: str, *, indent: int = 0) -> None:
        """A line about the conversation."""
        self._put(Text(harmless(text), style), indent=indent)

    def question(self, text: str) -> None:
        """Repeats a question that was not typed here."""
        self._put(Text.assemble("question".ljust(LABEL + 2), (harmless(text), "bold")), indent=0)

    def waiting(self, arriving: Iterator[StepView]) -> Iterator[StepView]:
        """Passes on the steps of an episode, with a spinner before each."""
        outcome = None
        while outcome is None:
            with self.console.status("thinking"):
                view = next(arriving)
            outcome = view.outcome
            yield view

    def step(self, view: StepView) -> None:
        """Shows the thought and the call or answer of a step, and the reply to it."""
        self._action(view)
        if view.step.stop_reason is StopReason.LENGTH:
            self._labelled("", f"(cut after {view.step.action_stop - view.step.action_start} tokens)", FAULT)
        for call, observation in zip(view.step.calls, view.observations, strict=False):
            if call.status is not CallStatus.OK:
                self._labelled("reply", observation, FAULT)
                continue
            for line in observation.splitlines():
                self._put(passage(line), indent=4, cut=True)

    def ending(self, views: Sequence[StepView], seconds: float) -> None:
        """Shows why there is no answer, if there is none, and the episode's steps, calls, tokens and seconds.

        An agent outside may answer something else than the policy said.
        """
        last = views[-1]
        if last.outcome is not Outcome.ANSWERED:
            self._labelled("none", f"no answer: {_why(last, self._limits)}", FAULT)
        elif last.answer != parse_action(last.action, answers=self._limits.answers).answer:
            self._labelled("answer", last.answer or "(empty)", ANSWER)
        counts = {"step": len(views), "call": sum(bool(call.tool) for view in views for call in view.step.calls)}
        parts = [f"{count} {noun}{'' if count == 1 else 's'}" for noun, count in counts.items()]
        self._put(Text(", ".join([*parts, f"{last.tokens} tokens", f"{seconds:.1f} s"]), QUIET))
        self.console.print()

    def _action(self, view: StepView) -> None:
        parsed = parse_action(view.action, self._limits.parallel_calls, self._limits.answers)
        text = view.action.strip()
        if parsed.problem:  # an action without calls was asked for none, such as a summary
            called = bool(view.step.calls)
            self._labelled("says", f"{text} ({parsed.problem})" if called else text, FAULT if called else THOUGHT)
            return
        if parsed.thought:
            self._labelled("thought", parsed.thought, THOUGHT)
        if parsed.answer is not None:
            self._labelled("answer", parsed.answer or "(empty)", ANSWER)
            return
        for call in view.step.calls:
            failure = "" if call.status is CallStatus.OK else f" ({call.status})"
            self._labelled(call.tool, shown_arguments(call.arguments) + failure, CALL)

    def _labelled(self, label: str, text: str, style: str) -> None:
        lines = [harmless(line) for line in text.splitlines()]
        margin = harmless(label).ljust(LABEL - 1) + " "
        self._put(Text.assemble((margin, QUIET), (("\n" + " " * LABEL).join(lines), style)))

    def _put(self, text: Text, *, indent: int = 2, cut: bool = False) -> None:
        if self.console.is_terminal:
            text.no_wrap = cut
            text.overflow = "ellipsis" if cut else "fold"
            self.console.print(Padding(text, (0, 0, 0, indent), expand=False))
            return
        for line in text.split():
            line.pad_left(indent)
            self.console.print(line, soft_wrap=True)


def passage(line: str) -> Text:
    """A passage as the search tool renders it, `Title: text`, with its title bold."""
    title, colon, rest = harmless(line).partition(": ")
    return Text.assemble((title, "bold" if colon else ""), colon, rest)


def _why(last: StepView, limits: Limits) -> str:
    match last.outcome:
        case Outcome.TURN_LIMIT:
            return f"all {limits.max_steps} steps are used (env.max_steps)"
        case Outcome.TOKEN_LIMIT:
            return f"the reply leaves no room for another action in {limits.max_tokens} tokens (env.max_tokens)"
        case Outcome.MALFORMED:
            return f"the last of {limits.max_steps} steps is neither a tool call nor an answer (env.max_steps)"
    return last.fault or f"the episode ended as {last.outcome}"
