"""Numerics over long episodes: `python -m benchmarks.numerics MODEL --dtype bfloat16 --tokens 8192 [--store]`.

Adapters with weights of their own lie over a model. vLLM samples the actions of episodes whose observations are text of
these documents, and the learner computes the policy's gradient by every rule for the mismatch; both in the same
precision. It is held against the gradient in float32, of the same episodes, without a mismatch. The rule `alone` is of
text in place of actions, with the learner as its own sampler: what the learner's precision does by itself, and all that
is measured of float16, whose products on a CPU without AVX512-FP16 take 200 times those of float32. They are computed
in float32 there, and rounded.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from agent_r1.inspection.replay import cosine
from agent_r1.learn import losses, optimizers
from agent_r1.learn.adapter import trained_state
from agent_r1.learn.gradients import add_policy_gradient
from agent_r1.learn.learner import Learner, Options
from agent_r1.params import Params
from agent_r1.records import Credit, Source, Step, StopReason, Trajectory
from agent_r1.rollout.engines import open_engine
from agent_r1.rollout.sampling import Actor, Request, Sampler
from benchmarks.stored import ROOT, Row, options, show
from benchmarks.synthetic import credit_of, shipped_with, unanswered

ACTION = 128  # tokens
OBSERVATION = 384
SCALE = 0.02  # of the adapters' second matrices, which begin at 0
RULES: dict[str, dict[str, Any]] = {
    "none": {},
    "cap 2": {"importance_cap": 2.0},
    "mask_token .5 to 5": {"importance_rule": "mask_token", "importance_floor": 0.5, "importance_cap": 5.0},
    "mask_sequence to 3": {"importance_rule": "mask_sequence", "importance_cap": 3.0},
    "mask_mean .999 to 1.001": {"importance_rule": "mask_mean", "importance_floor": 0.999, "importance_cap": 1.001},
}
ALONE = "alone"
ATTENTION = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
PRODUCTS = (
    ATTENTION,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward,
    torch.ops.aten.mm,
    torch.ops.aten.addmm,
    torch.ops.aten.bmm,
)


class InFloat32(TorchDispatchMode):
    """Computes products of float16 in float32, and rounds them."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        options_ = kwargs or {}
        if func.overloadpacket not in PRODUCTS or args[0].dtype is not torch.float16:
            return func(*args, **options_)
        wide = [arg.float() if isinstance(arg, Tensor) and arg.dtype is torch.float16 else arg for arg in args]
        result = func(*wide, **options_)
        if func.overloadpacket is ATTENTION:  # beside the logarithms of its sums
            return result[0].half(), result[1]
        return result.half() if isinstance(result, Tensor) else tuple(part.half() for part in result)


def settings_of(dtype: str, tokens: int, rule: dict[str, Any]) -> Params:
    changes: dict[str, Any] = {
        "model": {"dtype": dtype, "lora": {"rank": 8}, "gradient_checkpointing": True},
        "train": {"update": {"max_tokens_per_microbatch": tokens, **rule}},
        "engine": {"vllm": {"cpu_cache_gib": 2.0}},
    }
    return shipped_with(changes)


def adapted(model: Path, settings: Params, *, merges: bool = False) -> Learner:
    """A learner with adapters that change what the model says; every call gives the same."""
    options_ = Options(merges=merges)
    learner = Learner(model, settings.train.update, settings.model, with_critic=False, seed=0, options=options_)
    draws = torch.Generator().manual_seed(0)
    for name, weight in trained_state(learner.policy).items():
        if ".lora_B." in name:
            weight.copy_(SCALE * torch.randn(weight.shape, generator=draws))
    return learner


def observations(learner: Learner) -> list[int]:
    """The tokens of the project's own pages."""
    pages = sorted((ROOT / "docs").glob("*.md"))
    text = "\n".join(page.read_text() for page in pages)
    return list(learner.tokenizer(text, add_special_tokens=False).input_ids)


def sampled(sampler: Sampler, words: Sequence[int], episodes: int, tokens: int) -> list[Trajectory]:
    """Episodes of so many tokens, of actions and observations in turn."""
    turns = tokens // (ACTION + OBSERVATION)
    pieces = iter(np.array_split(words[: episodes * turns * OBSERVATION], episodes * turns))
    ids: list[list[int]] = [[] for _ in range(episodes)]
    logprobs: list[list[float]] = [[] for _ in range(episodes)]
    for turn in range(turns):
        for index in range(episodes):
            ids[index] += next(pieces).tolist()
            logprobs[index] += [0.0] * OBSERVATION
        requests = [
            Request(episode=index, step=turn, context=context, seed=turn * episodes + index, max_tokens=ACTION)
            for index, context in enumerate(ids)
        ]
        for index, action in enumerate(sampler.sample(requests)):
            ids[index] += action.token_ids
            logprobs[index] += action.logprobs.tolist()
    return [_trajectory(index, *pair) for index, pair in enumerate(zip(ids, logprobs, strict=True))]


def _trajectory(index: int, ids: list[int], logprobs: list[float]) -> Trajectory:
    acted = np.arange(len(ids)) % (ACTION + OBSERVATION) >= OBSERVATION
    starts = range(OBSERVATION, len(ids), ACTION + OBSERVATION)
    steps = [
        Step(action_start=start, action_stop=start + ACTION, stop_reason=StopReason.LENGTH, calls=[], rewards={})
        for start in starts
    ]
    return unanswered(
        index,
        token_ids=np.array(ids, np.int32),
        source=np.where(acted, Source.ACTION, Source.OBSERVATION).astype(np.uint8),
        logprobs=np.array(logprobs, np.float32),
        steps=steps,
    )


def gradient(
    learner: Learner, trajectories: list[Trajectory], credits_: list[Credit]
) -> tuple[Tensor, losses.LossTokens]:
    """The gradient of a step over all trajectories as one vector, and the step's tokens."""
    rows = learner.credited(trajectories, credits_)
    divisor = losses.normaliser([row.loss_tokens for row in rows], learner.params)

    add = partial(add_policy_gradient, learner.policy, rows, divisor, learner.params, learn=True)
    tokens = optimizers.accumulate(add, learner.policy_optimizer, divisor, learner.compute)
    parameters = [weight for weight in learner.policy.parameters() if weight.grad is not None]
    vector = torch.cat([weight.grad.flatten() for weight in parameters if weight.grad is not None])
    learner.policy_optimizer.zero_grad(set_to_none=True)
    return vector, tokens


def own(learner: Learner, trajectories: list[Trajectory]) -> list[Trajectory]:
    """The trajectories as the learner itself would have sampled them."""
    moved = []
    for trajectory, logprobs in zip(trajectories, learner.logprobs(trajectories), strict=True):
        fields = {name: getattr(trajectory, name) for name in Trajectory.__slots__}
        moved.append(Trajectory(**{**fields, "logprobs": np.where(trajectory.action_mask, logprobs, 0)}))
    return moved


def alone(model: Path, dtype: str, tokens: int, episodes: int) -> list[Row]:
    learner = adapted(model, settings_of(dtype, tokens, {}))
    texts = np.array_split(observations(learner)[: episodes * tokens], episodes)
    trajectories = [_trajectory(index, text.tolist(), [0.0] * tokens) for index, text in enumerate(texts)]
    credits_ = [credit_of(trajectory, sign=1 - 2 * (index % 2)) for index, trajectory in enumerate(trajectories)]
    exact = adapted(model, settings_of("float32", tokens, {}))
    expected, _ = gradient(exact, own(exact, trajectories), credits_)
    with InFloat32():
        vector, _ = gradient(learner, own(learner, trajectories), credits_)
    cells = dict.fromkeys(("mismatch [nats]", "its largest", "ess", "masked"), "-")
    row = {"model": model.name, "tokens": f"{tokens:,}", "precision": dtype, "rule": ALONE, "episodes": f"{episodes}"}
    return [{**row, **cells, "cosine with float32": f"{cosine(vector, expected):.4f}"}]


def measured(model: Path, dtype: str, tokens: int, episodes: int, rules: Sequence[str]) -> list[Row]:
    settings = settings_of(dtype, tokens, {})
    learner = adapted(model, settings)
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) / "policy"
        learner.save_policy(folder)
        actor = Actor(
            model=str(model),
            end_ids=[],
            max_tokens=tokens,
            temperature=1.0,
            dtype=settings.model.dtype,
            adapter_rank=settings.model.lora.rank,
            adapters=str(folder),
        )
        with open_engine(settings.engine, actor) as engine:
            trajectories = sampled(engine, observations(learner), episodes, tokens)
    credits_ = [credit_of(trajectory, sign=1 - 2 * (index % 2)) for index, trajectory in enumerate(trajectories)]
    exact = adapted(model, settings_of("float32", tokens, {}))
    expected, _ = gradient(exact, own(exact, trajectories), credits_)
    rows = list[Row]()
    for rule in rules:
        learner.params = settings_of(dtype, tokens, RULES[rule]).train.update
        vector, step = gradient(learner, trajectories, credits_)
        mismatch = losses.mismatch_metrics(step.logprobs, step.sampler_logprobs)
        metrics = losses.policy_metrics(step, learner.params, 1, len(step.logprobs))
        rows.append(
            {
                "model": model.name,
                "tokens": f"{tokens:,}",
                "precision": dtype,
                "rule": rule,
                "episodes": f"{episodes}",
                "mismatch [nats]": f"{mismatch['policy/mismatch_mean']:.2g}",
                "its largest": f"{mismatch['policy/mismatch_max']:.2g}",
                "ess": f"{mismatch['policy/mismatch_ess']:.4f}",
                "masked": f"{100 * metrics.get('policy/importance_masked', 0.0):.1f} %",
                "cosine with float32": f"{cosine(vector, expected):.4f}" if vector.any() else "-",
            }
        )
        print(rows[-1], flush=True)
    return rows


def main() -> None:
    parser = options("Measures the gradient of long episodes by precision and rule.")
    parser.add_argument("model", type=Path, help="a Hugging Face folder")
    parser.add_argument("--dtype", choices=["float32", "bfloat16", "float16"], required=True)
    parser.add_argument("--tokens", type=int, default=4096, help="of an episode")
    parser.add_argument("--episodes", type=int, default=2)
    parser.add_argument("--rules", nargs="+", choices=[*RULES, ALONE], default=[*RULES])
    given = parser.parse_args()
    torch.set_num_threads(2)
    if given.rules == [ALONE]:
        rows = alone(given.model, given.dtype, given.tokens, given.episodes)
    else:
        rows = measured(given.model, given.dtype, given.tokens, given.episodes, given.rules)
    show("numerics", rows, store=given.store, keys=4)


if __name__ == "__main__":
    main()
