"""The reports' pictures. Colours: Okabe and Ito's palette, told apart by every kind of colour vision."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from numpy.typing import NDArray

from agent_r1.evaluation.statistics import Interval

PALETTE = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00")
INK, MUTED, GRID = "#222222", "#6B6B6B", "#E3E3E3"
SMOOTHED_OVER = 5  # iterations
PANELS_PER_ROW = 5
DPI = 160

Curve = Sequence[Mapping[str, float]]  # one mapping of metrics per iteration
Curves = Mapping[str, Curve]  # by run
Points = tuple[NDArray[np.float64], NDArray[np.float64]]  # iterations [T], values [T]
End = tuple[float, str, str]  # where a line ends on the y axis, its label, its colour


def colours(runs: Sequence[str]) -> dict[str, str]:
    """A colour per run, the same in every picture; they repeat after six."""
    return {run: PALETTE[i % len(PALETTE)] for i, run in enumerate(runs)}


def learning_curves(path: Path, curves: Curves, baselines: Mapping[str, float]) -> None:
    """Exact match and reward per iteration, a line per run; `baselines` are test scores, drawn dashed."""
    figure = _figure(13, 5.4)
    left, right = figure.subplots(1, 2)
    _titles(left, "Exact match", "training questions, sampled; dashed: baselines, test questions")
    _titles(right, "Reward", "mean per episode of the training questions")
    for em in baselines.values():
        left.axhline(em, color=MUTED, linestyle=(0, (5, 4)), linewidth=1.4, zorder=1)
    left.set_ylim(0, 1)
    for axes, metric in ((left, "rollout/em"), (right, "reward/total")):
        ends = _draw(axes, curves, metric)
        if axes is left:
            ends += [(em, f"{name} {em:.2f}", MUTED) for name, em in baselines.items()]
        _label_ends(axes, ends)
    _save(figure, path)


def seed_curves(path: Path, curves: Mapping[str, Sequence[Curve]], reference: str, metric: str, title: str) -> None:
    """A metric per iteration, a panel per run: the mean of its seeds, a band from their lowest to their highest.

    The reference's mean is drawn in grey in every other panel.
    """
    rows = -(-len(curves) // PANELS_PER_ROW)
    figure = _figure(13, 0.6 + 2.6 * rows)
    panels = figure.subplots(rows, PANELS_PER_ROW, sharex=True, sharey=True, squeeze=False).ravel()
    figure.suptitle(title, x=0.01, ha="left", fontsize=16, fontweight="bold", color=INK)
    figure.supxlabel(f"iteration; bands from the lowest to the highest seed; dashed: {reference}", color=MUTED)
    for panel in panels[len(curves) :]:
        panel.set_visible(False)
    for panel, (run, seeds), colour in zip(panels, curves.items(), colours(list(curves)).values(), strict=False):
        if run != reference:
            x, y, _, _ = _band(curves[reference], metric)
            panel.plot(x, y, color=MUTED, linewidth=1.4, linestyle=(0, (5, 3)))
        x, mean, low, high = _band(seeds, metric)
        panel.fill_between(x, low, high, color=colour, alpha=0.22, linewidth=0)
        panel.plot(x, mean, color=colour, linewidth=2.6)
        _clear(panel)
        panel.set_title(run, loc="left", fontsize=12.5, color=colour, fontweight="bold")
        panel.xaxis.set_major_locator(MaxNLocator(nbins=4, integer=True))
    _save(figure, path)


def final_scores(
    path: Path, scores: Mapping[str, Interval], trained: Sequence[str], seeds: Mapping[str, Sequence[float]]
) -> None:
    """Exact match on the test questions with its interval, a row per agent; baselines in grey.

    `seeds` are the scores of an agent's single seeds, drawn as rings; none for an agent with one.
    """
    figure = _figure(9, 1.5 + 0.55 * len(scores))
    axes = figure.subplots()
    colour = colours(trained)
    for row, (name, found) in enumerate(scores.items()):
        ink = colour.get(name, MUTED)
        axes.plot([found.low, found.high], [row, row], color=ink, linewidth=3, solid_capstyle="round", alpha=0.45)
        axes.plot(found.mean, row, "o", color=ink, markersize=10)
        of_seeds = seeds.get(name, [])
        axes.plot(of_seeds, [row + 0.24] * len(of_seeds), "o", color=ink, markersize=5, fillstyle="none")
        axes.annotate(
            f"{found.mean:.3f}",
            (found.high, row),
            (10, 0),
            textcoords="offset points",
            va="center",
            color=ink,
            fontsize=14,
            fontweight="bold",
        )
    axes.set_yticks(range(len(scores)), list(scores))
    over = "questions and seeds; rings: seeds" if seeds else "questions"
    _titles(axes, "Exact match on the test questions", f"greedy; bars: 95 % bootstrap intervals over {over}")
    axes.set_ylim(len(scores) - 0.4, -0.6)
    axes.set_xlim(0, 1)
    axes.spines["left"].set_visible(False)
    axes.grid(axis="y", visible=False)
    axes.tick_params(axis="y", length=0, labelsize=14, labelcolor=INK)
    _save(figure, path)


def _points(rows: Sequence[Mapping[str, float]], metric: str) -> Points:
    """Iterations [T] and values [T] of a metric, where it was logged."""
    logged = [row for row in rows if metric in row]
    return (
        np.array([row["iteration"] for row in logged], dtype=np.float64),
        np.array([row[metric] for row in logged], dtype=np.float64),
    )


def _band(seeds: Sequence[Curve], metric: str) -> tuple[NDArray[np.float64], ...]:
    """Iterations [T] that all seeds have, and the mean, lowest and highest value [T] of the seeds."""
    points = [_points(rows, metric) for rows in seeds]
    shortest = min(len(x) for x, _ in points)
    values = np.stack([y[:shortest] for _, y in points])
    return points[0][0][:shortest], values.mean(axis=0), values.min(axis=0), values.max(axis=0)


def _draw(axes: Axes, curves: Curves, metric: str) -> list[End]:
    """Every run's values, faint, with their running mean; returns where the lines end."""
    axes.margins(x=0.015)
    axes.set_xlabel("iteration", color=MUTED, fontsize=12)
    axes.xaxis.set_major_locator(MaxNLocator(nbins=7, steps=[1, 2, 5, 10], integer=True))
    colour, ends = colours(list(curves)), []
    for run, rows in curves.items():
        x, y = _points(rows, metric)
        if x.size:
            axes.plot(x, y, color=colour[run], linewidth=1, alpha=0.22)
            axes.plot(x, smoothed(y), color=colour[run], linewidth=2.8)
            ends.append((float(smoothed(y)[-1]), run, colour[run]))
    return ends


def smoothed(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """[T] the mean of the last `SMOOTHED_OVER` values at every point, of fewer at the start."""
    sums = np.concatenate([[0.0], np.cumsum(values)])
    stop = np.arange(1, len(values) + 1)
    start = np.maximum(0, stop - SMOOTHED_OVER)
    return np.asarray((sums[stop] - sums[start]) / (stop - start), dtype=np.float64)


def _label_ends(axes: Axes, ends: Sequence[End]) -> None:
    """Names beside the lines' right ends, pushed apart where they would overlap and then tied to their lines."""
    low, high = axes.get_ylim()
    ordered = sorted(ends)
    places = apart([y for y, _, _ in ordered], gap=0.062 * (high - low))
    for (y, text, colour), place in zip(ordered, places, strict=True):
        axes.annotate(
            text,
            (1.0, y),
            (1.035, place),
            xycoords=("axes fraction", "data"),
            textcoords=("axes fraction", "data"),
            va="center",
            fontsize=12.5,
            color=colour,
            arrowprops={
                "arrowstyle": "-",
                "color": colour,
                "linewidth": 0.9,
                "shrinkA": 1,
                "shrinkB": 0,
                "relpos": (0, 0.5),
            },
        )


def apart(positions: Sequence[float], gap: float) -> list[float]:
    """The nearest positions to these ascending ones that keep `gap` between neighbours (pool adjacent violators)."""
    pools: list[tuple[float, int]] = []  # sum of (position - rank * gap), count
    for rank, position in enumerate(positions):
        total, count = position - rank * gap, 1
        while pools and pools[-1][0] / pools[-1][1] >= total / count:
            previous = pools.pop()
            total, count = total + previous[0], count + previous[1]
        pools.append((total, count))
    shifts = [total / count for total, count in pools for _ in range(count)]
    return [shift + rank * gap for rank, shift in enumerate(shifts)]


def _figure(width: float, height: float) -> Figure:
    figure = Figure(figsize=(width, height), dpi=DPI, layout="constrained", facecolor="white")
    FigureCanvasAgg(figure)
    return figure


def _titles(axes: Axes, title: str, subtitle: str) -> None:
    axes.set_title(title, loc="left", fontsize=16, fontweight="bold", color=INK, pad=26)
    axes.text(0, 1.02, subtitle, transform=axes.transAxes, fontsize=11, color=MUTED, va="bottom")
    _clear(axes)


def _clear(axes: Axes) -> None:
    """A light grid and no frame."""
    axes.grid(visible=True, color=GRID, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.tick_params(colors=MUTED, labelsize=12, length=0)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    for side in ("left", "bottom"):
        axes.spines[side].set_color(GRID)


def _save(figure: Figure, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    options: dict[str, Any] = {"format": "png", "metadata": {"Software": None}}  # the same bits from the same numbers
    figure.savefig(path, **options)
