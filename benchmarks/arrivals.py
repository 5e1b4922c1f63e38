"""What waits for whom, with a real engine: `python -m benchmarks.arrivals [--store]`.

Episodes of vLLM whose world takes its time, in rounds and by arrival, beside the same episodes whose world answers at
once. The model has the shape of the built-in one and random weights.
"""

from __future__ import annotations

import asyncio
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median

import numpy as np

from agent_r1.envs.base import Attempt, Env, Transition
from agent_r1.envs.shared import Shared
from agent_r1.learn.model import load_tokenizer
from agent_r1.params import SHIPPED, load
from agent_r1.params.env import EnvParams
from agent_r1.records import Outcome
from agent_r1.rollout.chat import Chat
from agent_r1.rollout.engines import open_engine
from agent_r1.rollout.episodes import collect
from agent_r1.rollout.sampling import Actor, Engine
from benchmarks import synthetic, updates
from benchmarks.stored import Row, options, show

EPISODES, CALLS = 64, 5
OFTEN_S, SELDOM_S, SELDOM = 0.1, 5.0, 0.1
REPEATS = 3


class Slow(Env):
    """Takes any action for a call, and answers after a while."""

    system, user = "You act.", "Go on."

    def __init__(self, delays: Sequence[float]) -> None:
        self._delays = iter(delays)

    async def step(self, action: str) -> Transition:
        """Ends the episode after the last delay."""
        delay = next(self._delays, None)
        if delay is None:
            return Transition(outcome=Outcome.ENDED)
        await asyncio.sleep(delay)
        return Transition(observations=("Go on.",))


def play(engine: Engine, chat: Chat, delays: Sequence[Sequence[float]], limits: EnvParams) -> tuple[float, list[int]]:
    """The seconds that the episodes take together, and their tokens, one episode after the other."""
    attempts = [
        Attempt(question_id=f"q{number}", group=number, sample=0, env=lambda _, waits=waits: Slow(waits))
        for number, waits in enumerate(delays)
    ]
    with Shared(limits) as shared:
        started = time.perf_counter()
        trajectories = collect(engine, chat, attempts, shared, seed=0)
        took = time.perf_counter() - started
    return took, [token for each in trajectories for token in each.token_ids.tolist()]


def row(order: str, alone: float, took: float, longest: float) -> Row:
    """What the episodes take in an order, and how that compares with the longest wait and sampling alone."""
    share = took / (longest + alone)
    figures = {"the world answers at once": f"{alone:.1f} s", "it takes its time": f"{took:.1f} s"}
    return {"`env.order`": order, **figures, "of the longest wait and at once": f"{share:.2f}".lstrip("0")}


def main() -> None:
    parser = options("Measures episodes whose world takes its time, with vLLM.")
    store = parser.parse_args().store
    settings = load(SHIPPED)
    drawn = np.random.default_rng(0).random((EPISODES, CALLS))
    delays = np.where(drawn < SELDOM, SELDOM_S, OFTEN_S).tolist()
    longest, in_rounds = max(map(sum, delays)), sum(map(max, zip(*delays, strict=True)))
    seconds, tokens = dict[str, list[tuple[float, float]]](), list[list[int]]()
    with tempfile.TemporaryDirectory() as folder:
        synthetic.make_model(Path(folder), (*updates.SHAPE, updates.Size().words), settings.env.max_tokens)
        chat = Chat(load_tokenizer(folder))
        actor = Actor(
            model=folder,
            end_ids=chat.end_ids,
            max_tokens=settings.env.max_tokens,
            temperature=1.0,
            dtype=settings.model.dtype,
        )
        with open_engine(settings.engine, actor) as engine:
            for order in ("rounds", "arrival") * REPEATS:
                limits = settings.env.model_copy(update={"order": order})
                alone, quick = play(engine, chat, [[0.0] * CALLS] * EPISODES, limits)
                took, slow = play(engine, chat, delays, limits)
                tokens += [quick, slow]
                seconds.setdefault(order, []).append((alone, took))
                print(f"{order}: {alone:.2f} s where the world answers at once, {took:.2f} s", flush=True)
    print(f"{EPISODES} episodes of {CALLS} answers, of {OFTEN_S:g} s each, one in {1 / SELDOM:.0f} of {SELDOM_S:g} s")
    waits = {"their sum": sum(map(sum, delays)), "the longest episode": longest, "the slowest in each round": in_rounds}
    print(", ".join(f"{name} {seconds:.1f} s" for name, seconds in waits.items()))
    show(
        "arrivals",
        [row(order, *map(median, zip(*each, strict=True)), longest) for order, each in seconds.items()],
        store=store,
    )
    print("tokens:", "the same" if all(each == tokens[0] for each in tokens) else "OTHERS")


if __name__ == "__main__":
    main()
