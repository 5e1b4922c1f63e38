"""What a world's profile says, of episodes made by hand."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from agent_r1.evaluation.scores import by_question, predict
from agent_r1.inspection.profile import Player, profile_tables
from agent_r1.inspection.stored import PageTrajectory
from agent_r1.params import SHIPPED, load
from tests.cases import tables

USE = {"calls": 1.0, "ok_share": 0.5, "timeout_share": 0.0, "latency_p50_s": 0.002, "latency_p95_s": 0.004}


@pytest.fixture
def entries(make_entry: Callable[..., PageTrajectory]) -> list[PageTrajectory]:
    """Four samples of each of two questions: of `a` two are right, of `b`, with two hops, all."""
    answers = {"a": ["Tesk", "no", "no", "Tesk"], "b": ["Tesk"] * 4}
    return [make_entry(name, answer=answer, hops=1 + (name == "b")) for name in answers for answer in answers[name]]


def test_profile_by_hand(entries: list[PageTrajectory]) -> None:
    """Two samples of `a` differ in four of its six pairs, and those of `b` in none: 33 % of groups of two differ."""
    rows = [replace(entry.trajectory, sample=place % 4) for place, entry in enumerate(entries)]
    questions = [entries[0].question, entries[4].question]
    answered = by_question(predict(rows, questions, "the policy", seed=0))
    tools = {f"tool/search/{name}": value for name, value in USE.items()}
    agent = Player(name="the policy", trajectories=rows, answered=answered, tools=tools, seconds=7.0)
    train = load(SHIPPED).train
    train = train.model_copy(update={"rollout": train.rollout.model_copy(update={"questions": 30, "samples": 4})})
    console = Console(width=120)
    with console.capture() as printed:
        for part in profile_tables([agent], questions, train, load(SHIPPED)):
            console.print(part, markup=False, highlight=False, soft_wrap=isinstance(part, str))
    lines = [" ".join(line.replace("│", " ").split()) for line in printed.get().splitlines()]
    assert "the policy 0.750 [0.50, 1.00] 2.0 9.0 14.0 7.0" in lines
    told = tables(Path(__file__).parent)["profile"]
    assert [entry for entry in lines if " hop" in entry[:7]] == told["by_hops"]
    assert lines[-5:] == told["last"]
