"""Comparisons of stored evaluations."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from operator import itemgetter
from pathlib import Path
from statistics import fmean
from typing import NamedTuple

from agent_r1.evaluation.scores import (
    CEILING,
    FLOOR,
    GREEDILY,
    AnsweredQuestion,
    bounds,
    by_question,
    headline,
    measured,
    measures,
    score,
)
from agent_r1.evaluation.statistics import DIFFERENCE, Interval, interval, paired_difference
from agent_r1.files import EVALUATION_HASHES
from agent_r1.harmless import in_markdown
from agent_r1.params import fingerprint
from agent_r1.params.places import Places
from agent_r1.params.stages import EvaluateParams
from agent_r1.records import Metrics, Prediction, Question, Trajectory, questions_by_id
from agent_r1.tables import read_rows
from agent_r1.tracking.registry import Version

POLICY = "policy"  # the one hash that a comparison lets differ
LIMITS = "limits"  # of an episode, with its engine; an evaluation that has none is measured like no other
ONE_GREEDY_ANSWER = {"samples": "1", "temperature": "0"}
NAMED = 6  # agents that are listed in full


@dataclass(frozen=True, kw_only=True, slots=True)
class Evaluation:
    """One agent's evaluation, as `evaluate` wrote it."""

    name: str  # of the run or of the baseline
    predictions: list[Prediction]
    trajectories: list[Trajectory]
    hashes: dict[str, str]  # of data, corpus, index, prompt and policy; protocol and limits in words

    @property
    def success(self) -> dict[str, float]:
        """Success by question, the mean of its samples, in the order of the predictions."""
        return {question.question_id: question.success for question in by_question(self.predictions)}

    @property
    def greedily(self) -> float | None:
        """The success of greedy answers beside samples; None if there are none."""
        values = measured(GREEDILY, by_question(self.predictions))
        return fmean(values) if values else None

    @property
    def asked(self) -> str:
        """A hash of all questions asked, in any order, including the ones that the world cut short."""
        return fingerprint(sorted({*self.success, *self._cut_short}))

    @property
    def aborted(self) -> str:
        """The number of episodes that the world cut short, such as `aborted: 3 of 400`; "" for none."""
        count = len(self._cut_short)
        return f"aborted: {count} of {count + len(self.predictions)}" if count else ""

    @property
    def _cut_short(self) -> list[str]:
        return [trajectory.question_id for trajectory in self.trajectories if trajectory.aborted]


def read_evaluation(name: str, folder: Path) -> Evaluation:
    """Reads an evaluation from its folder; one that does not say it is of one greedy answer to each question."""
    return Evaluation(
        name=name,
        predictions=read_rows(folder / "predictions.parquet", Prediction),
        trajectories=read_rows(folder / "trajectories.parquet", Trajectory),
        hashes=ONE_GREEDY_ANSWER | json.loads((folder / EVALUATION_HASHES).read_text()),
    )


def read_hashes(folder: Path) -> dict[str, str]:
    """The hashes of an evaluation; none where there is no evaluation."""
    file = folder / EVALUATION_HASHES
    hashes: dict[str, str] = json.loads(file.read_text()) if file.exists() else {}
    return hashes


def read_scores(folder: Path, questions: Sequence[Question], params: EvaluateParams) -> Metrics:
    """The headline scores of an evaluation's folder. Their intervals are computed with `params`."""
    means: Metrics = json.loads((folder / "scores.json").read_text())
    return means | headline(score(read_rows(folder / "predictions.parquet", Prediction), questions, params))


def paired(a: Evaluation, b: Evaluation) -> tuple[list[float], list[float]]:
    """Success [N] of both on their shared questions, in the order of `a`."""
    of_a = a.success
    of_b = b.success
    shared = [question_id for question_id in of_a if question_id in of_b]
    return [of_a[question_id] for question_id in shared], [of_b[question_id] for question_id in shared]


def cut_short(evaluations: Sequence[Evaluation]) -> str:
    """The agents whose episodes the world cut short, such as `ppo (aborted: 3 of 400)`; "" for none."""
    return ", ".join(f"{evaluation.name} ({evaluation.aborted})" for evaluation in evaluations if evaluation.aborted)


def finished_folders(home: Path) -> list[Path]:
    """The folders of a version's evaluations, oldest first."""
    return sorted(folder for folder in home.glob("[!.]*") if folder.is_dir())


def latest_folder(version: Version, places: Places) -> Path | None:
    """A version's latest evaluation on all data sets: its own, or else its run's under outputs/evaluate."""
    if folders := finished_folders(places.history / version.name):
        return folders[-1]
    descriptor = version.descriptor
    folder = places.evaluation(descriptor.label, descriptor.sweep)
    return folder if read_hashes(folder).get(POLICY) == descriptor.policy_hash else None


def differences_of_setting(evaluations: Sequence[Evaluation]) -> dict[str, list[list[str]]]:
    """Groups the evaluations' names by value, for every setting but the policy in which they differ.

    Evaluations without a difference were measured alike. One without a value for a setting differs from every other.
    """
    settings = {
        evaluation.name: {**evaluation.hashes, "questions asked": evaluation.asked} for evaluation in evaluations
    }
    differences = {}
    for key in dict.fromkeys([*chain.from_iterable(settings.values()), LIMITS]):
        groups = dict[str, list[str]]()
        for name, values in settings.items():
            groups.setdefault(values.get(key, f"of {name}"), []).append(name)
        if len(groups) > 1 and key != POLICY:
            differences[key] = list(groups.values())
    return differences


def same_setting(a: Evaluation, b: Evaluation) -> bool:
    """Whether two evaluations are of one policy and were measured alike."""
    return a.hashes[POLICY] == b.hashes[POLICY] and not differences_of_setting([a, b])


class Measured(NamedTuple):
    """One measure of two evaluations, on the questions that have a value for it."""

    measure: str  # one of `measures`
    a: Interval
    b: Interval
    difference: Interval  # a minus b, paired by question


class AnswerPair(NamedTuple):
    """One question that both evaluations answered."""

    question: Question
    a: AnsweredQuestion
    b: AnsweredQuestion


@dataclass(frozen=True, kw_only=True, slots=True)
class Comparison:
    """Two evaluations on their shared questions. Of several samples the more often right is the better."""

    a: str  # the evaluations' names
    b: str
    differing: list[str]  # settings in which they differ
    aborted: str  # see `cut_short`
    pairs: list[AnswerPair]  # in a's order
    measured: list[Measured]

    @property
    def without_tokens(self) -> Comparison:
        """Without counts of tokens, which text has none of."""
        return replace(self, measured=[row for row in self.measured if not row.measure.startswith("tokens_")])

    @property
    def only_a_right(self) -> list[AnswerPair]:
        """The questions that only a answers right, or more often."""
        return [pair for pair in self.pairs if pair.a.success > pair.b.success]

    @property
    def only_b_right(self) -> list[AnswerPair]:
        """The questions that only b answers right, or more often."""
        return [pair for pair in self.pairs if pair.a.success < pair.b.success]


def compare(
    a: Evaluation, b: Evaluation, questions: Sequence[Question], params: EvaluateParams, *, anyway: bool = False
) -> Comparison:
    """Compares two evaluations on their shared questions, which must be among `questions`.

    Raises ValueError if they share none. Unless `anyway` is set, also if they differ in more than the policy, or the
    world cut episodes short.
    """
    unlike = list(differences_of_setting([a, b]))
    aborted = cut_short([a, b])
    if unlike and not anyway:
        raise ValueError(
            f"{a.name} and {b.name} were not measured alike: they differ in {', '.join(unlike)}; evaluate both "
            "again under one configuration, or compare them --anyway, on the questions that both answered"
        )
    if aborted and not anyway:
        raise ValueError(
            f"the world cut episodes short, {aborted}, and which ones is chance; evaluate again, or compare --anyway, "
            "on the questions that both answered"
        )
    pairs = _pairs(a, b, questions)
    means = list(_means(pairs, params))
    return Comparison(a=a.name, b=b.name, differing=unlike, aborted=aborted, pairs=pairs, measured=means)


def _pairs(a: Evaluation, b: Evaluation, questions: Sequence[Question]) -> list[AnswerPair]:
    by_id = questions_by_id(questions)
    of_b = {answers.question_id: answers for answers in by_question(b.predictions)}
    of_both = [answers for answers in by_question(a.predictions) if answers.question_id in of_b]
    if not of_both:
        raise ValueError(f"{a.name} and {b.name} have no question in common; evaluate both on the same data set")
    if unknown := [answers.question_id for answers in of_both if answers.question_id not in by_id]:
        raise ValueError(
            f"question {unknown[0]!r} of {a.name} is not prepared; prepare the data that it was evaluated on"
        )
    return [AnswerPair(by_id[answers.question_id], answers, of_b[answers.question_id]) for answers in of_both]


def _means(pairs: Sequence[AnswerPair], params: EvaluateParams) -> Iterator[Measured]:
    """Every measure that both have values of, for the same questions."""
    draws = (params.bootstrap_samples, params.seed)
    answers = [pair.a for pair in pairs], [pair.b for pair in pairs]
    for measure in measures(answers[0]):
        of_a, of_b = (measured(measure, predictions) for predictions in answers)
        if of_a and len(of_a) == len(of_b):
            limits = bounds(measure)
            mean_a, mean_b = (interval(values, *draws, within=limits) for values in (of_a, of_b))
            yield Measured(measure, mean_a, mean_b, paired_difference(of_a, of_b, *draws, within=limits and DIFFERENCE))


def markdown_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table with names in its first column and numbers in the others."""
    rule = ["---", *("---:" for _ in header[1:])]
    return "\n".join(f"| {' | '.join(row)} |" for row in [header, rule, *rows])


def above_chance(scores: Mapping[str, Interval]) -> list[str]:
    """A sentence that names the agents above chance. It is left out if chance was not evaluated."""
    if FLOOR not in scores:
        return []
    bound = scores[FLOOR].high
    agents = {f"`{name}`": score.low for name, score in scores.items() if name not in (FLOOR, CEILING)}
    above = [name for name, low in agents.items() if low > bound]
    rest = [name for name in agents if name not in above]
    return [
        f"Chance with as many moves, `{FLOOR}`, is the floor, and a solver, `{CEILING}`, the ceiling. A claim counts "
        f"only where an interval lies above the floor's, which ends at {bound:.3f}; above it: "
        f"{', '.join(above) or 'none'}; not above it: {', '.join(rest) or 'none'}."
    ]


def interval_of(scores: Mapping[str, float], name: str) -> Interval:
    """A score with its stored bounds."""
    return Interval(mean=scores[name], low=scores[f"{name}/low"], high=scores[f"{name}/high"])


def mean_cell(score: Interval, decimals: int = 3) -> str:
    """A mean with its interval, such as 0.750 [0.70, 0.80]."""
    return f"{score.mean:.{decimals}f} [{score.low:.{decimals - 1}f}, {score.high:.{decimals - 1}f}]"


def difference_cell(difference: Interval) -> str:
    """A signed difference with its interval; bold if the interval excludes 0."""
    text = f"{difference.mean:+.3f} [{difference.low:+.3f}, {difference.high:+.3f}]"
    return f"**{text}**" if difference.excludes_zero else text


def decoding(hashes: Mapping[str, str]) -> str:
    """How an agent answered by the hashes of its evaluation, such as `greedy decoding`."""
    samples, temperature = itemgetter("samples", "temperature")({**ONE_GREEDY_ANSWER, **hashes})
    several = f"{samples} samples" if samples != "1" else "one sample"
    return "greedy decoding" if temperature == "0" else f"{several} of each at temperature {temperature}"


def warning(evaluations: Sequence[Evaluation]) -> list[str]:
    """Paragraphs on the settings in which agents differ, and on episodes that the world cut short."""
    unlike = differences_of_setting(evaluations).items()
    lines = [f"> - {in_markdown(key)}: {' / '.join(map(_listed, groups))}" for key, groups in unlike]
    heading = "> **Not measured alike.** These agents differ in more than the policy; compare across the `/` with care."
    aborted = cut_short(evaluations)
    shorter = f"> **Cut short by the world**, and in no score: {in_markdown(aborted)}. Evaluate these again."
    return [*(["\n".join([heading, ">", *lines])] if lines else []), *([shorter] if aborted else [])]


def _listed(names: list[str]) -> str:
    """All names, or the first and the number of the others if they are many."""
    if len(names) > NAMED:
        return f"`{names[0]}` and {len(names) - 1} others"
    return ", ".join(f"`{name}`" for name in names)
