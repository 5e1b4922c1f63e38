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


def model_hash(model: str) -> str:
    """Of a Hugging Face folder its content, of a hub id the commit that is loaded under this name.

    Raises:
        OSError: there is no such folder or hub id, or the hub cannot be reached and none of it was loaded before.
    """
    if Path(model).is_dir():
        return sha256(Path(model))
    from huggingface_hub import snapshot_download  # takes a while, and only hub ids need it

    try:
        return Path(snapshot_download(model, allow_patterns="config.json")).name
    except (OSError, ValueError) as fault:
        raise OSError(f"{model!r} is no folder, and no model from the hub: {fault}; correct it") from fault
