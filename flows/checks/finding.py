"""What the doctor finds, and what to do about it."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum

logger = logging.getLogger(__name__)


class Status(StrEnum):
    OK = "ok"
    WARNING = "warning"
    FAILED = "failed"


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """What one check found."""

    check: str  # what was looked at
    status: Status
    message: str
    remedy: str = ""  # what to do; never empty unless ok

    def __post_init__(self) -> None:
        assert self.remedy or self.status is Status.OK, f"{self.check}: {self.message}, and no remedy"


Check = Callable[[], Finding]


class NotTried(Exception):
    """What a check needs is missing, which another check reports."""


def found_by(check: Check) -> Finding:
    """What a check finds; one that raises has found something too."""
    name = check.__name__.replace("_", " ")
    try:
        return check()
    except NotTried as reason:
        return Finding(check=name, status=Status.WARNING, message=f"not tried: {reason}", remedy="mend that first")
    except Exception as fault:  # whatever is wrong with a machine is what the doctor is asked for
        logger.debug("%s", name, exc_info=True)
        message = f"{type(fault).__name__}: {fault}"
        return Finding(check=name, status=Status.FAILED, message=message, remedy="mend what the message names")
