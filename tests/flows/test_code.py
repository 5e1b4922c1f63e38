"""Which files of code a stage is told from others by."""

from __future__ import annotations

from pathlib import Path

import pytest

from agent_r1.files import sha256
from flows import ranks
from flows.ranks import code_of

GRAPH = """
stages:
  warm_start:
    cmd: python -m flows warm_start
    deps: [agent_r1/tables.py, data/index]
  train:
    foreach: ${repro_runs}
    do:
      cmd: python -m flows train --run ${item}
      deps: [agent_r1/policy, agent_r1/tables.py, flows/train.py, data/index]
"""


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "dvc.yaml").write_text(GRAPH)
    listed = ("agent_r1/policy/deep/learner.py", "agent_r1/policy/chat.jinja", "agent_r1/tables.py", "flows/train.py")
    others = (
        "agent_r1/policy/__pycache__/learner.pyc",
        "agent_r1/inspection/viewer.py",
        "agent_r1/training/watch.py",
        "data/index/a",
    )
    for name in (*listed, *others):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name)
    monkeypatch.setattr(ranks, "CODE", tmp_path)
    return tmp_path


def test_a_stages_code_is_every_file_that_dvc_yaml_lists(root: Path) -> None:
    expected = {"agent_r1/policy/chat.jinja", "agent_r1/policy/deep/learner.py", "agent_r1/tables.py", "flows/train.py"}
    assert code_of("train") == {name: sha256(root / name) for name in expected}
    assert {*code_of("warm_start")} == {"agent_r1/tables.py"}


def test_a_stages_code_needs_the_graph(root: Path) -> None:
    (root / "dvc.yaml").unlink()
    with pytest.raises(FileNotFoundError, match=r"dvc\.yaml does not exist; install the project from its clone"):
        code_of("train")


def test_trainings_code_is_its_flow_and_not_the_viewer() -> None:
    found = code_of("train")
    assert {"flows/train.py", "agent_r1/training/watch.py", "agent_r1/learn/learner.py"} <= found.keys()
    assert not [
        name
        for name in found
        if name.startswith(("agent_r1/inspection", "agent_r1/tracking", "agent_r1/params", "data"))
    ]
