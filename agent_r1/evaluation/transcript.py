"""A trajectory as a person reads it. Text is decoded span by span for display; nothing of it is tokenised again."""

from __future__ import annotations

import json
import re
import textwrap
from collections.abc import Callable, Sequence

import numpy as np

from agent_r1.answers import exact_match
from agent_r1.records import CallStatus, Question, Source, Step, Trajectory

Decode = Callable[[Sequence[int]], str]  # token ids -> text, special tokens dropped

WIDTH, LABEL = 100, 11  # columns of a line, of which for the label
THOUGHT = re.compile(r"<think>(.*?)</think>", re.DOTALL)
OPENED = re.compile(r"(?:(?!<think>).)*</think>", re.DOTALL)  # the prompt wrote the thought's tag


def transcript(trajectory: Trajectory, question: Question, decode: Decode, *, with_prompt: bool = False) -> str:
    """The whole episode as plain text: question, every step with thought, search and passages, answer, outcome.

    `with_prompt` shows the opening messages too, where the passages of naive RAG are.
    """
    lines = _field("question", question.text)
    if with_prompt:
        first = trajectory.contexts[0]
        lines += _field("prompt", _decoded(trajectory, first.start, first.stop, Source.PROMPT, decode))
    for number, step in enumerate(trajectory.steps, start=1):
        lines += ["", f"step {number}", *_step(trajectory, number - 1, step, decode)]
    return "\n".join([*lines, "", *_ending(trajectory, question)])


def _ending(trajectory: Trajectory, question: Question) -> list[str]:
    verdict = "exact match" if exact_match(trajectory.answer, question.answers) else "no exact match"
    return [
        *_field("outcome", trajectory.outcome),
        *_field("answer", f"{trajectory.answer or '(none)'} ({verdict})"),
        *_field("gold", " | ".join(question.answers)),
    ]


def _step(trajectory: Trajectory, index: int, step: Step, decode: Decode) -> list[str]:
    last = index + 1 == len(trajectory.steps)
    following = len(trajectory.token_ids) if last else trajectory.steps[index + 1].action_start
    action = _decoded(trajectory, step.action_start, step.action_stop, Source.ACTION, decode)
    observation = _decoded(trajectory, step.action_stop, following, Source.OBSERVATION, decode)
    label = "passages" if step.call_status is CallStatus.OK else "reply"
    return [*_action(action, step), *(_field(label, observation) if observation else [])]


def _action(text: str, step: Step) -> list[str]:
    """Thought and call where the action is well formed; the action as it is otherwise."""
    text = f"<think>{text}" if OPENED.match(text) else text
    thoughts = [thought.strip() for thought in THOUGHT.findall(text)]
    lines = _field("thought", "\n".join(thoughts)) if thoughts else []
    if step.call_status is CallStatus.OK:
        return lines + _field(step.tool, shown_arguments(step.arguments))
    if step.call_status is CallStatus.NONE:
        return lines + _field("says", THOUGHT.sub("", text).strip())
    return lines + _field("call", f"{THOUGHT.sub('', text).strip()} ({step.call_status})")


def shown_arguments(arguments: str) -> str:
    """The one argument's value, or all of them by name."""
    values = json.loads(arguments)
    if len(values) == 1:
        return str(next(iter(values.values())))
    return ", ".join(f"{name} = {value}" for name, value in values.items())


def _decoded(trajectory: Trajectory, start: int, stop: int, source: Source, decode: Decode) -> str:
    span = slice(start, stop)
    ids = trajectory.token_ids[span][np.equal(trajectory.source[span], source)]
    return decode(ids.tolist()).strip()


def _field(label: str, text: str) -> list[str]:
    """A label with its text beside it, wrapped, every line of the text kept apart."""
    wrapped = [row for line in text.splitlines() or [""] for row in textwrap.wrap(line, WIDTH - LABEL) or [""]]
    return [
        f"{name:<{LABEL}}{row}".rstrip() for name, row in zip([label] + [""] * (len(wrapped) - 1), wrapped, strict=True)
    ]
