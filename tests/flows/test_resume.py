"""A training that is killed and started again ends with the bits of one that was left alone (law 7)."""

import dataclasses
import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from mlflow import MlflowClient
from safetensors.torch import load_file

from agent_r1.params.places import RunId
from agent_r1.records import Credit, Trajectory
from agent_r1.tables import read_rows
from tests.answering import wait_for
from tests.fixtures import PLACES, WriteParams
from tests.reading import OWN, lasting_metrics, progress

TRAIN = ("-m", "flows", "train", "--run", "ppo")
TIMEOUT_S = 300.0


@pytest.fixture
def fresh(tmp_path: Path, small_project: Path, write_params: WriteParams) -> Path:
    """The project before training, where `start` starts processes; there is a checkpoint after two iterations."""
    write_params(tmp_path, {"train": {"checkpoint": {"every": 2}}})
    for part in ("data", "outputs/warm_start"):
        shutil.copytree(small_project / part, tmp_path / part)
    return tmp_path


def killed_at(path: Path, process: subprocess.Popen[str]) -> str:
    """What a process has said that is killed as soon as there is a file."""
    wait_for(path.exists, process, pause_s=0.002)
    process.kill()
    return process.communicate(timeout=TIMEOUT_S)[1]


def plain(row: Trajectory | Credit) -> dict[str, Any]:
    """All that must be equal: arrays as bytes, no seconds."""
    fields = dataclasses.asdict(row)
    for step in fields.get("steps", []):
        del step["duration_s"]
        for call in step["calls"]:
            del call["latency_s"]
    return {name: value.tobytes() if hasattr(value, "tobytes") else value for name, value in fields.items()}


def rows_of(run: Path) -> dict[str, list[dict[str, Any]]]:
    kinds: dict[str, type[Any]] = {"trajectories": Trajectory, "credit": Credit}
    return {
        f"{folder}/{path.name}": [plain(row) for row in read_rows(path, kind)]
        for folder, kind in kinds.items()
        for path in sorted((run / folder).glob("*.parquet"))
    }


def learner_state(run: Path) -> dict[str, torch.Tensor]:
    """Critic, both optimisers and versions. The process's own random numbers decide nothing, and pytest draws some."""
    state = load_file(run / "checkpoint/learner/shard-00001-model-00001-of-00001.safetensors")
    return {name: value for name, value in state.items() if not name.startswith("random")}


def test_killed_training_has_the_same_bits(fresh: Path, ppo: Path, start: Callable[..., subprocess.Popen[str]]) -> None:
    run, alone = fresh / PLACES.training(RunId("ppo")), ppo
    killed_at(run / "trajectories/002.parquet", start(*TRAIN))
    assert progress(run)["iterations"] == 2
    process = start(*TRAIN)
    errors = process.communicate(timeout=TIMEOUT_S)[1]
    assert process.returncode == 0, errors
    assert "going on after 2 finished iterations" in errors
    assert [iteration for iteration in range(3) if f"iteration {iteration} was collected before" in errors] == [2]

    weights = "checkpoint/policy/model.safetensors"
    assert (run / weights).read_bytes() == (alone / weights).read_bytes()
    states = learner_state(run), learner_state(alone)
    assert states[0].keys() == states[1].keys()
    assert all(map(torch.equal, states[0].values(), states[1].values()))
    assert rows_of(run) == rows_of(alone)
    assert lasting_metrics(run) == lasting_metrics(alone)

    client = MlflowClient(f"sqlite:///{fresh}/.tracking/mlflow.db")
    experiment = client.get_experiment_by_name("agent_r1")
    [shown] = client.search_runs([experiment.experiment_id], "params.variant = 'ppo'")
    assert shown.info.status == "FINISHED"
    for name in (name for name in shown.data.metrics if not name.startswith("final/")):
        steps = [point.step for point in client.get_metric_history(shown.info.run_id, name)]
        assert steps == [row["iteration"] for row in lasting_metrics(alone) if name in row or name.startswith(OWN)], (
            name
        )


def test_killed_run_goes_on_under_settings_that_round_or_give_room_and_its_record_says_so(
    fresh: Path, start: Callable[..., subprocess.Popen[str]], write_params: WriteParams
) -> None:
    """Real updates and samples, under all that the built-in model on a CPU can be asked for."""
    write_params(fresh, {})
    run = fresh / PLACES.training(RunId("ppo"))
    killed_at(run / "trajectories/001.parquet", start(*TRAIN))
    update = {"max_tokens_per_microbatch": 512}
    others = {
        "model": {"packing": True, "gradient_checkpointing": True, "threads": 2},
        "engine": {"transformers": {"batch_size": 3}},
        "learner": {"processes": 2},
        "env": {"max_action_tokens": 96},
        "train": {
            "iterations": 3,
            "update": update,
            "validation": {"every": 2, "questions": 6},
            "checkpoint": {"every": 2},
        },
    }
    write_params(fresh, others)
    process = start(*TRAIN)
    errors = process.communicate(timeout=TIMEOUT_S)[1]
    assert process.returncode == 0, errors
    record = progress(run)
    changes = [change.removeprefix("from iteration 1 on ") for change in record["changes"]]
    said = re.search(r"settings change after 1 finished iterations: (.*); where these round", errors)
    assert said, errors
    assert ", ".join(changes) == said[1]
    assert {change.split()[0] for change in changes} == {
        *("model.packing", "model.gradient_checkpointing", "model.threads", "engine.batch_size", "learner.processes"),
        *("env.max_action_tokens", "train.iterations", "train.update.max_tokens_per_microbatch"),
        *("train.validation.every", "train.validation.questions", "train.checkpoint.every"),
    }
    assert (record["iterations"], record["decays_over"]) == (4, 2)
    assert len(lasting_metrics(run)) == 4
    client = MlflowClient(f"sqlite:///{fresh}/.tracking/mlflow.db")
    tags = client.get_run((run / "mlflow_run_id").read_text()).data.tags
    assert tags["changed_settings"].startswith("from iteration 1 on ")
    assert not (fresh / PLACES.aside).exists()
