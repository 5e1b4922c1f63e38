"""A replay as tables: credit, reward parts, gradients and the critic's errors, side by side."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby

from rich import box
from rich.table import Table

from agent_r1.inspection.replay import Replayed, reads_untrained_values

# Heading and metric of every column.
CREDIT = {
    "return": "reward/total",
    "return std": "reward/std",
    "kept": "advantage/kept_share",
    "adv. mean": "advantage/mean",
    "adv. std": "advantage/std",
    "adv. max": "advantage/abs_max",
    "non-zero": "advantage/nonzero_share",
    "corr.": "advantage/correlation",
}
GRADIENT = {
    "loss": "policy/loss",
    "clipped": "policy/clip_fraction",
    "norm": "policy/grad_norm",
    "cosine": "policy/gradient_cosine",
    "observed loss": "policy/observed_loss_share",
    "observed gradient": "policy/observed_gradient_share",
}
VALUES = {
    "RMSE, actions": "value/action_rmse",
    "return std, actions": "value/action_std",
    "RMSE, observations": "value/observation_rmse",
    "return std, observations": "value/observation_std",
}
ABOUT_CREDIT = (
    "Adv.: advantages at action tokens, the largest by size. Non-zero: share of the tokens after the prompt that have "
    "one. Corr.: correlation with the advantages of the iteration's first line, at action tokens that both train on."
)
ABOUT_REWARDS = "Weighted parts of the return, mean per trajectory."
ABOUT_GRADIENT = (
    "Policy loss of all kept trajectories of the iteration as one optimiser step; its gradient before clipping and "
    "Adam. Cosine: with the gradient of the iteration's first line. Observed: what comes from tokens after the prompt "
    "that the policy did not sample, as a share of the absolute loss and of the squared norms of the gradient's two "
    "parts."
)
ABOUT_VALUES = "Values as the run's critic gave them, against the undiscounted return yet to come."
NAME_WIDTH = 22  # a longer name goes on in another line
ROUNDING = 1e-6  # of metrics, whose scale is 1
Line = tuple[int, str, Mapping[str, float]]  # iteration, what it is about, metrics


def tables(replayed: Sequence[Replayed]) -> Iterator[Table | str]:
    """Credit, reward parts where they are weighed differently, gradients, errors of values, and what to bear in mind.

    There is at least one iteration, and each has the same configurations.
    """
    own, *others = [replay.configuration for replay in replayed[0].replays]
    lines = [(one.iteration, replay.configuration.name, replay.metrics) for one in replayed for replay in one.replays]
    yield _table("Credit", CREDIT, lines, ABOUT_CREDIT)
    if any(each.train.credit.rewards != own.train.credit.rewards for each in others):
        yield _reward_parts(replayed)
    with_gradient = [line for line in lines if "policy/grad_norm" in line[2]]
    if with_gradient:
        yield _table("Gradient", GRADIENT, with_gradient, ABOUT_GRADIENT)
    for note in dict.fromkeys(one.policy.note for one in replayed):
        sharing = ", ".join(str(one.iteration) for one in replayed if one.policy.note == note)
        yield f"Policy of the gradient in iteration {sharing}: {note}."
    values = [(one.iteration, own.name, one.values) for one in replayed if one.values]
    if values:
        yield _table("Critic", VALUES, values, ABOUT_VALUES)
    for each in others:
        if reads_untrained_values(own.train.credit, each.train.credit):
            yield (
                f"{each.name} reads values at tokens that the critic of {own.name} was never trained at; replay a run "
                "whose critic was to see the effect of the masks alone."
            )


def number(value: float | None) -> str:
    """Three decimals; two digits for what would be all zeros and is no rounding error; a dash for no number."""
    if value is None or math.isnan(value):
        return "-"
    if abs(value) < ROUNDING:
        return "0.000"
    return f"{value:.1e}" if abs(value) < 0.0005 else f"{value:.3f}"


def _table(title: str, columns: Mapping[str, str], lines: Sequence[Line], about: str) -> Table:
    table = Table(title=title, title_justify="left", caption=about, caption_justify="left", box=box.SIMPLE)
    table.add_column("iter.", justify="right")
    table.add_column("", overflow="fold", min_width=min(NAME_WIDTH, max(len(name) for _, name, _ in lines)))
    for heading in columns:
        table.add_column(heading, justify="right", min_width=6)
    for iteration, rows in groupby(lines, lambda line: line[0]):
        for place, (_, name, metrics) in enumerate(rows):
            numbers = [number(metrics.get(metric)) for metric in columns.values()]
            table.add_row("" if place else str(iteration), name, *numbers)
        table.add_section()
    return table


def _reward_parts(replayed: Sequence[Replayed]) -> Table:
    weights = [replay.configuration.train.credit.rewards.weights for replay in replayed[0].replays]
    parts = [part for part in weights[0] if any(each[part] for each in weights)]
    lines = [
        (one.iteration, configuration.name, {part: weighed[part] * metrics[f"reward/{part}"] for part in parts})
        for one in replayed
        for (configuration, metrics), weighed in zip(one.replays, weights, strict=True)
    ]
    return _table("Reward parts", {part: part for part in parts}, lines, ABOUT_REWARDS)
