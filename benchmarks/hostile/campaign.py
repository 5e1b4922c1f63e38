"""The kinds, the verdict on one input, and what is counted of them."""

from __future__ import annotations

import os

os.environ["ARROW_DEFAULT_MEMORY_POOL"] = "system"  # another one keeps a gigabyte in reserve

import re
import resource
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import NamedTuple, Self

from agent_r1.seeds import derive
from benchmarks.hostile import (
    data_files,
    dialects,
    endpoints,
    gateway,
    imports,
    index_files,
    leftovers,
    names,
    parameters,
    schemas,
    servers,
    stored,
    texts,
)
from benchmarks.hostile.kind import Defect, Kind
from benchmarks.hostile.mutations import PASSWORD

KINDS: tuple[type[Kind], ...] = (
    parameters.Values, parameters.Texts, data_files.Texts, data_files.Parquet, stored.Tables, stored.Checkpoints,
    texts.Actions, texts.Chats, servers.SearchAnswers, servers.EngineAnswers, servers.Loopback,
    servers.SearchRequests, servers.CutOff, servers.GuardedRequests, endpoints.EndpointAnswers,
    endpoints.AgentRequests, dialects.Dialects, gateway.GatewayRequests, index_files.IndexFiles, index_files.DenseFiles,
    index_files.Prebuilts, names.Tags, names.Listings, names.Names, names.Addresses, leftovers.Leftovers,
    schemas.ToolSchemas, imports.Imports,
)  # fmt: skip
_STATUS, _CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")
_SPARE_MIB = 4096  # that may be reserved, and is not used


class Verdict(NamedTuple):
    """What became of an input: a defect, or refused or not."""

    defect: str = ""
    refused: bool = False
    seconds: float = 0.0  # of the processor
    mib: float = 0.0  # at most, more than before


@dataclass
class Tally:
    """The verdicts on the inputs of a kind."""

    name: str
    tried: int = 0
    refused: int = 0
    defects: int = 0
    seconds: float = 0.0
    mib: float = 0.0

    def add(self, verdict: Verdict) -> None:
        """Counts one more."""
        self.tried += 1
        self.refused += verdict.refused
        self.defects += bool(verdict.defect)
        self.seconds, self.mib = max(self.seconds, verdict.seconds), max(self.mib, verdict.mib)

    @classmethod
    def total(cls, tallies: Sequence[Self]) -> Self:
        """All of them together."""
        counts = [(each.tried, each.refused, each.defects) for each in tallies]
        largest = max((each.seconds, each.mib) for each in tallies)[0], max(each.mib for each in tallies)
        return cls("all", *map(sum, zip(*counts, strict=True)), *largest)

    def __str__(self) -> str:
        accepted = self.tried - self.refused - self.defects
        figures = f"{self.tried:>6} {self.refused:>8} {accepted:>9} {self.defects:>8}"
        return f"{self.name:<18} {figures} {1e3 * self.seconds:>5.0f} ms {self.mib:>4.0f} MiB"


def generator(kind: type[Kind], seed: int, index: int) -> Random:
    """The random numbers of one input."""
    return Random(derive(seed, kind.name, index))


def attempt(kind: Kind, seed: int, index: int) -> Verdict:
    """Makes an input and gives it to the code."""
    made = kind.make(generator(type(kind), seed, index))
    before, seconds = _start_peak(), _cpu_s()
    verdict = _judge(kind, made)
    spent, grown = _cpu_s() - seconds, _peak() - before
    if not verdict.defect and spent > kind.limit_s:
        verdict = Verdict(f"took {spent:.1f} s, and {kind.limit_s} are its limit")
    if not verdict.defect and grown > kind.limit_mib:
        verdict = Verdict(f"took {grown:.0f} MiB, and {kind.limit_mib} are its limit")
    return verdict._replace(seconds=spent, mib=grown)


def bounded(mebibytes: float) -> None:
    """Limits the memory of this process, well above what is measured."""
    reserved = _of_status("VmSize") + mebibytes + _SPARE_MIB
    resource.setrlimit(resource.RLIMIT_AS, (int(reserved) << 20, resource.getrlimit(resource.RLIMIT_AS)[1]))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def _judge(kind: Kind, made: object) -> Verdict:
    try:
        kind.judge(made)
    except Defect as defect:
        return Verdict(str(defect) or "a defect")
    except kind.refusals as fault:
        said = str(fault)
        if kind.holds_secrets and PASSWORD in said:
            return Verdict(f"shows a password: {said}")
        if not any(name in said for name in kind.names(made)):
            return Verdict(f"names nothing: {type(fault).__name__}: {said}")
        return Verdict(refused=True)
    except BaseException as fault:
        return Verdict(f"{type(fault).__name__}: {fault}")
    return Verdict()


def _start_peak() -> float:
    """MiB that this process has; its peak begins anew where the kernel allows that."""
    _CLEAR.write_text("5")
    return _of_status("VmRSS")


def _peak() -> float:
    return _of_status("VmHWM")


def _of_status(name: str) -> float:
    found = re.search(rf"{name}:\s+(\d+) kB", _STATUS.read_text())
    return int(found[1]) / 1024 if found else 0.0


def _cpu_s() -> float:
    """Of this process and the processes that it waited for."""
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.process_time() + children.ru_utime + children.ru_stime
