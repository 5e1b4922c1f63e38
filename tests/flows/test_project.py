"""A project of one's own: made beside the package, brought up to another package, and what neither does."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from agent_r1.params import load
from flows import package, project, update
from flows.dvc_files import DVC
from flows.made_of import OF_STAGE, code_of
from flows.package import HASHES, NEXT, VERSION, finish_update, require_current
from flows.project import BASES, begin_project, graph_of
from flows.stage import run_stage
from flows.update import plan, take

ROOT = Path(__file__).parents[2]


def git(*arguments: str) -> str:
    return subprocess.run(["git", *arguments], check=True, capture_output=True, text=True).stdout


def commit() -> None:
    git("-c", "user.name=a", "-c", "user.email=a@localhost", "commit", "--quiet", "--all", "--message", "edited")


@pytest.fixture
def faq(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A project under an overlay, in which this process is."""
    monkeypatch.chdir(tmp_path)
    begin_project(Path("faq"), "sokoban", ["train.iterations=2"])
    monkeypatch.chdir("faq")
    return tmp_path / "faq"


def files(folder: Path) -> dict[str, bytes]:
    inside = (path for path in folder.rglob("*") if path.is_file() and ".git/" not in str(path))
    return {str(path.relative_to(folder)): path.read_bytes() for path in inside}


def test_project_has_git_whole_parameters_and_the_stages_of_the_package_with_their_data(faq: Path) -> None:
    settings = load()
    assert (settings.train.iterations, settings.prepare.datasets, settings.places.scale) == (2, ["sokoban"], "sokoban")
    assert (settings.places.data, settings.places.outputs) == ("data", "outputs")
    assert git("status", "--short") == ""
    assert len((faq / "README.md").read_text().splitlines()) <= 12
    assert json.loads((faq / ".vscode/extensions.json").read_text())["recommendations"]
    process = subprocess.run([sys.executable, "-m", "pytest"], env={**os.environ, "PYTHONPATH": str(ROOT)}, text=True)
    assert process.returncode == 0
    graph = yaml.safe_load((faq / "dvc.yaml").read_text())["stages"]
    shipped = yaml.safe_load((ROOT / "dvc.yaml").read_text())["stages"]
    assert graph.keys() == shipped.keys()
    for name, stage in shipped.items():
        project_stage, package_stage = (stage_.get("do", stage_) for stage_ in (graph[name], stage))
        data = [dep for dep in package_stage["deps"] if not dep.startswith(("agent_r1/", "flows/"))]
        assert project_stage == {**package_stage, "deps": [f"{HASHES}/{name}.yaml", *data]}
        assert {*yaml.safe_load((faq / HASHES / f"{name}.yaml").read_text())} == {
            "/".join(Path(file).parent.parts[:2]) for file in code_of(name)
        }


@pytest.mark.usefixtures("lay_dvc")  # it takes seconds
def test_dvc_reads_both_graphs(faq: Path) -> None:
    shutil.copy("ablations/graph.yaml", "ablations/dvc.yaml")
    listed = subprocess.run([*DVC, "stage", "list", "--all", "--name-only"], check=True, capture_output=True, text=True)
    assert "ablations/dvc.yaml:train@" in listed.stdout
    assert "\nwarm_start" in listed.stdout
    assert ".agent_r1" not in listed.stdout


def test_graph_keeps_its_comments_and_loses_its_code() -> None:
    shipped = (
        "# Of\n#\n# code.\nstages:\n  a: &a\n    cmd: b  # c\n    deps: [\n      agent_r1/x.py, flows/y,\n      d]\n"
    )
    text = graph_of(f"{shipped}  b:\n    <<: *a\n")
    assert (
        text == f"{project.HEADER}stages:\n  a: &a\n    cmd: b  # c\n    deps: [{HASHES}/a.yaml, d]\n  b:\n    <<: *a\n"
    )


def test_folder_that_is_not_empty_or_is_a_repositorys_is_refused(faq: Path) -> None:
    files_before = files(faq)
    with pytest.raises(ValueError, match=r"^tests is there, and nothing is replaced; name another folder"):
        begin_project(Path("tests"))
    with pytest.raises(ValueError, match=r"^new/one lies inside of a git repository, .* such as \.\./one$"):
        begin_project(Path("new/one"))
    with pytest.raises(ValueError, match=r"no overlay 'sokobn'; did you mean 'sokoban'"):
        begin_project(Path("../one"), "sokobn")
    with pytest.raises(ValueError, match=r"unknown key 'train\.iteration'"):
        begin_project(Path("../one"), "", ["train.iteration=2"])
    assert files(faq) == files_before
    assert [path.name for path in faq.parent.iterdir()] == ["faq"]
    begin_project(Path("scales/one"))  # which git ignores
    assert git("status", "--short") == ""


def test_newer_and_older_packages_are_refused_before_a_stage(faq: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    require_current()
    (faq / HASHES / "train.yaml").write_text("agent_r1/learn: other\nflows: other\n")
    with pytest.raises(ValueError, match=r"another package .* train \(agent_r1, .*agent_r1/learn.*; `agent-r1 update`"):
        require_current()
    calls = list[str]()

    def stage() -> None:
        calls.append("ran")

    monkeypatch.setenv(OF_STAGE, "ablations/dvc.yaml:train_closer@ppo-0")
    with pytest.raises(ValueError, match="another package"):
        run_stage(stage)
    monkeypatch.setenv(OF_STAGE, "index")
    monkeypatch.setattr("flows.stage.require_unedited", lambda: None)
    run_stage(stage)
    assert calls == ["ran"]
    VERSION.write_text("99.0\n")
    for ask in (require_current, plan):
        with pytest.raises(ValueError, match=r"0\.1\.0 is installed, and this project is one of 99\.0: install 99\.0"):
            ask()


@pytest.fixture
def upgrade(faq: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Has the installed package be of another version, with replacements in its files and lines in its changes."""
    shipped = faq.parent / "shipped"
    shutil.copytree(ROOT / "flows/shipped", shipped)
    graph = project.params.SHIPPED
    shutil.copy(graph, shipped / "params.yaml")
    for module in (package, project, update):
        monkeypatch.setattr(module, "SHIPPED", shipped)
    monkeypatch.setattr(project.params, "SHIPPED", shipped / "params.yaml")

    def become(version: str, edits: dict[str, tuple[str, str]], changes: str = "") -> None:
        monkeypatch.setattr(package, "version", lambda _: version)
        for name, (files_before, after) in edits.items():
            text = (shipped / name).read_text()
            assert files_before in text
            (shipped / name).write_text(text.replace(files_before, after, 1))
        (shipped / "CHANGELOG.md").write_text(f"# Changes\n\n## {version}\n\n{changes}\n\n## 0.1.0\n\n| `env` | no |\n")

    return become


def test_update_merges_the_packages_changes_with_ones_own(faq: Path, upgrade: Callable[..., None]) -> None:
    """Of lines that both changed the project's stay, and a file that was removed stays away."""
    parameters = faq / "params.yaml"
    parameters.write_text(parameters.read_text().replace("top_k: 2 ", "top_k: 4 ") + "# of mine\n")
    (faq / "dvc.yaml").write_text((faq / "dvc.yaml").read_text().replace("cmd: python -m flows index", "cmd: mine"))
    (faq / "pytest.ini").unlink()
    values = {"params.yaml": {"train": load().train.model_dump(mode="json"), "env": {"top_k": 4}}}
    recorded = {"deps": [{"path": f"{HASHES}/train.yaml"}], "params": values}
    (faq / "dvc.lock").write_text(yaml.safe_dump({"stages": {"train@ppo": recorded}}))
    (faq / HASHES / "train.yaml").write_text("agent_r1/learn: other\n")
    commit()
    edits = {
        "params.yaml": ("  iterations: 16\n", "  iterations: 18\n"),
        "pipeline.yaml": ("cmd: python -m flows index", "cmd: python -m flows index --all"),
        "prefect.toml": ("= 30", "= 45"),
    }
    rows = ["`env.top_k` | counts passages, and no titles: halve it", "`env.order: none` | no", "`model.gone` | no"]
    upgrade("0.2.0", edits, "\n".join(f"| {row} |" for row in rows))
    files_before = files(faq)
    planned = plan()
    assert files(faq) == files_before
    notes = planned.in_words
    assert notes.startswith("agent_r1 0.1.0 -> 0.2.0\n")
    assert "params.yaml: both changed the same lines, and yours stay; the package has\n  iterations: 18" in notes
    assert (
        "dvc.yaml: both changed the same lines, and yours stay; the package has\n    cmd: python -m flows index --all"
        in notes
    )
    assert [line for line in notes.splitlines() if line.startswith("params.yaml: env")] == [
        "params.yaml: env.top_k: counts passages, and no titles: halve it"
    ]
    assert "runs again: train@ppo (changed: agent_r1, agent_r1/agents" in notes
    assert "`agent-r1 keep RUN` accepts one as it is" in notes
    take(planned)
    assert (load().env.top_k, load().train.iterations) == (4, 2)
    assert parameters.read_text().endswith("# of mine\n")
    assert "cmd: mine" in (faq / "dvc.yaml").read_text()
    assert "= 45" in (faq / "prefect.toml").read_text()
    assert not (faq / "pytest.ini").exists()
    assert VERSION.read_text() == "0.2.0\n"
    require_current()
    commit()
    assert plan().files == {}


def test_key_that_came_is_taken_and_one_that_went_is_refused_by_name(faq: Path, upgrade: Callable[..., None]) -> None:
    parameters = faq / "params.yaml"
    [line] = [line for line in parameters.read_text().splitlines(keepends=True) if "yes_within_h: 0" in line]
    parameters.write_text(parameters.read_text().replace(line, "").replace("  level: 0.95 ", "  level: 0.9 "))
    bases = json.loads(BASES.read_text())
    BASES.write_text(json.dumps(bases | {"params.yaml": bases["params.yaml"].replace(line, "")}))
    commit()
    upgrade("0.2.0", {}, "| `promote.gone` | leave it out |")
    take(plan())
    assert (load().promote.yes_within_h, load().promote.level) == (0, 0.9)
    VERSION.write_text("0.1.0\n")
    parameters.write_text(parameters.read_text().replace("\npromote:", "\npromote:\n  gone: 2\n"))
    commit()
    with pytest.raises(ValueError, match=r"unknown key 'promote\.gone'.*") as refused:
        plan()
    assert "params.yaml: promote.gone: leave it out\nmend that, commit it, and ask again" in str(refused.value)


def test_every_key_of_the_changes_is_read() -> None:
    rows = [line for line in (ROOT / "CHANGELOG.md").read_text().splitlines() if line.startswith("| `")]
    assert [row for row in rows if not update.KEY.fullmatch(row)] == []
    assert "train.monitor.stabilise" in {update.KEY.fullmatch(row)["key"] for row in rows}  # type: ignore[index]


@pytest.mark.parametrize("where", ["params.yaml", "dvc.yaml"])
def test_edits_that_git_does_not_keep_are_not_merged(faq: Path, upgrade: Callable[..., None], where: str) -> None:
    upgrade(
        "0.2.0", {"params.yaml": ("Every knob", "Each knob"), "pipeline.yaml": ("  prepare:", "  prepare:  # first")}
    )
    (faq / where).write_text((faq / where).read_text() + "# mine\n")
    files_before = files(faq)
    with pytest.raises(ValueError, match=rf"^{where}: git does not keep your edits yet; commit them"):
        plan()
    assert files(faq) == files_before


def test_update_is_refused_where_there_is_nothing_to_update(faq: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (faq / "params.yaml").write_text("<<<<<<< HEAD\n")
    with pytest.raises(ValueError, match=r"params\.yaml cannot be read as YAML"):
        plan()
    (faq / "overlays").mkdir()
    (faq / "overlays/base.yaml").touch()
    with pytest.raises(ValueError, match=r"overlay is laid over params\.yaml; go back by `agent-r1 overlay base`"):
        plan()
    monkeypatch.chdir(faq.parent)
    with pytest.raises(ValueError, match=r"no project of `agent-r1 new project`; a clone is brought up by `git pull`"):
        plan()


def test_killed_update_is_old_or_new(faq: Path, upgrade: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> None:
    """Killed before each of its writes in turn; the next command finds one or the other."""
    upgrade("0.2.0", {"prefect.toml": ("= 30", "= 45"), "params.yaml": ("Every knob", "Each knob")})
    files_before, planned = files(faq), plan()
    expected = files_before | {path: text.encode() for path, text in planned.files.items()}
    expected_next = sorted(planned.files)

    class Killed(Exception):
        pass

    def fails_at(number: int, name: str, original: Callable[..., object]) -> Callable[..., object]:
        calls = iter(range(number + 1))

        def call(*arguments: object) -> object:
            if next(calls, number) == number:
                raise Killed
            return original(*arguments)

        return call

    for number in range(len(expected_next)):
        with monkeypatch.context() as patch:
            patch.setattr(update, "write_text", fails_at(number, "write", update.write_text))
            with pytest.raises(Killed):
                take(planned)
        finish_update()
        assert files(faq) == files_before
        with monkeypatch.context() as patch:
            patch.setattr(Path, "replace", fails_at(len(expected_next) + number, "replace", Path.replace))
            with pytest.raises(Killed):
                take(planned)
        assert NEXT.exists()
        finish_update()
        assert files(faq) == expected
        git("checkout", "--quiet", ".")
    assert BASES.exists()
