"""One vLLM server by HTTP: what it is asked, what it may answer, and what is refused of that."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Sequence
from typing import Annotated, Any

from pydantic import BaseModel, FailFast, Field

from agent_r1.harmless import harmless
from agent_r1.http.client import Answer, BadAnswerError, Client, Shape, read_key
from agent_r1.params.stages import ServerParams
from agent_r1.rollout.sampling import EngineError, EngineRestarted, EngineUnavailable
from agent_r1.rollout.vllm_engine import SERVER_KEY

log = logging.getLogger(__name__)

_BUSY = {429, 502, 503, 504}  # the server, or what stands before it, asks to come again
_FRESH = "default"  # what a server calls the weights that it was started with
_SHOWN = 100  # characters of what a server calls its weights
_BAD_REQUEST, _UNAUTHORIZED, _NOT_FOUND = 400, 401, 404
_Id = Annotated[int, Field(ge=0)]
_Logprob = Annotated[float, Field(le=1e-3, allow_inf_nan=False)]  # nats; rounding lifts that of a sure token above 0


class _Token(BaseModel):
    logprob: _Logprob


class _Logprobs(BaseModel):
    content: Annotated[list[_Token], FailFast()]


class _Span(BaseModel):
    version: str  # of the weights that sampled these tokens


class _Choice(BaseModel):
    token_ids: Annotated[list[_Id], FailFast()]
    logprobs: _Logprobs
    weight_versions: Annotated[list[_Span], FailFast()]


class _Generated(BaseModel):
    """The answer to /inference/v1/generate."""

    choices: Annotated[list[_Choice], Field(min_length=1, max_length=1), FailFast()]


class _Description(BaseModel):
    """What `agent_r1.rollout.vllm_process.WorkerExtension` says of the model: `read_shape` and two more."""

    model_type: str | None
    vocab_size: _Id
    hidden_size: int | None
    num_hidden_layers: int | None
    max_tokens: _Id
    dtype: str


class _Results(BaseModel):
    """The answer to a method of vLLM's workers, a list with one from each."""

    results: Annotated[list[Any], Field(min_length=1)]


class _Descriptions(_Results):
    results: Annotated[list[_Description], Field(min_length=1), FailFast()]


class _Cleared(BaseModel):
    """The answer to /reset_prefix_cache."""

    success: bool


class _Anything(BaseModel):
    """An answer of which nothing is read."""


class BadRequestError(EngineError):
    """What was asked cannot be answered, by this server or by another."""


def connect(url: str, timeout_s: float) -> Client:
    """A client that sends the key of the engine servers, where there is one."""
    return Client(url, timeout_s, read_key(SERVER_KEY))


class VllmServer:
    """One server that `agent-r1 serve_engine` started. Its methods may run in several threads at once."""

    def __init__(self, url: str, settings: ServerParams) -> None:
        self.url = url
        self._retries = settings.retries
        self._client = connect(url, settings.timeout_s)
        self._vocab_size = 0  # until it describes itself

    def answers(self) -> bool:
        """Whether it is there, asked once."""
        try:
            self._client.require_health()
        except (OSError, BadAnswerError):
            return False
        return True

    def describe(self) -> dict[str, Any]:
        """The shape, limit and type of the model it runs: see `agent_r1.rollout.vllm_process.WorkerExtension`."""
        found = self._remote_call(_Descriptions, "describe").results[0]
        self._vocab_size = found.vocab_size
        return found.model_dump()

    def generate(self, ids: Sequence[int], sampling: dict[str, Any], weights: str) -> tuple[list[int], list[float]]:
        """The ids and logprobs that follow on token ids, sampled under the label `weights` of `load_weights`.

        Raises EngineUnavailable if there is no answer, EngineRestarted if it is of the weights that the server was
        started with, and EngineError if it is of others, a refusal, or none that vLLM gives.
        """
        path = "/inference/v1/generate"
        [choice] = self._post(_Generated, path, {"token_ids": list(ids), "sampling_params": sampling}).choices
        found = {span.version for span in choice.weight_versions}
        if found == {_FRESH}:
            raise EngineRestarted(f"the engine server {self.url} was restarted: it has lost the weights {weights}")
        if found != {weights}:
            others = harmless(", ".join(sorted(found)))[:_SHOWN]
            raise EngineError(
                f"the engine server {self.url} has other weights than it was given ({others}, not {weights}): "
                "another training uses it too; give every training its own servers"
            )
        sampled, logprobs = choice.token_ids, [token.logprob for token in choice.logprobs.content]
        most, [end_id] = sampling["max_tokens"], sampling["stop_token_ids"]
        if not 1 <= len(sampled) == len(logprobs) <= most:
            raise self._nonsense(path, f"{len(sampled)} tokens and {len(logprobs)} logprobs, of 1 to {most} of each")
        if max(sampled) >= self._vocab_size:
            raise self._nonsense(path, f"token {max(sampled)}, of a vocabulary of {self._vocab_size}")
        if end_id in sampled[:-1]:
            raise self._nonsense(path, f"tokens after {end_id}, which ends an action")
        return sampled, logprobs

    def load_weights(self, path: str, label: str) -> None:
        """Takes the weights of a folder and forgets all that came of the old ones; they are called `label` then."""
        self._remote_call(_Results, "reload_weights", weights_path=path)
        self._remote_call(_Results, "refresh_embeddings")
        if not self._post(_Cleared, "/reset_prefix_cache").success:
            raise EngineError(f"the engine server {self.url} is answering others; give every training its own servers")
        self._post(_Anything, "/update_weight_version", {"new_version": label})

    def _remote_call(self, kind: type[Shape], method: str, **arguments: str) -> Shape:
        """The answer to a method of vLLM's workers."""
        return self._post(kind, "/collective_rpc", {"method": method, "kwargs": arguments})

    def _post(self, kind: type[Shape], path: str, body: dict[str, Any] | None = None) -> Shape:
        for attempt in range(self._retries + 1):
            if attempt:
                time.sleep(2.0 ** (attempt - 1))
            try:
                answer = self._client.ask("POST", path, json.dumps(body or {}))
                if answer.status not in _BUSY:
                    self._refuse(path, answer)
                    return answer.parse(kind)
                problem = f"status {answer.status}"
            except (TimeoutError, ConnectionError) as error:
                problem = str(error)
            except BadAnswerError as error:
                raise self._nonsense(path, str(error)) from None
            log.warning("%s%s: %s, attempt %d of %d", self.url, path, problem, attempt + 1, self._retries + 1)
        raise EngineUnavailable(
            f"the engine server {self.url} did not answer {path} in {self._retries + 1} attempts ({problem}); start it "
            "with `agent-r1 serve_engine MODEL --port PORT`, correct engine.server.urls, or raise "
            "engine.server.timeout_s"
        )

    def _refuse(self, path: str, answer: Answer) -> None:
        """Raises EngineError where an answer is an error."""
        if answer.status == _NOT_FOUND:
            raise EngineError(
                f"the engine server {self.url} has no {path}: it was not started with "
                "`agent-r1 serve_engine`, which opens what trainings need"
            )
        if answer.status == _UNAUTHORIZED:
            raise EngineError(f"the engine server {self.url} has another key; set {SERVER_KEY} to what it is there")
        if answer.status != 200:
            kind = BadRequestError if answer.status == _BAD_REQUEST else EngineError
            raise kind(f"the engine server {self.url} refused {path}: {answer.excerpt}")

    def _nonsense(self, path: str, problem: str) -> EngineError:
        return EngineError(
            f"the engine server {self.url} answered {path} with something else than vLLM does: {problem}"
        )
