"""Every command that a message names, typed in the state that the message describes."""

import ast
import json
import os
import re
import shutil
import subprocess
import sys
from argparse import _SubParsersAction
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from dvc.cli.parser import get_main_parser
from typer.main import get_command

from agent_r1.evaluation.plan import SHIPPED, plan
from agent_r1.files import SUMS
from agent_r1.identity import read_start, write_start
from agent_r1.learn import checkpoint
from agent_r1.params import fingerprint, load
from agent_r1.params.places import RunId
from agent_r1.records import CallStatus, Question, Trajectory
from agent_r1.search.base import read_batches
from agent_r1.search.index import describe, open_index
from agent_r1.tables import read_rows
from agent_r1.tracking import registry
from agent_r1.tracking.runs import run_of
from flows.commands import app
from flows.dvc_files import entries_of, require_dvc
from flows.evaluate import EvaluationRequest, evaluate
from flows.graph import out_of_date
from flows.operation.attempts import restore
from flows.policies import policy_of, version_of
from flows.ranks import code_of
from flows.train import train
from tests.cases import graph
from tests.fixtures import PLACES, Inside
from tests.flows.conftest import ROOT, LayDvc, ServeIndex, WriteParams
from tests.reading import contents

TRAINING, SCORES = PLACES.training(RunId("ppo")), Path("outputs/ppo.jsonl")


@pytest.fixture(scope="module")
def made(
    tmp_path_factory: pytest.TempPathFactory, small_project: Path, write_params: WriteParams, lay_dvc: LayDvc
) -> Path:
    """The small project with DVC's copies of all that its stages made."""
    folder = tmp_path_factory.mktemp("made")
    for name in ("data", "outputs", ".tracking"):
        shutil.copytree(small_project / name, folder / name)
    shutil.rmtree(folder / PLACES.training(RunId("refilled")), ignore_errors=True)  # trained by another file
    (folder / "dvc.yaml").write_text(graph("remedied"))  # without the stages' code: the copy is up to date
    shutil.copy(folder / TRAINING / "metrics.jsonl", folder / SCORES)
    write_params(folder, {})
    lay_dvc(folder)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        require_dvc("commit", "--force", "--quiet")
    return folder


@pytest.fixture
def project(made: Path, tmp_path: Path, inside: Inside) -> Path:
    folder = tmp_path / "project"
    shutil.copytree(made, folder, symlinks=True)
    with inside(folder):
        yield folder


def typed(command: str) -> None:
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    process = subprocess.run(
        command,
        shell=True,
        env={**os.environ, "PATH": path, "PYTHONPATH": str(ROOT)},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert process.returncode == 0, process.stdout


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


def begun_anew(training: Path) -> None:
    """As a training of other parameters leaves the folder, ended before its first checkpoint."""
    remove(training)
    training.mkdir()
    (training / "start.json").write_text("{}")


STATES: list[tuple[str, Callable[[Path], None], Path, Callable[[], object]]] = [
    ("dvc checkout --force {}", damage, PLACES.questions, lambda: read_rows(PLACES.questions, Question)),
    ("dvc repro prepare", remove, PLACES.passages, lambda: list(read_batches(PLACES.passages))),
    ("dvc repro index", other_settings, Path("params.yaml"), configured_index),
    ("dvc checkout {}", remove, PLACES.warm_start, lambda: policy_of(load(), "")),
    ("dvc checkout --force {}", begun_anew, PLACES.training(RunId("ppo")), lambda: policy_of(load(), RunId("ppo"))),
]


@pytest.mark.parametrize(
    ("command", "change", "path", "asks"), STATES, ids=[f"{row[0]} {row[2].name}" for row in STATES]
)
def test_named_command_mends_what_was_refused(
    command: str, change: Callable[[Path], None], path: Path, asks: Callable[[], object], project: Path
) -> None:
    asks()
    change(path)
    with pytest.raises((ValueError, OSError)) as refused:
        asks()
    quoted = next(quotation for quotation in re.findall("`([^`]+)`", str(refused.value)) if quotation.startswith("dvc"))
    assert re.fullmatch(re.escape(command).replace(r"\{\}", r"\S+"), quoted)
    typed(quoted)
    asks()


def test_index_of_a_server_is_mended_and_searched(
    project: Path, tmp_path: Path, serve_index: ServeIndex, write_params: WriteParams
) -> None:
    shutil.copytree(PLACES.index, tmp_path / "served")
    write_params(project, {"search": {"kind": "remote", "remote": {"url": serve_index(tmp_path / "served")}}})
    typed("dvc repro index")
    index = configured_index()
    pinned = PLACES.index / "meta.json"
    meta = json.loads(pinned.read_text())
    pinned.unlink()
    pinned.write_text(json.dumps(meta | {"served_hash": "0" * 64}))
    (PLACES.index / SUMS).unlink()
    require_dvc("commit", "--force", "--quiet", "index")
    with pytest.raises(ValueError, match="000000000000 was pinned; serve that one, or run the index") as refused:
        configured_index()
    typed(*re.findall("`([^`]+)`", str(refused.value)))
    assert configured_index().index_hash == index.index_hash
    folder = PLACES.evaluation("base_tool_call")
    left = folder / ".predictions.parquet.1.tmp"  # of one that was killed
    left.parent.mkdir(parents=True, exist_ok=True)
    left.touch()
    evaluate(EvaluationRequest("base_tool_call"))
    assert not left.exists()
    episodes = read_rows(folder / "trajectories.parquet", Trajectory)
    statuses = {step.call_status for episode in episodes for step in episode.steps}
    assert CallStatus.OK in statuses
    assert not statuses & {CallStatus.FAILED, CallStatus.TIMEOUT}
    hashes = json.loads((folder / "hashes.json").read_text())
    assert hashes["index"] == describe(tmp_path / "served").index_hash, "the index's hash, wherever it is"
    damage(PLACES.passages)
    with pytest.raises(ValueError, match=r"passages.parquet is damaged .*`dvc checkout --force"):
        evaluate(EvaluationRequest("base_tool_call"))


def test_missing_training_version_or_champion_names_its_command(project: Path) -> None:
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


def test_training_that_made_room_is_restored_with_its_lock_and_scores(project: Path, write_params: WriteParams) -> None:
    contents_before, scores, lock = contents(TRAINING), SCORES.read_bytes(), entries_of(Path("dvc.lock"), TRAINING)
    write_params(project, {"train": {"iterations": 1, "update": {"learning_rate": 1e-4}}})
    typed("dvc repro evaluate@ppo")
    assert (SCORES.read_bytes() == scores, entries_of(Path("dvc.lock"), TRAINING) == lock) == (False, False)
    contents_later = contents(TRAINING)
    typed("agent-r1 restore ppo")
    assert (contents(TRAINING), SCORES.read_bytes()) == (contents_before, scores)
    assert entries_of(Path("dvc.lock"), TRAINING) == lock
    write_params(project, {})
    assert not out_of_date("evaluate@ppo", "train@ppo")
    [moved] = PLACES.aside.iterdir()
    assert contents(moved) == contents_later
    typed(f"agent-r1 restore {moved.name}")
    assert contents(TRAINING) == contents_later
    with pytest.raises(ValueError, match="there is no grpo in outputs/aside"):
        restore("grpo")


def test_finished_training_is_kept_under_changed_code_and_its_record_has_both_hashes(project: Path) -> None:
    started = read_start(TRAINING)
    write_start(TRAINING, replace(started, code={"agent_r1/learn/losses.py": "0"}))
    require_dvc("commit", "--force", "--quiet")
    with pytest.raises(ValueError, match="trained by other code") as refused:
        train(RunId("ppo"))
    [command] = re.findall("`([^`]+)`", str(refused.value))
    typed(command)
    assert not out_of_date("evaluate@ppo", "train@ppo")
    contents_before = contents(TRAINING)
    train(RunId("ppo"))
    assert contents(TRAINING) == contents_before
    record = checkpoint.peek(TRAINING / "checkpoint")
    accepted = fingerprint(code_of("train"))
    assert record.code_in_words == f"0-2 {started.code_digest}, accepted {accepted}"
    tracked = run_of(TRAINING)
    assert tracked.tags()["code"] == record.code_in_words


def test_plan_with_too_few_questions_names_remedy(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("agent_r1.evaluation.plan.SHIPPED", SHIPPED._replace(samples=1, questions=0))
    for too_little in ({"questions": 1, "samples": 0}, {"questions": 0, "samples": 8}):
        with pytest.raises(ValueError, match="agent-r1 plan") as refused:
            plan(load(), 3, **too_little)
        typed(*re.findall("`([^`]+)`", str(refused.value)))


def named_in_messages() -> set[str]:
    """The commands in the sources' texts, docstrings apart; a replacement field is {}."""
    commands = set[str]()
    for path in [*(ROOT / "agent_r1").rglob("*.py"), *(ROOT / "flows").rglob("*.py")]:
        nodes = list(ast.walk(ast.parse(path.read_text())))
        docstrings = {id(node.value) for node in nodes if isinstance(node, ast.Expr)}
        parts = {id(part) for node in nodes if isinstance(node, ast.JoinedStr) for part in node.values}
        for node in nodes:
            if isinstance(node, ast.JoinedStr):
                text = "".join(str(part.value) if isinstance(part, ast.Constant) else "{}" for part in node.values)
            elif isinstance(node, ast.Constant) and id(node) not in parts | docstrings:
                text = str(node.value)
            else:
                continue
            commands |= {*re.findall(r"`((?:agent-r1|dvc|make) [^`\n]+)`", text)}
    return commands


def test_every_command_of_a_message_is_there() -> None:
    subcommands = (action.choices for action in get_main_parser()._actions if isinstance(action, _SubParsersAction))
    existing = {
        "agent-r1": {*get_command(app).commands},  # type: ignore[attr-defined]
        "dvc": {name for names in subcommands for name in names},
        "make": {*re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)},
    }
    words = [command.split()[:2] for command in named_in_messages()]
    assert {program for program, _ in words} == existing.keys()
    assert [(program, word) for program, word in words if word.partition("{")[0] not in existing[program]] == []
