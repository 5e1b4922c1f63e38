"""A stage whose parameters, code or data are edited while it runs is not recorded as made of them.

The real stages run below a real DVC in a copy of the small project. A stage's process makes the edits itself, when it
imports the module that does the stage's work.
"""

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from agent_r1.files import write_text
from agent_r1.params.places import UNREAD, RunId
from flows import made_of
from flows.dvc_files import DVC, collect_graph
from flows.made_of import HASHED_BYTES, OF_STAGE, Edited, require_unedited, stage_at_start
from flows.stage import EDITED, EXIT_CODE_FILE
from tests.fixtures import PLACES, ROOT, WriteParams

PPO = PLACES.training(RunId("ppo"))
EDITS = """
import os, pathlib, sys

def edit(event, arguments):
    if event == "import" and arguments[0] == os.environ.get("EDIT_AT"):
        for path, before, after in eval(os.environ.pop("EDITS", "[]")):
            file = pathlib.Path(path)
            file.write_text(file.read_text().replace(before, after, 1))

sys.addaudithook(edit)
"""
VIEWER = "agent_r1/inspection/viewer.py"
OPENING, EDITED_OPENING = '"""', '"""Edited. '
LISTING = """
import json, os, sys
from dvc.repo import Repo
repo = Repo()
said = {stage.addressing: [
    stage.cmd, [name for dep in stage.params for name in dep.params],
    [os.path.relpath(dep.fs_path, repo.root_dir) for dep in stage.deps if dep not in stage.params]]
    for stage in repo.index.stages}
json.dump(said, sys.stdout)
"""

Repro = Callable[..., str]


@pytest.fixture(autouse=True)
def unbegun() -> Iterator[None]:
    """Later tests of this process are no stage of DVC's."""
    yield
    stage_at_start.cache_clear()


@pytest.fixture(scope="module")
def laid(
    tmp_path_factory: pytest.TempPathFactory,
    small_project: Path,
    write_params: WriteParams,
    lay_dvc: Callable[[Path], None],
) -> Path:
    """The small project with its own copy of the code, and DVC."""
    folder = tmp_path_factory.mktemp("laid") / "project"
    shutil.copytree(small_project, folder)
    for room in ("agent_r1", "flows"):
        shutil.copytree(ROOT / room, folder / room, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("dvc.yaml", ".dvcignore"):
        shutil.copy(ROOT / name, folder)
    write_text(folder / UNREAD, "")
    write_params(folder, {"repro_baselines": []})
    lay_dvc(folder)
    return folder


@pytest.fixture
def project(laid: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(laid, tmp_path / "project"))


@pytest.fixture
def repro(project: Path, tmp_path: Path) -> Repro:
    """Runs a stage by DVC, and gives what it says; it makes edits, (file, before, after), as it imports a module."""
    (tmp_path / "site").mkdir()
    (tmp_path / "site/sitecustomize.py").write_text(EDITS)

    def run(stage: str, at: str = "", *edits: tuple[str, str, str], code: int = 0) -> str:
        own = {
            "PYTHONPATH": f"{tmp_path}/site:{project}",
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
            EXIT_CODE_FILE: str(tmp_path / "exit_code"),
            **dict.fromkeys(("TMPDIR", "AGENT_R1_LOCKS"), str(tmp_path)),
        }
        done = subprocess.run(
            [*DVC, "repro", "--single-item", "--force", stage],
            cwd=project,
            env={**os.environ, **own, "EDIT_AT": at, "EDITS": repr(edits)},
            capture_output=True,
            text=True,
            check=False,
        )
        left = tmp_path / "exit_code"
        assert (int(left.read_text()) if left.exists() else done.returncode) == code, done.stderr
        left.unlink(missing_ok=True)
        return done.stderr

    return run


def recorded(project: Path, stage: str) -> Any:
    return (made_of.read_yaml(project / "dvc.lock") or {"stages": {}})["stages"].get(stage)


def test_edits_while_a_stage_runs_are_named_and_not_recorded(project: Path, repro: Repro) -> None:
    code = "agent_r1/search/bm25.py"
    edits = [("params.yaml", "k1: 1.2", "k1: 1.21"), (code, OPENING, EDITED_OPENING)]
    said = repro("index", "agent_r1.search.index", *edits, code=EDITED)
    changes = rf"[\w.]+k1 1\.2 -> 1\.21, {code} \w+ -> \w+"
    assert re.search(rf"edited while stage index ran: {changes}; dvc\.lock stays as it was", said)
    assert recorded(project, "index") is None


def test_edit_of_a_file_that_stage_does_not_read_stops_nothing(project: Path, repro: Repro) -> None:
    """One of its code leaves the record as it was, and DVC calls the stage out of date."""
    at, code = "agent_r1.data.prepare", "agent_r1/data/prepare.py"
    repro("prepare", at, ("params.yaml", "retries: 2", "retries: 3"), (VIEWER, OPENING, EDITED_OPENING))
    assert EDITED_OPENING in (project / VIEWER).read_text()
    assert "retries: 3" in (project / "params.yaml").read_text()
    before = recorded(project, "prepare")
    repro("prepare", at, (code, OPENING, EDITED_OPENING), code=EDITED)
    assert recorded(project, "prepare") == before is not None
    status = subprocess.run([*DVC, "status", "--json", "prepare"], cwd=project, capture_output=True, check=True)
    assert json.loads(status.stdout) == {"prepare": [{"changed deps": {code: "modified"}}]}


def test_finished_training_is_taken_over_once_the_edit_of_its_code_is_taken_back(project: Path, repro: Repro) -> None:
    """It is known by the code that its process began with, though that was edited before it was hashed."""
    code, weights = project / "agent_r1/learn/losses.py", project / PPO / "checkpoint/policy/model.safetensors"
    before = code.read_text()
    shutil.rmtree(project / PPO)
    repro("train@ppo", "flows.train", (str(code), OPENING, EDITED_OPENING), code=EDITED)
    made = weights.read_bytes()
    code.write_text(before)
    said = repro("train@ppo")
    assert "going on after 3 finished iterations" in said
    assert weights.read_bytes() == made
    assert recorded(project, "train@ppo")


def test_stage_is_looked_up_as_dvc_resolves_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Parameters and dependencies of every stage of both graphs; also by a name that DVC gives from another folder."""
    for name in ("params.yaml", "dvc.yaml", "ablations/graph.yaml"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    (tmp_path / ".dvc").mkdir()
    (tmp_path / ".dvc/config").write_text("[core]\n no_scm = true\n")
    monkeypatch.chdir(tmp_path)
    collect_graph(Path("ablations"))
    listing = subprocess.run([sys.executable, "-c", LISTING], capture_output=True, text=True, check=True)
    known = json.loads(listing.stdout)
    assert {"train@ppo", "ablations/dvc.yaml:train@ppo-0"} <= known.keys()
    first = {address.partition("@")[0]: (address, *rest) for address, rest in reversed(known.items())}
    for address, command, *expected in first.values():
        for said in {address, address.rpartition(":")[2]}:
            begun = begin(monkeypatch, said, *command.split()[3:])
            assert begun is not None, said
            assert [sorted(each) for each in begun[:2]] == [sorted(each) for each in expected], said


def begin(monkeypatch: pytest.MonkeyPatch, stage: str, *arguments: str) -> tuple[list[str], list[str], Any] | None:
    """Makes this process the beginning of a stage's."""
    monkeypatch.setenv(OF_STAGE, stage)
    monkeypatch.setattr(sys, "argv", ["flows", *arguments])
    stage_at_start.cache_clear()
    return stage_at_start()


@pytest.fixture
def begun(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    stage = {
        "cmd": "python -m flows index --sweep a",
        "params": ["search", {"own.yaml": ["a"]}],
        "deps": ["code", "${places.data}/large"],
    }
    (tmp_path / "dvc.yaml").write_text(json.dumps({"stages": {"index": stage}}))
    (tmp_path / "params.yaml").write_text("search: {kind: bm25, k: 1}\nplaces: {data: data}\n")
    (tmp_path / ".dvcignore").write_text(".*.lock\n")
    for name, content in {
        ".dvc/config": "[core]\n no_scm = true\n",
        "own.yaml": "a: 1",
        "code/a.py": "a",
        "data/large": "a" * 2 * HASHED_BYTES,
    }.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(content)
    monkeypatch.chdir(tmp_path)
    assert begin(monkeypatch, "index", "index", "--sweep", "a")
    return tmp_path


def test_edit_of_code_data_or_parameters_is_named(begun: Path) -> None:
    """Parameters that cannot be read any more have changed."""
    require_unedited()
    (begun / "params.yaml").write_text("<<<<<<< HEAD\n=======\n")
    with pytest.raises(Edited, match=r"ran: search.kind bm25 -> none, search.k 1 -> none; dvc\.lock"):
        require_unedited()
    (begun / "params.yaml").write_text("search: {kind: dense, k: 1}\nplaces: {data: data}\n")
    (begun / "code/a.py").unlink()
    (begun / "code/b.py").write_text("b")
    (begun / "data/large").write_text("b" * 2 * HASHED_BYTES)
    (begun / "own.yaml").write_text("a: 2")
    files = r"code/a.py \w+ -> none, data/large \w+ -> \w+, own.yaml \w+ -> \w+, code/b.py none"
    with pytest.raises(Edited, match=f"edited while stage index ran: search.kind bm25 -> dense, {files}"):
        require_unedited()


def test_change_that_leaves_dvcs_hashes_alone_is_no_edit(begun: Path) -> None:
    """A comment, another parameter, compiled code, an ignored file, a file written anew as it was."""
    (begun / "params.yaml").write_text("# said\nsearch: {k: 1, kind: bm25}\nplaces: {data: elsewhere}\n")
    (begun / "code/__pycache__").mkdir()
    for name, content in {"code/__pycache__/a.pyc": "a", "code/.a.lock": "", "code/a.py": "a"}.items():
        (begun / name).unlink(missing_ok=True)
        (begun / name).write_text(content)
    require_unedited()


def test_other_command_warns(begun: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    assert begin(monkeypatch, "index", "prepare") is None
    require_unedited()
    assert "dvc.yaml has another command for stage index: edits while it runs are not noticed" in caplog.text
