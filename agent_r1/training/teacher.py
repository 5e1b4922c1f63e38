"""A teacher at a server: the reference of a run, in a process that others keep, behind vLLM's own API."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache, partial

import numpy as np
from transformers import PreTrainedTokenizerBase

from agent_r1.http.endpoint import Endpoint
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
        contexts = [row.token_ids[where].tolist() for row in trajectories for where in row.contexts]
        with ThreadPoolExecutor(self._at_a_time) as pool:
            scored = list(pool.map(partial(self._endpoint.score, self._model), contexts))
        for ids, told in zip(contexts, scored, strict=True):
            for token, each in zip(ids[1:], told, strict=True):
                self._require_same(token, each.decoded_token)
        rows = iter([np.array([0.0, *(each.logprob for each in told)], np.float32) for told in scored])
        whole = [np.concatenate([next(rows) for _ in each.contexts]) for each in trajectories]
        return [np.where(mask, row, np.float32(0)) for row, mask in zip(whole, masks, strict=True)]

    def _require_same(self, token: int, there: str) -> None:
        here = self._text_of(token)
        if "\ufffd" not in here and here != there:  # of a part of a character servers tell none, or another text
            raise ValueError(
                f"token {token} is {here!r} here and {there[:20]!r} for {self._model} at {self._endpoint.url}: "
                "train.reference has other tokens than the student; take a model with the same tokenizer"
            )
