"""The evidence of a recipe: `python -m benchmarks.evidence --model FOLDER --data FOLDER`, from the root.

Beside the recipe stand longer warm starts, floors that are taught the same rows, warm starts on other rows, and runs
that change one thing. Each is a project in recipes/evidence. On one GPU many stages are under way
at the same time, with the transformers engine; on a CPU one. `--minutes` ends what is not done then. Prints a table of
exact match on 500 questions of dev rows, and writes it beside the projects.
"""

from __future__ import annotations

import argparse
import gzip
import json
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from shutil import copytree
from typing import Any

import torch

from agent_r1.evaluation.scores import WITH_EXAMPLES
from agent_r1.files import write_text
from benchmarks.stored import Row, table
from flows.project import begin_project

ROOT, FOLDER = Path.cwd(), Path("recipes/evidence")
RAW, ROWS = Path("data/raw/2wikimultihopqa"), "prepare.files.2wikimultihopqa"
QUESTIONS = 500
SEEDS = (0, 1, 2)
YES_NO = ("yes", "no")
CLOSED_BOOK = RAW / "closed_book.jsonl"
FEWER_NO, WITHOUT_YES_NO = (RAW / f"{name}.json.gz" for name in ("fewer_no", "without_yes_no"))
# Projects beside the recipe's own: what is set, and the baseline that is asked.
PROJECTS: dict[str, tuple[dict[str, str], str]] = {
    "longer": ({"warm_start.steps": "480"}, "base_tool_call"),
    "much_longer": ({"warm_start.steps": "1632"}, "base_tool_call"),
    "quotes": ({"warm_start.quotes": "true"}, "base_tool_call"),
    "fewer_no": ({f"{ROWS}.train.file": str(FEWER_NO)}, "base_tool_call"),
    "naive_rag": (
        {"warm_start.demonstrations": "0", "warm_start.naive_rag_demonstrations": "384", "warm_start.steps": "288"},
        "naive_rag",
    ),
    "closed_book": (
        {
            "env.tools": "{search: null, calculator: {}}",  # a question needs a tool; one action leaves no use of it
            "env.max_steps": "1",
            "warm_start.demonstrations": "0",
            "warm_start.conversations": str(CLOSED_BOOK),
            "warm_start.steps": "288",
        },
        "base_tool_call",
    ),
}
BASELINES = ("base_tool_call", "as_shipped", "gold_passages")
RUNS = ("ppo", "ppo_no_advantage_mask")  # with one seed
SMALL = {"warm_start.steps": "2", "train.iterations": "1", "evaluate.questions": "4"}

logger = logging.getLogger(__name__)


@dataclass
class Stages:
    """Commands that run until the time is over."""

    ends: float  # of time.monotonic
    processes: set[int] = field(default_factory=set)

    def run(self, project: str, *words: str) -> bool:
        """Whether a command of a project ends well; its output goes to a log beside the project."""
        log = FOLDER / "logs" / f"{project}-{'-'.join(word.strip('-') for word in words)}.txt"
        locks = FOLDER / "locks" / log.stem  # of the accelerator, which these stages share
        for folder in (log.parent, locks):
            folder.mkdir(parents=True, exist_ok=True)
        environment = os.environ | {"PYTHONPATH": str(ROOT), "AGENT_R1_LOCKS": str(locks.absolute())}
        if time.monotonic() > self.ends:
            return False
        with log.open("a") as output:
            began = time.monotonic()
            process = subprocess.Popen(
                [sys.executable, "-m", "flows", *words],
                cwd=FOLDER / project,
                env=environment,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )
            self.processes.add(process.pid)
            code = process.wait()
            self.processes.discard(process.pid)
        logger.info("%s: %s ended with %d after %.0f s", project, " ".join(words), code, time.monotonic() - began)
        return code == 0

    def end(self) -> None:
        """Ends what is under way."""
        for process in list(self.processes):
            os.killpg(process, signal.SIGTERM)


def write_rows() -> None:
    """Training rows with as many "no" as "yes", and without either; questions and answers as conversations."""
    [file] = RAW.glob("train.*")
    rows = json.loads(gzip.decompress(file.read_bytes()))
    answers = [row["answer"].lower() for row in rows]
    too_many = max(0, answers.count("no") - answers.count("yes"))
    no = [at for at, answer in enumerate(answers) if answer == "no"]
    left_out = set(no[:too_many])
    fewer = [row for at, row in enumerate(rows) if at not in left_out]
    FEWER_NO.write_bytes(gzip.compress(json.dumps(fewer).encode()))
    open_ones = [row for row in rows if row["answer"].lower() not in YES_NO]
    WITHOUT_YES_NO.write_bytes(gzip.compress(json.dumps(open_ones).encode()))
    write_text(CLOSED_BOOK, "".join(f"{json.dumps(_from_memory(row))}\n" for row in rows))


def _from_memory(row: dict[str, Any]) -> dict[str, Any]:
    answer = f"<answer> {row['answer']} </answer>"
    return {"messages": [{"role": "user", "content": row["question"]}, {"role": "assistant", "content": answer}]}


def make_projects(model: str, small: bool) -> None:
    """Lays out every project, with the same dev questions."""
    shared = {
        "model.path": model,
        "model.dtype": "float32",
        f"{ROWS}.train.file": str(RAW / "train.*"),
        f"{ROWS}.test": f"{{file: {RAW}/dev.*, questions: {QUESTIONS}}}",
    }
    if torch.cuda.is_available():
        shared |= {
            "engine.kind": "transformers",
            "engine.transformers.batch_size": "384",
            "train.checkpoint.every": "8",
        }
    without = {f"{ROWS}.train.file": str(WITHOUT_YES_NO)}
    projects = {"recipe": {}, "without_yes_no": without, **{name: own for name, (own, _) in PROJECTS.items()}}
    for name, own in projects.items():
        assignments = shared | own | (SMALL if small else {})
        if not (FOLDER / name).exists():
            begin_project(FOLDER / name, "smollm2", [f"{key}={value}" for key, value in assignments.items()])
            (FOLDER / name / RAW).symlink_to(RAW.absolute())


def plan(stages: Stages, levers: Sequence[str]) -> list[Callable[[], object]]:
    """What is done in this order; what starts from the recipe's warm start waits for it."""
    taught = threading.Event()

    def warm_start() -> None:
        if all(stages.run("recipe", stage) for stage in ("prepare", "index", "warm_start")):
            taught.set()

    def project(name: str, baseline: str) -> None:
        if all(stages.run(name, stage) for stage in ("prepare", "index", "warm_start")):
            stages.run(name, "evaluate", "--baseline", baseline)

    def baseline(name: str) -> None:
        if _comes(taught, stages):
            stages.run("recipe", "evaluate", "--baseline", name)

    def with_examples() -> None:
        if _comes(taught, stages):
            stages.run("recipe", "new", "examples", RAW.name)
        baseline(WITH_EXAMPLES)

    def train(run: str, seed: int = 0, project: str = "recipe") -> None:
        chosen = ("--run", run, "--seed", str(seed))
        if _comes(taught, stages) and stages.run(project, "train", *chosen):
            stages.run(project, "evaluate", *chosen)

    def without_yes_no() -> None:
        if _comes(taught, stages) and all(stages.run("without_yes_no", stage) for stage in ("prepare", "index")):
            warm_starts = [FOLDER / name / "outputs/warm_start" for name in ("recipe", "without_yes_no")]
            copytree(*warm_starts, dirs_exist_ok=True)
            train("grpo", project="without_yes_no")

    return [
        warm_start,
        *(partial(train, "grpo", seed) for seed in SEEDS),
        *(partial(train, run) for run in RUNS),
        *(partial(project, name, asked) for name, (_, asked) in PROJECTS.items()),
        *(partial(baseline, name) for name in BASELINES),
        with_examples,
        without_yes_no,
        *(partial(train, lever) for lever in levers),
    ]


def _comes(event: threading.Event, stages: Stages) -> bool:
    return event.wait(max(0.0, stages.ends - time.monotonic()))


def scores() -> list[Row]:
    """A row per agent that was asked, by project."""
    rows = []
    for file in sorted(FOLDER.glob("*/outputs/evaluate/*/scores.json")):
        found = json.loads(file.read_text())
        seconds = json.loads((file.parent / "metrics.jsonl").read_text())
        rows.append(
            {
                "project": file.parents[3].name,
                "agent": file.parent.name,
                "sampled": f"{found['success']:.3f}",
                "greedily": f"{found['greedily']:.3f}",
                "seconds": f"{sum(value for name, value in seconds.items() if name.endswith('_s')):.0f}",
            }
        )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description="Runs a recipe beside its floors, longer warm starts and levers.")
    parser.add_argument("--model", type=Path, required=True, help="a Hugging Face folder")
    parser.add_argument("--data", type=Path, required=True, help="a folder with 2WikiMultihopQA's rows and a corpus")
    parser.add_argument("--minutes", type=float, default=60 * 24 * 7)
    parser.add_argument("--side-by-side", type=int, default=12 if torch.cuda.is_available() else 1)
    parser.add_argument("--levers", nargs="*", default=[], help="runs of overlays/smollm2.yaml")
    parser.add_argument("--small", action="store_true", help="a few steps of each, to see that all of it runs")
    chosen = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s", datefmt="%H:%M:%S")
    RAW.mkdir(parents=True, exist_ok=True)
    for file in chosen.data.absolute().iterdir():
        if not (RAW / file.name.replace(".subset", "")).exists():
            (RAW / file.name.replace(".subset", "")).symlink_to(file)
    write_rows()
    stages = Stages(time.monotonic() + 60 * chosen.minutes)
    make_projects(str(chosen.model.absolute()), chosen.small)
    timer = threading.Timer(60 * chosen.minutes, stages.end)
    timer.start()
    tasks = plan(stages, chosen.levers)
    with ThreadPoolExecutor(chosen.side_by_side) as pool:
        for done in [pool.submit(task) for task in tasks]:
            done.result()
    timer.cancel()
    print(table(scores()))
    write_text(FOLDER / "scores.md", table(scores()) + "\n")


if __name__ == "__main__":
    main()
