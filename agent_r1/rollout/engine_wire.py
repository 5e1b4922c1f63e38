"""The messages between the process of vLLM and its clients: JSON over HTTP, in the shapes of these classes."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, FailFast, Field

from agent_r1.params.stages import DtypeName, VllmParams
from agent_r1.weight_sums import Slice

SERVER_KEY = "AGENT_R1_ENGINE_KEY"  # the key of the engine servers, which their clients send
FRESH = ""  # the label of the weights that a server was started with by hand
TOKEN_BYTES = 64  # of a sampled token and its logprob in JSON, at most
_WORKER = "agent_r1.rollout.vllm_worker"
EXTENSION = f"{_WORKER}.WorkerExtension"  # of vLLM's workers

_Id = Annotated[int, Field(ge=0)]


class Launch(BaseModel):
    """How a process is started."""

    vllm: VllmParams
    model: str
    max_tokens: int
    dtype: DtypeName
    adapter_rank: int = 0
    weights: str = FRESH  # the label of the model's weights
    further: list[str] = []  # options of vLLM's own server


class Draw(BaseModel):
    """An action to sample."""

    context: list[_Id]
    seed: int
    max_tokens: int
    temperature: float
    end_ids: list[int]


class Draws(BaseModel):
    """The actions of one call, which are admitted at the same time."""

    requests: list[Draw]


class Sampled(BaseModel):
    """An action."""

    model_config = ConfigDict(ser_json_inf_nan="constants")

    ids: Annotated[list[_Id], FailFast()]
    logprobs: Annotated[list[float], FailFast()]  # nats


class Answered(BaseModel):
    """The actions of one call, in the order of its requests, and the label of the weights that sampled them."""

    weights: str
    actions: Annotated[list[Sampled], FailFast()]


class Weights(BaseModel):
    """New weights: a Hugging Face folder or, for adapters, a policy's, and the label they get."""

    path: str
    label: str


class RankSums(BaseModel):
    """The sums of the weights that each rank of a process holds."""

    results: list[list[Slice]]


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
