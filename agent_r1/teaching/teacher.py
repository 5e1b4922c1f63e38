"""A teacher at a server: the reference of a run, in a process that others keep, behind vLLM's own API."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache, partial

import numpy as np
from transformers import PreTrainedTokenizerBase

from agent_r1.http.endpoint import Endpoint, Scored
from agent_r1.params.stages import ServerParams
from agent_r1.records import Floats32, Mask, Trajectory


class ServedTeacher:
    """Stands in for a `Reference`. The text of every scored token there is held against the student's."""

    def __init__(self, served: tuple[str, str], limits: ServerParams, tokenizer: PreTrainedTokenizerBase) -> None:
        """`served` is the model's name and its address. It is asked for one score, before a run samples.

        Raises ValueError if the model there is refused, and WorldFault if no answer comes.
        """
        self._model, url = served
        self._at_a_time = limits.concurrency
        self._endpoint = Endpoint(url, timeout_s=limits.timeout_s, retries=limits.retries)
        self._endpoint.score(self._model, [0, 1])
        self._text_of = cache(lambda token: tokenizer.decode([token]))

    def logprobs(self, trajectories: Sequence[Trajectory], masks: Sequence[Mask]) -> list[Floats32]:
        """The logprobs [L] of the masked tokens in nats, 0 elsewhere.

        Raises ValueError if the model there has other tokens or is refused, and WorldFault if no answer comes.
        """
        contexts = [row.token_ids[span].tolist() for row in trajectories for span in row.contexts]
        with ThreadPoolExecutor(self._at_a_time) as pool:
            scores = list(pool.map(partial(self._endpoint.score, self._model), contexts))
        logprobs = iter([*map(self._logprobs, contexts, scores)])
        rows = [np.concatenate([next(logprobs) for _ in row.contexts]) for row in trajectories]
        return [np.where(mask, row, np.float32(0)) for row, mask in zip(rows, masks, strict=True)]

    def _logprobs(self, ids: Sequence[int], tokens: Sequence[Scored]) -> Floats32:
        """The logprobs of a context's tokens, 0 for its first."""
        for index, token in zip(ids[1:], tokens, strict=True):
            self._require_same(index, token.decoded_token)
        return np.array([0.0, *(token.logprob for token in tokens)], np.float32)

    def _require_same(self, token: int, text: str) -> None:
        own_text = self._text_of(token)
        if "\ufffd" not in own_text and own_text != text:  # of a part of a character servers tell none, or another text
            raise ValueError(
                f"token {token} is {own_text!r} here and {text[:20]!r} for {self._model} at {self._endpoint.url}: "
                "train.reference has other tokens than the student; take a model with the same tokenizer"
            )
