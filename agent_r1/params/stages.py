"""The sections of params.yaml about search, models, samplers and operation."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field

from agent_r1.params.env import ContextParams
from agent_r1.params.sections import Count, Names, Natural, Needs, Positive, Refusals, Section, Share, Weight, address

SHORT = ("auto", "bfloat16", "float16")
SERVE = "start one with the line of docs/data_and_models.md#vllm-servers and name it there, as http://127.0.0.1:8001"
OWN_ARGUMENTS = ("messages", "tools", "documents", "add_generation_prompt")  # of every chat template
DtypeName = Literal["auto", "float32", "bfloat16", "float16"]


class LoraParams(Section):
    """Adapters of policy and critic; see `agent_r1.learn.adapter`."""

    rank: Natural
    alpha: Count
    targets: Names


def _argument(name: str) -> str:
    if not name.isidentifier() or name in OWN_ARGUMENTS:
        raise ValueError("an argument of a chat template is a name such as enable_thinking, and none of the messages")
    return name


class ModelParams(Section):
    needs = (Needs("float32_output", False, "dtype", SHORT, ", in which all layers compute"),)

    path: str
    threads: Count
    portable: bool
    dtype: DtypeName
    float32_output: bool
    gradient_checkpointing: bool
    packing: bool
    compile: bool = False  # layers by torch.compile
    template: dict[Annotated[str, AfterValidator(_argument)], bool | int | str]
    lora: LoraParams
    base: Literal["full", "four_bit"]

    @property
    def adapter(self) -> LoraParams | None:
        """The adapters that train instead of the weights; None where the weights themselves do."""
        return self.lora if self.lora.rank else None

    def refusals(self) -> Refusals:
        if self.portable and self.compile:
            yield "portable: true is undone by compile: true, which makes code for this processor; set one to false"


class LearnerParams(Section):
    """The processes that share a stage's learner. Their number changes the weights by rounding alone."""

    processes: Count
    nodes: Count
    silence_s: Annotated[float, Field(ge=5)]
    optimizer_offload: bool
    defer_reduction: bool
    replicate: bool

    @property
    def ranks(self) -> int:
        """The number of ranks on all machines."""
        return self.processes * self.nodes

    @property
    def copies(self) -> int:
        """The number of copies of the weights, each of which the ranks of a machine share."""
        return self.nodes if self.replicate else 1

    def refusals(self) -> Refusals:
        if self.optimizer_offload and self.ranks > 1:
            why = f"needs one GPU, and there are {self.ranks} ranks, each with a part of the states"
            yield f"optimizer_offload: true {why}; set it to false, or processes and nodes to 1"
        if self.defer_reduction and self.ranks == 1:
            yield "defer_reduction: true has no effect on one rank; set it to false, or processes to 2 or more"
        if self.replicate and self.nodes == 1:
            yield "replicate: true has no effect on one machine; set it to false, or nodes to 2 or more"


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
    by_relation: Share
    quotes: bool
    batch_size: Count
    max_tokens_per_microbatch: Count
    steps: Count
    learning_rate: Positive
    checkpoint_every: Natural
    observation_weight: Weight
    contexts: Annotated[list[ContextParams], Field(max_length=8)]

    def refusals(self) -> Refusals:
        if self.by_relation and not (self.stop_early or self.wrong_relation):
            setting = f"by_relation {self.by_relation} has no effect while stop_early and wrong_relation are 0"
            yield f"{setting}; set one of them above 0, or by_relation: 0"


class VllmParams(Section):
    replicas: Natural
    tensor_parallel_size: Count
    threads: Count
    max_num_seqs: Count
    cpu_cache_gib: Positive
    gpu_memory_utilization: Annotated[float, Field(gt=0, le=1)]
    sleep: bool

    def processes(self, *, gpus: int, cores: int) -> int:
        """The number of processes that `replicas` stands for on a machine."""
        return self.replicas or max(1, (gpus or cores // self.threads) // self.tensor_parallel_size)


class TransformersParams(Section):
    batch_size: Count


class ServerParams(Section):
    urls: list[Annotated[str, AfterValidator(address)]]
    concurrency: Count
    timeout_s: Positive
    retries: Natural

    def refusals(self) -> Refusals:
        if len(set(self.urls)) < len(self.urls):
            yield f"urls names a server twice: {', '.join(self.urls)}; name it once"


class EngineParams(Section):
    needs = (Needs("server.urls", [], "kind", ("server",), missing=SERVE),)

    kind: Literal["vllm", "transformers", "server"]
    vllm: VllmParams
    transformers: TransformersParams
    server: ServerParams

    @property
    def identity(self) -> dict[str, Any]:
        """The kind and its own settings, without addresses."""
        settings = {"vllm": self.vllm, "transformers": self.transformers, "server": None}[self.kind]
        return {"kind": self.kind, **(settings.model_dump() if settings else {})}

    @property
    def gpus(self) -> int:
        """The GPUs of a machine that a sampling stage holds; 0 for all."""
        return self.vllm.replicas * self.vllm.tensor_parallel_size if self.kind == "vllm" else 1


# How a policy can be put to the test questions.
Protocol = Literal["tool_call", "naive_rag", "closed_book", "gold_passages", "random", "oracle"]
PROTOCOLS: dict[Protocol, str] = {  # to the words for it, which follow the policy's name
    "tool_call": "acts in the environment of the runs",
    "naive_rag": "answers once, from the passages that the question itself finds",
    "closed_book": "answers once, with nothing to read",
    "gold_passages": "answers once, from the gold passages: bounds one answer after a search, not reading step by step",
    "random": "gives way to chance, with the same budget: the floor",
    "oracle": "gives way to a solver, by the same rules: the ceiling",
}

Baseline = Literal[
    "base_tool_call",
    "as_shipped",  # the model of `model.path`, before the warm start
    "with_examples",  # the same behind the examples of `evaluate.examples`
    "naive_rag",
    "closed_book",
    "gold_passages",
    "random",
    "oracle",
]
Budget = Literal["episodes", "tokens", "seconds", "cores"]  # of a training


class EvaluateParams(Section):
    seed: Natural
    questions: Natural
    samples: Count = 1  # of each question
    temperature: Annotated[float, Field(ge=0, le=100)] = 0.0  # 0 is greedy
    examples: str = ""  # a file as `env.examples`, of the baseline `with_examples` alone
    bootstrap_samples: Annotated[int, Field(ge=100)]
    price_per_device_hour: Weight = 0.0
    history_kept: Count

    def refusals(self) -> Refusals:
        if self.samples > 1 and self.temperature == 0:
            setting = f"samples: {self.samples} at temperature: 0"
            yield f"{setting} are one answer as often; set samples: 1, or temperature: 1"


class PromoteParams(Section):
    margin: Annotated[float, Field(ge=0, lt=1)]
    level: Annotated[float, Field(ge=0.5, lt=1)]
    yes_within_h: Annotated[float, Field(ge=0, le=8760)] = 0.0  # 0: nobody is asked


Stage = Literal["prepare", "index", "warm_start", "train", "register", "evaluate", "baseline", "report", "view"]
TIMEOUT_S = 600.0  # of a stage that `timeouts_s` does not name


class OperateParams(Section):
    side_by_side: Count
    timeouts_s: dict[Stage, Positive]
    retries: Natural
    retry_delay_s: Weight = 30.0
    pool_patience_s: Positive

    def timeout_s(self, stage: str) -> float:
        """The time limit of a stage by its name: `train`, or `train_closer` of the sweep's further seeds."""
        limits = (seconds for name, seconds in self.timeouts_s.items() if name == stage.removesuffix("_closer"))
        return next(limits, TIMEOUT_S)
