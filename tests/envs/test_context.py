"""Contexts that are rewritten, by hand: which answers begin a new one, and what it opens with."""

import asyncio
from collections.abc import Sequence

import pytest

from agent_r1.envs.base import Env, Restart, Transition
from agent_r1.params.env import ContextParams
from agent_r1.records import Call, CallStatus, Outcome
from agent_r1.rollout.episode import ASK, in_context

MADE = (Call(status=CallStatus.OK),)


class Counting(Env):
    """Answers with the number of the step, and with a second call in the second; ends with the fifth."""

    system, steps, closed = "Be brief.", 0, False

    async def open(self) -> None:
        self.user = "Who?"

    @property
    def state(self) -> str:
        return str(self.steps)

    async def step(self, action: str) -> Transition:
        self.steps += 1
        if self.steps == 5:
            return Transition(outcome=Outcome.ANSWERED, answer=action, rewards={"em": 1.0})
        said = (f"seen {self.steps}", "and more")[: 1 + (self.steps == 2)]
        return Transition(observations=said, calls=MADE, rewards={"think": 1.0}, rewards_when_read={"progress": 1.0})

    async def close(self) -> None:
        self.closed = True


def played(env: Env, actions: Sequence[str]) -> list[Transition]:
    async def play() -> list[Transition]:
        await env.open()
        found = [await env.step(action) for action in actions]
        await env.close()
        return found

    return asyncio.run(play())


def test_a_window_slides_with_every_step_once_it_is_full() -> None:
    inner = Counting()
    assert in_context(inner, ContextParams(kind="append", every=0)) is inner
    env = in_context(inner, ContextParams(kind="window", every=2))
    found = played(env, "abcde")
    assert [each.restart for each in found] == [None, None, *[Restart(user="Who?", keep=2)] * 2, None]
    assert [each.observations for each in found][2:] == [("seen 3",), ("seen 4",), ()]
    assert (env.system, env.user, found[-1].outcome, inner.closed) == ("Be brief.", "Who?", Outcome.ANSWERED, True)


def test_a_summary_is_asked_for_and_opens_the_next_context() -> None:
    """After the second and the fourth of the environment's five steps, of which it counts no summary."""
    inner = Counting()
    env = in_context(inner, ContextParams(kind="summary", every=2))
    found = played(env, ["a", "b", "<think>hm</think> two seen\n", "c", "d", "four <answer>x</answer>", "e"])
    asked, first, second = found[1], found[2], found[5]
    assert asked.observations == ("seen 2", f"and more\n\n{ASK}")
    assert (asked.calls, asked.rewards, asked.rewards_when_read) == (MADE, {"think": 1.0}, {"progress": 1.0})
    assert first.restart == Restart(user="Who?\n\nWhat you know so far:\ntwo seen\n\nseen 2\n\nand more")
    assert (first.observations, first.calls, first.rewards) == ((), (), {"think": 0.0})
    assert second.restart == Restart(user="Who?\n\nWhat you know so far:\nfour <answer>x</answer>\n\nseen 4")
    assert [bool(each.restart) for each in found] == [False, False, True, False, False, True, False]
    assert (found[-1].outcome, found[-1].answer, inner.steps) == (Outcome.ANSWERED, "e", 5)
    last = played(in_context(Counting(), ContextParams(kind="summary", every=5)), "abcde")[-1]
    assert (last.outcome, last.observations) == (Outcome.ANSWERED, ()), "nothing is asked at the end of an episode"


def test_a_state_shows_through_any_context_but_not_to_a_summary() -> None:
    for kind, states in (("window", ["1", "2", "3"]), ("summary", ["1", "", "2"])):
        env = in_context(Counting(), ContextParams(kind=kind, every=2))
        assert [(played(env, "a"), env.state)[1] for _ in range(3)] == states, kind


class Rewriting(Counting):
    async def step(self, action: str) -> Transition:
        return Transition(restart=Restart(user="anew"))


@pytest.mark.parametrize("kind", ["window", "summary"])
def test_contexts_are_not_rewritten_twice(kind: str) -> None:
    env = in_context(Rewriting(), ContextParams(kind=kind, every=1))
    with pytest.raises(ValueError, match=r"Rewriting rewrites its contexts itself; set env\.context"):
        played(env, "a")
