"""Asks an agent: `python -m flows chat --run NAME`, or `--model` with a reference, folder or hub id.

Every question is an episode of its own, token for token as in training. Nothing is written, and the accelerator's lock
is left alone: a conversation may last, and trainings would wait for it.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import logging
import math
import os
import sys
import time
from collections import Counter
from collections.abc import Iterable, Iterator

from agent_r1.project import INDEX, PASSAGES
from rich.console import Console

from agent_r1 import params
from agent_r1.inspection.chat_screen import Screen
from agent_r1.params import EnvParams, Params
from agent_r1.policy.model import load_tokenizer
from agent_r1.rollout.attempts import asked_attempt
from agent_r1.rollout.chat import Chat
from agent_r1.rollout.engines import open_engine
from agent_r1.rollout.episodes import StepView, follow
from agent_r1.rollout.sampling import EngineError, Sampler
from agent_r1.search.base import Search
from agent_r1.search.index import open_index
from flows.policies import Policy, named, trained, warm_start
from flows.stage import SHOW_TRACEBACK, add_member_arguments


class Session:
    """Questions to one agent."""

    def __init__(self, sampler: Sampler, chat: Chat, index: Search, env: EnvParams, seed: int) -> None:
        self._sampler, self._chat, self._index, self._env, self._seed = sampler, chat, index, env, seed
        self._asked: Counter[str] = Counter()

    def ask(self, text: str) -> Iterator[StepView]:
        """The steps of an episode of its own. A question that comes again draws again, where anything is drawn."""
        attempt = asked_attempt(text, self._index, self._env, sample=self._asked[text])
        self._asked[text] += 1
        return follow(
            self._sampler,
            self._chat,
            attempt,
            max_tokens=self._env.max_tokens,
            max_action_tokens=self._env.max_action_tokens,
            seed=self._seed,
        )


@contextlib.contextmanager
def open_session(policy: Policy, settings: Params, *, temperature: float, seed: int) -> Iterator[Session]:
    """Loads the policy into the configured engine, and the prepared index.

    Raises:
        FileNotFoundError: there is no index.
        ValueError: there is no such model, or its chat template cannot be used.
        EngineError: the engine cannot run it.
    """
    chat = Chat(load_tokenizer(policy.path))
    index = open_index(settings.search, PASSAGES, INDEX)
    with open_engine(
        settings.engine,
        policy.path,
        end_id=chat.end_id,
        max_tokens=settings.env.max_tokens,
        temperature=temperature,
        dtype=settings.model.dtype,
        version=policy.updates,
    ) as engine:
        yield Session(engine, chat, index, settings.env, seed)


def converse(session: Session, screen: Screen, questions: Iterable[str], *, echo: bool) -> None:
    """Asks one question after another and shows the episodes; a question that is too long is said to be so."""
    for text in questions:
        if echo:
            screen.question(text)
        started = time.perf_counter()
        views = []
        try:
            for view in screen.waiting(session.ask(text)):
                screen.step(view)
                views.append(view)
        except ValueError as refusal:
            screen.refused(str(refusal))
        else:
            screen.ending(views, time.perf_counter() - started)


def typed(console: Console) -> Iterator[str]:
    """Questions from the keyboard, until Ctrl-D or Ctrl-C."""
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401  # gives input() editing and a history

    while True:
        try:
            yield input("question> ")
        except (EOFError, KeyboardInterrupt):
            console.print()
            return


def chat(
    policy: Policy, settings: Params, question: str | None = None, *, temperature: float = 0.0, seed: int = 0
) -> None:
    """Answers the one question, or what is typed, or the lines of standard input where that is no terminal."""
    at_keyboard = question is None and sys.stdin.isatty()
    piped = question is None and not at_keyboard
    console = Console(highlight=False, force_terminal=False if piped else None)
    screen = Screen(console, settings.env)
    with contextlib.ExitStack() as stack:
        with console.status(f"loading {policy.title}"):
            session = stack.enter_context(open_session(policy, settings, temperature=temperature, seed=seed))
        lines: Iterable[str] = sys.stdin if question is None else [question]
        if at_keyboard:
            screen.greet(policy.title)
            lines = typed(console)
        converse(session, screen, filter(None, map(str.strip, lines)), echo=not at_keyboard)


def main() -> None:
    """The command line. What a user can mend ends as one line and exit code 1."""
    given = _arguments()
    for stream in (sys.stdin, sys.stdout):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # bytes that are no text, text that the terminal cannot show
    logging.getLogger("agent_r1").setLevel(logging.WARNING)  # it has a line per engine
    try:
        settings = params.load()
        chat(_chosen(given, settings), settings, given.question, temperature=given.temperature, seed=given.draws or 0)
    except (ValueError, OSError, EngineError) as fault:
        if os.environ.get(SHOW_TRACEBACK):
            raise
        sys.exit(str(fault))


def _chosen(given: argparse.Namespace, settings: Params) -> Policy:
    if given.run:
        return trained(settings, given.run, given.seed, given.sweep)
    return named(given.model) if given.model else warm_start()


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Asks an agent questions: typed, or one per line of standard input.",
        epilog="Without --run and --model the warm start answers. Engine servers must not be those of a training.",
    )
    who = parser.add_mutually_exclusive_group()
    who.add_argument("--run", help="a trained run of params.yaml")
    who.add_argument("--model", help="models:/agent_r1@champion, or a folder or hub id with a chat template")
    add_member_arguments(parser)
    parser.add_argument("--question", metavar="TEXT", help="answers this one and ends")
    parser.add_argument("--temperature", type=float, default=0.0, help="0, the default, is greedy; training has 1")
    parser.add_argument("--draws", type=int, metavar="SEED", help="of what is drawn with a temperature above 0")
    given = parser.parse_args()
    if not given.run and (given.seed is not None or given.sweep):
        parser.error("--seed and --sweep tell apart runs; give --run")
    if not 0 <= given.temperature < math.inf:
        parser.error(f"--temperature is {given.temperature}; give 0 or more")
    if given.draws is not None and not given.temperature:
        parser.error("--draws has no effect at temperature 0; give --temperature")
    return given


if __name__ == "__main__":
    from flows.stage import clean_end, keep_freed_memory

    keep_freed_memory()
    with clean_end():
        main()
