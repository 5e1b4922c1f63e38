"""DVC's commands, and the files in which it keeps what a stage did not make."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import yaml

DVC = (sys.executable, "-m", "dvc", "--wait-for-lock")


def ask_dvc(*arguments: str, timeout_s: float | None = None, **environment: str) -> subprocess.CompletedProcess[str]:
    """Runs a command of DVC's to its end, with what it says.

    Raises subprocess.TimeoutExpired if it took longer than `timeout_s`.
    """
    return subprocess.run(
        [*DVC, *arguments],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=False,
        timeout=timeout_s,
    )


def run_dvc(*arguments: str) -> str:
    """Runs a command of DVC's; "" or its complaint."""
    return complaint(ask_dvc(*arguments))


def complaint(done: subprocess.CompletedProcess[str]) -> str:
    """The error of a command that failed, or else the first line of what it said; "" of one that did not fail."""
    if not done.returncode:
        return ""
    said = (done.stderr or done.stdout).strip().splitlines()
    errors = [line.removeprefix("ERROR: ") for line in said if line.startswith("ERROR: ")]
    return [*errors[-1:], *said, f"exit code {done.returncode}"][0]


def kept(dvc_file: Path) -> str:
    """DVC's hash of what a file such as models/X.dvc stands for; "" where there is no such file."""
    if not dvc_file.exists():
        return ""
    [out] = yaml.safe_load(dvc_file.read_text())["outs"]
    return str(out["md5"])
