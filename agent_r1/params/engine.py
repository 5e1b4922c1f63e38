"""`engine`: what samples the policy's actions, in training and evaluation."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, Field, model_validator

from agent_r1.params.sections import Count, Natural, Positive, Section


class VllmParams(Section):
    threads: Count
    max_num_seqs: Count
    cpu_cache_gib: Positive
    gpu_memory_utilization: Annotated[float, Field(gt=0, le=1)]


class TransformersParams(Section):
    batch_size: Count


def _address(url: str) -> str:
    if not url.startswith(("http://", "https://")):
        raise ValueError("a server's address starts with http:// or https://")
    return url.rstrip("/")


class ServerParams(Section):
    urls: list[Annotated[str, AfterValidator(_address)]]
    concurrency: Count
    timeout_s: Positive
    retries: Natural

    @model_validator(mode="after")
    def _each_server_once(self) -> Self:
        if len(set(self.urls)) < len(self.urls):
            raise ValueError(f"urls names a server twice: {', '.join(self.urls)}; raise concurrency instead")
        return self


class EngineParams(Section):
    kind: Literal["vllm", "transformers", "server"]
    vllm: VllmParams
    transformers: TransformersParams
    server: ServerParams

    @property
    def identity(self) -> dict[str, Any]:
        """What can change the bits of what is sampled: the kind and its settings, but not where servers are."""
        settings = {"vllm": self.vllm, "transformers": self.transformers, "server": None}[self.kind]
        return {"kind": self.kind, **(settings.model_dump() if settings else {})}

    @model_validator(mode="after")
    def _servers_where_they_are_asked(self) -> Self:
        if self.kind == "server" and not self.server.urls:
            raise ValueError(
                "kind: server needs server.urls; start one with `python -m agent_r1.rollout.serve MODEL --port 8001` "
                "and name it there, as http://127.0.0.1:8001"
            )
        if self.kind != "server" and self.server.urls:
            raise ValueError(f"server.urls has no effect with kind: {self.kind}; set kind: server, or urls: []")
        return self
