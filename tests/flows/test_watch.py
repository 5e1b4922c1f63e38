"""A run whose collapse monitor alarms: it goes on, stops, or goes back, and ends with the same bits after a kill."""

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from mlflow import MlflowClient
from mlflow.entities import Run
from transformers import PreTrainedTokenizerFast

from agent_r1.learn.builtin import new_model
from agent_r1.learn.learner import Learner
from agent_r1.params.places import RunId
from agent_r1.records import Trajectory
from agent_r1.tables import read_rows
from agent_r1.training.folder import RunFolder
from flows.commands.execute import index, prepare
from flows.train import train
from tests.fixtures import PLACES, Inside, WriteParams
from tests.reading import lasting_metrics, progress


def shown(project: Path) -> Run:
    client = MlflowClient(f"sqlite:///{project}/.tracking/mlflow.db")
    experiment = client.get_experiment_by_name("agent_r1")
    [run] = client.search_runs([experiment.experiment_id])
    return run


MAX_TOKENS = 1024
# Entropy is never just what it was in the first iteration, so that every other one shows a sign.
TOUCHY = {"patience": 1, "first_iterations": 1, "thresholds": {"entropy_rise": 1.000001, "entropy_fall": 0.999999}}


@pytest.fixture(scope="module")
def untrained(
    tmp_path_factory: pytest.TempPathFactory,
    tiny_tokenizer: PreTrainedTokenizerFast,
    inside: Inside,
    write_params: WriteParams,
) -> Path:
    """A project with prepared data and a model that says anything: what it does is not the point."""
    folder = tmp_path_factory.mktemp("untrained")
    write_params(folder, {})
    with inside(folder):
        prepare()
        index()
    new_model(tiny_tokenizer, hidden_size=64, layers=2, heads=2, max_tokens=MAX_TOKENS, seed=0).save_pretrained(
        folder / PLACES.warm_start
    )
    tiny_tokenizer.save_pretrained(folder / PLACES.warm_start)
    return folder


@pytest.fixture
def touchy(tmp_path: Path, untrained: Path, inside: Inside, write_params: WriteParams) -> Iterator[Callable[..., Path]]:
    """A project with a touchy monitor and two runs alike, `ppo` and `twin`; gives the first one's folder."""
    shutil.copytree(untrained, tmp_path, dirs_exist_ok=True)

    def write(train: Any = None, max_action_tokens: int = 8, **monitor: Any) -> Path:
        small = {
            "iterations": 3,
            "monitor": {**TOUCHY, **monitor},
            "update": {"critic": {"warmup": {"iterations": 0, "explained_variance": 0, "limit": 0}}},
            **(train or {}),
        }
        limits = {"max_steps": 1, "max_tokens": MAX_TOKENS, "max_action_tokens": max_action_tokens}
        as_long = {"train": {"iterations": small["iterations"]}}
        changes = {"env": limits, "train": small, "runs": {"ppo": {}, "twin": {}}, "ablations": as_long}
        write_params(tmp_path, {**changes, "warm_start": {"demonstrations": 0}})
        return tmp_path / PLACES.training(RunId("ppo"))

    with inside(tmp_path):
        yield write


def seeds(run: Path, iteration: int) -> list[int]:
    return [row.seed for row in read_rows(run / "trajectories" / f"{iteration:03d}.parquet", Trajectory)]


def test_stopped_run_is_a_finished_run_with_fewer_iterations(tmp_path: Path, touchy: Callable[..., Path]) -> None:
    run = touchy(on_collapse="stop")
    train(RunId("ppo"))
    assert shown(tmp_path).data.tags["monitor/last_alarm"].startswith("iteration 1, stopped: entropy_")
    assert [row["monitor/alarms"] for row in lasting_metrics(run)] == [0, 1]
    assert (progress(run)["iterations"], progress(run)["stopped"]) == (2, True)
    assert (run / "checkpoint/policy/model.safetensors").exists()
    assert shown(tmp_path).info.status == "FINISHED"
    before = (run / "metrics.jsonl").read_bytes()
    train(RunId("ppo"))
    assert (run / "metrics.jsonl").read_bytes() == before, "started again, it stays stopped"


class Killed(BaseException):
    """What a process that is killed does not live to see."""


# The call that a process does not live to see, and when. Of a run that rolls back: during the rollback, right after it,
# between the two checkpoints of an iteration.
KILLS: list[tuple[str, Callable[[RunFolder], bool]]] = [
    ("save", lambda folder: folder.rollbacks == 1),
    ("history", lambda folder: folder.rollbacks == 1),
    ("save", lambda folder: folder.good.exists()),
]


def test_run_rolls_back_and_stops_with_the_same_bits_if_it_is_killed_around_that(
    tmp_path: Path, touchy: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Iteration 1 alarms; the one before it began with the good checkpoint, the warm start: back to iteration 0.

    Under the second seed iteration 1 alarms again, the one rollback is spent, and the run stops. The twin is killed
    once and started again, three times anew.
    """
    run, first_seeds = touchy(on_collapse="rollback", max_rollbacks=1), []
    go_back = RunFolder.go_back

    def watched(folder: RunFolder, learner: Learner) -> None:
        first_seeds.extend(seeds(run, 0))
        go_back(folder, learner)

    with monkeypatch.context() as patch:
        patch.setattr(RunFolder, "go_back", watched)
        train(RunId("ppo"))
    assert (progress(run)["iterations"], progress(run)["rollbacks"], progress(run)["stopped"]) == (2, 1, True)
    assert [(row["monitor/alarms"], row["monitor/rollbacks"]) for row in lasting_metrics(run)] == [(0, 1), (1, 1)]
    assert len(first_seeds) == 8
    assert not set(first_seeds) & set(seeds(run, 0))
    files = ["checkpoint", "credit", "metrics.jsonl", "mlflow_run_id", "proof", "start.json", "trajectories"]
    assert sorted(path.name for path in run.iterdir()) == files
    tags = shown(tmp_path).data.tags
    assert (tags["monitor/rollbacks"], tags["monitor/last_alarm"][:20]) == ("1", "iteration 1, stopped")
    client = MlflowClient(f"sqlite:///{tmp_path}/.tracking/mlflow.db")
    history = client.get_metric_history(shown(tmp_path).info.run_id, "reward/total")
    assert [point.step for point in history] == [0, 1, 0, 1]
    twin, weights = run.with_name("twin"), "checkpoint/policy/model.safetensors"
    for call, when in KILLS:
        original = getattr(RunFolder, call)

        def killed(folder: RunFolder, *arguments: Any, when: Any = when, original: Any = original, **named: Any) -> Any:
            if when(folder):
                raise Killed
            return original(folder, *arguments, **named)

        with monkeypatch.context() as patch:
            patch.setattr(RunFolder, call, killed)
            with pytest.raises(Killed):
                train(RunId("twin"))
        train(RunId("twin"))
        assert (twin / weights).read_bytes() == (run / weights).read_bytes(), call
        assert progress(twin) == progress(run)
        assert lasting_metrics(twin) == lasting_metrics(run)
        assert [seeds(twin, each) for each in range(2)] == [seeds(run, each) for each in range(2)]
        shutil.rmtree(twin)
