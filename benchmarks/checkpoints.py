"""What a checkpoint costs its process, by the size of the model: `python -m benchmarks.checkpoints`.

Models of random weights with AdamW states, in float32 on a CPU, shared by one or two processes.
"""

from __future__ import annotations

import multiprocessing
import re
import tempfile
import threading
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch

from agent_r1.devices.meeting import Place, joined
from agent_r1.devices.sharing import ALONE, Group, Ranks
from agent_r1.learn import checkpoint, optimizers
from agent_r1.learn.checkpoint import Progress
from agent_r1.learn.learner import Learner, Options
from agent_r1.params import SHIPPED, load
from benchmarks.stored import Row, options, show
from benchmarks.synthetic import make_model

GIB = 2**30
TICK_S = 0.002
SIZES = {50: (512, 12, 8, 8, 1408, 26000), 200: (1024, 12, 16, 16, 2816, 45000), 400: (1280, 16, 16, 16, 3584, 60000)}


class Watched:
    """The seconds, the memory and the longest silence of another thread while a block runs."""

    def __enter__(self) -> Watched:
        self.silence, self._over = 0.0, threading.Event()
        Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
        self._held, self._began, self._cpu = _kib("VmRSS"), time.perf_counter(), time.process_time()
        self._thread = threading.Thread(target=self._tick)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.seconds, self.cpu = time.perf_counter() - self._began, time.process_time() - self._cpu
        self.gib = (_kib("VmHWM") - self._held) * 1024 / GIB
        self._over.set()
        self._thread.join()

    def _tick(self) -> None:
        last = time.perf_counter()
        while not self._over.wait(TICK_S):
            now = time.perf_counter()
            self.silence, last = max(self.silence, now - last), now


def _kib(field: str) -> int:
    [found] = re.findall(rf"{field}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    return int(found)


def be(place: Place, model: Path, found: Any) -> None:
    """One rank: loads its part of the model, and takes part in two checkpoints."""
    torch.set_num_threads(1)
    settings = load(SHIPPED)
    with ExitStack() as ends:
        ranks: Ranks = ends.enter_context(joined(place)) if place.size > 1 else ALONE
        options = Options(device=torch.device("cpu"), ranks=ranks)
        learner = Learner(model, settings.train.update, settings.model, with_critic=False, seed=0, options=options)
        optimizer = learner.policy_optimizer
        state = optimizers.blank_state(optimizer)
        for entries in state.values():
            for entry in entries.values():
                entry.fill_(1e-8)  # pages of zeros take no memory
        optimizers.take_state(optimizer, state)
        del state
        for _ in range(2):  # the first finds no pages of files in memory
            with Watched() as saving:
                if ranks.leads:
                    checkpoint.save(model / "checkpoint", learner, Progress(iterations=1, policy_version=1))
                if isinstance(ranks, Group):
                    ranks.dismiss() if ranks.leads else ranks.follow(learner)
        found.put((saving.seconds, saving.cpu, saving.gib, saving.silence))


def measured(size: int, ranks: int) -> Row:
    """The row of a model of so many millions of weights: of all ranks the most."""
    context = multiprocessing.get_context("spawn")
    found = context.Queue()
    with tempfile.TemporaryDirectory(dir=Path.cwd()) as scratch:
        make_model(Path(scratch), SIZES[size], 64, torch.device("cpu"))
        file = f"{scratch}/meeting"
        places = [Place(rank=rank, size=ranks, local_rank=rank, file=file) for rank in range(ranks)]
        processes = [context.Process(target=be, args=(place, Path(scratch), found)) for place in places]
        for process in processes:
            process.start()
        rows = [found.get(timeout=300) for _ in processes]
        for process in processes:
            process.join()
        files = sum(each.stat().st_size for each in Path(scratch, "checkpoint").rglob("*") if each.is_file())
    seconds, cpu, memory, silence = (max(column) for column in zip(*rows, strict=True))
    return {
        "weights": f"{size} million",
        "ranks": str(ranks),
        "checkpoint": f"{files / GIB:.2f} GiB",
        "seconds": f"{seconds:.1f}",
        "CPU seconds": f"{cpu:.1f}",
        "memory beside the learner": f"{memory:.2f} GiB",
        "longest silence": f"{silence:.2f} s",
    }


def main(arguments: Sequence[str] | None = None) -> None:
    parser = options("Measures seconds, memory and silence of a checkpoint.")
    parser.add_argument("--sizes", type=int, nargs="+", choices=SIZES, default=[*SIZES], help="millions of weights")
    asked = parser.parse_args(arguments)
    rows = [measured(size, ranks) for size in asked.sizes for ranks in (1, 2)]
    show("checkpoint_costs", rows, store=asked.store, keys=2)


if __name__ == "__main__":
    main()
