"""A sampler that acts out scripts: the same loop that collects episodes makes demonstrations."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from agent_r1.records import StopReason
from agent_r1.rollout.chat import Chat
from agent_r1.rollout.sampling import Action, Request


class ScriptedSampler:
    """Plays given action texts; its logprobs are 0.

    An action that is longer than the request allows is cut, as a policy's would be.
    """

    def __init__(self, scripts: Sequence[Sequence[str]], chat: Chat) -> None:
        """`scripts[episode][step]` is an action's text, without the end token."""
        self._scripts = scripts
        self._chat = chat

    def sample(self, requests: Sequence[Request]) -> list[Action]:
        """The next action of each request's script; a script must last as long as its episode."""
        return [self._act(request) for request in requests]

    def _act(self, request: Request) -> Action:
        script = self._scripts[request.episode]
        assert request.step < len(script), f"the script of episode {request.episode} ends before the episode does"
        ids = self._chat.encode_action(script[request.step], request.context)
        whole = len(ids) <= request.max_tokens
        ids = ids[: request.max_tokens]
        return Action(
            token_ids=ids,
            logprobs=np.zeros(len(ids), np.float32),
            stop_reason=StopReason.END if whole else StopReason.LENGTH,
        )
