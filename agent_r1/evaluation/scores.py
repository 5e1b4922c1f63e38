"""Scores of finished episodes."""

from __future__ import annotations

import logging
import random
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import comb
from pathlib import Path
from statistics import fmean
from typing import Final, Self

import numpy as np
import pyarrow.compute as pc

from agent_r1.answers import contains, exact_match, f1
from agent_r1.evaluation.statistics import SHARE, Bounds, interval
from agent_r1.params.stages import PROTOCOLS, Baseline, EvaluateParams, Protocol
from agent_r1.records import (
    GREEDY,
    QA,
    Metrics,
    Outcome,
    Passage,
    Prediction,
    Question,
    Trajectory,
    of_split,
    questions_by_id,
)
from agent_r1.tables import read_rows

BASE_TOOL_CALL: Baseline = "base_tool_call"
FLOOR: Final = "random"
CEILING: Final = "oracle"
AS_SHIPPED: Baseline = "as_shipped"
WITH_EXAMPLES: Baseline = "with_examples"
BASELINES: dict[str, Protocol] = {
    **{BASE_TOOL_CALL if protocol == "tool_call" else protocol: protocol for protocol in PROTOCOLS},
    AS_SHIPPED: "tool_call",
    WITH_EXAMPLES: "tool_call",
}

SUCCESS = "success"
GREEDILY = "greedily"
RETURN = "return"
COLUMN = "reward/"  # begins the name of a number that another trainer logged
COUNTS = ("tool_calls", "tokens_read", "tokens_sampled")
BOUNDS = ("/low", "/high")  # of a measure's interval

logger = logging.getLogger(__name__)


def gold_passages(questions: Sequence[Question], path: Path) -> dict[str, list[Passage]]:
    """Reads the gold passages of every question_id, in the order of its gold titles.

    All passages of a title are gold, in the order of the file. Leaves out questions without gold titles, or with a
    title that no passage has, and logs their number. Raises ValueError if no question is left.
    """
    titles = {title for question in questions for title in question.gold_titles}
    under = dict[str, list[Passage]]()
    for passage in read_rows(path, Passage, pc.field("title").isin(sorted(titles))):
        under.setdefault(passage.title, []).append(passage)
    gold = {
        question.question_id: [passage for title in dict.fromkeys(question.gold_titles) for passage in under[title]]
        for question in questions
        if question.gold_titles and under.keys() >= set(question.gold_titles)
    }
    if not gold:
        raise ValueError(
            f"none of the {len(questions)} questions has gold passages: give them gold_titles that are titles of "
            "passages, or leave gold_passages out (of repro_baselines, too)"
        )
    if len(gold) < len(questions):
        logger.warning("left out %d of %d questions: no gold passages", len(questions) - len(gold), len(questions))
    return gold


def asked_questions(questions: Sequence[Question], count: int, seed: int) -> list[Question]:
    """Draws `count` test questions of every data set by the seed, in their order. A count of 0 takes all.

    Raises ValueError if there are no test questions, or a data set has fewer than `count`.
    """
    test = of_split(questions, "test")
    if not test:
        raise ValueError("there are no test questions; prepare data with a test split")
    places = list[int]()
    for dataset in dict.fromkeys(question.dataset for question in test):
        candidates = [place for place, question in enumerate(test) if question.dataset == dataset]
        if count > len(candidates):
            raise ValueError(
                f"evaluate.questions is {count} and the test split of {dataset} has {len(candidates)}; lower it, or 0 "
                "for all"
            )
        places += random.Random(seed).sample(candidates, count) if count else candidates
    return [test[place] for place in sorted(places)]


def predict(trajectories: Sequence[Trajectory], questions: Sequence[Question], run: str, seed: int) -> list[Prediction]:
    """One prediction per trajectory that the world did not cut short, in their order.

    Every attempted call counts as a tool call, also a failed one, and so does a move.
    """
    by_id = questions_by_id(questions)
    return [
        Prediction(
            run=run,
            seed=seed,
            policy_version=trajectory.policy_version,
            question_id=trajectory.question_id,
            sample=trajectory.sample,
            answer=trajectory.answer,
            success=trajectory.success,
            facts=_facts(trajectory, by_id[trajectory.question_id]),
            steps=len(trajectory.steps),
            tool_calls=sum(len(step.calls) for step in trajectory.steps),
            tokens_read=int(np.count_nonzero(~trajectory.action_mask)),
            tokens_sampled=int(np.count_nonzero(trajectory.action_mask)),
        )
        for trajectory in trajectories
        if not trajectory.aborted
    ]


def _facts(trajectory: Trajectory, question: Question) -> dict[str, float]:
    """The scores of an answered question, with its recall of gold passages; the return of any other environment.

    A gold passage earns an unweighted `progress` reward of one when the policy first reads it.
    """
    if question.env != QA:
        return {RETURN: float(sum(step.rewards.get("env", 0.0) for step in trajectory.steps))}
    answer = trajectory.answer
    golds = question.answers
    scores = {"em": exact_match(answer, golds), "f1": f1(answer, golds), "contains": contains(answer, golds)}
    passages = round(sum(step.rewards.get("progress", 0.0) for step in trajectory.steps))
    return scores | ({"gold_recall": passages / len(question.gold_titles)} if question.gold_titles else {})


def outcomes(trajectories: Sequence[Trajectory]) -> Metrics:
    """The number of aborted episodes, and the share of every outcome among the others, of samples."""
    counts = Counter(trajectory.outcome for trajectory in trajectories if trajectory.sample != GREEDY)
    aborted = counts.pop(Outcome.ABORTED, 0)
    ended = [outcome for outcome in Outcome if outcome is not Outcome.ABORTED]
    return {"aborted": float(aborted)} | {f"outcome/{outcome}": counts[outcome] / counts.total() for outcome in ended}


def gold_recall_by_step(trajectories: Sequence[Trajectory], questions: Sequence[Question]) -> Metrics:
    """The mean share of gold passages seen by the end of each step, as `gold_recall/step_1`, ...

    There are as many steps as the longest episode has. A shorter one keeps its last share. Questions without gold
    titles, aborted episodes and greedy answers beside samples do not count.
    """
    golds = {question.question_id: len(question.gold_titles) for question in questions}
    shares = [
        [step.rewards.get("progress", 0.0) / golds[trajectory.question_id] for step in trajectory.steps]
        for trajectory in trajectories
        if golds[trajectory.question_id] and not trajectory.aborted and trajectory.sample != GREEDY
    ]
    longest = max(map(len, shares), default=0)
    return {
        f"gold_recall/step_{k}": sum(sum(steps[:k]) for steps in shares) / len(shares) for k in range(1, longest + 1)
    }


@dataclass(frozen=True, kw_only=True, slots=True)
class AnsweredQuestion:
    """One question with all samples of one agent, n of them, which its greedy answer beside them is not."""

    question_id: str
    answers: list[str]  # [n]
    success: float  # the mean of the samples, which is avg@n
    values: dict[str, float]  # further measures: means of the samples, pass@k and pass^k, success of the greedy answer

    @classmethod
    def of(cls, predictions: Sequence[Prediction], most: int) -> Self:
        """A question with its predictions, a greedy one last, where the most samples that a question has is `most`."""
        samples = [sample for sample in predictions if sample.sample != GREEDY]
        greedy = {GREEDILY: predictions[-1].success} if predictions[-1].sample == GREEDY else {}
        values = dict[str, list[float]]()
        for sample in samples:
            for name, value in {**sample.facts, **{name: float(getattr(sample, name)) for name in COUNTS}}.items():
                values.setdefault(name, []).append(value)
        return cls(
            question_id=samples[0].question_id,
            answers=[sample.answer for sample in samples],
            success=fmean(sample.success for sample in samples),
            values={name: fmean(of) for name, of in values.items()}
            | greedy
            | passes(len(samples), sum(sample.success == 1 for sample in samples), most),
        )


def passes(n: int, right: int, most: int) -> Metrics:
    """The chances that of k samples one is right, `pass_at_k`, and that all are, `pass_hat_k`.

    k is 2, 4, 8, ... and `most`, up to n. Where c of n samples are right they are unbiased: pass@k is
    1 - C(n - c, k) / C(n, k) (Chen et al., 2021, arXiv 2107.03374), pass^k is C(c, k) / C(n, k) (Yao et al., 2024,
    arXiv 2406.12045).
    """
    powers = {2**power for power in range(1, most.bit_length())}
    tried = [k for k in sorted({*powers, most} - {1}) if k <= n]
    at = {f"pass_at_{k}": 1 - comb(n - right, k) / comb(n, k) for k in tried}
    return at | {f"pass_hat_{k}": comb(right, k) / comb(n, k) for k in tried}


def by_question(predictions: Sequence[Prediction]) -> list[AnsweredQuestion]:
    """The questions of some predictions, in the order of their first samples; without samples a question has none."""
    counts = Counter(prediction.question_id for prediction in predictions if prediction.sample != GREEDY)
    groups = {question_id: list[Prediction]() for question_id in counts}
    for prediction in sorted(predictions, key=lambda prediction: prediction.sample == GREEDY):
        if prediction.question_id in groups:
            groups[prediction.question_id].append(prediction)
    most = max(counts.values(), default=0)
    return [AnsweredQuestion.of(group, most) for group in groups.values()]


def measures(answered: Sequence[AnsweredQuestion]) -> list[str]:
    """The measures of some questions: success unless EM is the same, success of greedy answers, and every other one."""
    values = dict.fromkeys(name for question in answered for name in question.values)
    first = "em" if "em" in values else SUCCESS
    return [*dict.fromkeys([first, *[GREEDILY] * (GREEDILY in values), *values])]


def measured(measure: str, answered: Sequence[AnsweredQuestion]) -> list[float]:
    """The values of one of `measures`, for the questions that have one."""
    if measure == SUCCESS:
        return [question.success for question in answered]
    return [question.values[measure] for question in answered if measure in question.values]


def bounds(measure: str) -> Bounds | None:
    """The least and the greatest value of one of `measures`; None for counts and returns, which may have any."""
    return None if measure in (*COUNTS, RETURN) or measure.startswith(COLUMN) else SHARE


def score(predictions: Sequence[Prediction], questions: Sequence[Question], params: EvaluateParams) -> Metrics:
    """Means over questions with their 95 % intervals, under flat keys.

    For success and each of `measures`, over all questions and over every stratum: `em`, `em/low`, `em/high`,
    `em/hops_1`, `em/hops_1/low`, ... Strata are the questions' own, such as `hops_<n>` and `kind_<kind>`, and
    `dataset_<name>` if there are several. Counts of questions are `questions`, `questions/hops_1`, ... Raises
    ValueError if there are no predictions.
    """
    if not predictions:
        raise ValueError("no predictions to score; check evaluate.questions and the test split")
    by_id = questions_by_id(questions)
    scores = Metrics()
    answered = by_question(predictions)
    for stratum, members in _strata(answered, by_id).items():
        suffix = f"/{stratum}" if stratum else ""
        scores[f"questions{suffix}"] = len(members)
        for measure in dict.fromkeys([SUCCESS, *measures(answered)]):
            if values := measured(measure, members):
                key = measure + suffix
                estimate = interval(values, params.bootstrap_samples, params.seed, within=bounds(measure))
                scores |= {key: estimate.mean, f"{key}/low": estimate.low, f"{key}/high": estimate.high}
    return scores


def _strata(answered: Sequence[AnsweredQuestion], by_id: Mapping[str, Question]) -> dict[str, list[AnsweredQuestion]]:
    """All questions under "", then those of every stratum and data set, sorted by name."""
    strata = dict[str, list[AnsweredQuestion]]()
    several = len({by_id[answer.question_id].dataset for answer in answered}) > 1
    for answer in answered:
        question = by_id[answer.question_id]
        datasets = [f"dataset_{question.dataset}"] if several else []
        for stratum in (*(f"{name}_{value}" for name, value in question.strata.items()), *datasets):
            strata.setdefault(stratum, []).append(answer)
    return {"": list(answered), **{stratum: strata[stratum] for stratum in sorted(strata)}}


def in_words(scores: Mapping[str, float], success: str) -> str:
    """A headline as one line. `success` is the environment's word for it."""
    low = scores[f"{SUCCESS}/low"]
    high = scores[f"{SUCCESS}/high"]
    aborted = scores["aborted"]
    extent = f"{scores['questions']:.0f} questions{f', {aborted:.0f} more aborted' if aborted else ''}"
    greedily = f", greedily {scores[GREEDILY]:.3f}" if GREEDILY in scores else ""
    return f"{success} {scores[SUCCESS]:.3f} [{low:.3f}, {high:.3f}]{greedily} on {extent}"


def headline(scores: Metrics) -> Metrics:
    """The scores that are stored and tracked, rounded to four decimals.

    Over all questions: counts, outcomes, and every measure with its interval. Then means only: EM by hops, EM and F1 by
    data set, recall by step, and the use of tools; success by stratum if no question has an answer.
    """
    graded = ("em/hops_", "em/dataset_", "f1/dataset_") if "em" in scores else (f"{SUCCESS}/",)
    parts = ("outcome/", *graded, "gold_recall/step_", "tool/")
    strata = [key for key in scores if key.startswith(parts) and not key.endswith(BOUNDS)]
    means = [key for key in scores if "/" not in key and f"{key}/low" in scores]
    overall = [f"{measure}{end}" for measure in means for end in ("", *BOUNDS)]
    return {key: round(scores[key], 4) for key in ["questions", "aborted", *overall, *strata] if key in scores}
