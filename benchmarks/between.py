"""What an iteration computes in Python alone, by its trajectories: `python -m benchmarks.between [--store]`.

CPU seconds of one thread, of episodes that take eight actions and grow to nearly 4,096 tokens. Rounds: observations
become tokens and actions text. Requests: JSON to vLLM and back, at both ends. Orders: one call with trajectories and
their credit, as rank 0 packs it and another opens it. Rows: Parquet, written and read.
"""

from __future__ import annotations

import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import torch

from agent_r1.devices.sharing import opened, packed
from agent_r1.envs.base import Attempt, Env, Transition
from agent_r1.envs.shared import Shared
from agent_r1.learn import builtin
from agent_r1.params import SHIPPED, load
from agent_r1.records import Call, Credit, Outcome, Step, Trajectory
from agent_r1.rollout import engine_wire as wire
from agent_r1.rollout.chat import Chat
from agent_r1.rollout.episodes import collect
from agent_r1.rollout.sampling import Action, Actor, Request
from agent_r1.rollout.server_engine import draw
from benchmarks.stored import options, show
from benchmarks.synthetic import credit_of

STEPS, ACTION, OBSERVATION = 8, 256, "a question and an answer " * 40
COUNTS = 64, 256, 1024
REPEATS = 2  # of which the faster counts


class Talk(Env):
    """Says the same to every action but the last."""

    system, user = "You act.", "Go on."

    def __init__(self) -> None:
        self._left = STEPS

    async def step(self, action: str) -> Transition:
        """Ends the episode after the last action."""
        self._left -= 1
        return Transition(observations=(OBSERVATION,)) if self._left else Transition(outcome=Outcome.ENDED)


class Sent:
    """A sampler of random letters, whose requests and answers go through JSON as those of vLLM do."""

    def __init__(self, end_ids: Sequence[int], letters: Sequence[int], spent: dict[str, float]) -> None:
        self._actor = Actor(model="", end_ids=end_ids, max_tokens=0, temperature=1.0, dtype="auto")
        self._letters, self._spent, self._draws = letters, spent, np.random.default_rng(0)

    def sample(self, requests: Sequence[Request]) -> list[Action]:
        """An action of the most tokens for each request."""
        ids = [self._draws.choice(self._letters, each.max_tokens).tolist() for each in requests]
        with counted(self._spent, "requests"):
            asked = [draw(each, self._actor) for each in requests]
            wire.Draws.model_validate_json(wire.Draws(requests=asked).model_dump_json())
            said = [wire.Sampled(ids=each, logprobs=[-1.0] * len(each)) for each in ids]
            answered = wire.Answered(actions=said).model_dump_json()
            read = wire.Answered.model_validate_json(answered).actions
            return [Action.of(each.ids, each.logprobs, self._actor.end_ids) for each in read]


@contextmanager
def counted(spent: dict[str, float], name: str) -> Iterator[None]:
    """Adds the CPU seconds of the block to what was spent under a name."""
    began = time.process_time()
    yield
    spent[name] += time.process_time() - began


def between(episodes: int) -> dict[str, float]:
    """CPU seconds by purpose."""
    tokenizer, spent = builtin.train_tokenizer(["a question and an answer"], 400), defaultdict[str, float](float)
    chat, kept = Chat(tokenizer), {"order": "rounds", "max_tokens": 4352, "max_action_tokens": ACTION}
    letters = tokenizer.encode("abcdefgh", add_special_tokens=False)
    attempts = [Attempt(question_id=str(at), group=at, sample=0, env=lambda _: Talk()) for at in range(episodes)]
    with Shared(load(SHIPPED).env.model_copy(update=kept)) as shared, counted(spent, "rounds"):
        trajectories = collect(Sent(chat.end_ids, letters, spent), chat, attempts, shared, seed=0)
    spent["rounds"] -= spent["requests"]
    credits_ = [credit_of(each, sign=1) for each in trajectories]
    with counted(spent, "orders"):
        opened(packed([trajectories, credits_]), (Trajectory, Step, Call, Credit))
    with tempfile.TemporaryDirectory() as folder, counted(spent, "rows"):
        through_parquet(Path(folder), trajectories, credits_)
    return {**spent}


def through_parquet(folder: Path, trajectories: Sequence[Trajectory], credits_: Sequence[Credit]) -> None:
    from agent_r1.tables import read_rows, write_rows  # a bare machine has no Parquet

    write_rows(folder / "trajectories.parquet", trajectories, Trajectory)
    write_rows(folder / "credit.parquet", credits_, Credit)
    read_rows(folder / "trajectories.parquet", Trajectory)
    read_rows(folder / "credit.parquet", Credit)


def fastest(work: Callable[[], dict[str, float]]) -> dict[str, float]:
    turns = [work() for _ in range(REPEATS)]
    return {name: min(turn[name] for turn in turns) for name in turns[0]}


def main() -> None:
    parser = options("Measures what Python alone computes in an iteration.")
    parser.add_argument("--counts", type=int, nargs="+", default=COUNTS, help="trajectories")
    given = parser.parse_args()
    torch.set_num_threads(1)
    rows = []
    for count in given.counts:
        seconds = fastest(lambda count=count: between(count))  # type: ignore[misc]
        rows.append({"trajectories": f"{count:,}"} | {name: f"{each:.2f} s" for name, each in seconds.items()})
    show("between", rows, store=given.store)


if __name__ == "__main__":
    main()
