"""What an update saves where contexts begin alike: `python -m benchmarks.prefixes [--store]`.

A model of random weights learns from groups that share instructions and a question: padded, packed, and packed with
what they share computed once. All three take turns in one process, and the least CPU time of each counts.
"""

from __future__ import annotations

import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from agent_r1.learn.learner import Learner
from agent_r1.learn.model import PACKED
from agent_r1.records import Credit, Source, Step, StopReason, Trajectory
from benchmarks import synthetic
from benchmarks.stored import options, show

BUILT_IN = 128, 4, 2, 2, 256, 2048
SMOLLM2 = 576, 30, 9, 3, 1536, 49152
MICROBATCH = 4096  # tokens
KINDS = {"padded": False, "packed": True, "shared": True}  # and whether contexts are packed


@dataclass(frozen=True, kw_only=True, slots=True)
class Setting:
    """Groups of episodes; lengths are tokens."""

    name: str
    groups: int
    samples: int
    shape: tuple[int, ...] = BUILT_IN  # as in synthetic.SHAPES
    instructions: int = 70
    question: int = 25
    episode: int = 192  # on average, behind the question; the shortest has three fifths
    rounds: int = 5


SETTINGS = [
    Setting(name="built-in, alone", groups=32, samples=1),
    Setting(name="built-in, groups", groups=4, samples=8),
    Setting(
        name="135M, groups with two examples",
        groups=1,
        samples=8,
        shape=SMOLLM2,
        instructions=430,
        question=20,
        episode=350,
        rounds=1,
    ),
]


def episodes(setting: Setting) -> tuple[list[Trajectory], list[Credit]]:
    """Trajectories of one action each, with credits of both signs."""
    draws = np.random.default_rng(0)
    words = setting.shape[5]
    instructions = draws.integers(0, words, setting.instructions)
    trajectories = list[Trajectory]()
    for group in range(setting.groups):
        prompt = np.concatenate([instructions, draws.integers(0, words, setting.question)])
        for sample in range(setting.samples):
            action = draws.integers(0, words, int(setting.episode * draws.uniform(0.6, 1.4)))
            ids = np.concatenate([prompt, action]).astype(np.int32)
            acted = np.arange(len(ids)) >= len(prompt)
            span = {"action_start": len(prompt), "action_stop": len(ids)}
            trajectories.append(
                synthetic.unanswered(
                    len(trajectories),
                    group=group,
                    sample=sample,
                    token_ids=ids,
                    source=np.where(acted, Source.ACTION, Source.PROMPT).astype(np.uint8),
                    logprobs=np.where(acted, -np.log(words), 0).astype(np.float32),
                    steps=[Step(**span, stop_reason=StopReason.LENGTH, calls=[], rewards={})],
                )
            )
    credits_ = [synthetic.credit_of(row, sign=1 - 2 * (row.sample % 2)) for row in trajectories]
    return trajectories, credits_


def learner_of(folder: str, **model: bool) -> Learner:
    """A learner with changes of the section `model`."""
    update = {"max_tokens_per_microbatch": MICROBATCH, "minibatches": 1}
    settings = synthetic.shipped_with({"model": model, "train": {"update": update}})
    return Learner(folder, settings.train.update, settings.model, with_critic=False, seed=0)


def reading(kind: str, folder: str) -> Learner:
    """A learner that reads contexts in one of the `KINDS`."""
    learner = learner_of(folder, packing=KINDS[kind])
    if kind == "packed":
        learner.policy.set_attn_implementation(PACKED)
        learner.compute = learner.compute.of(learner.policy)
    return learner


def measured(setting: Setting) -> dict[str, str]:
    """A row: the CPU seconds of an update padded, and what packing and sharing make of them."""
    trajectories, credits_ = episodes(setting)
    tokens = max(len(row.token_ids) for row in trajectories)
    with tempfile.TemporaryDirectory() as folder:
        synthetic.make_model(Path(folder), setting.shape, tokens)
        learners = {kind: reading(kind, folder) for kind in KINDS}
    seconds = dict.fromkeys(KINDS, np.inf)
    for _ in range(setting.rounds):
        for kind, learner in learners.items():
            start = time.process_time()
            learner.update(trajectories, credits_, 0)
            seconds[kind] = min(seconds[kind], time.process_time() - start)
    return {
        "contexts": setting.name,
        "tokens": f"{sum(len(row.token_ids) for row in trajectories):,}",
        "shared prompt": f"{setting.instructions + setting.question}",
        "padded [CPU s]": f"{seconds['padded']:.2f}",
        "packed: times as fast": f"{seconds['padded'] / seconds['packed']:.2f}",
        "shared: times as fast": f"{seconds['padded'] / seconds['shared']:.2f}",
    }


def main() -> None:
    given = options("Measures updates of contexts that begin alike.").parse_args()
    torch.set_num_threads(2)
    show("prefixes", [measured(setting) for setting in SETTINGS], store=given.store)


if __name__ == "__main__":
    main()
