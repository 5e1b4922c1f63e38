"""Processes that meet as the ranks of one learner, by torch.distributed, and notice the loss of one of them."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import astuple, dataclass
from datetime import timedelta
from typing import Self, cast

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, Store, TCPStore  # type: ignore[attr-defined]
from torch.distributed.rendezvous import rendezvous

from agent_r1.devices.sharing import Group, Ranks
from agent_r1.facts import differences, some

_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")  # of the fields of `Place`
_LOOK_S = 0.1  # between two looks whether all have arrived
GATHERING_S = 600.0  # that ranks wait for each other at the start, for one whose machine is late
BEAT_S = 1.0
COMPUTING = timedelta(minutes=30)  # that ranks wait for each other within a call


@dataclass(frozen=True, kw_only=True, slots=True)
class Place:
    """The number of a rank, and the address where all meet."""

    rank: int
    size: int
    local_rank: int  # on its machine
    address: str
    port: int

    @classmethod
    def given(cls) -> Place | None:
        """The place that a launcher such as torchrun or SLURM gave this process; None without a launcher.

        A ValueError names the variable that is missing or out of range.
        """
        if "RANK" not in os.environ:
            return None
        size = _number("WORLD_SIZE", 1, 65536)
        rank = _number("RANK", 0, size - 1)
        return cls(
            rank=rank,
            size=size,
            local_rank=_number("LOCAL_RANK", 0, rank),
            address=_given("MASTER_ADDR"),
            port=_number("MASTER_PORT", 1, 65535),
        )

    @property
    def environment(self) -> dict[str, str]:
        """The variables that `given` reads."""
        return dict(zip(_VARIABLES, map(str, astuple(self)), strict=True))


def meet(place: Place, waiting_s: float = GATHERING_S) -> Store:
    """The store of all ranks, once all are there. Raises OSError if one is late or the leader's port is taken."""
    try:
        store, _, _ = next(iter(rendezvous("env://", place.rank, place.size, timeout=timedelta(seconds=waiting_s))))
    except (dist.DistNetworkError, dist.DistStoreError) as fault:
        raise _not_met(place, waiting_s, str(fault)) from fault
    store.set(_arrival(place.rank), "")
    return cast(Store, store)


def require_meeting_place(place: Place) -> None:
    """Checks that the ranks of a launcher can meet, before any is started. Raises OSError otherwise."""
    try:
        socket.getaddrinfo(place.address, place.port)
    except (OSError, UnicodeError) as fault:
        raise OSError(f"no machine is found by MASTER_ADDR {place.address!r}; correct it: {fault}") from fault
    if place.rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":  # else torchrun listens there
        try:
            socket.create_server(("", place.port)).close()
        except OSError as fault:
            raise _no_port(place, str(fault)) from fault


def host(place: Place, listening: int, waiting_s: float = GATHERING_S) -> Store:
    """The store of ranks that the leader has started, on the socket `listening`. Raises as `meet`."""
    store = TCPStore(place.address, place.port, None, True, wait_for_workers=False, master_listen_fd=listening)
    others = [_arrival(rank) for rank in range(1, place.size)]
    deadline = time.monotonic() + waiting_s
    while not store.check(others):  # no signal would reach `store.wait`
        if time.monotonic() > deadline:
            raise _not_met(place, waiting_s, "some did not arrive")
        time.sleep(_LOOK_S)
    return store


@contextmanager
def joined(store: Store, place: Place, computing: timedelta = COMPUTING) -> Iterator[Group]:
    """The group of all ranks while the block lasts."""
    cuda = torch.cuda.is_available()
    device = torch.device("cuda", place.local_rank) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if cuda else "gloo",
        store=PrefixStore("group", store),
        rank=place.rank,
        world_size=place.size,
        timeout=computing,
    )
    yield Group(device)
    dist.destroy_process_group()  # not where a rank has failed: others may be waiting in it


def require_alike(ranks: Ranks, mine: Mapping[str, str]) -> None:
    """Checks that the named facts are the same on all ranks. All of them raise the same ValueError otherwise."""
    leaders, *others = ranks.gather([dict(mine)])
    for rank, found in enumerate(others, 1):
        if named := differences(leaders, found):
            raise ValueError(
                f"rank {rank} differs from rank 0: {some(named)}; give every machine the same files and the same "
                "environment"
            )


def _arrival(rank: int) -> str:
    """The key in the store by which a rank shows that it has arrived."""
    return f"arrived/{rank}"


def _not_met(place: Place, waiting_s: float, fault: str) -> OSError:
    if "EADDRINUSE" in fault or "in use" in fault:
        return _no_port(place, fault)
    return OSError(
        f"not all of {place.size} ranks met at {place.address}:{place.port} within {waiting_s:g} s, and this is rank "
        f"{place.rank}; look whether the others were started, with the same MASTER_ADDR and MASTER_PORT: {fault}"
    )


def _no_port(place: Place, fault: str) -> OSError:
    return OSError(
        f"port {place.port}, where the ranks are to meet, cannot be used here; set MASTER_PORT to another: {fault}"
    )


def _given(name: str) -> str:
    if not os.environ.get(name):
        raise ValueError(f"RANK is set and {name} is not; set all that a launcher sets, or none (unset RANK)")
    return os.environ[name]


def _number(name: str, least: int, most: int) -> int:
    text = _given(name)
    if not text.isascii() or not text.isdigit() or not least <= int(text) <= most:
        raise ValueError(f"{name} is {text!r}, and not a number from {least} to {most}; correct it, or unset RANK")
    return int(text)


class Life:
    """Threads that show the other ranks that this one is alive, and call `lost` once when one of them falls silent.

    The leader watches all, the others watch the leader. Silence is counted in this process's own looks. A process that
    was stopped, or whose machine slept, therefore does not take its own pause for the silence of the others.
    """

    def __init__(self, store: Store, rank: int, size: int, silence_s: float, lost: Callable[[int], None]) -> None:
        """A rank may be silent for `silence_s`. A thread calls `lost` with the number of a silent one."""
        self._store = store.clone()  # type: ignore[attr-defined]  # missing in its stub
        self._rank, self._looks, self._lost = rank, silence_s / BEAT_S, lost
        self._seen = dict.fromkeys(range(1, size) if rank == 0 else (0,), b"")
        self._over = threading.Event()

    def __enter__(self) -> Self:
        for body in (self._beat, self._look):
            threading.Thread(target=body, name=f"life{body.__name__}", daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()

    def _beat(self) -> None:
        """Asks the store. It may never answer; then the beats that were seen stay as they are."""
        beats = 0
        while not self._over.wait(BEAT_S):
            beats += 1
            try:
                self._store.set(f"life/{self._rank}", str(beats))
                for other in self._seen:
                    if self._store.check([f"life/{other}"]):
                        self._seen[other] = self._store.get(f"life/{other}")
            except RuntimeError:  # as torch's own errors are: the leader's process, which has the store, has gone
                return

    def _look(self) -> None:
        known, silent = dict(self._seen), dict.fromkeys(self._seen, 0)
        while not self._over.wait(BEAT_S):
            for other, beat in self._seen.items():
                silent[other] = silent[other] + 1 if beat == known[other] else 0
                known[other] = beat
                if silent[other] > self._looks and not self._over.is_set():
                    self._over.set()
                    self._lost(other)
                    return
