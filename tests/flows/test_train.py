"""The train stage with all its parts: what an iteration leaves behind, and when it starts over or goes on."""

import json
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pandas as pd
import pytest
import torch
from mlflow import MlflowClient

from agent_r1.files import SUMS, model_hash
from agent_r1.identity import read_start
from agent_r1.learn.learner import frozen
from agent_r1.learn.scoring import Compute
from agent_r1.params import load
from agent_r1.params.places import RunId, policy_in
from agent_r1.records import CallStatus, Credit, Source
from agent_r1.serving.trainer import Trainer
from agent_r1.tables import read_rows
from agent_r1.training import collection
from agent_r1.training.folder import AnotherRunError
from agent_r1.training.loop import Training
from flows import made_of
from flows import train as train_module
from flows.operation.register import register
from flows.policies import version_of
from flows.train import train
from tests.cases import cases
from tests.fixtures import PLACES, Inside, WriteParams
from tests.flows.conftest import SMALL
from tests.reading import contents, metrics, progress, trajectories

PPO, GRPO = (PLACES.training(RunId(name)) for name in ("ppo", "grpo"))
CLOSE = 1e-4  # nats, in float32
ITERATIONS = {"ppo": 3, "grpo": 2}


@pytest.fixture(params=["ppo", "grpo"])
def run(request: pytest.FixtureRequest) -> Path:
    return request.getfixturevalue(request.param)


def credits_(run: Path) -> list[list[Credit]]:
    return [read_rows(path, Credit) for path in sorted((run / "credit").iterdir())]


def test_every_iteration_leaves_its_files_of_searches_and_answers_and_nothing_else(run: Path) -> None:
    names = [f"{iteration:03d}.parquet" for iteration in range(ITERATIONS[run.name])]
    for kind in ("trajectories", "credit", "proof"):
        assert sorted(path.name for path in (run / kind).iterdir()) == names
    files = ["checkpoint", "credit", "metrics.jsonl", "mlflow_run_id", "proof", "start.json", "trajectories"]
    assert sorted(path.name for path in run.iterdir()) == files
    rows = [row for rows in trajectories(run) for row in rows]
    assert {step.call_status for row in rows for step in row.steps} >= {CallStatus.OK, CallStatus.NONE}
    assert {int(source) for row in rows for source in row.source} == set(map(int, Source)) - {Source.DEMONSTRATION}


def test_groups_seeds_and_versions_of_trajectories(ppo: Path, grpo: Path) -> None:
    """PPO's first iteration trains the critic alone, so its second still samples with version 0."""
    for run, groups, samples in ((ppo, 8, 1), (grpo, 4, 4)):
        for iteration, rows in enumerate(trajectories(run)):
            expected = [(group, sample) for group in range(groups) for sample in range(samples)]
            assert [(row.group, row.sample) for row in rows] == expected
            assert {row.iteration for row in rows} == {iteration}
            assert len({row.question_id for row in rows}) == groups
        assert len({row.seed for rows in trajectories(run) for row in rows}) == ITERATIONS[run.name] * groups * samples
        assert (progress(run)["policy_version"], progress(run)["iterations"]) == (2, ITERATIONS[run.name])
    assert [{row.policy_version for row in rows} for rows in trajectories(ppo)] == [{0}, {0}, {1}]
    assert [{row.policy_version for row in rows} for rows in trajectories(grpo)] == [{0}, {1}]


def test_groups_of_equal_returns_make_room_for_further_questions(small_project: Path, inside: Inside) -> None:
    """Of 4 questions asked for, half are trained on; further ones come in two rounds while fewer than 4 differ."""
    with inside(small_project):
        train(RunId("refilled"))
        run = small_project / PLACES.training(RunId("refilled"))
    (rows,), (credit_rows,), (row,) = trajectories(run), credits_(run), metrics(run)
    returns: dict[int, list[float]] = {}
    for trajectory, credit in zip(rows, credit_rows, strict=True):
        returns.setdefault(trajectory.group, []).append(credit.return_)
    differing = {group for group, values in returns.items() if np.std(values) > 1e-6}
    asked_first = set(range(4))
    assert sorted(returns) == list(range(len(returns)))
    assert len({trajectory.question_id for trajectory in rows}) == len(returns)
    assert row["filter/refilled_groups"] == len(returns) - 4 >= 4 - len(differing & asked_first) > 0
    kept_groups = {trajectory.group for trajectory, credit in zip(rows, credit_rows, strict=True) if credit.kept}
    assert len(kept_groups) == min(2, len(differing))
    assert kept_groups <= differing


def test_metrics_have_one_row_per_iteration_in_which_sampler_and_learner_agree(run: Path) -> None:
    rows = metrics(run)
    assert [row["iteration"] for row in rows] == list(range(ITERATIONS[run.name]))
    assert all(np.isfinite(list(row.values())).all() for row in rows)
    for row, collected, credit_rows in zip(rows, trajectories(run), credits_(run), strict=True):
        assert 0 < row["policy/mismatch_max"] <= CLOSE  # over the first optimiser step
        assert 0 < row["rollout/canary_gap"] <= CLOSE  # over what was just sampled
        assert row["reward/total"] == pytest.approx(np.mean([credit.return_ for credit in credit_rows]))
        assert row["rollout/tokens"] == np.mean([len(trajectory.token_ids) for trajectory in collected])
        assert {"time/rollout_s", "time/credit_s", "time/update_s"} <= row.keys()
        called = [
            call
            for trajectory in collected
            for step in trajectory.steps
            for call in step.calls
            if call.tool == "search"
        ]
        assert row["tool/search/calls"] == len(called) / len(collected)
        assert row["tool/search/latency_p50_s"] == pytest.approx(np.median([call.latency_s for call in called]))
        assert 0 < row["tool/waiting_share"] < 1


def test_mlflow_shows_the_run(run: Path, small_project: Path, inside: Inside) -> None:
    with inside(small_project):
        client = MlflowClient(f"sqlite:///{small_project}/.tracking/mlflow.db")
        tracked = client.get_run((run / "mlflow_run_id").read_text())
    assert tracked.data.params["variant"] == run.name
    assert (tracked.info.run_name, tracked.info.status) == (f"{run.name}-seed0", "FINISHED")
    expected = {"algorithm": {"ppo": "gae", "grpo": "grpo"}[run.name], "loss_mask": "True", "advantage_mask": "True"}
    assert expected.items() <= tracked.data.params.items()
    assert tracked.data.params["seed"] == "0"
    assert tracked.data.params["rollout.questions"] == {"ppo": "8", "grpo": "4"}[run.name]
    assert tracked.data.tags["dataset"] == "atlas"
    assert tracked.data.tags["code"] == f"0-{ITERATIONS[run.name] - 1} {read_start(run).code_digest}"
    last = {name: value for name, value in metrics(run)[-1].items() if name != "iteration"}
    logged = {name: tracked.data.metrics[name] for name in last}
    costs = [name for name in last if name.startswith("cost/")]  # which grow until the process ends
    assert all(0 <= logged.pop(name) <= last.pop(name) * (1 + 5e-4) for name in costs)
    assert costs
    assert logged == pytest.approx(last, rel=5e-4), "four digits of each"


class Asked(Exception):
    """Which iteration was begun."""


@pytest.fixture
def finished(
    tmp_path: Path, small_project: Path, ppo: Path, inside: Inside, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Path]:
    """A copy of the project with the finished PPO run, from inside; an iteration that begins raises Asked."""

    def begin(_: Training, iteration: int) -> None:
        raise Asked(iteration)

    shutil.copytree(small_project, tmp_path / "copy")
    monkeypatch.setattr(collection, "open_engine", Mock(return_value=Mock(pids=[])))  # nothing is sampled
    monkeypatch.setattr(Training, "rollout", begin)
    with inside(tmp_path / "copy"):
        yield tmp_path / "copy"


def moved_aside(project: Path) -> list[dict[str, bytes]]:
    return [contents(folder) for folder in sorted((project / PLACES.aside).glob("*"))]


def test_finished_run_trains_nothing(finished: Path, write_params: WriteParams) -> None:
    """Nor under other stages' parameters, nor under those that round or give room; from other weights it is refused."""
    contents_before = contents(finished / PPO)
    for _ in range(2):
        train(RunId("ppo"))
    assert contents(finished / PPO) == contents_before
    changes = {"engine": {"vllm": {"max_num_seqs": 8}}, "evaluate": {"questions": 3}, "warm_start": {"batch_size": 2}}
    changes |= {"model": {"packing": True}, "env": {"aborted_share": 0.5}}
    changes |= {"train": {"update": {"max_tokens_per_microbatch": 512}, "checkpoint": {"every": 2}}}
    write_params(finished, changes | {"runs": {"ppo": {}}})
    train(RunId("ppo"))
    assert contents(finished / PPO) == contents_before
    shutil.copytree(finished / PPO / "checkpoint/policy", finished / "outputs/warm_start", dirs_exist_ok=True)
    (finished / "outputs/warm_start" / SUMS).unlink()
    with pytest.raises(ValueError, match=r"is another run's: warm_start \w+\.\.\. -> \w+\.\.\.; "):
        train(RunId("ppo"))


def test_finished_run_keeps_what_is_asked_for_and_stays_finished(finished: Path, write_params: WriteParams) -> None:
    folder = finished / PPO
    contents_before = contents(folder)
    state = "checkpoint/learner/shard-00001-model-00001-of-00001.safetensors"
    dropped = {state, "trajectories/001.parquet", "proof/001.parquet", "credit/001.parquet"}
    sums = "checkpoint/SHA256SUMS"
    contents_before[sums] = b"".join(
        line for line in contents_before[sums].splitlines(keepends=True) if b"  learner/" not in line
    )
    write_params(finished, {"train": {"keep": {"learner": False, "every": 2}}})
    for _ in range(2):
        train(RunId("ppo"))
        assert contents(folder) == {name: content for name, content in contents_before.items() if name not in dropped}


def test_registered_version_teaches(
    small_project: Path, ppo: Path, tmp_path: Path, inside: Inside, write_params: WriteParams
) -> None:
    """The run's parameter is the name of the version, and its input the weights, wherever they lie."""
    shutil.copytree(small_project, copy := tmp_path / "copy")
    with inside(copy):
        register(RunId("ppo"))
        version = version_of("ppo", load())
        credit = {"estimator": "reinforce_pp", "gamma": 0.0, "rewards": {"agent_r1": 0.0}, "kl_reward": 1.0}
        taught = {"reference": version.reference, "iterations": 1, "credit": credit}
        write_params(copy, {"runs": {"ppo": {}, "distill": taught}})
        train(RunId("distill"))
        folder = PLACES.training(RunId("distill"))
        identity = read_start(folder)
        assert identity.parameters["train.reference"] == version.reference
        assert identity.inputs["reference"] == version.descriptor.policy_hash
        tracked = MlflowClient(f"sqlite:///{copy}/.tracking/mlflow.db").get_run((folder / "mlflow_run_id").read_text())
        assert tracked.data.params["reference"] == version.reference
        [rows], [credit_rows] = trajectories(folder), credits_(folder)
        teacher = frozen(policy_in(PPO), Compute(device=torch.device("cpu"), dtype=torch.float32, max_tokens=2048))
        for credit_row, logprobs in zip(
            credit_rows, teacher.logprobs(rows, [row.action_mask for row in rows]), strict=True
        ):
            np.testing.assert_allclose(credit_row.reference_logprobs, logprobs, atol=CLOSE)
        contents_before = contents(folder)
        train(RunId("distill"))
        assert contents(folder) == contents_before
        write_params(copy, {"runs": {"ppo": {}, "distill": taught | {"reference": "models:/agent_r1/7"}}})
        with pytest.raises(ValueError, match="models:/agent_r1/7: there is no such version; the latest is 1"):
            train(RunId("distill"))


@cases("changes, difference")
def test_changed_parameters_make_another_run(
    finished: Path, changes: dict[str, Any], difference: str, write_params: WriteParams
) -> None:
    """Which is refused, and goes on with `fresh`."""
    contents_before = contents(finished / PPO)
    write_params(finished, changes)
    with pytest.raises(ValueError, match=f"{PPO} is another run's: {difference}; .* or start over with --fresh "):
        train(RunId("ppo"))
    assert contents(finished / PPO) == contents_before
    with pytest.raises(Asked, match="0"):
        train(RunId("ppo"), fresh=True)
    assert moved_aside(finished) == [contents_before]


def test_stage_without_terminal_moves_other_run_aside(
    finished: Path, write_params: WriteParams, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    contents_before = contents(finished / PPO)
    monkeypatch.setenv("AGENT_R1_PARENT_TASK_RUN", str(finished))
    train(RunId("ppo"))
    assert moved_aside(finished) == []
    write_params(finished, {"train": {"seed": 1}})
    with pytest.raises(Asked, match="0"):
        train(RunId("ppo"))
    assert moved_aside(finished) == [contents_before]
    loss = f"{PPO} is another run's: train.seed 0 -> 1; this gives up 3 finished iterations, 0.0"
    assert caplog.text.index(loss) < caplog.text.index("it was moved to")
    assert set(contents(finished / PPO)) == {"metrics.jsonl", "mlflow_run_id", "start.json"}, "costs alone"


@pytest.mark.parametrize(("answer", "hours", "anew"), [("y\n", 2.0, True), ("\n", 2.0, False), ("\n", 0.5, True)])
def test_terminal_asks_before_a_core_hour_makes_room(
    finished: Path,
    monkeypatch: pytest.MonkeyPatch,
    write_params: WriteParams,
    caplog: pytest.LogCaptureFixture,
    answer: str,
    hours: float,
    anew: bool,
) -> None:
    with (finished / PPO / "metrics.jsonl").open("a") as file:  # costs are the highest of all lines
        file.write(json.dumps({"iteration": 3, "cost/sampling_core_s": hours * 3600}) + "\n")
    monkeypatch.setattr(sys, "stdin", Mock(isatty=lambda: True, readline=lambda: answer))
    monkeypatch.setenv("DVC_ROOT", str(finished))
    write_params(finished, {"train": {"seed": 1}})
    with pytest.raises(Asked if anew else AnotherRunError):
        train(RunId("ppo"))
    assert len(moved_aside(finished)) == anew
    assert f"gives up 3 finished iterations, {hours}" in caplog.text
    assert ("moved aside if you type y" in caplog.text) == (hours > 1)


@cases("edited, counts")
def test_edited_code_is_refused(finished: Path, monkeypatch: pytest.MonkeyPatch, edited: str, counts: bool) -> None:
    """What DVC runs the stage again for, which moves it aside."""
    contents_before = contents(finished / PPO)
    for part in ("agent_r1", "flows"):
        shutil.copytree(made_of.CODE / part, finished / "code" / part)
    monkeypatch.setattr(made_of, "CODE", finished / "code")
    with (finished / "code" / edited).open("a") as file:
        file.write("# edited\n")
    refused = pytest.raises(ValueError, match=f"trained by other code: {edited}; .* --fresh .*`agent-r1 keep ppo`")
    with refused if counts else nullcontext():
        train(RunId("ppo"))
    assert contents(finished / PPO) == contents_before
    monkeypatch.setenv("DVC_ROOT", str(finished))
    with pytest.raises(Asked, match="0") if counts else nullcontext():
        train(RunId("ppo"))
    assert moved_aside(finished) == ([contents_before] if counts else [])
    assert (edited in read_start(finished / PPO).code) is counts


def test_iterations_of_another_process_are_not_trained_again(finished: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """This process waits for the accelerator while another one, of the same run, trains to the end."""
    folder = finished / PPO
    folder.rename(finished / "elsewhere")

    @contextmanager
    def accelerator(side_by_side: int, gpus: int) -> Iterator[None]:
        (finished / "elsewhere").rename(folder)
        yield

    monkeypatch.setattr(train_module, "accelerator", accelerator)
    contents_before = contents(finished / "elsewhere")
    train(RunId("ppo"))
    assert contents(folder) == contents_before


def test_notebook_trains_the_same_digits(grpo: Path, small_project: Path, tmp_path: Path) -> None:
    """With the run's parameters on the same rows."""
    questions = pd.read_parquet(small_project / PLACES.questions).query("split == 'train'")
    passages = pd.read_parquet(small_project / PLACES.passages).rename(columns={"passage_id": "id"})
    renamed = questions.rename(columns={"question_id": "id", "text": "question"})
    trainer = Trainer(
        model=str(small_project / PLACES.warm_start),
        questions=renamed[["id", "question", "answers", "gold_titles"]],
        passages=passages,
        folder=tmp_path / "grpo",
        changes={
            **{name: SMALL[name] for name in ("model", "engine", "env")},
            "train": {"update": {"minibatches": 2}, "keep": {"learner": True}} | SMALL["runs"]["grpo"],
        },
    )
    history = trainer.train()
    for row, expected in zip(history.to_dict("records"), metrics(grpo), strict=True):
        timed = [name for name in expected if name.endswith(("_s", "_gib")) or "waiting_share" in name]
        assert {**row, **dict.fromkeys(timed)} == {**expected, **dict.fromkeys(timed)}
    assert model_hash(trainer.policy) == model_hash(str(policy_in(grpo)))
