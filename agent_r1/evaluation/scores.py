"""One evaluated agent as a flat table of numbers."""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter

from agent_r1.evaluation.statistics import interval
from agent_r1.records import Prediction, Question

MEASURES = ("em", "f1", "tool_calls")  # each overall, per hop count and per kind, with its interval


def score(
    predictions: Sequence[Prediction], questions: Sequence[Question], samples: int, seed: int
) -> dict[str, float]:
    """Means over questions with 95 % bootstrap intervals, under flat keys.

    For every measure (`em`, `f1`, and `tool_calls` per question) and every stratum (none, `hops_<n>`, `kind_<kind>`):
    `em`, `em/low`, `em/high`, `em/hops_1`, `em/hops_1/low`, ... Besides: `contains`, and the number of questions as
    `questions`, `questions/hops_1`, ...

    Raises:
        ValueError: there are no predictions.
    """
    if not predictions:
        raise ValueError("no predictions to score; check evaluate.questions and the test split")
    scores = {"contains": sum(prediction.contains for prediction in predictions) / len(predictions)}
    for stratum, members in _strata(predictions, questions).items():
        suffix = f"/{stratum}" if stratum else ""
        scores[f"questions{suffix}"] = len(members)
        for measure in MEASURES:
            found = interval([float(value) for value in map(attrgetter(measure), members)], samples, seed)
            key = measure + suffix
            scores |= {key: found.mean, f"{key}/low": found.low, f"{key}/high": found.high}
    return scores


def headline(scores: dict[str, float]) -> dict[str, float]:
    """The few scores that fit one line of `dvc metrics show`: all measures, EM's interval, and EM per hop count."""
    hops = [key for key in scores if key.startswith("em/hops_") and not key.endswith(("/low", "/high"))]
    return {key: round(scores[key], 4) for key in ("em", "em/low", "em/high", *hops, *MEASURES[1:])}


def _strata(predictions: Sequence[Prediction], questions: Sequence[Question]) -> dict[str, list[Prediction]]:
    """The predictions as a whole (""), by hop count and by kind; strata in sorted order."""
    by_id = {question.question_id: question for question in questions}
    strata: dict[str, list[Prediction]] = {}
    for prediction in predictions:
        question = by_id[prediction.question_id]
        for stratum in (f"hops_{question.hops}", f"kind_{question.kind}"):
            strata.setdefault(stratum, []).append(prediction)
    return {"": list(predictions), **{stratum: strata[stratum] for stratum in sorted(strata)}}
