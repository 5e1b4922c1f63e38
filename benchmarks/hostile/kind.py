"""What a kind of hostile input is: a generator of inputs, and an oracle that says what must hold of each."""

from __future__ import annotations

from pathlib import Path
from random import Random
from typing import Any, ClassVar


class Defect(Exception):
    """What must not be: the message says what."""


class Refused(ValueError):
    """An input that was refused by an answer, not by an exception; the message is the answer."""


class Kind:
    """A generator and an oracle. Inputs depend on the random numbers alone, and may be files in a folder."""

    name: ClassVar[str]
    tried: ClassVar[int]  # in a whole campaign
    refusals: ClassVar[tuple[type[Exception], ...]] = (ValueError, OSError)  # what the code documents for bad input
    holds_secrets: ClassVar[bool] = False  # of the operator, which no message shows
    limit_s: ClassVar[float] = 5.0  # of the processor's time, for one input
    limit_mib: ClassVar[float] = 512.0  # that one input may add to the memory

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def make(self, rng: Random) -> Any:
        """A hostile input."""
        raise NotImplementedError

    def judge(self, made: Any) -> None:
        """Gives the input to the code, which raises one of `refusals` or takes it; raises Defect if it must not."""
        raise NotImplementedError

    def names(self, made: Any) -> tuple[str, ...]:
        """What the message of a refusal names: one of these."""
        return ("",)


def require(held: bool, otherwise: str) -> None:
    """Raises Defect unless something holds."""
    if not held:
        raise Defect(otherwise)
