"""The policy as a sampler on vLLM servers: token ids in and out, weights from a folder that all can read."""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from transformers import AutoConfig

from agent_r1.files import load_pretrained
from agent_r1.harmless import harmless
from agent_r1.params.stages import ServerParams
from agent_r1.rollout.sampling import Action, Actor, Engine, EngineError, Request
from agent_r1.rollout.vllm_process import read_shape, sampling_options
from agent_r1.rollout.vllm_server import VllmServer

log = logging.getLogger(__name__)


class ServerEngine(Engine):
    """Samples actions on one or more servers that `agent-r1 serve_engine` started, spreading the requests.

    A request's draws come from its own seed. Which requests meet in a batch depends on timing, so that logprobs are
    reproducible but for rounding, and a token changes where rounding decides it.
    """

    def __init__(self, settings: ServerParams, actor: Actor) -> None:
        """Makes sure that every server fits the model, and loads its weights there.

        The servers see a model's folder under the same path, and are this engine's alone while it is open. An
        EngineError names one that does not answer, was started otherwise, or runs a model of another shape.
        """
        self._servers = [VllmServer(url, settings) for url in settings.urls]
        self._pool = ThreadPoolExecutor(len(settings.urls) * settings.concurrency, thread_name_prefix="engine")
        self._free: SimpleQueue[VllmServer] = SimpleQueue()  # a server as often as it has room for a request
        for server in self._servers * settings.concurrency:
            self._free.put(server)
        self._actor = actor
        self._session = uuid.uuid4().hex[:8]  # tells these weights from those that another engine loads
        try:
            try:
                expected = read_shape(load_pretrained(AutoConfig, actor.model).get_text_config())
            except (OSError, ValueError) as error:
                raise EngineError(f"no model can be read from {actor.model!r}: {error}") from error
            for server in self._servers:
                _check(server, actor, expected)
            self.load_weights(Path(actor.model), actor.version)
        except BaseException:
            self.close()
            raise

    def sample(self, requests: Sequence[Request]) -> list[Action]:
        futures = [self._pool.submit(self._act, request) for request in requests]
        try:
            for future in as_completed(futures):
                future.result()
        finally:
            for future in futures:
                future.cancel()  # those that did not start, where one has failed
        return [future.result() for future in futures]

    async def act(self, request: Request) -> Action:
        return await asyncio.wrap_future(self._pool.submit(self._act, request))

    def load_weights(self, folder: Path, version: int) -> None:
        """Replaces the weights on every server by those of a folder or hub id and drops the caches of the old."""
        path = str(folder.resolve() if folder.is_dir() else folder)
        self._weights = f"{self._session}-{version}"
        list(self._pool.map(lambda server: server.load_weights(path, self._weights), self._servers))
        self.version = version
        log.info("%d engine servers run %s", len(self._servers), folder)

    def close(self) -> None:
        """Sends no further requests; the servers run on."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _act(self, request: Request) -> Action:
        sampling = sampling_options(self._actor, request)
        server = self._free.get()  # whichever has room first
        try:
            ids, logprobs = server.generate(request.context, sampling, self._weights)
        finally:
            self._free.put(server)
        return Action.of(ids, logprobs, self._actor.end_id)


def _check(server: VllmServer, actor: Actor, expected: dict[str, Any]) -> None:
    """Refuses a server whose model has another shape than is expected, or is too narrow."""
    found = server.describe()
    wrong = [f"{name} {found[name]!r}, not {value!r}" for name, value in expected.items() if found[name] != value]
    if wrong:
        problem = (
            f"runs another model than {actor.model}: {', '.join(wrong)}; start it with "
            f"`agent-r1 serve_engine {actor.model}`"
        )
    elif found["vocab_size"] <= actor.end_id:
        problem = (
            f"runs a model of {found['vocab_size']} tokens, and the tokenizer ends an action with token "
            f"{actor.end_id}: its vocabulary is larger than the model's; resize the model's embeddings"
        )
    elif found["max_tokens"] < actor.max_tokens:
        problem = (
            f"reads {found['max_tokens']} tokens at most, and env.max_tokens is {actor.max_tokens}; start it again, or "
            "lower env.max_tokens"
        )
    elif actor.dtype not in ("auto", found["dtype"]):
        problem = f"runs {harmless(found['dtype'])}, and model.dtype is {actor.dtype}"
    else:
        return
    raise EngineError(f"the engine server {server.url} {problem}")
