"""Processes that meet as the ranks of one learner, where torchrun has started them, and notice the loss of one."""

from __future__ import annotations

import hmac
import os
import secrets
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import cast

import torch
import torch.distributed as dist
from torch.distributed import FileStore  # type: ignore[attr-defined]

from agent_r1.devices.sharing import Group, Ranks
from agent_r1.facts import differences, some
from agent_r1.pretrained import default_device

MEETING = "AGENT_R1_RANKS"  # names the file where the ranks of one machine meet, which is closed to other users
_PLACE = ("RANK", "WORLD_SIZE", "LOCAL_RANK")
_OF_TORCHRUN = (*_PLACE, MEETING, "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_USE_AGENT_STORE")
COMPUTING = timedelta(minutes=30)  # that ranks wait for each other, at the start and within a call
LEADING = timedelta(days=7)  # that followers wait for the next call; `alive` notices the end of their leader
PROVING = timedelta(minutes=1)  # that ranks, which are all there, wait for each other's proof
BEAT_S = 1.0
_SIGNATURE = 32  # bytes


@dataclass(frozen=True, kw_only=True, slots=True)
class Place:
    """The number of a rank, and where all meet: in a file of one machine, or at the address that torchrun gives."""

    rank: int
    size: int
    local_rank: int  # on its machine
    file: str  # "" where torchrun gives an address

    @classmethod
    def given(cls) -> Place | None:
        """The place that torchrun gave this process; None without one. Raises ValueError if it is not whole."""
        if "RANK" not in os.environ:
            return None
        try:
            rank, size, local_rank = (int(os.environ[name]) for name in _PLACE)
        except (KeyError, ValueError) as fault:
            raise ValueError(
                f"RANK is set, and of {', '.join(_PLACE)} one is missing or no number: {fault}; let torchrun set them, "
                "or unset RANK"
            ) from fault
        return cls(rank=rank, size=size, local_rank=local_rank, file=os.environ.get(MEETING, ""))


def forget_place() -> None:
    """Takes the place out of the environment: processes that this one starts have no rank."""
    for name in _OF_TORCHRUN:
        os.environ.pop(name, None)


@contextmanager
def joined(place: Place, waiting: timedelta = COMPUTING, *, copies: int = 1, defers: bool = False) -> Iterator[Group]:
    """The group of all ranks while the block lasts. `copies` and `defers` are as for `Group`.

    Raises ConnectionError if some do not come, this rank cannot reach all, or another program took the place of one.
    """
    device = default_device()
    cuda = device.type == "cuda"
    if cuda:
        device = torch.device("cuda", place.local_rank)
        torch.cuda.set_device(device)
    store = FileStore(place.file, place.size) if place.file else None
    try:
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if cuda else "gloo",
            store=store,
            rank=place.rank,
            world_size=place.size,
            timeout=waiting,
        )
        host = dist.new_group(backend="gloo", timeout=LEADING)
    except RuntimeError as fault:
        raise ConnectionError(f"rank {place.rank} of {place.size} does not reach all others: {fault}") from fault
    if store:
        _require_ranks(store, place, None)
        _require_ranks(store, place, host)
    yield Group(device, host, copies=copies, defers=defers)
    dist.destroy_process_group()  # not where a rank has failed: others may be waiting in it


def _require_ranks(store: FileStore, place: Place, group: dist.ProcessGroup | None) -> None:
    """Has the rank at the other end of each of gloo's connections show that it reads the file: gloo takes anybody."""
    name = group.group_name if group else "all"
    if place.rank == 0:
        store.set(name, secrets.token_hex())
    key = store.get(name)

    def signature(sender: int, receiver: int) -> bytes:
        return hmac.digest(key, f"{sender} {receiver}".encode(), "sha256")

    peers = [rank for rank in range(place.size) if rank != place.rank]
    peer_signatures = {rank: torch.zeros(_SIGNATURE, dtype=torch.uint8) for rank in peers}
    signatures = {rank: torch.tensor([*signature(place.rank, rank)], dtype=torch.uint8) for rank in peers}
    try:
        calls = [dist.irecv(tensor, rank, group) for rank, tensor in peer_signatures.items()]
        calls += [dist.isend(tensor, rank, group) for rank, tensor in signatures.items()]
        for call in calls:
            cast(dist.Work, call).wait(PROVING)
    except RuntimeError as fault:
        raise ConnectionError(f"a rank was lost, or a stranger answered for it: {fault}") from fault
    wrong = [
        str(rank) for rank, tensor in peer_signatures.items() if bytes(tensor.tolist()) != signature(rank, place.rank)
    ]
    if wrong:
        raise ConnectionError(f"a stranger answered for rank {some(wrong)}")


def require_alike(ranks: Ranks, facts: Mapping[str, str]) -> None:
    """Checks that the named facts are the same on all ranks. All of them raise the same ValueError otherwise."""
    leaders, *followers = ranks.gather([dict(facts)])
    for rank, rank_facts in enumerate(followers, 1):
        if changes := differences(leaders, rank_facts):
            raise ValueError(
                f"rank {rank} differs from rank 0: {some(changes)}; give every machine the same files and the same "
                "environment"
            )


@contextmanager
def alive(silence_s: float, lost: Callable[[RuntimeError], None], end: threading.Event) -> Iterator[None]:
    """Has a thread meet those of the other ranks every `BEAT_S`, and call `lost` if one does not come for `silence_s`.

    `end` is set when the block ends. The block ends on all ranks together, but for one that a fault ends.
    """
    silence = timedelta(seconds=silence_s)
    group = dist.new_group(backend="gloo", timeout=silence)
    beating = torch.ones(1)

    def beat() -> None:
        try:
            while beating.item():
                time.sleep(BEAT_S)
                dist.monitored_barrier(group, silence, wait_all_ranks=True)
                beating.fill_(not end.is_set())
                dist.all_reduce(beating, dist.ReduceOp.MAX, group)
        except RuntimeError as fault:
            if not end.is_set():
                lost(fault)

    thread = threading.Thread(target=beat, name="alive", daemon=True)
    thread.start()
    try:
        yield
    finally:
        end.set()
    thread.join()
