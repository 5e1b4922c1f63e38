"""The pictures: what is placed where, and that ink ends up on paper."""

from pathlib import Path

import numpy as np
import pytest
from matplotlib.image import imread

from agent_r1.evaluation.plots import (
    PALETTE,
    _band,
    _points,
    along,
    axis_of,
    final_scores,
    gained,
    learning_curves,
    seed_curves,
)
from agent_r1.evaluation.statistics import Interval


def test_a_curve_over_a_budget_has_its_points_at_the_amount_before_each_iteration(tmp_path: Path) -> None:
    """Three iterations of 20 and 10 s; a share is no time. A band stands at the mean place of its seeds."""
    fast = curve(0, 0.1, 3, **{"time/rollout_s": 20.0, "time/update_s": 10.0, "time/share": 1.0})
    slow = [{**row, "time/update_s": 40.0} for row in fast]
    drawn = [along(rows, "seconds") for rows in (fast, slow)]
    assert (axis_of(fast), axis_of(drawn[0])) == ("iteration", "seconds")
    assert _points(drawn[0], "rollout/success").tolist() == [[0, 30, 60], [0, 0.1, 0.2]]
    assert _band(drawn, "rollout/success")[0].tolist() == [0, 45, 90]
    seed_curves(tmp_path / "plain.png", {"ppo": [fast, slow]}, "ppo", "rollout/success", "", {})
    seed_curves(tmp_path / "over.png", {"ppo": drawn}, "ppo", "rollout/success", "", {})
    assert (tmp_path / "plain.png").read_bytes() != (tmp_path / "over.png").read_bytes()
    with pytest.raises(ValueError, match="did not count tokens sampled; draw curves over seconds, or train"):
        along(fast, "tokens")


def test_the_gain_is_that_of_three_iterations_in_a_row() -> None:
    """Means are 0, .1, .3, .6, .8, .9, .9: .45 is reached after six iterations, .81 after eight."""
    learned = [{"rollout/success": each, "update/episodes": 10.0} for each in (0, 0, 0, 0.3, 0.6, 0.9, 0.9, 0.9, 0.9)]
    assert (gained([learned], 0.5), gained([learned], 0.9)) == (60, 80)
    assert gained([learned, [{**row, "update/episodes": 20.0} for row in learned]], 0.5) == 90
    assert np.isnan(gained([learned, learned[:3]], 0.5))
    assert np.isnan(gained([learned[::-1]], 0.5))
    chance = [{"rollout/success": each, "update/episodes": 100.0} for each in (0.5, 0.5, 0.5, 0.5, 0.6, 0.7)]
    assert np.isnan(gained([chance[:-1]], 0.5)), ".033 is within two of .041"
    assert gained([chance], 0.5) == 600, ".1 is above two of .040"


def drawn_in(path: Path, colour: str, *, right: float = 1.0) -> int:
    """Pixels of exactly that colour, in a share of the width at the right."""
    rgb = np.array([int(colour[i : i + 2], 16) for i in (1, 3, 5)])
    picture = np.rint(imread(path)[..., :3] * 255)
    return int((picture[:, round(picture.shape[1] * (1 - right)) :] == rgb).all(axis=-1).sum())


def curve(success: float = 0.0, slope: float = 0.0, count: int = 10, **more: float) -> list[dict[str, float]]:
    return [{"iteration": i, "rollout/success": success + slope * i, **more} for i in range(count)]


def test_curves_draw_every_run_and_survive_missing_metrics(tmp_path: Path) -> None:
    ppo = [{**row, "reward/total": row["rollout/success"]} for row in curve(slope=0.1)]
    curves = {"ppo": ppo, "grpo": curve(slope=0.05)}
    learning_curves(tmp_path / "curves.png", curves, {"base_tool_call": 0.2}, "exact match")
    drawn = [drawn_in(tmp_path / "curves.png", colour) for colour in PALETTE[:3]]
    assert (drawn[0] > 1000, drawn[1] > 500, drawn[2]) == (True, True, 0)


def test_final_scores_draw_runs_in_colour_and_seeds_beside_their_mean_in_the_same_bits(tmp_path: Path) -> None:
    scores = {"ppo": Interval(mean=0.7, low=0.6, high=0.8), "naive_rag": Interval(mean=0.3, low=0.2, high=0.4)}
    for name, seeds in (("mean", {}), ("again", {}), ("seeds", {"ppo": [0.6, 0.8]})):
        final_scores(tmp_path / f"{name}.png", scores, ["ppo"], seeds=seeds, title=("solved", "greedy"))
    mean, again, with_seeds = (tmp_path / f"{name}.png" for name in ("mean", "again", "seeds"))
    assert drawn_in(with_seeds, PALETTE[0]) > drawn_in(mean, PALETTE[0]) > 200
    assert drawn_in(mean, PALETTE[1]) == 0
    assert mean.read_bytes() == again.read_bytes()


def test_seed_curves_draw_a_panel_per_run_over_the_iterations_all_seeds_have(tmp_path: Path) -> None:
    curves = {"ppo": [curve(0, 0.1, 4), curve(0, 0.2, 3)], "grpo": [curve(0, 0.05, 4), curve(0, 0.15, 4)]}
    x, mean, low, high = _band(curves["ppo"], "rollout/success")
    assert x.tolist() == [0, 1, 2]
    assert mean.tolist() == pytest.approx([0, 0.15, 0.3])
    assert low.tolist() == pytest.approx([0, 0.1, 0.2])
    assert high.tolist() == pytest.approx([0, 0.2, 0.4])
    seed_curves(tmp_path / "seeds.png", curves, "ppo", "rollout/success", "Exact match", {})
    assert all(drawn_in(tmp_path / "seeds.png", PALETTE[i]) > 500 for i in range(2))
