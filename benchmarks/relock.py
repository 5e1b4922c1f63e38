"""Takes code that changes no bit of an output over into docs/report/dvc.lock: `make relock`, from the root.

The small graph of `benchmarks.kills`, with every run and baseline of `make repro`, runs on the commit of that record
and on the working tree. If all outputs are equal but for their seconds, and every statement that differs was run, DVC
hashes the new code, and dvc.lock.made_by beside it names the commit whose code made the outputs. The clone's own
dvc.lock is taken over with it, if it was of the same code. Otherwise it prints what differs or was not run, leaves both
as they are, and exits with 1.
"""

from __future__ import annotations

import io
import json
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import yaml
from pyarrow import parquet

from agent_r1.params.sections import flatten
from benchmarks.kills import SMALL, left_alone, make_small
from benchmarks.reruns import copy_project, dvc
from benchmarks.statements import Statement, changed

RECORD, MADE_BY = Path("docs/report/dvc.lock"), Path("docs/report/dvc.lock.made_by")
LOCK, PARAMS = "dvc.lock", "params.yaml"
CODE = ("agent_r1/", "flows/")
# The steps of `dvc commit`, which itself refuses where an output is not there: such an output keeps its hash here.
COMMIT = """
from dvc.repo import Repo, lock_repo
repo = Repo()
with lock_repo(repo):
    for stage in repo.stage.collect("dvc.yaml"):
        stage.save(allow_missing=True, run_cache=False)
        stage.dump(update_pipeline=False)
"""
TIMED = {"tool/waiting_share", "cost/peak_gib", "cost/gpu_peak_gib"}  # beside names that end with _s
# Files and folders that say seconds, hash a file that does, or name the code, the parameters or the run.
ORIGIN = {"aside", "compared", "costs.md", "mlflow_run_id", "progress.json", "register", "SHA256SUMS", "start.json"}


def git(*arguments: str) -> bytes:
    return subprocess.run(["git", *arguments], capture_output=True, check=True).stdout


def check_out(commit: str, folder: Path) -> None:
    """Makes a project of DVC's own of a commit."""
    with tarfile.open(fileobj=io.BytesIO(git("archive", commit))) as files:
        files.extractall(folder, filter="data")
    dvc(folder, "config", "core.no_scm", "true")


def lock_of(folder: Path, lock: str) -> str:
    """The dvc.lock of a folder's code, with the outputs of an earlier one. Raises ValueError with DVC's complaint."""
    (folder / LOCK).write_text(lock)
    done = subprocess.run([sys.executable, "-c", COMMIT], cwd=folder, capture_output=True, text=True, check=False)
    if done.returncode:
        raise ValueError(f"DVC cannot hash the code of dvc.yaml's stages: {done.stderr.strip().splitlines()[-1]}")
    made_of = (folder / LOCK).read_text()
    (folder / LOCK).unlink()
    return made_of


def stages_of(lock: str) -> dict[str, Any]:
    return dict(yaml.safe_load(lock)["stages"])


def data_of(lock: str) -> dict[str, Any]:
    """The outputs of every stage, and the data that it read."""
    return {
        name: (stage.get("outs"), [dep for dep in stage.get("deps", []) if not dep["path"].startswith(CODE)])
        for name, stage in stages_of(lock).items()
    }


def code_of(folder: Path, lock: str) -> dict[str, str]:
    """File -> text of the code that stages can execute."""
    paths = {folder / dep["path"] for stage in stages_of(lock).values() for dep in stage.get("deps", [])}
    files = {file for path in paths for file in (path, *path.rglob("*")) if file.is_file()}
    named = {str(file.relative_to(folder)): file for file in sorted(files) if "__pycache__" not in file.parts}
    return {name: file.read_text() for name, file in named.items() if name.startswith(CODE)}


def require_same_data(old: str, new: str, before: dict[str, Any], after: dict[str, Any]) -> None:
    """Checks that two texts of dvc.lock differ in code alone. Raises ValueError with the stages or values.

    `before` and `after` are the two params.yaml. A parameter that came or went is left to the small graph.
    """
    were, are = data_of(old), data_of(new)
    if others := sorted(name for name in were.keys() | are.keys() if were.get(name) != are.get(name)):
        raise ValueError(f"{', '.join(others)}: other outputs or data than in dvc.lock; `make repro` makes them")
    read = {key for lock in (old, new) for stage in stages_of(lock).values() for key in parameters_of(stage)}
    flat, other = flatten(before), flatten(after)
    if values := sorted(key for key in read & flat.keys() & other.keys() if flat[key] != other[key]):
        raise ValueError(f"{', '.join(values)}: other values in params.yaml; `make repro` makes their outputs")


def parameters_of(stage: dict[str, Any]) -> Iterator[str]:
    for values in stage.get("params", {}).values():
        yield from flatten(values)


def record(folder: Path, statements: Iterable[Statement]) -> None:
    """Makes a project small, and has its processes record which lines of some statements they run."""
    small = {key: value for key, value in yaml.safe_load(SMALL).items() if not key.startswith("repro_")}
    make_small(folder, yaml.safe_dump(small))
    asked: dict[str, list[int]] = {}
    for each in statements:
        asked.setdefault(each.file, []).extend(each.lines)
    (folder / "asked.json").write_text(json.dumps(asked))
    shutil.copy(Path(__file__).with_name("recorder.py"), folder / "sitecustomize.py")


def not_run(folder: Path, statements: Iterable[Statement], tree: str) -> Iterator[str]:
    """The statements of which a line was not run, with the tree that they are in."""
    ran = {*(folder / "ran").read_text().splitlines()} if (folder / "ran").exists() else set()
    for each in statements:
        if missing := sorted(line for line in each.lines if f"{each.file}:{line}" not in ran):
            yield f"{each.file}:{missing[0]} of {tree} was not run: {each.text.splitlines()[-1]:.80}"


def outputs(folder: Path) -> dict[str, Any]:
    """What the graph wrote, but for seconds and for what names the code, the parameters or the run."""
    places = yaml.safe_load((folder / PARAMS).read_text())["places"]
    files = {path for place in (places["data"], places["outputs"]) for path in (folder / place).rglob("*")}
    named = {str(path.relative_to(folder)): path for path in sorted(files) if path.is_file() and path.name[0] != "."}
    return {name: content(path) for name, path in named.items() if not ORIGIN & {*name.split("/")}}


def content(path: Path) -> Any:
    if path.suffix == ".parquet":
        return without_seconds(parquet.read_table(path).to_pylist())
    if path.suffix == ".jsonl":
        return [without_seconds(json.loads(line)) for line in path.read_text().splitlines()]
    budgets = re.compile(rb"\n## Budgets\n.*?(?=\n## )", re.DOTALL)  # seconds are among them
    return budgets.sub(b"", path.read_bytes()) if path.suffix == ".md" else path.read_bytes()


def without_seconds(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: without_seconds(each) for key, each in value.items() if key not in TIMED and key[-2:] != "_s"}
    return [without_seconds(each) for each in value] if isinstance(value, list) else value


def maker(commit: str, lock: str) -> str:
    """The commit whose code made the outputs of dvc.lock: that of an earlier relock, if they are still its outputs."""
    if MADE_BY.exists():
        earlier = MADE_BY.read_text().strip()
        with suppress(subprocess.CalledProcessError):  # a commit that is not in this clone
            if data_of(git("show", f"{earlier}:{RECORD}").decode()) == data_of(lock):
                return earlier
    return commit


def relock(scratch: Path) -> list[str]:
    """Takes the code over, or returns why not. Raises ValueError if nothing can be compared."""
    written = ("log", "-1", "--follow", "--diff-filter=AM", "--format=%H", "--name-only", "--", str(RECORD))
    commit, path = git(*written).decode().split()  # where it was not moved alone
    before, after, old = scratch / "before", scratch / "after", RECORD.read_text()
    if git("show", f"{commit}:{path}").decode() != old:
        raise ValueError(f"{RECORD} is not as it was committed: commit it, or `git checkout HEAD {RECORD}`")
    check_out(commit, before)
    copy_project(after)
    if lock_of(before, old) != old:
        raise ValueError(f"{RECORD} of {commit:.10} is not of that commit's code; `make repro` makes one")
    new = lock_of(after, old)
    taken = {RECORD: new}
    own = Path(LOCK).read_text() if Path(LOCK).exists() else ""
    if own and lock_of(before, own) == own:
        taken[Path(LOCK)] = lock_of(after, own)
    require_same_data(old, new, *(yaml.safe_load((each / PARAMS).read_text()) for each in (before, after)))
    gone, came = changed(code_of(before, old), code_of(after, new))
    for folder, statements in ((before, gone), (after, came)):
        record(folder, statements)
        print(f"{folder.name}: {left_alone(folder, '--no-run-cache'):.0f} s", flush=True)
    ours, theirs = outputs(after), outputs(before)
    faults = [f"{name} differs" for name in sorted(ours.keys() | theirs.keys()) if ours.get(name) != theirs.get(name)]
    faults += [*not_run(before, gone, f"{commit:.10}"), *not_run(after, came, "the working tree")]
    if not faults:
        for file, text in taken.items():
            file.write_text(text)
        MADE_BY.write_text(f"{maker(commit, old)}\n")
    return faults


def main() -> None:
    with tempfile.TemporaryDirectory() as scratch:
        try:
            faults = relock(Path(scratch).resolve())
        except ValueError as fault:
            faults = [str(fault)]
    if faults:
        sys.exit("\n".join([*faults, f"{RECORD} stays as it is"]))
    print(f"{RECORD} is of this code: commit it with the code and {MADE_BY}")


if __name__ == "__main__":
    main()
