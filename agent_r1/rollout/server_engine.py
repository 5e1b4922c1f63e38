"""The policy as a sampler on vLLM servers, by HTTP: token ids in and out, weights from a folder that all can read."""

from __future__ import annotations

import logging
import time
import uuid
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import httpx
from transformers import AutoConfig

from agent_r1.files import load_pretrained
from agent_r1.params.stages import ServerParams
from agent_r1.rollout.sampling import Action, Actor, Engine, EngineError, EngineUnavailable, Request
from agent_r1.rollout.vllm_engine import read_shape, sampling_options

log = logging.getLogger(__name__)

_CONNECT_TIMEOUT_S = 10.0
_BUSY = {429, 502, 503, 504}  # the server, or what stands before it, asks to come again


class VllmServer:
    """One server that `python -m agent_r1.rollout.serve` started. Its methods may run in several threads at once."""

    def __init__(self, url: str, settings: ServerParams) -> None:
        self.url = url
        self._retries = settings.retries
        connections = settings.concurrency
        self._client = httpx.Client(
            base_url=url,
            timeout=httpx.Timeout(settings.timeout_s, connect=min(settings.timeout_s, _CONNECT_TIMEOUT_S)),
            limits=httpx.Limits(max_connections=connections, max_keepalive_connections=connections),
        )

    def describe(self) -> dict[str, Any]:
        """The shape, limit and type of the model it runs: see `agent_r1.rollout.vllm_engine.WorkerExtension`."""
        return dict(self._remote_call("describe")[0])

    def generate(self, ids: Sequence[int], sampling: dict[str, Any], weights: str) -> dict[str, Any]:
        """vLLM's answer to token ids, sampled under the label `weights` of `load_weights` and no other.

        Raises EngineUnavailable if there is no answer, and EngineError if it is a refusal or of other weights.
        """
        answer: dict[str, Any] = self._post(
            "/inference/v1/generate", {"token_ids": list(ids), "sampling_params": sampling}
        )
        found = {span["version"] for span in answer["choices"][0]["weight_versions"]}
        if found != {weights}:
            raise EngineError(
                f"the engine server {self.url} has other weights than it was given ({', '.join(sorted(found))}, not "
                f"{weights}): it was restarted, or another training uses it too; give every training its own servers"
            )
        return answer

    def load_weights(self, path: str, label: str) -> None:
        """Takes the weights of a folder and forgets all that came of the old ones; they are called `label` then."""
        self._remote_call("reload_weights", weights_path=path)
        self._remote_call("refresh_embeddings")
        if not self._post("/reset_prefix_cache")["success"]:
            raise EngineError(f"the engine server {self.url} is answering others; give every training its own servers")
        self._post("/update_weight_version", {"new_version": label})

    def close(self) -> None:
        self._client.close()

    def _remote_call(self, method: str, **arguments: str) -> Any:
        """The results of a method of vLLM's workers, a list with one from each."""
        return self._post("/collective_rpc", {"method": method, "kwargs": arguments})["results"]

    def _post(self, path: str, body: dict[str, Any] | None = None) -> Any:
        for attempt in range(self._retries + 1):
            if attempt:
                time.sleep(2.0 ** (attempt - 1))
            try:
                response = self._client.post(path, json=body or {})
            except httpx.TransportError as error:
                problem = f"{type(error).__name__}: {error}".rstrip(": ")
            else:
                if response.status_code not in _BUSY:
                    return self._content(path, response)
                problem = f"status {response.status_code}"
            log.warning("%s%s: %s, attempt %d of %d", self.url, path, problem, attempt + 1, self._retries + 1)
        raise EngineUnavailable(
            f"the engine server {self.url} did not answer {path} in {self._retries + 1} attempts ({problem}); start it "
            "with `python -m agent_r1.rollout.serve MODEL --port PORT`, correct engine.server.urls, or raise "
            "engine.server.timeout_s"
        )

    def _content(self, path: str, response: httpx.Response) -> Any:
        if response.status_code == httpx.codes.NOT_FOUND:
            raise EngineError(
                f"the engine server {self.url} has no {path}: it was not started with "
                "`python -m agent_r1.rollout.serve`, which opens what trainings need"
            )
        if response.is_error:
            raise EngineError(f"the engine server {self.url} refused {path}: {response.text[:2000]}")
        return response.json()


class ServerEngine(Engine):
    """Samples actions on one or more servers that `python -m agent_r1.rollout.serve` started, spreading the requests.

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

    def load_weights(self, folder: Path, version: int) -> None:
        """Replaces the weights on every server by those of a folder or hub id and drops the caches of the old."""
        path = str(folder.resolve() if folder.is_dir() else folder)
        self._weights = f"{self._session}-{version}"
        list(self._pool.map(lambda server: server.load_weights(path, self._weights), self._servers))
        self.version = version
        log.info("%d engine servers run %s", len(self._servers), folder)

    def close(self) -> None:
        """Closes the connections; the servers run on."""
        self._pool.shutdown(wait=False, cancel_futures=True)
        for server in self._servers:
            server.close()

    def _act(self, request: Request) -> Action:
        sampling = {**sampling_options(self._actor), "seed": request.seed, "max_tokens": request.max_tokens}
        server = self._free.get()  # whichever has room first
        try:
            choice = server.generate(request.context, sampling, self._weights)["choices"][0]
        finally:
            self._free.put(server)
        logprobs = [token["logprob"] for token in choice["logprobs"]["content"]]
        return Action.of(choice["token_ids"], logprobs, self._actor.end_id)


def _check(server: VllmServer, actor: Actor, expected: dict[str, Any]) -> None:
    """Refuses a server whose model has another shape than is expected, or is too narrow."""
    found = server.describe()
    wrong = [f"{name} {found[name]!r}, not {value!r}" for name, value in expected.items() if found[name] != value]
    if wrong:
        problem = (
            f"runs another model than {actor.model}: {', '.join(wrong)}; start it with "
            f"`python -m agent_r1.rollout.serve {actor.model}`"
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
        problem = f"runs {found['dtype']}, and model.dtype is {actor.dtype}"
    else:
        return
    raise EngineError(f"the engine server {server.url} {problem}")
