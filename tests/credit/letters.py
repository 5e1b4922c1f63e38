"""Trajectories written as letters, one per token: P prompt, A action, O observation, T template."""

import re
from collections.abc import Sequence
from typing import Any
from zlib import crc32

import numpy as np
from hypothesis import strategies as st

from agent_r1.credit.batch import Batch, after_prompt, select_tokens
from agent_r1.params.credit import CreditParams, RewardWeights
from agent_r1.records import Outcome, Source, Trajectory
from tests.trajectories import from_parts

LETTERS = {"P": Source.PROMPT, "A": Source.ACTION, "O": Source.OBSERVATION, "T": Source.TEMPLATE}

# Rows of `batch`. Eighths add and multiply exactly, so equality can be exact where nothing is divided.
EIGHTHS = st.integers(-16, 16).map(lambda n: n / 8)
ROW = st.tuples(
    st.sampled_from(["PA", "PAAOTA", "PPAOA|AAO", "AA|A|A", "PO"]),
    st.lists(EIGHTHS, min_size=3, max_size=3),
    st.lists(EIGHTHS, min_size=9, max_size=9),
)


def trajectory(
    letters: str,
    steps: Sequence[dict[str, Any]] = (),
    *,
    outcome: Outcome = Outcome.TURN_LIMIT,
    group: int = 0,
    name: str = "0/q/0",
) -> Trajectory:
    """Every run of As is a step; `steps` gives the fields that differ from a step without a call."""
    stretches = [(LETTERS[match[0][0]], range(*match.span())) for match in re.finditer(r"(.)\1*", letters)]
    return from_parts(stretches, steps, outcome=outcome, group=group, trajectory_id=name, answer="")


def params(estimator: str = "gae", **changes: Any) -> CreditParams:
    """Only `progress` is weighted, so that a test sets step rewards directly; all masks are on, all discounts 1."""
    switches = {name: changes.pop(name, True) for name in ("recursion", "whitening", "critic")}
    weights = {**dict.fromkeys(RewardWeights.model_fields, 0.0), **changes.pop("weights", {"progress": 1.0})}
    sections = {
        "gigpo": {"weight": 1.0, "std": False, "state": "env", "history": 0},
        "filter": {"kind": "none", "share": 1.0, "refill": 0},
        "left_out": {"truncated": False, "void_step": False},
    }
    content = {
        **dict.fromkeys(("gamma", "lam", "step_gamma", "step_lam"), 1.0),
        **dict.fromkeys(("kl_reward", "whitening_floor"), 0.0),
        **{name: plain | changes.pop(name, {}) for name, plain in sections.items()},
        "target_lam": None,
        "loss_mask": True,
        "overlong_buffer": 0,
    }
    return CreditParams.model_validate(
        {"estimator": estimator, "advantage_mask": switches, "rewards": weights, **content, **changes}
    )


def _tokens(letters: str) -> tuple[np.ndarray, np.ndarray]:
    """[L] sources and [L] step indices; every run of As is a step, and a bar parts two steps with nothing between."""
    sources, steps, step, before = [], [], -1, ""
    for letter in letters:
        step += letter == "A" != before
        if letter != "|":
            sources.append(LETTERS[letter])
            steps.append(step if letter == "A" else -1)
        before = letter
    return np.array(sources, dtype=np.uint8), np.array(steps, dtype=np.int32)


def batch(
    rows: Sequence[tuple[Any, ...]],
    *,
    groups: Sequence[int] = (),
    with_values: bool = False,
    recursion: bool = True,
    whitening: bool = True,
    critic: bool = True,
    length: int = 0,
    states: Sequence[int] = (),
) -> Batch:
    """Rows of (letters, rewards of the steps, values of the tokens), what is left out being 0.

    States are equal where the letters before are, unless they are given.

    There may be more rewards than steps and more values than tokens, so that they can be drawn before the letters.
    """
    tokens = [_tokens(letters) for letters, *_ in rows]
    shape = (len(rows), max(length, *(len(source) for source, _ in tokens)))
    rewards, values, steps = np.zeros(shape), np.zeros(shape), np.full(shape, -1, dtype=np.int32)
    before = [source[: np.argmax(index == k)] for source, index in tokens for k in range(index.max() + 1)]
    acting, after = np.zeros((2, *shape), dtype=np.bool_)
    for i, ((source, index), (_, step_rewards, *given)) in enumerate(zip(tokens, rows, strict=True)):
        tokens_of_row = slice(len(source))
        steps[i, tokens_of_row] = index
        acting[i, tokens_of_row], after[i, tokens_of_row] = select_tokens(source, True), after_prompt(source)
        for k, reward in zip(range(index.max() + 1), step_rewards, strict=False):
            rewards[i, np.flatnonzero(index == k)[-1]] = reward
        for of_row in given:
            values[i, tokens_of_row] = of_row[: len(source)]
    return Batch(
        rewards=rewards,
        values=values if with_values else None,
        steps=steps,
        time_steps=acting if recursion else after,
        whitening_mask=acting if whitening else after,
        critic_mask=acting if critic else after,
        groups=np.array(groups or [0] * len(rows), dtype=np.int64),
        states=np.array(states or [crc32(each.tobytes()) for each in before], dtype=np.int64),
    )


def progress(*rewards: float) -> list[dict[str, Any]]:
    """Steps with these rewards, under `params`."""
    return [{"rewards": {"progress": reward}} for reward in rewards]
