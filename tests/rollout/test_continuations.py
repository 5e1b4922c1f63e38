"""Stored steps that go on another way: restored token for token, with all chance behind them drawn anew."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import pytest

from agent_r1.envs.base import Attempt, Prefix
from agent_r1.envs.game_env import GameEnv
from agent_r1.envs.shared import Shared
from agent_r1.games import lake
from agent_r1.params import SHIPPED, load
from agent_r1.params.env import EnvParams
from agent_r1.params.sections import override, validated
from agent_r1.records import Question, Trajectory
from agent_r1.rollout.chat import Chat
from agent_r1.rollout.episode import Play
from agent_r1.rollout.episodes import collect
from agent_r1.rollout.sampling import Action, Request
from benchmarks.truth import require_restored
from tests.cases import cases

ICE = lake.Board(rows=("SFFF", "FFFF", "FFFF", "FFFG"), intended=1 / 3).write()
SEED, ITERATION = 7, 2


@dataclass
class Walker:
    """Makes a move by the request's seed, or always the same; logprobs are the seed's too."""

    chat: Chat
    moves: Sequence[str]

    def sample(self, requests: Sequence[Request]) -> list[Action]:
        return [self._act(request) for request in requests]

    def _act(self, request: Request) -> Action:
        rng = np.random.default_rng(request.seed)
        ids = self.chat.encode_action(f"<answer>{rng.choice(self.moves)}</answer>", request.context)
        return Action.of(ids, (-rng.random(len(ids))).tolist(), self.chat.end_ids)


def limits(**changes: Any) -> EnvParams:
    games = {"protocol": "brief", "moves_per_step": 1, "moves": 4}
    return validated(
        EnvParams, override(load(SHIPPED).env.model_dump(), {"max_steps": 4, "games": games, **changes}), "env"
    )


def played(walker: Walker, env: EnvParams, prefixes: Sequence[Prefix | None]) -> list[Trajectory]:
    made = partial(GameEnv, "frozen_lake", ICE, env)
    attempts = [Attempt(question_id="q", group=0, sample=1, env=made, prefix=prefix) for prefix in prefixes]
    with Shared(env) as shared:
        return collect(walker, walker.chat, attempts, shared, seed=SEED, play=Play(iteration=ITERATION))


def alike(one: Trajectory, other: Trajectory, tokens: int) -> bool:
    """Whether two trajectories agree in so many tokens, by id, source and logprob."""
    pairs = [(one.token_ids, other.token_ids), (one.source, other.source), (one.logprobs, other.logprobs)]
    return all(np.array_equal(ours[:tokens], theirs[:tokens]) for ours, theirs in pairs)


@cases("context")
def test_a_prefix_is_restored_token_for_token(chat: Chat, context: dict[str, Any]) -> None:
    walker, env = Walker(chat, ("Left", "Right", "Up", "Down")), limits(context=context)
    [stored] = played(walker, env, [None])
    assert len(stored.steps) >= 4
    numbers = range(len(stored.steps))
    found = played(walker, env, [Prefix(trajectory=stored, step=step, draw=0) for step in numbers])
    for step, continued in zip(numbers, found, strict=True):
        start, stop = stored.steps[step].action_start, stored.steps[step].action_stop
        assert alike(continued, stored, start)
        assert not alike(continued, stored, stop), "it goes on by a draw of its own"
        assert continued.steps[:step] == stored.steps[:step]


def test_each_draw_is_its_own_and_the_same_again(chat: Chat) -> None:
    walker, env = Walker(chat, ("Left", "Right", "Up", "Down")), limits()
    [stored] = played(walker, env, [None])
    prefixes = [Prefix(trajectory=stored, step=1, draw=draw) for draw in range(4)]
    once, again = played(walker, env, prefixes), played(walker, env, prefixes[::-1])[::-1]
    assert all(alike(*pair, 10_000) for pair in zip(once, again, strict=True))
    assert len({each.token_ids.tobytes() + each.logprobs.tobytes() for each in once}) == 4


def test_the_next_slip_is_drawn_anew(chat: Chat) -> None:
    """Always to the right: what the ice does next is one of three things, and not what it did in the stored episode."""
    walker, env = Walker(chat, ("Right",)), limits()
    [stored] = played(walker, env, [None])
    found = played(walker, env, [Prefix(trajectory=stored, step=2, draw=draw) for draw in range(40)])
    seen = {tuple(each.ids(each.replies[2])) for each in found}
    assert len(seen) == 3, "from the left column: right, up and down"


def test_a_step_whose_context_is_another_one_now_is_refused(chat: Chat) -> None:
    walker, env = Walker(chat, ("Right",)), limits()
    [stored] = played(walker, env, [None])
    ids = stored.token_ids.copy()
    ids[stored.steps[1].action_start - 1] += 1
    changed = replace(stored, token_ids=ids)
    with pytest.raises(ValueError, match="the context of step 1 of trajectory '2/q/1' is another one now"):
        played(walker, env, [Prefix(trajectory=changed, step=2, draw=0)])
    with pytest.raises(ValueError, match="the context of step 0"):
        played(walker, limits(instructions="Be quick."), [Prefix(trajectory=stored, step=0, draw=0)])


def question(env: str) -> Question:
    return Question(question_id="q", dataset="d", split="train", text="Who?", env=env, strata={}, answers=["a"])


def test_what_restores_no_prefix_is_named() -> None:
    require_restored([question("qa"), question("frozen_lake"), question("bandit")], limits())
    for name in ("toolbox", "gymnasium", "openenv"):
        with pytest.raises(ValueError, match=rf"env '{name}' does not restore an episode .*; qa, bandit, "):
            require_restored([question("qa"), question(name)], limits())
    python = {"python": {"timeout_s": 1.0, "memory_mib": 64, "workers": 1}}
    with pytest.raises(ValueError, match=r"env 'qa' with env\.tools\.python or env\.tools\.mcp does not restore"):
        require_restored([question("qa")], limits(tools=python))
