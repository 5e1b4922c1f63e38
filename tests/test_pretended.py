"""What runs on CUDA alone is walked without it, by tensors that say cuda:0; and the memory of an update is counted."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from agent_r1.learn.memory import estimate
from benchmarks.counted import CASES, demand_of
from benchmarks.stored import MEASURED, stored

ROOT = Path(__file__).parents[1]
compiled = pytest.mark.skipif(shutil.which("c++") is None, reason="the device guard needs a C++ compiler, c++")
WALKED = ("learner: adapters, packing, gradient checkpointing", "checkpoint: offloaded optimiser", "sampler: adapters")


def pretend(module: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Runs a module in a process of its own; the guard stays in it."""
    command = [sys.executable, "-m", "benchmarks.pretended", module, *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600)


@pytest.mark.slow
@compiled
def test_a_learner_that_is_told_it_is_on_cuda_learns_what_a_cpu_learns(tmp_path: Path) -> None:
    """`python -m benchmarks.pretended` walks every setting."""
    options = ["--runs", "1", "--words", "512", "--out", str(tmp_path), "--parts", *WALKED]
    ended = pretend("benchmarks.cuda", *options)
    assert ended.returncode == 0, ended.stderr[-4000:]
    rows = {row["part"]: row for row in json.loads((tmp_path / "cuda.json").read_text())["parts"]}
    assert {*WALKED} <= {*rows}
    assert rows[WALKED[0]]["bfloat16: policy gradient"] > 1e-4, "the matrix products were not in bfloat16"


@pytest.mark.slow
@compiled
def test_the_estimate_is_near_the_memory_that_is_counted() -> None:
    ended = pretend("benchmarks.counted", "--cases", "0.5B all weights, packed", "--layers", "2")
    assert ended.returncode == 0, ended.stderr[-4000:]
    assert 0.85 < float(ended.stdout.split("|")[-2]) < 1.15, ended.stdout


@pytest.mark.parametrize("row", stored(MEASURED / "counted.csv"), ids=lambda row: f"{row['Qwen2.5']} {row['trains']}")
def test_the_stored_counts_are_near_the_estimate_of_today(row: dict[str, str]) -> None:
    size, _, tokens, changes = next(case for case in CASES if case[:2] == (row["Qwen2.5"], row["trains"]))
    parts = estimate(demand_of(size, tokens, changes))
    estimated = sum(parts.values()) - parts["libraries"]
    assert row["estimated"] == f"{estimated:.2f} GiB"
    assert estimated == pytest.approx(float(row["counted"].split()[0]), rel=0.15)
