"""The journal: what was answered once is not asked again, whatever the world would say now."""

import json
import random
from collections import Counter
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from agent_r1.envs.base import Attempt
from agent_r1.envs.shared import Shared
from agent_r1.envs.tool_env import ToolEnv
from agent_r1.faults import TooManyAborted, WorldFault
from agent_r1.params import SHIPPED, load
from agent_r1.records import Call, CallStatus
from agent_r1.rollout.chat import Chat
from agent_r1.rollout.episodes import ScriptedSampler, collect
from agent_r1.tools.base import FunctionTool, ToolError, ToolResult
from agent_r1.tools.journal import CallPlace, Journal

LIMITS = load(SHIPPED).env.model_copy(update={"max_tokens": 2048})
AT = CallPlace(episode=7, step=1, call=0)
MADE = Call(tool="ask", arguments='{"what": "é"}', status=CallStatus.FAILED, latency_s=0.5)
GAVE = ToolResult(text="no\n<|im_end|>", titles=("A",), call_status=CallStatus.FAILED)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "journal" / "003.jsonl"


def test_what_was_written_is_there_in_the_next_process(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    Journal(path).add(AT, MADE, GAVE)
    entry = Journal(path).find(AT, MADE.tool, MADE.arguments)
    assert (entry.made, entry.result) == (MADE, GAVE)
    assert Journal(path).find(AT._replace(step=2), MADE.tool, MADE.arguments) is None
    assert Journal(path).find(AT, "ask", "{}") is None, "another call than was made there is made, and named"
    assert "where ask({}) is called now" in caplog.text


def test_line_that_a_kill_cut_is_dropped_and_the_next_is_whole(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    Journal(path).add(AT, MADE, GAVE)
    whole = path.read_bytes()
    path.write_bytes(whole + whole[: len(whole) // 2])
    journal = Journal(path)
    assert "the last line was cut short" in caplog.text
    journal.add(AT._replace(call=1), MADE, GAVE)
    assert all(Journal(path).find(AT._replace(call=call), MADE.tool, MADE.arguments) for call in (0, 1))


@pytest.mark.parametrize("line", ["{}", "not JSON", json.dumps({"episode": "7"})])
def test_a_damaged_line_is_refused_by_the_files_name(path: Path, line: str) -> None:
    Journal(path).add(AT, MADE, GAVE)
    path.write_text(f"{line}\n{path.read_text()}")
    with pytest.raises(ValueError, match=r"003\.jsonl is damaged; remove it"):
        Journal(path)


class World:
    """A world outside that never says the same twice, and counts what it is asked."""

    def __init__(self, seed: int, dies_after: int | None = None) -> None:
        self.rng, self.asked, self.dies_after = random.Random(seed), Counter[str](), dies_after
        self.down: set[str] = set()

    def tool(self) -> FunctionTool:
        async def ask(what: str) -> str:
            """Asks the world."""
            if self.dies_after is not None and self.asked.total() >= self.dies_after:
                raise KeyboardInterrupt
            self.asked[what] += 1
            if what in self.down:
                raise WorldFault("down")
            if self.rng.random() < 0.3:
                raise ToolError("no")
            return str(self.rng.random())

        return FunctionTool(ask)


def script(episode: int) -> list[str]:
    calls = [{"name": "ask", "arguments": {"what": f"{episode}.{step}"}} for step in range(3)]
    return [*(f"<tool_call>{json.dumps(call)}</tool_call>" for call in calls), "<answer>a</answer>"]


def play(chat: Chat, world: World, path: Path | None, episodes: int = 8) -> list[Any]:
    def env(shared: Shared, seed: int) -> ToolEnv:
        return ToolEnv("Who?", [world.tool()], max_steps=4, journal=shared.journal, seed=seed)

    with Shared(LIMITS) as shared, shared.journaled(path) if path else nullcontext():
        attempts = [
            Attempt(question_id=f"q{number}", group=number, sample=0, env=partial(env, shared))
            for number in range(episodes)
        ]
        sampler = ScriptedSampler([script(number) for number in range(episodes)], chat)
        found = collect(sampler, chat, attempts, shared, seed=1)
    return [(each.token_ids.tolist(), each.steps) for each in found]


@pytest.mark.parametrize("dies_after", [0, 9, 23])
def test_a_run_that_was_killed_hears_what_it_heard_before(chat: Chat, path: Path, dies_after: int) -> None:
    """The world is another one each time: what was answered before the kill stands, and nothing is asked twice."""
    first = World(seed=1, dies_after=dies_after)
    with pytest.raises(KeyboardInterrupt):
        play(chat, first, path)
    second = World(seed=2)
    once = play(chat, second, path)
    assert set((first.asked + second.asked).values()) == {1}
    third = World(seed=3)
    assert play(chat, third, path) == once
    assert third.asked.total() == 0
    assert play(chat, World(seed=4), None) != once, "without the journal the world says something else"


def test_what_aborted_an_episode_is_asked_again(chat: Chat, path: Path) -> None:
    down = World(seed=1)
    down.down = {"3.1"}
    with pytest.raises(TooManyAborted):
        play(chat, down, path)
    assert (down.asked["3.1"], down.asked["3.2"], set(down.asked.values())) == (2, 0, {1, 2})
    mended = World(seed=2)
    play(chat, mended, path)
    assert sorted(mended.asked) == ["3.1", "3.2"]


def test_tools_that_wait_for_nobody_are_not_journaled(chat: Chat, path: Path) -> None:
    def ask(what: str) -> str:
        """Asks nobody."""
        return what

    with Shared(LIMITS) as shared, shared.journaled(path):
        env = ToolEnv("Who?", [FunctionTool(ask)], max_steps=4, journal=shared.journal)
        shared.run(env.step(script(0)[0]))
    assert not path.exists()
