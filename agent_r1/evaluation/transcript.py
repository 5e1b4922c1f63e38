"""Trajectories as plain text."""

from __future__ import annotations

import json
import re
import textwrap
from collections.abc import Mapping, Sequence

from transformers import PreTrainedTokenizerBase

from agent_r1.envs.base import is_prose, split_action
from agent_r1.evaluation.scores import BASE_TOOL_CALL
from agent_r1.harmless import harmless_lines
from agent_r1.records import QA, CallStatus, Decode, Question, Source, Step, Trajectory, questions_by_id, words_of

WIDTH = 100  # columns of a line
LABEL = 11  # columns of its label


def transcript(trajectory: Trajectory, question: Question, decode: Decode, *, with_prompt: bool = False) -> str:
    """The whole episode as plain text, with rewritten contexts; `with_prompt` adds the opening messages."""

    def said(span: slice, source: Source | None = None) -> str:
        return decode(trajectory.ids(span, source)).strip()

    lines = _field("question", question.text)
    if with_prompt:
        lines += _field("prompt", said(trajectory.contexts[0], Source.PROMPT))
    for number, (step, reply) in enumerate(zip(trajectory.steps, trajectory.replies, strict=True), start=1):
        stop = next((start for start in trajectory.context_starts if reply.start <= start < reply.stop), reply.stop)
        observation = said(slice(reply.start, stop), Source.OBSERVATION)
        finds = step.call_status is CallStatus.OK and all(call.tool == "search" for call in step.calls)
        action = said(slice(step.action_start, step.action_stop), Source.ACTION)
        lines += ["", f"step {number}", *_action(action, step)]
        if observation:
            lines += _field("passages" if question.env == QA and finds else "reply", observation)
        if stop < reply.stop:
            lines += ["", "a new context", *_field("reads", said(slice(stop, reply.stop)))]
    verdict = words_of([question])[not trajectory.success]
    lines += ["", *_field("outcome", trajectory.outcome)]
    if not question.answers:
        return "\n".join([*lines, *_field("verdict", verdict)])
    lines += _field("answer", f"{trajectory.answer or '(none)'} ({verdict})")
    return "\n".join([*lines, *_field("gold", " | ".join(question.answers))])


def _action(text: str, step: Step) -> list[str]:
    """The lines of an action: thought and calls if it is well formed, otherwise its text."""
    pieces = split_action(text)
    thoughts = [piece for piece in pieces if piece.kind == "thought" and piece.text.endswith("</think>")]
    rest = "".join(piece.text for piece in pieces if piece not in thoughts).strip()
    lines = _field("thought", "\n".join(piece.inside for piece in thoughts)) if thoughts else []
    if step.call_status is CallStatus.OK:
        return lines + [line for call in step.calls for line in _field(call.tool, shown_arguments(call.arguments))]
    if step.call_status is CallStatus.NONE:
        return lines + _field("says", rest)
    if step.call_status is CallStatus.MALFORMED and is_prose(text):
        return lines + _field("sentence", f"{rest} (no call, no answer)")
    return lines + _field("call", f"{rest} ({step.call_status})")


def shown_arguments(arguments: str) -> str:
    """The value of a single argument, or all arguments by name. A move, which has no names, is shown as it is."""
    values = json.loads(arguments)
    if not isinstance(values, dict):
        return str(values)
    pairs = [f"{name} = {value}" for name, value in values.items()]
    return ", ".join(pairs if len(values) != 1 else map(str, values.values()))


def _field(label: str, text: str) -> list[str]:
    """A label with its text beside it. Every line of the text is wrapped alone."""
    lines = harmless_lines(text).split("\n")
    wrapped = [row for line in lines for row in textwrap.wrap(line, WIDTH - LABEL) or [""]]
    return [f"{'' if place else label:<{LABEL}}{row}".rstrip() for place, row in enumerate(wrapped)]


def worth_reading(trajectories: Sequence[Trajectory], questions: Sequence[Question]) -> dict[str, Trajectory]:
    """The `right` and the `wrong` episode with the most hops, then with several steps; aborted ones are neither."""
    episodes = dict[str, Trajectory]()
    hops = {question.question_id: int(question.strata.get("hops", 0)) for question in questions}
    for trajectory in sorted(trajectories, key=lambda t: (-hops[t.question_id], len(t.steps) == 1)):
        if not trajectory.aborted:
            episodes.setdefault("right" if trajectory.success else "wrong", trajectory)
    return {title: episodes[title] for title in ("right", "wrong") if title in episodes}


def plain_text(tokenizer: PreTrainedTokenizerBase) -> Decode:
    """Decodes with a tokenizer, without its special tokens."""
    return lambda token_ids: str(tokenizer.decode(list(token_ids), skip_special_tokens=True))


def readable(trajectories: Sequence[Trajectory], questions: Sequence[Question], decode: Decode) -> dict[str, str]:
    """A right and a wrong episode as text, with prompts."""
    by_id = questions_by_id(questions)
    return {
        title: transcript(trajectory, by_id[trajectory.question_id], decode, with_prompt=True)
        for title, trajectory in worth_reading(trajectories, questions).items()
    }


def examples(
    trajectories: Mapping[str, Sequence[Trajectory]],
    trained: Sequence[str],
    questions: Sequence[Question],
    decode: Decode,
) -> list[str]:
    """A Markdown section with example transcripts of the first trained agent, if any; `trajectories` are by agent."""
    if not trained:
        return []
    by_id = questions_by_id(questions)
    base = {trajectory.question_id: trajectory for trajectory in trajectories.get(BASE_TOOL_CALL, [])}
    episodes = dict[str, Trajectory]()
    for title, trajectory in worth_reading(trajectories[trained[0]], questions).items():
        episodes[f"`{trained[0]}`, {title}"] = trajectory
        if title == "right" and trajectory.question_id in base:
            episodes[f"`{BASE_TOOL_CALL}`, the same question"] = base[trajectory.question_id]
    parts = ["## Example trajectories"]
    for heading, episode in episodes.items():
        text = transcript(episode, by_id[episode.question_id], decode)
        fence = "`" * max(3, 1 + max(map(len, re.findall("`+", text)), default=0))  # longer than any in the text
        parts += [f"### {heading}", f"{fence}text\n{text}\n{fence}"]
    return parts
