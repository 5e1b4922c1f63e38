"""Every command that a message names, typed in the state that the message describes."""

from __future__ import annotations

import ast
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from agent_r1.evaluation.plan import SHIPPED, plan
from agent_r1.learn import checkpoint
from agent_r1.params import fingerprint, load
from agent_r1.params.places import RunId
from agent_r1.params.sections import flatten
from agent_r1.records import Question
from agent_r1.search.base import read_batches
from agent_r1.search.index import open_index
from agent_r1.tables import read_rows
from agent_r1.tracking import registry
from agent_r1.tracking.runs import run_of
from agent_r1.training.identity import read_start, write_start
from flows.dvc_files import entries_of, require_dvc
from flows.graph import out_of_date
from flows.operation.attempts import restore
from flows.policies import policy_of, version_of
from flows.ranks import code_of
from flows.train import train
from tests.fixtures import PLACES, Inside
from tests.flows.conftest import ROOT, LayDvc, ServeIndex, WriteParams

TRAINING, SCORES = PLACES.training(RunId("ppo")), Path("outputs/ppo.jsonl")
POLICY = TRAINING / "checkpoint/policy"

# The stages of the graph without their code, so that a copy of the small project is up to date.
GRAPH = """
stages:
  prepare:
    cmd: python -m flows prepare
    params: [prepare]
    outs: [data/prepared/passages.parquet, data/prepared/questions.parquet]
  index:
    cmd: python -m flows index
    params: [search.kind, search.bm25, search.remote.url]
    deps: [data/prepared/passages.parquet]
    outs: [data/index]
  warm_start:
    cmd: python -m flows warm_start
    deps: [data/index]
    outs: [outputs/warm_start]
  train:
    foreach: [ppo]
    do:
      cmd: python -m flows train --run ${item}
      params: [model, learner, engine, env, train]
      deps: [outputs/warm_start]
      outs: [{"outputs/train/${item}": {persist: true}}]
  evaluate:
    foreach: [ppo]
    do:
      cmd: cp outputs/train/${item}/metrics.jsonl outputs/${item}.jsonl
      deps: ["outputs/train/${item}"]
      outs: ["outputs/${item}.jsonl"]
"""


@pytest.fixture(scope="module")
def made(
    tmp_path_factory: pytest.TempPathFactory, small_project: Path, write_params: WriteParams, lay_dvc: LayDvc
) -> Path:
    """The small project with DVC's copies of all that its stages made."""
    folder = tmp_path_factory.mktemp("made")
    for name in ("data", "outputs", ".tracking"):
        shutil.copytree(small_project / name, folder / name)
    (folder / "dvc.yaml").write_text(GRAPH)
    shutil.copy(folder / TRAINING / "metrics.jsonl", folder / SCORES)
    write_params(folder, {})
    lay_dvc(folder)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        require_dvc("commit", "--force", "--quiet")
    return folder


@pytest.fixture
def project(made: Path, tmp_path: Path, inside: Inside) -> Path:
    """A copy of `made`, in which this process is."""
    folder = tmp_path / "project"
    shutil.copytree(made, folder, symlinks=True)
    with inside(folder):
        yield folder


def typed(command: str) -> None:
    """Runs a command to its end. DVC asks nobody."""
    process = begun(command)
    said = process.communicate()[0]
    assert process.returncode == 0, said


def begun(command: str) -> subprocess.Popen[str]:
    """Starts a command as a shell does in which the project is installed."""
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    return subprocess.Popen(
        command,
        shell=True,
        env={**os.environ, "PATH": path, "PYTHONPATH": str(ROOT)},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def damage(path: Path) -> None:
    """Cuts a file's end off. DVC's copy, which may be a link to the same file, stays as it is."""
    content = path.read_bytes()
    path.unlink()
    path.write_bytes(content[:-50])


def remove(path: Path) -> None:
    shutil.rmtree(path) if path.is_dir() else path.unlink()


def configured_index() -> object:
    settings = load()
    return open_index(settings.search, PLACES.passages, PLACES.index)


def other_settings(params: Path) -> None:
    params.write_text(re.sub(r"k1: [\d.]+", "k1: 2.5", params.read_text()))


def forgotten(path: Path) -> None:
    remove(path)
    remove(Path("dvc.lock"))


def begun_anew(training: Path) -> None:
    """As a training of other parameters leaves the folder, ended before its first checkpoint."""
    remove(training)
    training.mkdir()
    (training / "start.json").write_text("{}")


STATES: list[tuple[str, Callable[[Path], None], Path, Callable[[], object]]] = [
    ("dvc checkout --force {}", damage, PLACES.questions, lambda: read_rows(PLACES.questions, Question)),
    ("dvc checkout --force {}", damage, POLICY / "model.safetensors", lambda: policy_of(load(), RunId("ppo"))),
    ("dvc repro prepare", remove, PLACES.passages, lambda: list(read_batches(PLACES.passages))),
    ("dvc repro index", remove, PLACES.index, configured_index),
    ("dvc repro index", damage, PLACES.index / "meta.json", configured_index),
    ("dvc repro index", other_settings, Path("params.yaml"), configured_index),
    ("dvc checkout {}", remove, PLACES.warm_start, lambda: policy_of(load(), "")),
    ("dvc repro warm_start", forgotten, PLACES.warm_start, lambda: policy_of(load(), "")),
    ("dvc checkout --force {}", begun_anew, PLACES.training(RunId("ppo")), lambda: policy_of(load(), RunId("ppo"))),
]


@pytest.mark.parametrize(
    ("command", "change", "path", "asks"), STATES, ids=[f"{row[0]} {row[2].name}" for row in STATES]
)
def test_a_named_command_mends_what_was_refused(
    command: str, change: Callable[[Path], None], path: Path, asks: Callable[[], object], project: Path
) -> None:
    asks()
    change(path)
    with pytest.raises((ValueError, OSError)) as refused:
        asks()
    named = next(each for each in re.findall("`([^`]+)`", str(refused.value)) if each.startswith("dvc"))
    assert re.fullmatch(re.escape(command).replace(r"\{\}", r"\S+"), named)
    typed(named)
    asks()


def test_a_server_of_another_index(
    project: Path, tmp_path: Path, serve_index: ServeIndex, write_params: WriteParams
) -> None:
    shutil.copytree(PLACES.index, tmp_path / "served")
    write_params(project, {"search": {"kind": "remote", "remote": {"url": serve_index(tmp_path / "served")}}})
    typed("dvc repro index")
    opened = configured_index()
    pinned = PLACES.index / "meta.json"
    meta = json.loads(pinned.read_text())
    pinned.unlink()
    pinned.write_text(json.dumps(meta | {"served_hash": "0" * 64}))
    require_dvc("commit", "--force", "--quiet", "index")
    with pytest.raises(
        ValueError, match="and 000000000000 was pinned; serve that one, or run the index stage"
    ) as refused:
        configured_index()
    typed(*re.findall("`([^`]+)`", str(refused.value)))
    assert configured_index().index_hash == opened.index_hash


def test_what_is_not_trained_registered_or_promoted_yet(project: Path) -> None:
    settings = load()
    for asks in (
        lambda: policy_of(settings, RunId("refilled")),  # agent-r1 train
        lambda: version_of("refilled", settings),  # agent-r1 register
        lambda: registry.find("models:/agent_r1@champion"),  # agent-r1 promote
    ):
        with pytest.raises((ValueError, OSError)) as refused:
            asks()
        typed(*re.findall("`([^`]+)`", str(refused.value)))
        asks()


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


OTHER_SETTINGS: dict[str, Any] = {
    "model": {"packing": True, "gradient_checkpointing": True, "float32_output": True},
    "engine": {"transformers": {"batch_size": 8}},
    "learner": {"processes": 2},
    "env": {"aborted_share": 0.5},
    "train": {
        "update": {"max_tokens_per_microbatch": 512},
        "validation": {"every": 2, "questions": 6},
        "checkpoint": {"every": 2},
    },
}


def test_dvc_leaves_a_finished_run_as_it_is_under_settings_that_round_or_give_room(
    project: Path, write_params: WriteParams
) -> None:
    before = contents(TRAINING)
    write_params(project, OTHER_SETTINGS)
    typed("dvc repro evaluate@ppo")
    assert contents(TRAINING) == before
    assert not PLACES.aside.exists()
    assert not out_of_date("evaluate@ppo", "train@ppo")


def test_dvc_goes_on_with_an_unfinished_run_under_settings_that_round_or_give_room(
    project: Path, write_params: WriteParams
) -> None:
    anew: dict[str, Any] = {"seed": 1}
    remove(TRAINING)
    write_params(project, {"train": anew})
    repro = begun("exec dvc repro train@ppo")  # this process's own child: DVC waits for one that nobody has buried
    while not (TRAINING / "trajectories/001.parquet").exists():
        assert repro.poll() is None, repro.communicate()[0]
        time.sleep(0.01)
    os.killpg(repro.pid, signal.SIGKILL)
    repro.communicate()
    write_params(project, {**OTHER_SETTINGS, "train": OTHER_SETTINGS["train"] | anew})
    typed("dvc repro train@ppo")
    record = json.loads((TRAINING / "checkpoint/progress.json").read_text())
    names = [change.removeprefix("from iteration 1 on ").split()[0] for change in record["changes"]]
    assert {*names} == {name.replace(".transformers", "") for name in flatten(OTHER_SETTINGS)}
    assert record["iterations"] == 3
    assert not PLACES.aside.exists()


def test_a_training_that_made_room_is_restored_with_its_lock_and_scores(
    project: Path, write_params: WriteParams
) -> None:
    before, scores, lock = contents(TRAINING), SCORES.read_bytes(), entries_of(Path("dvc.lock"), TRAINING)
    write_params(project, {"train": {"iterations": 1, "update": {"learning_rate": 1e-4}}})
    typed("dvc repro evaluate@ppo")
    assert (SCORES.read_bytes() == scores, entries_of(Path("dvc.lock"), TRAINING) == lock) == (False, False)
    later = contents(TRAINING)
    typed("agent-r1 restore ppo")
    assert (contents(TRAINING), SCORES.read_bytes()) == (before, scores)
    assert entries_of(Path("dvc.lock"), TRAINING) == lock
    write_params(project, {})
    assert not out_of_date("evaluate@ppo", "train@ppo")
    [aside] = PLACES.aside.iterdir()
    assert contents(aside) == later
    typed(f"agent-r1 restore {aside.name}")
    assert contents(TRAINING) == later
    with pytest.raises(ValueError, match="there is no grpo in outputs/aside"):
        restore("grpo")


def test_a_finished_training_is_kept_under_changed_code_and_its_record_has_both_hashes(project: Path) -> None:
    started = read_start(TRAINING)
    assert started
    write_start(TRAINING, replace(started, code={"agent_r1/learn/losses.py": "0"}))
    require_dvc("commit", "--force", "--quiet")
    with pytest.raises(ValueError, match="trained by other code") as refused:
        train(RunId("ppo"))
    [command] = re.findall("`([^`]+)`", str(refused.value))
    typed(command)
    assert not out_of_date("evaluate@ppo", "train@ppo")
    before = contents(TRAINING)
    train(RunId("ppo"))
    assert contents(TRAINING) == before
    record = checkpoint.peek(TRAINING / "checkpoint")
    assert record
    accepted = fingerprint(code_of("train"))
    assert record.code_in_words == f"0-2 {started.code_digest}, accepted {accepted}"
    tracked = run_of(TRAINING)
    assert tracked
    assert tracked.tags()["code"] == record.code_in_words


def test_a_plan_of_too_little(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("agent_r1.evaluation.plan.SHIPPED", SHIPPED._replace(samples=1, questions=0))
    for too_little in ({"questions": 1, "samples": 0}, {"questions": 0, "samples": 8}):
        with pytest.raises(ValueError, match="agent-r1 plan") as refused:
            plan(load(), 3, **too_little)
        typed(*re.findall("`([^`]+)`", str(refused.value)))


HERE = "flows/test_remedies.py"
BY_HAND = "it installs, serves, or only shows"
# A command that a message names -> the test that types it, or why none does.
COMMANDS = {
    "agent-r1 chat{word}": "flows/test_chat.py",
    "agent-r1 doctor --engine": "flows/operation/test_doctor.py",
    "agent-r1 keep {}": HERE,
    "agent-r1 restore {}": HERE,
    "agent-r1 evaluate --help": BY_HAND,
    "agent-r1 overlay base": "flows/test_overlay.py",
    "agent-r1 plan": HERE,
    "agent-r1 plan --questions 100": HERE,
    "agent-r1 plan --samples 1": HERE,
    "agent-r1 pipeline --pool": "flows/operation/test_pool.py",
    "agent-r1 promote {} --first": HERE,
    "agent-r1 recipe": "inspection/test_recipes.py",
    "agent-r1 register {}": HERE,
    "agent-r1 results --whole": "evaluation/test_runs_report.py",
    "agent-r1 serve-agent": "flows/test_endpoint.py",
    "agent-r1 serve-policy": "flows/test_endpoint.py",
    "agent-r1 train {}": HERE,
    "agent-r1 view {}": "flows/test_view.py",
    "agent-r1 worker": "flows/operation/test_worker.py",
    "agent-r1 worker --pool {}": "flows/operation/test_worker.py",
    "chmod 700": BY_HAND,
    "chmod u+w {}": BY_HAND,
    "chown -R {} {}": BY_HAND,
    "dvc checkout --force": HERE,
    "dvc checkout --force {}": HERE,
    "dvc checkout {}": HERE,
    "dvc config --local core.no_scm true": "flows/operation/test_doctor.py",
    "dvc gc --workspace": "flows/operation/test_register.py",
    "dvc pull": "flows/operation/test_remotes.py",
    "dvc pull {}": "flows/operation/test_register.py",
    "dvc push": "flows/operation/test_remotes.py",
    "dvc push {}": "flows/operation/test_register.py",
    "dvc remote add -d storage URL": "flows/operation/test_register.py",
    "dvc repro": HERE,
    "dvc repro --single-item --force index": HERE,
    "dvc repro index": HERE,
    "dvc repro prepare": HERE,
    "dvc repro warm_start": HERE,
    "git checkout {}": BY_HAND,
    "kill {}": BY_HAND,
    "make": BY_HAND,
    "make ablations": BY_HAND,
    "make doctor": "test_packaging.py",
    "make serve": BY_HAND,
    "make ui": BY_HAND,
    "mkdir {} && mv {}* {}": "tracking/test_store.py",
    "mlflow db upgrade sqlite:///{}": "flows/operation/test_doctor.py",
    "mv {} {}.newer": "flows/test_processes.py",
    "mv {} {}.aside": "test_files.py",
    "pip install -e .": BY_HAND,
    "python -c 'import {}'": BY_HAND,
    "python {}": BY_HAND,
}


def named_in_messages() -> set[str]:
    """The commands in the sources' texts, docstrings apart; a replacement field is {}."""
    found, programs = set[str](), {command.split()[0] for command in COMMANDS}
    for path in [*(ROOT / "agent_r1").rglob("*.py"), *(ROOT / "flows").rglob("*.py")]:
        nodes = list(ast.walk(ast.parse(path.read_text())))
        parts = {id(part) for node in nodes if isinstance(node, ast.JoinedStr) for part in node.values}
        said = {id(node.value) for node in nodes if isinstance(node, ast.Expr)}  # docstrings
        for node in nodes:
            if isinstance(node, ast.JoinedStr):
                text = "".join(str(part.value) if isinstance(part, ast.Constant) else "{}" for part in node.values)
            elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in parts | said:
                text = node.value
            else:
                continue
            found |= {
                each for each in re.findall(r"`([^`\n]+)`", text) if each.split()[0] in programs and each != "dvc"
            }
    return found


def test_every_command_of_a_message_is_known() -> None:
    assert named_in_messages() == COMMANDS.keys()
    for command, where in COMMANDS.items():
        if where != BY_HAND:
            assert command.split()[1].partition("{")[0] in (ROOT / "tests" / where).read_text(), command
