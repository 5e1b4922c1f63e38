"""The client's side of vLLM: what all its processes have in common, and an engine on stock servers that others run."""

from __future__ import annotations

import asyncio
import logging
import uuid
from abc import abstractmethod
from collections.abc import Awaitable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Annotated, Any, TypeVar
from weakref import WeakKeyDictionary

import numpy as np
from pydantic import BaseModel, FailFast, Field
from transformers import AutoConfig

from agent_r1.files import load_pretrained
from agent_r1.harmless import harmless
from agent_r1.http.client import BUSY, MAX_ANSWER_BYTES, BadAnswerError, Client, RefusalError, Retries, Shape, read_key
from agent_r1.params.stages import ServerParams
from agent_r1.rollout import engine_wire as wire
from agent_r1.rollout.sampling import (
    Action,
    Actor,
    Engine,
    EngineError,
    EngineRestarted,
    EngineUnavailable,
    HeldWeights,
    Request,
)
from agent_r1.surroundings import room
from agent_r1.weight_sums import Slice, joined

SERVER_KEY = "AGENT_R1_ENGINE_KEY"  # the key of stock servers, or of a proxy before them
START = (
    "start it with `VLLM_SERVER_DEV_MODE=1 python -m vllm.entrypoints.openai.api_server --model MODEL --tokens-only "
    f"--worker-extension-cls {wire.EXTENSION}`"
)
_RPC = "/collective_rpc"
_GENERATE = "/inference/v1/generate"
_MISSING = {_RPC: "VLLM_SERVER_DEV_MODE=1", _GENERATE: "--tokens-only"}  # from the start of a server without the route
_TOKEN_BYTES = 512  # of a sampled token in a stock server's JSON, at most
_FRESH = "default"  # the version of the weights that a stock server is started with
_SHOWN = 100  # characters of a server's version in a message
_SURE = 1e-3  # nats; rounding lifts the logprob of a sure token above 0
_NO_NUMBER = -9999.0  # what a stock server writes for a logprob that is none
_RELEASE_S = 5.0  # that new weights wait for requests whose callers have left

T = TypeVar("T")
logger = logging.getLogger(__name__)


class BadRequestError(EngineError):
    """A request that no server can answer."""


def draw(request: Request, actor: Actor) -> wire.Draw:
    """A request in vLLM's words."""
    params = wire.Sampling(
        seed=request.seed,
        max_tokens=request.max_tokens,
        temperature=0.0 if request.greedy else actor.temperature,
        stop_token_ids=list(actor.end_ids),
    )
    return wire.Draw(token_ids=request.context, sampling_params=params)


class Server:
    """A process of vLLM, asked over HTTP: how its answers are read, and what is wrong with them."""

    remedy = ""  # for a server that does not answer
    refusals: Mapping[int, str] = {}  # what a status says, and its remedy

    def __init__(self, name: str, client: Client, retries: int = 0) -> None:
        """`name` stands in messages."""
        self.name = name
        self._client = client
        self._retries = Retries(name, retries)
        self.model: wire.Description  # once it has described itself

    async def describe(self) -> wire.Description:
        """The shape, limit and type of the server's model."""
        [self.model, *_] = await self._call(wire.Results[wire.Description], "describe")
        return self.model

    async def held(self) -> HeldWeights:
        """The weights that the server computes with; of a model with adapters, theirs alone."""
        ranks = await self._call(wire.Results[list[Slice]], "weight_sums")
        return HeldWeights(sampler=self.name, dtype=self.model.dtype, sums=joined(ranks))

    async def _call(self, kind: type[wire.Results[T]], method: str, **kwargs: str) -> list[T]:
        """What each of the server's workers returns for a call of a method of `WorkerExtension`."""
        return (await self._post(kind, _RPC, wire.Call(method=method, kwargs=kwargs))).results

    def _action(self, path: str, sampled: wire.Sampled, most: int, end_ids: Sequence[int]) -> Action:
        """The action, if it is one of at most so many tokens."""
        if problem := self._problem(sampled, most, end_ids):
            raise self._nonsense(path, problem)
        return Action.of(sampled.ids, sampled.logprobs, end_ids)

    def _problem(self, sampled: wire.Sampled, most: int, end_ids: Sequence[int]) -> str:
        """A fault of an action, in words; "" for none."""
        ids = sampled.ids
        logprobs = np.array(sampled.logprobs)
        if not 1 <= len(ids) == len(logprobs) <= most:
            return f"{len(ids)} tokens and {len(logprobs)} logprobs, of 1 to {most} of each"
        if max(ids) >= self.model.vocab_size:
            return f"token {max(ids)}, of a vocabulary of {self.model.vocab_size}"
        if early := [index for index in ids[:-1] if index in end_ids]:
            return f"tokens after {early[0]}, which ends an action"
        if not np.isfinite(logprobs).all() or logprobs.min() <= _NO_NUMBER:
            return "logprobs that are not all finite; start again with a lower train.update.learning_rate"
        if logprobs.max() > _SURE:
            return f"a logprob of {logprobs.max():g}"
        return ""

    async def _post(
        self, kind: type[Shape], path: str, body: BaseModel | None = None, most_bytes: int = MAX_ANSWER_BYTES
    ) -> Shape:
        content = body.model_dump_json() if body else "{}"
        attempts = self._retries.attempts
        try:
            return await self._retries.run(lambda: self._attempt(kind, path, content, most_bytes))
        except (TimeoutError, ConnectionError) as fault:
            raise EngineUnavailable(
                f"{self.name} did not answer {path} in {attempts} attempts ({fault}){self.remedy}"
            ) from None

    async def _attempt(self, kind: type[Shape], path: str, content: str, most_bytes: int) -> Shape:
        try:
            return (await self._client.answer("POST", path, content, most_bytes)).require_ok(BUSY).parse(kind)
        except BadAnswerError as fault:
            raise self._nonsense(path, str(fault)) from None
        except RefusalError as fault:
            status = fault.answer.status
            reason = fault.answer.reason
            kind_of = BadRequestError if status == 400 else EngineError
            raise kind_of(f"{self.name} refused {path}: {self._said(path, status, reason)}") from None

    def _said(self, path: str, status: int, reason: str) -> str:
        """A refusal in words, with its remedy."""
        return reason

    def _nonsense(self, path: str, problem: str) -> EngineError:
        return EngineError(f"{self.name} answered {path} with something else than vLLM does: {problem}")


class _At(BaseModel):
    """A sampled token."""

    token_id: int
    logprob: float


class _Logprobs(BaseModel):
    content: Annotated[list[_At], FailFast()]


class _Span(BaseModel):
    """The version of the weights that sampled some of the tokens."""

    version: str


class _Choice(BaseModel):
    token_ids: Annotated[list[Annotated[int, Field(ge=0)]], FailFast()]
    logprobs: _Logprobs
    weight_versions: Annotated[list[_Span], Field(min_length=1), FailFast()]


class _Generated(BaseModel):
    """A stock server's answer."""

    choices: Annotated[list[_Choice], Field(min_length=1, max_length=1)]


class _Version(BaseModel):
    new_version: str


class _Success(BaseModel):
    success: bool


class StockServer(Server):
    """A server of vLLM's own, in developer mode and with this project's `WorkerExtension`."""

    remedy = f"; {START}, correct engine.server.urls, or raise engine.server.timeout_s"

    def __init__(self, url: str, settings: ServerParams) -> None:
        """Sends the key of the engine servers, if there is one."""
        super().__init__(f"the engine server {url}", connect(url, settings.timeout_s), settings.retries)
        self.version = _FRESH  # of the weights that it is given

    async def sample(self, request: Request, actor: Actor) -> Action:
        """The action of a request, from the weights that `load_weights` gave.

        Raises EngineUnavailable if there is no answer, EngineRestarted if it comes from the weights that the server was
        started with, and EngineError if it comes from others, is a refusal, or is out of shape.
        """
        asking = draw(request, actor)
        most_bytes = MAX_ANSWER_BYTES + _TOKEN_BYTES * request.max_tokens
        [choice] = (await self._post(_Generated, _GENERATE, asking, most_bytes)).choices
        self._require_own(choice.weight_versions)
        content = choice.logprobs.content
        if [at.token_id for at in content] != choice.token_ids:
            raise self._nonsense(_GENERATE, "logprobs of other tokens than it sampled")
        sampled = wire.Sampled(ids=choice.token_ids, logprobs=[at.logprob for at in content])
        return self._action(_GENERATE, sampled, request.max_tokens, actor.end_ids)

    async def load_weights(self, path: str, version: str) -> None:
        """Loads the weights of a folder, names their version, and drops the caches of the old ones.

        Raises EngineError while requests of others keep a cache.
        """
        await self._call(wire.Results[None], "take_weights", path=path)
        tries = 20
        while not (await self._post(_Success, "/reset_prefix_cache")).success:
            tries -= 1
            if not tries:
                raise EngineError(f"{self.name} is answering others; give every training its own servers")
            await asyncio.sleep(_RELEASE_S / 20)
        await self._post(_Success, "/update_weight_version", _Version(new_version=version))
        self.version = version

    def _require_own(self, spans: Sequence[_Span]) -> None:
        """Raises as `sample` for tokens of other weights than the server's was given."""
        for version in {span.version for span in spans} - {self.version}:
            if version == _FRESH:
                raise EngineRestarted(f"{self.name} was restarted: it has lost the weights {self.version}")
            raise EngineError(
                f"{self.name} has other weights than it was given ({harmless(version)[:_SHOWN]}, not {self.version}): "
                "another training uses it too; give every training its own servers"
            )

    def _said(self, path: str, status: int, reason: str) -> str:
        match status:
            case 404:
                return f"it has no such route without {_MISSING.get(path, 'it')}; {START}"
            case 401 | 403:
                return f"it has another key; set {SERVER_KEY} to that of the server, or of the proxy before it"
            case 500 if path == _RPC:
                return f"{reason}; if it lacks the method, {START}"
        return reason


def connect(url: str, timeout_s: float) -> Client:
    """A client that sends the key of the engine servers, if there is one."""
    return Client(url, timeout_s, read_key(SERVER_KEY))


class ServedEngine(Engine):
    """Samples on processes of vLLM, which share the episodes: one stays with its home, which caches its prefix."""

    def __init__(self, homes: int, actor: Actor) -> None:
        self.homes = homes
        self._actor = actor
        self.version: int | None = actor.version
        self._thread = ThreadPoolExecutor(1, "engine")  # `sample` may be called where a loop is running
        self._pools = WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Semaphore]()  # of connections, in each loop

    def load_weights(self, folder: Path, version: int) -> None:
        path = str(folder.resolve() if folder.is_dir() else folder)
        self._wait(self._load(home, path, version) for home in range(self.homes))
        self.version = version

    def sample(self, requests: Sequence[Request]) -> list[Action]:
        """One action per request; those of one home are asked for at the same time."""
        by_home = dict[int, list[int]]()  # home -> its requests
        for index, request in enumerate(requests):
            by_home.setdefault(request.home(self.homes), []).append(index)
        batches = self._wait(
            self._sample(home, [requests[index] for index in indices]) for home, indices in by_home.items()
        )
        pairs = zip(by_home.values(), batches, strict=True)
        actions = {index: action for indices, batch in pairs for index, action in zip(indices, batch, strict=True)}
        return [actions[index] for index in range(len(requests))]

    async def act(self, request: Request) -> Action:
        """The action of a request that vLLM takes in at its next token, and out again if the caller is cancelled."""
        [action] = await self._sample(request.home(self.homes), [request])
        return action

    @property
    def _pool(self) -> asyncio.Semaphore:
        """The room for connections in the running loop."""
        return self._pools.setdefault(asyncio.get_running_loop(), asyncio.Semaphore(room()))

    @abstractmethod
    async def _load(self, home: int, path: str, version: int) -> None:
        """Gives a server the weights of a folder or hub id."""

    @abstractmethod
    async def _sample(self, home: int, requests: Sequence[Request]) -> list[Action]:
        """The actions of requests whose home is a server."""

    def _wait(self, calls: Iterable[Awaitable[T]]) -> list[T]:
        """The results of calls that are made at the same time; the first error ends the others."""

        async def together() -> list[T]:
            return await asyncio.gather(*calls)

        return self._thread.submit(asyncio.run, together()).result()


class ServerEngine(ServedEngine):
    """Samples actions on one or more stock servers of vLLM.

    A server that fails is left out until the next weights, with a warning, and its requests go to the next one, which
    has the same weights; a call fails when none is left.
    """

    def __init__(self, settings: ServerParams, actor: Actor) -> None:
        """Loads the model on every server.

        The servers must see the model's folder under the same path, and serve this engine alone while it is open.
        Raises EngineError if none takes it: started otherwise, or of another shape; EngineUnavailable if none answers.
        """
        try:
            self._shape = wire.read_shape(load_pretrained(AutoConfig, actor.model).get_text_config())
        except (OSError, ValueError) as error:
            raise EngineError(f"no model can be read from {actor.model!r}: {error}") from error
        super().__init__(len(settings.urls), actor)
        self._session = uuid.uuid4().hex[:8]  # in the versions of this engine's weights, and of no other's
        self._servers = [StockServer(url, settings) for url in settings.urls]
        self._left = list[StockServer]()  # those that have the latest weights
        try:
            self.load_weights(Path(actor.model), actor.version)
        except BaseException:
            self.close()
            raise
        self.halved = all(server.model.dtype == "bfloat16" for server in self._left)

    def load_weights(self, folder: Path, version: int) -> None:
        """Loads the weights on every server, also on one that was left out if it answers and fits the model."""
        self._left = [*self._servers]
        super().load_weights(folder, version)
        logger.info("%d of %d engine servers run %s", len(self._left), self.homes, folder)

    def held(self) -> list[HeldWeights]:
        """The weights of the servers that are not left out; one that fails now is."""
        weights = self._wait(self._tried(server, server.held()) for server in [*self._left])
        return [entry for entry in weights if entry]

    def close(self) -> None:
        """Sends no more requests; the servers run on."""
        self._thread.shutdown(wait=False, cancel_futures=True)

    async def _load(self, home: int, path: str, version: int) -> None:
        await self._tried(self._servers[home], self._give(self._servers[home], path, version))

    async def _give(self, server: StockServer, path: str, version: int) -> None:
        """Gives a server the weights, if it fits them: it may have come back with another model."""
        if problem := _misfit(await server.describe(), self._actor, self._shape):
            raise EngineError(f"{server.name} {problem}")
        await server.load_weights(path, f"{self._session}-{version}")

    async def _sample(self, home: int, requests: Sequence[Request]) -> list[Action]:
        """The actions that the home server samples, or the next server that can."""
        return await asyncio.gather(*(self._act(home, request) for request in requests))

    async def _act(self, home: int, request: Request) -> Action:
        while True:
            server = self._left[home % len(self._left)]
            async with self._pool:
                action = await self._tried(server, server.sample(request, self._actor))
            if action:
                return action

    async def _tried(self, server: StockServer, call: Awaitable[T]) -> T | None:
        """The result of a call; None if it fails, which leaves the server out. The fault of the last one is raised."""
        try:
            return await call
        except BadRequestError:
            raise
        except EngineError as fault:
            if server in self._left:
                if self._left == [server]:
                    raise
                self._left.remove(server)
                logger.warning("%s is left out until the next weights: %s", server.name, fault)
            return None


def _misfit(description: wire.Description, actor: Actor, expected: dict[str, Any]) -> str:
    """How a server's model differs from the actor's in shape, vocabulary, window or type; "" if it fits."""
    described = description.model_dump()
    wrong = [
        f"{name} {described[name]!r}, not {value!r}" for name, value in expected.items() if described[name] != value
    ]
    if wrong:
        return f"runs another model than {actor.model}: {', '.join(wrong)}; start it with `--model {actor.model}`"
    end_id = max(actor.end_ids)
    if description.vocab_size <= end_id:
        return (
            f"runs a model of {description.vocab_size} tokens, and the tokenizer ends an action with token {end_id}: "
            "its vocabulary is larger than the model's; resize the model's embeddings"
        )
    if description.max_tokens < actor.max_tokens:
        return (
            f"reads {description.max_tokens} tokens at most, and env.max_tokens is {actor.max_tokens}; start it again "
            f"with `--max-model-len {actor.max_tokens}`, or lower env.max_tokens"
        )
    if actor.dtype not in ("auto", description.dtype):
        return f"runs {description.dtype}, and model.dtype is {actor.dtype}; start it with `--dtype {actor.dtype}`"
    return ""
