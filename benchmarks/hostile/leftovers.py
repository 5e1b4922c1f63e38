"""What another user may leave where the project looks for its own: pipes, links, sockets, files and folders."""

from __future__ import annotations

import os
import shutil
import stat
import tempfile
from contextlib import chdir
from pathlib import Path
from random import Random
from threading import Event, Thread
from unittest.mock import patch

from agent_r1.rollout.vllm_engine import claim_scratch
from benchmarks.hostile.kind import Kind, Refused, require
from benchmarks.hostile.mutations import odd_text
from flows.dvc_files import dvc_environment
from flows.processes import LOCKS, PASSWORD
from flows.stage import kept_password

SITE_CACHE = "DVC_SITE_CACHE_DIR"
_MODES = (0o600, 0o644, 0o666, 0o700, 0o755, 0o777)


class Leftovers(Kind):
    """In the temporary folder, or in place of locks or password: no pipe is opened, no link is followed."""

    name, tried = "leftovers", 300

    def make(self, rng: Random) -> Path:
        theirs = self.folder / "theirs"
        shutil.rmtree(self.folder, ignore_errors=True)
        theirs.mkdir(parents=True)
        name = "".join(char for char in odd_text(rng)[:40] if char not in "/\0").encode(errors="replace").decode()
        path = self.folder / rng.choice(("locks", PASSWORD, f"agent_r1_engine_{name}"))
        path.parent.mkdir(parents=True, exist_ok=True)
        match rng.randrange(6):
            case 0:
                path.symlink_to(rng.choice((theirs, "nowhere")))
                return path
            case 1:
                os.mkfifo(path)
            case 2:
                path.write_text("theirs")
            case 3:
                os.mknod(path, stat.S_IFSOCK)
            case _:
                path.mkdir()
        path.chmod(rng.choice(_MODES))
        if os.getuid() == 0 and rng.random() < 0.5:
            os.chown(path, 65534, 65534)
        return path

    def judge(self, made: Path) -> None:
        found, theirs = made.lstat(), self.folder / "theirs"
        mode = found.st_mode if found.st_uid == os.getuid() else found.st_mode | 0o777
        opened, over = list[None](), Event()

        def write() -> None:  # whoever opens a pipe goes on, and is noticed
            while not over.is_set():
                os.close(os.open(made, os.O_WRONLY))
                opened.append(None)

        if stat.S_ISFIFO(mode):
            Thread(target=write, daemon=True).start()
        try:
            self._look(made, mode)
        finally:
            if stat.S_ISFIFO(mode):
                over.wait(0.05)
                require(not opened, "a pipe was opened")
                over.set()
                os.close(os.open(made, os.O_RDONLY | os.O_NONBLOCK))
            require(theirs.stat().st_mode & 0o777 == 0o755 and not [*theirs.iterdir()], "a link was followed")

    def names(self, made: Path) -> tuple[str, ...]:
        return (str(made),)

    def _look(self, path: Path, mode: int) -> None:
        """Has the project look at a path; raises Refused if it leaves alone what is there."""
        if path.name == "locks":
            with patch.dict(os.environ, {LOCKS: str(path), SITE_CACHE: ""}):
                del os.environ[SITE_CACHE]
                used = Path(dvc_environment()[SITE_CACHE])
            require(stat.S_ISDIR(mode) and not mode & 0o022, "locks where others may write")
            require(not used.stat().st_mode & 0o077, "DVC's cache where others may write")
            return
        with chdir(self.folder), patch.object(tempfile, "tempdir", str(self.folder)):
            folder, descriptor = claim_scratch()
            os.close(descriptor)
            folder.rmdir()
            known = kept_password()
        closed = not mode & 0o077
        left = stat.S_ISDIR(mode) and closed and path.name != PASSWORD.name
        require(os.path.lexists(path) != left, "another folder was removed than one that was left")
        require(not known or (stat.S_ISREG(mode) and closed), "a password that others may know")
        if not left and not known:
            raise Refused(str(path))
