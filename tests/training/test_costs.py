"""What a training costs: a sum by hand, a killed run that goes on, and the cores of a whole process."""

import subprocess
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import psutil
import pytest

from agent_r1.costs import Costs, Purpose, costs_in
from agent_r1.training.loop import iterate

RUN = {
    "iterations": 2,
    "rollout": {"questions": 2, "samples": 4},
    "update": {"critic": {"warmup": {"iterations": 0, "explained_variance": 0, "limit": 0}}},
    "checkpoint": {"every": 2},
}


@pytest.fixture
def task(one_action_task: Callable[..., Any]) -> Any:
    answers = {"Is it true of A?": "yes", "Is it true of B?": "no"}
    return one_action_task(answers, lambda right: f"<answer>{right}</answer>", steps=5)


def test_each_purpose_is_charged_with_what_has_passed_since_the_last(monkeypatch: pytest.MonkeyPatch) -> None:
    """Clocks: seconds, cores of the process, of the engine, of others. Two GPUs, so that seconds count twice."""
    clocks = [
        (0.0, 1.0, 0.0, 0.0),
        (10.0, 4.0, 5.0, 0.0),  # other: starting the engine is not sampling
        (20.0, 6.0, 12.0, 3.0),  # sampling; others, such as a sandbox, are the tools'
        (21.0, 6.5, 13.0, 3.0),  # learning, while the engine samples ahead
        (23.0, 7.0, 0.0, 17.0),  # other: the engine has ended, its 13 s are among those of others
    ]
    looks = iter(clocks)
    monkeypatch.setattr(Costs, "_look", lambda _: np.array(next(looks)))
    costs = Costs()
    costs.devices, costs.engine = 2, {1}
    for purpose, waited_s in {Purpose.OTHER: 0.0, Purpose.SAMPLING: 4.0, Purpose.LEARNING: 0.0}.items():
        costs.charge(purpose, waited_s)
    costs.charge(Purpose.OTHER)
    assert dict(costs.spent) == {
        "cost/other_device_s": 24.0,
        "cost/other_core_s": 9.5,  # 3 + 5, then 0.5 + 1
        "cost/sampling_device_s": 12.0,  # 2 * (10 - 4)
        "cost/sampling_core_s": 10.0,  # 2 + 7, then 1
        "cost/tools_device_s": 8.0,
        "cost/tools_core_s": 3.0,
        "cost/learning_device_s": 2.0,
        "cost/learning_core_s": 0.5,
    }
    cores = sum(value for name, value in costs.spent.items() if name.endswith("_core_s"))
    assert cores == sum(clocks[-1][1:]) - sum(clocks[0][1:])


def core_seconds() -> float:
    """Of this process and of what other tests have started in it."""
    this = psutil.Process()
    return sum(sum(process.cpu_times()[:4]) for process in (this, *this.children(recursive=True)))


def test_ranks_count_what_torchrun_started_beside_this_one() -> None:
    """Here a process beside one that asks, of the same parent."""
    asks = """
from agent_r1.costs import Costs, Purpose
costs = Costs()
costs.charge(Purpose.OTHER)
alone = costs.spent["cost/other_core_s"]
costs.of_ranks()
costs.charge(Purpose.OTHER)
print(costs.spent["cost/other_core_s"] - alone)
"""
    burns = "import time\nwhile time.process_time() < 0.5: pass\nprint(flush=True)\ntime.sleep(600)"
    parent = f"""
import subprocess, sys
beside = subprocess.Popen([sys.executable, "-c", {burns!r}], stdout=subprocess.PIPE)
beside.stdout.readline()
subprocess.run([sys.executable, "-c", {asks!r}], check=True)
beside.kill()
"""
    told = subprocess.run([sys.executable, "-c", parent], stdout=subprocess.PIPE, check=True)
    assert 0.4 < float(told.stdout) < 0.9


def test_a_trainings_core_seconds_are_those_of_its_process(task: Any, open_training: Callable[..., Any]) -> None:
    before = core_seconds()
    with open_training(task, RUN) as training:
        iterate(training)
    used = core_seconds() - before
    rows = training.folder.history()
    spent = {name: value for name, value in costs_in(rows).items() if name.endswith("_core_s")}
    assert 0.8 * used <= sum(spent.values()) <= used + 0.05, "children are known to 10 ms"
    assert {name for name, value in spent.items() if value > 0} >= {
        f"cost/{purpose}_core_s" for purpose in ("sampling", "learning", "proof", "writing", "other")
    }
    sampled = [row["rollout/action_tokens"] * 8 for row in rows]
    assert rows[0]["cost/sampled_tokens"] == sampled[0]
    assert rows[1]["cost/sampled_tokens"] == sum(sampled)
    assert rows[1]["cost/peak_gib"] >= rows[0]["cost/peak_gib"] > 0.1


def test_costs_go_on_adding(task: Any, open_training: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """It ends in its second iteration, with no checkpoint yet: the first one is learned again, and costs again."""
    with open_training(task, RUN) as training:
        first = training.rollout(0) | training.credit(0) | training.update(0)
        training.folder.record(0, first)
    ended = costs_in(training.folder._lines())
    with open_training(task, RUN) as again:
        assert again.folder.finished == 0
        assert again.folder.costs.spent["cost/sampled_tokens"] == ended["cost/sampled_tokens"]
        iterate(again)
    found = costs_in(again.folder.history())
    assert all(found[name] >= value for name, value in ended.items())
    assert found["cost/learning_core_s"] > ended.get("cost/learning_core_s", 0.0)
    assert found["cost/other_core_s"] > ended["cost/other_core_s"]
