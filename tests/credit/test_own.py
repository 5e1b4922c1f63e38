"""Rewards of one's own: what a function sees, when it is asked, and what it may not give."""

import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from agent_r1 import params
from agent_r1.credit.own import Episode, functions, sources, state, view
from agent_r1.credit.rewards import step_rewards
from agent_r1.faults import TooManyAborted
from agent_r1.params.credit import CreditParams, RewardWeights
from agent_r1.records import Call, CallStatus, Outcome, Passage, Question, Source, StopReason, Trajectory
from agent_r1.tables import read_rows
from agent_r1.training.loop import Training, iterate
from tests.cases import cases
from tests.fixtures import Task
from tests.trajectories import from_parts, question_fields

PARAMS = Path(__file__).parents[2] / "params.yaml"
CREDIT = params.load(PARAMS).train.credit
MODULE = """
from agent_r1.faults import WorldFault

asked = []

def words(episode):
    asked.append(episode.question.question_id)
    return len(episode.answer.split())

def many(episodes):
    asked.append(len(episodes))
    return [1.5 for _ in episodes]

def down(episode):
    asked.append(episode.question.question_id)
    if episode.answer == "x" or len(asked) == 1:
        raise WorldFault("no answer")
    return 1

def partly(episodes):
    return [WorldFault("no answer") if each.answer == "x" else 2 for each in episodes]

def bad(episode):
    return {"x": float("nan"), "y": float("inf"), "z": "1"}[episode.answer]

def few(episodes):
    return [0]

constant = 3
"""
QUESTIONS = {name: Question(**question_fields(name, split="train")) for name in ("q0", "q1", "q2")}


def decode(ids: Any) -> str:
    return "".join(chr(97 + each) for each in ids)


def trajectory(number: int, answer: str, outcome: Outcome = Outcome.ANSWERED) -> Trajectory:
    """Prompt a, action b c (c ends it), template d, observation e f, template g, action h i, cut."""
    first = [(Source.PROMPT, [0]), (Source.ACTION, [1, 2]), (Source.TEMPLATE, [3])]
    parts = [*first, (Source.OBSERVATION, [4, 5]), (Source.TEMPLATE, [6]), (Source.ACTION, [7, 8])]
    call = Call(tool="search", arguments="{}", status=CallStatus.OK)
    last = {"stop_reason": StopReason.LENGTH, "rewards": {"em": 1.0, "f1": 1.0, "grounded": 0.0}}
    steps = [{"calls": [call], "rewards": {"progress": 1.0}}, last]
    names = {"trajectory_id": f"0/q{number}/0", "question_id": f"q{number}", "group": number}
    return from_parts(parts, steps, outcome=outcome, answer=answer, **names)


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[SimpleNamespace]:
    """The functions above, as a user's module; what they were asked is in `asked`."""
    (tmp_path / "users_rewards.py").write_text(MODULE)
    monkeypatch.syspath_prepend(tmp_path)
    yield SimpleNamespace(asked=lambda: sys.modules["users_rewards"].asked, file=tmp_path / "users_rewards.py")
    sys.modules.pop("users_rewards", None)


def credit(function: str, *, module: str = "users_rewards", **further: Any) -> CreditParams:
    weights = {**dict.fromkeys(RewardWeights.model_fields, 0.0), "em": 1.0}
    own = {"function": f"{module}:{function}", "weight": 0.5, **further}
    return CREDIT.model_copy(update={"rewards": RewardWeights.model_validate({**weights, "own": own})})


def stated(function: str, rows: list[Trajectory], *, share: float = 1.0, **further: Any) -> list[Trajectory]:
    return state(functions(credit(function, **further).rewards), rows, QUESTIONS, decode, aborted_share=share)


def test_a_function_sees_the_episode_as_text() -> None:
    seen = view(trajectory(0, "x"), QUESTIONS["q0"], decode)
    assert isinstance(seen, Episode)
    assert (seen.question, seen.answer, seen.outcome) == (QUESTIONS["q0"], "x", Outcome.ANSWERED)
    first, last = seen.steps
    assert (first.action, first.observation) == ("b", "ef"), "without the token that ends it, and without the template"
    assert [(call.tool, call.arguments, call.status) for call in first.calls] == [("search", "{}", "ok")]
    assert first.facts == {"progress": 1.0}
    assert (last.action, last.observation) == ("hi", ""), "cut, so that no token ends it"


def test_what_it_gives_is_a_fact_of_the_last_step_and_weighted_like_a_part(module: SimpleNamespace) -> None:
    rows = [trajectory(0, "one two three"), trajectory(1, "", Outcome.ABORTED), trajectory(2, "one")]
    found = stated("words", rows)
    assert module.asked() == ["q0", "q2"], "once each, and never of what the world cut short"
    assert [each.steps[-1].rewards.get("own") for each in found] == [3.0, None, 1.0]
    assert "own" not in found[0].steps[0].rewards
    totals, parts = step_rewards(found[0], credit("words"))
    assert parts["own"].tolist() == [0, 3]
    assert totals.tolist() == [0, 1 + 0.5 * 3]
    assert module.asked() == ["q0", "q2"], "and not again"
    with pytest.raises(ValueError, match="users_rewards:words was not asked when it was collected, so there is no rew"):
        step_rewards(rows[0], credit("words"))


def test_a_batched_function_is_asked_once_for_all(module: SimpleNamespace) -> None:
    found = stated("many", [trajectory(0, "x"), trajectory(1, "y")], batched=True)
    assert module.asked() == [2]
    assert [each.steps[-1].rewards["own"] for each in found] == [1.5, 1.5]


@pytest.mark.parametrize(("function", "batched"), [("down", False), ("partly", True)])
def test_world_fault_is_asked_again_and_then_aborts(module: SimpleNamespace, function: str, batched: bool) -> None:
    rows = [trajectory(0, "y"), trajectory(1, "x")]
    found = stated(function, rows, batched=batched)
    assert [each.outcome for each in found] == [Outcome.ANSWERED, Outcome.ABORTED]
    assert found[0].steps[-1].rewards["own"] in (1, 2)
    if not batched:
        assert module.asked() == ["q0", "q1", "q0", "q1"], "the first one's fault passed"
    with pytest.raises(TooManyAborted, match=r"1 of 2 episodes short, .* and env\.aborted_share is 0\.4"):
        stated(function, rows, share=0.4, batched=batched)


@cases("function, answer, message")
@pytest.mark.usefixtures("module")
def test_what_it_may_not_give_is_refused_with_its_trajectory(function: str, answer: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        stated(function, [trajectory(0, answer), trajectory(1, answer)], batched=function == "few")


@cases("name, text, message")
def test_a_module_that_does_not_load_or_is_hidden_is_refused(
    module: SimpleNamespace, name: str, text: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(module.file.parent)
    if name != "no.where":
        file = Path(f"{name.replace('.', '/')}.py")
        file.parent.mkdir(exist_ok=True)
        file.write_text(text)
    with pytest.raises(ValueError, match=message):
        functions(credit("words", module=name).rewards)


def test_the_source_is_told_by_its_bytes(module: SimpleNamespace) -> None:
    before = sources(credit("words").rewards)
    assert list(before) == ["reward own"]
    module.file.write_text(MODULE + "\n")
    assert sources(credit("words").rewards) != before
    assert sources(CREDIT.rewards) == {}


def test_a_training_asks_when_it_collects(
    module: SimpleNamespace,
    tiny_model: Path,
    bm25_index: Callable[..., Any],
    open_training: Callable[..., AbstractContextManager[Training]],
) -> None:
    """With GiGPO and truncated episodes left out, which of an untrained model are all of them."""
    own = {"function": "users_rewards:words", "weight": 0.5}
    credited = {"estimator": "gigpo", "rewards": {"own": own}, "left_out": {"truncated": True}}
    small = {"iterations": 1, "rollout": {"samples": 2}, "update": {"minibatches": 1}, "credit": credited}
    env = params.load(PARAMS).env.model_copy(update={"max_steps": 2, "max_tokens": 256, "max_action_tokens": 4})
    index = bm25_index([Passage(passage_id="p", title="Veld", text="Tesk is a city.")])
    with open_training(Task(questions=[*QUESTIONS.values()], index=index, model=tiny_model), small, env) as training:
        iterate(training)
        [row] = training.folder.history()
        rows = read_rows(training.folder.trajectories(0), Trajectory)
    assert sorted(module.asked()) == sorted(each.question_id for each in rows)
    assert all(each.steps[-1].rewards["own"] == len(each.answer.split()) for each in rows)
    assert row["reward/own"] == np.mean([len(each.answer.split()) for each in rows])
    assert row["filter/left_out_share"] == np.mean([each.truncated for each in rows]) == 1
    assert row["update/trained_share"] == 0
    assert sum(row[f"outcome/{each}"] for each in Outcome) == 1
