"""The first hour on a GPU: `python -m benchmarks.gpu --out FOLDER`, on one device. docs/first_hour_gpu.md says more.

Models in the shapes of Qwen2.5 with random weights; nothing is downloaded, and no stage, store or server is needed. The
parts that decide most come first: what a sampler and the learner say of the same tokens (the canary), the output layer,
packing, memory beside its estimate; then seconds, then rates. Writes gpu.json after every part, and prints a table at
the end. A part that does not fit, fails, hangs or comes too late is left out, and the table says why.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import math
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import cached_property, partial
from importlib.metadata import packages_distributions, version
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
from agent_r1.learn.model import precision
from agent_r1.params import Params
from agent_r1.params.sections import override
from agent_r1.pretrained import compute_dtype, default_device
from agent_r1.records import Trajectory
from agent_r1.rollout.sampling import Actor, Engine, Flowing
from agent_r1.training.watch import prove_sampled
from benchmarks.attention import compare_attention
from benchmarks.kit import (
    Row,
    accept_grouped_heads,
    attended,
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
    shipped_with,
    trajectory_of,
)

TRAINS: dict[str, dict[str, Any]] = {  # what of params.yaml is changed
    "all weights": {},
    "all weights, packed": {"model": {"packing": True}},
    "all weights, packed and compiled": {"model": {"packing": True, "compile": True}},
    "adapters": {"model": {"lora": {"rank": 64}}},
    "all weights, offloaded": {"learner": {"optimizer_offload": True}, "engine": {"vllm": {"sleep": True}}},
}
CHUNKS, BLOCKS = (2**25, 2**27, 2**29), (2**20, 2**24, 2**25)  # logits at a time
SAMPLED = {"transformers": ("all weights", "adapters"), "vllm": ("all weights", "adapters", "all weights, offloaded")}
VLLM = "0.32"  # that the project pins
HEADS = (64, 128)  # sizes of the attention's heads
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
    return shipped_with(override(changes, TRAINS[trains]))


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
        whole = scoring.Output(model, seen, states.clone().requires_grad_(), chosen, states.new_zeros(()))
        parts = whole.cut()
        for part in parts:
            with precision(device, compute_dtype("auto", device)):
                logprobs, _ = part.scores(entropy=True)
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
        "share with recomputation": flops_of(demand, trajectories, again=True) / again / rate,
        "share of tokens in the loss": sum(int(each.action_mask.sum()) for each in trajectories) / learned,
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


class Sampled:
    """A learner and a sampler of its weights, opened when first asked for; several parts share them."""

    def __init__(self, shape: str, engine: str, trains: str, work: Work, folder: Path) -> None:
        self._words, self._work, self._folder = SHAPES[shape][5], work, folder
        self._asked, self._device = (shape, engine, trains, work), default_device()
        self._opened = ExitStack()
        self._version = 0

    @cached_property
    def _settings(self) -> Params:
        return settings_of(*self._asked)

    @cached_property
    def _both(self) -> tuple[Learner, Engine]:
        from agent_r1.rollout.engines import open_engine

        settings = self._settings
        if settings.engine.kind == "vllm":
            require_vllm()
        learner = learner_of(self._folder, settings)
        actor = Actor(
            model=str(self._folder),
            end_ids=[learner.tokenizer.eos_token_id],
            max_tokens=self._work.tokens,
            temperature=1.0,
            dtype=settings.model.dtype,
            adapter_rank=settings.model.lora.rank,
        )
        return learner, self._opened.enter_context(open_engine(settings.engine, actor))

    def compare(self) -> Row:
        """Seeded requests again, with prompts computed anew and with cached ones; each alone, and in company."""
        from agent_r1.rollout.episodes import apart, compare  # a bare machine lacks Parquet, and httpx

        _, sampler = self._both
        asked, made = list(random_requests(self._work, self._words, shortest=self._work.prompt // 4)), []
        for repeated in (2, 1):
            self._hand_over()  # which drops cached prompts
            made += [sampler.sample(asked) for _ in range(repeated)]
        first, cached, again = made
        row: Row = {
            name: all(apart(*pair) == (0.0, 0) for pair in zip(first, others, strict=True))
            for name, others in (("same bits twice", again), ("same bits with cached prompts", cached))
        }
        if isinstance(sampler, Flowing):
            limits = self._settings.env.model_copy(update={"order": "arrival"})
            row |= asyncio.run(compare(sampler, [each.context for each in asked], limits))
        return row

    def reload(self) -> Row:
        """The canary of the weights as they are, and after an update of the learner."""
        learner, _ = self._both
        first, trajectories = self._proved()
        credits_ = [credit_of(each, sign=1 - 2 * (index % 2)) for index, each in enumerate(trajectories)]
        learner.update(trajectories, credits_, 0)
        second, _ = self._proved()
        return {**first, **{f"updated, {name}": value for name, value in second.items()}}

    def rest(self) -> Row:
        """The memory that rest frees, and the canary of a sampler that wakes. Closes both."""
        with self._opened:
            _, sampler = self._both
            sampler.sample(list(random_requests(self._work, self._words))[:1])
            before = memory.available_gib(self._device)
            seconds = seconds_of(sampler.rest, self._device)
            row = {"rest s": seconds, "freed GiB": memory.available_gib(self._device) - before}
            row |= self._proved()[0]
        del self._both
        return row

    def _hand_over(self) -> Row:
        """The way of the learner's weights to the sampler, in seconds."""
        (learner, sampler), device, row = self._both, self._device, Row()
        with tempfile.TemporaryDirectory() as scratch:
            own = Path(scratch) / "policy"
            halved = sampler.halved and not learner.adapter
            row["weights written s"] = seconds_of(lambda: checkpoint.hand_over(own, learner, halved=halved), device)
            release(learner)
            row["weights read s"] = seconds_of(lambda: sampler.load_weights(own, self._version), device)
        self._version += 1
        return row

    def _proved(self) -> tuple[Row, list[Trajectory]]:
        """The way of the weights, what the sampler samples a second, and the canary."""
        (learner, sampler), update = self._both, self._settings.train.update
        row, asked = self._hand_over(), list(random_requests(self._work, self._words, self._work.prompt // 4))
        started = time.perf_counter()
        actions = sampler.sample(asked)
        row["sampled tokens/s"] = sum(len(each.token_ids) for each in actions) / (time.perf_counter() - started)
        sampler.rest()
        made = [trajectory_of(*pair) for pair in zip(asked, actions, strict=True)]
        chosen = made[: update.proved_trajectories]
        logprobs = learner.logprobs(chosen)
        row["canary"] = prove_sampled(chosen, logprobs, learner.compute.dtype, update.canary_tolerance)
        return row, made


def require_vllm() -> None:
    """Refuses a vLLM other than the one that the project pins: its parts would measure something else."""
    found = version(packages_distributions()["vllm"][0]) if find_spec("vllm") else "none"
    if not found.startswith(VLLM):
        raise ValueError(f"vLLM {VLLM} is wanted, and {found} is installed")


def in_python(episodes: int) -> Row:
    from benchmarks.between import between, fastest  # a bare machine lacks Parquet

    return fastest(lambda: between(episodes))


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
    learns = {
        (shape, trains): partial(measure_learner, shape, trains, work=work, rate=rate, folder=models[shape])
        for shape, trains in product(given.sizes, given.trains)
    }
    if "vllm" in given.samplers:
        yield from sampled_parts(given, "vllm", short, models)
    for shape, chunk, block in product(given.sizes if given.outputs else [], CHUNKS, BLOCKS):
        name = f"{shape}: output in chunks of 2^{math.log2(chunk):.0f}, blocks of 2^{math.log2(block):.0f}"
        yield name, partial(measure_output, shape, chunk, block, SHAPES[shape][-1])
    for size in HEADS if given.outputs else []:
        yield f"packed attention against float64, heads of {size}", partial(compare_attention, None, size)
    for each in ((given.sizes[-1], "adapters"), (given.sizes[0], "all weights")):
        if each in learns:
            yield "{}: {}".format(*each), learns.pop(each)
    for shape in given.sizes if given.disk else []:
        saved = partial(measure_checkpoint, shape, "all weights", work=work, folder=models[shape])
        yield f"{shape}: all weights, checkpoint", saved
    if given.disk:
        yield "CPU seconds between rounds", partial(in_python, work.episodes)
    if "transformers" in given.samplers:
        yield from sampled_parts(given, "transformers", short, models)
    for each, learn in learns.items():
        yield "{}: {}".format(*each), learn


def sampled_parts(
    given: argparse.Namespace, engine: str, work: Work, models: dict[str, Path]
) -> Iterator[tuple[str, Callable[[], Row]]]:
    """The parts with a sampler. Those of one way to train share theirs, and the last of them closes it."""
    shape = given.sizes[0]
    for trains in given.trains:
        if trains in SAMPLED[engine]:  # of the others a sampler notices nothing
            own = Sampled(shape, engine, trains, work, models[shape])
            yield f"{shape}: {trains}, {engine}, again", own.compare
            yield f"{shape}: {trains}, {engine}, reloaded", own.reload
            yield f"{shape}: {trains}, {engine}, rested", own.rest


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
        parts, about = dict(parts_of(given, work, rate, models)), {"TFLOP/s of products": rate / 1e12}
        return tried(parts, given.out / "gpu.json", about, ends, given.limit)


def parsed(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Measures learner and samplers on a CUDA device, in random weights.")
    sizes = ["0.5B", "3B"] if default_device().type == "cuda" else ["tiny"]
    parser.add_argument("--sizes", nargs="+", choices=SHAPES, default=sizes)
    parser.add_argument("--trains", nargs="+", choices=TRAINS, default=[*TRAINS])
    parser.add_argument("--samplers", nargs="+", choices=SAMPLED, default=[*SAMPLED])
    parser.add_argument("--episodes", type=int, default=64)
    parser.add_argument("--tokens", type=int, nargs=2, default=[512, 512], metavar=("PROMPT", "ACTION"))
    parser.add_argument("--microbatch", type=int, default=0, metavar="TOKENS", help="in place of the size's own")
    parser.add_argument("--outputs", action=argparse.BooleanOptionalAction, default=True, help="the output layer alone")
    parser.add_argument(
        "--disk", action=argparse.BooleanOptionalAction, default=True, help="checkpoints, and Python alone"
    )
    parser.add_argument("--sampled", type=int, default=64, metavar="TOKENS", help="of an action that is sampled")
    parser.add_argument("--budget", type=float, default=2400.0, metavar="SECONDS", help="no part begins after it")
    parser.add_argument("--limit", type=float, default=300.0, metavar="SECONDS", help="of a part, which then has hung")
    parser.add_argument("--attended", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, default=Path(), help="the folder of gpu.json")
    return parser.parse_args(arguments)


def main() -> None:
    """Measures in a process that is started anew behind a part that ends it."""
    given = parsed()
    if given.attended:
        logging.basicConfig(level=logging.INFO)
        accept_grouped_heads()
        campaign(given)
        return
    command = [sys.executable, "-m", "benchmarks.gpu", *sys.argv[1:], "--attended"]
    print(show_rows(attended(command, given.out / "gpu.json", given.budget)))


if __name__ == "__main__":
    main()
