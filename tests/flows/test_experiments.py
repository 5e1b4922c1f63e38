"""DVC's experiments as docs/operating.md has them: with a name, and beside files that are staged."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
GRAPH = """
stages:
  train:
    cmd: >-
      python -c "import os, pathlib as p;
      p.Path('scores.json').write_text('{\\"name\\": \\"' + os.environ.get('DVC_EXP_NAME', '') + '\\"}')"
    params: [train.update.learning_rate]
    metrics: [{scores.json: {cache: false}}]
"""


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A git repository with a graph of one stage, which was run, and one file that is staged."""
    shutil.copy(ROOT / "params.yaml", tmp_path)
    (tmp_path / "dvc.yaml").write_text(GRAPH)
    (tmp_path / ".dvc").mkdir()
    for name in ("config", ".gitignore"):
        shutil.copy(ROOT / ".dvc" / name, tmp_path / ".dvc" / name)
    (tmp_path / ".dvc/config.local").write_text(f"[core]\n site_cache_dir = {tmp_path}/.git/site\n")
    shell(tmp_path, "git init -q && git config user.name a && git config user.email a@localhost")
    shell(tmp_path, "dvc repro -q && git add . && git commit -qm made && echo > staged && git add staged")
    return tmp_path


def shell(folder: Path, command: str) -> str:
    path = f"export PATH={Path(sys.executable).parent}:$PATH; "
    return subprocess.run(
        ["bash", "-ec", path + command], cwd=folder, check=True, capture_output=True, text=True
    ).stdout


def test_an_experiment_has_its_name_and_leaves_staged_files_as_they_were(project: Path) -> None:
    documented = (ROOT / "docs/operating.md").read_text()
    run, queue, apply = (
        re.findall(pattern, documented, re.MULTILINE)[0]
        for pattern in (r"^dvc exp run --temp[^#]*", r"^dvc exp run --queue[^#]*", r"^index=.*dvc exp apply.*$")
    )
    for command in (run, queue, apply):
        shell(project, command)
        assert shell(project, "git diff --cached --name-only") == "staged\n", command
    assert (project / "scores.json").read_text() == '{"name": "slow"}'
    assert "learning_rate: 0.0001" in shell(project, "dvc exp show --only-changed --csv; cat params.yaml")
