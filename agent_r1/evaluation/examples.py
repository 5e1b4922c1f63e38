"""Episodes worth reading: a success, the same question before training, and a failure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from agent_r1.answers import exact_match
from agent_r1.evaluation.baselines import BASE_TOOL_CALL
from agent_r1.evaluation.transcript import Decode, transcript
from agent_r1.records import Question, Trajectory


def worth_reading(trajectories: Sequence[Trajectory], questions: Sequence[Question]) -> dict[str, Trajectory]:
    """The hardest question answered `right` and the hardest answered `wrong`; without a key where there is none.

    Hardest: most hops, then an episode of several steps before one of a single step, then the first.
    """
    by_id = {question.question_id: question for question in questions}
    found: dict[str, Trajectory] = {}
    for trajectory in sorted(trajectories, key=lambda t: (-by_id[t.question_id].hops, len(t.steps) == 1)):
        right = exact_match(trajectory.answer, by_id[trajectory.question_id].answers)
        found.setdefault("right" if right else "wrong", trajectory)
    return {title: found[title] for title in ("right", "wrong") if title in found}


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
    before = {trajectory.question_id: trajectory for trajectory in trajectories.get(BASE_TOOL_CALL, [])}
    parts = ["## Example trajectories"]
    for title, trajectory in worth_reading(trajectories[trained[0]], questions).items():
        shown = {f"`{trained[0]}`, {title}": trajectory}
        if title == "right" and trajectory.question_id in before:
            shown[f"`{BASE_TOOL_CALL}`, the same question"] = before[trajectory.question_id]
        for heading, episode in shown.items():
            text = transcript(episode, by_id[episode.question_id], decode)
            parts += [f"### {heading}", _fenced(text)]
    return parts


def _fenced(text: str) -> str:
    """A code block whose fence is longer than any in the text: passages may hold Markdown."""
    fence = "```"
    while fence in text:
        fence += "`"
    return f"{fence}text\n{text}\n{fence}"
