"""`make relock`: statements that differ, outputs that are equal, and the whole of it in a project of two stages."""

import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pandas as pd
import pytest

from benchmarks.relock import MADE_BY, RECORD, data_of, maker, outputs, relock
from flows.dvc_files import ask_dvc
from tests.cases import laid


def test_outputs_are_equal_but_for_seconds(tmp_path: Path) -> None:
    contents = list[dict[str, object]]()
    for number, (seconds, loss) in enumerate([(1.0, 0.5), (2.0, 0.5), (2.0, 0.25)]):
        folder = tmp_path / str(number)
        (folder / "outputs/run").mkdir(parents=True)
        (folder / "outputs/compared").mkdir()
        (folder / "params.yaml").write_text("places: {data: data, outputs: outputs}")
        rows = pd.DataFrame({"steps": [[{"calls": [{"latency_s": seconds, "tool": "search"}]}]], "loss": [loss]})
        rows.to_parquet(folder / "outputs/run/rows.parquet")
        (folder / "outputs/run/metrics.jsonl").write_text(f'{{"time/update_s": {seconds}, "loss": {loss}}}\n')
        (folder / "outputs/run/start.json").write_text(str(number))
        (folder / "outputs/compared/run.json").write_text(f'{{"outputs/run/rows.parquet": "{number}"}}')
        page = f"# Report\n\n## Budgets\n\n| {seconds} |\n\n## Differences\n"
        (folder / "outputs/run/report.md").write_text(page)
        contents.append(outputs(folder))
    assert contents[0] == contents[1]
    assert {name for name, content in contents[1].items() if content != contents[2][name]} == {
        "outputs/run/metrics.jsonl",
        "outputs/run/rows.parquet",
    }


PROJECT = laid("relocked")


def run(*command: str) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


@pytest.fixture
def made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lay_dvc: Callable[..., None]) -> str:
    """The commit of a project of two stages, made and locked; it is the current folder."""
    project = tmp_path / "project"
    for name, text in PROJECT.items():
        (project / name).parent.mkdir(parents=True, exist_ok=True)
        (project / name).write_text(text)
    monkeypatch.chdir(project)
    monkeypatch.setenv("DVC_NO_ANALYTICS", "1")
    lay_dvc(project)
    run("git", "init", "--quiet")
    run("git", "config", "user.name", "a")
    run("git", "config", "user.email", "a@localhost")
    assert ask_dvc("repro", PYTHONPATH=".").returncode == 0
    RECORD.parent.mkdir(parents=True)
    shutil.copy("dvc.lock", RECORD)
    run("git", "add", "--all")
    run("git", "commit", "--quiet", "--message", "Make it")
    return run("git", "rev-parse", "HEAD").strip()


def test_code_that_changes_no_bit_is_taken_over(made: str, tmp_path: Path) -> None:
    """Into another file, which git does not know yet; what was never run stays as it was."""
    record_before = RECORD.read_text()
    text = Path("agent_r1/numbers.py").read_text()
    Path("agent_r1/numbers.py").unlink()
    Path("agent_r1/scales.py").write_text(text.replace("value * factor", "factor * value"))
    for name in ("dvc.yaml", "flows/__main__.py"):
        Path(name).write_text(Path(name).read_text().replace("numbers", "scales"))
    assert relock(tmp_path / "one") == []
    assert data_of(RECORD.read_text()) == data_of(record_before)
    assert "scales.py" in RECORD.read_text()
    assert Path("dvc.lock").read_text() == RECORD.read_text(), "the clone's own, which was of the same code"
    assert MADE_BY.read_text() == f"{made}\n"
    assert ask_dvc("status", "--json").stdout.strip() == "{}"  # nothing runs again
    with pytest.raises(ValueError, match="not as it was committed"):
        relock(tmp_path / "two")
    run("git", "add", "--all")
    run("git", "commit", "--quiet", "--message", "Move it")
    assert maker(run("git", "rev-parse", "HEAD").strip(), RECORD.read_text()) == made  # not the move
    assert maker("another", record_before.replace("data/made.txt", "data/others.txt")) == "another"


def test_differing_or_unrun_code_is_named_and_nothing_is_taken_over(made: str, tmp_path: Path) -> None:
    record_before, numbers = RECORD.read_text(), Path("agent_r1/numbers.py")
    edited = numbers.read_text().replace("ValueError(value)", "ValueError(-value)").replace('"."', '"!"')
    numbers.write_text(edited)
    assert relock(tmp_path / "one") == [
        "outputs/report.txt differs",
        f"agent_r1/numbers.py:3 of {made:.10} was not run: body raise ValueError(value)",
        "agent_r1/numbers.py:3 of the working tree was not run: body raise ValueError(-value)",
    ]
    assert (RECORD.read_text(), Path("dvc.lock").read_text()) == (record_before, record_before)
    assert not MADE_BY.exists()


def test_another_parameter_or_stage_is_refused_before_anything_runs(made: str, tmp_path: Path) -> None:
    Path("params.yaml").write_text(PROJECT["params.yaml"].replace("2", "3"))
    with pytest.raises(ValueError, match=r"^factor: other values in params\.yaml; `make repro`"):
        relock(tmp_path / "one")
    Path("dvc.yaml").write_text(PROJECT["dvc.yaml"].replace("outputs/report", "outputs/told"))
    with pytest.raises(ValueError, match=r"^report: other outputs or data than in dvc\.lock"):
        relock(tmp_path / "two")
    run("git", "checkout", "--quiet", ".")
    Path("agent_r1/numbers.py").write_text("")
    RECORD.write_text(RECORD.read_text() + "\n")
    run("git", "commit", "--quiet", "--all", "--message", "An edit and a lock that is not of it")
    with pytest.raises(ValueError, match="is not of that commit's code"):
        relock(tmp_path / "three")
