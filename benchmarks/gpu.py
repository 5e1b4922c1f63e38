"""What a CUDA device makes of learner and samplers: `python -m benchmarks.gpu --out FOLDER`, in at most 8 minutes.

Models in the shapes of Qwen2.5 with random weights; nothing is downloaded, and no stage, store or server is needed. The
output layer by the sizes of its chunks and blocks; then by size and by what trains: what an update of random episodes
learns a second, which share of the device's own rate of matrix products that is, what memory it takes beside what was
estimated, and what a checkpoint takes of time and of the machine's memory; then what a sampler samples a second, how
the weights get there, and how far it and the learner are apart before and after an update (the canary). Writes gpu.json
after every part, and prints a table at the end; a part that does not fit, fails or comes too late is left out, and the
table says why.
"""

from __future__ import annotations

import argparse
import logging
import math
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from itertools import product
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from agent_r1.files import sha256
from agent_r1.learn import checkpoint, memory, scoring
from agent_r1.learn.learner import Learner, Options
from agent_r1.learn.memory import measure, release
from agent_r1.learn.model import load_policy, precision
from agent_r1.params import SHIPPED, Params, load
from agent_r1.params.sections import override, validated
from agent_r1.pretrained import compute_dtype, default_device
from agent_r1.records import Trajectory
from agent_r1.rollout.engines import open_engine
from agent_r1.rollout.sampling import Actor
from agent_r1.training.watch import prove_sampled
from benchmarks.kit import (
    Row,
    accept_grouped_heads,
    counted_kernel,
    emptied,
    flops_of,
    held_gib,
    host_peak,
    peak_gib,
    rate_of_products,
    show_rows,
    tried,
)
from benchmarks.synthetic import (
    SHAPES,
    Work,
    credit_of,
    make_model,
    random_episodes,
    random_requests,
    seconds_of,
    trajectory_of,
)

TRAINS: dict[str, dict[str, Any]] = {  # what of params.yaml is changed
    "all weights": {},
    "all weights, packed": {"model": {"packing": True}},
    "adapters": {"model": {"lora": {"rank": 64}}},
    "all weights, offloaded": {"learner": {"optimizer_offload": True}, "engine": {"vllm": {"sleep": True}}},
}
CHUNKS, BLOCKS = (2**25, 2**27, 2**29), (2**20, 2**24, 2**25)  # logits at a time
SAMPLED = {"transformers": ("all weights", "adapters"), "vllm": ("all weights", "adapters", "all weights, offloaded")}
MATRIX = 8192  # rows and columns of the products by which the device's own rate is measured

logger = logging.getLogger(__name__)


def settings_of(shape: str, engine: str, trains: str, work: Work) -> Params:
    """params.yaml for one size and one of `TRAINS`."""
    changes = {
        "model": {"gradient_checkpointing": shape == "3B"},
        "engine": {"kind": engine, "transformers": {"batch_size": work.episodes}},
        "env": {"max_tokens": work.tokens, "max_action_tokens": work.action},
        "train": {
            "update": {"max_tokens_per_microbatch": work.microbatch or SHAPES[shape][-1], "minibatches": 2, "epochs": 1}
        },
    }
    shipped = load(SHIPPED).model_dump(by_alias=True)
    return validated(Params, override(override(shipped, changes), TRAINS[trains]), "benchmarks.gpu")


def learner_of(folder: Path, settings: Params) -> Learner:
    offload = settings.learner.optimizer_offload
    options = Options(merges=False, offload=offload)
    return Learner(folder, settings.train.update, settings.model, with_critic=False, seed=0, options=options)


def measure_output(shape: str, chunk: int, block: int, tokens: int) -> Row:
    """The output layer alone over some tokens: seconds forward and backward, as an update goes through it."""
    device, (hidden, *_, words, _) = default_device(), SHAPES[shape]
    config = AutoConfig.for_model("qwen2", vocab_size=words, hidden_size=hidden, num_hidden_layers=1)
    config.num_attention_heads = config.num_key_value_heads = hidden // 64
    with device:
        model = AutoModelForCausalLM.from_config(config)
        states, chosen = torch.randn(tokens, hidden), torch.randint(words, (tokens,))
    seen = model.model(input_ids=chosen[None, :8])

    def learn() -> None:
        whole = scoring.Output(model, seen, states.clone().requires_grad_(), chosen)
        parts = whole.cut()
        for part in parts:
            with precision(device, compute_dtype("auto", device)):
                logprobs, _ = part.logprobs_and_entropy()
            (logprobs.sum() / tokens).backward()
        model.zero_grad(set_to_none=False)

    kept = scoring.room
    scoring.room = lambda kind: (chunk, block)
    try:
        learn()
        emptied(device)
        before = held_gib(device)
        seconds = sorted(seconds_of(learn, device) for _ in range(3))[1]
        return {"tokens/s": tokens / seconds, "GiB": peak_gib(device) - before}
    finally:
        scoring.room = kept


def measure_learner(shape: str, trains: str, *, work: Work, rate: float, folder: Path) -> Row:
    """One size without a sampler: memory, updates, a checkpoint."""
    settings, device = settings_of(shape, "transformers", trains, work), default_device()
    demand = demand_of(folder, settings, device)
    parts = memory.estimate(demand)
    memory.require_fit(parts, memory.available_gib(device))
    emptied(device)
    learner = learner_of(folder, settings)
    peak = measure(learner, settings.env)
    trajectories = random_episodes(work, SHAPES[shape][5])
    credits_ = [credit_of(each, sign=1 - 2 * (index % 2)) for index, each in enumerate(trajectories)]
    with counted_kernel() as calls:
        learner.update(trajectories[:8], credits_[:8], 0)
        emptied(device)
        first, again = (seconds_of(lambda: learner.update(trajectories, credits_, 1), device) for _ in range(2))
    learned = sum(len(each.token_ids) for each in trajectories)
    return {
        "tokens/s in new shapes": learned / first,  # which every iteration has, for the lengths of its episodes
        "updated tokens/s": learned / again,
        "share of the products' rate": flops_of(demand, trajectories) / again / rate,
        "kernel calls": len(calls),
        "allocated GiB": peak_gib(device),
        "memory GiB": peak,
        "estimated GiB": sum(parts.values()) - parts["libraries"],
    }


def measure_checkpoint(shape: str, trains: str, *, work: Work, folder: Path) -> Row:
    """What a checkpoint takes, and of its seconds what goes into writing the parts and into hashing them."""
    settings, device = settings_of(shape, "transformers", trains, work), default_device()
    learner = learner_of(folder, settings)
    trajectories = random_episodes(work, SHAPES[shape][5])[:8]
    learner.update(trajectories, [credit_of(each, sign=1) for each in trajectories], 0)
    with tempfile.TemporaryDirectory() as scratch:
        target, row = Path(scratch) / "checkpoint", Row()
        progress = checkpoint.Progress(iterations=1, policy_version=1)
        with host_peak() as host:
            row["checkpoint s"] = seconds_of(lambda: checkpoint.save(target, learner, progress), device)
        files = [each for each in target.rglob("*") if each.is_file()]
        row["checkpoint GiB"] = sum(each.stat().st_size for each in files) / memory.GIB
        row["host GiB beyond"] = host[0]
        row["hashed s"] = seconds_of(lambda: [sha256(each) for each in files], device)
        shutil.rmtree(target)
        row["policy s"] = seconds_of(lambda: learner.save_policy(target / "policy"), device)
        row["state s"] = seconds_of(lambda: learner.save_state(target / "learner"), device)
        return row


def measure_sampler(shape: str, engine: str, trains: str, *, work: Work, folder: Path) -> Row:
    """One size with one sampler: weights' way, sampling, canary, and the canary of the updated weights."""
    if engine == "vllm" and not find_spec("vllm"):
        raise ValueError("vLLM is not installed")
    settings, device = settings_of(shape, engine, trains, work), default_device()
    learner = learner_of(folder, settings)
    actor = Actor(
        model=str(folder),
        end_id=learner.tokenizer.eos_token_id,
        max_tokens=work.tokens,
        temperature=1.0,
        dtype=settings.model.dtype,
        adapter_rank=settings.model.lora.rank,
    )
    requests = list(random_requests(work, SHAPES[shape][5], shortest=work.prompt // 4))
    row: Row = {}
    with open_engine(settings.engine, actor) as sampler, tempfile.TemporaryDirectory() as scratch:

        def canary(version: int) -> tuple[float, list[Trajectory]]:
            own = Path(scratch) / str(version)
            row["weights written s"] = seconds_of(lambda: checkpoint.save_policy(own, learner), device)
            release(learner)
            row["weights read s"] = seconds_of(lambda: sampler.load_weights(own, version), device)
            started = time.perf_counter()
            actions = sampler.sample(requests)
            row["sampled tokens/s"] = sum(len(each.token_ids) for each in actions) / (time.perf_counter() - started)
            sampler.rest()
            made = [trajectory_of(*pair) for pair in zip(requests, actions, strict=True)]
            chosen = made[: settings.train.update.proved_trajectories]
            tolerance = settings.train.update.canary_tolerance
            return prove_sampled(chosen, learner.logprobs(chosen), learner.compute.dtype, tolerance), made

        row["canary"], trajectories = canary(0)
        credits_ = [credit_of(each, sign=1 - 2 * (index % 2)) for index, each in enumerate(trajectories)]
        learner.update(trajectories, credits_, 0)
        row["canary after an update"], _ = canary(1)
    return row


def measure_bfloat16(folder: Path) -> Row:
    """The weights' way through the disk in bfloat16, beside that in float32."""
    device, row = default_device(), Row()
    with tempfile.TemporaryDirectory() as scratch:
        for dtype in (torch.float32, torch.bfloat16):
            model, own = load_policy(folder, dtype), Path(scratch) / str(dtype)
            row[f"{dtype} written s"] = seconds_of(partial(model.save_pretrained, own), device)
            row[f"{dtype} read s"] = seconds_of(partial(load_policy, own, torch.bfloat16), device)
    return row


def demand_of(folder: Path, settings: Params, device: torch.device) -> memory.Demand:
    return memory.Demand(
        model=AutoConfig.from_pretrained(folder),
        tokens=max(settings.train.update.max_tokens_per_microbatch, settings.env.max_tokens),
        device=device.type,
        dtype=compute_dtype(settings.model.dtype, device),
        adapter=settings.model.adapter,
        gradient_checkpointing=settings.model.gradient_checkpointing,
        optimizer_offload=settings.learner.optimizer_offload and device.type == "cuda",
    )


def parts_of(
    given: argparse.Namespace, work: Work, rate: float, models: dict[str, Path]
) -> Iterator[tuple[str, Callable[[], Row]]]:
    """The parts by their names, those first that decide most."""
    short = replace(work, action=min(work.action, given.sampled))
    for shape, trains in product(given.sizes, given.trains):
        learn = partial(measure_learner, shape, trains, work=work, rate=rate, folder=models[shape])
        yield f"{shape}: {trains}", learn
    for shape, engine, trains in product(given.sizes, given.samplers, given.trains):
        if trains in SAMPLED[engine]:  # of the others a sampler notices nothing
            sample = partial(measure_sampler, shape, engine, trains, work=short, folder=models[shape])
            yield f"{shape}: {trains}, {engine}", sample
    for shape, chunk, block in product(given.sizes if given.outputs else [], CHUNKS, BLOCKS):
        name = f"{shape}: output in chunks of 2^{math.log2(chunk):.0f}, blocks of 2^{math.log2(block):.0f}"
        yield name, partial(measure_output, shape, chunk, block, SHAPES[shape][-1])
    for shape in given.sizes if given.disk else []:
        yield f"{shape}: weights through the disk", partial(measure_bfloat16, models[shape])
        saved = partial(measure_checkpoint, shape, "all weights", work=work, folder=models[shape])
        yield f"{shape}: all weights, checkpoint", saved


def campaign(given: argparse.Namespace) -> list[Row]:
    """Every part that the budget has room for; gpu.json grows with each."""
    device, ends = default_device(), time.monotonic() + given.budget
    prompt, action = given.tokens
    work = Work(episodes=given.episodes, prompt=prompt, action=action, microbatch=given.microbatch)
    rate = rate_of_products(device, compute_dtype("auto", device), MATRIX if device.type == "cuda" else MATRIX // 32)
    with tempfile.TemporaryDirectory() as folder:
        models = {shape: Path(folder) / shape for shape in given.sizes}
        for shape, own in models.items():
            make_model(own, SHAPES[shape], work.tokens)
        parts = dict(parts_of(given, work, rate, models))
        return tried(parts, given.out / "gpu.json", {"TFLOP/s of products": rate / 1e12}, ends)


def parsed(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Measures learner and samplers on a CUDA device, in random weights.")
    parser.add_argument("--sizes", nargs="+", choices=SHAPES, default=["0.5B", "3B"])
    parser.add_argument("--trains", nargs="+", choices=TRAINS, default=[*TRAINS])
    parser.add_argument("--samplers", nargs="+", choices=SAMPLED, default=[*SAMPLED])
    parser.add_argument("--episodes", type=int, default=64)
    parser.add_argument("--tokens", type=int, nargs=2, default=[512, 512], metavar=("PROMPT", "ACTION"))
    parser.add_argument("--microbatch", type=int, default=0, metavar="TOKENS", help="in place of the size's own")
    parser.add_argument("--outputs", action=argparse.BooleanOptionalAction, default=True, help="the output layer alone")
    parser.add_argument("--disk", action=argparse.BooleanOptionalAction, default=True, help="weights and checkpoints")
    parser.add_argument("--sampled", type=int, default=64, metavar="TOKENS", help="of an action that is sampled")
    parser.add_argument("--budget", type=float, default=420.0, metavar="SECONDS", help="no part begins after it")
    parser.add_argument("--out", type=Path, default=Path(), help="the folder of gpu.json")
    return parser.parse_args(arguments)


def main() -> None:
    logging.basicConfig(level=logging.INFO)
    accept_grouped_heads()
    print(show_rows(campaign(parsed())))


if __name__ == "__main__":
    main()
