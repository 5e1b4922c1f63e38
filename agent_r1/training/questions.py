"""The questions that a training asks in its iterations, refills and validations."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import islice

import numpy as np

from agent_r1.params.credit import CreditParams
from agent_r1.params.train import TrainParams
from agent_r1.records import Metrics, Question, Trajectory, of_split
from agent_r1.seeds import derive

VALIDATED = "validation/success"
History = Sequence[Mapping[str, float]]  # the metrics of the finished iterations


def require_gold_titles(questions: Iterable[Question], credit: CreditParams) -> None:
    """Raises ValueError if `progress` pays for gold passages, and a data set of the train split names none."""
    train = of_split(questions, "train")
    titled = {question.dataset for question in train if question.gold_titles}
    bare = [name for name in dict.fromkeys(question.dataset for question in train) if name not in titled]
    if credit.rewards.progress and bare:
        raise ValueError(
            f"credit.rewards.progress {credit.rewards.progress} pays for gold passages, and no question of "
            f"{', '.join(bare)} names any; set it to 0, or leave that out of prepare.datasets"
        )


def draw(
    questions: Sequence[Question], count: int, *, iteration: int, seed: int, left_out: Collection[str] = ()
) -> list[Question]:
    """The `count` questions of an iteration, no question twice.

    Successive iterations pass through all questions in a random order, then in another one. A pass leaves out its last
    questions if they do not fill an iteration. Others stand in for those whose ids are `left_out`, and the rest keep
    their places, so that a run can go on when there is room for more. Raises ValueError if there are fewer questions
    than an iteration needs.
    """
    most = len(questions) - len(left_out)
    if count > most:
        raise ValueError(
            f"train.rollout.questions is {count} and there are {most} training questions"
            f"{' with room for an action' * bool(left_out)}; lower it or prepare more"
        )
    passed, position = divmod(iteration, len(questions) // count)
    order = np.random.default_rng(derive(seed, "questions", passed)).permutation(len(questions))
    passing = [questions[index] for index in order[position * count : (position + 1) * count]]
    drawn = [question for question in passing if question.question_id not in left_out]
    besides = {*left_out, *(question.question_id for question in drawn)}
    missing = count - len(drawn)
    return drawn + draw_further(questions, missing, besides=besides, iteration=iteration, refill=-1, seed=seed)


def draw_unseen(questions: Sequence[Question], config: TrainParams) -> list[Question]:
    """The questions of all validations: `validation.questions` of every data set's dev split, for every run and seed.

    Raises ValueError if there is no dev split, or one has fewer questions.
    """
    dev = of_split(questions, "dev")
    if not dev:
        raise ValueError("train.validation asks dev questions and none are prepared; set train.validation.every: 0")
    count = config.validation.questions
    unseen = list[Question]()
    for dataset in dict.fromkeys(question.dataset for question in dev):
        split = [question for question in dev if question.dataset == dataset]
        if count > len(split):
            raise ValueError(
                f"train.validation.questions is {count} and the dev split of {dataset} has {len(split)}; lower it, or "
                "set it to 0 for all"
            )
        order = np.random.default_rng(derive("validation", dataset)).permutation(len(split))
        unseen += [split[index] for index in sorted(order[: count or len(split)])]
    return unseen


def draw_further(
    questions: Sequence[Question], count: int, *, besides: Collection[str], iteration: int, refill: int, seed: int
) -> list[Question]:
    """At most `count` questions with other ids than `besides`, for the `refill`-th refill of an iteration; -1 for none.

    They come in a random order of their own. The passes of `draw` do not depend on refills, and meet them again.
    """
    order = np.random.default_rng(derive(seed, "refill", iteration, refill)).permutation(len(questions))
    candidates = (questions[index] for index in order if questions[index].question_id not in besides)
    return list(islice(candidates, count))


def is_due(history: History, config: TrainParams, *, complete: bool) -> bool:
    """Whether the latest policy is one of every `validation.every`, or a complete run's, and was not validated yet."""
    period = config.validation.every
    finished = len(history)
    if not period or not finished or VALIDATED in history[-1]:
        return False
    return complete or finished % period == 0


def validation_scores(trajectories: Sequence[Trajectory]) -> Metrics:
    """Success, and F1 where answers have one, means over the episodes that the world did not cut short."""
    rows = [row for row in trajectories if not row.aborted]
    overlaps = [row.steps[-1].rewards.get("f1") if row.steps else None for row in rows]
    f1 = {"validation/f1": float(np.mean([overlap or 0.0 for overlap in overlaps]))} if any(overlaps) else {}
    aborted = float(len(trajectories) - len(rows))
    return {VALIDATED: float(np.mean([row.success for row in rows])), **f1, "validation/aborted": aborted}


def is_best(history: History, success: float) -> bool:
    """Whether the latest policy is better than every other that was validated."""
    return all(success > score for score in _validated(history[:-1]))


def is_exhausted(history: History, patience: int) -> bool:
    """Whether the last `patience` validations brought no better policy; 0 never is."""
    scores = _validated(history)
    return bool(patience) and len(scores) - scores.index(max(scores)) > patience if scores else False


def _validated(history: History) -> list[float]:
    return [metrics[VALIDATED] for metrics in history if VALIDATED in metrics]
