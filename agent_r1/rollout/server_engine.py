"""The client's side of vLLM: one server as calls, and an engine on servers that others run."""

from __future__ import annotations

import asyncio
import logging
import uuid
from abc import abstractmethod
from collections.abc import Awaitable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

import numpy as np
from pydantic import BaseModel
from transformers import AutoConfig

from agent_r1.files import load_pretrained
from agent_r1.harmless import harmless
from agent_r1.http.client import BUSY, MAX_ANSWER_BYTES, BadAnswerError, Client, RefusalError, Retries, Shape, read_key
from agent_r1.params.stages import DtypeName, ServerParams
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
from agent_r1.weight_sums import joined

_SHOWN = 100  # characters of a server's label in a message
START = (
    "; start it with `agent-r1 serve_engine MODEL --port PORT`, correct engine.server.urls, or raise "
    "engine.server.timeout_s"
)
_SURE = 1e-3  # nats; rounding lifts the logprob of a sure token above 0

T = TypeVar("T")
logger = logging.getLogger(__name__)


class BadRequestError(EngineError):
    """A request that no server can answer."""


def connect(url: str, timeout_s: float, socket: str | None = None) -> Client:
    """A client that sends the key of the engine servers, if there is one."""
    return Client(url, timeout_s, read_key(wire.SERVER_KEY), socket)


class VllmServer:
    """One process of vLLM, own or started by `agent-r1 serve_engine`."""

    def __init__(self, name: str, client: Client, retries: int = 0, remedy: str = "") -> None:
        """`name` stands in messages, and the remedy in those of a server that does not answer."""
        self.name, self._client, self._retries, self._remedy = name, client, Retries(name, retries), remedy
        self._vocab_size = 0  # until it describes itself
        self.dtype: DtypeName = "auto"

    async def describe(self) -> wire.Description:
        """The shape, limit and type of the server's model."""
        found = await self._post(wire.Description, "/describe")
        self._vocab_size, self.dtype = found.vocab_size, found.dtype
        return found

    async def sample(self, requests: Sequence[Request], actor: Actor, weights: str) -> list[Action]:
        """One action per request, sampled from the weights that `load_weights` labelled.

        Raises EngineUnavailable if there is no answer, EngineRestarted if it comes from the weights that the server was
        started with, and EngineError if it comes from others, is a refusal, or is out of shape.
        """
        most_bytes = MAX_ANSWER_BYTES + wire.TOKEN_BYTES * sum(request.max_tokens for request in requests)
        asking = wire.Draws(requests=[_asked(request, actor) for request in requests])
        found = await self._post(wire.Answered, "/sample", asking, most_bytes)
        if found.weights == wire.FRESH != weights:
            raise EngineRestarted(f"{self.name} was restarted: it has lost the weights {weights}")
        if found.weights != weights:
            raise EngineError(
                f"{self.name} has other weights than it was given ({harmless(found.weights)[:_SHOWN]}, not {weights}): "
                "another training uses it too; give every training its own servers"
            )
        if len(found.actions) != len(requests):
            raise self._nonsense("/sample", f"{len(found.actions)} actions for {len(requests)} requests")
        for request, sampled in zip(requests, found.actions, strict=True):
            if problem := self._problem(sampled, request.max_tokens, actor.end_ids):
                raise self._nonsense("/sample", problem)
        return [Action.of(sampled.ids, sampled.logprobs, actor.end_ids) for sampled in found.actions]

    async def load_weights(self, path: str, label: str) -> None:
        """Loads the weights of a folder, labels them, and drops the caches of the old ones."""
        await self._post(wire.Done, "/weights", wire.Weights(path=path, label=label))

    async def held(self, *, adapters: bool) -> HeldWeights:
        """The weights that the process holds, or its adapters alone."""
        ranks = await self._post(wire.RankSums, "/sums")
        return HeldWeights(sampler=self.name, dtype=self.dtype, sums=joined(ranks.results), adapters=adapters)

    async def rest(self) -> None:
        """Frees the GPU's memory until the next call."""
        await self._post(wire.Done, "/rest")

    def _problem(self, sampled: wire.Sampled, most: int, end_ids: Sequence[int]) -> str:
        """A fault of an action, in words; "" for none."""
        ids, logprobs = sampled.ids, np.array(sampled.logprobs)
        if not 1 <= len(ids) == len(logprobs) <= most:
            return f"{len(ids)} tokens and {len(logprobs)} logprobs, of 1 to {most} of each"
        if max(ids) >= self._vocab_size:
            return f"token {max(ids)}, of a vocabulary of {self._vocab_size}"
        if early := [index for index in ids[:-1] if index in end_ids]:
            return f"tokens after {early[0]}, which ends an action"
        if not np.isfinite(logprobs).all():
            return "logprobs that are not all finite; start again with a lower train.update.learning_rate"
        if logprobs.max() > _SURE:
            return f"a logprob of {logprobs.max():g}"
        return ""

    async def _post(
        self, kind: type[Shape], path: str, body: BaseModel | None = None, most_bytes: int = MAX_ANSWER_BYTES
    ) -> Shape:
        content, attempts = body.model_dump_json() if body else "{}", self._retries.attempts
        try:
            return await self._retries.run(lambda: self._attempt(kind, path, content, most_bytes))
        except (TimeoutError, ConnectionError) as fault:
            raise EngineUnavailable(
                f"{self.name} did not answer {path} in {attempts} attempts ({fault}){self._remedy}"
            ) from None

    async def _attempt(self, kind: type[Shape], path: str, content: str, most_bytes: int) -> Shape:
        try:
            return (await self._client.answer("POST", path, content, most_bytes)).require_ok(BUSY).parse(kind)
        except BadAnswerError as fault:
            raise self._nonsense(path, str(fault)) from None
        except RefusalError as fault:
            raise self._refused(path, fault) from None

    def _refused(self, path: str, fault: RefusalError) -> EngineError:
        """The error for a refusal, with its remedy."""
        match fault.answer.status:
            case 404:
                return EngineError(f"{self.name} has no {path}: it was not started with `agent-r1 serve_engine`")
            case 401:
                return EngineError(f"{self.name} has another key; set {wire.SERVER_KEY} to the same here")
            case 409:
                return EngineError(f"{self.name} is answering others; give every training its own servers")
        kind = BadRequestError if fault.answer.status == 400 else EngineError
        return kind(f"{self.name} refused {path}: {fault.answer.reason}")

    def _nonsense(self, path: str, problem: str) -> EngineError:
        return EngineError(f"{self.name} answered {path} with something else than vLLM does: {problem}")


def _asked(request: Request, actor: Actor) -> wire.Draw:
    return wire.Draw(
        context=request.context,
        seed=request.seed,
        max_tokens=request.max_tokens,
        temperature=0.0 if request.greedy else actor.temperature,
        end_ids=list(actor.end_ids),
    )


class ServedEngine(Engine):
    """Samples on servers, which share the episodes: one stays with its home, which caches its prefix."""

    def __init__(self, homes: int, actor: Actor) -> None:
        self.homes, self._actor = homes, actor
        self.version: int | None = actor.version
        self._servers: list[VllmServer] = []  # `homes` of them
        self._session = uuid.uuid4().hex[:8]  # in the labels of this engine's weights, and of no other's
        self._label = f"{self._session}-{actor.version}"
        self._thread = ThreadPoolExecutor(1, "engine")  # `sample` may be called where a loop is running
        self._pools = WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Semaphore]()  # of connections, in each loop

    def load_weights(self, folder: Path, version: int) -> None:
        self._label = f"{self._session}-{version}"
        self._wait(self._load(home, str(folder.resolve() if folder.is_dir() else folder)) for home in range(self.homes))
        self.version = version

    def held(self) -> list[HeldWeights]:
        return self._wait(map(self._held, self._proved))

    @property
    def _proved(self) -> Iterable[int]:
        """The servers that have the latest weights."""
        return range(self.homes)

    def _are_halved(self) -> bool:
        """Whether every server has said that it computes in bfloat16."""
        return all(server.dtype == "bfloat16" for server in self._servers)

    def sample(self, requests: Sequence[Request]) -> list[Action]:
        """One action per request; the requests of one home are admitted at the same time, in their order."""
        own: dict[int, list[int]] = {}  # home -> its requests
        for index, request in enumerate(requests):
            own.setdefault(request.home(self.homes), []).append(index)
        found = self._wait(self._sample(home, [requests[index] for index in asked]) for home, asked in own.items())
        pairs = zip(own.values(), found, strict=True)
        actions = {index: action for asked, each in pairs for index, action in zip(asked, each, strict=True)}
        return [actions[index] for index in range(len(requests))]

    async def act(self, request: Request) -> Action:
        """The action of a request that vLLM takes in at its next token, and out again if the caller is cancelled."""
        async with self._pools.setdefault(asyncio.get_running_loop(), asyncio.Semaphore(room())):
            [action] = await self._sample(request.home(self.homes), [request])
        return action

    @abstractmethod
    async def _load(self, home: int, path: str) -> None:
        """Gives a server the weights of a folder or hub id, under the new label."""

    @abstractmethod
    async def _held(self, home: int) -> HeldWeights:
        """The weights that a server holds."""

    @abstractmethod
    async def _sample(self, home: int, requests: Sequence[Request]) -> list[Action]:
        """The actions of requests whose home is a server."""

    def _wait(self, calls: Iterable[Awaitable[T]]) -> list[T]:
        """The results of calls that are made at the same time; the first error ends the others."""

        async def together() -> list[T]:
            return await asyncio.gather(*calls)

        return self._thread.submit(asyncio.run, together()).result()


class ServerEngine(ServedEngine):
    """Samples actions on one or more servers that `agent-r1 serve_engine` started.

    A server that fails is left out until the next weights, with a warning, and its requests go to the next one; a call
    fails when none is left. As with `VllmEngine`, the same requests give the same bits while no server fails.
    """

    def __init__(self, settings: ServerParams, actor: Actor) -> None:
        """Checks that every server fits the model, and loads its weights there.

        The servers must see the model's folder under the same path, and serve this engine alone while it is open.
        Raises EngineError for a server that was started otherwise or runs a model of another shape, and
        EngineUnavailable if none answers.
        """
        try:
            self._shape = wire.read_shape(load_pretrained(AutoConfig, actor.model).get_text_config())
        except (OSError, ValueError) as error:
            raise EngineError(f"no model can be read from {actor.model!r}: {error}") from error
        super().__init__(len(settings.urls), actor)
        for url in settings.urls:
            client = connect(url, settings.timeout_s)
            self._servers.append(VllmServer(f"the engine server {url}", client, settings.retries, START))
        self._faults: dict[int, EngineError] = {}  # the servers that are left out, and why
        try:
            self._wait(map(self._begin, range(self.homes)))
            self.halved = self._are_halved()
            self.load_weights(Path(actor.model), actor.version)
        except BaseException:
            self.close()
            raise

    def load_weights(self, folder: Path, version: int) -> None:
        """Loads the weights on every server, also on one that was left out if it answers and still fits the model."""
        super().load_weights(folder, version)
        if len(self._faults) == self.homes:
            raise self._none_left()
        logger.info("%d of %d engine servers run %s", self.homes - len(self._faults), self.homes, folder)

    def close(self) -> None:
        """Sends no more requests; the servers run on."""
        self._thread.shutdown(wait=False, cancel_futures=True)

    async def _begin(self, home: int) -> None:
        """Leaves a server out that does not answer; one that does not fit is an error."""
        try:
            await self._require_fit(self._servers[home])
        except EngineUnavailable as fault:
            self._leave_out(home, fault)

    async def _load(self, home: int, path: str) -> None:
        server = self._servers[home]
        try:
            if home in self._faults:  # the server may have come back, and with another model
                await self._require_fit(server)
            await server.load_weights(path, self._label)
            self._faults.pop(home, None)
        except EngineError as fault:
            self._leave_out(home, fault)

    @property
    def _proved(self) -> Iterable[int]:
        return [home for home in range(self.homes) if home not in self._faults]

    async def _held(self, home: int) -> HeldWeights:
        return await self._servers[home].held(adapters=False)

    async def _require_fit(self, server: VllmServer) -> None:
        if problem := _misfit(await server.describe(), self._actor, self._shape):
            raise EngineError(f"{server.name} {problem}")

    async def _sample(self, home: int, requests: Sequence[Request]) -> list[Action]:
        """The actions that the home server samples, or the next server that can."""
        in_turn = [(home + further) % self.homes for further in range(self.homes)]
        for at in sorted(in_turn, key=self._faults.__contains__):  # a faulty one may answer after all
            try:
                return await self._servers[at].sample(requests, self._actor, self._label)
            except BadRequestError:
                raise
            except EngineError as fault:
                self._leave_out(at, fault)
        raise self._none_left()

    def _leave_out(self, home: int, fault: EngineError) -> None:
        """Warns once."""
        if home not in self._faults:
            logger.warning("%s is left out until the next weights: %s", self._servers[home].name, fault)
        self._faults[home] = fault

    def _none_left(self) -> EngineError:
        """The error when every server is left out: of the most hopeful kind among their faults."""
        faults = self._faults.values()
        kinds = (EngineUnavailable, EngineRestarted, EngineError)
        kind = next(kind for kind in kinds if any(isinstance(fault, kind) for fault in faults))
        return kind("; ".join(str(self._faults[home]) for home in sorted(self._faults)))


def _misfit(found: wire.Description, actor: Actor, expected: dict[str, Any]) -> str:
    """How a server's model differs from the actor's in shape, vocabulary, window or type; "" if it fits."""
    described = found.model_dump()
    wrong = [
        f"{name} {described[name]!r}, not {value!r}" for name, value in expected.items() if described[name] != value
    ]
    if wrong:
        return (
            f"runs another model than {actor.model}: {', '.join(wrong)}; start it with "
            f"`agent-r1 serve_engine {actor.model}`"
        )
    if found.vocab_size <= (last := max(actor.end_ids)):
        return (
            f"runs a model of {found.vocab_size} tokens, and the tokenizer ends an action with token {last}: its "
            "vocabulary is larger than the model's; resize the model's embeddings"
        )
    if found.max_tokens < actor.max_tokens:
        return (
            f"reads {found.max_tokens} tokens at most, and env.max_tokens is {actor.max_tokens}; start it again, or "
            "lower env.max_tokens"
        )
    if actor.dtype not in ("auto", found.dtype):
        return f"runs {harmless(found.dtype)}, and model.dtype is {actor.dtype}"
    return ""
