"""`search`: the kind of index over the passages, and how each kind is built and asked."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, model_validator

from agent_r1.params.sections import Count, Natural, Positive, Section, Share

SearchKind = Literal["bm25", "dense", "hybrid", "remote"]


class BM25Params(Section):
    k1: Positive
    b: Share


class DenseParams(Section):
    encoder: str
    query_prefix: str
    passage_prefix: str
    pooling: Literal["mean", "cls"]
    max_tokens: Count
    batch_size: Count
    faiss: Literal["flat", "ivf"]
    nlist: Natural
    nprobe: Natural

    @model_validator(mode="after")
    def _lists_go_with_ivf(self) -> Self:
        if self.faiss == "flat" and (self.nlist or self.nprobe):
            raise ValueError(
                f"nlist {self.nlist} and nprobe {self.nprobe} have no effect with faiss: flat, which looks at every "
                "passage; set both to 0, or choose faiss: ivf"
            )
        if self.faiss == "ivf" and not 1 <= self.nprobe <= self.nlist:
            raise ValueError(
                f"nprobe {self.nprobe} lists out of nlist {self.nlist} cannot be looked at with faiss: ivf; "
                "nprobe is at least 1 and at most nlist"
            )
        return self


class HybridParams(Section):
    rrf_constant: Natural
    candidates: Count


class RemoteParams(Section):
    url: str
    timeout_s: Positive
    retries: Natural
    backoff_s: float = Field(ge=0, allow_inf_nan=False)


class SearchParams(Section):
    kind: SearchKind
    cache_entries: Natural
    bm25: BM25Params
    dense: DenseParams
    hybrid: HybridParams
    remote: RemoteParams

    @model_validator(mode="after")
    def _what_the_kind_needs(self) -> Self:
        if self.kind in ("dense", "hybrid") and not self.dense.encoder:
            raise ValueError(
                f"kind: {self.kind} needs an encoder; set dense.encoder to a Hugging Face folder or hub id"
            )
        if self.kind == "remote" and not self.remote.url.startswith(("http://", "https://")):
            raise ValueError(
                f"kind: remote needs a search server; set remote.url to its http:// address; got {self.remote.url!r}"
            )
        return self
