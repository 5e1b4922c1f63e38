"""DVC's own files, and what another user of the machine may do to them."""

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from multiprocessing import get_context
from pathlib import Path

import pytest

from flows.dvc_files import ask_dvc, dvc_environment
from tests.neighbour import become_neighbour


@pytest.fixture
def reachable() -> Iterator[Path]:
    """A folder that every user may enter, in which one is a DVC project, the current folder."""
    folder = Path(tempfile.mkdtemp(prefix="agent_r1-test-"))
    folder.chmod(0o755)
    (folder / "project" / ".dvc").mkdir(parents=True)
    (folder / "project" / ".dvc" / "config").write_text("[core]\n no_scm = true\n")
    (folder / "project" / "dvc.yaml").write_text("stages: {made: {cmd: echo 1 > made, outs: [made]}}\n")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder / "project")
        patch.setenv("AGENT_R1_LOCKS", str(folder / "locks"))
        patch.delenv("DVC_SITE_CACHE_DIR")
        yield folder
    shutil.rmtree(folder)


def put_another_in_its_place(folder: Path) -> None:
    """Exits with 0 if that is possible. A cache of DVC's with pickles of somebody's would be next."""
    become_neighbour()
    try:
        folder.rename(folder.with_name("moved"))
        folder.mkdir()
    except OSError:
        os._exit(1)
    os._exit(0)


def test_pickles_of_dvc_are_closed_to_other_users(reachable: Path) -> None:
    """Without root the modes are compared alone: no process of another user is there to try."""
    assert ask_dvc("repro").returncode == 0
    command = [sys.executable, "-c", "from dvc.repo import Repo; print(Repo().site_cache_dir)"]
    done = subprocess.run(command, env=dvc_environment(), capture_output=True, text=True, check=True)
    used = Path(done.stdout.strip())
    assert (used / "cache.db").exists() or [*used.rglob("cache.db")]
    if os.getuid() == 0:
        neighbour = get_context("fork").Process(target=put_another_in_its_place, args=(used,))
        neighbour.start()
        neighbour.join()
        assert neighbour.exitcode == 1
    closed = [folder for folder in used.parents if folder.stat().st_mode & 0o077 == 0]
    assert reachable / "locks" / "dvc" in closed
