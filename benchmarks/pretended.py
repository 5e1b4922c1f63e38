"""Walks without a GPU what runs on CUDA alone: `python -m benchmarks.pretended`, or with MODULE ARGUMENTS that module.

Tensors say cuda:0 and compute on the CPU, see `pretended_tensors`. A C++ compiler makes the device guard, without which
autograd takes no tensor of CUDA.
"""

from __future__ import annotations

import ctypes
import runpy
import shlex
import subprocess
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path

GUARD = Path(__file__).with_suffix(".cpp")
WALK = (
    "benchmarks.cuda --runs 1 --words 512 --out build/pretended "
    "--parts learner attention supervised checkpoint probe sampler"
)


def load_guard() -> None:
    """Compiles the guard and loads it, before torch is imported, which looks for it then alone."""
    spec = find_spec("torch")
    if "torch" in sys.modules or spec is None or spec.origin is None:
        raise RuntimeError("torch has to be installed, and not yet imported")
    root = Path(spec.origin).parent
    with tempfile.TemporaryDirectory() as folder:
        made = f"{folder}/guard.so"
        command = ["c++", "-std=c++20", "-shared", "-fPIC", f"-I{root}/include", str(GUARD), "-o", made]
        subprocess.run([*command, f"-L{root}/lib", "-lc10", "-ltorch_cpu"], check=True)
        ctypes.CDLL(str(root / "lib" / "libtorch_cpu.so"), mode=ctypes.RTLD_GLOBAL)
        ctypes.CDLL(made)


def main() -> None:
    load_guard()
    from benchmarks.pretended_tensors import begin  # imports torch

    begin()
    sys.argv = sys.argv[1:] or shlex.split(WALK)
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
