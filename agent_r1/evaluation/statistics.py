"""Confidence intervals of means: over questions by the percentile bootstrap, over seeds by random effects.

Source of the first: Efron and Tibshirani, An Introduction to the Bootstrap (1993), chapter 13. Where all questions have
one value, resampling shows no other, and the interval is that of Clopper and Pearson (Biometrika 26, 1934). N =
questions, S = seeds of one recipe, which are trainings that differ in nothing else.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from agent_r1.records import Floats

BLOCK_DRAWS = 1 << 22  # question draws held in memory at a time
LEVEL = 0.95  # both tails together
RECIPE_SEEDS = 3  # fewer trainings say nothing about other seeds
FORETOLD = 4000  # sweeps drawn
ROUNDING = 1e-9  # of half widths

Bounds = tuple[float, float]  # the least and the greatest value that a question can have
SHARE: Bounds = (0, 1)  # success, and all measures but counts and returns
DIFFERENCE: Bounds = (-1, 1)  # of two shares

Values = Sequence[float] | Floats  # [N]


@dataclass(frozen=True, kw_only=True, slots=True)
class Interval:
    """A mean with its confidence interval."""

    mean: float
    low: float
    high: float

    @property
    def excludes_zero(self) -> bool:
        """Whether 0 lies outside the interval."""
        return self.low > 0 or self.high < 0


def interval(
    values: Values, samples: int, seed: int, level: float = LEVEL, *, within: Bounds | None = SHARE
) -> Interval:
    """The mean of `values` [N] with the interval that holds `level` of `samples` resampled means.

    Questions are drawn with replacement by the seed. If all values are equal, other questions may have any one `within`
    the bounds, and `unseen` says how many. Without bounds, as of counts, the interval is then the value alone. Raises
    ValueError for no values or a level outside (0, 1).
    """
    if len(values) == 0:
        raise ValueError("no values to average: the set of questions is empty")
    if not 0 < level < 1:
        raise ValueError(f"level {level} is not a share between 0 and 1; {LEVEL} is usual")
    observed = np.asarray(values, dtype=np.float64)
    mean = float(observed.mean())
    if within and observed.min() == observed.max():
        share = unseen(len(observed), level)
        low, high = mean - share * max(0, mean - within[0]), mean + share * max(0, within[1] - mean)
    else:
        low, high = np.quantile(_resampled_means(observed, samples, seed), [(1 - level) / 2, 1 - (1 - level) / 2])
    return Interval(mean=mean, low=float(low), high=float(high))


def unseen(count: int, level: float = LEVEL) -> float:
    """The largest share of all questions with another value than the one that `count` of them have."""
    return float(1 - ((1 - level) / 2) ** (1 / count))


def paired_difference(
    a: Values, b: Values, samples: int, seed: int, level: float = LEVEL, *, within: Bounds | None = DIFFERENCE
) -> Interval:
    """The mean of `a - b` [N], by question in the same order, with its interval. A ValueError refuses other lengths."""
    if len(a) != len(b):
        raise ValueError(f"{len(a)} and {len(b)} values cannot be paired: measure both on the same questions")
    by_question = np.asarray(a, dtype=np.float64) - np.asarray(b, dtype=np.float64)
    return interval(by_question, samples, seed, level, within=within)


def interval_over_seeds(values: Floats, samples: int, seed: int) -> Interval:
    """The mean of one recipe's `values` [S, N] with its interval, as `difference_over_seeds` has it."""
    return difference_over_seeds(values, np.zeros((1, values.shape[1])), samples, seed, within=SHARE)


def difference_over_seeds(a: Floats, b: Floats, samples: int, seed: int, *, within: Bounds = DIFFERENCE) -> Interval:
    """The mean of `a` [S, N] minus that of `b` [S', N] on the same questions, with its interval.

    A recipe with `RECIPE_SEEDS` seeds or more stands for its trainings by any seed. Questions and seeds then have
    random effects. The variance is that of the seeds' means by S, for each such recipe, and the questions' part. The
    interval is Student's with Satterthwaite's degrees of freedom (Searle, Casella and McCulloch, Variance Components,
    1992, chapter 4; Satterthwaite, 1946). Fewer seeds are fixed policies, such as a baseline, and add no part of
    seeds. Of fixed policies alone, of one question and where nothing varies, it is that of `interval`, over questions.

    Raises ValueError if the numbers of questions differ.
    """
    if a.shape[1] != b.shape[1]:
        raise ValueError(f"{a.shape[1]} and {b.shape[1]} questions cannot be paired: measure both on the same ones")
    by_question = a.mean(axis=0) - b.mean(axis=0)
    recipes = [side for side in (a, b) if len(side) >= RECIPE_SEEDS]
    half = 0.0
    mean = float(a.mean() - b.mean())
    if recipes and len(by_question) > 1:
        of_seeds = [side.mean(axis=1).var(ddof=1) / len(side) for side in recipes]
        # the variance over questions holds each seed's own noise by question, which the seeds' means hold already
        twice = sum(_noise(side) / side.size for side in recipes)
        parts = [*of_seeds, max(0.0, by_question.var(ddof=1) / len(by_question) - twice)]
        freedom = [*(len(side) - 1 for side in recipes), len(by_question) - 1]
        half = float(half_width(np.array(parts), freedom))
    if half < ROUNDING:
        return interval(by_question, samples, seed, within=within)
    low, high = max(mean - half, a.min() - b.max()), min(mean + half, a.max() - b.min())  # of the possible values
    return Interval(mean=mean, low=float(low), high=float(high))


def _noise(values: Floats) -> float:
    """The mean square of values [S, N] beside the effects of seeds and of questions."""
    rest = values - values.mean(axis=0) - values.mean(axis=1, keepdims=True) + values.mean()
    s, n = values.shape
    return float((rest**2).sum() / ((s - 1) * (n - 1)))


def half_width(parts: Floats, freedom: Sequence[int]) -> Floats:
    """Half of Student's interval, for variances that are sums of parts [..., P] with degrees of freedom [P]."""
    from scipy.special import stdtrit  # its import takes longer than an interval

    variance = parts.sum(axis=-1)
    least = np.finfo(np.float64).tiny
    joint = variance**2 / np.maximum((parts**2 / freedom).sum(axis=-1), least)
    return np.asarray(stdtrit(np.maximum(joint, 1), (1 + LEVEL) / 2) * variance**0.5)


def prediction(values: Floats) -> Floats:
    """By iteration the mean of a recipe's seeds [S, T], within the interval of a further seed: low, mean, high [3, T].

    It is Student's, for the variance of the seeds times 1 + 1 / S: the further seed varies, and so does the mean. An
    iteration's variance is the mean of three in a row, under Satterthwaite's degrees of freedom. A ValueError refuses
    less than `RECIPE_SEEDS` seeds.

    Source: Geisser, Predictive Inference (1993), chapter 2.
    """
    seeds = len(values)
    if seeds < RECIPE_SEEDS:
        raise ValueError(f"{seeds} seeds say nothing about another one; take {RECIPE_SEEDS} or more")
    of_seeds = np.pad(values.var(axis=0, ddof=1), 1, "edge")
    parts = np.lib.stride_tricks.sliding_window_view(of_seeds, 3) * (1 + 1 / seeds) / 3  # [T, 3]
    half = half_width(parts, [seeds - 1] * 3)
    return np.stack([values.mean(axis=0) + side * half for side in (-1, 0, 1)])


class Variances(NamedTuple):
    """Parts of the variance of success, from which the intervals of a sweep are foretold."""

    seeds: float  # of a recipe's seeds, over all questions there are
    freedom: int  # degrees of freedom of `seeds`
    questions: float  # of a recipe's questions
    paired: float  # of the difference of two recipes, by question
    noise: float  # of a seed at a question, beside all others
    samples: float  # of a sample of a seed at a question; 0 where each has one, as part of the noise


def variances(recipes: Sequence[Floats], samples: int) -> Variances:
    """The variances of recipes' success [S, N] on the same questions, each a mean of so many right or wrong samples.

    They are unbiased, but for negative ones, which are 0. A ValueError refuses less than two recipes, seeds, questions.
    """
    shapes = [recipe.shape for recipe in recipes]
    if len(shapes) < 2 or min(map(min, shapes)) < 2:
        raise ValueError(
            f"{shapes} are (seeds, questions) by run, and two of each can vary; add to ablations.runs, ablations.seeds "
            "or evaluate.questions, then `agent-r1 pipeline --sweep ablations`"
        )
    freedom = [len(recipe) - 1 for recipe in recipes]
    parts = [(recipe.mean(axis=1).var(ddof=1), _noise(recipe), (recipe * (1 - recipe)).mean()) for recipe in recipes]
    of_means, noise, unlike = np.average(parts, axis=0, weights=freedom).tolist()
    by_recipe = np.stack([recipe.mean(axis=0) for recipe in recipes])
    of_one_recipe = noise * float(np.mean([1 / len(recipe) for recipe in recipes]))  # left in the mean of its seeds
    of_samples = unlike / (samples - 1) if samples > 1 else 0.0
    return Variances(
        seeds=max(0.0, of_means - noise / by_recipe.shape[1]),
        freedom=sum(freedom),
        questions=max(0.0, float(by_recipe.var(axis=1, ddof=1).mean()) - of_one_recipe),
        paired=max(0.0, 2 * (_noise(by_recipe) - of_one_recipe)),
        noise=max(0.0, noise - of_samples),
        samples=of_samples * samples,
    )


def foretold(of: Variances, seeds: int, questions: int, samples: int, recipes: int) -> Interval:
    """The mean half width that the interval of a score will have, or of a difference where `recipes` is 2.

    The bounds hold 90 % of such sweeps: seeds vary as chi-square has it, there and where their variance was found.
    Fewer than `RECIPE_SEEDS` are fixed policies, whose questions alone vary. Where nothing varies it is that of equal
    answers to all questions, as `interval` has it.
    """
    noise = (of.noise + of.samples / samples) / questions
    s = seeds - 1
    part = (of.paired if recipes == 2 else of.questions) / questions
    if seeds < RECIPE_SEEDS or not part + noise + of.seeds:
        half = float(half_width(np.array([part + recipes * noise / seeds]), [questions - 1]))
        half = half or recipes * unseen(questions) / 2
        return Interval(mean=half, low=half, high=half)
    rng = np.random.default_rng(0)
    drawn = rng.chisquare(s, (FORETOLD, recipes)) / s
    scale = of.freedom / rng.chisquare(of.freedom, (FORETOLD, 1))
    of_seeds = (of.seeds + noise) / seeds * np.stack([drawn, drawn * scale])
    halves = half_width(np.insert(of_seeds, recipes, part, axis=-1), [*[s] * recipes, questions - 1])
    low, high = np.quantile(halves[1], [0.05, 0.95])
    return Interval(mean=float(halves[0].mean()), low=float(low), high=float(high))


def _resampled_means(values: Floats, samples: int, seed: int) -> Floats:
    """[samples] means, each of N draws with replacement."""
    rng = np.random.default_rng(seed)
    n = len(values)
    rows = max(1, BLOCK_DRAWS // n)
    blocks = [min(rows, samples - start) for start in range(0, samples, rows)]
    return np.concatenate([values[rng.integers(n, size=(block, n))].mean(axis=1) for block in blocks])
