"""The sections of params.yaml about search, models, samplers and operation."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, Literal, get_args

from pydantic import AfterValidator, Field

from agent_r1.params.sections import Count, Natural, Positive, Section, Share, Weight, address, public

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

    def objections(self) -> Iterator[str]:
        if self.faiss == "flat" and (self.nlist or self.nprobe):
            yield (
                f"nlist {self.nlist} and nprobe {self.nprobe} have no effect with faiss: flat, which looks at every "
                "passage; set both to 0, or choose faiss: ivf"
            )
        if self.faiss == "ivf" and not 1 <= self.nprobe <= self.nlist:
            yield (
                f"nprobe {self.nprobe} lists out of nlist {self.nlist} cannot be looked at with faiss: ivf; "
                "nprobe is at least 1 and at most nlist"
            )


class HybridParams(Section):
    rrf_constant: Natural
    candidates: Count


class RemoteParams(Section):
    url: Annotated[str, AfterValidator(public)]
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

    def objections(self) -> Iterator[str]:
        if self.kind in ("dense", "hybrid") and not self.dense.encoder:
            yield f"kind: {self.kind} needs an encoder; set dense.encoder to a Hugging Face folder or hub id"
        if self.kind == "remote" and not self.remote.url.startswith(("http://", "https://")):
            yield f"kind: remote needs a search server; set remote.url to its http:// address; got {self.remote.url!r}"


class LoraParams(Section):
    """Adapters of policy and critic; see `agent_r1.learn.adapter`."""

    rank: Natural
    alpha: Count
    targets: Annotated[list[str], Field(min_length=1)]


DtypeName = Literal["auto", "float32", "bfloat16"]


class ModelParams(Section):
    path: str
    threads: Count
    dtype: DtypeName
    float32_output: bool
    gradient_checkpointing: bool
    packing: bool
    lora: LoraParams

    def objections(self) -> Iterator[str]:
        if self.float32_output and self.dtype == "float32":
            yield "float32_output: true has no effect with dtype: float32, in which all layers compute; set it to false"

    @property
    def adapter(self) -> LoraParams | None:
        """The adapters that train instead of the weights; None where the weights themselves do."""
        return self.lora if self.lora.rank else None


class LearnerParams(Section):
    """The processes that share what learns in a stage. It learns the same however many there are, but for rounding."""

    processes: Count
    nodes: Count
    silence_s: Annotated[float, Field(ge=5)]
    optimizer_offload: bool

    def objections(self) -> Iterator[str]:
        if self.optimizer_offload and self.ranks > 1:
            yield (
                f"optimizer_offload: true is for a learner on one GPU, and there are {self.ranks} ranks, each with a "
                "part of the states; set it to false, or processes and nodes to 1"
            )

    @property
    def ranks(self) -> int:
        """All of them, on all machines."""
        return self.processes * self.nodes


class WarmStartParams(Section):
    seed: Natural
    fine_tune: bool
    vocab_size: Annotated[int, Field(ge=384)]
    hidden_size: Count
    layers: Annotated[int, Field(ge=2)]
    heads: Count
    demonstrations: Natural
    naive_rag_demonstrations: Natural
    conversations: str
    stop_early: Share
    wrong_relation: Share
    batch_size: Count
    max_tokens_per_microbatch: Count
    steps: Count
    learning_rate: Positive
    checkpoint_every: Natural
    observation_weight: Weight

    @property
    def teaches(self) -> bool:
        """Whether there is anything to learn from."""
        return bool(self.demonstrations or self.naive_rag_demonstrations or self.conversations)


class VllmParams(Section):
    replicas: Natural
    tensor_parallel_size: Count
    threads: Count
    max_num_seqs: Count
    cpu_cache_gib: Positive
    gpu_memory_utilization: Annotated[float, Field(gt=0, le=1)]
    sleep: bool

    def processes(self, *, gpus: int, cores: int) -> int:
        """What `replicas` stands for on a machine."""
        return self.replicas or max(1, (gpus or cores // self.threads) // self.tensor_parallel_size)


class TransformersParams(Section):
    batch_size: Count


class ServerParams(Section):
    urls: list[Annotated[str, AfterValidator(address)]]
    concurrency: Count
    timeout_s: Positive
    retries: Natural

    def objections(self) -> Iterator[str]:
        if len(set(self.urls)) < len(self.urls):
            yield f"urls names a server twice: {', '.join(self.urls)}; name it once"


class EngineParams(Section):
    kind: Literal["vllm", "transformers", "server"]
    vllm: VllmParams
    transformers: TransformersParams
    server: ServerParams

    @property
    def identity(self) -> dict[str, Any]:
        """What can change the bits of what is sampled: the kind and its settings, without places and sleep."""
        settings = {"vllm": self.vllm, "transformers": self.transformers, "server": None}[self.kind]
        return {"kind": self.kind, **(settings.model_dump(exclude={"sleep"}) if settings else {})}

    @property
    def gpus(self) -> int:
        """How many GPUs a stage holds that samples, 0 for all of the machine."""
        return self.vllm.replicas * self.vllm.tensor_parallel_size if self.kind == "vllm" else 1

    def objections(self) -> Iterator[str]:
        if self.kind == "server" and not self.server.urls:
            yield (
                "kind: server needs server.urls; start one with `agent-r1 serve_engine MODEL --port 8001` "
                "and name it there, as http://127.0.0.1:8001"
            )
        if self.kind != "server" and self.server.urls:
            yield f"server.urls has no effect with kind: {self.kind}; set kind: server, or urls: []"


# How a policy can be put to the test questions.
Protocol = Literal[
    "tool_call",  # it acts in the environment of the runs
    "naive_rag",  # the passages that the question itself finds are in the prompt, and it answers once
    "closed_book",  # it answers once, with nothing to read
    "gold_passages",  # the gold passages are in the prompt, and it answers once: no search could serve it better
    "random",  # not the policy but chance plays, with the same budget: the floor of a game
    "oracle",  # not the policy but a solver plays, by the same rules: the ceiling of a game
]
PROTOCOLS: tuple[Protocol, ...] = get_args(Protocol)

Baseline = Literal["base_tool_call", "naive_rag", "closed_book", "gold_passages", "random", "oracle"]


class EvaluateParams(Section):
    seed: Natural
    questions: Natural
    bootstrap_samples: Annotated[int, Field(ge=100)]
    history_kept: Count


class PromoteParams(Section):
    margin: Annotated[float, Field(ge=0, lt=1)]
    level: Annotated[float, Field(ge=0.5, lt=1)]


class TimeoutsParams(Section):
    """Seconds by the name of a stage: those of dvc.yaml, and `view`."""

    prepare: Positive
    index: Positive
    warm_start: Positive
    train: Positive
    register_: Annotated[Positive, Field(alias="register")]  # which pydantic has for itself
    evaluate: Positive
    baseline: Positive
    report: Positive
    view: Positive


class OperateParams(Section):
    side_by_side: Count
    timeouts_s: TimeoutsParams
    retries: Natural
    retry_delay_s: Weight
    pool_patience_s: Positive

    def timeout_s(self, stage: str) -> float:
        """Of a stage by its name: `train`, or `train_closer` for those of the sweep that get further seeds."""
        return float(self.timeouts_s.model_dump(by_alias=True)[stage.removesuffix("_closer")])
