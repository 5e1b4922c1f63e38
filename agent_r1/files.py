"""Files and folders on disk: written whole or not at all, locked, and told apart by the hash of their content.

DVC's md5 beside these hashes is the name of a copy in its cache; `agent_r1.params.fingerprint` is of values, not files.
"""

from __future__ import annotations

import errno
import hashlib
import json
import logging
import os
import re
import shutil
import stat
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path
from shlex import quote
from types import MappingProxyType
from typing import Any

from filelock import FileLock, Timeout

from agent_r1.harmless import harmless, without_password

SUMS = "SHA256SUMS"  # of a folder's files, for `sha256sum -c`
METRICS = "metrics.jsonl"  # of a training, a line per iteration
EVALUATION_HASHES = "hashes.json"  # of an evaluation's folder
REMINDER_S = 300.0  # between two calls of `when_held`
LOOK_S = 0.05  # between two looks at a lock that is held
_ERROR = re.compile(r"^(?!INFO|DEBUG|WARNING)[\w.]+: .*", re.MULTILINE)
_SHOWN = 1000  # characters of it

logger = logging.getLogger(__name__)


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Gives a temporary path that takes the place of `path` once it is whole and on disk; removed on failure."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        yield temporary
        _sync(temporary)
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def remove_unfinished(folder: Path) -> None:
    """Removes the temporary files of `replacing` whose process was killed; nobody may be writing in the folder."""
    for path in folder.rglob(".*.tmp"):
        path.unlink()


def write_text(path: Path, text: str) -> None:
    """Writes a text file, whole or not at all."""
    with replacing(path) as temporary:
        temporary.write_text(text)


def write_json(path: Path, content: Any) -> None:
    """Writes a text file of JSON, whole or not at all."""
    write_text(path, json.dumps(content, indent=2) + "\n")


def read_metrics(folder: Path) -> list[dict[str, float]]:
    """The metrics of every iteration in a training's folder. Raises ValueError for a damaged file."""
    try:
        return [json.loads(line) for line in (folder / METRICS).read_text().splitlines()]
    except ValueError as fault:
        raise ValueError(f"{folder / METRICS} is damaged ({fault}); {bring_back(folder / METRICS)}") from fault


@contextmanager
def replaced_folder(folder: Path, *, lasting: bool = True) -> Iterator[Path]:
    """Gives a hidden path beside `folder`; on success it takes its place, on failure, an interrupt too, it is removed.

    Its content is on disk before the swap if it is `lasting`, so one whole folder exists at any moment. The next call,
    or `clear_leftovers`, clears up after a kill. One process at a time may replace a folder.
    """
    fresh = _beside(folder, "new")
    clear_leftovers(folder)
    fresh.parent.mkdir(parents=True, exist_ok=True)
    try:
        yield fresh
        for path in (*fresh.rglob("*"), fresh) if lasting else ():
            _sync(path)
        if folder.exists():
            folder.rename(_beside(folder, "old"))
        fresh.rename(folder)
        if lasting:
            _sync(folder.parent)
    finally:
        clear_leftovers(folder)


def remove_folder(folder: Path) -> None:
    """Removes a folder, if there is one. It is renamed first, so a kill leaves no part of it under its name."""
    clear_leftovers(folder)
    if folder.exists():
        folder.rename(_beside(folder, "gone"))
        clear_leftovers(folder)


def clear_leftovers(folder: Path) -> None:
    """Cleans up after a kill in `replaced_folder` or `remove_folder`; an old folder without a new one comes back."""
    old = _beside(folder, "old")
    gone = _beside(folder, "gone")
    for leftover in (_beside(folder, "new"), gone):
        shutil.rmtree(leftover, ignore_errors=True)
    if old.exists():
        old.rename(gone if folder.exists() else folder)
        shutil.rmtree(gone, ignore_errors=True)


def move_aside(path: Path, folder: Path) -> Path:
    """Moves a file or folder into another folder, under its name and the time; returns where to."""
    target = folder / f"{path.name}-{datetime.now(UTC):%Y%m%dT%H%M%S.%fZ}"
    target.parent.mkdir(parents=True, exist_ok=True)
    path.rename(target)
    return target


@contextmanager
def locked(path: Path, when_held: Callable[[], None] = lambda: None) -> Iterator[None]:
    """Holds a lock file, in which it notes its process, and waits for it as `locked_some` does."""
    with ExitStack() as holds:
        _hold_one([path], holds, when_held).write_text(str(os.getpid()))
        yield


def trained_alone(folder: Path) -> AbstractContextManager[None]:
    """Holds the lock of a folder that is trained in. Raises BlockingIOError, which passes, if another process does."""
    lock = folder.with_name(f".{folder.name}.lock")

    def refuse() -> None:
        pid = lock.read_text()
        raise BlockingIOError(f"process {pid} trains in {folder}; wait for its end, or `kill {pid}`, and start again")

    return locked(lock, refuse)


@contextmanager
def locked_some(paths: Sequence[Path], count: int, gate: Path, when_held: Callable[[], None]) -> Iterator[list[Path]]:
    """Holds `count` of the lock files, the first free ones, and gives them in their order.

    The process that holds `gate`, a lock file too, takes them up one by one, and the others wait for the gate. So no
    two processes wait for each other, and one that wants many is not passed by others that want few. The kernel frees
    all of them when the process ends, however it ends. While others hold something, `when_held` is called at once and
    every `REMINDER_S`; it may raise.
    """
    locks = list[Path]()
    with ExitStack() as holds:
        with locked(gate, when_held):
            while len(locks) < count:
                locks.append(_hold_one([path for path in paths if path not in locks], holds, when_held))
        yield sorted(locks, key=paths.index)


def _hold_one(paths: Sequence[Path], holds: ExitStack, when_held: Callable[[], None]) -> Path:
    """Waits for the first of some lock files that is free, and holds it for as long as the stack does."""
    for path in paths:
        path.parent.mkdir(parents=True, exist_ok=True)
        with suppress(FileNotFoundError):
            path.chmod(0o600)  # a reader of a lock file can hold it
    locks = {path: FileLock(path, mode=0o600, fallback_to_soft=False) for path in paths}
    reminder = time.monotonic()
    while True:
        for path, lock in locks.items():
            with suppress(Timeout), lockable(path.parent):
                holds.enter_context(lock.acquire(timeout=0))
                return path
        if time.monotonic() >= reminder:
            when_held()
            reminder = time.monotonic() + REMINDER_S
        time.sleep(LOOK_S)


@contextmanager
def lockable(folder: Path) -> Iterator[None]:
    """Raises ValueError in place of the fault of a file system that has no locks, which would stay for ever."""
    try:
        yield
    except OSError as fault:
        if fault.errno not in (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP):
            raise
        raise ValueError(
            f"{folder} is on a file system without locks ({os.strerror(fault.errno)}), where two processes could write "
            "the same files; move the project to a local disk, or where the folder is none of its own, name one there "
            "by AGENT_R1_LOCKS or TMPDIR"
        ) from None


def is_own(path: Path, kind: int, *, closed: int) -> bool:
    """Whether a path is of a kind and of this user, without the `closed` permissions. A link is of another kind."""
    status = path.lstat()
    return stat.S_IFMT(status.st_mode) == kind and status.st_uid == os.getuid() and not status.st_mode & closed


def closed_folder(folder: Path) -> Path:
    """Makes a folder, and all in it, this user's alone; ValueError for a link or another user's folder."""
    with suppress(FileExistsError):
        folder.mkdir(mode=0o700, parents=True)
    if not is_own(folder, stat.S_IFDIR, closed=0):
        remedy = f"`mv {folder} {folder}.aside`, and a new one is made, or have root `chown -R {os.getuid()} {folder}`"
        raise ValueError(f"{folder} is no folder of your own, but a link, a file or another user's; {remedy}")
    if not is_own(folder, stat.S_IFDIR, closed=0o077):
        for path in (folder, *(file for file in folder.rglob("*") if not file.is_symlink())):
            with suppress(FileNotFoundError):  # other processes of this user may be at work here
                path.chmod(stat.S_IMODE(path.stat().st_mode) & ~0o077)
        logger.warning("closed %s to other users of this machine, who could enter it until now", folder)
    return folder


def first_error(log: Path) -> str:
    """The line of a log that says its first error, such as a traceback's last; else its first line, or ""."""
    text = log.read_text(errors="replace").strip() if log.exists() else ""
    match = _ERROR.search(text)
    return without_password(harmless((match[0] if match else text.partition("\n")[0])[:_SHOWN]))


def sha256(path: Path) -> str:
    """The hash of a file's bytes, or of a folder's names and bytes; FileNotFoundError if there is neither.

    The folder's SUMS are not of it. Raises ValueError for a file that is missing or other than they say.
    """
    if not path.is_dir():
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    hashes = _hashes(path)
    for name, digest in read_sums(path):
        if hashes.get(name) != digest:
            raise ValueError(f"{path / name} is missing or not as it was written, by {SUMS}; {bring_back(path / name)}")
    return hashlib.sha256("".join(f"{name} {digest}\n" for name, digest in hashes.items()).encode()).hexdigest()


def bring_back(path: Path) -> str:
    """The remedy for a damaged file that a stage wrote."""
    return f"bring it back (`dvc checkout --force {quote(str(path))}`) or rerun its stage"


def write_sums(folder: Path, known: Mapping[str, str] = MappingProxyType({})) -> None:
    """Writes the hashes of a folder's files into it, by which whoever hashes the folder finds damage.

    Files whose hashes are `known`, by their names in the folder, are not read.
    """
    lines = (f"{digest}  {name}\n" for name, digest in _hashes(folder, known).items())
    (folder / SUMS).write_text("".join(lines))


def _hashes(folder: Path, known: Mapping[str, str] = MappingProxyType({})) -> dict[str, str]:
    members = sorted(member.relative_to(folder) for member in folder.rglob("*") if member.is_file())
    names = [member.as_posix() for member in members]
    return {name: known.get(name) or sha256(folder / name) for name in names if name != SUMS}


def read_sums(folder: Path) -> list[tuple[str, str]]:
    """The name and hash of each file of a folder; none where the hashes are missing."""
    file = folder / SUMS
    lines = file.read_text("utf-8", "replace").removesuffix("\n").split("\n") if file.exists() else []
    return [(name, expected) for expected, _, name in (line.partition("  ") for line in lines)]


def model_hash(model: str) -> str:
    """The hash of a Hugging Face folder, or the commit of a hub id; OSError for neither, or a hub out of reach."""
    if Path(model).is_dir():
        return sha256(Path(model))
    from huggingface_hub import snapshot_download  # takes a while, and only hub ids need it

    try:
        return Path(snapshot_download(model, allow_patterns="config.json")).name
    except (OSError, ValueError) as fault:
        raise OSError(f"{model!r} is no folder, and no model from the hub: {fault}; correct it") from fault


def load_pretrained(kind: Any, model: str | Path, **options: Any) -> Any:
    """Loads an object of a class of transformers from a Hugging Face folder or hub id, whose own code is never run.

    Raises ValueError if it cannot be loaded without that code, and FileNotFoundError if a Path, which is no hub id,
    leads nowhere. Else it raises as `from_pretrained`.
    """
    if isinstance(model, Path) and not model.is_dir():
        raise FileNotFoundError(f"there is no model at {model}; make it (`dvc repro warm_start`)")
    try:
        return kind.from_pretrained(model, trust_remote_code=False, **options)
    except ValueError as fault:
        if "trust_remote_code" not in str(fault):
            raise
        refused = f"{str(model)!r} brings code of its own, and no code from a model's folder is run here"
        raise ValueError(f"{refused}; choose a model that transformers knows") from fault


def _sync(path: Path) -> None:
    """Waits until a file's content, or a folder's list of names, is on disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _beside(folder: Path, kind: str) -> Path:
    return folder.with_name(f".{folder.name}.{kind}")
