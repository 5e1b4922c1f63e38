"""A vLLM server by URL: requests with a time limit, repeated while the server does not answer."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from typing import Any

import httpx

from agent_r1.rollout.sampling import EngineError, EngineUnavailable

log = logging.getLogger(__name__)

_CONNECT_TIMEOUT_S = 10.0
_BUSY = {429, 502, 503, 504}  # the server, or what stands before it, asks to come again


class VllmServer:
    """One server that `python -m agent_r1.rollout.serve` started. Its methods may run in several threads at once."""

    def __init__(self, url: str, *, connections: int, timeout_s: float, retries: int) -> None:
        self.url = url
        self._retries = retries
        self._client = httpx.Client(
            base_url=url,
            timeout=httpx.Timeout(timeout_s, connect=min(timeout_s, _CONNECT_TIMEOUT_S)),
            limits=httpx.Limits(max_connections=connections, max_keepalive_connections=connections),
        )

    def describe(self) -> dict[str, Any]:
        """The shape, limit and type of the model it runs: see `agent_r1.rollout.worker.WorkerExtension.describe`."""
        described: dict[str, Any] = self._remote_call("describe")[0]
        return described

    def generate(self, ids: Sequence[int], sampling: dict[str, Any], weights: str) -> dict[str, Any]:
        """vLLM's answer to token ids.

        Args:
            sampling: vLLM's `SamplingParams`.
            weights: the label of `load_weights` under which every token must have been sampled.

        Raises:
            EngineUnavailable: no answer.
            EngineError: a refusal, or other weights.
        """
        answer = self._post("/inference/v1/generate", {"token_ids": list(ids), "sampling_params": sampling})
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

    def _remote_call(self, method: str, **arguments: str) -> list[Any]:
        """The results of a method of vLLM's workers, one from each."""
        results: list[Any] = self._post("/collective_rpc", {"method": method, "kwargs": arguments})["results"]
        return results

    def _post(self, path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
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

    def _content(self, path: str, response: httpx.Response) -> dict[str, Any]:
        if response.status_code == httpx.codes.NOT_FOUND:
            raise EngineError(
                f"the engine server {self.url} has no {path}: it was not started with "
                "`python -m agent_r1.rollout.serve`, which opens what trainings need"
            )
        if response.is_error:
            raise EngineError(f"the engine server {self.url} refused {path}: {response.text[:2000]}")
        content: dict[str, Any] = response.json()
        return content
