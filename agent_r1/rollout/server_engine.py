"""The policy as a sampler on vLLM servers: token ids in and out, weights from a folder that all can read."""

from __future__ import annotations

import asyncio
import json
import logging
import uuid
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from pathlib import Path
from threading import BoundedSemaphore, Lock
from typing import Annotated, Any

from pydantic import BaseModel, FailFast, Field
from transformers import AutoConfig

from agent_r1.files import load_pretrained
from agent_r1.harmless import harmless
from agent_r1.http.client import BUSY, BadAnswerError, Client, RefusalError, Retries, Shape, read_key
from agent_r1.params.stages import ServerParams
from agent_r1.rollout.sampling import Action, Actor, Engine, EngineError, EngineRestarted, EngineUnavailable, Request
from agent_r1.rollout.vllm_engine import SERVER_KEY
from agent_r1.rollout.vllm_process import read_shape, sampling_options

_FRESH = "default"  # the label of the weights that a server was started with
_SHOWN = 100  # characters of a server's labels in a message
_Id = Annotated[int, Field(ge=0)]
_Logprob = Annotated[float, Field(le=1e-3, allow_inf_nan=False)]  # nats; rounding lifts that of a sure token above 0

logger = logging.getLogger(__name__)


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
    """A model's `read_shape` and two more, by `agent_r1.rollout.vllm_process.WorkerExtension`."""

    model_type: str | None
    vocab_size: _Id
    hidden_size: int | None
    num_hidden_layers: int | None
    max_tokens: _Id
    dtype: str


class _Results(BaseModel):
    """The results of a method that vLLM's workers ran, one of each worker."""

    results: Annotated[list[Any], Field(min_length=1)]


class _Descriptions(_Results):
    results: Annotated[list[_Description], Field(min_length=1), FailFast()]


class _Cleared(BaseModel):
    """The answer to /reset_prefix_cache."""

    success: bool


class _Anything(BaseModel):
    """An answer that is not read."""


class BadRequestError(EngineError):
    """A request that no server can answer."""


def connect(url: str, timeout_s: float) -> Client:
    """A client that sends the key of the engine servers, if there is one."""
    return Client(url, timeout_s, read_key(SERVER_KEY))


class VllmServer:
    """One server that `agent-r1 serve_engine` started. Its methods may run in several threads at once."""

    def __init__(self, url: str, settings: ServerParams) -> None:
        self.url = url
        self._who = f"the engine server {url}"
        self._retries = Retries(self._who, settings.retries)
        self._client = connect(url, settings.timeout_s)
        self._vocab_size = 0  # until it describes itself

    def answers(self) -> bool:
        """Whether the server answers, asked once."""
        try:
            self._client.require_health()
        except (OSError, BadAnswerError):
            return False
        return True

    def describe(self) -> dict[str, Any]:
        """The shape, limit and type of the server's model; see `agent_r1.rollout.vllm_process.WorkerExtension`."""
        found = self._remote_call(_Descriptions, "describe").results[0]
        self._vocab_size = found.vocab_size
        return found.model_dump()

    def generate(self, ids: Sequence[int], sampling: dict[str, Any], weights: str) -> tuple[list[int], list[float]]:
        """The ids and logprobs that follow on token ids, sampled from the weights that `load_weights` labelled.

        Raises EngineUnavailable if there is no answer, EngineRestarted if it comes from the weights that the server was
        started with, and EngineError if it comes from others, is a refusal, or has not vLLM's form.
        """
        path = "/inference/v1/generate"
        [choice] = self._post(_Generated, path, {"token_ids": list(ids), "sampling_params": sampling}).choices
        found = {span.version for span in choice.weight_versions}
        if found == {_FRESH}:
            raise EngineRestarted(f"{self._who} was restarted: it has lost the weights {weights}")
        if found != {weights}:
            others = harmless(", ".join(sorted(found)))[:_SHOWN]
            raise EngineError(
                f"{self._who} has other weights than it was given ({others}, not {weights}): another training uses it "
                "too; give every training its own servers"
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
        """Loads the weights of a folder, labels them, and drops the caches of the old ones."""
        self._remote_call(_Results, "reload_weights", weights_path=path)
        self._remote_call(_Results, "refresh_embeddings")
        if not self._post(_Cleared, "/reset_prefix_cache").success:
            raise EngineError(f"{self._who} is answering others; give every training its own servers")
        self._post(_Anything, "/update_weight_version", {"new_version": label})

    def _remote_call(self, kind: type[Shape], method: str, **arguments: str) -> Shape:
        return self._post(kind, "/collective_rpc", {"method": method, "kwargs": arguments})

    def _post(self, kind: type[Shape], path: str, body: dict[str, Any] | None = None) -> Shape:
        content, attempts = json.dumps(body or {}), self._retries.attempts
        try:
            return self._retries.run(lambda: self._attempt(kind, path, content))
        except (TimeoutError, ConnectionError) as fault:
            raise EngineUnavailable(
                f"{self._who} did not answer {path} in {attempts} attempts ({fault}); start it with "
                "`agent-r1 serve_engine MODEL --port PORT`, correct engine.server.urls, or raise "
                "engine.server.timeout_s"
            ) from None

    def _attempt(self, kind: type[Shape], path: str, content: str) -> Shape:
        try:
            return self._client.ask("POST", path, content).require_ok(BUSY).parse(kind)
        except BadAnswerError as fault:
            raise self._nonsense(path, str(fault)) from None
        except RefusalError as fault:
            raise self._refused(path, fault) from None

    def _refused(self, path: str, fault: RefusalError) -> EngineError:
        """The error for a refusal, with its remedy."""
        match fault.answer.status:
            case 404:
                return EngineError(
                    f"{self._who} has no {path}: it was not started with `agent-r1 serve_engine`, which opens all that "
                    "trainings need"
                )
            case 401:
                return EngineError(f"{self._who} has another key; set {SERVER_KEY} to the same here")
            case 400:
                return BadRequestError(f"{self._who} refused {path}: {fault.answer.reason}")
        return EngineError(f"{self._who} refused {path}: {fault.answer.reason}")

    def _nonsense(self, path: str, problem: str) -> EngineError:
        return EngineError(f"{self._who} answered {path} with something else than vLLM does: {problem}")


class ServerEngine(Engine):
    """Samples actions on one or more servers that `agent-r1 serve_engine` started.

    An episode stays with its home server, which caches its prefix. A server that fails is left out until the next
    weights, with a warning, and its requests go to the next one; a call fails when none is left. A request's draws come
    from its own seed. Timing decides which requests share a batch, so that logprobs are reproducible but for rounding,
    and a token changes where rounding decides it; servers of one thread on a CPU do not round so.
    """

    def __init__(self, settings: ServerParams, actor: Actor) -> None:
        """Checks that every server fits the model, and loads its weights there.

        The servers must see the model's folder under the same path, and serve this engine alone while it is open.
        Raises EngineError for a server that was started otherwise or runs a model of another shape, and
        EngineUnavailable if none answers.
        """
        try:
            self._shape = read_shape(load_pretrained(AutoConfig, actor.model).get_text_config())
        except (OSError, ValueError) as error:
            raise EngineError(f"no model can be read from {actor.model!r}: {error}") from error
        self.homes = len(settings.urls)
        self._homes = [_Home(url, settings) for url in settings.urls]
        self._actor = actor
        self._session = uuid.uuid4().hex[:8]  # in the labels of this engine's weights, and of no other's
        try:
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
                future.cancel()  # after a failure: the others need not start
        return [future.result() for future in futures]

    async def act(self, request: Request) -> Action:
        return await asyncio.wrap_future(self._submit(request))

    def load_weights(self, folder: Path, version: int) -> None:
        """Replaces the weights on every server by those of a folder or hub id and drops the caches of the old ones.

        A server that was left out is taken back if it answers and still fits the model.
        """
        path = str(folder.resolve() if folder.is_dir() else folder)
        self._weights = f"{self._session}-{version}"
        for loading in [home.pool.submit(self._load, home, path) for home in self._homes]:
            loading.result()
        if all(home.fault for home in self._homes):
            raise self._none_left()
        self.version = version
        running = sum(not home.fault for home in self._homes)
        logger.info("%d of %d engine servers run %s", running, self.homes, folder)

    def close(self) -> None:
        """Sends no more requests; the servers run on."""
        for home in self._homes:
            home.pool.shutdown(wait=False, cancel_futures=True)

    def _load(self, home: _Home, path: str) -> None:
        """Gives a server its weights, or leaves it out."""
        try:
            if home.fault:  # the server may have come back, and with another model
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
        """The action that the home server samples, or the next server that can."""
        sampling, own = sampling_options(self._actor, request), request.home(self.homes)
        in_turn = [*self._homes[own:], *self._homes[:own]]
        for home in sorted(in_turn, key=lambda home: home.fault is not None):  # a faulty one may answer after all
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
        """The error when every server is left out: of the most hopeful kind among their faults."""
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
        """Warns once, though several threads may meet faults at the same time."""
        with self._telling:
            if self.fault is None:
                logger.warning("%s is left out until the next weights: %s", self.server.url, fault)
            self.fault = fault


def _check(server: VllmServer, actor: Actor, expected: dict[str, Any]) -> None:
    """Refuses a server whose model has another shape, vocabulary, window or type than the actor needs."""
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
