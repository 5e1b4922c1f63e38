"""A four-bit base against vLLM in bfloat16: `python -m benchmarks.four_bit MODEL [--store]`, with bitsandbytes.

Adapters with weights of their own lie over a base, in full or in four bits, as in `benchmarks.numerics`. vLLM 0.32 has
no quantization named bitsandbytes. So it samples with the base that the warm start has rounded to four bits, and with
the adapters beside it or merged. Mismatches with the learner are in nats, over the actions of two episodes.
"""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

import numpy as np
import torch

from agent_r1.learn import losses
from agent_r1.learn.four_bit import round_off
from agent_r1.learn.learner import Learner
from agent_r1.rollout.engines import open_engine
from agent_r1.rollout.sampling import Actor
from benchmarks.numerics import adapted, observations, sampled
from benchmarks.stored import Row, options, show
from benchmarks.synthetic import shipped_with

TOKENS = 1024
RANK = 8


def learner_of(model: Path, base: str, *, merges: bool) -> Learner:
    settings = shipped_with({"model": {"dtype": "bfloat16", "base": base, "lora": {"rank": RANK}}})
    return adapted(model, settings, merges=merges)


def measure(model: Path, base: str, scratch: Path, *, merges: bool) -> Row:
    learner = learner_of(model, base, merges=merges)
    folder = scratch / "policy"
    learner.save_policy(folder, halved=True)
    actor = Actor(
        model=str(folder if merges else model),
        end_ids=[],
        max_tokens=TOKENS,
        temperature=1.0,
        dtype="bfloat16",
        adapter_rank=0 if merges else RANK,
        adapters="" if merges else str(folder),
    )
    with open_engine(shipped_with({}).engine, actor) as engine:
        episodes = sampled(engine, observations(learner), 2, TOKENS)
    shutil.rmtree(folder)
    masks = [episode.action_mask for episode in episodes]
    pairs = [[row[mask] for row, mask in zip(learner.logprobs(episodes), masks, strict=True)]]
    pairs.append([episode.logprobs[mask] for episode, mask in zip(episodes, masks, strict=True)])
    metrics = losses.mismatch_metrics(*(torch.from_numpy(np.concatenate(rows)) for rows in pairs))
    return {
        "model": model.name,
        "base": base,
        "sampler": "merged" if merges else "adapters beside",
        "mean [nats]": f"{metrics['policy/mismatch_mean']:.2g}",
        "largest": f"{metrics['policy/mismatch_max']:.2g}",
        "ess": f"{metrics['policy/mismatch_ess']:.4f}",
    }


def main() -> None:
    parser = options("Measures the mismatch of a four-bit base with vLLM.")
    parser.add_argument("model", type=Path, help="a Hugging Face folder")
    given = parser.parse_args()
    torch.set_num_threads(2)
    with tempfile.TemporaryDirectory() as scratch:
        rounded = Path(scratch) / given.model.name
        shutil.copytree(given.model, rounded)
        round_off(rounded)
        bases = {"full": given.model, "four_bit": rounded}
        cases = [(model, base, merges) for base, model in bases.items() for merges in (False, True)]
        rows = [measure(model, base, Path(scratch), merges=merges) for model, base, merges in cases]
    show("four_bit", rows, store=given.store, keys=3)


if __name__ == "__main__":
    main()
