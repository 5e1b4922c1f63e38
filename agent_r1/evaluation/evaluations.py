"""What `evaluate` and `train` wrote about an agent, and whether two agents were measured alike."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from agent_r1.evaluation import markdown
from agent_r1.params import fingerprint
from agent_r1.records import Prediction, Trajectory
from agent_r1.tables import read_rows

MEANT_TO_DIFFER = "policy"  # the one hash that is the point of the comparison
LIMITS = "limits"  # of an episode, and what samples it; an evaluation without them was made under others

NAMED = 6  # agents of a group that is listed in full


@dataclass(frozen=True, kw_only=True, slots=True)
class Evaluation:
    """What `evaluate` wrote about one agent."""

    name: str  # of the run or of the baseline
    predictions: list[Prediction]
    trajectories: list[Trajectory]
    hashes: dict[str, str]  # of data, corpus, index, prompt and policy; the protocol and the limits in words

    @property
    def asked(self) -> str:
        """A hash of the questions, in any order."""
        return fingerprint(sorted(prediction.question_id for prediction in self.predictions))


def read_evaluation(name: str, folder: Path) -> Evaluation:
    """Reads one folder that `evaluate` wrote.

    Raises:
        FileNotFoundError: the agent was not evaluated.
        ValueError: a file has another schema.
    """
    return Evaluation(
        name=name,
        predictions=read_rows(folder / "predictions.parquet", Prediction),
        trajectories=read_rows(folder / "trajectories.parquet", Trajectory),
        hashes=json.loads((folder / "hashes.json").read_text()),
    )


def read_curve(path: Path) -> list[dict[str, float]]:
    """The metrics of every iteration, as `train` wrote them: one JSON object per line."""
    return [json.loads(line) for line in path.read_text().splitlines()]


def differences_of_setting(evaluations: Sequence[Evaluation]) -> dict[str, list[list[str]]]:
    """What the agents were not measured on alike: setting -> the agents, those with the same hash together.

    An agent of which a setting is not known is alike with no other.
    """
    settings = {e.name: {**e.hashes, "questions asked": e.asked} for e in evaluations}
    known = [key for hashes in settings.values() for key in hashes if key != MEANT_TO_DIFFER]
    keys = dict.fromkeys([*known, LIMITS])
    groups = {key: _grouped({name: hashes.get(key, f"of {name}") for name, hashes in settings.items()}) for key in keys}
    return {key: found for key, found in groups.items() if len(found) > 1}


def warning(evaluations: Sequence[Evaluation]) -> list[str]:
    """A paragraph that names what the agents were not measured on alike; none where they were."""
    differing = differences_of_setting(evaluations)
    if not differing:
        return []
    lines = [f"> - {key}: {' / '.join(map(_shown, groups))}" for key, groups in differing.items()]
    heading = "> **Not measured alike.** These agents differ in more than the policy; compare across the `/` with care."
    return ["\n".join([heading, ">", *lines])]


def _shown(names: list[str]) -> str:
    """All names, or the first of many and how many others there are."""
    if len(names) <= NAMED:
        return markdown.code(names)
    return f"{markdown.code(names[:1])} and {len(names) - 1} others"


def _grouped(hashes: dict[str, str]) -> list[list[str]]:
    groups: dict[str, list[str]] = {}
    for name, value in hashes.items():
        groups.setdefault(value, []).append(name)
    return list(groups.values())
