"""Which code and which data made a run."""

from __future__ import annotations

import subprocess
from pathlib import Path

import yaml

from agent_r1.tracking.store import project_root


def provenance(dataset: str, sweep: str | None = None) -> dict[str, str]:
    """The tags dataset, git_commit, data_hash ("" where it is not known), and sweep for a member of one.

    The commit is followed by `+changes` where tracked files differ from it, besides what DVC writes itself.
    """
    found = {"dataset": dataset, "git_commit": _git_commit(), "data_hash": _data_hash(project_root() / "dvc.lock")}
    return {**found, "sweep": sweep} if sweep else found


def _git_commit() -> str:
    commit = _git("rev-parse", "HEAD")
    return (
        f"{commit}+changes"
        if _git("status", "--porcelain", "--untracked-files=no", "--", ".", ":!*dvc.lock", ":!*.dvc")
        else commit
    )


def _git(*arguments: str) -> str:
    """What git says; "" without git or outside a repository."""
    try:
        return subprocess.run(["git", *arguments], cwd=project_root(), capture_output=True, text=True).stdout.strip()
    except FileNotFoundError:
        return ""


def _data_hash(lock: Path) -> str:
    """DVC's hash of the prepared data: the md5 of the stage `prepare`'s outputs, joined."""
    if not lock.exists():
        return ""
    stages = yaml.safe_load(lock.read_text()).get("stages", {})
    return "+".join(out["md5"] for out in stages.get("prepare", {}).get("outs", []))
