"""What another clone made is taken over by its entry of dvc.lock, and an entry that lies is refused before that."""

from __future__ import annotations

import hashlib
import json
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from flows.dvc_files import DVC
from flows.graph import LockEntry, Made, adopt, described, differences, entry_of, out_of_date, push, require_alike

GRAPH = """
stages:
  prepare:
    cmd: cp source.txt prepared.txt
    params: [evaluate.questions]
    deps: [source.txt]
    outs: [prepared.txt]
  train:
    foreach: [a, b]
    do:
      cmd: mkdir -p trained/${item} && cp prepared.txt trained/${item}/policy
      deps: [prepared.txt]
      outs: [{"trained/${item}": {persist: true}}]
"""
STAGES = ("prepare", "train@a")


def dvc(folder: Path, *arguments: str) -> None:
    subprocess.run([*DVC, *arguments], cwd=folder, check=True, capture_output=True)


@pytest.fixture(scope="module")
def pushed(
    tmp_path_factory: pytest.TempPathFactory, write_params: Callable[..., None], lay_dvc: Callable[..., None]
) -> tuple[Path, dict[str, LockEntry]]:
    """A remote to which a clone pushed two stages, and another clone, `here`, with the first of them.

    And the entries of the clone where both were made.
    """
    folder = tmp_path_factory.mktemp("clones")
    there = folder / "there"
    there.mkdir()
    (there / "dvc.yaml").write_text(GRAPH)
    (there / "source.txt").write_text("1\n")
    write_params(there, {})
    lay_dvc(there, "../../storage")
    dvc(there, "repro", "--quiet", "prepare")
    shutil.copytree(there, folder / "here")
    dvc(there, "repro", "--quiet", "train@a")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(there)
        push(*STAGES)
        return folder, {stage: LockEntry.model_validate(known.locked) for stage, known in described(*STAGES).items()}


@pytest.fixture
def entries(
    pushed: tuple[Path, dict[str, LockEntry]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> dict[str, LockEntry]:
    """Those of the clone where both stages were made; this process is in a copy of the other one."""
    folder, found = pushed
    for name in ("here", "storage"):
        shutil.copytree(folder / name, tmp_path / name)
    monkeypatch.chdir(tmp_path / "here")
    return found


def changed(entry: LockEntry, **changes: Any) -> LockEntry:
    return LockEntry.model_validate({**entry_of(entry), **changes})


def content() -> dict[str, bytes]:
    """Of all files above this process's clone but DVC's own."""
    return {
        str(path): path.read_bytes()
        for path in sorted(Path("..").rglob("*"))
        if path.is_file() and ".dvc/" not in str(path)
    }


def test_what_another_clone_made_is_up_to_date_here(entries: dict[str, LockEntry]) -> None:
    shutil.rmtree(".dvc/cache")
    Path("prepared.txt").unlink()
    adopt(entries)
    assert Path("prepared.txt").read_text() == Path("trained/a/policy").read_text() == "1\n"
    assert not out_of_date(*STAGES)
    assert {stage: known.locked for stage, known in described(*STAGES).items()} == {
        stage: entry_of(entry) for stage, entry in entries.items()
    }


OUT = {"path": "trained/a", "hash": "md5", "md5": f"{'0' * 32}.dir", "size": 2, "nfiles": 1}


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"outs": [OUT | {"path": "../a"}]}, r"has the outputs \['trained/a'\], and another clone says \['\.\./a'\]"),
        ({"outs": [OUT, OUT | {"path": "dvc.yaml"}]}, "another clone says"),
        ({"outs": [OUT, OUT]}, "another clone says"),
        ({"cmd": "rm -rf ~"}, "is made of something else here than there: its command; bring both clones"),
        ({"deps": []}, r"something else here than there: prepared\.txt"),
        ({"deps": [OUT | {"path": "flows/\x1b[2J"}]}, r"there: flows/.\[2J, prepared\.txt"),
        ({"params": {"params.yaml": {"train": {"iterations": 9}}}}, r"params\.yaml\.train\.iterations \(9 there, 'no"),
    ],
)
def test_an_entry_that_is_not_of_this_clones_stage_is_refused(
    entries: dict[str, LockEntry], changes: dict[str, Any], said: str
) -> None:
    before = content()
    with pytest.raises(ValueError, match=said):
        adopt({"train@a": changed(entries["train@a"], **changes)})
    assert content() == before


@pytest.mark.parametrize(
    "changes",
    [
        {"md5": "../../../../etc/passwd"},
        {"md5": f"{'0' * 32}.dir\n"},
        {"hash": "sha256"},
        {"size": -1},
        {"path": "x" * 2000},
        {"cloud": {"storage": {"etag": "x"}}},
    ],
)
def test_an_entry_has_the_shape_of_dvcs_own(changes: dict[str, Any]) -> None:
    LockEntry.model_validate({"cmd": "true", "outs": [OUT]})
    with pytest.raises(ValueError, match=next(iter(changes))):
        LockEntry.model_validate({"cmd": "true", "outs": [OUT | changes]})


def test_a_listing_that_leads_out_of_its_folder_is_refused(entries: dict[str, LockEntry]) -> None:
    before = content()
    listing = json.dumps([{"md5": entries["prepare"].outs[0].md5, "relpath": "../../../escaped"}])
    md5 = hashlib.md5(listing.encode(), usedforsecurity=False).hexdigest()
    stored = Path("../storage/files/md5") / md5[:2] / f"{md5[2:]}.dir"
    stored.parent.mkdir(parents=True, exist_ok=True)
    stored.write_text(listing)
    with pytest.raises(ValueError, match=r"names .*escaped"):
        adopt({"train@a": changed(entries["train@a"], outs=[OUT | {"md5": f"{md5}.dir"}])})
    assert content() == before | {str(stored): stored.read_bytes()}


def test_what_the_remote_does_not_have_is_said(entries: dict[str, LockEntry]) -> None:
    with pytest.raises(OSError, match=r"train@a could not be brought here from DVC's remote"):
        adopt({"train@a": changed(entries["train@a"], outs=[OUT])})


def test_what_somebody_made_here_and_dvc_does_not_have_stays(entries: dict[str, LockEntry]) -> None:
    Path("trained/a").mkdir(parents=True)
    Path("trained/a/policy").write_text("of an own training")
    with pytest.raises(OSError, match="train@a could not be brought here"):
        adopt({"train@a": entries["train@a"]})
    assert Path("trained/a/policy").read_text() == "of an own training"


def test_what_is_in_its_place_is_not_pulled(entries: dict[str, LockEntry]) -> None:
    adopt(entries)
    Path("../storage").rename("../away")
    adopt(entries)


def test_differences_are_told_by_name() -> None:
    def item(path: str, digit: str) -> dict[str, str]:
        return {"path": path, "md5": digit * 32}

    values = {"train": {"iterations": 3, "update": {"learning_rate": 1e-5}}, "env": None}
    one = Made.model_validate(
        {"cmd": "a", "deps": [item("x.py", "0"), item("data/index", "1")], "params": {"params.yaml": values}}
    )
    values = {"train": {"iterations": 2, "update": {"learning_rate": 1e-5}}}
    other = Made.model_validate(
        {"cmd": "a", "deps": [item("y.py", "0"), item("data/index", "2")], "params": {"params.yaml": values}}
    )
    assert [*differences(one, other)] == [
        "params.yaml.env (None there, 'nothing' here)",
        "params.yaml.train.iterations (3 there, 2 here)",
        "data/index",
        "x.py",
        "y.py",
    ]
    assert [*differences(one, other, ["data/index/vocabulary", "x.p"])][2:] == ["x.py", "y.py"]
    require_alike("train@a", one, one)
    with pytest.raises(ValueError, match=r"y\.py; bring both"):
        require_alike("train@a", one, other, ["x.py"])
