"""What a CUDA device makes of learner and samplers: `python -m benchmarks.gpu --out FOLDER`, in at most 8 minutes.

Models in the shapes of Qwen2.5 with random weights; nothing is downloaded, and no stage, store or server is needed. By
size, with all weights, the same without padding, with adapters, and with all weights, a sampler that sleeps and an
optimiser that is offloaded: what a sampler samples a second, how far it and the learner are apart before and after an
update (the canary), what an update learns a second and which share of the device's own rate of matrix products that is,
and what memory it took beside what was estimated. Writes gpu.json after every part, and prints a table at the end; a
part that does not fit, fails or comes too late is left out, and the table says why.
"""

from __future__ import annotations

import argparse
import gc
import json
import logging
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from importlib.util import find_spec
from itertools import product
from pathlib import Path
from typing import Any

import torch
from transformers import Qwen2Config

from agent_r1.devices.gpus import default_device
from agent_r1.evaluation.comparison import markdown_table
from agent_r1.learn import memory
from agent_r1.learn.learner import Learner, Options
from agent_r1.learn.model import compute_dtype
from agent_r1.learn.peak import measure, release
from agent_r1.params import SHIPPED, Params, load
from agent_r1.params.sections import override, validated
from agent_r1.records import Trajectory
from agent_r1.rollout.engines import open_engine
from agent_r1.rollout.sampling import Actor
from agent_r1.training.watch import prove_sampled
from benchmarks.synthetic import SHAPES, Work, credit_of, make_model, random_requests, seconds_of, trajectory_of

TRAINS: dict[str, dict[str, Any]] = {  # what of params.yaml is changed
    "all weights": {},
    "all weights, packed": {"model": {"packing": True}},
    "adapters": {"model": {"lora": {"rank": 64}}},
    "all weights, offloaded": {"learner": {"optimizer_offload": True}, "engine": {"vllm": {"sleep": True}}},
}
MATRIX = 8192  # rows and columns of the products by which the device's own rate is measured

Row = dict[str, Any]

logger = logging.getLogger(__name__)


def rate_of_products(device: torch.device, dtype: torch.dtype, size: int) -> float:
    """FLOP/s of matrix products in the dtype, the best of five runs."""
    left, right = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
    seconds = min(seconds_of(lambda: left @ right, device) for _ in range(5))
    return 2 * size**3 / seconds


def settings_of(shape: str, engine: str, trains: str, work: Work) -> Params:
    """params.yaml for one size and one of `TRAINS`."""
    changes = {
        "model": {"gradient_checkpointing": shape == "3B"},
        "engine": {"kind": engine, "transformers": {"batch_size": work.episodes}},
        "env": {"max_tokens": work.tokens, "max_action_tokens": work.action},
        "train": {"update": {"max_tokens_per_microbatch": SHAPES[shape][-1], "minibatches": 2, "epochs": 1}},
    }
    shipped = load(SHIPPED).model_dump(by_alias=True)
    return validated(Params, override(override(shipped, changes), TRAINS[trains]), "benchmarks.gpu")


def measure_one(shape: str, engine: str, trains: str, *, work: Work, rate: float, folder: Path) -> Row:
    """One size with one sampler: sampling, canary, update, canary of the updated weights, memory."""
    settings, device = settings_of(shape, engine, trains, work), default_device()
    offload = settings.learner.optimizer_offload
    demand = memory.Demand(
        model=Qwen2Config.from_pretrained(folder),
        tokens=max(SHAPES[shape][-1], work.tokens),
        dtype=compute_dtype(settings.model.dtype, device),
        adapter=settings.model.adapter,
        gradient_checkpointing=settings.model.gradient_checkpointing,
        optimizer_offload=offload and device.type == "cuda",
    )
    parts = memory.estimate(demand)
    memory.require_fit(parts, memory.available_gib(device))
    weights = memory.count_parameters(demand.model, None).policy
    options = Options(merges=False, offload=offload)
    learner = Learner(folder, settings.train.update, settings.model, with_critic=False, seed=0, options=options)
    actor = Actor(
        model=str(folder),
        end_id=learner.tokenizer.eos_token_id,
        max_tokens=work.tokens,
        temperature=1.0,
        dtype=settings.model.dtype,
        adapter_rank=settings.model.lora.rank,
    )
    with open_engine(settings.engine, actor) as sampler, tempfile.TemporaryDirectory() as scratch:
        before, after = Path(scratch) / "before", Path(scratch) / "after"
        learner.save_policy(before)
        sampler.load_weights(before, 0)
        requests = list(random_requests(work, SHAPES[shape][5], shortest=work.prompt // 4))
        sampler.sample(requests[:1])
        started = time.perf_counter()
        actions = sampler.sample(requests)
        sampled_s = time.perf_counter() - started
        sampler.rest()
        trajectories = [trajectory_of(*pair) for pair in zip(requests, actions, strict=True)]
        gap = _gap(learner, trajectories, settings)
        peak = measure(learner, settings.env)
        credits_ = [credit_of(each, sign=1 - 2 * (index % 2)) for index, each in enumerate(trajectories)]
        updated_s = seconds_of(lambda: learner.update(trajectories, credits_, 0), device)
        learner.save_policy(after)
        release(learner)
        sampler.load_weights(after, 1)
        again = [trajectory_of(*pair) for pair in zip(requests, sampler.sample(requests), strict=True)]
        gap_after = _gap(learner, again, settings)
    sampled = sum(len(each.token_ids) for each in actions)
    learned = sum(len(each.token_ids) for each in trajectories)
    products = 2 if demand.adapter else 3  # forward, what flows back, and gradients of the weights where they train
    flops = 2 * products * weights * learned
    return {
        "weights": weights,
        "sampled tokens/s": sampled / sampled_s,
        "canary": gap,
        "canary after an update": gap_after,
        "updated tokens/s": learned / updated_s,
        "share of the products' rate": flops / updated_s / rate,
        "memory GiB": peak,
        "estimated GiB": sum(parts.values()) - parts["libraries"],
    }


def _gap(learner: Learner, trajectories: Sequence[Trajectory], settings: Params) -> float:
    """The canary in nats; see `prove_sampled`, which raises where the sampler runs other weights."""
    chosen = trajectories[: settings.train.update.proved_trajectories]
    tolerance = settings.train.update.canary_tolerance
    return prove_sampled(chosen, learner.logprobs(chosen), learner.compute.dtype, tolerance)


def campaign(shapes: Sequence[str], samplers: Sequence[str], work: Work, budget_s: float, out: Path) -> list[Row]:
    """Every part that the budget has room for; gpu.json grows with each."""
    device, ends, rows = default_device(), time.monotonic() + budget_s, list[Row]()
    dtype = compute_dtype("auto", device)
    rate = rate_of_products(device, dtype, MATRIX if device.type == "cuda" else MATRIX // 32)
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
    about = {"device": name, "torch": torch.__version__, "dtype": str(dtype), "TFLOP/s of products": rate / 1e12}
    out.mkdir(parents=True, exist_ok=True)
    for shape in shapes:
        with tempfile.TemporaryDirectory() as folder:
            make_model(Path(folder), SHAPES[shape], work.tokens)
            for sampler, trains in product(samplers, TRAINS):
                part = partial(measure_one, shape, sampler, trains, work=work, rate=rate, folder=Path(folder))
                named = {"size": shape, "sampler": sampler, "trains": trains}
                rows.append(named | _tried(part, _left_out(sampler, ends)))
                (out / "gpu.json").write_text(json.dumps(about | {"parts": rows}, indent=2) + "\n")
    return rows


def _left_out(sampler: str, ends: float) -> str:
    """Why a part is not even tried; "" where it is."""
    if sampler == "vllm" and not find_spec("vllm"):
        return "vLLM is not installed"
    return "" if time.monotonic() < ends else "out of time"


def _tried(part: Callable[[], Row], left_out: str) -> Row:
    """What a part measured, or why there is nothing."""
    if left_out:
        return {"left out": left_out}
    try:
        return part()
    except (RuntimeError, ValueError, OSError, ImportError) as fault:  # the table names it, and other parts go on
        logger.warning("left out", exc_info=True)
        return {"left out": f"{type(fault).__name__}: {str(fault).splitlines()[0]}"}
    finally:
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


def table(rows: Sequence[Row]) -> str:
    """The parts in Markdown, numbers with three digits."""
    columns = list(dict.fromkeys(name for row in rows for name in row))
    return markdown_table(columns, [[_cell(row.get(name, "")) for name in columns] for row in rows])


def _cell(value: object) -> str:
    if not isinstance(value, (int, float)):
        return str(value)
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def main() -> None:
    parser = argparse.ArgumentParser(description="Measures learner and samplers on a CUDA device, in random weights.")
    parser.add_argument("--sizes", nargs="+", choices=SHAPES, default=["0.5B", "1.5B", "3B"])
    parser.add_argument("--samplers", nargs="+", choices=["transformers", "vllm"], default=["transformers", "vllm"])
    parser.add_argument("--episodes", type=int, default=64)
    parser.add_argument("--tokens", type=int, nargs=2, default=[512, 256], metavar=("PROMPT", "ACTION"))
    parser.add_argument("--budget", type=float, default=420.0, metavar="SECONDS", help="no part begins after it")
    parser.add_argument("--out", type=Path, default=Path(), help="the folder of gpu.json")
    given = parser.parse_args()
    work = Work(episodes=given.episodes, prompt=given.tokens[0], action=given.tokens[1])
    print(table(campaign(given.sizes, given.samplers, work, given.budget, given.out)))


if __name__ == "__main__":
    main()
