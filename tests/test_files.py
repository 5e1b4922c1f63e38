"""Files are replaced whole or not at all and locked for one process; hashes see names and bytes, and nothing else."""

import errno
import fcntl
import os
import subprocess
from pathlib import Path

import pytest
from huggingface_hub import constants

from agent_r1 import files
from agent_r1.files import (
    SUMS,
    closed_folder,
    first_error,
    locked,
    model_hash,
    read_metrics,
    replaced_folder,
    sha256,
    write_sums,
    write_text,
)
from tests.cases import cases
from tests.neighbour import UID, holding, needs_root, open_folder


def folder(path: Path, content: dict[str, str]) -> Path:
    for name, text in content.items():
        (path / name).parent.mkdir(parents=True, exist_ok=True)
        (path / name).write_text(text)
    return path


def test_a_folder_with_sums_is_refused_by_the_name_of_what_changed(tmp_path: Path) -> None:
    """The sums change no hash, and `sha256sum -c` takes them."""
    stored = folder(tmp_path / "of stage", {"a": "abc", "b/c": "d"})
    plain = sha256(stored)
    write_sums(stored)
    assert sha256(stored) == plain
    subprocess.run(["sha256sum", "--quiet", "-c", SUMS], cwd=stored, check=True)
    (stored / "new").touch()
    assert sha256(stored) != plain, "a file that was not there is another content, and no damage"
    (stored / "b/c").write_text("e")
    with pytest.raises(ValueError, match=r"b/c is missing or .* .`dvc checkout --force '\S+/of stage/b/c'`\) or rerun"):
        sha256(stored)
    (stored / "b/c").unlink()
    with pytest.raises(ValueError, match="b/c is missing or not as it was written"):
        sha256(stored)


def test_metrics_that_are_cut_name_their_file(tmp_path: Path) -> None:
    (tmp_path / files.METRICS).write_text('{"a": 1}\n{"a": ')
    with pytest.raises(ValueError, match=r"metrics.jsonl is damaged .*`dvc checkout --force \S+metrics.jsonl`"):
        read_metrics(tmp_path)


def test_a_file_is_its_bytes_and_a_folder_its_names_and_bytes(tmp_path: Path) -> None:
    write_text(tmp_path / "file", "abc")  # FIPS 180-4's example
    assert sha256(tmp_path / "file") == "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"
    one = folder(tmp_path / "one", {"a": "x", "below/b": "y"})
    same = folder(tmp_path / "same", {"below/b": "y", "a": "x"})
    others = [{"a": "x", "below/b": "z"}, {"a": "x", "b": "y"}, {"a": "x"}, {"a": "y", "below/b": "x"}]
    assert sha256(one) == sha256(same)
    hashes = {sha256(folder(tmp_path / str(i), other)) for i, other in enumerate(others)}
    assert len(hashes | {sha256(one)}) == 5


def test_a_model_is_its_folder_or_the_commit_of_its_hub_id(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The hub's own cache, and no network."""
    local = folder(tmp_path / "local", {"config.json": "{}"})
    assert model_hash(str(local)) == sha256(local)
    commit = "0123456789abcdef0123456789abcdef01234567"
    cached = {"refs/main": commit, f"snapshots/{commit}/config.json": "{}"}
    folder(tmp_path / "hub" / "models--own--encoder", cached)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert model_hash("own/encoder") == commit
    for missing in ("own/reader", "models/own/encoder"):
        with pytest.raises(OSError, match=rf"'{missing}' is no folder, and no model from the hub: .*; correct it"):
            model_hash(missing)


def test_folder_is_on_disk_before_the_old_one_goes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """File by file, then the folder's names, then the swap, then the names beside it."""
    done: list[str] = []
    sync, rename = files._sync, Path.rename
    monkeypatch.setattr(files, "_sync", lambda path: (done.append(f"sync {path.name}"), sync(path)))
    monkeypatch.setattr(Path, "rename", lambda path, to: (done.append(f"{path.name} -> {to.name}"), rename(path, to)))
    old = folder(tmp_path / "it", {"a": "old"})
    with replaced_folder(old) as fresh:
        folder(fresh, {"a": "new"})
    swap = ["it -> .it.old", ".it.new -> it", f"sync {tmp_path.name}", ".it.old -> .it.gone"]
    assert done == ["sync a", "sync .it.new", *swap]
    assert (old / "a").read_text() == "new"
    assert [path.name for path in tmp_path.iterdir()] == ["it"]


def test_a_lock_is_held_by_one_process_at_a_time(tmp_path: Path) -> None:
    """Another process is another open file to the kernel; it is told who waits, may refuse, and gets its turn after."""

    def refuse() -> None:
        raise ValueError("held")

    child = 0
    with locked(tmp_path / "below/lock"):
        child = os.fork()
        if not child:
            try:
                with locked(tmp_path / "below/lock", refuse):
                    os._exit(0)
            except ValueError:
                os._exit(3)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 3
    with locked(tmp_path / "below/lock", refuse):
        write_text(tmp_path / "turn", "after")


@pytest.mark.parametrize("lack", [errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP])
def test_file_system_without_locks_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lack: int) -> None:
    """An OSError would say that the same may work later."""

    def flock(*_: object) -> None:
        raise OSError(lack, os.strerror(lack))

    monkeypatch.setattr(fcntl, "flock", flock)
    with pytest.raises(ValueError, match=rf"{tmp_path} is on a file system without locks .*AGENT_R1_LOCKS"):
        locked(tmp_path / "lock").__enter__()


@cases("log, said")
def test_the_first_error_of_a_log_is_one_harmless_line(tmp_path: Path, log: str, said: str) -> None:
    assert first_error(tmp_path / "none") == ""
    (tmp_path / "log").write_text(log)
    assert first_error(tmp_path / "log") == said


def test_no_other_user_can_hold_a_lock_of_before() -> None:
    """A descriptor for reading is enough to hold a lock."""
    with open_folder() as project:
        lock = project / "outputs/train/.ppo.lock"
        lock.parent.mkdir(parents=True)
        lock.touch(0o644)
        with locked(lock):
            pass
        assert (lock.stat().st_mode & 0o777, lock.parent.stat().st_mode & 0o777) == (0o600, 0o755)
        needs_root()
        with holding([lock]) as held:
            assert held == 0


def test_a_folder_is_closed_to_others_with_all_that_it_holds(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    there = folder(tmp_path / "there", {"a": "x", "below/b": "y", "below/program": "z"})
    (there / "below/program").chmod(0o755)
    outside = folder(tmp_path / "outside", {"c": "x"})
    (there / "link").symlink_to(outside)
    before = outside.stat().st_mode
    for _ in range(2):
        assert closed_folder(there) == there
    modes = {path.name: path.stat().st_mode & 0o777 for path in (there, *there.rglob("*")) if not path.is_symlink()}
    assert modes == {"there": 0o700, "a": 0o600, "below": 0o700, "b": 0o600, "program": 0o700}
    assert outside.stat().st_mode == before
    assert len(caplog.records) == 1
    assert closed_folder(tmp_path / "new/one").stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize("kind", ["link", "file", "foreign"])
def test_a_folder_that_is_not_ones_own_is_refused_with_a_remedy_that_works(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "kept"
    match kind:
        case "link":
            path.symlink_to(folder(tmp_path / "elsewhere", {"a": "x"}))
        case "file":
            path.touch()
        case _:
            needs_root()
            path.mkdir()
            os.chown(path, UID, UID)
    with pytest.raises(ValueError, match="no folder of your own") as refusal:
        closed_folder(path)
    subprocess.run(str(refusal.value).split("`")[1], shell=True, check=True)
    assert closed_folder(path).stat().st_mode & 0o777 == 0o700
