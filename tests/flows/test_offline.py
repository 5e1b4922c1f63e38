"""No stage asks anything of another machine: run in a network namespace without a route, where the kernel counts."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from transformers import PreTrainedTokenizerFast

from agent_r1.learn.builtin import new_model
from agent_r1.params import load
from agent_r1.params.places import RunId
from tests.cases import laid
from tests.fixtures import ROOT, WriteParams

# What keeps tools quiet from outside; the stages have to be quiet by themselves.
QUIET = ("CI", "DO_NOT_TRACK", "DVC_NO_ANALYTICS", "MLFLOW_DISABLE_TELEMETRY", "HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE")
PLACES = load(ROOT / "params.yaml").places
STAGES = """
from flows.stage import prepare_process

prepare_process()
from agent_r1.params.places import RunId
from flows.evaluate import EvaluationRequest, evaluate
from flows.commands.execute import index, prepare
from flows.train import train
from agent_r1.inspection.viewer import view

prepare()
index()
train(RunId("ppo"))
evaluate(EvaluationRequest(RunId("ppo")))
view(RunId("ppo"))
"""


def run_offline(folder: Path, code: str) -> int:
    """Runs Python code without a network; how often it tried to reach one, names looked up included."""
    inherited = {name: value for name, value in os.environ.items() if name not in (*QUIET, "PREFECT_API_URL")}
    counted = "/proc/net/snmp /proc/net/snmp6"
    done = subprocess.run(
        ["unshare", "--map-root-user", "--net", "sh", "-c", f'"$@" && cat {counted}', "sh", sys.executable, "-c", code],
        cwd=folder,
        env={**inherited, "PYTHONPATH": str(ROOT), "TMPDIR": str(folder), "AGENT_R1_LOCKS": str(folder)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert not done.returncode, done.stderr
    names, values = (line.split() for line in re.findall(r"^Ip: .*$", done.stdout, re.MULTILINE))
    [sixth] = re.findall(r"^Ip6OutNoRoutes\s+(\d+)$", done.stdout, re.MULTILINE) or ["0"]
    return int(values[names.index("OutNoRoutes")]) + int(sixth)


@pytest.fixture
def counted(tmp_path: Path) -> None:
    """Skips where the kernel gives no namespace, or does not count in it."""
    attempt = "import socket; socket.socket().connect_ex(('192.0.2.1', 80))"  # documentation only: nobody is there
    try:
        counts = run_offline(tmp_path, attempt) == 1
    except (AssertionError, OSError) as refusal:
        pytest.skip(f"no network namespace here: {refusal}")
    if not counts:
        pytest.skip("the kernel does not count what has no route")


@pytest.mark.usefixtures("counted")
def test_no_stage_reaches_for_a_network(
    tmp_path: Path, tiny_tokenizer: PreTrainedTokenizerFast, write_params: WriteParams
) -> None:
    """Not with the transformers engine; vLLM asks the kernel for its own address."""
    changes = laid("offline")
    write_params(tmp_path, changes)
    model = new_model(tiny_tokenizer, hidden_size=64, layers=2, heads=2, max_tokens=1024, seed=0)
    model.save_pretrained(tmp_path / PLACES.warm_start)
    tiny_tokenizer.save_pretrained(tmp_path / PLACES.warm_start)
    assert run_offline(tmp_path, STAGES) == 0
    assert (tmp_path / PLACES.evaluation("ppo") / "scores.json").exists()
    assert (tmp_path / PLACES.page(RunId("ppo"))).exists()
