"""The messages between processes of vLLM and their clients: JSON over HTTP, in the shapes of these classes."""

from __future__ import annotations

from typing import Annotated, Any, Generic, TypeVar

from pydantic import BaseModel, ConfigDict, FailFast, Field

from agent_r1.params.stages import DtypeName, VllmParams

_WORKER = "agent_r1.rollout.vllm_worker"
EXTENSION = f"{_WORKER}.WorkerExtension"  # of vLLM's workers
TOKEN_BYTES = 64  # of a sampled token and its logprob in JSON, at most

_Id = Annotated[int, Field(ge=0)]
T = TypeVar("T")


class Launch(BaseModel):
    """How a process of our own is started."""

    vllm: VllmParams
    model: str
    max_tokens: int
    dtype: DtypeName
    adapter_rank: int = 0


class Sampling(BaseModel):
    """How an action is sampled, by vLLM's parameters."""

    seed: int
    max_tokens: int
    temperature: float
    stop_token_ids: list[int]
    ignore_eos: bool = True
    logprobs: int = 0  # of the sampled token alone
    detokenize: bool = False


class Draw(BaseModel):
    """An action to sample, in a stock server's words."""

    token_ids: list[_Id]
    sampling_params: Sampling


class Draws(BaseModel):
    """The actions of one call, which are admitted at the same time."""

    requests: list[Draw]


class Sampled(BaseModel):
    """An action."""

    model_config = ConfigDict(ser_json_inf_nan="constants")

    ids: Annotated[list[_Id], FailFast()]
    logprobs: Annotated[list[float], FailFast()]  # nats


class Answered(BaseModel):
    """The actions of one call, in the order of its requests."""

    actions: Annotated[list[Sampled], FailFast()]


class Weights(BaseModel):
    """New weights: a Hugging Face folder or, for adapters, a policy's."""

    path: str


class Call(BaseModel):
    """A call of a method of vLLM's workers, in a stock server's words."""

    method: str
    kwargs: dict[str, str] = {}


class Results(BaseModel, Generic[T]):
    """What each worker returned."""

    results: Annotated[list[T], Field(min_length=1)]


class Description(BaseModel):
    """The model of a server: see `read_shape`."""

    model_type: str | None
    vocab_size: _Id
    hidden_size: int | None
    num_hidden_layers: int | None
    max_tokens: _Id
    dtype: DtypeName


class Done(BaseModel):
    """An answer that says no more."""


def read_shape(config: Any) -> dict[str, Any]:
    """The fields of a Hugging Face text configuration that size a model and tell models apart."""
    fields = config.to_dict()
    return {name: fields.get(name) for name in ("model_type", "vocab_size", "hidden_size", "num_hidden_layers")}
