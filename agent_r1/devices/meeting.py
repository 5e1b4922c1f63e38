"""Processes that meet as the ranks of one learner, by torch.distributed, and notice the loss of one of them."""

from __future__ import annotations

import hashlib
import hmac
import os
import platform
import secrets
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import astuple, dataclass, field
from datetime import timedelta
from functools import partial
from ipaddress import ip_address
from typing import cast

import psutil
import torch
import torch.distributed as dist
from torch.distributed import FileStore, PrefixStore, Store  # type: ignore[attr-defined]
from torch.distributed.rendezvous import rendezvous

from agent_r1.devices.sharing import Group, Ranks
from agent_r1.facts import differences, some
from agent_r1.gpus import visible_gpus
from agent_r1.pretrained import default_device

KEY = "AGENT_R1_RANKS_KEY"  # the secret that all ranks of a start are given
_LEAST_KEY = 32  # characters: others can read signed entries, and try keys out
_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", KEY)  # of the fields of `Place`
INTERFACE = "GLOO_SOCKET_IFNAME"  # names the network on which gloo listens
_NAME_ONE = f"set {INTERFACE} and NCCL_SOCKET_IFNAME to the interface of this machine that leads to the others"
_LOOK_S = 0.1  # between two looks whether all have arrived
GATHERING_S = 600.0  # that ranks wait for each other at the start, for one whose machine is late
PROVING = timedelta(minutes=1)  # that ranks, which are all there, wait for each other's proof
BEAT_S = 1.0
COMPUTING = timedelta(minutes=30)  # that ranks wait for each other within a call
_SIGNED = hashlib.sha256().digest_size
LEADING = timedelta(days=7)  # that followers wait for the next call; `watching` notices the end of their leader


@dataclass(frozen=True, kw_only=True, slots=True)
class Place:
    """The number of a rank, and where all meet: at an address, or in a file that ranks of one machine have open."""

    rank: int
    size: int
    local_rank: int  # on its machine
    address: str  # of a file its path
    port: int
    key: str = field(repr=False)

    @classmethod
    def given(cls) -> Place | None:
        """The place that a launcher (torchrun, SLURM) gave; None without one. A ValueError names a wrong variable."""
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
            key=os.environ.get(KEY, ""),
        )

    @property
    def environment(self) -> dict[str, str]:
        """The variables that `given` reads."""
        return dict(zip(_VARIABLES, map(str, astuple(self)), strict=True))

    def require_key(self) -> None:
        """Checks that the ranks can tell each other from strangers. Raises ValueError otherwise."""
        if self.size > 1 and len(self.key) < _LEAST_KEY:
            raise ValueError(
                f"{KEY} has {len(self.key)} characters, and ranks know each other by at least {_LEAST_KEY}; give all "
                f"of them the same: export {KEY}=$(openssl rand -hex 32)"
            )


class SealedStore(Store):
    """A store of the ranks in which every entry is signed: others may reach it, and their entries are refused.

    The signatures' key is made of the secret and of numbers that the ranks drew for this start: an entry of another
    start is refused too.
    """

    def __init__(self, store: Store, key: bytes) -> None:
        super().__init__()
        self._store, self._key = store, key

    def sign(self, *parts: object) -> bytes:
        """The signature of a rank of this start."""
        return hmac.digest(self._key, repr(parts).encode(), "sha256")

    def set(self, key: str, value: str | bytes) -> None:
        entry = value.encode() if isinstance(value, str) else bytes(value)
        self._store.set(key, self.sign(key, entry) + entry)  # type: ignore[arg-type]  # bytes too, not in its stub

    def get(self, key: str) -> bytes:
        """Raises ValueError if no rank of this start wrote the entry."""
        found = self._store.get(key)
        signature, entry = found[:_SIGNED], found[_SIGNED:]
        if not hmac.compare_digest(signature, self.sign(key, entry)):
            raise ValueError(f"{key!r} of the ranks' store was written with another {KEY}; give all ranks the same")
        return entry

    def check(self, keys: list[str]) -> bool:
        return self._store.check(keys)

    def wait(self, keys: list[str], timeout: timedelta = COMPUTING) -> None:
        self._store.wait(keys, timeout)

    def clone(self) -> SealedStore:
        return SealedStore(self._store.clone(), self._key)  # type: ignore[attr-defined]  # missing in its stub


def meet(place: Place, waiting_s: float = GATHERING_S) -> SealedStore:
    """The store of all ranks, once all are there. Raises OSError if one is late or the leader's port is taken."""
    try:
        if place.address.startswith("/"):
            store: Store = FileStore(place.address)
        else:
            found = rendezvous("env://", place.rank, place.size, timeout=timedelta(seconds=waiting_s))
            store, _, _ = next(iter(found))
    except (dist.DistNetworkError, dist.DistStoreError) as fault:
        raise _not_met(place, waiting_s, str(fault)) from fault
    store.set(f"drawn/{place.rank}", secrets.token_hex())
    everyones = [f"drawn/{rank}" for rank in range(place.size)]
    deadline = time.monotonic() + waiting_s
    while not store.check(everyones):  # no signal would reach `store.wait`
        if time.monotonic() > deadline:
            raise _not_met(place, waiting_s, "some did not arrive")
        time.sleep(_LOOK_S)
    drawn = b"".join(map(store.get, everyones))
    return SealedStore(store, hmac.digest(place.key.encode(), drawn, "sha256"))


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


def require_interface(place: Place) -> None:
    """Checks that other machines can reach this one where gloo will listen. Raises ValueError otherwise."""
    given, here, name = os.environ.get(INTERFACE), [name for _, name in socket.if_nameindex()], socket.gethostname()
    if given and not set(given.split(",")) <= set(here):
        raise ValueError(f"{INTERFACE} is {given!r}, and there are {', '.join(here)} here; {_NAME_ONE}")
    with suppress(OSError, UnicodeError):  # of names that are not found
        own, met = (ip_address(socket.getaddrinfo(host, None)[0][4][0]) for host in (name, place.address))
        if not given and own.is_loopback and not met.is_loopback:
            raise ValueError(f"{name!r}, this machine's name, stands for {own}, which no other reaches; {_NAME_ONE}")


@contextmanager
def joined(store: SealedStore, place: Place, computing: timedelta = COMPUTING) -> Iterator[Group]:
    """The group of all ranks while the block lasts.

    Raises ConnectionError if this rank cannot reach all, or another program took the place of one, and ValueError if
    two ranks compute on the same GPU.
    """
    device = default_device()
    cuda = device.type == "cuda"
    if cuda:
        device = torch.device("cuda", own_gpu(store, place))
        torch.cuda.set_device(device)
    try:
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if cuda else "gloo",
            store=PrefixStore("group", store),
            rank=place.rank,
            world_size=place.size,
            timeout=computing,
        )
        host = dist.new_group(backend="gloo", timeout=LEADING)
    except RuntimeError as fault:
        raise ConnectionError(f"the ranks have met, and this one cannot reach all; {_NAME_ONE}: {fault}") from fault
    _require_ranks(store, place, "all", None)
    _require_ranks(store, place, "host", host)
    group = Group(device, host)
    if cuda:
        require_apart(group.gather([str(torch.cuda.get_device_properties(device).uuid)]))
    yield group
    dist.destroy_process_group()  # not where a rank has failed: others may be waiting in it


def own_gpu(store: Store, place: Place) -> int:
    """The number of a rank's GPU among all that it sees, which from now on are the GPUs of its machine's first rank.

    That rank holds them. Another one to which a launcher shows a single GPU takes that.
    """
    held = f"gpus/{platform.node()}"
    if place.local_rank == 0:
        store.set(held, ",".join(visible_gpus()))
    elif len(visible_gpus()) > 1:
        os.environ["CUDA_VISIBLE_DEVICES"] = store.get(held).decode()
    return place.local_rank if len(visible_gpus()) > 1 else 0


def require_apart(gpus: Sequence[str]) -> None:
    """Checks that no two ranks compute on one GPU, by the UUIDs of all. All ranks raise the same ValueError else."""
    for rank, gpu in enumerate(gpus):
        if (first := gpus.index(gpu)) != rank:
            raise ValueError(
                f"ranks {first} and {rank} compute on the same GPU, {gpu}; have a launcher show every rank one of its "
                "own (srun --gpus-per-task=1), or all GPUs of the machine to each (unset CUDA_VISIBLE_DEVICES)"
            )


def _require_ranks(store: SealedStore, place: Place, name: str, group: dist.ProcessGroup | None) -> None:
    """Has the rank at the other end of each of gloo's connections show that it knows the key: gloo takes all comers."""
    shown = {rank: torch.zeros(_SIGNED, dtype=torch.uint8) for rank in range(place.size) if rank != place.rank}
    own = {rank: torch.tensor([*store.sign(name, place.rank, rank)], dtype=torch.uint8) for rank in shown}
    fault: RuntimeError | None = None
    try:
        calls = [dist.irecv(each, rank, group) for rank, each in shown.items()]
        calls += [dist.isend(each, rank, group) for rank, each in own.items()]
        for call in calls:
            cast(dist.Work, call).wait(PROVING)
    except RuntimeError as error:  # of gloo
        fault = error
    wrong = [str(rank) for rank, each in shown.items() if bytes(each.tolist()) != store.sign(name, rank, place.rank)]
    if wrong or fault:
        raise ConnectionError(f"rank {some(wrong) or '?'} was lost, or a stranger answered for it") from fault


def require_alike(ranks: Ranks, mine: Mapping[str, str]) -> None:
    """Checks that the named facts are the same on all ranks. All of them raise the same ValueError otherwise."""
    leaders, *others = ranks.gather([dict(mine)])
    for rank, found in enumerate(others, 1):
        if named := differences(leaders, found):
            raise ValueError(
                f"rank {rank} differs from rank 0: {some(named)}; give every machine the same files and the same "
                "environment"
            )


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


@contextmanager
def watched(place: Place, own: Mapping[int, int], silence_s: float, lost: Callable[[int], None]) -> Iterator[Group]:
    """The group of all ranks, as in `joined`; `lost` is called if one gives no sign of life for `silence_s`.

    `own` are the processes of other ranks on this machine, which are watched at once. Ranks of a launcher are watched
    when all are there.
    """
    with ExitStack() as ends:
        if own:
            ends.enter_context(watching(partial(signs_of, own), silence_s, lost))
        store = meet(place)
        if not own:
            ends.enter_context(watching(ends.enter_context(beating(store, place)), silence_s, lost))
        yield ends.enter_context(joined(store, place))


def signs_of(pids: Mapping[int, int]) -> dict[int, object]:
    """A sign of each rank on this machine, by its process: another one at every look, but of a stopped one."""
    signs = dict[int, object](pids)
    for rank, pid in pids.items():
        with suppress(psutil.NoSuchProcess):
            if psutil.Process(pid).status() not in (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP):
                signs[rank] = object()
    return signs


@contextmanager
def beating(store: SealedStore, place: Place) -> Iterator[Callable[[], dict[int, bytes]]]:
    """Shows the other ranks that this one is alive. Gives their last signs: the leader sees all, and all see it."""
    store, over = store.clone(), threading.Event()
    seen = dict.fromkeys((0,) if place.rank else range(1, place.size), b"")

    def beat() -> None:
        """Asks the store. It may never answer; then the beats that were seen stay as they are."""
        beats = 0
        while not over.wait(BEAT_S):
            beats += 1
            try:
                store.set(f"life/{place.rank}", str(beats))
                for other in seen:
                    if store.check([f"life/{other}"]):
                        with suppress(ValueError):  # forged; the next one may be its own
                            seen[other] = store.get(f"life/{other}")
            except RuntimeError:  # as torch's own errors are: the leader's process, which has the store, has gone
                return

    with _thread(beat, over):
        yield seen.copy


@contextmanager
def watching(
    signs: Callable[[], Mapping[int, object]], silence_s: float, lost: Callable[[int], None]
) -> Iterator[None]:
    """Has a thread call `lost` once, with the number of a rank of which `signs` gives no new sign for `silence_s`.

    Silence is counted in this process's own looks. A process that was stopped, or whose machine slept, therefore does
    not take its own pause for the silence of the others.
    """
    over = threading.Event()

    def look() -> None:
        known, silent = signs(), Counter[int]()
        while not over.wait(BEAT_S):
            before, known = known, signs()
            for rank, sign in known.items():
                silent[rank] = silent[rank] + 1 if sign == before[rank] else 0
                if silent[rank] * BEAT_S > silence_s and not over.is_set():
                    over.set()
                    lost(rank)
                    return

    with _thread(look, over):
        yield


@contextmanager
def _thread(body: Callable[[], None], over: threading.Event) -> Iterator[None]:
    threading.Thread(target=body, name=body.__name__, daemon=True).start()
    try:
        yield
    finally:
        over.set()
