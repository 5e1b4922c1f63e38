"""Three episodes worth reading: a success, the same question before training, and a failure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from agent_r1.answers import exact_match
from agent_r1.evaluation.baselines import BASE_TOOL_CALL
from agent_r1.evaluation.transcript import Decode, transcript
from agent_r1.records import Question, Trajectory


def examples(
    trajectories: Mapping[str, Sequence[Trajectory]],
    trained: Sequence[str],
    questions: Sequence[Question],
    decode: Decode,
) -> list[str]:
    """A Markdown section on the first trained agent: heading, then a fenced transcript for each example.

    `trajectories` are the evaluated agents' by name. Without a trained agent there is no section; an example that
    does not exist (nothing failed, no baseline) is left out.
    """
    if not trained:
        return []
    by_id = {question.question_id: question for question in questions}
    ours, before = trajectories[trained[0]], trajectories.get(BASE_TOOL_CALL, [])
    success = _hardest(_graded(ours, by_id, right=True), by_id)
    chosen = [(f"`{trained[0]}`, right", success)]
    if success is not None:
        same = next((t for t in before if t.question_id == success.question_id), None)
        chosen.append((f"`{BASE_TOOL_CALL}`, the same question", same))
    chosen.append((f"`{trained[0]}`, wrong", _hardest(_graded(ours, by_id, right=False), by_id)))
    parts = ["## Example trajectories"]
    for title, trajectory in chosen:
        if trajectory is not None:
            question = by_id[trajectory.question_id]
            parts += [f"### {title}", _fenced(transcript(trajectory, question, decode))]
    return parts


def _graded(trajectories: Sequence[Trajectory], by_id: Mapping[str, Question], *, right: bool) -> Iterable[Trajectory]:
    return (t for t in trajectories if bool(exact_match(t.answer, by_id[t.question_id].answers)) is right)


def _hardest(trajectories: Iterable[Trajectory], by_id: Mapping[str, Question]) -> Trajectory | None:
    """The first of those with most hops, an episode with a tool call before one without."""
    return max(trajectories, key=lambda t: (by_id[t.question_id].hops, len(t.steps) > 1), default=None)


def _fenced(text: str) -> str:
    """A code block whose fence is longer than any in the text: passages may hold Markdown."""
    fence = "```"
    while fence in text:
        fence += "`"
    return f"{fence}text\n{text}\n{fence}"
