"""The sections of params.yaml about data, models, samplers and operation."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

from pydantic import AfterValidator, BeforeValidator, Field, field_validator

from agent_r1.params.outside import OutsideParams
from agent_r1.params.sections import (
    Count,
    Name,
    Natural,
    Positive,
    Section,
    Share,
    Weight,
    address,
    nearest,
    public,
)
from agent_r1.params.worlds import World

BUILT_IN = "atlas"
ROUNDING = 1e-9  # by which a sum of shares may miss 1

Format = Literal["hotpotqa", "2wikimultihopqa", "musique", "generic"]
DatasetName = Annotated[str, Field(pattern=r"^[A-Za-z0-9_.-]+$")]  # part of the names of metrics


class AtlasShares(Section):
    """How many of the questions are of each kind, in the order of the generator."""

    lookup: Share
    two_hops: Share
    three_hops: Share
    yes_no: Share
    earlier: Share
    sum: Share
    age: Share

    def objections(self) -> Iterator[str]:
        total = sum(self.model_dump().values())
        if abs(total - 1) > ROUNDING:
            yield f"the kinds of questions together make {total:.4g} of all; give them shares that add up to 1"


class AtlasParams(Section):
    people: Annotated[int, Field(ge=20)]
    films: Annotated[int, Field(ge=10)]
    companies: Annotated[int, Field(ge=5)]
    cities: Annotated[int, Field(ge=5)]
    countries: Annotated[int, Field(ge=3)]
    train_questions: Count
    dev_questions: Count
    test_questions: Count
    shares: AtlasShares


class SplitParams(Section):
    file: Path  # or a folder, or a pattern such as train-*.parquet
    questions: Natural  # drawn at random; 0 takes all


class FilesParams(Section):
    """A data set in files. A split that is left out has no questions: without `train` the data set is held out."""

    format: Format
    train: SplitParams | None = None
    dev: SplitParams | None = None
    test: SplitParams | None = None
    corpus: Path | None = None  # passages to search, a file, folder or pattern; without one, the rows' own paragraphs

    @property
    def splits(self) -> dict[str, SplitParams]:
        """The splits that there are, by name."""
        named = {"train": self.train, "dev": self.dev, "test": self.test}
        return {name: split for name, split in named.items() if split is not None}

    def objections(self) -> Iterator[str]:
        if not self.splits:
            yield "a data set needs a file of questions: give it train, dev or test"
        if self.format == "generic" and self.corpus is None:
            yield "rows of format generic bring no passages along; name a corpus to search"


class PrepareParams(Section):
    datasets: Annotated[list[str], Field(min_length=1)]
    seed: Natural
    atlas: AtlasParams
    files: dict[DatasetName, FilesParams]
    worlds: dict[DatasetName, World]

    @field_validator("files", "worlds")
    @classmethod
    def _built_in_name_is_taken(cls, named: dict[str, Any]) -> dict[str, Any]:
        if BUILT_IN in named:
            raise ValueError(f"{BUILT_IN!r} is the built-in data set; name yours differently")
        return named

    @property
    def dataset(self) -> str:
        """All data sets as one name, such as `hotpotqa+musique`."""
        return "+".join(self.datasets)

    @property
    def asks(self) -> bool:
        """Whether any data set asks for answers."""
        return any(name not in self.worlds for name in self.datasets)

    @property
    def plays(self) -> bool:
        """Whether any data set is a world."""
        return any(name in self.worlds for name in self.datasets)

    def objections(self) -> Iterator[str]:
        known = [BUILT_IN, *self.files, *self.worlds]
        for name in self.files.keys() & self.worlds.keys():
            yield f"{name!r} stands under files and under worlds; name one of them differently"
        for name in self.datasets:
            if name not in known:
                yield f"datasets names {name!r}, which neither files nor worlds define{nearest(name, known)}"
            if self.datasets.count(name) > 1:
                yield f"datasets names {name!r} twice; name each data set once"


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
    """Adapters of policy and critic; see `agent_r1.policy.adapter`."""

    rank: Natural
    alpha: Count
    targets: Annotated[list[str], Field(min_length=1)]


class ModelParams(Section):
    path: str
    threads: Count
    dtype: Literal["auto", "float32", "bfloat16"]
    float32_output: bool
    gradient_checkpointing: bool
    lora: LoraParams

    def objections(self) -> Iterator[str]:
        if self.float32_output and self.dtype == "float32":
            yield "float32_output: true has no effect with dtype: float32, in which all layers compute; set it to false"

    @property
    def adapter(self) -> LoraParams | None:
        """The adapters that train instead of the weights; None where the weights themselves do."""
        return self.lora if self.lora.rank else None


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
    observation_weight: Weight

    @property
    def teaches(self) -> bool:
        """Whether there is anything to learn from."""
        return bool(self.demonstrations or self.naive_rag_demonstrations or self.conversations)


class SearchToolParams(Section):
    """`env.top_k` says how many passages a search shows, to `naive_rag` too."""


class CalculatorParams(Section):
    """Without a setting."""


class ReadParams(Section):
    part_characters: Annotated[int, Field(ge=100)]


class PythonParams(Section):
    """The sandbox of `agent_r1.tools.python`."""

    timeout_s: Positive
    memory_mib: Annotated[int, Field(ge=16)]
    workers: Count


Variable = Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")]


class McpParams(Section):
    """A server that speaks the Model Context Protocol: a command that is started, or an address."""

    command: Annotated[list[str], Field(min_length=1)] | None = None
    url: Annotated[str, AfterValidator(address)] | None = None
    timeout_s: Positive  # of one call
    scope: Literal["stage", "episode"] = "stage"  # who shares a session with it: all episodes of a stage, or none
    tools: Annotated[list[str], Field(min_length=1)] | None = None  # of those it has; all where left out
    environment: list[Variable] = Field(default=[])  # what a command is given of the stage's own

    def objections(self) -> Iterator[str]:
        if (self.command is None) == (self.url is None):
            yield "a server is a command that is started or the url of one that runs; give one of the two"
        if self.environment and self.url:
            yield "environment has no effect with url; leave it out"


class FunctionParams(Section):
    """A function of one's own, under its name: what a module of the operator's has."""

    module: Annotated[str, Field(pattern=r"^[A-Za-z_]\w*(\.[A-Za-z_]\w*)*$")]
    timeout_s: Positive | None = None  # of one call, of an `async def`


def _without_null(entries: object) -> object:
    return (
        {name: entry for name, entry in entries.items() if entry is not None} if isinstance(entries, dict) else entries
    )


class ToolsParams(Section):
    """What a question is answered with; null leaves a tool out, a function or a server of the base from a run too."""

    search: SearchToolParams | None
    calculator: CalculatorParams | None
    read: ReadParams | None
    python: PythonParams | None
    functions: Annotated[dict[str, FunctionParams], BeforeValidator(_without_null)]
    mcp: Annotated[dict[Name, McpParams], BeforeValidator(_without_null)]

    def objections(self) -> Iterator[str]:
        built_in = (self.search, self.calculator, self.read, self.python)
        if all(tool is None for tool in built_in) and not self.functions and not self.mcp:
            yield "a question cannot be answered without any tool; offer one, such as search: {}"


# When the requests of episodes leave for the engine; see `agent_r1.rollout.order`.
Order = Literal[
    "rounds",  # when every episode that lives has asked
    "arrival",  # as soon as its episode has it
    "exact_arrival",  # so too, and a training is refused unless an action is then shown to be the same in any company
]


class GamesParams(Section):
    """How the games of `agent_r1.games` are played; see `agent_r1.envs.turns`."""

    protocol: Literal["ragen_v1", "ragen_v2", "brief"]
    moves_per_step: Count
    moves: Count

    def objections(self) -> Iterator[str]:
        if self.moves_per_step > self.moves:
            yield (
                f"moves_per_step {self.moves_per_step} has no effect above moves {self.moves}, which an episode has in "
                "all; lower it, or raise moves"
            )


class ContextParams(Section):
    """What the policy reads of an episode that goes on; see `agent_r1.envs.context`."""

    kind: Literal["append", "window", "summary"]
    every: Natural

    def objections(self) -> Iterator[str]:
        if (self.kind == "append") != (self.every == 0):
            yield (
                f"every {self.every} does not go with kind: {self.kind}; it is 0 with append, which keeps everything, "
                "and with the others the exchanges of a window or the steps between two summaries"
            )


class EnvParams(OutsideParams):
    instructions: str
    tools: ToolsParams
    max_result_characters: Count
    top_k: Count
    max_steps: Count
    max_tokens: Count
    max_action_tokens: Count
    context: ContextParams
    parallel_calls: Count
    aborted_share: Share
    order: Order
    games: GamesParams

    def objections(self) -> Iterator[str]:
        if self.max_action_tokens >= self.max_tokens:
            yield (
                f"max_action_tokens {self.max_action_tokens} leaves no room for a prompt in "
                f"max_tokens {self.max_tokens}; raise max_tokens"
            )
        steps = self.max_steps - (2 if self.context.kind == "window" else 1)  # the last of which a rewriting can follow
        if self.context.every > steps:
            yield (
                f"context.every {self.context.every} has no effect with kind: {self.context.kind} and max_steps "
                f"{self.max_steps}, which end an episode before its context is rewritten; lower it, or raise max_steps"
            )
        if self.tools.read and self.tools.read.part_characters >= self.max_result_characters:
            yield (
                f"tools.read.part_characters {self.tools.read.part_characters} would be cut at max_result_characters "
                f"{self.max_result_characters}; make parts smaller"
            )


class VllmParams(Section):
    threads: Count
    max_num_seqs: Count
    cpu_cache_gib: Positive
    gpu_memory_utilization: Annotated[float, Field(gt=0, le=1)]


class TransformersParams(Section):
    batch_size: Count


class ServerParams(Section):
    urls: list[Annotated[str, AfterValidator(address)]]
    concurrency: Count
    timeout_s: Positive
    retries: Natural

    def objections(self) -> Iterator[str]:
        if len(set(self.urls)) < len(self.urls):
            yield f"urls names a server twice: {', '.join(self.urls)}; raise concurrency instead"


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

    def timeout_s(self, stage: str) -> float:
        """Of a stage by its name: `train`, or `train_closer` for those of the sweep that get further seeds."""
        return float(self.timeouts_s.model_dump(by_alias=True)[stage.removesuffix("_closer")])
