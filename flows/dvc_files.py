"""DVC's commands, and its files of data that no stage made."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
import shutil
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import yaml

from agent_r1.files import closed_folder, write_text
from agent_r1.harmless import without_password
from flows.processes import own_folder

_PROCESS = (sys.executable, "-m", "flows.dvc_process")
DVC = (*_PROCESS, "command", "--wait-for-lock")
KEPT = Path(".dvc/tmp/kept")  # dvc.lock and those of sweeps, as the latest stage found them
RUNNING = Path(".dvc/tmp/rwlock")  # the stages that run now, each with its process
LISTING_BYTES = 2**26  # of a folder's listing at most, at 80 and more a file
_MD5 = re.compile("[0-9a-f]{32}")

logger = logging.getLogger(__name__)


def dvc_environment() -> dict[str, str]:
    """The environment for DVC, with a closed folder for its pickles. By itself it takes one that all may write to."""
    return {"DVC_SITE_CACHE_DIR": str(closed_folder(own_folder() / "dvc")), **os.environ}


def ask_dvc(*arguments: str, timeout_s: float | None = None, **environment: str) -> subprocess.CompletedProcess[str]:
    """Runs a command of DVC's to its end, and captures its output.

    If it fails and a record of DVC's is cut off, puts that back and runs the command again. Raises ValueError if there
    is nothing to put back, and subprocess.TimeoutExpired if the command takes longer than `timeout_s`.
    """
    variables = {**dvc_environment(), **environment}
    process = subprocess.run([*DVC, *arguments], env=variables, capture_output=True, text=True, timeout=timeout_s)
    cut_off = _cut_off() if process.returncode else []
    if not cut_off:
        return process
    if failed := complaint(in_dvc("put_back")):
        raise ValueError(failed)
    logger.warning("%s was cut off while DVC wrote it, and is as before", ", ".join(map(str, cut_off)))
    return ask_dvc(*arguments, timeout_s=timeout_s, **environment)


def keep_records() -> None:
    """Copies dvc.lock, and those of sweeps, once DVC has read them: it may be ended while it writes the next ones."""
    for record in _records():
        write_text(KEPT / record, record.read_text())


def put_back() -> None:
    """Puts copies in the place of cut-off records, under DVC's lock; ValueError if there is no whole copy."""
    for path in _cut_off():
        if path == RUNNING:  # DVC would ask the processes anyway
            path.unlink()
        elif _is_whole(KEPT / path):
            write_text(path, (KEPT / path).read_text())
        else:
            remedy = f"`git checkout {path}`, or where git has none remove it: finished work is taken over"
            raise ValueError(f"{path} is cut off, and no whole copy was kept; {remedy}")


def _records() -> list[Path]:
    return [*Path().glob("dvc.lock"), *Path().glob("*/dvc.lock")]


def _cut_off() -> list[Path]:
    running = [RUNNING] if RUNNING.exists() else []
    return [path for path in (*running, *_records()) if not _is_whole(path)]


def _is_whole(record: Path) -> bool:
    with suppress(FileNotFoundError, yaml.YAMLError):
        content = _read(record)
        return isinstance(content, dict) and (record == RUNNING or "stages" in content)
    return False


def _read(record: Path) -> Any:
    """A YAML file, by the reader in C: a sweep's dvc.lock has thousands of lines."""
    return yaml.load(record.read_bytes(), yaml.CSafeLoader)


def entries_of(lock: Path, output: Path) -> dict[str, Any]:
    """The entries of a dvc.lock's stages that make or read an output, by their names; none without such a file."""
    stages = _read(lock)["stages"] if lock.exists() else {}
    return {name: entry for name, entry in stages.items() if f"'{output}'" in str(entry)}


def put_entries(lock: Path, entries: dict[str, Any]) -> None:
    """Puts entries of stages into a dvc.lock."""
    content = _read(lock)
    content["stages"] |= entries
    write_text(lock, yaml.safe_dump(content, sort_keys=False))


def restorable(output: Path) -> bool:
    """Whether DVC's cache holds an output of a stage as it was recorded, so that `dvc checkout` brings it back."""
    records = [_read(file) for file in _records() if _is_whole(file)]
    stages = [stage for record in records for stage in record["stages"].values()]
    outs = [out for stage in stages for out in stage.get("outs", ()) if out["path"] == str(output)]
    return any(_object(_cache(), out["md5"]).exists() for out in outs)


def in_dvc(verb: str, *arguments: str, text: str = "") -> subprocess.CompletedProcess[str]:
    """Runs a verb of `flows.dvc_process` on this clone, with a text for its standard input."""
    return subprocess.run(
        [*_PROCESS, verb, *arguments],
        env=dvc_environment(),
        input=text,
        capture_output=True,
        encoding="utf-8",
        errors="replace",
    )


def run_dvc(*arguments: str) -> str:
    """Runs a command of DVC's; returns its complaint, or ""."""
    return complaint(ask_dvc(*arguments))


def require_dvc(*arguments: str) -> None:
    """Runs a command of DVC's. Raises OSError with its complaint if it fails."""
    if failed := run_dvc(*arguments):
        raise OSError(f"DVC could not {' '.join(arguments)} ({failed})")


def complaint(process: subprocess.CompletedProcess[str]) -> str:
    """The error of a failed command, or else the first line of its output; "" if it did not fail."""
    if not process.returncode:
        return ""
    lines = (process.stderr or process.stdout).strip().splitlines()
    errors = [line.removeprefix("ERROR: ") for line in lines if line.startswith("ERROR: ")]
    return without_password([*errors[-1:], *lines, f"exit code {process.returncode}"][0])


def collect_graph(folder: Path) -> str:
    """Links a folder's graph.yaml to dvc.yaml, the name that DVC's commands look for; returns that path."""
    file = folder / "dvc.yaml"
    if not file.is_symlink() and not file.exists():
        file.symlink_to("graph.yaml")
    return str(file)


def require_listing(md5: str) -> str:
    """Checks the listing of a folder before DVC follows it; returns "", or why there is none.

    Looks in DVC's cache, or else in the default remote, and puts the remote's listing into the cache, where DVC takes
    it from. DVC itself checks neither the hash of a listing nor the names in it, with and without `verify`.

    Raises ValueError if the listing does not fit its hash, or names a path outside its folder.
    """
    cached = _object(_cache(), md5)
    if cached.exists():
        _require_inside(cached.read_bytes(), md5, f"DVC's cache; remove {cached}")
        return ""
    process = in_dvc("read_object", md5, str(LISTING_BYTES))
    if process.returncode:
        return complaint(process)
    remedy = f"DVC's remote; delete files/md5/{md5[:2]}/{md5[2:]} there, and `dvc push` it from a clone that has it"
    _require_inside(process.stdout.encode(), md5, remedy)
    write_text(cached, process.stdout)
    return ""


def link_to_cache(dvc_file: Path) -> None:
    """Puts the folder of a .dvc file beside it, as links into DVC's cache."""
    for file, cached in _places(dvc_file):
        file.parent.mkdir(parents=True, exist_ok=True)
        link(cached, file)


def is_linked(dvc_file: Path) -> bool:
    """Whether the folder of a .dvc file is beside it, as links into DVC's cache."""
    with suppress(FileNotFoundError):
        return dvc_file.exists() and all(file.samefile(cached) for file, cached in _places(dvc_file))
    return False


def _places(dvc_file: Path) -> list[tuple[Path, Path]]:
    """Each file of a .dvc file's folder, with its place in DVC's cache."""
    cache = _cache()
    md5 = recorded_md5(dvc_file)
    listing = _object(cache, md5)
    content = listing.read_bytes()
    _require_inside(content, md5, f"DVC's cache; remove {listing}")
    folder = dvc_file.with_suffix("")
    return [(folder / entry["relpath"], _object(cache, entry["md5"])) for entry in json.loads(content)]


def link(source: str | Path, target: str | Path) -> None:
    """Makes a hard link, or a copy if the disk has none: both files are replaced and never written into."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)


def _cache() -> Path:
    return Path(ask_dvc("cache", "dir").stdout.strip())


def _object(cache: Path, md5: str) -> Path:
    return cache / "files" / "md5" / md5[:2] / md5[2:]


def _require_inside(listing: bytes, md5: str, where: str) -> None:
    if hashlib.md5(listing, usedforsecurity=False).hexdigest() != md5.removesuffix(".dir"):
        raise ValueError(f"the listing {md5} is another one than its name says, in {where}")
    try:
        entries = json.loads(listing)
    except (ValueError, RecursionError):
        raise ValueError(f"the listing {md5} is no JSON, in {where}") from None
    outside = [entry for entry in entries if not _is_inside(entry)] if isinstance(entries, list) else [entries]
    if outside:
        raise ValueError(f"the listing {md5} names {outside[0]!r:.200}, no file of its folder, in {where}")


def _is_inside(entry: Any) -> bool:
    """Whether an entry of a listing is a hash and a name below the folder, and nothing else."""
    match entry:
        case {"md5": str(md5), "relpath": str(name), **further}:
            return not further and bool(_MD5.fullmatch(md5)) and not {"", ".", ".."} & set(name.split("/"))
    return False


def recorded_md5(dvc_file: Path) -> str:
    """DVC's hash of the data of a file such as models/X.dvc; "" if there is no such file."""
    if not dvc_file.exists():
        return ""
    [out] = _read(dvc_file)["outs"]
    return str(out["md5"])
