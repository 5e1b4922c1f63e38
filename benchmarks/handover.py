"""How a policy of float32 weights gets to a sampler in bfloat16: `python -m benchmarks.handover [--store]`.

Models in the shape of Qwen2.5 with random weights, which change before each way. The ways take turns: a folder in
float32 that is on disk before the sampler reads it, as a checkpoint's is; the same without that wait; and a folder in
bfloat16. After each the canary compares sampler and learner. Seconds are medians.
"""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Callable
from functools import partial
from itertools import product
from pathlib import Path

import torch

from agent_r1.learn import checkpoint
from agent_r1.learn.learner import Learner, Options
from agent_r1.params import Params
from agent_r1.pretrained import default_device
from agent_r1.rollout.engines import open_engine
from agent_r1.rollout.sampling import Actor, Engine
from agent_r1.training.watch import prove_sampled
from benchmarks.stored import Row, options, show
from benchmarks.synthetic import Work, make_model, random_requests, seconds_of, shipped_with, trajectory_of

SHAPES = {"50M": (512, 8, 8, 2, 2048, 32000), "200M": (1024, 15, 16, 4, 2816, 32000)}  # as in synthetic.SHAPES
SAMPLERS = ["vllm", "transformers"]
WORK = Work(episodes=4, prompt=64, action=32)


def lasting(folder: Path, learner: Learner) -> None:
    with checkpoint.written(folder) as fresh:
        learner.save_policy(fresh)


WAYS: dict[str, Callable[[Path, Learner], None]] = {
    "float32, on disk": lasting,
    "float32": partial(checkpoint.hand_over, halved=False),
    "bfloat16": partial(checkpoint.hand_over, halved=True),
}


def canary(engine: Engine, learner: Learner, settings: Params) -> float:
    requests = list(random_requests(WORK, learner.policy.config.vocab_size))
    sampled = [trajectory_of(*pair) for pair in zip(requests, engine.sample(requests), strict=True)]
    tolerance = settings.train.update.canary_tolerance
    return prove_sampled(sampled, learner.logprobs(sampled), learner.compute.dtype, tolerance)


def measure(shape: str, kind: str, times: int) -> list[Row]:
    """Each way, with what it writes."""
    changes = {"model": {"dtype": "bfloat16"}, "engine": {"kind": kind}}
    settings = shipped_with(changes)
    with tempfile.TemporaryDirectory() as scratch:
        model, folder, device = Path(scratch) / "model", Path(scratch) / "policy", default_device()
        make_model(model, (*SHAPES[shape], 0), WORK.tokens)
        options = Options(merges=False)
        learner = Learner(model, settings.train.update, settings.model, with_critic=False, seed=0, options=options)
        end_ids = [learner.tokenizer.eos_token_id]
        actor = Actor(model=str(model), end_ids=end_ids, max_tokens=WORK.tokens, temperature=1.0, dtype="bfloat16")
        found: dict[str, list[tuple[float, float, float]]] = {name: [] for name in WAYS}
        written = dict[str, int]()
        with open_engine(settings.engine, actor) as engine:
            for version in range(1, times + 2):
                for name, write in WAYS.items():
                    for weight in learner.policy.parameters():
                        weight.data += weight.std().nan_to_num() / 10 * torch.randn_like(weight)
                    writing = seconds_of(partial(write, folder, learner), device)
                    reading = seconds_of(partial(engine.load_weights, folder, version), device)
                    found[name].append((writing, reading, canary(engine, learner, settings)))
                    written[name] = sum(each.stat().st_size for each in folder.rglob("*") if each.is_file())
    return [
        {
            "parameters": shape,
            "sampler": kind,
            "way": name,
            "size": f"{written[name] / 2**20:,.0f} MiB",
            "written": f"{statistics.median(each[0] for each in rows[1:]):.2f} s",
            "loaded": f"{statistics.median(each[1] for each in rows[1:]):.2f} s",
            "canary, nats": f"{max(each[2] for each in rows):.4f}",
        }
        for name, rows in found.items()
    ]


def main() -> None:
    parser = options("Times how weights get to a sampler in bfloat16.")
    parser.add_argument("--sizes", nargs="+", choices=SHAPES, default=[*SHAPES])
    parser.add_argument("--samplers", nargs="+", choices=SAMPLERS, default=SAMPLERS)
    parser.add_argument("--times", type=int, default=5, help="of each way, after a first one that is not counted")
    given = parser.parse_args()
    torch.set_num_threads(1)
    for shape, kind in product(given.sizes, given.samplers):
        show("handover", measure(shape, kind, given.times), store=given.store, keys=3)


if __name__ == "__main__":
    main()
