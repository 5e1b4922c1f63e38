"""The page, from four hand-made questions and three agents."""

import dataclasses
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from agent_r1.evaluation.comparison import Evaluation, differences_of_setting
from agent_r1.evaluation.runs_report import PURPOSES, add_notes, render, write_costs, write_curves
from agent_r1.evaluation.statistics import Interval
from agent_r1.files import METRICS, write_text
from agent_r1.params.stages import EvaluateParams
from agent_r1.records import GREEDY, Question
from flows.commands import look
from tests.cases import tables

PLAN = "Planned for 1 x 4 x 1."
CURVES = {"ppo": [{"iteration": i, "rollout/success": 0.2 * i, "reward/total": 0.1 * i} for i in range(4)]}


@pytest.fixture
def questions(make_question: Any) -> list[Question]:
    return [make_question(f"q{i}", hops=1 + i // 2, kind="bridge" if i else "lookup") for i in range(4)]


@pytest.fixture
def evaluations(questions: list[Question], make_evaluation: Any) -> list[Evaluation]:
    """ppo answers three of four, the baselines one and none."""

    right = {"ppo": 3, "base_tool_call": 1, "naive_rag": 0}
    return [make_evaluation(name, questions, ["Veld"] * (4 - n) + ["Tesk"] * n) for name, n in right.items()]


@pytest.fixture
def rendered(questions: list[Question], decode: Any, tmp_path: Path, draws: EvaluateParams) -> Callable[..., str]:
    def render_page(evaluations: list[Evaluation], curves: dict[str, Any]) -> str:
        render(evaluations, curves, questions, decode, tmp_path, draws, PLAN)
        return (tmp_path / "report.md").read_text()

    return render_page


@pytest.fixture
def page(evaluations: list[Evaluation], rendered: Any) -> str:
    return rendered(evaluations, CURVES)


def test_the_terminal_shows_the_first_table_and_where_to_look_next(
    page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    own = Path(__file__).parents[2] / "params.yaml"
    (tmp_path / "params.yaml").write_text(own.read_text())
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=r"outputs/report/report\.md does not exist; the stage `report` writes it"):
        look.results()
    (tmp_path / "outputs/report").mkdir(parents=True)
    (tmp_path / "outputs/report/report.md").write_text(page)
    look.results(whole=True)
    shown = [line.split() for line in capsys.readouterr().out.splitlines()]
    cells = [line[:4] for line in shown if "agent" in line[:1] or "ppo" in line[:1]]
    assert cells == [["agent", "all", "1", "hop"], ["ppo", "0.750", "[0.25,", "1.00]"]]
    look.results()
    shown = [line.split() for line in capsys.readouterr().out.splitlines()]
    cells = [line for line in shown if "agent" in line[:1] or "ppo" in line[:1]]
    assert cells == [["agent", "all"], ["ppo", ".750", "±.38"]]
    assert ["•", "the", "whole", "report:", "outputs/report/report.md;"] in [line[:5] for line in shown]
    assert not [line for line in shown if "lookup" in line], "that is of the page's other tables"


def test_tables_by_hand(page: str) -> None:
    # ppo is right on q1, q2, q3: .5 of the one-hop questions q0 and q1, all of the two-hop questions.
    assert page.split("\n\n")[2] == PLAN
    assert "| agent | all | 1 hop | 2 hops |" in page
    assert "| `ppo` | 0.750 [" in page
    assert "| 0.500 [0.00, 1.00] | 1.000 [0.16, 1.00] |" in page  # .025^(1/2)
    assert "| `naive_rag` | 0.000 [0.00, 0.60] | 0.000 [0.00, 0.84] | 0.000 [0.00, 0.84] |" in page
    assert "### Tool calls per question" in page
    assert "| agent | all | bridge | lookup |" in page


def test_a_mixture_is_scored_by_data_set(
    evaluations: list[Evaluation], questions: list[Question], tmp_path: Path, decode: Any, draws: EvaluateParams
) -> None:
    """ppo is right on q1 of atlas's q0 and q1, and on both of musique's."""
    mixed = [*questions[:2], *(dataclasses.replace(question, dataset="musique") for question in questions[2:])]
    render(evaluations, CURVES, mixed, decode, tmp_path, draws, PLAN)
    table = (tmp_path / "report.md").read_text().split("## Scores by data set\n\n### Exact match\n\n")[1]
    assert table.startswith("| agent | all | atlas | musique |")
    assert "| `ppo` | 0.750 [0.25, 1.00] | 0.500 [0.00, 1.00] | 1.000 [0.16, 1.00] |" in table


def test_tokens_are_a_table_with_one_decimal(page: str, evaluations: list[Evaluation]) -> None:
    rows = page.split("## Tokens per question")[1].split("\n## ")[0]
    sampled = [prediction.tokens_sampled for prediction in evaluations[0].predictions]
    assert "| agent | read | sampled |" in rows
    (row,) = [line for line in rows.splitlines() if line.startswith("| `ppo` |")]
    assert f" {sum(sampled) / 4:.1f} [" in row


def test_differences_are_paired_and_signed(page: str) -> None:
    # ppo less base: right on q1 and q2 where base is not, 2 of 4; and the other way round.
    assert "| agent | less `ppo` | less `base_tool_call` |" in page
    (ppo,) = [line for line in page.splitlines() if line.startswith("| `ppo` | n/a |")]
    assert "+0.500 [" in ppo
    (base,) = [line for line in page.splitlines() if line.startswith("| `base_tool_call` |") and "n/a" in line]
    assert "-0.500 [" in base
    # Four differences, of three agents from two; the widest two reach .5 to either side at most.
    said = re.search(r"would make 0\.2 of these 4 bold\. Half .* reach at most (0\.\d+) to either", page)
    assert said
    assert 0 < float(said[1]) <= 0.5


def test_other_hashes_and_questions_are_said_on_the_page(evaluations: list[Evaluation], rendered: Any) -> None:
    assert "Not measured alike" not in rendered(evaluations, CURVES)
    other = dataclasses.replace(evaluations[2], hashes={**evaluations[2].hashes, "prompt": "other"})
    assert differences_of_setting([*evaluations[:2], other]) == {"prompt": [["ppo", "base_tool_call"], ["naive_rag"]]}
    fewer = dataclasses.replace(evaluations[1], predictions=evaluations[1].predictions[:2])
    page = rendered([evaluations[0], fewer, other], CURVES)
    assert "> **Not measured alike.**" in page
    assert "> - prompt: `ppo`, `base_tool_call` / `naive_rag`" in page
    assert "> - questions asked: `ppo`, `naive_rag` / `base_tool_call`" in page
    assert "| `base_tool_call` | n/a | n/a |" in page, "other questions are not compared"


def test_aborted_episodes_stand_beside_the_score(
    evaluations: list[Evaluation], make_evaluation: Any, questions: list[Question], rendered: Any
) -> None:
    """ppo is right on two of the three questions whose episodes came to an end."""
    cut = make_evaluation("ppo", questions, ["Tesk", None, "Tesk", "Veld"])
    page = rendered([cut, *evaluations[1:]], CURVES)
    assert "| `ppo` (aborted: 1 of 4) | 0.667 [" in page
    assert "> **Cut short by the world**, and in no score: ppo (aborted: 1 of 4). Evaluate these again." in page
    assert "Not measured alike" not in page


def test_several_samples_have_a_table(questions: list[Question], make_evaluation: Any, rendered: Any) -> None:
    """Of three samples to each of four questions 3, 0, 2, 1 are right: pass@2 is 1, 0, 1, 2/3, pass^2 1, 0, 1/3, 0."""
    answers = ["Tesk"] * 3 + ["Veld"] * 3 + ["Tesk", "Veld", "Tesk", "Veld", "Tesk", "Veld"]
    asked = [question for question in questions for _ in range(3)]
    agents = [make_evaluation(name, asked, answers, samples="3", temperature="1") for name in ("ppo", "base_tool_call")]
    greedy = make_evaluation("ppo", questions, ["Tesk", "Veld", "Tesk", "Tesk"]).predictions
    beside = [dataclasses.replace(each, sample=GREEDY) for each in greedy]
    agents[0] = dataclasses.replace(agents[0], predictions=[*agents[0].predictions, *beside])
    page = rendered(agents, CURVES)
    assert "| agent | all | greedily | 1 hop |" in page
    assert re.search(r"\| `ppo` \| 0.500 \[\S+ \S+ \| 0.750 \[", page)
    assert re.search(r"\| `base_tool_call` \| 0.500 \[\S+ \S+ \| n/a \|", page)
    assert "4 test questions, 3 samples of each at temperature 1. Brackets" in page
    assert "| agent | pass@2 | pass@3 | pass^2 | pass^3 |" in page
    [row] = re.findall(r"## Several samples\n(?:.*\n)*?\| `ppo` \| (.*) \|", page)
    assert [cell.split()[0] for cell in row.split(" | ")] == ["0.667", "0.750", "0.333", "0.250"]
    assert "| `ppo` | 0.500 [" in page


def test_a_curve_is_the_mean_of_the_seeds_that_have_it(tmp_path: Path) -> None:
    """Of ppo's two seeds one is an iteration ahead; short has ended before."""
    two = [[{"iteration": i, "rollout/success": value} for i in range(stop)] for stop, value in ((3, 0.2), (2, 0.4))]
    write_curves(tmp_path, {"ppo": two, "short": [[{"iteration": 0, "rollout/success": 1.0, "reward/total": -1.0}]]})
    success = json.loads((tmp_path / "success.json").read_text())
    assert [[row[name] for name in ("iteration", "ppo", "short")] for row in success] == [[0, 0.3, 1.0], [1, 0.3, None]]
    assert json.loads((tmp_path / "reward.json").read_text()) == [{"iteration": 0, "ppo": None, "short": -1.0}]


def test_costs_stand_beside_what_they_bought(tmp_path: Path) -> None:
    """Of all agents the first has two seeds, the second no evaluation that says, the third an older version's start."""
    spent = {f"cost/{purpose}_{kind}_s": 0.0 for purpose in PURPOSES for kind in ("core", "device")}
    spent |= {"cost/peak_gib": 1.5, "cost/gpu_peak_gib": 0.0, "cost/sampled_tokens": 4000.0, "update/tokens": 1000.0}
    rows = [spent, spent | {"cost/sampling_core_s": 1800.0, "cost/sampling_device_s": 900.0, "cost/peak_gib": 2.0}]
    rows[1] |= {"cost/learning_core_s": 3600.0, "cost/learning_device_s": 1800.0, "cost/sampled_tokens": 8000.0}
    written = {
        "ppo": rows,
        "ppo_of_seed_1": [{**row, "update/tokens": 2000.0} for row in rows],
        "ppo_evaluation": [{"cost/evaluation_core_s": 60.0, "cost/evaluation_device_s": 30.5, "cost/peak_gib": 1.0}],
        "resumed": [{"update/tokens": 1000.0}, *rows],
    }
    for name, lines in written.items():
        write_text(tmp_path / name / METRICS, "".join(json.dumps(line) + "\n" for line in lines))
    seeds, evaluated = (tmp_path / "ppo", tmp_path / "ppo_of_seed_1"), tmp_path / "ppo_evaluation"
    folders = {
        "ppo": [(seed, evaluated) for seed in seeds],
        "unlucky": [(seeds[0], tmp_path / "nowhere")],
        "old": [(tmp_path / "resumed", evaluated)],
    }
    success = {"ppo": 0.75, "unlucky": 0.25, "old": 0.5, "base_tool_call": 0.25}
    scores = {name: Interval(mean=mean, low=0.0, high=1.0) for name, mean in success.items()}
    write_costs(tmp_path, folders, scores, price=2.0)
    *_, table = (tmp_path / "costs.md").read_text().split("\n\n")
    found = {cells[0]: cells[1:] for cells in (re.findall(r"[^|]+(?= \|)", line) for line in table.splitlines())}
    found = {name.strip(): [cell.strip() for cell in cells] for name, cells in found.items()}
    for name, cells in tables(Path(__file__).parent)["costs"].items():
        assert found[name][: len(cells)] == cells, name
    alone = {"ppo": scores["ppo"]} | {name: scores[name] for name in folders}
    write_costs(tmp_path, folders, alone, 0.0, ["2 cores of EPYC, AVX2"])
    page = (tmp_path / "costs.md").read_text()
    assert "| money | n/a | n/a | n/a |" in page
    assert "| per point | none | none | none |" in page
    assert page.endswith(" |\n\nTrained on 2 cores of EPYC, AVX2.\n")


def test_notes_are_a_line_of_the_page_and_without_notes_it_stays(tmp_path: Path) -> None:
    page = tmp_path / "report.md"
    page.write_text("# Report\n")
    add_notes(tmp_path, "Settings changed", [])
    assert page.read_text() == "# Report\n"
    add_notes(tmp_path, "Settings changed", ["ppo from iteration 2 on a|b", "grpo from iteration 0 on x"])
    line = "Settings changed: ppo from iteration 2 on a\\|b; grpo from iteration 0 on x."
    assert page.read_text() == f"# Report\n\n{line}\n"
