"""What an update costs as its work grows: `python -m benchmarks.updates [--against CHECKOUT]`.

A model in the shape of the built-in one learns on a CPU from random episodes: more of them, longer ones, and in more
words. Every size has a process of its own; with the checkout of another commit, both take turns.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import resource
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import numpy as np
import torch

from agent_r1.evaluation.comparison import markdown_table
from agent_r1.learn.learner import Learner
from agent_r1.params import SHIPPED, load
from agent_r1.rollout.sampling import Action
from benchmarks import synthetic

ROOT = Path(__file__).parents[1]
SHAPE = 128, 4, 2, 2, 256  # of the built-in model, but for its words; as in synthetic.SHAPES
REPEATS = 3
ROUNDS = 2  # turns of each checkout
# With the environment that the checkout's own stages have.
AS_A_STAGE = """
from flows.stage import prepare_process
prepare_process()
from benchmarks.updates import main
main()
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class Size:
    """The default is that of an iteration of the built-in run."""

    episodes: int = 32
    length: int = 287  # tokens of an episode; two thirds of them were sampled
    words: int = 2048


SIZES = [
    Size(),
    Size(episodes=8 * 32),
    Size(length=8 * 287),
    Size(words=32768),
    Size(words=151552),
]


def measure(size: Size) -> dict[str, float]:
    """The seconds of the fastest of some updates, and the GiB that the process had at most."""
    settings = load(SHIPPED)
    torch.set_num_threads(settings.model.threads)
    work = synthetic.Work(episodes=size.episodes, prompt=size.length // 3, action=size.length - size.length // 3)
    with tempfile.TemporaryDirectory() as folder:
        synthetic.make_model(Path(folder), (*SHAPE, size.words), work.tokens)
        learner = Learner(folder, settings.train.update, settings.model, with_critic=False, seed=0)
    draws = np.random.default_rng(0)
    trajectories = []
    for request in synthetic.random_requests(work, size.words):
        ids = draws.integers(0, size.words, work.action).tolist()
        action = Action.of(ids, [-math.log(size.words)] * work.action, end_ids=())
        trajectories.append(synthetic.trajectory_of(request, action))
    credits_ = [synthetic.credit_of(each, sign=1 - 2 * (index % 2)) for index, each in enumerate(trajectories)]
    update = partial(learner.update, trajectories, credits_, 0)
    seconds = min(synthetic.seconds_of(update, learner.compute.device) for _ in range(REPEATS))
    return {"seconds": seconds, "GiB": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20}


def measured_in(checkout: Path, size: Size) -> dict[str, float]:
    """What `measure` says in a process of its own, with the code of a checkout and as a stage of it."""
    done = subprocess.run(
        [sys.executable, "-c", AS_A_STAGE, "--one", json.dumps(asdict(size))],
        cwd=checkout,
        env={**os.environ, "PYTHONPATH": str(checkout)},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    found: dict[str, float] = json.loads(done.stdout)
    return found


def row(size: Size, checkouts: list[Path]) -> list[str]:
    """A row of the table: what the first checkout takes, and the second beside it."""
    turns = [[measured_in(checkout, size) for checkout in checkouts] for _ in range(ROUNDS)]
    best = [{name: min(turn[at][name] for turn in turns) for name in turns[0][at]} for at in range(len(checkouts))]
    seconds, tokens = best[0]["seconds"], size.episodes * size.length
    cells = [f"{size.episodes} x {size.length}", f"{size.words:,}", f"{seconds:.2f}", f"{tokens / seconds:,.0f}"]
    others = [f"{each:.2f}" for other in best[1:] for each in (other["seconds"] / seconds, other["GiB"])]
    return [*cells, f"{best[0]['GiB']:.2f}", *others]


def main() -> None:
    parser = argparse.ArgumentParser(description="Measures updates of growing size on a CPU.")
    parser.add_argument("--against", type=Path, help="another checkout, which has this script")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.one:
        print(json.dumps(measure(Size(**json.loads(given.one)))))
        return
    checkouts = [ROOT] + ([given.against.resolve()] if given.against else [])
    others = ["the other's seconds to these", "its GiB"] if given.against else []
    header = ["episodes x tokens", "words", "seconds", "tokens/s", "GiB", *others]
    print(markdown_table(header, [row(size, checkouts) for size in SIZES]))


if __name__ == "__main__":
    main()
