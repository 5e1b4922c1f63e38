"""What an evaluation was measured on, as hashes: only equal ones may stand in one table without a word."""

from __future__ import annotations

import hashlib
from pathlib import Path


def sha256(path: Path) -> str:
    """Of a file its bytes; of a folder the names and bytes of all files in it, whatever order the disk keeps them in.

    Raises:
        FileNotFoundError: there is no such file or folder.
    """
    if not path.is_dir():
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    members = sorted(member.relative_to(path) for member in path.rglob("*") if member.is_file())
    lines = [f"{member.as_posix()} {sha256(path / member)}\n" for member in members]
    return hashlib.sha256("".join(lines).encode()).hexdigest()
