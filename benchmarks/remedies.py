"""What is turned after memory ran out, in an unfinished run: `python -m benchmarks.remedies [--store]`, from the root.

The small graph of `benchmarks.kills` trains with vLLM, and is killed in its second iteration. In a copy per remedy the
setting changes and the same command runs again, `dvc repro`: it should go on from the checkpoint, say so, move nothing
aside, and make no other stage again. Exits with 1 where one is not taken up.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import yaml

from agent_r1.params.sections import override
from benchmarks.kills import environment, lay_out
from benchmarks.stored import Row, options, show

RUN = "ppo"
BASE = {"train": {"iterations": 3, "checkpoint": {"every": 1}}}
# The name under which a run's record has the setting -> its change.
REMEDIES: dict[str, dict[str, Any]] = {
    "train.update.max_tokens_per_microbatch": {"train": {"update": {"max_tokens_per_microbatch": 1024}}},
    "model.packing": {"model": {"packing": True}},
    "model.gradient_checkpointing": {"model": {"gradient_checkpointing": True}},
    "engine.gpu_memory_utilization": {"engine": {"vllm": {"gpu_memory_utilization": 0.2}}},
    "engine.max_num_seqs": {"engine": {"vllm": {"max_num_seqs": 8}}},
    "engine.replicas": {"engine": {"vllm": {"replicas": 2}}},
    "engine.kind": {"engine": {"kind": "transformers"}},
    "engine.sleep": {"engine": {"vllm": {"sleep": True}}},
    "learner.processes": {"learner": {"processes": 2}},
    "learner.optimizer_offload": {"learner": {"optimizer_offload": True}},
    "env.order": {"env": {"order": "arrival"}},
    "train.iterations": {"train": {"iterations": 4}},
    "train.validation.every": {"train": {"validation": {"every": 2, "questions": 6}}},
}


def change(folder: Path, changes: dict[str, Any]) -> None:
    file = folder / "params.yaml"
    file.write_text(yaml.safe_dump(override(yaml.safe_load(file.read_text()), changes)))


def repro(folder: Path, target: str) -> subprocess.Popen[bytes]:
    with (folder / "log").open("wb") as log:
        command = [sys.executable, "-m", "dvc", "repro", target]
        own = environment(folder)
        return subprocess.Popen(command, cwd=folder, env=own, stdout=log, stderr=log, start_new_session=True)


def begin(folder: Path) -> None:
    """Leaves a run that was killed in its second iteration."""
    lay_out(folder, "vllm", 1)
    change(folder, BASE)
    process, second = repro(folder, f"train@{RUN}"), folder / f"outputs/train/{RUN}/trajectories/001.parquet"
    while not second.exists():
        if process.poll() is not None:
            sys.exit((folder / "log").read_text())
        time.sleep(0.01)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    time.sleep(5)  # the engine sees that its parent has gone


def tried(begun: Path, folder: Path, name: str) -> Row:
    """A remedy in a copy of the run: whether it is taken up, what the log says, and the stages made before it."""
    shutil.copytree(begun, folder, symlinks=True, ignore=shutil.ignore_patterns("agent_r1_engine_*"))
    change(folder, REMEDIES[name])
    code = repro(folder, f"train@{RUN}").wait()
    said, record = (folder / "log").read_text(), folder / f"outputs/train/{RUN}/checkpoint/progress.json"
    line = re.search(r"settings change after \d+ finished iterations: .*?(?=;)", said)
    stages = [stage for stage in re.findall(r"Running stage '(.*)'", said) if not stage.startswith("train")]
    changes = json.loads(record.read_text()).get("changes", []) if record.exists() else []
    went_on = not code and not (folder / "outputs/aside").exists() and any(f" {name} " in each for each in changes)
    if not went_on:
        print(said[-3000:], file=sys.stderr)
    return {
        "setting": f"`{name}`",
        "taken up": "yes" if went_on else "no",
        "the log": line[0] if line else "nothing",
        "made again before it": ", ".join(stages) or "nothing",
    }


def main() -> None:
    parser = options("Turns the remedies for memory in an unfinished run, through DVC.")
    parser.add_argument("--only", nargs="+", choices=REMEDIES, default=[*REMEDIES], help="of the settings")
    asked, rows = parser.parse_args(), list[Row]()
    with tempfile.TemporaryDirectory() as scratch:
        begun = Path(scratch) / "begun"
        begin(begun)
        for name in asked.only:
            folder = Path(scratch) / name
            rows.append(tried(begun, folder, name))
            print(rows[-1], flush=True)
            shutil.rmtree(folder)
    show("remedies", rows, store=asked.store)
    taken = sum(row["taken up"] == "yes" for row in rows)
    print(f"{taken} of {len(rows)} are taken up")
    sys.exit(taken < len(rows))


if __name__ == "__main__":
    main()
