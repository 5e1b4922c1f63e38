"""The engine that params.yaml asks for."""

from __future__ import annotations

from pathlib import Path

from agent_r1.params import EngineParams
from agent_r1.rollout.sampling import Actor, Engine
from agent_r1.rollout.server_engine import ServerEngine
from agent_r1.rollout.transformers_engine import TransformersEngine
from agent_r1.rollout.vllm_engine import VllmEngine


def open_engine(
    settings: EngineParams,
    model: Path | str,
    *,
    end_id: int,
    max_tokens: int,
    temperature: float,
    dtype: str,
    adapter_rank: int = 0,
    version: int = 0,
) -> Engine:
    """The engine of `settings.kind` with its own section, running a model; `Actor` explains the other arguments.

    Raises:
        EngineError: the model cannot be loaded, or a server is down or holds another model.
    """
    actor = Actor(
        model=str(model),
        end_id=end_id,
        max_tokens=max_tokens,
        temperature=temperature,
        dtype=dtype,
        adapter_rank=adapter_rank,
        version=version,
    )
    match settings.kind:
        case "vllm":
            return VllmEngine(settings.vllm, actor)
        case "transformers":
            return TransformersEngine(settings.transformers, actor)
        case "server":
            return ServerEngine(settings.server, actor)
