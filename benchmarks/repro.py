"""What the first minutes of a newcomer take: `python -m benchmarks.repro [--store] [--pip] [--into FOLDER]`.

On a machine left alone: clones the last commit into a temporary folder, or one that stays, installs there, with uv
where that is there, and makes everything twice.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
import time
from pathlib import Path

from benchmarks.stored import ROOT, Row, options, show


def measured(what: str, folder: Path, *command: str) -> Row:
    """How long a command takes, and how long the processor. Raises RuntimeError if it fails."""
    started = time.perf_counter()
    process = subprocess.Popen(command, cwd=folder)
    _, status, used = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)  # for it is waited for here
    if process.returncode:
        raise RuntimeError(f"{' '.join(command)} ended with exit code {process.returncode}")
    return {
        "what": what,
        "wall": duration(time.perf_counter() - started),
        "processor": duration(used.ru_utime + used.ru_stime),
    }


def duration(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 60 else f"{seconds // 60:.0f}:{seconds % 60:02.0f} min"


def main() -> None:
    parser = options("Measures installation and `make repro` in a fresh clone.")
    parser.add_argument("--pip", action="store_true", help="install with pip, though uv is there")
    parser.add_argument("--into", type=Path, help="a folder that is not there yet, where the clone stays")
    given = parser.parse_args()
    by_uv = shutil.which("uv") is not None and not given.pip
    with tempfile.TemporaryDirectory() as scratch:
        clone = given.into or Path(scratch) / "clone"
        subprocess.run(["git", "clone", "--quiet", ROOT, clone], check=True)
        install = ["make", ".venv/.installed", *([] if by_uv else ["UV="])]
        rows = [
            measured(f"installation with {'uv' if by_uv else 'pip'}", clone, *install),
            measured("`make repro`", clone, "make", "repro"),
            measured("`make repro` again", clone, "make", "repro"),
        ]
    show("repro", rows, store=given.store)


if __name__ == "__main__":
    main()
