"""What holds for each family of models: `python -m benchmarks.families [FAMILY ...] [--store]`.

A small model of random weights has every kind of layer of its family. A learner and vLLM compute with it on this
machine, each family in a process of its own, whose crash is a row. Gaps are between the logprobs of sampled tokens,
mean/largest in nats: as loaded, in bfloat16, and in the widest precision that vLLM has after an update of all weights,
of adapters beside them and of merged ones. `proved` are the tensors whose sums the sampler showed behind an update.
`packed` are the relative differences of hidden states/gradient from the same contexts one by one. `t:` is of the engine
of transformers, where vLLM is refused. `refused` and `fails` are told on stderr.
"""

from __future__ import annotations

import importlib.util
import json
import math
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    Gemma3TextConfig,
    Gemma4TextConfig,
    GptOssConfig,
    Lfm2Config,
    LlamaConfig,
    Olmo3Config,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3_5MoeTextConfig,
    Qwen3_5TextConfig,
    Qwen3Config,
    Qwen3MoeConfig,
    SmolLM3Config,
)

from agent_r1.learn import builtin, checkpoint
from agent_r1.learn.checkpoint import Progress
from agent_r1.learn.learner import Learner, Options
from agent_r1.learn.model import load_policy, pack, see
from agent_r1.pretrained import layer_kinds, read_config, require_sampled
from agent_r1.records import Trajectory
from agent_r1.rollout.engines import TransformersEngine
from agent_r1.rollout.sampling import Action, Actor, Engine
from agent_r1.rollout.vllm_engine import VllmEngine
from agent_r1.training.watch import prove_held
from benchmarks.stored import ROOT, Row, options, show
from benchmarks.synthetic import NO_WARMUP, Work, credit_of, random_requests, shipped_with, trajectory_of

Dtype = Literal["float32", "bfloat16"]

WORK = Work(episodes=16, prompt=160, action=32)
LENGTHS = (90, 41, 7)  # tokens of packed contexts
WORDS = 512
SPREAD = 0.12  # of random weights: logits are not flat
LIMIT_S = 1800.0  # for a family
STAND_INS = Path(__file__).parent / "stand_ins"  # for packages that no text model calls
COLUMNS = (
    "float32",
    "bfloat16",
    "proved",
    "updated",
    "adapters",
    "merged",
    "packed",
    "goes on",
    "adapters on",
)
COMMON = {
    "vocab_size": WORDS,
    "hidden_size": 64,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "intermediate_size": 128,
    "max_position_embeddings": 1024,
    "bos_token_id": None,
    "pad_token_id": 0,
    "initializer_range": SPREAD,
}
WINDOWS = {"num_hidden_layers": 2, "sliding_window": 64, "layer_types": ["sliding_attention", "full_attention"]}
LINEAR = {
    "num_hidden_layers": 4,
    "linear_key_head_dim": 64,
    "linear_value_head_dim": 64,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
}
EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 5e5,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 128,
}
FAMILIES: Mapping[str, tuple[type[PreTrainedConfig], Mapping[str, Any]]] = {
    "Qwen2.5": (Qwen2Config, {"num_hidden_layers": 2}),
    "Qwen3": (Qwen3Config, {"num_hidden_layers": 2, "head_dim": 32}),
    "Qwen3-MoE": (Qwen3MoeConfig, {"num_hidden_layers": 2, "head_dim": 32, **EXPERTS}),
    "Qwen3.5": (Qwen3_5TextConfig, {**LINEAR, "head_dim": 32}),
    "Qwen3.5-MoE": (Qwen3_5MoeTextConfig, {**LINEAR, "head_dim": 32, **EXPERTS, "shared_expert_intermediate_size": 64}),
    "Gemma 3": (Gemma3TextConfig, {**WINDOWS, "head_dim": 32, "query_pre_attn_scalar": 32}),
    "Gemma 4": (
        Gemma4TextConfig,
        {
            **WINDOWS,
            "num_hidden_layers": 4,
            "layer_types": WINDOWS["layer_types"] * 2,
            "head_dim": 32,
            "global_head_dim": 64,
            "vocab_size_per_layer_input": WORDS,
            "hidden_size_per_layer_input": 32,
            "num_kv_shared_layers": 2,
            "use_double_wide_mlp": True,
            "final_logit_softcapping": 30.0,
        },
    ),
    "LFM2": (
        Lfm2Config,
        {
            "num_hidden_layers": 3,
            "layer_types": ["conv", "full_attention", "conv"],
            "conv_dim": COMMON["hidden_size"],
            "block_dim": COMMON["hidden_size"],
        },
    ),
    "OLMo 3": (Olmo3Config, WINDOWS),
    "gpt-oss": (
        GptOssConfig,
        {**WINDOWS, "head_dim": 32, "num_local_experts": 8, "num_experts_per_tok": 2, "intermediate_size": 64},
    ),
    "SmolLM3": (SmolLM3Config, {"num_hidden_layers": 4}),
    "Llama 3": (LlamaConfig, {"num_hidden_layers": 2, "rope_parameters": LLAMA3}),
}


def make_model(family: str, folder: Path, **changes: Any) -> None:
    """Writes a family's small model of seed 0, with a tokenizer of a few hundred words."""
    tokenizer = builtin.train_tokenizer(["a question and an answer"], 400)
    kind, fields = FAMILIES[family]
    config = kind(**{**COMMON, **fields, **changes, "eos_token_id": tokenizer.eos_token_id})
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config)
    for weight in model.parameters():  # norms, biases and gates start at one value
        if weight.dim() < 2:
            weight.data += SPREAD * torch.randn_like(weight)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


@dataclass(frozen=True, slots=True)
class Family:
    """A family's small model, and where its parts are written."""

    name: str
    model: Path
    scratch: Path

    @property
    def exact(self) -> Dtype:
        """The widest precision in which vLLM samples with it on a CPU."""
        return "bfloat16" if "linear_attention" in layer_kinds(read_config(self.model)) else "float32"

    def learner(self, dtype: Dtype, *, rank: int = 0, merges: bool = False) -> Learner:
        lora = {"rank": rank, "alpha": 16}
        update = {"learning_rate": 1e-3, "minibatches": 1, "epochs": 1, "critic": {"warmup": NO_WARMUP}}
        settings = shipped_with({"model": {"dtype": dtype, "lora": lora}, "train": {"update": update}})
        own = Options(merges=merges)
        return Learner(self.model, settings.train.update, settings.model, with_critic=False, seed=0, options=own)

    @contextmanager
    def engine(self, dtype: Dtype, *, rank: int = 0) -> Iterator[Engine]:
        """vLLM, or transformers where vLLM is refused."""
        actor = Actor(
            model=str(self.model),
            end_ids=[],
            max_tokens=WORK.tokens,
            temperature=1.0,
            dtype=dtype,
            adapter_rank=rank,
        )
        settings = shipped_with({}).engine
        try:
            require_sampled(read_config(self.model), dtype, adapters=rank > 0)
        except ValueError as refusal:
            print(refusal, file=sys.stderr)
            yield TransformersEngine(settings.transformers, actor)
            return
        with VllmEngine(settings.vllm, actor) as engine:
            yield engine


def sampled(engine: Engine) -> list[Trajectory]:
    requests = list(random_requests(WORK, WORDS))
    return [trajectory_of(*pair) for pair in zip(requests, engine.sample(requests), strict=True)]


def gap(learner: Learner, engine: Engine) -> str:
    """The mean and the largest difference of sampler and learner at sampled tokens."""
    episodes = sampled(engine)
    both = zip(episodes, learner.logprobs(episodes), strict=True)
    apart = np.concatenate([np.abs(row.logprobs - own)[row.action_mask] for row, own in both])
    mark = "t:" if isinstance(engine, TransformersEngine) else ""
    return f"{mark}{apart.mean():.1e}/{apart.max():.1e}"


def update(learner: Learner, episodes: Sequence[Trajectory], iteration: int = 0) -> None:
    advantages = [credit_of(row, 1 - 2 * (index % 2)) for index, row in enumerate(episodes)]
    learner.update(episodes, advantages, iteration)


def transfer(engine: Engine, learner: Learner, folder: Path) -> tuple[str, str]:
    """Hands an update over: how many tensors are proved, and the gap behind it."""
    update(learner, sampled(engine))
    learner.save_policy(folder, halved=engine.halved and not learner.adapter)
    engine.load_weights(folder, learner.policy_version)
    [held] = engine.held()
    sums = learner.weight_sums(held.dtype)
    unproved = prove_held(held, sums) & sums.keys()
    if unproved:
        print("not proved:", *sorted(unproved), file=sys.stderr)
    return f"{len(sums) - len(unproved)}/{len(sums)}", gap(learner, engine)


def updated(family: Family) -> Row:
    """All weights, as they were loaded and after an update, and merged adapters."""
    dtype = family.exact
    with family.engine(dtype) as engine:
        learner = family.learner(dtype)
        cells = {dtype: gap(learner, engine)}
        cells["proved"], cells["updated"] = transfer(engine, learner, family.scratch / "updated")
        merging = family.learner(dtype, rank=4, merges=True)
        return {**cells, "merged": transfer(engine, merging, family.scratch / "merged")[1]}


def bfloat16(family: Family) -> Row:
    """The same in bfloat16, with the proof of a transfer; in float32, if those were in bfloat16."""
    if family.exact == "bfloat16":
        with family.engine("float32") as engine:
            return {"float32": gap(family.learner("float32"), engine)}
    with family.engine("bfloat16") as engine:
        learner = family.learner("bfloat16")
        cells = {"bfloat16": gap(learner, engine)}
        transfer(engine, learner, family.scratch / "halved")
        return cells


def adapted(family: Family) -> Row:
    """The layers that get adapters."""
    names = [name for name, _ in family.learner("float32", rank=4).policy.named_parameters() if ".lora_A" in name]
    layers = {name.partition(".lora_")[0].rpartition(".")[2].removesuffix("_proj") for name in names}
    return {"adapters on": ",".join(sorted(layers))}


def adapters(family: Family) -> Row:
    """Adapters beside the sampler's weights, after an update."""
    with family.engine(family.exact, rank=4) as engine:
        learner = family.learner(family.exact, rank=4)
        return {"adapters": transfer(engine, learner, family.scratch / "adapters")[1]}


def packed(family: Family) -> Row:
    """The differences of packed contexts from contexts alone."""
    ids = torch.randint(0, WORDS, (len(LENGTHS), max(LENGTHS)), generator=torch.Generator().manual_seed(0))
    mask = torch.arange(max(LENGTHS)) < torch.tensor(LENGTHS)[:, None]
    model = load_policy(family.model, device=torch.device("cpu"))
    rows = [(ids[row : row + 1, :length], mask[row : row + 1, :length]) for row, length in enumerate(LENGTHS)]
    alone = [learned(model, *row) for row in rows]
    expected = torch.cat([states for states, _ in alone]), torch.stack([gradient for _, gradient in alone]).sum(0)
    pack(model)
    return {"packed": difference(learned(model, ids, mask), expected)}


def learned(model: PreTrainedModel, ids: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """The hidden states that predict tokens, and the gradient of a sum of their squares."""
    _, states = see(model.base_model, ids, mask)
    model.zero_grad()
    (states * torch.linspace(-1, 1, states.shape[1])).square().sum().backward()
    gradients = [weight.grad for weight in model.parameters() if weight.grad is not None]
    return states.detach(), torch.cat([gradient.flatten() for gradient in gradients])


def difference(found: tuple[Tensor, Tensor], expected: tuple[Tensor, Tensor]) -> str:
    return "/".join(f"{(one - other).norm() / other.norm():.1e}" for one, other in zip(found, expected, strict=True))


def resumed(family: Family) -> Row:
    """Whether a training that goes on from a checkpoint ends with the bits of one that was never ended."""
    action = Action.of(list(range(WORK.action)), [-math.log(WORDS)] * WORK.action, end_ids=())
    episodes = [trajectory_of(request, action) for request in random_requests(WORK, WORDS)]
    straight, killed, later = (family.learner("float32") for _ in range(3))
    update(straight, episodes)
    update(straight, episodes, 1)
    update(killed, episodes)
    checkpoint.save(family.scratch / "checkpoint", killed, Progress(iterations=1, policy_version=1))
    checkpoint.load(family.scratch / "checkpoint", later)
    update(later, episodes, 1)
    pairs = zip(later.policy.parameters(), straight.policy.parameters(), strict=True)
    return {"goes on": "same" if all(torch.equal(*pair) for pair in pairs) else "other"}


PARTS: Mapping[Callable[[Family], Row], Sequence[str]] = {
    packed: ("packed",),
    updated: ("float32", "proved", "updated", "merged"),
    bfloat16: ("bfloat16",),
    adapted: ("adapters on",),
    adapters: ("adapters",),
    resumed: ("goes on",),
}


def measure(name: str) -> Row:
    """The cells of a family."""
    cells = dict[str, str]()
    with tempfile.TemporaryDirectory() as scratch:
        family = Family(name, Path(scratch) / "model", Path(scratch))
        make_model(name, family.model)
        for part, columns in PARTS.items():
            try:
                cells |= part(family)
            except Exception as fault:  # whatever it is, it is a finding
                print(f"{name}: {columns[0]}: {type(fault).__name__}: {fault}", file=sys.stderr)
                cells |= dict.fromkeys(columns, "refused" if isinstance(fault, ValueError) else "fails")
    return {"family": name, **{column: cells.get(column, "fails") for column in COLUMNS}}


def in_process(name: str) -> Row:
    """The row of a family, from a process of its own."""
    path = os.pathsep.join([str(ROOT), *([] if importlib.util.find_spec("torchvision") else [str(STAND_INS)])])
    process = subprocess.run(
        [sys.executable, "-m", "benchmarks.families", name, "--here"],
        env={**os.environ, "PYTHONPATH": path},
        stdout=subprocess.PIPE,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    if process.returncode:
        return {"family": name, **dict.fromkeys(COLUMNS, "crashes")}
    row: Row = json.loads(process.stdout.splitlines()[-1])
    return row


def main() -> None:
    parser = options("Measures what holds for each family of models.")
    parser.add_argument("families", nargs="*", choices=[*FAMILIES, []], default=[*FAMILIES])
    parser.add_argument("--here", action="store_true", help="in this process, as JSON")
    given = parser.parse_args()
    if given.here:
        torch.set_num_threads(1)
        print(json.dumps(measure(*given.families)))
    else:
        show("families", [in_process(name) for name in given.families], store=given.store)


if __name__ == "__main__":
    main()
