"""The plan of a sweep, by evaluations written as `evaluate` writes them and by what is shipped."""

import dataclasses
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from agent_r1.evaluation.comparison import Evaluation
from agent_r1.evaluation.plan import SHIPPED, plan, told_apart
from agent_r1.files import METRICS
from agent_r1.params import SHIPPED as PARAMS
from agent_r1.params import Params, RunId, load
from agent_r1.records import Prediction, Question, Trajectory
from agent_r1.tables import write_rows
from benchmarks import foretold

HALF = r"(0\.\d{3}) \[0\.\d\d, \d\.\d\d\]"
Store = Callable[..., Evaluation]


@pytest.fixture
def settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Params:
    monkeypatch.chdir(tmp_path)
    return load(PARAMS)


@pytest.fixture
def store(settings: Params, make_question: Any, make_evaluation: Any) -> Store:
    """Writes an evaluation of the sweep: which of its questions are right, with so many samples of each."""

    def write(
        run: str, seed: int, right: str, *, samples: int = 0, first: int = 0, questions: list[Question] | None = None
    ) -> Evaluation:
        label = RunId(run, seed, "ablations").label
        asked = questions or [make_question(f"q{first + place}") for place in range(len(right) // max(1, samples))]
        times = [each for each in asked for _ in range(max(1, samples))]
        found: Evaluation = make_evaluation(label, times, ["Tesk" if each == "1" else "Veld" for each in right])
        rows = [dataclasses.replace(row, sample=place % max(1, samples)) for place, row in enumerate(found.predictions)]
        folder = settings.places.evaluation(label, "ablations")
        write_rows(folder / "predictions.parquet", rows, Prediction)
        write_rows(folder / "trajectories.parquet", found.trajectories, Trajectory)
        said = {"samples": str(samples), "temperature": "1"} if samples else {}  # none: before there were samples
        (folder / "hashes.json").write_text(json.dumps(found.hashes | said))
        return dataclasses.replace(found, hashes=found.hashes | said)

    return write


def rows(page: str) -> dict[str, list[str]]:
    lines = [line.strip("| ").split(" | ") for line in page.splitlines() if line.startswith("|")]
    return {name: cells for name, *cells in lines[2:]}


def test_what_is_shipped_is_what_the_pages_of_the_ablations_say() -> None:
    """Their means tell how seeds vary, and one answer to one question: all other parts together."""
    said, found = SHIPPED.variances, foretold.evidence(foretold.page("ablations"))
    assert (said.seeds, said.freedom) == pytest.approx((found.seeds, found.freedom), abs=6e-4)
    of_one = found.questions + found.noise
    assert said.questions + said.noise + said.samples == pytest.approx(of_one, abs=2e-3)
    report, costs = ((foretold.ROOT / "docs/ablations" / name).read_text() for name in ("report.md", "costs.md"))
    trained = re.findall(r"^\| `(\w+)` \|(?: [\d.,]+ \|){3} (\d+) \|", report, re.MULTILINE)
    [evaluated] = re.findall(r"^\| evaluation \| (.*) \|$", costs, re.MULTILINE)
    weights = [len(foretold.page("ablations").means[run]) for run, _ in trained]
    assert np.average([int(seconds) for _, seconds in trained], weights=weights) == pytest.approx(
        SHIPPED.training_s, rel=0.01
    )
    answered = [int(device) / 800 for device in re.findall(r"/ (\d+)", evaluated)]
    assert np.average(answered, weights=weights) == pytest.approx(SHIPPED.answer_s, rel=0.01)


def test_without_a_sweep_the_plan_is_by_what_is_shipped(settings: Params) -> None:
    page = plan(settings, 0, 0, 0)
    found = rows(page)
    others = ["one more seed", "twice the seeds", "twice the questions", "twice the samples"]
    assert list(found) == ["3 x 400 x 2", *others]
    assert [cells[2] for cells in found.values()] == ["14.3", "19.0", "28.5", "17.3", "17.3"]
    assert all(re.fullmatch(HALF, cell) for cells in found.values() for cell in cells[:2])
    assert "the shipped ablations of Atlas" in page


def test_the_paragraph_of_a_report_has_the_half_widths_of_the_plan(settings: Params, store: Store) -> None:
    one = store("ppo", 0, "11001000", samples=2)
    score, difference, _ = rows(plan(settings, 1, 4, 2))["1 x 4 x 2"]
    text = told_apart(settings, "", 1, one)
    assert f"for 1 x 4 x 2 seeds, questions and samples: 95 % intervals reach {score} to" in text
    assert f"and {difference} of a difference" in text
    assert SHIPPED.of in text
    two, *others = (
        store(run, seed, right, samples=2)
        for run, seed, right in (("ppo", 1, "10001010"), ("grpo", 0, "11101000"), ("grpo", 1, "10101100"))
    )
    imported = plan(settings, 0, 0, 0, {"ppo": [one, two], "grpo": others})
    assert "2 x 4 x 2" in rows(imported), "as large as they are"
    assert "those of outputs/ablations/evaluate;" in told_apart(settings, "ablations", 2, one)
    store("grpo", 1, "1010")  # greedily: no evidence, and the report is made all the same
    assert SHIPPED.of in told_apart(settings, "ablations", 2, one)


def test_a_sweep_of_before_there_were_samples_is_one_greedy_answer(settings: Params, store: Store) -> None:
    for run, seeds in {"ppo": ["1100", "1110", "1000"], "grpo": ["1110", "1111"], "rloo": ["1100"]}.items():
        for seed, right in enumerate(seeds):
            store(run, seed, right)
    folder = settings.places.training(RunId("ppo", 0, "ablations"))
    folder.mkdir(parents=True)
    (folder / METRICS).write_text(json.dumps({"iteration": 0, "time/rollout_s": 90.0}))
    page = plan(settings, 0, 0, 0)
    assert "those of outputs/ablations/evaluate." in page
    assert "of a run, without evaluating, whose costs are not stored." in page
    assert rows(page)["3 x 4 x 1"][2] == "4.5"
    (settings.places.evaluation("ppo-seed0", "ablations") / METRICS).write_text(
        json.dumps({"cost/evaluation_core_s": 9.0, "cost/evaluation_device_s": 24.0})
    )
    page = plan(settings, 0, 0, 0)  # 90 s and 4 answers of 6 s, by 3 seeds
    assert "of a run, with evaluating." in page
    assert [rows(page)[name][2] for name in ("3 x 4 x 1", "twice the questions")] == ["5.7", "6.9"]
    with pytest.raises(ValueError, match="one answer to each question, which says nothing of 8; evaluate its runs"):
        plan(settings, 0, 0, 8)


def test_refusals(settings: Params, store: Store) -> None:
    for run, seed in (("ppo", 0), ("ppo", 1), ("grpo", 0)):
        store(run, seed, "1100")
    store("grpo", 1, "11", first=2)
    with pytest.raises(ValueError, match="grpo-seed1 and ppo-seed0 answered different questions"):
        plan(settings, 0, 0, 0)
    store("grpo", 1, "11001100", samples=2)
    with pytest.raises(ValueError, match=r"grpo-seed0 \(greedy decoding\) and grpo-seed1 \(2 samples of each at temp"):
        plan(settings, 0, 0, 0)


def test_one_question_does_not_vary(settings: Params, store: Store) -> None:
    with pytest.raises(ValueError, match="one question does not vary; plan with `agent-r1 plan --questions 100`"):
        plan(settings, 0, 1, 0)
    for run in ("ppo", "grpo"):
        for seed in range(3):
            store(run, seed, "1")
    with pytest.raises(ValueError, match=r"\[\(3, 1\), \(3, 1\)\] are .*add to ablations.*evaluate\.questions, then"):
        plan(settings, 0, 0, 0)
