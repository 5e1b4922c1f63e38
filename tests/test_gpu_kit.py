"""The kit for a GPU in miniature: its parts run on a CPU, and what cannot run is named."""

from __future__ import annotations

import json
from pathlib import Path

from benchmarks.gpu import TRAINS, campaign, table
from benchmarks.synthetic import Work


def test_the_kit_measures_what_fits_and_names_what_it_leaves_out(tmp_path: Path) -> None:
    work = Work(episodes=4, prompt=160, action=96)
    parts = campaign(["tiny"], ["transformers"], work, 600.0, tmp_path)
    assert [part["trains"] for part in parts] == [*TRAINS]
    for part in parts:
        assert part["weights"] == 115_392  # 512 x 64 words, two layers of 41,280, a norm of 64
        assert 0 <= part["canary"] < 1e-4
        assert 0 <= part["canary after an update"] < 1e-4
        assert part["updated tokens/s"] > 0 < part["share of the products' rate"]
    stored = json.loads((tmp_path / "gpu.json").read_text())
    assert (stored["device"], stored["parts"]) == ("CPU", parts)
    late = campaign(["tiny"], ["transformers"], work, 0.0, tmp_path)
    assert [part["left out"] for part in late] == ["out of time"] * 4
    assert table(late).splitlines()[-1] == "| tiny | transformers | all weights, offloaded | out of time |"
    small, *_ = campaign(["tiny"], ["transformers"], Work(episodes=3, prompt=16, action=8), 600.0, tmp_path)
    assert small["left out"].startswith("ValueError: benchmarks.gpu: runs.dapo: credit.overlong_buffer 102")
