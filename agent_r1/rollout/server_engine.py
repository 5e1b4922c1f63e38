"""The policy as a sampler on vLLM servers: token ids in and out, weights from a folder that all can read."""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from pathlib import Path
from threading import BoundedSemaphore, Lock
from typing import Any

from transformers import AutoConfig

from agent_r1.files import load_pretrained
from agent_r1.harmless import harmless
from agent_r1.params.stages import ServerParams
from agent_r1.rollout.sampling import Action, Actor, Engine, EngineError, EngineRestarted, EngineUnavailable, Request
from agent_r1.rollout.vllm_process import read_shape, sampling_options
from agent_r1.rollout.vllm_server import BadRequestError, VllmServer

log = logging.getLogger(__name__)


class ServerEngine(Engine):
    """Samples actions on one or more servers that `agent-r1 serve_engine` started.

    An episode stays with its home server, where its prefix is cached. A server that fails is left out until the next
    weights, with a warning, and its requests are asked at the next one; a call fails when none is left. A request's
    draws come from its own seed. Which requests meet in a batch depends on timing, so that logprobs are reproducible
    but for rounding, and a token changes where rounding decides it; servers of one thread on a CPU do not round so.
    """

    def __init__(self, settings: ServerParams, actor: Actor) -> None:
        """Makes sure that every server fits the model, and loads its weights there.

        The servers see a model's folder under the same path, and are this engine's alone while it is open. An
        EngineError names one that was started otherwise or runs a model of another shape; EngineUnavailable says that
        none answers.
        """
        self.homes = len(settings.urls)
        self._homes = [_Home(url, settings) for url in settings.urls]
        self._actor = actor
        self._session = uuid.uuid4().hex[:8]  # tells these weights from those that another engine loads
        try:
            try:
                self._shape = read_shape(load_pretrained(AutoConfig, actor.model).get_text_config())
            except (OSError, ValueError) as error:
                raise EngineError(f"no model can be read from {actor.model!r}: {error}") from error
            for home in self._homes:
                try:
                    _check(home.server, actor, self._shape)
                except EngineUnavailable as fault:
                    home.leave_out(fault)
            self.load_weights(Path(actor.model), actor.version)
        except BaseException:
            self.close()
            raise

    def sample(self, requests: Sequence[Request]) -> list[Action]:
        futures = [self._submit(request) for request in requests]
        try:
            for future in as_completed(futures):
                future.result()
        finally:
            for future in futures:
                future.cancel()  # those that did not start, where one has failed
        return [future.result() for future in futures]

    async def act(self, request: Request) -> Action:
        return await asyncio.wrap_future(self._submit(request))

    def load_weights(self, folder: Path, version: int) -> None:
        """Replaces the weights on every server by those of a folder or hub id and drops the caches of the old.

        One that was left out is taken back if it answers and still fits the model.
        """
        path = str(folder.resolve() if folder.is_dir() else folder)
        self._weights = f"{self._session}-{version}"
        for loading in [home.pool.submit(self._load, home, path) for home in self._homes]:
            loading.result()
        if all(home.fault for home in self._homes):
            raise self._none_left()
        self.version = version
        running = sum(not home.fault for home in self._homes)
        log.info("%d of %d engine servers run %s", running, self.homes, folder)

    def close(self) -> None:
        """Sends no further requests; the servers run on."""
        for home in self._homes:
            home.pool.shutdown(wait=False, cancel_futures=True)

    def _load(self, home: _Home, path: str) -> None:
        """Gives a server its weights, or leaves it out."""
        try:
            if home.fault:  # it may have come back, and as another one
                if not home.server.answers():
                    return
                _check(home.server, self._actor, self._shape)
            home.server.load_weights(path, self._weights)
            home.fault = None
        except EngineError as fault:
            home.leave_out(fault)

    def _submit(self, request: Request) -> Future[Action]:
        return self._homes[request.home(self.homes)].pool.submit(self._act, request)

    def _act(self, request: Request) -> Action:
        """The action that its home server samples, or the next one that can."""
        sampling, own = sampling_options(self._actor, request), request.home(self.homes)
        in_turn = [*self._homes[own:], *self._homes[:own]]
        for home in sorted(in_turn, key=lambda home: home.fault is not None):  # one left out may answer after all
            try:
                with home.room:
                    ids, logprobs = home.server.generate(request.context, sampling, self._weights)
            except BadRequestError:
                raise
            except EngineError as fault:
                home.leave_out(fault)
            else:
                return Action.of(ids, logprobs, self._actor.end_id)
        raise self._none_left()

    def _none_left(self) -> EngineError:
        """What to raise where every server was left out: as hopeful as the most hopeful of their faults."""
        faults = [home.fault for home in self._homes if home.fault]
        kinds = (EngineUnavailable, EngineRestarted, EngineError)
        kind = next(kind for kind in kinds if any(isinstance(fault, kind) for fault in faults))
        return kind("; ".join(map(str, faults)))


class _Home:
    """A server with the threads that wait for it."""

    def __init__(self, url: str, settings: ServerParams) -> None:
        self.server = VllmServer(url, settings)
        self.pool = ThreadPoolExecutor(settings.concurrency, thread_name_prefix="engine")
        self.room = BoundedSemaphore(settings.concurrency)  # also for requests whose home is another
        self.fault: EngineError | None = None  # why it is left out
        self._telling = Lock()

    def leave_out(self, fault: EngineError) -> None:
        """Says so, once, though several threads may find out at the same time."""
        with self._telling:
            if self.fault is None:
                log.warning("%s is left out until the next weights: %s", self.server.url, fault)
            self.fault = fault


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
