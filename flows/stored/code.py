"""The code that a stage depends on, by the list in dvc.yaml."""

from __future__ import annotations

from pathlib import Path

import yaml

from agent_r1.hashes import sha256

ROOT = Path(__file__).parents[2]  # of the code; the project in the current folder may be another


def code_of(stage: str) -> dict[str, str]:
    """Path -> sha256 of every file of code that a foreach stage of dvc.yaml depends on; data is left out.

    Raises:
        FileNotFoundError: the code is installed without its dvc.yaml.
    """
    graph = ROOT / "dvc.yaml"
    if not graph.exists():
        raise FileNotFoundError(f"{graph} does not exist; install the project from its clone with `pip install -e .`")
    listed = yaml.safe_load(graph.read_text())["stages"][stage]["do"]["deps"]
    rooms = [ROOT / path for path in listed if path.startswith(("agent_r1/", "flows/"))]
    files = [file for room in rooms for file in (room.rglob("*") if room.is_dir() else [room]) if file.is_file()]
    return {str(file.relative_to(ROOT)): sha256(file) for file in files if "__pycache__" not in file.parts}
