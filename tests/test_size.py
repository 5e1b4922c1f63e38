"""The house keeps its size: each of its measures stays under its ceiling in benchmarks/size.yaml."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from benchmarks.structure import SIZE, complaints, main, measure, read_ceilings

ROOT = Path(__file__).parents[1]
TREE = {
    "agent_r1/a/one.py": '"""What is one."""\n\nimport os\n\n\ndef f(a, b, c, d, e, g, h):\n    if a:\n        pass\n',
    "flows/train.py": "from agent_r1.a import one\n\nprint(one)\n",
    "README.md": "Read me.\n",
    SIZE: "",
    "params.yaml": "model:\n  path: x\n  seeds: {}\nruns:\n  ppo: {}\n",
}


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A small house whose ceilings are its measures."""
    for name, text in TREE.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    ceilings = [f"{name}: {value}\n" for name, value in measure(tmp_path).items()]
    (tmp_path / SIZE).write_text("# Ceilings.\n" + "".join(ceilings))
    return tmp_path


def complaint(root: Path) -> str:
    return "\n".join(complaints(measure(root), read_ceilings(root)))


def test_the_house_is_under_its_ceilings() -> None:
    assert complaint(ROOT) == ""


def test_a_small_house_is_measured(tree: Path) -> None:
    expected = {
        "lines of agent_r1.a": 8,
        "lines of flows.train and all behind it": 11,
        "modules with one importer": 1,
        "functions over 6 parameters": 1,
        "deepest nesting": 1,
        "docstrings that begin with What": 1,
        "keys of params.yaml": 2,
    }
    assert measure(tree).items() >= expected.items()
    assert complaint(tree) == ""


def test_a_room_that_grows_or_is_new_is_over_its_ceiling(tree: Path) -> None:
    with (tree / "agent_r1/a/one.py").open("a") as file:
        file.write("\n\nLIMIT = 3\n")
    assert "lines of agent_r1.a: 11, over the ceiling of 8. Make it smaller, or write 11 into" in complaint(tree)
    (tree / "agent_r1/a").rename(tree / "agent_r1/b")
    assert "lines of agent_r1.b: no ceiling. Write `lines of agent_r1.b: 11`" in complaint(tree)
    assert "lines of agent_r1.a: nothing measures it" in complaint(tree)


def test_ceilings_follow_the_house_down(tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`--write` lowers them, keeps the comments, and raises none."""
    (tree / SIZE).write_text((tree / SIZE).read_text().replace("modules: 2", "modules: 1  # own tools"))
    (tree / "agent_r1/a/one.py").write_text("ONE = 1\n")
    assert "lines of agent_r1.a: 1, ceiling 8. Write 1" in complaint(tree)
    monkeypatch.setattr(sys, "argv", ["structure", str(tree), "--write"])
    main()
    assert (tree / SIZE).read_text().startswith("# Ceilings.\nlines of agent_r1.a: 1\n")
    assert "modules: 1  # own tools\n" in (tree / SIZE).read_text()
    assert re.fullmatch("modules: 2, over the ceiling of 1.*", complaint(tree))


def test_a_folder_without_a_house_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["structure", str(tmp_path)])
    with pytest.raises(SystemExit, match="2"):
        main()
