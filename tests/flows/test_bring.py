"""Outputs that another clone made: brought here by hashes that are checked, and told apart by what they are made of."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from flows.dvc_files import ask_dvc, require_dvc
from flows.graph import bring, described, out_of_date
from tests.cases import graph
from tests.fixtures import WriteParams

STAGES = ("prepare", "train@a")
Hashes = dict[str, str]


@pytest.fixture(scope="module")
def pushed(
    tmp_path_factory: pytest.TempPathFactory, write_params: WriteParams, lay_dvc: Callable[..., None]
) -> tuple[Path, Hashes, str]:
    """A remote with the outputs of two stages, and a clone, `here`, that made the first alone.

    And what the clone that made both has: the outputs' hashes, and its dvc.lock.
    """
    folder = tmp_path_factory.mktemp("clones")
    clone = folder / "there"
    clone.mkdir()
    (clone / "dvc.yaml").write_text(graph("brought"))
    (clone / "source.txt").write_text("1\n")
    write_params(clone, {})
    lay_dvc(clone, "../../storage")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(clone)
        require_dvc("repro", "--quiet", "prepare")
        shutil.copytree(clone, folder / "here")
        require_dvc("repro", "--quiet", "train@a")
        require_dvc("push", *STAGES)
        hashes = {path: md5 for stage in described(*STAGES).values() for path, md5 in stage.outs.items()}
        return folder, hashes, Path("dvc.lock").read_text()


@pytest.fixture
def hashes(pushed: tuple[Path, Hashes, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Hashes:
    for name in ("here", "storage"):
        shutil.copytree(pushed[0] / name, tmp_path / name)
    monkeypatch.chdir(tmp_path / "here")
    return pushed[1]


def content() -> dict[str, bytes]:
    """Of all files above this process's clone but DVC's own."""
    files = (path for path in sorted(Path("..").rglob("*")) if path.is_file() and ".dvc/" not in str(path))
    return {str(path): path.read_bytes() for path in files}


def test_brought_outputs_are_up_to_date_once_committed(hashes: Hashes, pushed: tuple[Path, Hashes, str]) -> None:
    shutil.rmtree(".dvc/cache")
    Path("prepared.txt").unlink()
    content_before = Path("dvc.lock").read_bytes()
    bring(described(*STAGES), hashes)
    assert Path("prepared.txt").read_text() == Path("trained/a/policy").read_text() == "1\n"
    assert Path("dvc.lock").read_bytes() == content_before
    require_dvc("commit", "--force", "train@a")
    assert Path("dvc.lock").read_text() == pushed[2]
    assert not out_of_date(*STAGES)
    output = ask_dvc("repro", "train@a").stdout
    assert "didn't change" in output
    assert "Running" not in output
    Path("../storage").rename("../away")
    bring(described(*STAGES), hashes)  # what is in its place is not asked for


@pytest.mark.parametrize("md5", [None, 5, "../../../../etc/passwd", f"{'0' * 32}.dir\n", "\x1b[2J" * 2**20])
def test_malformed_hash_is_refused(hashes: Hashes, md5: object) -> None:
    content_before = content()
    with pytest.raises(ValueError, match=r"trained/a comes with no hash of DVC's but .*delete its flow run") as refused:
        bring(described("train@a"), {**hashes, "trained/a": md5, "../a": "0" * 32})
    assert "\x1b" not in str(refused.value)
    assert content() == content_before


@pytest.mark.parametrize("fault", ["lost", "changed", "in the way"])
def test_output_that_cannot_be_brought_is_named_and_dvc_lock_stays(hashes: Hashes, fault: str) -> None:
    """The remote has no such output, or has other bytes under its hash, or somebody made it here."""
    shutil.rmtree(".dvc/cache")
    if fault == "lost":
        hashes = {"trained/a": f"{'0' * 32}.dir"}
    elif fault == "changed":
        md5 = hashes["prepared.txt"]
        policy = Path("../storage/files/md5") / md5[:2] / md5[2:]
        policy.chmod(0o644)
        policy.write_text("2\n")
    else:
        Path("trained/a").mkdir(parents=True)
        Path("trained/a/policy").write_text("of an own training")
    content_before = content()
    with pytest.raises(OSError, match=r"trained/a could not be brought here from DVC's remote"):
        bring(described("train@a"), hashes)
    assert content() == content_before
