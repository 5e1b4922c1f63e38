"""One evaluated agent as a flat table of numbers."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from agent_r1.evaluation.statistics import interval
from agent_r1.params import EvaluateParams
from agent_r1.records import Prediction, Question

Asked = tuple[Prediction, Question]

# Each overall and per stratum, with its interval, over the questions it has a value for.
MEASURES: dict[str, Callable[[Prediction, Question], float | None]] = {
    "em": lambda given, _: given.em,
    "f1": lambda given, _: given.f1,
    "contains": lambda given, _: given.contains,
    "tool_calls": lambda given, _: given.tool_calls,
    "tokens_read": lambda given, _: given.tokens_read,
    "tokens_sampled": lambda given, _: given.tokens_sampled,
    # the share of the question's gold passages that the agent has seen; none where no gold title is known
    "gold_recall": lambda given, to: given.gold_titles_found / len(to.gold_titles) if to.gold_titles else None,
}


def measured(measure: str, asked: Sequence[Asked]) -> list[float]:
    """A key of MEASURES, of the questions that have a value for it."""
    return [float(value) for each in asked if (value := MEASURES[measure](*each)) is not None]


def score(predictions: Sequence[Prediction], questions: Sequence[Question], params: EvaluateParams) -> dict[str, float]:
    """Means over questions with 95 % bootstrap intervals, under flat keys.

    For every measure (`em`, `f1`, `contains`, per question `tool_calls`, `tokens_read` and `tokens_sampled`, and
    `gold_recall`) and every stratum (none, `hops_<n>`, `kind_<kind>`, and `dataset_<name>` where there are several):
    `em`, `em/low`, `em/high`, `em/hops_1`, `em/hops_1/low`, ... Besides: the number of questions as `questions`,
    `questions/hops_1`, ... Where no question has gold titles there is no `gold_recall`.

    Raises:
        ValueError: there are no predictions.
    """
    if not predictions:
        raise ValueError("no predictions to score; check evaluate.questions and the test split")
    by_id = {question.question_id: question for question in questions}
    asked = [(prediction, by_id[prediction.question_id]) for prediction in predictions]
    scores: dict[str, float] = {}
    for stratum, members in _strata(asked).items():
        suffix = f"/{stratum}" if stratum else ""
        scores[f"questions{suffix}"] = len(members)
        for measure in MEASURES:
            if values := measured(measure, members):
                found, key = interval(values, params.bootstrap_samples, params.seed), measure + suffix
                scores |= {key: found.mean, f"{key}/low": found.low, f"{key}/high": found.high}
    return scores


def _strata(asked: Sequence[Asked]) -> dict[str, list[Asked]]:
    """The predictions as a whole (""), by hop count, by kind and by data set; strata in sorted order."""
    strata: dict[str, list[Asked]] = {}
    several = len({question.dataset for _, question in asked}) > 1
    for prediction, question in asked:
        datasets = [f"dataset_{question.dataset}"] if several else []
        for stratum in (f"hops_{question.hops}", f"kind_{question.kind}", *datasets):
            strata.setdefault(stratum, []).append((prediction, question))
    return {"": list(asked), **{stratum: strata[stratum] for stratum in sorted(strata)}}


def headline(scores: dict[str, float]) -> dict[str, float]:
    """The scores that are kept and tracked, four decimals each.

    Over all questions their number and every measure with its interval; then the means of EM per hop count, EM and F1
    per data set where there are several, recall per step.
    """
    parts = ("em/hops_", "em/dataset_", "f1/dataset_", "gold_recall/step_")
    strata = [key for key in scores if key.startswith(parts) and not key.endswith(("/low", "/high"))]
    overall = [f"{measure}{end}" for measure in MEASURES for end in ("", "/low", "/high")]
    return {key: round(scores[key], 4) for key in ["questions", *overall, *strata] if key in scores}
