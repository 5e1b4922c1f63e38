"""What docs/installing.md and docs/upgrading.md say of wheels, projects and clones, walked with two versions."""

import os
import re
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest
import yaml

from benchmarks.reruns import stand_in
from flows.package import HASHES, code_hashes, stages

ROOT = Path(__file__).parents[2]
SMALL = "prepare.atlas={people: 40, films: 20, companies: 10, cities: 10, countries: 4, train_questions: 60}"
KEY = "| `promote.margin` | is a share now, and was a percentage: divide it |"


def run(folder: Path, command: str, code: int = 0, **environment: str) -> str:
    process = subprocess.run(
        ["bash", "-ec", command], cwd=folder, env={**os.environ, **environment}, capture_output=True, text=True
    )
    assert process.returncode == code, process.stdout + process.stderr
    return process.stdout + process.stderr


def copy_sources(folder: Path) -> None:
    """What the next commit of this clone has."""
    index = f"export GIT_INDEX_FILE={folder}.index; git read-tree HEAD && git add --all"
    run(ROOT, f"{index} && mkdir {folder} && git archive $(git write-tree) | tar -x -C {folder}")


@pytest.fixture
def wheels(tmp_path: Path) -> list[Path]:
    """A wheel of the package, and one of a later version: another loss and threshold, a key with another meaning."""
    copy_sources(tmp_path / "sources")
    built = []
    for version in ("0.1.0", "0.2.0"):
        for name, before, after in (
            ("pyproject.toml", 'version = "0.1.0"', f'version = "{version}"'),
            *[
                ("agent_r1/learn/losses.py", '"""', '"""Another. '),
                ("params.yaml", "long_step: 0.1 ", "long_step: 0.2 "),
                ("CHANGELOG.md", "## Unreleased", f"## 0.2.0\n\n{KEY}\n\n## 0.1.0"),
            ][: 3 * (version == "0.2.0")],
        ):
            file = tmp_path / "sources" / name
            file.write_text(file.read_text().replace(before, after, 1))
        wheel = f"{sys.executable} -m pip wheel --quiet --no-deps --no-build-isolation --wheel-dir {tmp_path} ."
        run(tmp_path / "sources", wheel)
        built += tmp_path.glob(f"agent_r1-{version}-*.whl")
    return built


def test_project_from_a_wheel_is_upgraded_as_the_page_says(wheels: list[Path], tmp_path: Path) -> None:
    """In an environment that has the wheel, and the packages that it needs from this one."""
    environment = tmp_path / "venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", environment], check=True)
    packages = sysconfig.get_path("purelib", vars={"base": str(environment)})
    (Path(packages) / "packages.pth").write_text(f"{sysconfig.get_path('purelib')}\n")
    variables = {"PYTHONPATH": "", "PATH": f"{environment}/bin:{Path(sys.executable).parent}:{os.environ['PATH']}"}
    first, second = (
        f"{sys.executable} -m pip --python {environment} install --quiet --no-deps --no-index {wheel}"
        for wheel in wheels
    )
    listed = run(tmp_path, f"unzip -p {wheels[0]} flows/shipped/requirements/cpu.txt", **variables)
    assert listed == (ROOT / "requirements/cpu.txt").read_text()
    run(tmp_path, first, **variables)
    run(tmp_path, f"agent-r1 new project faq --set '{SMALL}'", **variables)
    project = tmp_path / "faq"
    for stage in stages():
        assert yaml.safe_load((project / HASHES / f"{stage}.yaml").read_text()) == code_hashes(stage), "as in the clone"
    identity = "git config user.name a && git config user.email a@localhost"
    run(
        project,
        f"{identity} && sed -i 's/ margin: 0.0 / margin: 0.5 /' params.yaml && git commit -qam mine",
        **variables,
    )
    run(project, "agent-r1 doctor code versions parameters && dvc repro -q prepare", **variables)
    assert "0.1.0" not in run(project, "git status --short", **variables)
    run(project, "git add -A && git commit -qm made", **variables)
    run(tmp_path, second, **variables)
    refused = run(project, "agent-r1 pipeline", 1, **variables)
    assert (
        "another package is installed than this project is of: warm_start (agent_r1/learn); train (agent_r1/learn)"
        in refused
    )
    block = re.findall(r"```\n(.*?)```", (ROOT / "docs/upgrading.md").read_text(), re.DOTALL)[0]
    params_before = (project / "params.yaml").read_text()
    output = run(project, "agent-r1 update", **variables)
    assert "agent_r1 0.1.0 -> 0.2.0\n" in output
    assert "params.yaml: promote.margin: is a share now, and was a percentage: divide it" in output
    assert "Nothing is changed before you say yes, here or by --yes." in output
    assert (project / "params.yaml").read_text() == params_before
    page = block.replace("agent-r1 update ", "agent-r1 update --yes ").replace(
        "agent-r1 pipeline", "dvc repro -q prepare"
    )
    walked = run(project, page, GIT_PAGER="cat", **variables)
    assert "+      long_step: 0.2 " in walked
    assert " margin: 0.5 " in (project / "params.yaml").read_text()
    assert "everything is up to date" in run(project, "agent-r1 update", **variables)
    assert run(project, "git status --short", **variables) == ""
    run(tmp_path, first, **variables)
    assert "agent_r1 0.1.0 is installed, and this project is one of 0.2.0" in run(
        project, "agent-r1 pipeline", 1, **variables
    )


@pytest.fixture
def origin(tmp_path: Path) -> Path:
    copy_sources(tmp_path / "origin")
    identity = "git config user.name a && git config user.email a@localhost"
    run(tmp_path / "origin", f"git init -q && {identity} && git add -A && git commit -qm shipped")
    return tmp_path / "origin"


def test_clone_that_made_everything_is_as_git_had_it_and_takes_further_commits(origin: Path) -> None:
    """Every output of the graph is there, in place of `make repro`; a training is not finished."""
    clone = origin.with_name("clone")
    run(origin.parent, f"git clone -q {origin} {clone}")
    stand_in(clone)
    (clone / "models").mkdir()
    (clone / "models/ppo.dvc").touch()
    unfinished = clone / "outputs/train/grpo/start.json"
    unfinished.parent.mkdir()
    unfinished.write_text("{}")
    for name in ("dvc.yaml", "dvc.lock"):
        shutil.copy(clone / "dvc.lock", clone / "ablations" / name)
    assert run(clone, "git status --short") == ""
    lock = (clone / "dvc.lock").read_bytes()
    for number in range(20):
        edits = f"sed -i 's/^  iterations: .*/  iterations: {number}/' params.yaml; echo >> docs/report/dvc.lock"
        run(origin, f"{edits}; git commit -qam later")
    run(clone, "git pull -q")
    assert "\n  iterations: 19\n" in (clone / "params.yaml").read_text()
    assert ((clone / "dvc.lock").read_bytes(), unfinished.read_text()) == (lock, "{}")
    run(clone, "sed -i 's/  top_k: 2 /  top_k: 3 /' params.yaml")
    run(origin, "sed -i 's/^  iterations: .*/  iterations: 21/' params.yaml; git commit -qam later")
    run(clone, "git pull -q", 1)
    run(clone, "git pull -q --autostash")
    text = (clone / "params.yaml").read_text()
    assert ("\n  iterations: 21\n" in text, "  top_k: 3 " in text) == (True, True)
    assert run(clone, "git status --short") == " M params.yaml\n"
