"""What peers' users reported as silent failures, played here: each has a line that says it.

docs/troubleshooting.md has the table. Tools that one kind of engine alone would call are in
tests/rollout/test_vllm_engine.py, templates that leave a message out in tests/rollout/test_chat.py, rows with other
fields in tests/data/test_formats.py, ends of a single turn in tests/training/test_findings.py.
"""

import random
import re
from collections.abc import Callable
from typing import Any

import pytest

from agent_r1.credit.own import Episode
from agent_r1.params.env import EnvParams
from agent_r1.training.loop import iterate
from tests.fixtures import ONE_ACTION, Task

Said = Callable[..., str]

QUESTIONS = {f"Is it true of {name}?": "yes" for name in "ABCDEFGH"}


def for_form(episode: Episode) -> float:
    return 0.05


def says_no(episode: Episode) -> float:
    return float(episode.answer == "no")


@pytest.fixture(scope="module")
def answering(one_action_task: Callable[..., Task]) -> Task:
    """A model that answers no twice as often as yes, which is right, and calls nothing."""
    rng = random.Random(0)
    return one_action_task(QUESTIONS, lambda _: f"<answer> {rng.choice(['yes', 'no', 'no'])} </answer>", steps=100)


@pytest.fixture
def said(open_training: Callable[..., Any], caplog: pytest.LogCaptureFixture) -> Said:
    caplog.set_level("INFO", logger="agent_r1")

    def train(task: Task, env: EnvParams = ONE_ACTION, iterations: int = 1, **credit: Any) -> str:
        update = {"learning_rate": 4e-4}
        changes = {"iterations": iterations, "credit": {"estimator": "grpo", **credit}, "update": update}
        with open_training(task, changes, env) as training:
            iterate(training)
        return caplog.text

    return train


def test_equal_returns_of_a_reward_for_form_are_told(answering: Task, said: Said) -> None:
    """As of a policy that never saw the question: all earn the same little, and nothing moves; nor does it call."""
    own = {"agent_r1": 0.0, "for_form": {"function": f"{__name__}:for_form", "weight": 1.0}}
    text = said(answering, rewards=own)
    assert "iteration 0: no episode calls a tool, so that no call is learned, " in text, text
    assert re.search(r"iteration 0: .*, and in 8 of 8 groups all returns are equal; what helps", text), text
    assert re.search(r"iteration 0: exact match 0\.\d+, return 0\.050", text), text


def test_a_reward_that_reads_another_answer_is_told_by_a_return_that_rises_alone(answering: Task, said: Said) -> None:
    own = {"agent_r1": 0.0, "says_no": {"function": f"{__name__}:says_no", "weight": 1.0}}
    text = said(answering, iterations=11, rewards=own)
    assert re.search(r"iteration 10: the return rose from 0\.\d+ to 0\.\d+ .*, and exact match did not", text), text
