"""Signs of life among ranks: none waits for ever for one that has died, was stopped, or cannot be reached."""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import TracebackType
from typing import Self

from torch.distributed import Store  # type: ignore[attr-defined]

BEAT_S = 1.0


class Life:
    """Threads that show the other ranks that this one is alive, and call `lost` once where one of them is silent.

    The leader watches all, the others the leader. Silence is counted in this process's own looks, so that one that was
    stopped itself, or whose machine slept, does not take that for the silence of the others.
    """

    def __init__(self, store: Store, rank: int, size: int, silence_s: float, lost: Callable[[int], None]) -> None:
        """`silence_s` is how long a rank may be silent; `lost` is told which one was, from a thread."""
        self._store = store.clone()  # type: ignore[attr-defined]  # which its stub does not know
        self._rank, self._looks, self._lost = rank, silence_s / BEAT_S, lost
        self._seen = dict.fromkeys(range(1, size) if rank == 0 else (0,), b"")
        self._over = threading.Event()

    def __enter__(self) -> Self:
        for body in (self._beat, self._look):
            threading.Thread(target=body, name=f"life{body.__name__}", daemon=True).start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, fault: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._over.set()

    def _beat(self) -> None:
        """Asks the store, which may never answer; then what was seen does not change any more."""
        beats = 0
        while not self._over.wait(BEAT_S):
            beats += 1
            try:
                self._store.set(f"life/{self._rank}", str(beats))
                for other in self._seen:
                    if self._store.check([f"life/{other}"]):
                        self._seen[other] = self._store.get(f"life/{other}")
            except RuntimeError:  # torch's own kinds are: the leader's process, where the store is, has gone
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
