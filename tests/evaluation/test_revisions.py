"""What revisions are compared by: a file per agent, a file per curve."""

from __future__ import annotations

import json
from pathlib import Path

from agent_r1.evaluation.report import write_curves, write_scores
from agent_r1.evaluation.statistics import Interval


def test_scores_are_of_the_agents_there_are(tmp_path: Path) -> None:
    folder = tmp_path / "scores"
    write_scores(folder, {"gone": Interval(mean=0.5, low=0.5, high=0.5)})
    write_scores(folder, {"ppo": Interval(mean=2 / 3, low=0.5, high=0.75)})
    assert [path.name for path in folder.iterdir()] == ["ppo.json"]
    found = json.loads((folder / "ppo.json").read_text())
    assert found == {"lower": 0.5, "success": 0.6667, "upper": 0.75}
    assert list(found) == sorted(found)  # as DVC shows them


def test_a_curve_is_the_mean_of_the_seeds_that_have_it(tmp_path: Path) -> None:
    """Of ppo's two seeds one is an iteration ahead; short has ended before."""
    two = [
        [{"iteration": i, "rollout/success": success} for i in range(stop)] for stop, success in ((3, 0.2), (2, 0.4))
    ]
    write_curves(tmp_path, {"ppo": two, "short": [[{"iteration": 0, "rollout/success": 1.0, "reward/total": -1.0}]]})
    assert json.loads((tmp_path / "success.json").read_text()) == [
        {"iteration": 0, "ppo": 0.3, "short": 1.0},
        {"iteration": 1, "ppo": 0.3, "short": None},
    ]
    assert json.loads((tmp_path / "reward.json").read_text()) == [{"iteration": 0, "ppo": None, "short": -1.0}]
