"""What the measurements on a CUDA device share: parts of which each may fail, and a machine with little installed."""

from __future__ import annotations

import faulthandler
import gc
import inspect
import json
import logging
import os
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import groupby
from pathlib import Path
from typing import Any

import psutil
import torch
import transformers
from torch.nn.attention import varlen

from agent_r1.learn.adapter import count_parameters
from agent_r1.learn.memory import GIB, Demand
from agent_r1.records import Trajectory
from benchmarks.stored import table
from benchmarks.synthetic import seconds_of

Row = dict[str, Any]

logger = logging.getLogger(__name__)


def tried(
    parts: Mapping[str, Callable[[], Row]], file: Path, about: Row | None = None, ends: float = 1e12, limit: float = 0.0
) -> list[Row]:
    """What every part that begins before `ends` measured, or why there is nothing; the file grows with each.

    A part that takes longer than the `limit` ends the process, as some faults do. Called again, this goes on behind it:
    parts that the file names are not measured anew.
    """
    file.parent.mkdir(parents=True, exist_ok=True)
    rows: list[Row] = json.loads(file.read_text())["parts"] if file.exists() else []

    def keep(row: Row) -> None:
        file.write_text(json.dumps({**machine(), **(about or {}), "parts": [*rows, row]}, indent=2) + "\n")

    for name, part in parts.items():
        if any(row["part"] == name for row in rows):
            continue
        keep({"part": name, "left out": "it hung, or its process was killed"})
        if limit:
            faulthandler.dump_traceback_later(limit, exit=True)
        began = time.monotonic()
        found = _tried(part) if began < ends else {"left out": "out of time"}
        faulthandler.cancel_dump_traceback_later()
        row = {"part": name, **found, "seconds": time.monotonic() - began}
        logger.info("%s", row)
        keep(row)
        rows.append(row)
        if "AcceleratorError" in found.get("left out", ""):
            raise SystemExit("CUDA is of no more use to this process")
    return rows


def attended(command: Sequence[str], file: Path, budget: float) -> list[Row]:
    """The rows of a command that calls `tried`, started anew for as long as each start gets a part further."""
    file.unlink(missing_ok=True)
    ends, known = time.monotonic() + budget, -1
    with tempfile.TemporaryDirectory() as scratch:
        while True:
            own = {**os.environ, "TMPDIR": scratch}
            ended = subprocess.run([*command, "--budget", str(max(0.0, ends - time.monotonic()))], env=own).returncode
            if not file.exists():
                raise SystemExit("nothing was measured; the reason stands above")
            rows: list[Row] = json.loads(file.read_text())["parts"]
            if not ended or len(rows) <= known:
                return rows
            known = len(rows)


def _tried(part: Callable[[], Row]) -> Row:
    try:
        return part()
    except Exception as fault:  # whatever it is, the others go on
        logger.warning("left out", exc_info=True)
        return {"left out": f"{type(fault).__name__}: {(str(fault).splitlines() or [''])[0]}"}
    finally:
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


def machine() -> Row:
    """The device and the versions that a measurement is of."""
    name = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    return {
        "device": name,
        "cores": len(os.sched_getaffinity(0)),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }


def show_rows(rows: Sequence[Row]) -> str:
    """Markdown tables: parts that measured the same, one after the other, share one."""
    tables = []
    for _, alike in groupby(rows, lambda row: [*row]):
        same = [*alike]
        tables.append(table([{name: cell(value) for name, value in row.items()} for row in same]))
    return "\n\n".join(tables)


def cell(value: object) -> str:
    """Numbers with three digits."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return str(value)
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def accept_grouped_heads() -> None:
    """Has `varlen_attn` take `enable_gqa` before torch 2.13, where it groups heads unasked and has no word for it."""
    kernel = varlen.varlen_attn
    if "enable_gqa" not in inspect.signature(kernel).parameters:
        varlen.varlen_attn = lambda *given, enable_gqa=False, **named: kernel(*given, **named)


@contextmanager
def counted_kernel() -> Iterator[list[int]]:
    """The tokens of every call of the kernel that packed attention is computed by."""
    calls, kernel = list[int](), varlen.varlen_attn

    def counted(query: Any, *others: Any, **named: Any) -> Any:
        calls.append(len(query))
        return kernel(query, *others, **named)

    varlen.varlen_attn = counted
    try:
        yield calls
    finally:
        varlen.varlen_attn = kernel


@contextmanager
def host_peak() -> Iterator[list[float]]:
    """The most GiB that this process has of the machine's memory while the block lasts, beyond what it began with."""
    own, found, over = psutil.Process(), [0.0], threading.Event()
    before = own.memory_info().rss

    def watch() -> None:
        while not over.wait(0.02):
            found[0] = max(found[0], (own.memory_info().rss - before) / GIB)

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        yield found
    finally:
        over.set()
        watcher.join()


def emptied(device: torch.device) -> None:
    """Begins to count the device's memory anew, from a cache without what is free."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)


def held_gib(device: torch.device) -> float:
    return torch.cuda.memory_allocated(device) / GIB if device.type == "cuda" else 0.0


def peak_gib(device: torch.device) -> float:
    return torch.cuda.max_memory_allocated(device) / GIB if device.type == "cuda" else 0.0


def rate_of_products(device: torch.device, dtype: torch.dtype, size: int) -> float:
    """FLOP/s of matrix products in the dtype, the best of five runs."""
    left, right = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
    seconds = min(seconds_of(lambda: left @ right, device) for _ in range(5))
    return 2 * size**3 / seconds


def flops_of(demand: Demand, trajectories: Sequence[Trajectory], *, again: bool = False) -> float:
    """The work of an update: layers and attention of all tokens, and the output of those in the loss. Padding is not.

    With `again`, the forward pass that gradient checkpointing repeats counts too.
    """
    config: Any = demand.model
    count = count_parameters(config, None)
    layers = count.backbone - config.vocab_size * config.hidden_size
    forward = 0.0
    for each in trajectories:
        length, acted = len(each.token_ids), int(each.action_mask.sum())
        attended = 2 * config.num_hidden_layers * config.hidden_size * length**2  # causal: half of twice two products
        forward += 2 * layers * length + attended + 2 * config.vocab_size * config.hidden_size * acted
    repeated = again and demand.gradient_checkpointing
    passes = 2 if demand.adapter else 3  # forward, what flows back, and gradients of the weights that train
    return forward * (passes + repeated)
