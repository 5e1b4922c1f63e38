"""Whose fault it is when an episode cannot go on: what the agent's own arguments caused is data, and never in here."""

from __future__ import annotations


class WorldFault(OSError):
    """The other side failed: a server that is down, an answer that never comes or is out of shape.

    An episode that meets it ends as ABORTED, and nothing is learned from it.
    """

    @property
    def words(self) -> str:
        """What it says; its kind, where it says nothing."""
        return str(self) or type(self).__name__


class WorldTimeout(WorldFault, TimeoutError):
    """The other side did not answer in time."""


class TooManyAborted(WorldFault):
    """So many episodes met a fault of the world that what is left would be another experiment; it may pass."""


def require_few(aborted: int, episodes: int, share: float, how: str) -> None:
    """Raises TooManyAborted if more than a share of the episodes was cut short; `how` says it in words."""
    if aborted > share * episodes:
        raise TooManyAborted(
            f"the world cut {aborted} of {episodes} episodes short, {how}; none of them is kept, run it again when "
            "that is mended"
        )
