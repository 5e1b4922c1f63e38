"""Replays of real small runs: what stays the same under the same configuration, what changes, and what is refused."""

import json
import logging
import shutil
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from agent_r1 import params
from agent_r1.credit.batch import groups_of
from agent_r1.inspection.printed import replay_tables
from agent_r1.inspection.replay import IterationReplay, by_spread, configurations, replay
from agent_r1.inspection.stored import StoredRun, stored_run
from agent_r1.learn import checkpoint
from agent_r1.params.places import Places, RunId
from agent_r1.records import Credit
from agent_r1.tables import read_rows, write_rows
from agent_r1.training.loop import Training
from agent_r1.training.watch import Verdict
from benchmarks.truth import true_advantages
from flows.commands import look
from flows.train import train
from tests.cases import cases, laid
from tests.credit.letters import progress, trajectory
from tests.fixtures import ROOT, Inside, WriteParams

WARM_START = Path("outputs/warm_start")

NO_MASKS = ["credit.loss_mask=false", "credit.advantage_mask={recursion: false, whitening: false, critic: false}"]


@pytest.fixture
def replayed(ppo: Path, small_project: Path, inside: Inside) -> Callable[..., list[IterationReplay]]:
    def call(*changes: str, others: Sequence[str] = (), **arguments: Any) -> list[IterationReplay]:
        with inside(small_project):
            settings, run = params.load(), RunId("ppo")
            return replay(settings, run, configurations(settings, run, others, changes), **arguments)

    return call


def with_rank(rank: int) -> params.Params:
    settings = params.Params.model_validate(yaml.safe_load(Path("params.yaml").read_text()))
    lora = settings.model.lora.model_copy(update={"rank": rank})
    return settings.model_copy(update={"model": settings.model.model_copy(update={"lora": lora})})


def contents(folder: Path) -> dict[Path, tuple[int, int]]:
    return {path: (path.stat().st_mtime_ns, path.stat().st_size) for path in folder.rglob("*")}


def test_same_configuration_changes_nothing_and_the_run_is_reproduced(
    replayed: Callable[..., list[IterationReplay]], ppo: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Iteration 1 is the last that the warm start sampled (iteration 0 trains the critic alone), 2 the last of all."""
    contents_before = contents(ppo)
    results = replayed(others=["ppo"])
    assert [one.iteration for one in results] == [1, 2]
    assert [one.policy.sampled_it for one in results] == [True, False]
    for one in results:
        run_metrics, same = (entry.metrics for entry in one.replays)
        assert same["policy/gradient_cosine"] == pytest.approx(1)
        assert same["advantage/correlation"] == pytest.approx(1)
        assert same == run_metrics
        assert same["policy/grad_norm"] > 0
        assert not one.spreads, "no question was tried twice"
    results = replayed(others=["ppo"], iterations=["all"], with_gradient=False)
    warnings = [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert not warnings, "the advantages are those that the run stored"
    for one in results:
        stored = read_rows(ppo / "credit" / f"{one.iteration:03d}.parquet", Credit)
        assert one.replays[0].metrics["reward/total"] == pytest.approx(np.mean([row.return_ for row in stored]))
        assert "policy/grad_norm" not in one.replays[0].metrics
    assert contents(ppo) == contents_before, "a replay reads"


def test_without_masks_observations_have_a_share(replayed: Callable[..., list[IterationReplay]]) -> None:
    results = replayed(*NO_MASKS)
    masked, unmasked = (entry.metrics for entry in results[0].replays)
    for share in ("policy/observed_loss_share", "policy/observed_gradient_share"):
        assert masked[share] == 0
        assert 0 < unmasked[share] < 1
    assert masked["advantage/nonzero_share"] < unmasked["advantage/nonzero_share"]
    assert unmasked["policy/gradient_cosine"] < 0.999
    assert results[0].values.keys() >= {"value/action_rmse", "value/observation_rmse"}


def test_gradients_only_where_the_policy_is_on_disk_and_of_iterations_that_are(ppo: Path, tmp_path: Path) -> None:
    """The checkpoint has 2 updates: of versions 0, 1 and 2, all but what lies between can be had."""
    stored = StoredRun("ppo", ppo, WARM_START)
    assert stored.progress.policy_version == 2
    assert stored.policy(0).path == WARM_START
    assert stored.policy(1) == (stored.folder / "checkpoint/policy", False, stored.policy(1).note)
    assert stored.policy(2).sampled_it
    stored.progress = replace(stored.progress, policy_version=9)
    assert stored.policy(4).path is None
    assert stored.choose(["2", "0", "2"]) == [0, 2]
    assert stored.choose(["all"]) == [0, 1, 2]
    with pytest.raises(ValueError, match="ppo keeps no iteration '3'; choose of 0, 1, 2, or all"):
        stored.choose(["3"])
    with pytest.raises(FileNotFoundError, match="holds no finished iteration of ppo; train it first"):
        StoredRun("ppo", tmp_path, WARM_START)


def test_groups_are_parted_by_how_much_their_returns_differ() -> None:
    """Equal ones, of whatever return, and of five others two, two and one, the smallest std first."""
    groups = np.array([0, 0, 5, 5, 1, 1, 2, 2, 3, 3, 4, 4, 6, 6])
    stds = np.repeat([0.3, 0.0, 0.1, 0.5, 0.2, 1e-12, 0.4], 2)
    assert [part.tolist() for part in by_spread(stds, groups)] == [[2, 3, 10, 11], [4, 5, 8, 9], [0, 1, 12, 13], [6, 7]]


@pytest.mark.usefixtures("grpo")
def test_gradients_of_groups_make_up_the_whole_one(small_project: Path, inside: Inside) -> None:
    """By their shares of the tokens: those of groups whose returns are equal, and of thirds of the others."""
    with inside(small_project):
        settings, run = params.load(), RunId("grpo")
        results = replay(settings, run, configurations(settings, run, [], []))
        stored = stored_run(settings, run)
        rows = [(stored.trajectories(one.iteration), stored.credits(one.iteration)) for one in results]
    assert any(len(one.spreads) > 1 for one in results)
    for one, (trajectories, credited) in zip(results, rows, strict=True):
        returns, groups = np.array([entry.return_ for entry in credited]), groups_of(trajectories)
        tokens = np.array([entry.loss_mask.sum() for entry in credited])
        stds = np.array([returns[groups == group].std(ddof=1) for group in groups])
        total = 0.0
        for part, alike in zip(one.spreads, by_spread(stds, groups), strict=True):
            assert part.groups == len({*groups[alike].tolist()})
            assert (part.low, part.high) == pytest.approx((stds[alike].min(), stds[alike].max()), abs=1e-9)
            projected = part.metrics["policy/grad_norm"] * part.metrics["policy/gradient_cosine"]
            assert (part.metrics["policy/grad_norm"] == 0) == (part.high < 1e-9)
            total += 0 if part.high < 1e-9 else tokens[alike].sum() / tokens.sum() * projected
        assert total == pytest.approx(one.replays[0].metrics["policy/grad_norm"], rel=1e-3)
    titles = [getattr(table, "title", "") for table in replay_tables(results)]
    assert "Gradient by the std of a group's returns" in titles
    assert "Thoughts" in titles


def test_values_are_refused_where_there_are_none() -> None:
    settings = params.load(ROOT / "params.yaml")
    with pytest.raises(ValueError, match="grpo trained no critic, so it stored no values, which estimator gae"):
        configurations(settings, RunId("grpo"), ["starpo"], [])
    run_metrics, other_config = configurations(settings, RunId("grpo"), ["rloo"], [])
    assert (run_metrics.name, other_config.name) == ("grpo", "rloo")
    assert other_config.train.rollout == run_metrics.train.rollout


@cases("changes, message")
def test_changes_are_checked_like_a_run(changes: list[str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        configurations(params.load(ROOT / "params.yaml"), RunId("ppo"), [], changes)


def test_other_advantages_are_logged_and_without_values_of_a_filter_there_is_no_replay(
    replayed: Callable[..., list[IterationReplay]], ppo: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = shutil.copytree(ppo, tmp_path / "ppo")
    path = folder / "credit" / "000.parquet"
    rows = read_rows(path, Credit)
    write_rows(path, [replace(row, advantages=row.advantages + np.float32(0.5)) for row in rows], Credit)
    replayed(others=["ppo"], iterations=["0"], folder=folder, with_gradient=False)
    assert "iteration 0: the advantages that ppo was trained with differ by up to 0.5" in caplog.text
    write_rows(path, [replace(rows[0], kept=False), *rows[1:]], Credit)
    with pytest.raises(ValueError, match="keeps trajectories that the filter of ppo dropped, and no values"):
        replayed(others=["ppo"], iterations=["0"], folder=folder, with_gradient=False)


def test_adapters_where_the_run_had_none_and_the_other_way_round_are_refused(
    replayed: Callable[..., list[IterationReplay]], ppo: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = shutil.copytree(ppo, tmp_path / "ppo")
    (folder / "checkpoint/policy/adapter").mkdir()
    for word, rank in (("with", 0), ("without", 4)):
        refused = rf"trained {word} adapters, and model\.lora\.rank is {rank}; set it back"
        with pytest.raises(ValueError, match=refused):
            replayed(others=["ppo"], iterations=["0"], folder=folder)
        replayed(others=["ppo"], iterations=["0"], folder=folder, with_gradient=False)
        shutil.rmtree(folder / "checkpoint/policy/adapter", ignore_errors=True)
        monkeypatch.setattr(params, "load", lambda: with_rank(4))


def test_another_warm_start_is_refused(
    replayed: Callable[..., list[IterationReplay]], ppo: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Places, "warm_start", ppo / "checkpoint" / "policy")
    with pytest.raises(ValueError, match=r"is not the model that sampled iteration 0 of ppo: .* \(max\)"):
        replayed(others=["ppo"], iterations=["0"])


@pytest.mark.parametrize("model", [{}, {"lora": {"rank": 4}, "gradient_checkpointing": True}], ids=str)
def test_gradient_is_that_of_the_training(
    model: dict[str, Any],
    small_project: Path,
    tmp_path: Path,
    inside: Inside,
    write_params: WriteParams,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Where an iteration is one optimiser step: of the warm start, and of the checkpoint that the second began with."""
    conclude = Training.conclude

    def keep_first(training: Training, iteration: int, verdict: Verdict) -> dict[str, float]:
        concluded = conclude(training, iteration, verdict)
        if iteration == 0:
            shutil.copytree(training.folder.checkpoint, tmp_path / "first")
        return concluded

    monkeypatch.setattr(Training, "conclude", keep_first)
    ignored = shutil.ignore_patterns("train", "evaluate", ".tracking")
    project = Path(shutil.copytree(small_project, tmp_path / "copy", ignore=ignored))
    write_params(project, {"model": model, "train": laid("one_step")})
    run = project / "outputs/train/ppo"
    with inside(project):
        train(RunId("ppo"))
        shutil.rmtree(run / "checkpoint")
        (tmp_path / "first").rename(run / "checkpoint")
        (run / "checkpoint/SHA256SUMS").unlink()
        checkpoint.seal(run / "checkpoint", checkpoint.Progress(iterations=2, policy_version=1))
        settings = params.load()
        compared = configurations(settings, RunId("ppo"), ["ppo"], ["credit.lam=0.5"])
        results = replay(settings, RunId("ppo"), compared, iterations=["all"])
    assert (run / "checkpoint/policy/adapter").is_dir() is bool(model)
    logged = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    for one, metrics in zip(results, logged, strict=True):
        run_metrics, other = (entry.metrics for entry in one.replays)
        assert one.policy.sampled_it
        for name in ("policy/loss", "policy/grad_norm", "policy/entropy"):
            assert run_metrics[name] == pytest.approx(metrics[name], rel=1e-4, abs=1e-7), name
        assert -1 < other["policy/gradient_cosine"] < 0.9999, "of another lambda"
        assert 0 < other["advantage/correlation"] < 0.999
        assert other["reward/total"] == run_metrics["reward/total"]
    assert logged[0]["policy/grad_norm"] != pytest.approx(logged[1]["policy/grad_norm"], rel=1e-2)


@pytest.mark.usefixtures("ppo")
def test_command_prints_tables(small_project: Path, inside: Inside, capsys: pytest.CaptureFixture[str]) -> None:
    changes = [*NO_MASKS, "credit.rewards.progress=0.5"]
    with inside(small_project):
        look.replay("ppo", changes=changes, iterations=["all"])
    printed = capsys.readouterr().out
    for words in ("Credit", "Reward parts", "Gradient", "Critic", "progress", "the warm start, which sampled them"):
        assert words in printed
    assert "reads values at tokens that the critic of ppo was never trained at" in " ".join(printed.split())


def test_true_advantages_by_hand() -> None:
    """Rewards 1 and 2, values 5 and 3: 1 + 3 - 5 at the first action's tokens, 2 + 0 - 3 at the second's."""
    row = trajectory("PAAOTA", progress(1, 2))
    results = true_advantages(row, np.array([1.0, 2.0]), np.array([5.0, 3.0]))
    assert results.tolist() == [0, -1, -1, 0, 0, -1]
