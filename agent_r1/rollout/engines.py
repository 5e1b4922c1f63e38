"""The engine that params.yaml asks for."""

from __future__ import annotations

from agent_r1.params import EngineParams
from agent_r1.rollout.sampling import Actor, Engine
from agent_r1.rollout.server_engine import ServerEngine
from agent_r1.rollout.transformers_engine import TransformersEngine
from agent_r1.rollout.vllm_engine import VllmEngine


def open_engine(settings: EngineParams, actor: Actor) -> Engine:
    """The engine of `settings.kind`, with its own section.

    Raises:
        EngineError: the model cannot be loaded, or a server is down or holds another model.
    """
    match settings.kind:
        case "vllm":
            return VllmEngine(settings.vllm, actor)
        case "transformers":
            return TransformersEngine(settings.transformers, actor)
        case "server":
            return ServerEngine(settings.server, actor)
