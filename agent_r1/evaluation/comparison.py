"""Two evaluations, question by question."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from agent_r1.evaluation.evaluations import Evaluation, differences_of_setting
from agent_r1.evaluation.scores import MEASURES
from agent_r1.evaluation.statistics import Interval, interval, paired_difference
from agent_r1.records import Prediction, Question


@dataclass(frozen=True, kw_only=True, slots=True)
class Measured:
    """One measure of both, on the questions that have a value for it."""

    measure: str  # a key of MEASURES
    a: Interval
    b: Interval
    difference: Interval  # a less b, paired by question


@dataclass(frozen=True, kw_only=True, slots=True)
class Pair:
    """One question answered by both."""

    question: Question
    a: Prediction
    b: Prediction


@dataclass(frozen=True, kw_only=True, slots=True)
class Comparison:
    """What two evaluations have in common and what not. Right is exact match."""

    a: str  # the evaluations' names
    b: str
    differing: list[str]  # settings that they were not measured alike on
    pairs: list[Pair]  # the questions that both answered, in a's order
    measured: list[Measured]

    @property
    def only_a_right(self) -> list[Pair]:
        """The questions that a answers right and b wrong."""
        return [pair for pair in self.pairs if pair.a.em > pair.b.em]

    @property
    def only_b_right(self) -> list[Pair]:
        """The questions that b answers right and a wrong."""
        return [pair for pair in self.pairs if pair.a.em < pair.b.em]


def compare(
    a: Evaluation, b: Evaluation, questions: Sequence[Question], *, samples: int, seed: int, anyway: bool = False
) -> Comparison:
    """Compares two evaluations on the questions that both answered.

    Args:
        questions: those that were asked are among them.
        samples: of the bootstrap, and `seed` its seed.
        anyway: also where the two were not measured alike.

    Raises:
        ValueError: they differ in more than the policy and `anyway` is not set, they share no question, or one that
            they share is not among `questions`.
    """
    differing = list(differences_of_setting([a, b]))
    if differing and not anyway:
        raise ValueError(
            f"{a.name} and {b.name} were not measured alike: they differ in {', '.join(differing)}; evaluate both "
            "again under one configuration, or compare them --anyway, on the questions that both answered"
        )
    pairs = _pairs(a, b, questions)
    return Comparison(a=a.name, b=b.name, differing=differing, pairs=pairs, measured=_measured(pairs, samples, seed))


def _pairs(a: Evaluation, b: Evaluation, questions: Sequence[Question]) -> list[Pair]:
    by_id = {question.question_id: question for question in questions}
    theirs = {prediction.question_id: prediction for prediction in b.predictions}
    shared = [prediction for prediction in a.predictions if prediction.question_id in theirs]
    if not shared:
        raise ValueError(f"{a.name} and {b.name} have no question in common; evaluate both on the same data set")
    for prediction in shared:
        if prediction.question_id not in by_id:
            raise ValueError(
                f"question {prediction.question_id!r} of {a.name} is not prepared; prepare the data that it was "
                "evaluated on"
            )
    return [Pair(question=by_id[each.question_id], a=each, b=theirs[each.question_id]) for each in shared]


def _measured(pairs: Sequence[Pair], samples: int, seed: int) -> list[Measured]:
    found = []
    for measure, value_of in MEASURES.items():
        both = [(value_of((pair.a, pair.question)), value_of((pair.b, pair.question))) for pair in pairs]
        ours = [float(value) for value, _ in both if value is not None]
        theirs = [float(value) for _, value in both if value is not None]
        if ours:
            found.append(
                Measured(
                    measure=measure,
                    a=interval(ours, samples, seed),
                    b=interval(theirs, samples, seed),
                    difference=paired_difference(ours, theirs, samples, seed),
                )
            )
    return found
