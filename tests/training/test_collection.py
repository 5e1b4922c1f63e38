"""The sampling side of a training: when it rests, and that a validation asks the world nothing twice."""

from collections.abc import Callable
from importlib import import_module
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest

from agent_r1.learn.learner import Learner
from agent_r1.params.tools import FunctionParams, ToolsParams
from agent_r1.records import Passage, Question
from agent_r1.rollout.engines import open_engine
from agent_r1.rollout.episodes import ScriptedSampler
from agent_r1.rollout.sampling import Engine
from agent_r1.training import collection
from agent_r1.training.loop import iterate
from tests.fixtures import ONE_ACTION, Task
from tests.trajectories import question_fields

SMALL = {
    "iterations": 1,
    "credit": {"estimator": "grpo"},
    "rollout": {"samples": 2},
    "update": {"minibatches": 1, "entropy_bonus": 0.01, "critic": {"minibatches": 1}},
}


def question(split: str, question_id: str = "q") -> Question:
    return Question(**question_fields(question_id, split=split))


WORLD = '''
from collections import Counter

asked, mortal, name = Counter(), [True], [1]

class Killed(BaseException):
    pass

async def ask(what: str) -> str:
    """Asks a world that never says the same twice, and kills the process that asks it for the third time."""
    if mortal[0] and asked.total() == 2:
        raise Killed
    asked[what] += 1
    return f"world {name[0]} says {asked.total()}"
'''


@pytest.fixture
def index(bm25_index: Callable[..., Any]) -> Any:
    return bm25_index([Passage(passage_id="p", title="Veld", text="Tesk is a city.")])


def test_a_killed_validation_hears_what_it_heard_and_asks_nothing_twice(
    tiny_model: Path, index: Any, open_training: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "some_world.py").write_text(WORLD)
    monkeypatch.syspath_prepend(tmp_path)
    world = import_module("some_world")
    dev = [question("dev", f"dev {number}") for number in range(4)]
    task = Task(questions=[question("train"), *dev], index=index, model=tiny_model)
    tools = ToolsParams(functions={"ask": FunctionParams(module="some_world")})
    env = ONE_ACTION.model_copy(update={"tools": tools, "max_tokens": 500, "max_action_tokens": 60, "max_steps": 2})
    calls = [f'<tool_call>{{"name": "ask", "arguments": {{"what": "{number}"}}}}</tool_call>' for number in range(4)]

    def validated() -> list[Any]:
        with open_training(task, SMALL | {"validation": {"every": 1, "questions": 0}}, env) as training:
            sampler = training.collector.sampler
            script = ScriptedSampler([[call, "<answer>a</answer>"] for call in calls], sampler.chat)
            monkeypatch.setattr(sampler.engine, "sample", script.sample)
            found = sampler.validate(training.unseen, 0, seed=7)
        return [(each.token_ids.tolist(), each.steps, each.outcome) for each in found]

    with pytest.raises(world.Killed):
        validated()
    world.mortal[0], world.name[0] = False, 2
    once = validated()
    assert sorted(world.asked.values()) == [1, 1, 1, 1]
    world.name[0] = 3
    assert validated() == once


def test_a_sampler_rests_but_for_collecting_and_validating(
    tiny_model: Path, index: Any, open_training: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The learner gives memory back before the sampler wakes, and the first thing that wakes one is its weights."""
    told = list[str]()

    def noted(owner: Any, name: str, as_what: str) -> None:
        plain = getattr(owner, name)
        monkeypatch.setattr(owner, name, lambda *args, **named: [told.append(as_what), plain(*args, **named)][1])

    def opened(*args: Any) -> Engine:
        engine = open_engine(*args)
        engine.rests = True
        for name in ("rest", "sample", "load_weights"):
            noted(engine, name, name)
        return engine

    monkeypatch.setattr(collection, "open_engine", opened)
    noted(collection, "release", "release")
    noted(Learner, "update", "update")
    task = Task(questions=[question("train"), question("dev")], index=index, model=tiny_model)
    with open_training(task, SMALL | {"validation": {"every": 1, "questions": 1}}) as training:
        iterate(training)
    collected, validated_ = ["rest", "release", "sample", "rest"], ["release", "load_weights", "sample", "rest"]
    assert [name for name, _ in groupby(told)] == [*collected, "update", *validated_]
