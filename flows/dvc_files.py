"""What DVC's own files say: which stage made what of what, in the workspace and in any commit."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

WORKSPACE = ""  # in place of a commit
LOCKS = ("dvc.lock", "ablations/dvc.lock")
CACHE = Path(".dvc/cache/files/md5")


@dataclass(frozen=True, kw_only=True, slots=True)
class Made:
    """An output as a stage made it once."""

    commit: str  # whose dvc.lock says so; WORKSPACE for the one on disk
    stage: str
    path: str
    md5: str  # DVC's hash of the output
    inputs: dict[str, str]  # path -> md5 of what it was made of, code included


def history(path: str) -> Iterator[Made]:
    """Every version of an output that dvc.lock knows, the workspace's first and then from the latest commit back."""
    for lock in LOCKS:
        for commit in (WORKSPACE, *_commits(lock)):
            if made := made_in(commit, path, lock):
                yield made


def made_in(commit: str, path: str, lock: str = LOCKS[0]) -> Made | None:
    """The output as of a commit; None where its dvc.lock does not know it."""
    for name, stage in _stages(commit, lock).items():
        for out in stage.get("outs", []):
            if out["path"] == path:
                inputs = {each["path"]: each["md5"] for each in stage.get("deps", []) if "md5" in each}
                return Made(commit=commit, stage=name, path=path, md5=out["md5"], inputs=inputs)
    return None


def kept(dvc_file: Path) -> str:
    """DVC's hash of what a file such as models/X.dvc stands for; "" where there is no such file."""
    if not dvc_file.exists():
        return ""
    [out] = yaml.safe_load(dvc_file.read_text())["outs"]
    return str(out["md5"])


def members(md5: str) -> dict[str, str]:
    """Path -> md5 of the files of a folder that DVC has cached; empty where the cache has no such folder."""
    listing = CACHE / md5[:2] / md5[2:]
    if not listing.exists():
        return {}
    return {entry["relpath"]: entry["md5"] for entry in json.loads(listing.read_text())}


def commit_of(revision: str) -> str | None:
    """The commit that a git revision names; None where there is none."""
    found = _git("rev-parse", "--verify", "--quiet", "--end-of-options", f"{revision}^{{commit}}")
    return found.strip() or None


def run_dvc(*arguments: str) -> str:
    """Runs a command of DVC's; "" or its error, or else the last line of what it says, when it fails."""
    command = [sys.executable, "-m", "dvc", "--wait-for-lock", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if not done.returncode:
        return ""
    said = (done.stderr or done.stdout).strip().splitlines()
    errors = [line.removeprefix("ERROR: ") for line in said if line.startswith("ERROR: ")]
    return [f"exit code {done.returncode}", *said, *errors][-1]


def _stages(commit: str, lock: str) -> dict[str, Any]:
    if commit == WORKSPACE:
        text = Path(lock).read_text() if Path(lock).exists() else ""
    else:
        text = _git("show", f"{commit}:{lock}")
    stages: dict[str, Any] = (yaml.safe_load(text) or {}).get("stages", {})
    return stages


def _commits(lock: str) -> list[str]:
    return _git("log", "--format=%H", "--", lock).split()


def _git(*arguments: str) -> str:
    """What git says; "" outside of a repository, without git, or where it refuses."""
    try:
        done = subprocess.run(["git", *arguments], capture_output=True, text=True, check=False)
    except FileNotFoundError:
        return ""
    return done.stdout if done.returncode == 0 else ""
