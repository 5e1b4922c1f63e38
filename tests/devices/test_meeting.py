"""Ranks that find each other, or do not; strangers among them; and ranks that are alive, or not any more."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import signal
import socket
import subprocess
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import HashStore, PrefixStore, TCPStore  # type: ignore[attr-defined]

from agent_r1.devices import meeting
from agent_r1.devices.meeting import (
    INTERFACE,
    KEY,
    Place,
    SealedStore,
    beating,
    joined,
    meet,
    require_alike,
    require_interface,
    signs_of,
    watching,
)
from agent_r1.devices.sharing import Ranks
from tests.neighbour import become_neighbour

SECRET = "a" * 32
GIVEN = {
    "RANK": "1",
    "WORLD_SIZE": "4",
    "LOCAL_RANK": "1",
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "29500",
    KEY: SECRET,
}
PATIENCE_S = 60.0


@pytest.fixture
def given(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Gives this process the variables of a launcher, with some changed; "" takes one away."""

    def give(**changes: str) -> None:
        for name, value in (GIVEN | changes).items():
            monkeypatch.setenv(name, value)

    return give


def test_a_place_is_what_a_launcher_gives(given: Callable[..., None]) -> None:
    assert Place.given() is None
    given()
    place = Place(rank=1, size=4, local_rank=1, address="127.0.0.1", port=29500, key=SECRET)
    assert Place.given() == place
    assert place.environment == GIVEN
    assert SECRET not in repr(place)


@pytest.mark.parametrize(
    ("name", "value", "told"),
    [
        ("WORLD_SIZE", "", "RANK is set and WORLD_SIZE is not"),
        ("MASTER_ADDR", "", "RANK is set and MASTER_ADDR is not"),
        ("RANK", "4", "RANK is '4', and not a number from 0 to 3"),
        ("RANK", "-1", "not a number from 0 to 3"),
        ("LOCAL_RANK", "2", "not a number from 0 to 1"),
        ("MASTER_PORT", "70000", "not a number from 1 to 65535"),
        ("WORLD_SIZE", "two", "WORLD_SIZE is 'two'"),
    ],
)
def test_a_place_that_is_none_is_refused(given: Callable[..., None], name: str, value: str, told: str) -> None:
    given(**{name: value})
    with pytest.raises(ValueError, match=told):
        Place.given()


@pytest.mark.parametrize("key", ["", "short"])
def test_ranks_without_a_secret_are_refused_with_one_that_works(given: Callable[..., None], key: str) -> None:
    given(**{KEY: key})
    place = Place.given()
    assert place
    with pytest.raises(ValueError, match=f"{KEY} has {len(key)} characters") as refused:
        place.require_key()
    remedy = str(refused.value).split("the same: ")[1]
    made = subprocess.run(["sh", "-c", f"{remedy} && printenv {KEY}"], capture_output=True, text=True, check=True)
    given(**{KEY: made.stdout.strip()})
    place = Place.given()
    assert place
    place.require_key()


def test_a_port_that_is_taken_is_named(given: Callable[..., None]) -> None:
    with socket.socket() as taken:
        taken.bind(("", 0))
        taken.listen()
        port = taken.getsockname()[1]
        given(RANK="0", LOCAL_RANK="0", MASTER_PORT=str(port))
        place = Place.given()
        assert place
        with pytest.raises(OSError, match=f"port {port}, .* cannot be used here; set MASTER_PORT to another"):
            meet(place, waiting_s=1)


def test_a_network_that_no_other_machine_reaches_is_named(
    given: Callable[..., None], monkeypatch: pytest.MonkeyPatch, store: SealedStore
) -> None:
    """Gloo listens on the network of the machine's name, which /etc/hosts often gives loopback."""
    given(MASTER_ADDR="192.0.2.7")
    place = Place.given()
    assert place
    monkeypatch.setattr(socket, "gethostname", lambda: "localhost")
    remedy = r"; set GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME to the interface"
    with pytest.raises(ValueError, match=rf"'localhost', this machine's name, stands for (127|::)\S+, .*{remedy}"):
        require_interface(place)
    require_interface(replace(place, address="127.0.0.1"))  # all ranks are on this machine
    monkeypatch.setattr(socket, "gethostname", lambda: "192.0.2.8")
    require_interface(place)
    monkeypatch.setenv(INTERFACE, "lo")
    require_interface(place)
    monkeypatch.setenv(INTERFACE, "lo,eth77")
    with pytest.raises(ValueError, match=rf"GLOO_SOCKET_IFNAME is 'lo,eth77', and there are .*lo.* here{remedy}"):
        require_interface(place)
    monkeypatch.setenv(INTERFACE, "eth77")
    told = pytest.raises(ConnectionError, match=rf"have met, and this one cannot reach all{remedy}.*: .*eth77")
    with told, joined(store, replace(place, rank=0, size=1)):
        pass


def test_ranks_that_were_not_all_started_wait_no_longer_than_that(
    given: Callable[..., None], free_port: Callable[[], int]
) -> None:
    for rank in ("0", "1"):
        given(RANK=rank, LOCAL_RANK="0", WORLD_SIZE="2", MASTER_PORT=str(free_port()))
        place = Place.given()
        assert place
        with pytest.raises(OSError, match=f"not all of 2 ranks met at .* within 1 s, and this is rank {rank}"):
            meet(place, waiting_s=1)
    with pytest.raises(OSError, match="not all of 2 ranks met"):
        meet(places_in_a_file()[0], waiting_s=0.3)


def places_in_a_file() -> list[Place]:
    """Of two ranks on one machine, as their leader gives them out."""
    path = f"/proc/{os.getpid()}/fd/{os.memfd_create('ranks')}"
    return [Place(rank=rank, size=2, local_rank=rank, address=path, port=1, key=SECRET) for rank in range(2)]


def be(place: Place) -> str:
    """How it ends to be a rank."""
    try:
        os.environ |= place.environment
        torch.set_num_threads(1)
        with joined(meet(place, PATIENCE_S), place) as group:
            require_alike(group, {"model": "1a"})
        return "well"
    except (ValueError, OSError) as fault:
        return f"{type(fault).__name__}: {fault}"


def together(*bodies: Callable[[], str], beside: Sequence[Callable[[], str]] = ()) -> list[str]:
    """What some functions return, each in a process of its own, and `beside` others that are not waited for.

    They are forked from a process that has run no other test: what the threads of this one hold, no child could free.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])
    told = [context.SimpleQueue() for _ in (*bodies, *beside)]
    processes = [
        context.Process(target=tell, args=each, daemon=True) for each in zip((*bodies, *beside), told, strict=True)
    ]
    for process in processes:
        process.start()
    found = [to.get() if to._reader.poll(PATIENCE_S) else "nothing" for to in told[: len(bodies)]]
    for process in processes:
        process.kill()
        process.join()
    return found


def tell(body: Callable[[], str], to: Any) -> None:
    to.put(body())
    os._exit(0)


def look(path: str) -> str:
    """What another account finds where ranks meet."""
    become_neighbour()
    with pytest.raises(PermissionError):
        Path(path).read_bytes()
    return "shut out"


def test_ranks_of_one_machine_meet_where_no_other_user_can_come() -> None:
    first, second = places_in_a_file()
    others = [] if os.getuid() else [partial(look, first.address)]
    ended = together(partial(be, first), partial(be, second), *others)
    assert ended == ["well", "well", *["shut out"] * len(others)]
    if not others:
        pytest.skip("only root can be another user: the ranks met, and nobody tried to come to them")


class Command:
    """An object that runs a command where it is unpickled."""

    def __init__(self, mark: Path) -> None:
        self._mark = mark

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self._mark),)


def answer(port: int, mark: Path) -> str:
    """Does all that a rank does, and sends a pickle as the facts that are compared."""
    if not os.getuid():
        become_neighbour()
    store = TCPStore("127.0.0.1", port, 2, False)
    store.set("drawn/1", "")
    dist.init_process_group("gloo", store=PrefixStore("group", store), rank=1, world_size=2)
    found = [b"", b""]
    dist.all_gather_object(found, pickle.dumps([Command(mark)]), group=dist.new_group(backend="gloo"))
    return "heard"


def test_a_stranger_in_a_launchers_store_runs_nothing(free_port: Callable[[], int], tmp_path: Path) -> None:
    port, mark = free_port(), tmp_path / "unpickled"
    leader = Place(rank=0, size=2, local_rank=0, address="127.0.0.1", port=port, key=SECRET)
    [ended] = together(partial(be, leader), beside=[partial(answer, port, mark)])
    assert f"written with another {KEY}" in ended
    assert not mark.exists()


def pretend(place: Place) -> str:
    """Does all that a rank does but show the secret."""
    store = meet(place)
    dist.init_process_group("gloo", store=PrefixStore("group", store), rank=1, world_size=2)
    dist.new_group(backend="gloo")
    dist.irecv(torch.zeros(32, dtype=torch.uint8), 0)
    dist.send(torch.zeros(32, dtype=torch.uint8), 0)
    signal.pause()
    return "gone"


def test_a_stranger_at_a_connection_of_gloo_is_noticed() -> None:
    """Gloo takes whoever connects. Here that one even knows the addresses."""
    first, second = places_in_a_file()
    [ended] = together(partial(be, first), beside=[partial(pretend, second)])
    assert "ConnectionError: rank 1 was lost, or a stranger answered for it" in ended


def test_what_others_write_into_the_store_is_refused() -> None:
    """Under another secret, in another start, or under another name."""
    plain = HashStore()
    store, another = SealedStore(plain, b"this start"), SealedStore(plain, b"another start")
    store.set("where", b"here\xff")
    assert store.clone().get("where") == b"here\xff"
    another.set("other", b"there")
    plain.set("forged", b"there")
    plain.set("moved", plain.get("where"))
    for key in ("other", "forged", "moved"):
        with pytest.raises(ValueError, match=f"'{key}' of the ranks' store was written with another {KEY}"):
            store.get(key)


class Two(Ranks):
    """Of which the other has something of its own."""

    def __init__(self, other: Any) -> None:
        self.other = other

    def gather(self, mine: Sequence[Any], *_: type) -> list[Any]:
        return [*mine, self.other]


def test_ranks_must_have_the_same() -> None:
    mine = {"model": "1a", "torch": "2.13.0"}
    require_alike(Two(mine), mine)
    with pytest.raises(ValueError, match=r"rank 1 differs from rank 0: torch 2.13.0 -> 2.9; give every machine"):
        require_alike(Two({"model": "1a", "torch": "2.9"}), mine)
    with pytest.raises(ValueError, match="model 1a -> none"):
        require_alike(Two({"torch": "2.13.0"}), mine)


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> SealedStore:
    monkeypatch.setattr(meeting, "BEAT_S", 0.01)
    return SealedStore(TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False), b"key")


def test_a_rank_that_falls_silent_is_missed_once(store: SealedStore) -> None:
    """And not before: three of them see each other until one is not there any more, which the leader alone tells."""
    told: SimpleQueue[tuple[int, int]] = SimpleQueue()
    lives = [ExitStack() for _ in range(3)]
    for rank, life in enumerate(lives):
        signs = life.enter_context(beating(store, replace(places_in_a_file()[0], rank=rank, size=3)))
        life.enter_context(watching(signs, 0.5, lambda other, rank=rank: told.put((rank, other))))
    lives[2].close()
    assert told.get(timeout=PATIENCE_S) == (0, 2)
    lives[0].close()
    assert told.get(timeout=PATIENCE_S) == (1, 0)
    assert told.empty()
    lives[1].close()


def test_a_rank_of_this_machine_that_is_stopped_is_missed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(meeting, "BEAT_S", 0.01)
    told: SimpleQueue[int] = SimpleQueue()
    sleeping = [subprocess.Popen(["sleep", "600"]) for _ in range(2)]
    try:
        sleeping[1].send_signal(signal.SIGSTOP)
        with watching(lambda: signs_of({rank: each.pid for rank, each in enumerate(sleeping)}), 0.2, told.put):
            assert told.get(timeout=PATIENCE_S) == 1
    finally:
        for process in sleeping:
            process.kill()
            process.wait()
