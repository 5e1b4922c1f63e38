"""Faults of the world, which end an episode. The agent's own faults are data, and no exceptions."""

from __future__ import annotations


class WorldFault(OSError):
    """The other side failed: a server that is down, an answer that never comes or is out of shape.

    An episode that meets it ends as ABORTED, and nothing is learned from it.
    """

    @property
    def words(self) -> str:
        """Its message, or its kind where it has none."""
        return str(self) or type(self).__name__


class WorldTimeout(WorldFault, TimeoutError):
    """The other side did not answer in time."""


class Warned(ValueError):
    """The fault that a check of a machine or a model found stops nothing yet."""


class ContextFull(Exception):
    """A model has no room for another action: the episode that asks for one has met its limit."""


class TooManyAborted(WorldFault):
    """Too many episodes met a fault of the world: the rest would be another experiment. The fault may pass."""


def require_few(aborted: int, episodes: int, share: float, how: str) -> None:
    """Raises TooManyAborted if more than a share of the episodes was cut short; `how` adds words to the message."""
    if aborted > share * episodes:
        remedy = "none of them is kept, run it again when that is mended"
        raise TooManyAborted(f"the world cut {aborted} of {episodes} episodes short, {how}; {remedy}")
