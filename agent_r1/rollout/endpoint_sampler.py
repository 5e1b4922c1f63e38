"""A policy that one did not train: a model behind an endpoint, which reads messages and writes text."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from agent_r1.http.endpoint import Endpoint
from agent_r1.rollout.chat import Chat
from agent_r1.rollout.sampling import Action, Request


class EndpointSampler:
    """Asks for every action's text, and puts it into the chat's tokens, in which all limits are counted.

    Nothing of it is token-exact: the model's own tokens and logprobs are not known, the ids are those that another
    policy would sample to write the text, and every logprob is 0. So it may be evaluated, and never learned from. What
    is longer than its request allows is cut, as a policy's action is. Requests need their messages; each is answered
    for itself, and one that is not answered is a WorldFault.
    """

    def __init__(self, endpoint: Endpoint, model: str, chat: Chat, *, concurrency: int) -> None:
        self._endpoint, self._model, self._chat = endpoint, model, chat
        self._pool = ThreadPoolExecutor(concurrency, thread_name_prefix="endpoint")

    def sample(self, requests: Sequence[Request]) -> list[Action]:
        """All of them, or the first fault."""
        return list(self._pool.map(self._act, requests))

    async def act(self, request: Request) -> Action:
        """One of them, while others are under way."""
        return await asyncio.wrap_future(self._pool.submit(self._act, request))

    def close(self) -> None:
        """Asks nothing more."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _act(self, request: Request) -> Action:
        said = self._endpoint.complete(self._model, request.messages, max_tokens=request.max_tokens)
        ids = self._chat.encode_action(self._chat.escape_action(said.text), request.context)
        if said.cut and len(ids) > 1:  # without the end token, which it did not come to
            ids = ids[:-1]
        ids = ids[: request.max_tokens]
        return Action.of(ids, [0.0] * len(ids), self._chat.end_id)
