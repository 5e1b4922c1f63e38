"""The engine that params.yaml asks for."""

from __future__ import annotations

from pathlib import Path
from typing import TypedDict

from agent_r1.params import EngineParams
from agent_r1.rollout.sampling import Engine
from agent_r1.rollout.server_engine import ServerEngine
from agent_r1.rollout.transformers_engine import TransformersEngine
from agent_r1.rollout.vllm_engine import VllmEngine


def open_engine(
    settings: EngineParams,
    model: Path | str,
    *,
    end_id: int,
    max_tokens: int,
    temperature: float = 1.0,
    dtype: str = "auto",
    adapter_rank: int = 0,
    version: int = 0,
) -> Engine:
    """The engine of `settings.kind`, running a model.

    Args:
        settings: the section `engine` of params.yaml.
        model: a Hugging Face folder or hub id.
        end_id: the token that ends an action.
        max_tokens: of a context with its action.
        temperature: 0 is greedy.
        dtype: auto is float32 on a CPU and bfloat16 on CUDA.
        adapter_rank: of the adapters that train beside the weights of `model`. vLLM in a process of its own runs the
            two side by side; the others run the merged weights of the folders that they are given.
        version: what `version` says until the first `load_weights`.

    Raises:
        EngineError: the model cannot be loaded, or a server is down or holds another model.
    """
    common = _Common(end_id=end_id, max_tokens=max_tokens, temperature=temperature, dtype=dtype, version=version)
    match settings.kind:
        case "vllm":
            return VllmEngine(
                model,
                **common,
                threads=settings.vllm.threads,
                max_num_seqs=settings.vllm.max_num_seqs,
                cpu_cache_gib=settings.vllm.cpu_cache_gib,
                gpu_memory_utilization=settings.vllm.gpu_memory_utilization,
                adapter_rank=adapter_rank,
            )
        case "transformers":
            return TransformersEngine(model, **common, batch_size=settings.transformers.batch_size)
        case "server":
            return ServerEngine(
                model,
                settings.server.urls,
                **common,
                concurrency=settings.server.concurrency,
                timeout_s=settings.server.timeout_s,
                retries=settings.server.retries,
            )


class _Common(TypedDict):
    end_id: int
    max_tokens: int
    temperature: float
    dtype: str
    version: int
