"""The sweep's page, from four hand-made questions, two runs with two seeds and a baseline."""

import dataclasses
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from agent_r1.evaluation.comparison import Evaluation
from agent_r1.evaluation.sweep import SweptAgents, render_sweep, successes
from agent_r1.params.stages import EvaluateParams
from agent_r1.records import Outcome, Question

TIMES = {"time/rollout_s": 20.0, "time/update_s": 10.0, "time/search_cache_hit_share": 1.0}
PLAN = "Planned for 2 x 4 x 1."
COSTS = {"cost/sampled_tokens": 900.0, "cost/sampling_core_s": 8.0, "cost/tools_core_s": 1.0}
Evaluate = Callable[[str, int], Evaluation]
Page = Callable[[SweptAgents], str]


@pytest.fixture
def questions(make_question: Any) -> list[Question]:
    return [make_question(f"q{i}", hops=1 + i // 2) for i in range(4)]


@pytest.fixture
def evaluate(questions: list[Question], make_evaluation: Any) -> Evaluate:
    """An agent that answers so many of the last questions right; its rows stand in another order than the questions."""

    def make(name: str, right: int) -> Evaluation:
        found = make_evaluation(name, questions, ["Veld"] * (4 - right) + ["Tesk"] * right)
        return dataclasses.replace(found, predictions=found.predictions[::-1])

    return make


def curve(alarm_in: int | None, *, critic: bool = False, update_s: float = 10.0) -> list[dict[str, float]]:
    times = TIMES | {"time/update_s": update_s, "update/episodes": 12.0}
    rows = [
        {"iteration": i, "rollout/success": 0.3 * i, "monitor/alarms": float(i == alarm_in), **times}
        | {name: (i + 1) * each for name, each in COSTS.items()}
        for i in range(4)
    ]
    if critic:
        rows = [row | {"value/explained_return": 0.2 * row["iteration"]} for row in rows]
        rows[1]["validation/success"], rows[3]["validation/success"] = 0.9, 0.6 if alarm_in is None else 0.7
    return rows


@pytest.fixture
def rendered(questions: list[Question], tmp_path: Path, draws: EvaluateParams) -> Page:
    def render(sweep: SweptAgents) -> str:
        render_sweep(sweep, questions, tmp_path, draws)
        return (tmp_path / "report.md").read_text()

    return render


@pytest.fixture
def page(evaluate: Evaluate, rendered: Page) -> str:
    runs = {"ppo": [evaluate("ppo-seed0", 3), evaluate("ppo-seed1", 2)], "grpo": [evaluate("grpo-seed0", 4)] * 2}
    curves = {"ppo": [curve(None, critic=True), curve(2, critic=True, update_s=40)], "grpo": [curve(None), curve(None)]}
    return rendered(SweptAgents(runs=runs, baselines=[evaluate("base_tool_call", 1)], curves=curves, plan=PLAN))


def rows(page: str, name: str) -> list[str]:
    return [line for line in page.splitlines() if line.startswith(f"| `{name}` |")]


def test_scores_by_hand(page: str) -> None:
    # ppo: 3/4 and 2/4, mean 5/8; of the one-hop questions q0 and q1 only q1, once in two seeds; of two hops all.
    assert page.split("\n\n")[2] == PLAN
    scores = rows(page, "ppo")[0]
    assert scores.startswith("| `ppo` | 0.625 [")
    assert scores.endswith("| 0.750 0.500 | 0.250 | 1.000 |")
    assert rows(page, "base_tool_call")[0].endswith("| 0.250 | 0.000 | 0.500 |")
    assert "2 runs with 2 seeds each, 4 test questions" in page


def test_budgets_stand_beside_the_score(page: str) -> None:
    """Four iterations, each of 30 s, and of 60 s with one of ppo's seeds: the table has the mean."""
    header = "| run | exact match | episodes learned from | tokens sampled | seconds | core-seconds | half its gain |"
    assert header in page.split("## Budgets")[1]
    assert rows(page, "ppo")[1] == "| `ppo` | 0.625 | 48 | 3,600 | 180 | 36 | 48 | 48 |"
    assert rows(page, "grpo")[1] == "| `grpo` | 1.000 | 48 | 3,600 | 120 | 36 | 48 | 48 |"
    assert "Runs should have equal episodes learned from. More than 5 % from `ppo`: none." in page


def test_runs_of_unequal_budgets_are_named_wherever_they_are_compared(evaluate: Evaluate, rendered: Page) -> None:
    """grpo learned from 18 episodes where ppo did from 12, in as many seconds; an older version counted no tokens."""
    agents = {"ppo": [evaluate("ppo-seed0", 3)], "grpo": [evaluate("grpo-seed0", 4)]}
    more = [{**row, "update/episodes": 18.0} for row in curve(None)]
    del more[1]["cost/sampled_tokens"]
    plain = SweptAgents(
        runs=agents, baselines=[evaluate("base_tool_call", 1)], curves={"ppo": [curve(None)], "grpo": [more]}, plan=PLAN
    )
    for equal, words, far in [
        ("episodes", "episodes learned from", " (+50 %)"),
        ("tokens", "tokens sampled", " (not known)"),
        ("seconds", "seconds", ""),
    ]:
        page = rendered(dataclasses.replace(plain, equal=equal, references=["ppo", "grpo"]))
        assert rows(page, "grpo")[1] == "| `grpo` | 1.000 | 72 | n/a | 120 | 36 | 72 | 72 |"
        told = f"`grpo`{far}" if far else "none"
        assert f"Runs should have equal {words}. More than 5 % from `ppo`: {told}." in page
        assert f"| agent | less `ppo` | less `grpo`{far} |" in page
        assert page.count(f"| `grpo`{far} | ") == 2 + 3 * (not far), "in both tables of differences"


def test_differences_by_hand(page: str) -> None:
    # grpo less ppo 1 - 5/8, less the baseline 1 - 1/4; ppo less itself is left out.
    assert "| agent | less `ppo` | less `base_tool_call` |" in page
    ppo, grpo, base = (rows(page, name)[at] for name, at in (("ppo", 2), ("grpo", 2), ("base_tool_call", 1)))
    assert ppo.startswith("| `ppo` | n/a | +0.375 [")
    assert "+0.375 [" in grpo
    assert "+0.750 [" in grpo
    assert "-0.375 [" in base
    # Of one hop grpo has 1 and ppo 1/4, of two hops both have everything.
    assert "## Differences from `ppo` by number of hops\n\n| agent | 1 hop | 2 hops |" in page
    grpo, base = rows(page, "grpo")[3], rows(page, "base_tool_call")[2]
    assert re.fullmatch(r"\| `grpo` \| \+0\.750 \[.*\] \| \+0\.000 \[-0\.842, \+0\.842\] \|", grpo.replace("*", ""))
    assert "| -0.250 [" in base.replace("*", "")
    assert "by kind" not in page, "all are of one kind"


def test_training_names_the_first_alarm(page: str) -> None:
    # Four iterations of 20 and 10 s are two minutes, and a share is no time. The last three have .3, .6 and .9.
    # Of the variance .2, .4 and .6 are explained then, where there is a critic. The last validations say .6 and .7.
    # One of ppo's takes twice as long: after two minutes it has made two iterations, of 0 and .3, the others four.
    assert "| run | iterations | sampled exact match | at equal time, 2.0 min |" in page
    assert "| `ppo` | 4 | 0.600 | 0.420 | 0.650 | 0.40 | none, 2 |" in page
    assert "| `grpo` | 4 | 0.600 | 0.600 | n/a | n/a | none, none |" in page


def test_chance_bounds_claims(make_question: Any, make_evaluation: Any, tmp_path: Path, draws: EvaluateParams) -> None:
    """Chance gets none of twelve right, and 1 - .025^(1/12) = .265 at most. Two are not beyond doubt, all are."""
    asked = [make_question(f"q{place}") for place in range(12)]

    def right(name: str, count: int) -> Evaluation:
        return make_evaluation(name, asked, ["Veld"] * (12 - count) + ["Tesk"] * count)

    runs = {"ppo": [right("ppo-seed0", 2)], "grpo": [right("grpo-seed0", 12)]}
    baselines = [right("base_tool_call", 0), right("random", 0), right("oracle", 12)]
    curves = {name: [curve(None)] for name in runs}
    render_sweep(SweptAgents(runs=runs, baselines=baselines, curves=curves, plan=PLAN), asked, tmp_path, draws)
    page = (tmp_path / "report.md").read_text()
    assert "is the floor, and a solver, `oracle`, the ceiling" in page
    assert "which ends at 0.265; above it: `grpo`; not above it: `ppo`, `base_tool_call`." in page
    assert "| agent | less `ppo` | less `base_tool_call` | less `random` |" in page


def test_other_questions_and_aborted_episodes_are_refused(evaluate: Evaluate) -> None:
    whole = evaluate("ppo", 3)
    part = dataclasses.replace(evaluate("grpo", 3), predictions=whole.predictions[1:])
    with pytest.raises(ValueError, match=r"grpo and ppo answered different questions, 3 and 4 .*evaluate both"):
        successes({"ppo": [whole], "grpo": [part]})
    first, *others = whole.trajectories
    cut = dataclasses.replace(part, trajectories=[dataclasses.replace(first, outcome=Outcome.ABORTED), *others])
    with pytest.raises(ValueError, match=r"grpo \(aborted: 1 of 4\): their questions are missing"):
        successes({"ppo": [whole], "grpo": [cut]})
