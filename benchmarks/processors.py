"""What other processors would compute: `python -m benchmarks.processors [--kinds ...] [--store]`, on Linux and x86-64.

Trains a little, with vLLM, as this processor and as others that have fewer instruction sets or another maker: CPUID
faults in those processes, and a handler answers (processors.c, for a C compiler). Each does so as it is shipped and
with `model.portable`. Equal hashes are equal bits: of the policy, and of all that was sampled and scored on the way.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from agent_r1.surroundings import PORTABLE, machine
from benchmarks.stored import Row, options, show

KINDS = {
    "itself": machine().partition(" of ")[2],
    "intel-516": "Intel's, AVX-512 without AMX",
    "intel-2": "Intel's, AVX2",
    "amd-516": "AMD's, AVX-512",
    "amd-2": "AMD's, AVX2",
}
SMALL = {
    "engine": {"kind": "vllm"},
    "warm_start": {"demonstrations": 300, "naive_rag_demonstrations": 30},
    "train": {"rollout": {"questions": 24}},
}
# As `flows.stage` sets them for a stage.
PLAIN = {"OMP_NUM_THREADS": "2", "OMP_WAIT_POLICY": "passive"}


def compiled(folder: Path) -> Path:
    """The library that makes CPUID fault."""
    made = folder / "processors.so"
    source = Path(__file__).with_suffix(".c")
    subprocess.run(["cc", "-O1", "-shared", "-fPIC", "-o", made, source, "-ldl"], check=True)
    return made


def trained(kind: str, library: Path, *, portable: bool) -> Row:
    """A row about a training on a kind of processor."""
    variables = {**os.environ, **PLAIN, **(PORTABLE if portable else {})}
    if kind != "itself":
        variables |= {"LD_PRELOAD": str(library), "PRETENDED_PROCESSOR": kind}
    command = [sys.executable, "-m", "benchmarks.small_training", "8", "2", json.dumps(SMALL)]
    process = subprocess.Popen(command, env=variables, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    output = process.stdout.read() if process.stdout else ""
    _, status, used = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise RuntimeError(f"{kind}: the training ended with exit code {process.returncode}")
    result = json.loads(output.splitlines()[-1])
    scores = json.dumps([result["returns"], result["canary"]])
    return {
        "processor": KINDS[kind],
        "model.portable": str(portable).lower(),
        "warm start": result["started"][:8],
        "returns": hashlib.sha256(scores.encode()).hexdigest()[:8],
        "policy": result["policy"][:8],
        "core-seconds": f"{used.ru_utime + used.ru_stime:.0f}",
    }


def measure(kinds: Sequence[str], portables: Sequence[bool], library: Path) -> list[Row]:
    return [trained(kind, library, portable=portable) for portable in portables for kind in kinds]


def main() -> None:
    parser: argparse.ArgumentParser = options("Compares the bits that processors compute.")
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=[*KINDS])
    parser.add_argument("--portable", nargs="+", type=int, choices=(0, 1), default=[0, 1])
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        rows = measure(given.kinds, [*map(bool, given.portable)], compiled(Path(folder)))
    show("processors", rows, store=given.store, keys=2)


if __name__ == "__main__":
    main()
