"""The interface of samplers and engines: token ids in, token ids out."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple, Protocol, Self, runtime_checkable

import numpy as np

from agent_r1.params.stages import DtypeName
from agent_r1.records import Floats32, StopReason


@dataclass(frozen=True, kw_only=True, slots=True)
class Request:
    """One action to sample."""

    episode: int  # index of the episode within the collection
    step: int  # index of the action within the episode
    context: list[int]  # all token ids the policy sees
    seed: int  # derived from (seed, iteration, question, sample, step)
    max_tokens: int  # at least 1
    greedy: bool = False  # the likeliest tokens, at every temperature; the same for all requests of one call
    summary: bool = False  # asks for a summary and no action; a script cannot read that in the context
    messages: Sequence[tuple[str, str]] = ()  # the context as roles and texts, for a sampler that knows no tokens

    def home(self, count: int) -> int:
        """The sampler, of `count` with the same weights, that answers all requests of this episode."""
        return self.episode % count


@dataclass(frozen=True, kw_only=True, slots=True)
class Action:
    """One action, exactly as sampled; ends with one of the model's end tokens where stop_reason is END."""

    token_ids: list[int]  # [A]
    logprobs: Floats32  # [A] nats
    stop_reason: StopReason

    @classmethod
    def of(cls, ids: Sequence[int], logprobs: Sequence[float], end_ids: Collection[int]) -> Self:
        """The action of sampled ids [A] and logprobs [A]; only the last id may be one of `end_ids`."""
        stop_reason = StopReason.END if ids[-1] in end_ids else StopReason.LENGTH
        return cls(token_ids=list(ids), logprobs=np.array(logprobs, np.float32), stop_reason=stop_reason)


class Sampler(Protocol):
    """A source of actions: an engine, or a demonstrator with a script."""

    def sample(self, requests: Sequence[Request]) -> list[Action]:
        """One action per request, in their order, each of at most `max_tokens`."""
        ...


@runtime_checkable
class Flowing(Sampler, Protocol):
    """A sampler that takes a request in while it answers others."""

    async def act(self, request: Request) -> Action:
        """The action of a request. A caller that is cancelled while it waits leaves the sampler fit for use."""
        ...


class Beneath(NamedTuple):
    """The model beside which a policy's adapters run, instead of being merged."""

    model: str  # a Hugging Face folder or hub id: the one of their training
    rank: int  # of the adapters


class PolicyWeights(NamedTuple):
    """The weights of a policy that acts."""

    path: str  # a Hugging Face folder or hub id
    updates: int = 0  # since the warm start
    beneath: Beneath | None = None  # the model beside which its adapters run unmerged, if they do


@dataclass(frozen=True, kw_only=True, slots=True)
class Actor:
    """The model that an engine runs, and how its actions are drawn."""

    model: str  # a Hugging Face folder or hub id
    end_ids: Sequence[int]  # the tokens that end an action
    max_tokens: int  # of a context with its action
    temperature: float  # 0 is greedy
    dtype: DtypeName  # auto is float32 on a CPU, bfloat16 on CUDA, and with servers their own
    adapter_rank: int = 0  # of adapters beside the weights; servers get them merged
    adapters: str = ""  # the folder of the policy whose adapters it starts with; "" for none yet
    version: int = 0  # of the weights, until `load_weights` says another

    def beside(self, base_model: Beneath | None) -> Self:
        """This actor as the adapters in its model's folder beside another model, if one is given."""
        if base_model is None:
            return self
        return replace(self, model=base_model.model, adapters=self.model, adapter_rank=base_model.rank)


@dataclass(frozen=True, kw_only=True, slots=True)
class HeldWeights:
    """The weights that a sampler computes with."""

    sampler: str  # its name in a message
    dtype: DtypeName  # never auto
    sums: Mapping[str, int]  # by a tensor's name in its folder; of a model with adapters, theirs alone: `weight_sums`


class Engine(Sampler, Protocol):
    """A sampler with a model of its own, whose weights can be replaced; a context manager that closes itself."""

    version: int | None  # of the weights, as given to the last `load_weights`
    homes: int = 1  # samplers that share the requests out, each with weights of its own; see `Request.home`
    halved: bool = False  # whether it computes in bfloat16 alone
    rests: bool = False  # whether `rest` frees anything
    pids: Sequence[int] = ()  # of processes that it started

    def rest(self) -> None:
        """Frees a shared device's memory until the next call. Weights without adapters are gone: `version` is None."""
        return

    def load_weights(self, folder: Path, version: int) -> None:
        """Replaces the weights by those of a policy's Hugging Face folder and drops every cache of the old ones.

        An engine with adapters loads the folder's `adapter` and leaves its own model as it is, so that rounding costs
        the adapters nothing; servers load the merged weights.
        """
        ...

    def held(self) -> list[HeldWeights]:
        """The weights that each sampler holds since `load_weights`, as it computes with them."""
        ...

    def close(self) -> None:
        """Frees the engine's resources; safe to call twice."""
        ...

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class EngineError(RuntimeError):
    """The engine failed outside of this process; the message says how, and the remedy if that is known."""


class EngineUnavailable(EngineError, ConnectionError):
    """The engine does not answer; it may when it is asked again later."""


class EngineRestarted(EngineError, ConnectionError):
    """The engine has lost its weights, so that asking again is of no use; a new start gives it some."""
