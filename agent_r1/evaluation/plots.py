"""The reports' pictures, in Okabe and Ito's palette, which suits every kind of colour vision."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from fnmatch import fnmatch
from itertools import chain, cycle
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator
from numpy.typing import NDArray

from agent_r1.evaluation.statistics import RECIPE_SEEDS, Interval
from agent_r1.params.stages import Budget
from agent_r1.records import Floats

PALETTE = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00")
INK, MUTED, GRID = "#222222", "#6B6B6B", "#E3E3E3"
DASHES = ((5, 4), (1, 2), (5, 2, 1, 2), (9, 3), (3, 1), (12, 2, 1, 2, 1, 2))  # points drawn and left out, by baseline
DASHED: dict[str, Any] = {"color": MUTED, "linewidth": 1.4, "linestyle": (0, DASHES[0])}
SMOOTHED_OVER = 5  # iterations
PANELS_PER_ROW = 5
SWEEP = (13, 2.6)  # inches: the width of a sweep's picture and the height of a row of panels
FEW = (9, 4.2)  # inches, where there are few panels
SAMPLED = "rollout/success"
VALIDATED = "validation/success"
LEGEND_COLUMNS = 4
PAPER: dict[str, Any] = {"dpi": 160, "layout": "constrained", "facecolor": "white"}
VALIDATION: dict[str, Any] = {"linestyle": "none", "marker": "D", "markersize": 6, "markeredgecolor": "white"}
# Styles of the marks of the final scores.
INTERVAL: dict[str, Any] = {"linewidth": 3, "solid_capstyle": "round", "alpha": 0.45}
MEAN: dict[str, Any] = {"linestyle": "none", "marker": "o", "markersize": 10}
LABEL: dict[str, Any] = {"textcoords": "offset points", "fontsize": 14, "fontweight": "bold", "va": "center"}
SEED: dict[str, Any] = {"linestyle": "none", "marker": "o", "markersize": 5, "fillstyle": "none"}

BUDGETS: dict[Budget, tuple[str, str]] = {  # to its words, and to the metrics that it adds up
    "episodes": ("episodes learned from", "update/episodes"),
    "tokens": ("tokens sampled", "cost/sampled_tokens"),
    "seconds": ("seconds", "time/*_s"),
    "cores": ("core-seconds", "cost/*_core_s"),
}

GAIN_OVER = 3  # iterations in a row

Curve = Sequence[Mapping[str, float]]  # one mapping of metrics per iteration
Curves = Mapping[str, Curve]  # by run


def colours(runs: Sequence[str]) -> dict[str, str]:
    """A colour per run, equal in all pictures. Colours repeat after six runs."""
    return {run: PALETTE[i % len(PALETTE)] for i, run in enumerate(runs)}


def spent(curve: Curve, budget: Budget) -> Floats:
    """[T + 1] the amount before each iteration and at the end; NaN from an iteration on that does not say it.

    Costs are totals already, others are an iteration's own.
    """
    pattern = BUDGETS[budget][1]
    amounts = [[row[name] for name in row if fnmatch(name, pattern)] or [np.nan] for row in curve]
    joined: np.ufunc = np.maximum if pattern.startswith("cost/") else np.add
    totals: Floats = joined.accumulate([0.0, *map(sum, amounts)])
    return totals


def along(curve: Curve, budget: Budget) -> Curve:
    """The curve drawn over the amount before each iteration. A ValueError says that its metrics do not hold that."""
    words = BUDGETS[budget][0]
    amounts = spent(curve, budget)
    if np.isnan(amounts[-1]):
        raise ValueError(f"an older version did not count {words}; draw curves over seconds, or train their runs again")
    return [{**row, words: amount} for row, amount in zip(curve, amounts.tolist(), strict=False)]


def taken(seeds: Sequence[Curve], budget: Budget) -> float:
    """The whole amount, the mean of the seeds; NaN if one does not say it."""
    return float(np.mean([spent(curve, budget)[-1] for curve in seeds]))


def gained(seeds: Sequence[Curve], share: float) -> float:
    """The episodes learned from when a run first had so much of its gain, the mean of the seeds; NaN without a gain.

    The gain is that of the sampled episodes' success, a mean of three iterations in a row. Within two of its standard
    errors, as of right and wrong answers by chance, it is none.
    """
    results = []
    for curve in seeds:
        means = np.convolve([row[SAMPLED] for row in curve], np.full(GAIN_OVER, 1 / GAIN_OVER), "valid")
        ends = means[[0, -1]]
        episodes = GAIN_OVER * curve[-1].get("update/episodes", np.nan)
        if len(means) < 2 or not ends[1] - ends[0] > 2 * np.sqrt((ends * (1 - ends)).sum() / episodes):
            return np.nan
        place = np.argmax(means >= means[0] + share * (means[-1] - means[0]))
        results.append(spent(curve, "episodes")[place + GAIN_OVER])
    return float(np.mean(results))


def axis_of(curve: Curve) -> str:
    """The metric that a curve is drawn over."""
    return next((words for words, _ in BUDGETS.values() if words in curve[0]), "iteration")


def learning_curves(path: Path, curves: Curves, baselines: Mapping[str, float], word: str) -> None:
    """Draws success, titled with its `word`, per iteration: a line per run, baselines' test scores dashed."""
    figure = Figure((9, 6.2), **PAPER)
    axes = figure.subplots()
    _titles(axes, word.capitalize(), "training questions, sampled; dashed: baselines, test questions")
    axes.set_ylim(0, 1)
    axes.margins(x=0.015)
    axes.xaxis.set_major_locator(MaxNLocator(nbins=7, steps=[1, 2, 5, 10], integer=True))
    keys = list[Artist]()
    for run, colour in colours(list(curves)).items():
        axes.set_xlabel(axis_of(curves[run]), color=MUTED, fontsize=12)
        x, y = _points(curves[run], SAMPLED)
        axes.plot(x, y, color=colour, linewidth=1, alpha=0.22)
        axes.plot(x, smoothed(y), color=colour, linewidth=2.8)
        axes.plot(*_points(curves[run], VALIDATED), color=colour, **VALIDATION)
        keys.append(_key(run, color=colour, linewidth=2.8))
    for (name, score), dashes in zip(baselines.items(), cycle(DASHES), strict=False):
        keys.append(
            axes.axhline(
                score, color=MUTED, linestyle=(0, dashes), linewidth=1.6, label=f"{name} {score:.2f}", zorder=1
            )
        )
    keys += [
        _key(f"mean of the last {SMOOTHED_OVER} iterations", linewidth=2.8),
        _key("single iterations", linewidth=1, alpha=0.3),
    ]
    if any(VALIDATED in row for row in chain(*curves.values())):
        keys.append(_key("validation: dev questions, greedy", **VALIDATION))
    _save(figure, path, keys, columns=3)


def seed_curves(
    path: Path,
    curves: Mapping[str, Sequence[Curve]],
    reference: str,
    metric: str,
    title: str,
    limits: Mapping[str, float],
) -> None:
    """Draws a metric per iteration, a panel per run: the mean of its seeds, and a band from the lowest to the highest.

    Every other panel has the reference's mean in grey. Every panel has a line per limit, a test score.
    """
    columns = min(PANELS_PER_ROW, len(curves))
    figure, panels = _panels(len(curves), columns)
    figure.suptitle(title, x=0.01, ha="left", fontsize=16, fontweight="bold", color=INK)
    styles = dict(
        zip(limits, [DASHED | {"linestyle": (0, dashes), "zorder": 1} for dashes in DASHES[1:]], strict=False)
    )
    for place, (panel, (run, colour)) in enumerate(zip(panels, colours(list(curves)).items(), strict=True)):
        if run != reference:
            panel.plot(*_band(curves[reference], metric)[:2], **DASHED)
        _draw_band(panel, _band(curves[run], metric), colour)
        for name, style in styles.items():
            panel.axhline(limits[name], **style)
        _clear(panel)
        panel.set_title(run, loc="left", fontsize=12.5, color=colour, fontweight="bold")
        panel.xaxis.set_major_locator(MaxNLocator(nbins=4, integer=True))
        if place + columns >= len(curves):  # no panel below it
            panel.tick_params(labelbottom=True)
            panel.set_xlabel(axis_of(curves[run][0]), color=MUTED)
    _save(
        figure,
        path,
        [
            _key("mean of the seeds", linewidth=2.6),
            Patch(color=INK, alpha=0.22, linewidth=0, label="lowest to highest seed"),
            *([_key(f"mean of {reference}", **DASHED)] if len(curves) > 1 else []),
            *(_key(f"{name} {limits[name]:.2f}, test questions", **style) for name, style in styles.items()),
        ],
        LEGEND_COLUMNS if columns > 2 else 2,
    )


def _panels(count: int, columns: int) -> tuple[Figure, NDArray[Any]]:
    """A figure with so many panels in rows."""
    lines = -(-count // columns)
    width, height = SWEEP if columns > 2 else FEW
    figure = Figure((width, 1.1 + height * lines), **PAPER)
    panels = figure.subplots(lines, columns, sharex=True, sharey=True, squeeze=False).ravel()
    for panel in panels[count:]:
        panel.set_visible(False)
    return figure, panels[:count]


def final_scores(
    path: Path,
    scores: Mapping[str, Interval],
    trained: Sequence[str],
    seeds: Mapping[str, Sequence[float]],
    title: tuple[str, str],
) -> None:
    """Draws success with intervals per agent, baselines in grey; rings are single `seeds`.

    The title is the environment's word for success, and how the agents answered.
    """
    figure = Figure((9, 2 + 0.55 * len(scores)), **PAPER)
    axes = figure.subplots()
    colour = colours(trained)
    for row, (name, score) in enumerate(scores.items()):
        ink = colour.get(name, MUTED)
        axes.plot([score.low, score.high], [row, row], color=ink, **INTERVAL)
        axes.plot(score.mean, row, color=ink, clip_on=False, **MEAN)  # a score of 1 stands on the edge
        if of_seeds := seeds.get(name):  # an empty line would take room
            axes.plot(of_seeds, [row + 0.24] * len(of_seeds), color=ink, clip_on=False, **SEED)
        axes.annotate(f"{score.mean:.3f}", (score.high, row), (10, 0), color=ink, **LABEL)
    axes.set_yticks(range(len(scores)), list(scores))
    _titles(axes, f"{title[0].capitalize()} on the test questions", f"{title[1]}; baselines in grey")
    axes.set_ylim(len(scores) - 0.4, -0.6)
    axes.set_xlim(0, 1)
    axes.spines["left"].set_visible(False)
    axes.grid(axis="y", visible=False)
    axes.tick_params(axis="y", length=0, labelsize=14, labelcolor=INK)
    units = "questions and seeds" if any(len(of) >= RECIPE_SEEDS for of in seeds.values()) else "questions"
    keys = [_key("mean", **MEAN), _key(f"95 % interval over {units}", **INTERVAL)]
    _save(figure, path, [*keys, *([_key("single seed", **SEED)] if seeds else [])])


def recipe_band(path: Path, title: str, panels: Mapping[str, Floats]) -> None:
    """Draws a run in the band of a recipe by iteration, a panel per metric: the run, low, mean and high [4, T]."""
    figure = Figure((16, 6.5), **PAPER)
    figure.suptitle(title, color=INK)
    for axes, (metric, (run, low, mean, high)) in zip(figure.subplots(2, 4).flat, panels.items(), strict=True):
        axes.fill_between(range(len(run)), low, high, color=GRID, label="95 % of new seeds, by iteration")
        axes.plot(mean, color=MUTED, label="mean of the recipe's seeds")
        axes.plot(run, color=PALETTE[0], label="the run")
        _titles(axes, "", metric)
    _save(figure, path, axes.get_legend_handles_labels()[0])


def _draw_band(axes: Axes, band: tuple[Floats, ...], colour: str) -> None:
    """The mean as a line, from the lowest to the highest seed as an area."""
    x, mean, low, high = band
    axes.fill_between(x, low, high, color=colour, alpha=0.22, linewidth=0)
    axes.plot(x, mean, color=colour, linewidth=2.6)


def _key(label: str, **style: Any) -> Line2D:
    """A line's entry in the legend."""
    return Line2D([], [], label=label, **{"color": INK, **style})


def _points(rows: Curve, metric: str) -> Floats:
    """[2, T] the places and values of a metric, if it was logged."""
    points = [(row[axis_of(rows)], row[metric]) for row in rows if metric in row]
    return np.array(points, dtype=np.float64).reshape(-1, 2).T


def _band(seeds: Sequence[Curve], metric: str) -> tuple[Floats, ...]:
    """Places [T] of the iterations that all seeds have, their mean, and the mean, lowest and highest value [T]."""
    points = [_points(rows, metric) for rows in seeds]
    shortest = min(len(x) for x, _ in points)
    values = np.stack([y[:shortest] for _, y in points])
    places = np.mean([x[:shortest] for x, _ in points], axis=0)
    return places, values.mean(axis=0), values.min(axis=0), values.max(axis=0)


def smoothed(values: Floats) -> Floats:
    """[T] the mean of the last `SMOOTHED_OVER` values at every point; of fewer at the start."""
    sums = np.concatenate([[0.0], np.cumsum(values)])
    stop = np.arange(1, len(values) + 1)
    start = np.maximum(0, stop - SMOOTHED_OVER)
    return np.asarray((sums[stop] - sums[start]) / (stop - start), dtype=np.float64)


def _titles(axes: Axes, title: str, subtitle: str) -> None:
    axes.set_title(title, loc="left", fontsize=16, fontweight="bold", color=INK, pad=26)
    axes.text(0, 1.02, subtitle, transform=axes.transAxes, fontsize=11, color=MUTED, va="bottom")
    _clear(axes)


def _clear(axes: Axes) -> None:
    """Draws a light grid and no frame."""
    axes.grid(visible=True, color=GRID, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.tick_params(colors=MUTED, labelsize=12, length=0)
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(GRID)


def _save(figure: Figure, path: Path, keys: Sequence[Artist], columns: int = LEGEND_COLUMNS) -> None:
    """Draws the legend below the picture, and writes both."""
    looks: dict[str, Any] = {"frameon": False, "fontsize": 12, "labelcolor": INK}
    figure.legend(handles=keys, loc="outside lower center", ncols=min(columns, len(keys)), **looks)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, format="png", metadata={"Software": None})  # the same bits from the same numbers
