"""Evaluations as they lie on disk, whether they were measured alike, two of them question by question; in Markdown."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import NamedTuple

from agent_r1.evaluation.scores import CEILING, FLOOR, headline, measured, measures, score
from agent_r1.evaluation.statistics import Interval, interval, paired_difference
from agent_r1.harmless import in_markdown
from agent_r1.params import fingerprint
from agent_r1.params.places import Places
from agent_r1.params.stages import EvaluateParams
from agent_r1.records import Prediction, Question, Trajectory
from agent_r1.tables import read_rows
from agent_r1.tracking.registry import Version

MEANT_TO_DIFFER = "policy"  # the one hash that is the point of the comparison
LIMITS = "limits"  # of an episode, and what samples it; an evaluation without them was made under others
NAMED = 6  # agents of a group that is listed in full


@dataclass(frozen=True, kw_only=True, slots=True)
class Evaluation:
    """The files that `evaluate` wrote about one agent."""

    name: str  # of the run or of the baseline
    predictions: list[Prediction]
    trajectories: list[Trajectory]
    hashes: dict[str, str]  # of data, corpus, index, prompt and policy; the protocol and the limits in words

    @property
    def success(self) -> dict[str, float]:
        """By question, in the order of the predictions."""
        return {prediction.question_id: prediction.success for prediction in self.predictions}

    @property
    def asked(self) -> str:
        """A hash of the questions, in any order; also of those whose episodes the world cut short."""
        return fingerprint(sorted([*self.success, *self._cut_short]))

    @property
    def aborted(self) -> str:
        """How many episodes the world cut short: `aborted: 3 of 400`; "" where it cut none."""
        count = len(self._cut_short)
        return f"aborted: {count} of {count + len(self.predictions)}" if count else ""

    @property
    def _cut_short(self) -> list[str]:
        """The questions without a prediction."""
        return [each.question_id for each in self.trajectories if each.aborted]


def read_evaluation(name: str, folder: Path) -> Evaluation:
    """Reads one folder that `evaluate` wrote."""
    return Evaluation(
        name=name,
        predictions=read_rows(folder / "predictions.parquet", Prediction),
        trajectories=read_rows(folder / "trajectories.parquet", Trajectory),
        hashes=json.loads((folder / "hashes.json").read_text()),
    )


def read_scores(folder: Path, questions: Sequence[Question], params: EvaluateParams) -> dict[str, float]:
    """The headline in a folder that `evaluate` wrote, with intervals of the present `bootstrap_samples`."""
    means: dict[str, float] = json.loads((folder / "scores.json").read_text())
    return means | headline(score(read_rows(folder / "predictions.parquet", Prediction), questions, params))


def paired(a: Evaluation, b: Evaluation) -> tuple[list[float], list[float]]:
    """Success [N] of both on the questions that both answered, in the order of `a`."""
    ours, theirs = a.success, b.success
    shared = [question_id for question_id in ours if question_id in theirs]
    return [ours[each] for each in shared], [theirs[each] for each in shared]


def cut_short(evaluations: Sequence[Evaluation]) -> str:
    """Whose episodes the world cut short, and how many: `ppo (aborted: 3 of 400)`; "" where it cut none."""
    return ", ".join(f"{each.name} ({each.aborted})" for each in evaluations if each.aborted)


def finished_folders(home: Path) -> list[Path]:
    """A version's evaluations, oldest first, each in a folder of its own."""
    return sorted(each for each in home.glob("[!.]*") if each.is_dir())


def latest_folder(version: Version, places: Places) -> Path | None:
    """The latest evaluation of a version on all data sets: one of its own, or its run's under outputs/evaluate."""
    folders = finished_folders(places.history / version.name)
    if folders:
        return folders[-1]
    descriptor = version.descriptor
    hashes = places.evaluation(descriptor.label, descriptor.sweep) / "hashes.json"
    current = hashes.exists() and json.loads(hashes.read_text())["policy"] == descriptor.policy_hash
    return hashes.parent if current else None


def read_curve(path: Path) -> list[dict[str, float]]:
    """The metrics of every iteration, as `train` wrote them: one JSON object per line."""
    return [json.loads(line) for line in path.read_text().splitlines()]


def differences_of_setting(evaluations: Sequence[Evaluation]) -> dict[str, list[list[str]]]:
    """Every setting that some agents differ in -> the agents' names, those with the same hash together.

    An agent of which a setting is not known is alike with no other.
    """
    settings = {e.name: {**e.hashes, "questions asked": e.asked} for e in evaluations}
    differing = {}
    for key in dict.fromkeys([*chain.from_iterable(settings.values()), LIMITS]):
        groups: dict[str, list[str]] = {}
        for name, hashes in settings.items():
            groups.setdefault(hashes.get(key, f"of {name}"), []).append(name)
        if len(groups) > 1 and key != MEANT_TO_DIFFER:
            differing[key] = list(groups.values())
    return differing


class Measured(NamedTuple):
    """One measure of both, on the questions that have a value for it."""

    measure: str  # one of `measures`
    a: Interval
    b: Interval
    difference: Interval  # a less b, paired by question


class Pair(NamedTuple):
    """One question answered by both."""

    question: Question
    a: Prediction
    b: Prediction


@dataclass(frozen=True, kw_only=True, slots=True)
class Comparison:
    """Two evaluations on the questions that both answered. Right is what succeeded."""

    a: str  # the evaluations' names
    b: str
    differing: list[str]  # settings that they were not measured alike on
    aborted: str  # whose episodes the world cut short, as `cut_short` has it
    pairs: list[Pair]  # in a's order
    measured: list[Measured]

    @property
    def only_a_right(self) -> list[Pair]:
        """The questions that a answers right and b wrong."""
        return [pair for pair in self.pairs if pair.a.success > pair.b.success]

    @property
    def only_b_right(self) -> list[Pair]:
        """The questions that b answers right and a wrong."""
        return [pair for pair in self.pairs if pair.a.success < pair.b.success]


def compare(
    a: Evaluation, b: Evaluation, questions: Sequence[Question], params: EvaluateParams, *, anyway: bool = False
) -> Comparison:
    """Compares two evaluations on the questions that both answered; `questions` may have more.

    Raises ValueError if they differ in more than the policy or the world cut episodes of theirs short and `anyway` is
    not set, they share no question, or one that they share is not among `questions`.
    """
    differing = list(differences_of_setting([a, b]))
    if differing and not anyway:
        raise ValueError(
            f"{a.name} and {b.name} were not measured alike: they differ in {', '.join(differing)}; evaluate both "
            "again under one configuration, or compare them --anyway, on the questions that both answered"
        )
    aborted = cut_short([a, b])
    if aborted and not anyway:
        raise ValueError(
            f"the world cut episodes short, {aborted}, and which ones is chance; evaluate again, or compare --anyway, "
            "on the questions that both answered"
        )
    by_id = {question.question_id: question for question in questions}
    theirs = {prediction.question_id: prediction for prediction in b.predictions}
    shared = [prediction for prediction in a.predictions if prediction.question_id in theirs]
    if not shared:
        raise ValueError(f"{a.name} and {b.name} have no question in common; evaluate both on the same data set")
    for unknown in (each.question_id for each in shared if each.question_id not in by_id):
        raise ValueError(f"question {unknown!r} of {a.name} is not prepared; prepare the data that it was evaluated on")
    pairs = [Pair(by_id[each.question_id], each, theirs[each.question_id]) for each in shared]
    found = _measured(pairs, params)
    return Comparison(a=a.name, b=b.name, differing=differing, aborted=aborted, pairs=pairs, measured=found)


def _measured(pairs: Sequence[Pair], params: EvaluateParams) -> list[Measured]:
    draws = params.bootstrap_samples, params.seed
    found = []
    of_a, of_b = [pair.a for pair in pairs], [pair.b for pair in pairs]
    for measure in measures(of_a):
        ours, theirs = measured(measure, of_a), measured(measure, of_b)
        if ours and len(ours) == len(theirs):
            difference = paired_difference(ours, theirs, *draws)
            found.append(Measured(measure, interval(ours, *draws), interval(theirs, *draws), difference))
    return found


def markdown_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table whose first column names things and whose others hold numbers."""
    rule = ["---", *("---:" for _ in header[1:])]
    return "\n".join(f"| {' | '.join(row)} |" for row in [header, rule, *rows])


def above_chance(found: Mapping[str, Interval]) -> list[str]:
    """A sentence on which agents reach more than chance, by their success; none where chance did not play."""
    if FLOOR not in found:
        return []
    bound = found[FLOOR].high
    agents = {f"`{name}`": each.low > bound for name, each in found.items() if name not in (FLOOR, CEILING)}
    above, others = ([name for name in agents if agents[name] is so] for so in (True, False))
    return [
        f"Chance with as many moves, `{FLOOR}`, is the floor, and a solver, `{CEILING}`, the ceiling. A claim counts "
        f"only where an interval lies above the floor's, which ends at {bound:.3f}; above it: "
        f"{', '.join(above) or 'none'}; not above it: {', '.join(others) or 'none'}."
    ]


def interval_of(scores: Mapping[str, float], name: str) -> Interval:
    """A score with the bounds that stand beside it."""
    return Interval(mean=scores[name], low=scores[f"{name}/low"], high=scores[f"{name}/high"])


def mean_cell(found: Interval, decimals: int = 3) -> str:
    """A mean with its interval, which has one decimal less: 0.750 [0.70, 0.80]."""
    return f"{found.mean:.{decimals}f} [{found.low:.{decimals - 1}f}, {found.high:.{decimals - 1}f}]"


def difference_cell(found: Interval) -> str:
    """A signed difference with its interval, bold where the interval leaves out 0."""
    text = f"{found.mean:+.3f} [{found.low:+.3f}, {found.high:+.3f}]"
    return f"**{text}**" if found.excludes_zero else text


def warning(evaluations: Sequence[Evaluation]) -> list[str]:
    """Paragraphs that name the settings in which the agents differ, and the episodes that the world cut short."""
    differing = differences_of_setting(evaluations).items()
    lines = [f"> - {in_markdown(key)}: {' / '.join(map(_listed, groups))}" for key, groups in differing]
    heading = "> **Not measured alike.** These agents differ in more than the policy; compare across the `/` with care."
    aborted = cut_short(evaluations)
    shorter = f"> **Cut short by the world**, and in no score: {in_markdown(aborted)}. Evaluate these again."
    return [*(["\n".join([heading, ">", *lines])] if lines else []), *([shorter] if aborted else [])]


def _listed(names: list[str]) -> str:
    """All names, or the first of many and how many others there are."""
    if len(names) > NAMED:
        return f"`{names[0]}` and {len(names) - 1} others"
    return ", ".join(f"`{name}`" for name in names)
