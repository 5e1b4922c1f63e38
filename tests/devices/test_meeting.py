"""Ranks that find each other, or do not; that have the same, or do not; and that are alive, or not any more."""

from __future__ import annotations

import socket
from collections.abc import Callable, Sequence
from queue import SimpleQueue
from typing import Any

import pytest
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from agent_r1.devices import meeting
from agent_r1.devices.meeting import Life, Place, host, meet, require_alike
from agent_r1.devices.sharing import Ranks

GIVEN = {"RANK": "1", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
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
    place = Place(rank=1, size=4, local_rank=1, address="127.0.0.1", port=29500)
    assert Place.given() == place
    assert place.environment == GIVEN


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


def test_ranks_that_were_not_all_started_wait_no_longer_than_that(
    given: Callable[..., None], free_port: Callable[[], int]
) -> None:
    for rank in ("0", "1"):
        given(RANK=rank, LOCAL_RANK="0", WORLD_SIZE="2", MASTER_PORT=str(free_port()))
        place = Place.given()
        assert place
        with pytest.raises(OSError, match=f"not all of 2 ranks met at .* within 1 s, and this is rank {rank}"):
            meet(place, waiting_s=1)
    with socket.create_server(("127.0.0.1", 0)) as listening:
        place = Place(rank=0, size=2, local_rank=0, address="127.0.0.1", port=listening.getsockname()[1])
        with pytest.raises(OSError, match="not all of 2 ranks met"):
            host(place, listening.detach(), waiting_s=0.3)


class Two(Ranks):
    """Of which the other has something of its own."""

    def __init__(self, other: Any) -> None:
        self.other = other

    def gather(self, mine: Sequence[Any]) -> list[Any]:
        return [*mine, self.other]


def test_ranks_must_have_the_same() -> None:
    mine = {"model": "1a", "torch": "2.13.0"}
    require_alike(Two(mine), mine)
    with pytest.raises(ValueError, match=r"rank 1 differs from rank 0: torch 2.13.0 -> 2.9; give every machine"):
        require_alike(Two({"model": "1a", "torch": "2.9"}), mine)
    with pytest.raises(ValueError, match="model 1a -> none"):
        require_alike(Two({"torch": "2.13.0"}), mine)


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(meeting, "BEAT_S", 0.01)
    return TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)


def test_a_rank_that_falls_silent_is_missed_once(store: Any) -> None:
    """And not before: three of them see each other until one is not there any more, which the leader alone tells."""
    told: SimpleQueue[tuple[int, int]] = SimpleQueue()
    lives = [Life(store, rank, 3, 0.5, lambda other, rank=rank: told.put((rank, other))) for rank in range(3)]
    for each in lives:
        each.__enter__()
    lives[2].__exit__(None, None, None)
    assert told.get(timeout=PATIENCE_S) == (0, 2)
    lives[0].__exit__(None, None, None)
    assert told.get(timeout=PATIENCE_S) == (1, 0)
    assert told.empty()
