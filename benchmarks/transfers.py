"""Faults of a weight transfer, planted one by one: `python -m benchmarks.transfers [--store]`.

Random weights all change by a hundredth before each transfer. The engine is vLLM in a process of its own, and each
fault is followed by a transfer without one. A fault is noticed where the transfer, or the proof behind it, raises.
Times are medians of a proof: by sums, and by the canary, which reads 16 contexts of 192 tokens. With `--times 0` they
are all that is measured.
"""

from __future__ import annotations

import random
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Literal, get_args
from unittest.mock import patch

import torch
from safetensors.torch import load_file, save_file

from agent_r1.learn.adapter import WEIGHTS, trained_state
from agent_r1.learn.learner import Learner, Options
from agent_r1.params.places import adapter_in
from agent_r1.records import Trajectory
from agent_r1.rollout import vllm_engine
from agent_r1.rollout.sampling import Actor, Engine, EngineError
from agent_r1.training.watch import StaleWeightsError, prove_held, prove_sampled
from benchmarks.handover import SHAPES
from benchmarks.stored import Row, options, show
from benchmarks.synthetic import SHAPES as FULL
from benchmarks.synthetic import Work, make_model, random_requests, shipped_with, trajectory_of

Dtype = Literal["float32", "bfloat16", "float16"]
Plant = Callable[[Path, Path, random.Random], None]  # harms the folder of new weights; it knows the one of the last

MARK = "stale_head"  # a file in the folder of weights, for `benchmarks.stale_head`
SIZES = {"tiny": FULL["tiny"][:6], **SHAPES}
WORK = Work(episodes=16, prompt=160, action=32)
SKIPPED = "the update is skipped"


def weights_in(folder: Path) -> Path:
    """The file of the weights, or of the adapters, of a policy."""
    adapters = adapter_in(folder) / WEIGHTS
    return adapters if adapters.exists() else folder / "model.safetensors"


def leave_one(folder: Path, last: Path, draws: random.Random) -> None:
    """One tensor is of the last version."""
    path = weights_in(folder)
    tensors = load_file(path)
    name = draws.choice(sorted(tensors))
    save_file(tensors | {name: load_file(weights_in(last))[name]}, path, metadata={"format": "pt"})


def cut_short(folder: Path, _: Path, draws: random.Random) -> None:
    path = weights_in(folder)
    content = path.read_bytes()
    path.write_bytes(content[: draws.randrange(len(content))])


def leave_head(folder: Path, _: Path, __: random.Random) -> None:
    (folder / MARK).touch()


def leave_all(_: Path, __: Path, ___: random.Random) -> None:
    """The folder is whole, and nobody reads it."""


OF_ALL: Mapping[str, Plant] = {
    SKIPPED: leave_all,
    "one tensor is stale": leave_one,
    "the tied output layer is stale": leave_head,
    "the file is cut short": cut_short,
}
OF_ADAPTERS: Mapping[str, Plant] = {
    "adapters: the update is skipped": leave_all,
    "adapters: one matrix is stale": leave_one,
    "adapters: the file is cut short": cut_short,
}


@dataclass(slots=True)
class Verdicts:
    """How often something was noticed, and the seconds of the proofs."""

    by_sums: int = 0  # or by the transfer itself
    by_canary: int = 0
    sums_s: list[float] = field(default_factory=list)
    canary_s: list[float] = field(default_factory=list)


class Transfers:
    """A learner whose weights change, and an engine that is to follow."""

    def __init__(self, engine: Engine, learner: Learner, scratch: Path) -> None:
        self._engine, self._learner, self._scratch = engine, learner, scratch
        self._tolerance = learner.params.canary_tolerance

    def move(self) -> Path:
        """Changes every weight that trains; gives the folder of the new ones."""
        learner = self._learner
        learner.policy_version += 1
        for weight in trained_state(learner.policy).values():
            weight += weight.abs().mean().clamp(min=1e-3) / 100 * torch.randn_like(weight)
        folder = self._scratch / str(learner.policy_version)
        learner.save_policy(folder, halved=self._engine.halved and not learner.adapter)
        return folder

    def take(self, folder: Path, verdicts: Verdicts, *, loads: bool = True) -> None:
        """Hands the weights over unless it is skipped, and has both proofs judge."""
        try:
            if loads:
                self._engine.load_weights(folder, self._learner.policy_version)
        except EngineError:
            verdicts.by_sums += 1
            return
        verdicts.by_sums += _noticed(self._prove_held, verdicts.sums_s)
        requests = list(random_requests(WORK, self._learner.policy.config.vocab_size))
        sampled = [trajectory_of(*pair) for pair in zip(requests, self._engine.sample(requests), strict=True)]
        verdicts.by_canary += _noticed(partial(self._prove_sampled, sampled), verdicts.canary_s)

    def _prove_held(self) -> None:
        for held in self._engine.held():
            unproved = prove_held(held, self._learner.weight_sums(held.dtype))
            if unproved:
                raise ValueError(f"nothing proves {', '.join(sorted(unproved))}")

    def _prove_sampled(self, sampled: Sequence[Trajectory]) -> None:
        prove_sampled(sampled, self._learner.logprobs(sampled), self._learner.compute.dtype, self._tolerance)


def _noticed(prove: Callable[[], None], seconds: list[float]) -> bool:
    started = time.perf_counter()
    try:
        prove()
    except StaleWeightsError:
        return True
    finally:
        seconds.append(time.perf_counter() - started)
    return False


@contextmanager
def opened(dtype: Dtype, *, adapters: bool, shape: str = "tiny") -> Iterator[Transfers]:
    """A learner and an engine with the same weights."""
    lora = {"rank": 4, "alpha": 12} if adapters else {"rank": 0}
    settings = shipped_with({"model": {"dtype": dtype, "lora": lora}})
    plain = vllm_engine.command

    def planted(*given: object) -> list[str]:
        line = plain(*given)  # type: ignore[arg-type]
        return ["benchmarks.stale_head" if word == "agent_r1.rollout.vllm_process" else word for word in line]

    with tempfile.TemporaryDirectory() as scratch, patch.object(vllm_engine, "command", planted):
        model = Path(scratch) / "model"
        make_model(model, (*SIZES[shape], 0), WORK.tokens)
        own = Options(merges=False)
        learner = Learner(model, settings.train.update, settings.model, with_critic=False, seed=0, options=own)
        rank = settings.model.lora.rank
        actor = Actor(
            model=str(model),
            end_ids=[learner.tokenizer.eos_token_id],
            max_tokens=WORK.tokens,
            temperature=1.0,
            dtype=dtype,
            adapter_rank=rank,
        )
        with vllm_engine.VllmEngine(settings.engine.vllm, actor) as engine:
            yield Transfers(engine, learner, Path(scratch))


def measure(dtype: Dtype, times: int, *, adapters: bool, shape: str = "tiny") -> Iterator[tuple[str, Verdicts]]:
    """The verdicts on each fault, and last those on transfers without any."""
    draws, sound = random.Random(0), Verdicts()
    faults = OF_ADAPTERS if adapters else OF_ALL
    with opened(dtype, adapters=adapters, shape=shape) as transfers:
        last = transfers.move()
        transfers.take(last, sound)
        for name, plant in faults.items() if times else ():
            verdicts = Verdicts()
            for _ in range(times):
                folder = transfers.move()
                plant(folder, last, draws)
                transfers.take(folder, verdicts, loads=plant is not leave_all)
                last = transfers.move()
                transfers.take(last, sound)
            yield name, verdicts
    yield "adapters: none" if adapters else "none", sound


def main() -> None:
    parser = options("Plants faults in weight transfers and counts those that are noticed.")
    parser.add_argument("--times", type=int, default=100, help="that each fault is planted")
    parser.add_argument("--shape", choices=SIZES, default="tiny")
    parser.add_argument("--dtypes", nargs="+", choices=get_args(Dtype), default=["float32", "bfloat16"])
    given = parser.parse_args()
    torch.set_num_threads(1)
    rows = list[Row]()
    for dtype in given.dtypes:
        kinds = (measure(dtype, given.times, adapters=adapters, shape=given.shape) for adapters in (False, True))
        for name, verdicts in chain.from_iterable(kinds):
            rows.append(
                {
                    "fault": name,
                    "sampler": dtype,
                    "parameters": given.shape,
                    "planted": f"{given.times if name in OF_ALL | OF_ADAPTERS else 0}",
                    "noticed": f"{verdicts.by_sums}",
                    "by the canary": f"{verdicts.by_canary}",
                    "sums": _median_ms(verdicts.sums_s),
                    "canary": _median_ms(verdicts.canary_s),
                }
            )
    show("transfers", rows, store=given.store, keys=3)


def _median_ms(seconds: list[float]) -> str:
    return f"{1000 * statistics.median(seconds):.1f} ms" if seconds else ""


if __name__ == "__main__":
    main()
