"""`search`: the index, and how it is searched."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import AfterValidator

from agent_r1.params.sections import Count, Natural, Needs, Positive, Refusals, Section, Share, Weight, public

SearchKind = Literal["bm25", "dense", "hybrid", "remote"]


class BM25Params(Section):
    k1: Positive
    b: Share


class DenseParams(Section):
    needs = (
        Needs("nlist", 0, "faiss", ("ivf", "sq8", "pq"), ", which looks at every passage"),
        Needs("nprobe", 0, "faiss", ("ivf", "sq8", "pq"), ", which looks at every passage"),
        Needs("pq_bytes", 0, "faiss", ("pq",), "", "about an eighth to a quarter of the encoder's dimensions"),
        Needs("rescore", 0, "faiss", ("pq",), ", whose scores are near enough"),
    )

    encoder: str
    query_prefix: str
    passage_prefix: str
    pooling: Literal["mean", "cls"]
    max_tokens: Count
    batch_size: Count
    faiss: Literal["flat", "ivf", "sq8", "pq"]
    nlist: Natural
    nprobe: Natural
    pq_bytes: Natural = 0
    rescore: Natural = 0
    vectors: str = ""

    @property
    def exact(self) -> bool:
        """Whether the index holds the vectors themselves."""
        return self.faiss in ("flat", "ivf")

    def refusals(self) -> Refusals:
        needed = self.faiss in ("ivf", "pq") or self.nlist or self.nprobe
        if self.faiss != "flat" and needed and not 1 <= self.nprobe <= self.nlist:
            yield f"nprobe {self.nprobe} is not from 1 to nlist {self.nlist}, as faiss: {self.faiss} needs; set it anew"


class HybridParams(Section):
    rrf_constant: Natural = 60
    candidates: Count


class RemoteParams(Section):
    needs = (
        Needs(
            "version",
            "",
            "protocol",
            ("retrieve",),
            ", whose server gives the hash of its index",
            "state what the server searches and how, such as wiki-18-e5: it is kept in place of a hash",
        ),
    )

    url: Annotated[str, AfterValidator(public)]
    timeout_s: Positive
    retries: Natural
    backoff_s: Weight = 0.5
    protocol: Literal["search", "retrieve"] = "search"
    version: str = ""


class SearchParams(Section):
    kind: SearchKind
    cache_entries: Natural = 10_000
    bm25: BM25Params
    dense: DenseParams
    hybrid: HybridParams
    remote: RemoteParams

    @property
    def own_passages(self) -> bool:
        """Whether the prepared passages are searched; a server of Search-R1's has its own."""
        return self.kind != "remote" or self.remote.protocol == "search"

    def refusals(self) -> Refusals:
        if self.kind in ("dense", "hybrid") and not self.dense.encoder:
            yield f"kind: {self.kind} needs an encoder; set dense.encoder to a Hugging Face folder or hub id"
        if self.kind == "remote" and not self.remote.url.startswith(("http://", "https://")):
            yield f"kind: remote needs a search server; set remote.url to its http:// address; got {self.remote.url!r}"
