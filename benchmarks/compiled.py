"""What `model.compile` saves of an update: `python -m benchmarks.compiled [--store]`, with a C++ compiler.

The models and contexts of benchmarks.prefixes, padded and with what they share computed once, each also compiled. All
take turns in one process, and the least CPU time of each counts. The first compiled update, which compiles, stands
apart: with an empty folder of compiled code, and with one that another process filled.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import torch

from agent_r1.learn.learner import Learner
from agent_r1.learn.model import SHARED
from benchmarks import synthetic
from benchmarks.prefixes import SETTINGS, Setting, episodes, learner_of
from benchmarks.stored import options, show

KINDS: dict[str, dict[str, bool]] = {
    "padded": {},
    "padded, compiled": {"compile": True},
    "shared": {"packing": True},
    "shared, compiled": {"packing": True, "compile": True},
}
FOLDER = "TORCHINDUCTOR_CACHE_DIR"  # of compiled code


def cpu_s() -> float:
    """CPU seconds of this process and of the compilers that it called."""
    return sum(os.times()[:4])


def first_update(setting: Setting) -> float:
    """CPU seconds of the first update that is compiled, in a process of its own."""
    command = [sys.executable, "-m", "benchmarks.compiled", "--first", setting.name]
    return float(subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout.split()[-1])


def updated(learner: Learner, setting: Setting) -> float:
    trajectories, credits_ = episodes(setting)
    start = cpu_s()
    learner.update(trajectories, credits_, 0)
    return cpu_s() - start


class Modes:
    """A learner that goes from kind to kind: several would need the memory of several."""

    def __init__(self, learner: Learner) -> None:
        """`learner` shares and compiles."""
        self._learner = learner
        self._compiled = {layer: layer.forward for layer in learner.policy.get_decoder().layers}

    def enter(self, kind: str) -> Learner:
        """The learner, of a kind from now on."""
        changes, policy = KINDS[kind], self._learner.policy
        policy.set_attn_implementation(SHARED if "packing" in changes else "sdpa")
        self._learner.compute = self._learner.compute.of(policy)
        for layer, forward in self._compiled.items():
            vars(layer).pop("forward", None)
            if "compile" in changes:
                layer.forward = forward
        return self._learner


def alone(setting: Setting) -> None:
    """Prints the CPU seconds of a first update."""
    with model_of(setting) as folder:
        print(updated(learner_of(folder, **KINDS["shared, compiled"]), setting))


def model_of(setting: Setting) -> tempfile.TemporaryDirectory[str]:
    """A folder with the model of a setting."""
    folder = tempfile.TemporaryDirectory()
    tokens = max(len(row.token_ids) for row in episodes(setting)[0])
    synthetic.make_model(Path(folder.name), setting.shape, tokens)
    return folder


def measured(setting: Setting, rounds: int) -> dict[str, str]:
    """A row: tokens a CPU second of each kind, and the CPU seconds of first updates."""
    with tempfile.TemporaryDirectory() as scratch:
        os.environ[FOLDER] = scratch
        first, later = first_update(setting), first_update(setting)
        with model_of(setting) as folder:
            modes = Modes(learner_of(folder, packing=True, compile=True))
            for kind in KINDS:
                if "compile" in KINDS[kind]:
                    updated(modes.enter(kind), setting)  # which compiles
            turns = [{kind: updated(modes.enter(kind), setting) for kind in KINDS} for _ in range(rounds)]
    seconds = {kind: min(turn[kind] for turn in turns) for kind in KINDS}
    tokens = sum(len(row.token_ids) for row in episodes(setting)[0])
    return {
        "contexts": setting.name,
        **{f"{kind} [tokens/CPU s]": f"{tokens / seconds[kind]:,.0f}" for kind in KINDS},
        "shared, over padded": f"{seconds['padded'] / seconds['shared']:.2f}",
        "compiled, over not": f"{seconds['shared'] / seconds['shared, compiled']:.2f}",
        "both": f"{seconds['padded'] / seconds['shared, compiled']:.2f}",
        "first update [CPU s]": f"{first:.0f}",
        "first update of a later process [CPU s]": f"{later:.0f}",
    }


def main() -> None:
    parser = options("Measures updates by compiled layers.")
    parser.add_argument("--rounds", type=int, help="in place of the setting's own")
    names = [setting.name for setting in SETTINGS]
    parser.add_argument("--of", nargs="+", choices=names, default=names, help="contexts")
    parser.add_argument("--first", choices=names, help="the first update of one alone")
    given = parser.parse_args()
    torch.set_num_threads(2)
    if given.first:
        alone(next(setting for setting in SETTINGS if setting.name == given.first))
    else:
        rows = [measured(each, given.rounds or each.rounds) for each in SETTINGS if each.name in given.of]
        show("compiled", rows, store=given.store)


if __name__ == "__main__":
    main()
