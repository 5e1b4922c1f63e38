"""The number of threads is a knob: every library of a stage follows it, and the engine's process has its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from agent_r1.params import SHIPPED
from agent_r1.rollout import vllm_engine

ROOT = Path(__file__).parents[3]
STAGE = """
import json, sys
from flows.stage import prepare_process

early = sorted({"numpy", "torch", "faiss"} & set(sys.modules))
prepare_process()
import faiss, numpy, torch
from threadpoolctl import threadpool_info
blas = [each["num_threads"] for each in threadpool_info() if "numpy" in each["filepath"]]
print(json.dumps([early, torch.get_num_threads(), faiss.omp_get_max_threads(), *blas]))
"""


def test_torch_faiss_and_numpy_follow_the_knob_whatever_the_environment_says(tmp_path: Path) -> None:
    content = yaml.safe_load(SHIPPED.read_text())
    content["model"]["threads"] = 1
    (tmp_path / "params.yaml").write_text(yaml.safe_dump(content))
    others = {f"{library}_NUM_THREADS": "2" for library in ("OMP", "MKL", "OPENBLAS")}
    environment = {**os.environ, **others, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", STAGE]
    said = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=True).stdout
    assert json.loads(said) == [[], 1, 1, 1], "nothing is imported before it is set, and all follow it"


def test_the_engines_process_has_a_number_of_its_own(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    assert vllm_engine.engine_environment(1, tmp_path, {})["OMP_NUM_THREADS"] == "1"
