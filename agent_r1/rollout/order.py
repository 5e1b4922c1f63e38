"""When the requests of the episodes leave for the sampler."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from agent_r1.rollout.sampling import Action, Request

Sample = Callable[[Sequence[Request]], Sequence[Action]]


class Rounds:
    """A batch leaves when every episode that lives has asked, in the order of the episodes.

    So the batches, and with them every bit, are the same however long the environments take.
    """

    def __init__(self, sample: Sample, episodes: int) -> None:
        self._sample, self._living = sample, episodes
        self._asked: list[tuple[Request, asyncio.Future[Action]]] = []

    async def act(self, request: Request) -> Action:
        """The action that is sampled for a request."""
        answer: asyncio.Future[Action] = asyncio.get_running_loop().create_future()
        self._asked.append((request, answer))
        self._leave_if_complete()
        return await answer

    def leave(self) -> None:
        """To be said once for every episode: it asks for nothing more."""
        self._living -= 1
        self._leave_if_complete()

    def _leave_if_complete(self) -> None:
        if not self._asked or len(self._asked) < self._living:
            return
        batch = sorted(self._asked, key=lambda asked: asked[0].episode)
        self._asked = []
        actions = self._sample([request for request, _ in batch])
        for (_, answer), action in zip(batch, actions, strict=True):
            answer.set_result(action)
