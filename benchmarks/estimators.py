"""How long each advantage estimator takes on a large batch: `python -m benchmarks.estimators`.

Prints, with the advantage mask on and off, the best of several timings in seconds, and how many times faster that is
than GAE by a loop over tokens that is vectorised over trajectories alone.
"""

from __future__ import annotations

import argparse
import timeit
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np

from agent_r1.credit.batch import Batch
from agent_r1.credit.estimators import ESTIMATORS, estimate
from agent_r1.params import load
from agent_r1.params.credit import STEP_LEVEL
from agent_r1.records import Floats

PARAMS = Path(__file__).parents[1] / "params.yaml"


def main(trajectories: int, tokens: int, steps: int, repeats: int) -> None:
    """Times every estimator."""
    credit = load(PARAMS).train.credit
    print(f"{trajectories} trajectories of {tokens} tokens, {steps} steps each")
    print(f"{'estimator':<22} {'mask':<4} {'seconds':>8} {'ratio':>6}")
    for mask in (True, False):
        batch = make_batch(trajectories, tokens, steps, mask)
        loop_s = best(repeats, lambda: gae_by_loop(batch, credit.gamma, credit.lam))  # noqa: B023
        print(row("gae, loop over tokens", mask, loop_s, 1.0))
        for name in ESTIMATORS:
            if mask or name not in STEP_LEVEL:
                params = credit.model_copy(update={"estimator": name})
                suited = batch if params.needs_critic else replace(batch, values=None)
                seconds = best(repeats, lambda: estimate(suited, params))  # noqa: B023
                print(row(name, mask, seconds, loop_s / seconds))


def make_batch(trajectories: int, tokens: int, steps: int, mask: bool) -> Batch:
    """Every step is a third context, the first one's being the prompt, and two thirds action."""
    rng = np.random.default_rng(0)
    step, position = np.divmod(np.arange(tokens) * steps, tokens)
    acting = np.tile(position > tokens / 3, (trajectories, 1))
    index = np.where(acting, step, -1).astype(np.int32)
    last = acting & (np.roll(index, -1, axis=1) != index)
    chosen = acting if mask else np.logical_or.accumulate(acting, axis=1)
    return Batch(
        rewards=np.where(last, rng.normal(size=acting.shape), 0.0),
        values=rng.normal(size=acting.shape),
        steps=index,
        time_steps=chosen,
        whitening_mask=chosen,
        critic_mask=chosen,
        groups=np.arange(trajectories) // 8,
        states=np.tile(np.arange(steps), trajectories),
    )


def gae_by_loop(batch: Batch, gamma: float, lam: float) -> Floats:
    """[B, L] raw advantages, a Python iteration per token."""
    assert batch.values is not None
    advantages = np.zeros_like(batch.rewards)
    next_value, next_advantage = np.zeros((2, len(batch.rewards)))
    for t in reversed(range(batch.rewards.shape[1])):
        here = batch.time_steps[:, t]
        delta = batch.rewards[:, t] + gamma * next_value - batch.values[:, t]
        advantages[:, t] = np.where(here, delta + gamma * lam * next_advantage, 0.0)
        next_advantage = np.where(here, advantages[:, t], next_advantage)
        next_value = np.where(here, batch.values[:, t], next_value)
    return advantages


def best(repeats: int, work: Callable[[], object]) -> float:
    """Seconds of the fastest of several runs."""
    return min(timeit.repeat(work, number=1, repeat=repeats))


def row(name: str, mask: bool, seconds: float, ratio: float) -> str:
    return f"{name:<22} {'on' if mask else 'off':<4} {seconds:8.3f} {ratio:5.1f}x"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Times the advantage estimators.")
    parser.add_argument("--trajectories", type=int, default=1024)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--repeats", type=int, default=5)
    main(**vars(parser.parse_args()))
