"""What an edit makes DVC run again, asked of DVC itself: `python -m benchmarks.reruns [--store]`, from the root.

In a scratch copy every output is a stand-in that DVC takes for what the stages wrote. One edit at a time is made there,
and `dvc status` says which stages it makes stale. Prints the table of docs/extending.md.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from functools import reduce
from pathlib import Path

import yaml

from benchmarks.stored import Row, options, show

LIBRARY = (
    "data/prepare search/bm25 training/warm_start learn/losses rollout/episodes evaluation/scores evaluation/plots "
    "inspection/viewer"
)
PARAMETERS = (
    "{prepare.seed: 1, search.bm25.k1: 1.0, warm_start.steps: 1000, env.max_steps: 4, train.credit.lam: 0.95, "
    "runs.ppo: {seed: 1}, model.threads: 1, evaluate.questions: 100, operate.retries: 0}"
)


def dvc(folder: Path, *arguments: str) -> str:
    command = [sys.executable, "-m", "dvc", *arguments]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=True).stdout


def copy_project(folder: Path) -> None:
    """The files that git does not ignore, as they are, as a project of DVC's own that has run nothing."""
    listing = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    for name in subprocess.run(listing, capture_output=True, text=True, check=True).stdout.splitlines():
        if Path(name).exists() and not name.startswith("ablations/") and not name.endswith((".lock", ".dvc")):
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(name, folder / name, follow_symlinks=False)
    dvc(folder, "config", "core.no_scm", "true")


def stand_in(folder: Path) -> None:
    """Puts there what DVC takes for the stages' outputs."""
    for name in set(re.findall('"(.+?)"', dvc(folder, "dag", "--outs", "--dot"))):
        file = folder / name if Path(name).suffix else folder / name / "stand-in"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(name)
    dvc(folder, "commit", "--force")


def edits(folder: Path) -> Iterator[tuple[str, Path, str]]:
    """What is edited, where, and the file's new text."""
    for name in (f"agent_r1/{name}.py" for name in LIBRARY.split()):
        yield f"`{name}`, a comment", folder / name, (folder / name).read_text() + "# edited\n"
    for key, value in yaml.safe_load(PARAMETERS).items():
        content = yaml.safe_load((folder / "params.yaml").read_text())
        *path, last = key.split(".")
        reduce(dict.__getitem__, path, content)[last] = value
        yield f"`{key}`", folder / "params.yaml", yaml.safe_dump(content)


def main() -> None:
    parser = options("Asks DVC what an edit makes it run again.")
    store, rows = parser.parse_args().store, list[Row]()
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        copy_project(folder)
        stand_in(folder)
        for what, file, text in edits(folder):
            before = file.read_text()
            file.write_text(text)
            stale = [name.partition("@")[0] for name in json.loads(dvc(folder, "status", "--json"))]
            file.write_text(before)
            rows.append({"what is edited": what, "what runs again": ", ".join(dict.fromkeys(stale)) or "nothing"})
    show("reruns", rows, store=store)


if __name__ == "__main__":
    main()
