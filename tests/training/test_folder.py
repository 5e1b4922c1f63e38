"""What a run's folder keeps when a run goes on, and what becomes of a folder that is in the way."""

import dataclasses
import json
import os
import shutil
import signal
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from agent_r1 import files
from agent_r1.identity import Identity, read_start, write_start
from agent_r1.learn import checkpoint
from agent_r1.learn.checkpoint import Progress
from agent_r1.learn.learner import Learner, Options
from agent_r1.learn.model import load_policy
from agent_r1.params import load
from agent_r1.params.train import KeepParams
from agent_r1.pretrained import load_model
from agent_r1.tables import replacing
from agent_r1.training.folder import AnotherRunError, RunFolder
from benchmarks.injected import Killer, moments
from tests.cases import cases
from tests.learn.learning import CPU, contents, same_bits, weights

SETTINGS = load(Path(__file__).parents[2] / "params.yaml")
IDENTITY = Identity(parameters={"train.credit.lam": 0.99}, inputs={"questions": "a" * 64}, code={"losses.py": "old"})
OTHER_CODE = dataclasses.replace(IDENTITY, code={"losses.py": "new", "masks.py": "new"})
OTHER_RUN = dataclasses.replace(IDENTITY, parameters={"train.credit.lam": 0.95}, inputs={"questions": "b" * 64})
ITERATIONS = 3


def taken_up(path: Path, identity: Identity = IDENTITY, iterations: int = ITERATIONS, **how: bool) -> RunFolder:
    """The folder as a process finds it that has come to its end since."""
    with run_folder(path, identity, iterations).opened(path.parent / "aside", **how) as folder:
        return folder


def run_folder(path: Path, identity: Identity = IDENTITY, iterations: int = ITERATIONS, **keep: Any) -> RunFolder:
    credit = SETTINGS.train.credit.model_copy(update={"estimator": "reinforce_pp"})  # without a critic's warm-up
    files = KeepParams(**{"learner": True, "every": 1} | keep)
    changes = {"iterations": iterations, "credit": credit, "keep": files}
    return RunFolder(path, identity, SETTINGS.train.model_copy(update=changes))


def moved_aside(path: Path) -> list[Path]:
    return sorted((path.parent / "aside").glob("*"))


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A run that was killed in its third iteration: two are finished, and the third had logged its metrics."""
    path = tmp_path / "ppo"
    taken_up(path)
    (path / "checkpoint").mkdir(parents=True)
    record = Progress(iterations=2, policy_version=1, code=[(0, IDENTITY.code_digest)])
    checkpoint.seal(path / "checkpoint", record)
    (path / "metrics.jsonl").write_text("".join(f'{{"iteration": {i}, "reward/total": 0.{i}}}\n' for i in range(3)))
    (path / "mlflow_run_id").write_text("abc")
    return path


@pytest.mark.parametrize(
    ("kill", "finished"),
    [
        (lambda path: None, 2),
        (lambda path: (path / "checkpoint").rename(path / ".checkpoint.old"), 2),  # the new one was not yet there
        (lambda path: shutil.rmtree(path / "checkpoint"), 0),
    ],
    ids=["in its third iteration", "between two renames", "in its first iteration"],
)
def test_a_killed_run_goes_on(path: Path, kill: Callable[[Path], object], finished: int) -> None:
    """Its history are the finished iterations: the third line is of the one that was interrupted."""
    kill(path)
    folder = taken_up(path)
    assert (folder.resumed, folder.finished, folder.mlflow_run_id.read_text()) == (finished > 0, finished, "abc")
    assert [row["reward/total"] for row in folder.history()] == [0.0, 0.1][:finished]
    assert moved_aside(path) == []


def test_what_a_killed_process_was_writing_is_removed(path: Path) -> None:
    (path / "credit").mkdir()
    for name in ("metrics.jsonl", "credit/002.parquet"):
        with replacing(path / name) as temporary:
            temporary.write_text("{}")
            temporary.with_name(temporary.name.replace(f".{os.getpid()}.", ".1234567.")).write_text("half")
    taken_up(path)
    left = ["002.parquet", "SHA256SUMS", "metrics.jsonl", "mlflow_run_id", "progress.json", "start.json"]
    assert sorted(each.name for each in path.rglob("*") if each.is_file()) == left
    (path / "start.json").rename(path / ".start.json.1234567.tmp")  # or at its very first file
    for other in ("checkpoint", "credit"):
        shutil.rmtree(path / other)
    for other in ("metrics.jsonl", "mlflow_run_id"):
        (path / other).unlink()
    assert not taken_up(path).resumed
    assert [each.name for each in path.iterdir()] == ["start.json"]


def test_changed_code_lets_an_unfinished_run_go_on_with_warning(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert taken_up(path, OTHER_CODE).finished == 2
    assert f"{path}: going on, though the code has changed: losses.py, masks.py" in caplog.text
    assert moved_aside(path) == []
    caplog.clear()
    taken_up(path, OTHER_CODE)  # of what was said once, no word again
    assert "the code has changed" not in caplog.text


@pytest.mark.parametrize("iterations", [2, 3])
def test_another_run_is_refused_with_the_difference_in_words(path: Path, iterations: int) -> None:
    before = contents(path)
    words = r"is another run's: train\.credit\.lam 0\.99 -> 0\.95, questions a{12}\.\.\. -> b{12}\.\.\.; .*--fresh"
    with pytest.raises(AnotherRunError, match=words):
        taken_up(path, OTHER_RUN, iterations)
    many = dataclasses.replace(IDENTITY, parameters={f"env.knob_{i}": i for i in range(8)})
    with pytest.raises(ValueError, match=r"train\.credit\.lam 0\.99 -> none, env\.knob_0 none -> 0, .* and 4 more; "):
        taken_up(path, many)
    assert contents(path) == before


def with_settings(settings: Mapping[str, Any]) -> Identity:
    return dataclasses.replace(IDENTITY, parameters={**IDENTITY.parameters, **settings})


def test_record_says_when_a_setting_changed(path: Path, learner: Learner, caplog: pytest.LogCaptureFixture) -> None:
    first = with_settings({"model.packing": False, "train.iterations": 3})
    taken_up(path, first)
    (path / "checkpoint/learner").mkdir()
    later = with_settings({"model.packing": True, "train.iterations": 5})
    folder = taken_up(path, later, iterations=5)
    changes = ["model.packing False -> True", "train.iterations 3 -> 5"]
    assert (folder.finished, moved_aside(path)) == (2, [])
    assert f"settings change after 2 finished iterations: {', '.join(changes)};" in caplog.text
    assert folder.progress.changes == [f"from iteration 2 on {change}" for change in changes]
    assert folder.progress == checkpoint.progress(path / "checkpoint"), "also if nothing else is written any more"
    assert folder.progress.decays_over == 3
    assert read_start(path) == later
    folder.save(learner, finished=3)
    again = taken_up(path, with_settings({"model.packing": True, "train.iterations": 9}), iterations=9).progress
    assert again.changes == [*folder.progress.changes, "from iteration 3 on train.iterations 5 -> 9"]
    assert again.decays_over == 3, "the schedule that it began with"
    with pytest.raises(AnotherRunError, match=r"train\.iterations 9 -> 8; go back"):
        taken_up(path, with_settings({"model.packing": True, "train.iterations": 8}), iterations=8)


def test_complete_run_stays_under_other_settings_and_is_not_made_longer_without_a_learner(path: Path) -> None:
    first = with_settings({"model.packing": False, "train.iterations": 2, "train.validation.every": 0})
    taken_up(path, first, iterations=2)
    (path / "start.json").unlink()
    write_start(path, first)
    before = contents(path)
    later = {"model.packing": True, "train.validation.every": 1}
    folder = taken_up(path, with_settings({**first.parameters, **later}), iterations=2)
    assert (folder.settled, folder.is_complete, contents(path)) == (True, True, before)
    longer = with_settings({**first.parameters, "train.iterations": 4})
    with pytest.raises(ValueError, match=r"kept no learner .*; set train\.iterations back, or") as refusal:
        taken_up(path, longer, iterations=4)
    assert not isinstance(refusal.value, AnotherRunError), "nor does DVC move it aside"
    assert contents(path) == before


@cases("file, content, message")
def test_unknown_folder_is_refused_whole(path: Path, file: str, content: str | None, message: str) -> None:
    """Nothing is touched, and a fresh start moves all of it aside."""
    (path / file).unlink() if content is None else (path / file).write_text(content)
    before = contents(path)
    with pytest.raises(ValueError, match=f"{message}.* --fresh"):
        taken_up(path)
    assert contents(path) == before
    assert taken_up(path, fresh=True).finished == 0
    assert contents(moved_aside(path)[0]) == before


def test_a_folder_is_for_one_process_at_a_time(path: Path) -> None:
    before = contents(path)
    with run_folder(path).opened(path.parent / "aside"):
        with pytest.raises(BlockingIOError, match=f"trains in {path}; wait for its end, or `kill {os.getpid()}`"):
            taken_up(path, OTHER_RUN, fresh=True)
        assert contents(path) == before
    taken_up(path)


def test_an_iterations_later_metrics_join_its_line_and_leave_the_others(path: Path) -> None:
    folder = taken_up(path)
    folder.record(1, {"validation/success": 0.5, "reward/total": 0.7})
    folder.record(3, {"reward/total": 0.5})
    rows = [json.loads(line) for line in folder.metrics.read_text().splitlines()]
    assert rows[1] == {"iteration": 1, "reward/total": 0.7, "validation/success": 0.5}
    assert [row["reward/total"] for row in rows] == [0.0, 0.7, 0.2, 0.5]
    assert folder.measured(2) == {"reward/total": 0.2}


def test_between_two_checkpoints_the_policy_has_a_folder_of_its_own(tmp_path: Path, learner: Learner) -> None:
    folder = taken_up(tmp_path / "ppo")
    folder.save(learner, finished=0)
    assert folder.policy(learner) == folder.checkpoint / "policy"
    change(learner)
    folder.finish(learner, finished=1)
    sampled = load_policy(folder.policy(learner), device=CPU)
    assert same_bits(weights(sampled), weights(learner.policy))
    assert folder.policy(learner) == folder.path / "sampler"
    again = taken_up(tmp_path / "ppo")  # as a process does that finds what another left
    assert (again.finished, (folder.path / "sampler").exists()) == (0, False)
    folder.policy(learner)
    folder.save(learner, finished=2)
    assert folder.policy(learner) == folder.checkpoint / "policy"
    assert not (folder.path / "sampler").exists()


def test_bfloat16_sampler_gets_half_bytes(tmp_path: Path, learner: Learner, monkeypatch: pytest.MonkeyPatch) -> None:
    """It loads the bits that it would make of float32. Nothing waits for the disk but a checkpoint."""
    synced = list[Path]()
    monkeypatch.setattr(files, "_sync", synced.append)
    folder = taken_up(tmp_path / "ppo")
    folder.save(learner, finished=0)
    assert synced
    assert folder.policy(learner, halved=True) == folder.checkpoint / "policy"
    change(learner)
    folder.finish(learner, finished=1)
    synced.clear()
    handed = folder.policy(learner, halved=True)
    stored = load_file(handed / "model.safetensors")
    own = learner.policy.state_dict()
    assert {name: weight.dtype for name, weight in stored.items()} == {
        name: torch.bfloat16 if weight.dim() > 1 else torch.float32
        for name, weight in own.items()
        if name != "lm_head.weight"  # which is tied, and written once
    }
    loaded = load_model(handed, torch.bfloat16, CPU).state_dict()
    assert all(torch.equal(loaded[name], weight.bfloat16()) for name, weight in own.items())
    assert not synced
    folder.set_best_aside(learner)
    best = load_file(folder.best / "policy/model.safetensors")
    assert all(torch.equal(weight, own[name]) for name, weight in best.items())
    assert folder.path / ".best.new/policy/model.safetensors" in synced


def test_a_journal_goes_when_a_checkpoint_covers_its_iteration(folder: RunFolder, learner: Learner) -> None:
    journals = [folder.journal(iteration) for iteration in range(3)]
    journals[0].parent.mkdir()
    for journal in journals:
        journal.touch()
    folder.forget(1)  # what is collected again hears what it heard
    folder.finish(learner, finished=2)
    assert [journal.exists() for journal in journals] == [True, True, True]
    folder.save(learner, finished=2)
    assert [journal.exists() for journal in journals] == [False, False, True]


@pytest.fixture
def learner(tiny_model: Path) -> Learner:
    on_cpu = Options(device=CPU)
    return Learner(tiny_model, SETTINGS.train.update, SETTINGS.model, with_critic=False, seed=3, options=on_cpu)


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[RunFolder]:
    with run_folder(tmp_path / "ppo", iterations=9).opened(tmp_path / "aside") as folder:
        yield folder


def change(learner: Learner) -> None:
    learner.policy_version += 1
    with torch.no_grad():
        next(learner.policy.parameters()).add_(1.0)


def touch_rows(folder: RunFolder, iteration: int) -> None:
    for rows in (folder.trajectories(iteration), folder.proof(iteration), folder.credit(iteration)):
        rows.parent.mkdir(parents=True, exist_ok=True)
        rows.touch()


def roll_back(folder: RunFolder, learner: Learner) -> list[torch.Tensor]:
    """Three finished iterations and a fourth with its rows written; the second began with the good checkpoint.

    The folder goes back. Returns the weights that were good.
    """
    folder.save(learner, finished=0)
    for iteration in range(4):
        touch_rows(folder, iteration)
        folder.record(iteration, {"reward/total": iteration / 10})
        if iteration == 1:
            folder.set_aside()
            good = weights(learner.policy)
        if iteration < 3:
            change(learner)
            folder.save(learner, finished=iteration + 1)
    change(learner)
    folder.go_back(learner)
    return good


def test_the_checkpoint_says_which_code_trained_which_iterations(path: Path, learner: Learner) -> None:
    old, new = IDENTITY.code_digest, OTHER_CODE.code_digest
    folder = taken_up(path, OTHER_CODE)
    folder.save(learner, finished=3)
    folder.save(learner, finished=4)
    written = json.loads((path / "checkpoint/progress.json").read_text())
    assert written["code"] == [[0, old], [2, new]]
    folder = taken_up(path, iterations=9)
    assert folder.progress.code_in_words == f"0-1 {old}, 2-3 {new}"
    folder.save(learner, finished=5)
    assert folder.progress.code_in_words == f"0-1 {old}, 2-3 {new}, 4-4 {old}"


def test_going_back_brings_back_the_good_checkpoint(tmp_path: Path, learner: Learner) -> None:
    """Also where the process is killed afterwards, and goes back again. A tidy run keeps no second checkpoint."""
    folder = taken_up(tmp_path / "ppo", iterations=9)
    good = roll_back(folder, learner)
    assert (folder.finished, folder.rollbacks, folder.progress.stopped) == (1, 1, False)
    assert learner.policy_version == 1
    assert same_bits(weights(learner.policy), good)
    assert [row["reward/total"] for row in folder.history()] == [0.0]
    for kind in ("trajectories", "proof", "credit"):
        assert [path.name for path in (folder.path / kind).iterdir()] == ["000.parquet"]
    again = taken_up(tmp_path / "ppo", iterations=9)
    assert (again.resumed, again.finished, again.rollbacks) == (True, 1, 1)
    change(learner)
    again.go_back(learner)
    assert (again.finished, again.rollbacks) == (1, 2)
    assert same_bits(weights(learner.policy), good)
    assert again.good.exists()
    again.tidy()
    assert not again.good.exists()
    assert (again.checkpoint / "learner").exists()


def test_a_run_is_complete_after_its_last_iteration_or_where_it_was_stopped(tmp_path: Path, learner: Learner) -> None:
    taken_up(tmp_path / "ppo").save(learner, finished=2)
    assert [taken_up(tmp_path / "ppo", iterations=each).is_complete for each in (1, 2, 3)] == [True, True, False]
    taken_up(tmp_path / "ppo", iterations=9).save(learner, finished=2, stopped=True)
    again = taken_up(tmp_path / "ppo", iterations=9)
    assert (again.finished, again.progress.stopped, again.is_complete) == (2, True, True)


BEST_OF = 2  # iterations, of which the first made the best policy


@pytest.fixture
def kept_best(tmp_path: Path, learner: Learner) -> Path:
    """A run that has trained to its end, and whose best policy is not its latest."""
    with run_folder(tmp_path / "made", iterations=BEST_OF).opened(tmp_path / "aside") as folder:
        for finished in (1, BEST_OF):
            change(learner)
            folder.save(learner, finished=finished)
            if finished == 1:
                folder.set_best_aside(learner)
    return folder.path


def end(path: Path) -> None:
    """What a process does that finds nothing left to train."""
    with run_folder(path, iterations=BEST_OF, learner=False).opened(path.parent / "aside") as folder:
        folder.tidy()


@pytest.mark.parametrize("lost", ["policy/model.safetensors", "policy", "progress.json", "SHA256SUMS", "*[sS]*"])
def test_what_is_left_of_a_best_policy_takes_no_place(kept_best: Path, lost: str) -> None:
    for each in kept_best.glob(f"best/{lost}"):
        shutil.rmtree(each) if each.is_dir() else each.unlink()
    before = contents(kept_best / "checkpoint" / "policy")
    for take_up in (lambda path: taken_up(path, iterations=BEST_OF + 1), end, end):  # long before its end too
        with pytest.raises(ValueError, match=f"{kept_best}/best.* bring the checkpoint back .*--fresh"):
            take_up(kept_best)
        assert contents(kept_best / "checkpoint" / "policy") == before


@pytest.mark.parametrize("lost", ["policy/model.safetensors", "SHA256SUMS"])
def test_a_finished_run_without_its_policy_is_not_called_finished(kept_best: Path, lost: str) -> None:
    end(kept_best)
    (kept_best / "checkpoint" / lost).unlink()
    for _ in range(2):
        with pytest.raises(ValueError, match=f"{kept_best}/checkpoint.* bring the checkpoint back .*--fresh"):
            end(kept_best)
    assert not taken_up(kept_best, iterations=BEST_OF, fresh=True).resumed


class Weights:
    """Stands for a learner whose policy is the number of its version."""

    policy_version = 0

    def save_policy(self, folder: Path, *, halved: bool = False) -> None:
        folder.mkdir(parents=True)
        for name in ("config.json", "model.safetensors"):
            (folder / name).write_text(f"{name} {self.policy_version}")

    def save_state(self, folder: Path) -> dict[str, str]:
        self.save_policy(folder)
        return {}

    def restore(self, policy: Path, learner: Path) -> None:
        self.policy_version = int((policy / "model.safetensors").read_text().split()[1])
        assert contents(policy) == contents(learner)


def train(path: Path, every: int) -> None:
    """A run of four iterations whose second policy is the best, or which goes back once."""
    learner: Any = Weights()
    with run_folder(path, iterations=4, learner=False, every=2).opened(path.parent / "aside") as folder:
        if folder.resumed and not folder.is_complete:
            checkpoint.load(folder.checkpoint, learner)
        elif not folder.resumed and every == 1:
            folder.save(learner, finished=0)
        while not folder.is_complete:
            iteration = folder.finished
            folder.policy(learner)  # for the sampler
            learner.policy_version += 1
            touch_rows(folder, iteration)
            folder.record(iteration, {"reward/total": 0.5})
            if every == 1 and iteration == 2 and not folder.rollbacks:
                folder.go_back(learner)
                continue
            if every == 1 and iteration < 2:
                folder.set_aside()
            if (iteration + 1) % every == 0 or iteration == 3:
                folder.save(learner, finished=iteration + 1)
            else:
                folder.finish(learner, finished=iteration + 1)
            if every > 1 and iteration < 2:
                folder.set_best_aside(learner)
        folder.tidy()


@pytest.mark.slow  # a process for each place that it is killed at
@pytest.mark.parametrize("every", [1, 3])
def test_a_run_killed_where_it_writes_renames_or_removes_ends_with_the_same_files(tmp_path: Path, every: int) -> None:
    """In the middle of all times that it comes there; `python -m benchmarks.injected` kills more, and real stages."""

    def killed(killer: Killer) -> bool:
        if not (child := os.fork()):
            try:
                sys.addaudithook(killer)
                train(tmp_path / "ppo", every)
                (tmp_path / "seen.json").write_text(json.dumps(killer.seen))
            except BaseException:
                traceback.print_exc()
            os._exit(0)
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL

    assert not killed(Killer(tmp_path))
    expected, seen = contents(tmp_path / "ppo"), json.loads((tmp_path / "seen.json").read_text())
    assert len(seen) > 20
    middle = [each for each in moments(seen) if each.time == seen[each.place] // 2 and not each.after]
    for moment in middle:
        shutil.rmtree(tmp_path / "ppo")
        assert killed(Killer(tmp_path, moment)), moment
        train(tmp_path / "ppo", every)
        assert contents(tmp_path / "ppo") == expected, moment
    assert not (tmp_path / "aside").exists()
