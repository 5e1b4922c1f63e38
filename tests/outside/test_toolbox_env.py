"""Classes whose methods are tools: one as it would be written for TRL, and ones that nobody should have written."""

import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest

from agent_r1.faults import WorldFault
from agent_r1.outside.toolbox_env import ToolboxEnv, require_toolbox
from agent_r1.records import CallStatus, Outcome, Passage, Trajectory
from agent_r1.tables import read_rows
from agent_r1.tools.toolbox import own_sources
from agent_r1.training.loop import Training, iterate
from tests.cases import cases
from tests.fixtures import Task
from tests.outside.worlds import asked, call, limits, play, shared

SOURCE = '''
import asyncio
from agent_r1.faults import WorldFault

class Wordle:
    def reset(self, word: str, tries: int = 3) -> str | None:
        self.word, self.left, self.best = word, tries, 0.0
        return f"{len(word)} letters"

    def guess(self, word: str) -> str:
        """Guesses the word."""
        if not self.left:
            raise ValueError("Game over.")
        self.left -= 1
        hits = sum(a == b for a, b in zip(word, self.word))
        self.best = max(self.best, hits / len(self.word))
        return str(hits)

    def get_reward(self) -> float:
        return self.best

class Quiet:
    def reset(self, **row):
        return None

    def look(self) -> str:
        """Looks."""
        return "x" * 10_000

class Slow(Quiet):
    async def wait(self, seconds: float) -> str:
        """Waits."""
        await asyncio.sleep(seconds)
        return "waited"

    def fail(self) -> str:
        """Fails."""
        raise WorldFault("no dictionary")

    async def get_reward(self):
        await asyncio.sleep(0)
        return float("nan")

class Stuck(Slow):
    async def get_reward(self):
        await asyncio.sleep(3600)

class Hinting(Quiet):
    def reset(self, hint):
        return hint

    def get_reward(self):
        return 1.0

class Stating(Quiet):
    def state_key(self):
        return self.key

    def reset(self, key):
        self.key = key

class Counter:
    def __init__(self):
        self.reward = 0.0

    async def reset(self, **row):
        self.goal = row.get("goal", 2)

    def count(self, by: int) -> int:
        """
        Counts on.

        Args:
            by: How far.
        """
        self.reward += by
        self.done = self.reward == self.goal
        return int(self.reward)

    def state(self) -> dict:
        """Tells all."""
        return {"at": self.reward}

    def forget(self) -> None:
        """Forgets."""

    def divide(self, by: int) -> float:
        """Divides."""
        return 1 / by

    @staticmethod
    def help() -> str:
        """Helps."""
        return "count"

class Asked(Quiet):
    def get_reward(self, answer):
        return float(answer == "42")

class Offered:
    def reset(self, words):
        self.words = words
        self.reward = 0.0

    def tools(self):
        schema = {"type": "object", "properties": {"word": {"enum": self.words}}, "required": ["word"]}
        function = {"name": "say", "description": "Says a word.", "parameters": schema}
        return [{"type": "function", "function": function}]

    async def call(self, name, arguments):
        self.reward += 1
        if arguments["word"] == "boom":
            raise KeyError("fuse")
        return f"{name} {arguments['word']}"

class Unheard(Offered):
    def tools(self):
        return [{"name": "a b"}]

class Scored:
    def reset(self, left, right):
        self._sum = left + right
        return f"{left} + {right}"

    def get_reward(self, answer):
        return float(int(answer) == self._sum)

class Broken(Quiet):
    def __init__(self):
        raise OSError("no disk")

class Unready:
    def look(self) -> str:
        """Looks."""

class Bare:
    def reset(self):
        """Is no tool."""

class Untyped(Quiet):
    def guess(self, word):
        """Guesses."""
'''


@pytest.fixture(autouse=True)
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "some_boxes.py").write_text(SOURCE)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "some_boxes", raising=False)


def declared(kind: str, **more: Any) -> dict[str, Any]:
    return {"w": {"class": f"some_boxes:{kind}", **more}}


def made(
    kind: str, row: dict[str, Any], params: dict[str, Any], answers: list[str] | None = None, max_steps: int = 3
) -> ToolboxEnv:
    known = shared(toolbox=declared(kind, **params), max_steps=max_steps, max_result_characters=100)
    return ToolboxEnv(asked("toolbox", {"name": "w", "row": row}, answers=answers or []), known, 0)


def test_a_class_of_trl() -> None:
    env = made("Wordle", {"word": "crane", "tries": 1}, {"success_above": 0.5})
    first, over, last = play(env, call("guess", word="brine"), call("guess", word="crane"), "done")
    assert env.user == "Win.\n\n5 letters"
    assert [tool["function"]["name"] for tool in env.tools] == ["guess"]
    assert (first.observations, first.call_status) == (("3",), CallStatus.OK)
    assert (over.observations, over.call_status) == (("Error: Game over.",), CallStatus.FAILED)
    assert (last.outcome, last.answer) == (Outcome.ANSWERED, "done")
    assert {name: last.rewards[name] for name in ("env", "success")} == {"env": 0.6, "success": 1.0}
    assert "env" not in first.rewards | over.rewards
    other = made("Wordle", {"word": "brine"}, {})
    assert play(other, call("guess", word="brine"))[0].observations == ("5",), "an object of its own"


def test_it_is_paid_however_it_ends_unless_the_world_ends_it() -> None:
    env = made("Wordle", {"word": "crane"}, {"success_above": 0.6, "task": "Guess."})
    last = play(env, "<answer>", "<answer>", call("guess", word="brine"))[-1]
    assert (last.outcome, last.rewards["env"], last.rewards["success"]) == (Outcome.TURN_LIMIT, 0.6, 0.0)
    assert env.user == "Guess.\n\n5 letters"
    assert play(made("Wordle", {"word": "crane"}, {}), *["<answer>"] * 3)[-1].outcome is Outcome.MALFORMED
    [failed] = play(made("Slow", {}, {"timeout_s": 5}), call("fail"))
    assert (failed.outcome, failed.fault, failed.rewards) == (Outcome.ABORTED, "no dictionary", {})


def test_an_object_may_state_its_state() -> None:
    """What its tools answer is no state; the method is no tool."""
    env, silent = made("Stating", {"key": "here"}, {}), made("Quiet", {}, {})
    assert all(play(each, call("look"))[0].observations for each in (env, silent))
    assert (env.state, silent.state) == ("here", "")
    assert [tool["function"]["name"] for tool in env.tools] == ["look"]
    number = made("Stating", {"key": 7}, {})
    play(number, call("look"))
    with pytest.raises(ValueError, match=r"env\.toolbox\.w: state_key gave 7; the key of a state is text"):
        assert number.state


def test_without_a_reward_the_answer_decides_and_a_reward_may_ask_for_it() -> None:
    right = made("Quiet", {"any": 1}, {}, ["Tesk"])
    looked, last = play(right, call("look"), "tesk")
    assert right.user == "Win."
    assert looked.observations == ("x" * 100 + " [... 9,900 characters left out]",)
    assert last.rewards == {"think": 0.0, "em": 1.0, "f1": 1.0, "grounded": 0.0, "success": 1.0}
    assert play(made("Quiet", {}, {}, ["Tesk"]), "Veld")[0].rewards["success"] == 0.0
    assert [play(made("Asked", {}, {}), said)[-1].rewards["env"] for said in ("42", "41")] == [1.0, 0.0]


def test_results_and_faults_are_told_as_trl_tells_them(caplog: pytest.LogCaptureFixture) -> None:
    """As a text of whatever a method returns or raises; `reward` is what the object has earned without get_reward."""
    env = made("Counter", {}, {"success_above": 1.5, "timeout_s": 5}, max_steps=6)
    calls = [call("count", by=1), call("state"), call("forget"), call("divide", by=0), call("help"), "done"]
    *replies, last = play(env, *calls)
    told = [reply.observations[0] for reply in replies]
    assert told == ["1", "{'at': 1.0}", "None", "Error: division by zero", "count"]
    assert "tool 'divide' raised ZeroDivisionError" in caplog.text
    assert [tool["function"]["name"] for tool in env.tools] == ["count", "state", "forget", "divide", "help"]
    assert env.tools[0]["function"]["parameters"]["properties"]["by"]["description"] == "How far."
    assert {name: last.rewards[name] for name in ("env", "success")} == {"env": 1.0, "success": 0.0}


def test_tools_may_be_offered_by_schemas_that_depend_on_the_row() -> None:
    env = made("Offered", {"words": ["hi", "boom"]}, {"timeout_s": 5}, max_steps=5)
    said = [call("say", word="hi"), call("say", word="ho"), call("say", word="boom"), call("hear", word="hi"), "done"]
    *replies, last = play(env, *said)
    assert [reply.call_status.value for reply in replies] == ["ok", "bad_arguments", "failed", "unknown_tool"]
    told = [reply.observations[0] for reply in replies[:3]]
    assert told == ["say hi", "Error: the arguments do not fit the tool's schema", "Error: 'fuse'"]
    assert (last.rewards["env"], env.tools[0]["function"]["name"]) == (2.0, "say")
    with pytest.raises(ValueError, match="tool 'a b': a name is made of"):
        play(made("Unheard", {"words": []}, {"timeout_s": 5}), "done")


def test_a_box_without_tools_is_a_question_with_a_scorer() -> None:
    env = made("Scored", {"left": 2, "right": 3}, {})
    [last] = play(env, "5")
    assert (env.system, env.user, env.tools) == ("Answer the question.", "Win.\n\n2 + 3", [])
    assert (last.outcome, last.rewards["success"]) == (Outcome.ANSWERED, 1.0)
    require_toolbox([asked("toolbox", W | {"row": {"left": 2, "right": 3}})], limits(toolbox=declared("Scored")))


def test_a_fault_of_reset_or_reward_names_the_world_and_the_row() -> None:
    with pytest.raises(ValueError, match=r"env\.toolbox\.w: get_reward of the row .* raised ValueError"):
        play(made("Scored", {"left": 2, "right": 3}, {}), "five")
    with pytest.raises(ValueError, match=r"env\.toolbox\.w: reset of the row .*'left': 2.* raised TypeError"):
        play(made("Scored", {"left": 2, "right": "x"}, {}), "5")


@pytest.mark.parametrize("goal", [1, 2, 3])
def test_an_object_that_is_done_ends_the_episode(goal: int) -> None:
    replies = play(made("Counter", {"goal": goal}, {"timeout_s": 5}), *[call("count", by=1)] * goal)
    assert [reply.outcome for reply in replies] == [None] * (goal - 1) + [Outcome.ENDED]
    assert (replies[-1].rewards["env"], replies[-1].call_status) == (goal, CallStatus.OK)


def test_what_waits_has_a_limit() -> None:
    waited, late = play(made("Slow", {}, {"timeout_s": 1}), call("wait", seconds=0.0), call("wait", seconds=60.0))
    assert waited.observations == ("waited",)
    assert late.call_status is CallStatus.TIMEOUT
    with pytest.raises(WorldFault, match=r"env\.toolbox\.w: get_reward took longer than 0\.2 s"):
        play(made("Stuck", {}, {"timeout_s": 0.2}), "done")
    with pytest.raises(ValueError, match=r"env\.toolbox\.w gave the reward nan"):
        play(made("Slow", {}, {"timeout_s": 5}), "done")


def test_the_source_is_part_of_what_a_training_is_made_of(tmp_path: Path) -> None:
    """The settings survive the way through `Params.of`, whose values are named as in params.yaml."""
    params = limits(toolbox=declared("Quiet"))
    assert limits(**params.model_dump()).toolbox == params.toolbox
    before = own_sources(params)
    (tmp_path / "some_boxes.py").write_text(SOURCE + "\n")
    assert [*before] == ["toolbox w"]
    assert before != own_sources(params)


W = {"name": "w"}
ROW = W | {"row": {"word": "crane"}}


@cases("params, setup, message")
def test_what_is_refused_before_a_model_is_loaded(params: dict[str, Any], setup: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        require_toolbox([asked("toolbox", setup)], limits(toolbox=params))
    require_toolbox([asked("toolbox", ROW)], limits(toolbox=declared("Wordle")))
    require_toolbox([asked("toolbox", W)], limits(toolbox=declared("Counter", timeout_s=5)))


def test_a_reset_that_leaves_no_room_is_no_answer_and_the_training_goes_on(
    tiny_model: Path, bm25_index: Callable[..., Any], open_training: Callable[..., AbstractContextManager[Training]]
) -> None:
    """Known at its reset alone: one of three rows shows more than a context holds, and nothing is learned from it."""
    rows = [
        asked("toolbox", {"name": "w", "row": {"hint": "w" * size}}, question_id=f"q{size}") for size in (5, 900, 9)
    ]
    env = limits(toolbox=declared("Hinting"), max_steps=1, max_tokens=512, max_action_tokens=4)
    small = {"rollout": {"samples": 2}, "update": {"minibatches": 1}, "iterations": 1}
    credit = {"estimator": "grpo", "rewards": {"agent_r1": 0.0, "env": 1.0}}
    index = bm25_index([Passage(passage_id="p", title="Veld", text="Tesk is a city.")])
    task = Task(questions=rows, index=index, model=tiny_model)
    with open_training(task, {**small, "credit": credit}, env) as training:
        iterate(training)
        [metrics] = training.folder.history()
        found = read_rows(training.folder.trajectories(0), Trajectory)
    long = [row for row in found if row.question_id == "q900"]
    assert [(row.outcome, row.steps, len(row.token_ids)) for row in long] == [(Outcome.TOKEN_LIMIT, [], 0)] * 2
    assert {row.outcome for row in found if row.question_id != "q900"} == {Outcome.MALFORMED}
    assert (metrics["outcome/malformed"], metrics["outcome/aborted"]) == (1.0, 0.0)
