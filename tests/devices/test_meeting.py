"""Ranks that meet in a file, or do not; strangers among them; and ranks that are alive, or not any more."""

import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import FileStore

from agent_r1.devices import meeting
from agent_r1.devices.meeting import MEETING, Place, alive, forget_place, joined, require_alike
from agent_r1.devices.sharing import Ranks
from tests.neighbour import become_neighbour

PATIENCE_S = 60.0
SILENCE_S = 3.0  # of a rank, before the others miss it


def test_a_place_is_what_torchrun_gives(monkeypatch: pytest.MonkeyPatch) -> None:
    assert Place.given() is None
    given = {"RANK": "1", "WORLD_SIZE": "4", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    assert Place.given() == Place(rank=1, size=4, local_rank=0, file="")
    monkeypatch.setenv(MEETING, "/closed/ranks")
    assert Place.given() == Place(rank=1, size=4, local_rank=0, file="/closed/ranks")
    forget_place()
    assert not {*given, MEETING} & {*os.environ}
    for name, value in {"WORLD_SIZE": "", "LOCAL_RANK": "two", "RANK": ""}.items():
        for variable in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
            monkeypatch.setenv(variable, value if variable == name else "1")
        with pytest.raises(ValueError, match=r"one is missing or no number: .*; let torchrun set them, or unset RANK"):
            Place.given()


def places(folder: Path, size: int = 2) -> list[Place]:
    """Of ranks on one machine."""
    return [Place(rank=rank, size=size, local_rank=rank, file=f"{folder}/ranks") for rank in range(size)]


def be(place: Place) -> str:
    """How it ends to be a rank."""
    torch.set_num_threads(1)
    try:
        with joined(place, timedelta(seconds=PATIENCE_S / 2)) as group:
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
    answers = [context.SimpleQueue() for _ in (*bodies, *beside)]
    processes = [
        context.Process(target=tell, args=pair, daemon=True) for pair in zip((*bodies, *beside), answers, strict=True)
    ]
    for process in processes:
        process.start()
    ends = [to.get() if to._reader.poll(PATIENCE_S) else "nothing" for to in answers[: len(bodies)]]
    for process in processes:
        process.kill()
        process.join()
    return ends


def tell(body: Callable[[], str], to: Any) -> None:
    to.put(body())
    os._exit(0)


def look(path: str) -> str:
    """What another account finds where ranks meet."""
    become_neighbour()
    with pytest.raises(PermissionError):
        Path(path).read_bytes()
    with pytest.raises(PermissionError):
        Path(path).write_bytes(b"")
    return "shut out"


def test_ranks_of_one_machine_meet_where_no_other_user_can_come(tmp_path: Path) -> None:
    file = f"/proc/{os.getpid()}/fd/{os.memfd_create('ranks')}"  # as `launch` of flows/ranks.py has it
    first, second = (replace(place, file=file) for place in places(tmp_path))
    others = [] if os.getuid() else [partial(look, first.file)]
    ends = together(partial(be, first), partial(be, second), *others)
    assert ends == ["well", "well", *["shut out"] * len(others)]
    if not others:
        pytest.skip("only root can be another user: the ranks met, and nobody tried to come to them")


def test_a_rank_that_does_not_come_is_not_waited_for_any_longer(tmp_path: Path) -> None:
    told = pytest.raises(ConnectionError, match="rank 0 of 2 does not reach all others: ")
    with told, joined(places(tmp_path)[0], timedelta(seconds=1)):
        pass


def pretend(place: Place) -> str:
    """Does all that a rank does but show that it reads the file."""
    dist.init_process_group("gloo", store=FileStore(place.file, 2), rank=1, world_size=2)
    dist.new_group(backend="gloo")
    dist.irecv(torch.zeros(32, dtype=torch.uint8), 0)
    dist.send(torch.zeros(32, dtype=torch.uint8), 0)
    signal.pause()
    return "gone"


def test_a_stranger_at_a_connection_of_gloo_is_noticed(tmp_path: Path) -> None:
    """Gloo takes whoever connects. Here that one even knows the addresses."""
    first, second = places(tmp_path)
    [end] = together(partial(be, first), beside=[partial(pretend, second)])
    assert end == "ConnectionError: a stranger answered for rank 1"


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


def live(place: Place, body: Callable[[], object]) -> str:
    """What a rank learns of the others while it is alive, and does something else."""
    meeting.BEAT_S = 0.05
    told = list[str]()
    over = threading.Event()

    def lost(fault: RuntimeError) -> None:
        told.append(str(fault))
        over.set()

    with joined(place) as group, alive(SILENCE_S, lost, over):
        group.gather([place.rank])
        body()
        if body is over_and_out:
            over.wait(PATIENCE_S)
            return told[0]
    return "; ".join(told) or "well"


def over_and_out() -> None:
    """Of one that waits for the loss of another."""


def stop() -> None:
    """Stops this process as it waits for its next beat."""
    time.sleep = lambda _: os.kill(os.getpid(), signal.SIGSTOP)
    signal.pause()


def test_ranks_that_are_alive_end_together_and_miss_nobody(tmp_path: Path) -> None:
    """Though one of them has more to do than the others, for longer than a rank may be silent."""
    busy = partial(time.sleep, 2 * SILENCE_S)
    first, second, third = places(tmp_path, 3)
    ends = together(partial(live, first, busy), partial(live, second, bool), partial(live, third, bool))
    assert ends == ["well"] * 3


def test_a_rank_that_is_stopped_is_missed_by_name(tmp_path: Path) -> None:
    first, second, third = places(tmp_path, 3)
    waiting = (partial(live, first, over_and_out), partial(live, second, over_and_out))
    leader, follower = together(*waiting, beside=[partial(live, third, stop)])
    assert "Ranks 2 failed to pass monitoredBarrier in 3000 ms" in leader
    assert "rank 0" in follower


def test_a_rank_that_is_killed_is_missed_at_once(tmp_path: Path) -> None:
    first, second = places(tmp_path)
    [told] = together(partial(live, first, over_and_out), beside=[partial(live, second, partial(os._exit, 1))])
    assert "Ranks 1 failed" in told or "Connection closed by peer" in told
