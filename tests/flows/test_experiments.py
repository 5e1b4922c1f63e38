"""DVC's experiments and plots as docs/tracking.md has them, and results of any revision as docs/evaluating.md has."""

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import vl_convert

from agent_r1.files import write_text
from agent_r1.records import Prediction, Source, Trajectory
from agent_r1.tables import write_rows
from flows.project import shipped_files
from tests.cases import graph
from tests.fixtures import ROOT
from tests.trajectories import from_parts


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """A git repository with a graph of one stage, which was run, and one file that is staged."""
    shutil.copy(ROOT / "params.yaml", tmp_path)
    (tmp_path / "dvc.yaml").write_text(graph("experiment"))
    (tmp_path / "data").mkdir()
    (tmp_path / "data/rows").touch()
    for name, text in shipped_files(tmp_path)[0].items():
        if name.startswith(".dvc/"):
            write_text(tmp_path / name, text)
    curve = [{"iteration": number, "ppo": number / 8, "grpo": number / 9} for number in range(4)]
    (tmp_path / "curve.json").write_text(json.dumps(curve))
    (tmp_path / ".dvc/config.local").write_text(f"[core]\n site_cache_dir = {tmp_path}/.git/site\n")
    shell(tmp_path, "git init -q && git config user.name a && git config user.email a@localhost")
    shell(tmp_path, "dvc repro -q && git add . && git commit -qm made && echo > staged && git add staged")
    return tmp_path


def shell(folder: Path, command: str) -> str:
    path = f"export PATH={Path(sys.executable).parent}:$PATH; "
    return subprocess.run(
        ["bash", "-ec", path + command], cwd=folder, check=True, capture_output=True, text=True
    ).stdout


def test_experiment_has_its_name_and_leaves_staged_files_as_they_were(repository: Path) -> None:
    documented = (ROOT / "docs/tracking.md").read_text()
    run, queue, show, apply = (
        re.findall(pattern, documented, re.MULTILINE)[0]
        for pattern in (
            r"^dvc exp run --temp[^#]*",
            r"^dvc exp run --queue[^#]*",
            r"^dvc exp show[^#]*",
            r"^index=.*dvc exp apply.*$",
        )
    )
    for command in (run, queue, apply):
        shell(repository, command)
        assert shell(repository, "git diff --cached --name-only") == "staged\n", command
    assert (repository / "scores.json").read_text() == '{"name": "slow"}'
    assert "learning_rate: 0.0001" in shell(repository, "cat params.yaml")
    (repository / "data/rows").write_text("other")
    shown = shell(repository, f"dvc repro -q; {show} --csv").splitlines()[0]
    assert "train.update.learning_rate" in shown
    assert "data/rows" not in shown, "a column of hashes"


def test_page_of_plots_overlays_two_revisions_without_a_network(repository: Path) -> None:
    curve = repository / "curve.json"
    curve.write_text(curve.read_text().replace("0.375", "0.5"))
    shell(repository, "dvc plots diff HEAD")
    page = (repository / "dvc_plots/index.html").read_text()
    from_network = re.findall(r'<template id="network">.*?</template>', page, re.DOTALL)
    assert re.findall(r'<script[^>]* src="([^"]*)"', page.replace(*from_network, "")) == ["../.venv/vega.js"]
    [spec] = re.findall(r"var spec = (\{.*?\});\n", page, re.DOTALL)
    svg = vl_convert.vegalite_to_svg(json.loads(spec))
    for label in ("ppo", "grpo", "workspace", "HEAD", "iteration"):
        assert f">{label}</text>" in svg
    assert svg.count('aria-roledescription="line mark"') == 4


def test_results_of_any_revision_are_data_frames(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """docs/evaluating.md's code as it stands, after two commits whose policies answer differently."""
    evaluation, training = tmp_path / "outputs/evaluate/ppo/predictions.parquet", tmp_path / "outputs/train/ppo"
    counts = dict.fromkeys(("steps", "tool_calls", "tokens_read", "tokens_sampled"), 1)
    shell(tmp_path, "git init -q && git config user.name a && git config user.email a@localhost && dvc init -q")
    for version, right in enumerate([{"a"}, {"a", "b"}]):
        about = {"run": "ppo", "seed": 0, "policy_version": version, "answer": "Tesk", "facts": {}, **counts}
        rows = [Prediction(question_id=each, success=float(each in right), **about) for each in "abc"]
        write_rows(evaluation, rows, Prediction)
        sampled = from_parts([(Source.PROMPT, [1]), (Source.ACTION, [2])], policy_version=version)
        write_rows(training / "trajectories/000.parquet", [sampled], Trajectory)
        shell(tmp_path, f"dvc add -q {evaluation} {training} && git add . && git commit -qm version{version}")
    shutil.rmtree(tmp_path / "outputs")
    section = (ROOT / "docs/evaluating.md").read_text().partition("### Reading results of any revision")[2]
    [code, *_] = re.findall(r"```python\n(.*?)```", section, re.DOTALL)
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    exec(compile(code, "docs/evaluating.md", "exec"), names)
    assert names["changed"]["question_id"].tolist() == ["b"]
    assert names["trajectories"]["policy_version"].tolist() == [1]
    assert names["rows"]("outputs/train/ppo/trajectories/000.parquet", "HEAD~1")["policy_version"].tolist() == [0]
