"""Rollouts of other trainers, as they are read, stored, looked at and written again.

The files are of TRL 1.16, verifiers 0.1.9 and 0.4.0 and Harbor 0.24 themselves, the others by hand.
"""

import json
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from mlflow import MlflowClient
from transformers import PreTrainedTokenizerFast

from agent_r1 import params
from agent_r1.evaluation.plan import plan
from agent_r1.imported.exported import export
from agent_r1.imported.store import Choices, read_about, rows_of, tokens_in
from agent_r1.inspection.health import audit
from agent_r1.inspection.printed import compare_labels
from agent_r1.inspection.replay import configurations, replay
from agent_r1.inspection.stored import open_run
from agent_r1.inspection.viewer import view
from agent_r1.params.places import RunId
from agent_r1.records import Question, Source, Trajectory
from agent_r1.tables import read_rows
from flows.commands import app
from flows.imported import decide_imported, evaluations_of, import_runs, imported_runs, report_imported
from tests.cases import cases
from tests.fixtures import ROOT

FILES = Path(__file__).parent / "files"
EXACT = ("traces", "nemo_gym", "atif")
IMPORTED = Path("outputs/imported")
PAGE = ROOT / "docs/imported.md"


@pytest.fixture
def tokenizer(tmp_path: Path, tiny_tokenizer: PreTrainedTokenizerFast) -> str:
    tiny_tokenizer.save_pretrained(tmp_path / "tiny")
    return str(tmp_path / "tiny")


@pytest.fixture(autouse=True)
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lay_store: Any) -> None:
    shutil.copy(ROOT / "params.yaml", tmp_path)
    lay_store(tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("flows.commands.look.run_stage", lambda stage, **arguments: stage(**arguments))


def stored(name: str) -> list[Trajectory]:
    folder = IMPORTED / name
    return [row for step in read_about(folder).steps for row in read_rows(rows_of(folder, step), Trajectory)]


def lay(folder: Path, files: dict[str, Any]) -> None:
    folder.mkdir(parents=True)
    for name, rows in files.items():
        text = rows if isinstance(rows, str) else "".join(json.dumps(row) + "\n" for row in rows)
        (folder / name).write_text(text)


@cases("name, choices, about, first")
def test_a_format_keeps_rows_and_fields(
    name: str, choices: dict[str, str], about: dict[str, Any], first: dict[str, Any], tokenizer: str
) -> None:
    import_runs(str(FILES / name), "mine", Choices("", **choices), tokenizer if name in EXACT else "")
    folder = IMPORTED / "mine"
    assert read_about(folder).model_dump(include=set(about)) == about
    rows = stored("mine")
    assert len(rows) == about["rows"]
    assert sum(row.aborted for row in rows) == about["ungraded"]
    trajectory = rows[0]
    assert trajectory.steps[-1].rewards == pytest.approx(first["rewards"])
    assert [call.tool for step in trajectory.steps for call in step.calls] == first["calls"]
    questions = {row.question_id: row for row in read_rows(folder / "questions.parquet", Question)}
    assert questions[trajectory.question_id].answers == first["answers"]
    assert trajectory.answer == first["answer"]
    text = tokens_in(folder).decode(trajectory.token_ids.tolist())
    assert first["answer"] in text
    sampled = {Source.ACTION} if name in EXACT else {Source.DEMONSTRATION}
    spans = [trajectory.source[step.action_start : step.action_stop] for step in trajectory.steps]
    assert {*np.concatenate(spans).tolist()} == sampled


def test_ids_of_all_formats_make_one_context_that_grows(tokenizer: str) -> None:
    """Each has the actions `search capital of Veld` (5 ids) and `Tesk` (2) of one conversation."""
    for name in EXACT:
        import_runs(str(FILES / name), name, Choices(""), tokenizer)
        trajectory = stored(name)[0]
        assert trajectory.context_starts == [0]
        assert [step.action_stop - step.action_start for step in trajectory.steps] == [5, 2]
        assert trajectory.logprobs[trajectory.action_mask][:5].tolist() == [-0.5] * 5
        between = trajectory.ids(trajectory.replies[0])
        assert tokens_in(IMPORTED / name).decode(between) == " tool Tesk assistant "


@cases("files, options, message")
def test_bad_input_is_named_and_nothing_is_imported(
    files: dict[str, Any], options: dict[str, str], message: str, tokenizer: str
) -> None:
    lay(Path("given"), files)
    words = [f"--{name}={tokenizer if name == 'tokenizer' else value}" for name, value in options.items()]
    with pytest.raises((ValueError, FileNotFoundError), match=message):
        app(["import", "given", "--as", "mine", *words], standalone_mode=False)
    assert not [path for path in IMPORTED.rglob("*") if path.is_file()]


def test_a_missing_reward_is_counted_and_never_zero() -> None:
    rows = [{"input": f"q{n}", "output": "a", "score": score, "step": 1} for n, score in enumerate((1, None, 0))]
    lay(Path("given"), {"1.jsonl": [*rows, {"input": "q3", "output": "a", "score": float("nan"), "step": 1}]})
    import_runs("given", "mine", Choices(""), "")
    assert read_about(IMPORTED / "mine").ungraded == 2
    assert json.loads((IMPORTED / "mine/scores.json").read_text())["success"] == 0.5
    assert json.loads((IMPORTED / "mine/metrics.jsonl").read_text())["reward/total"] == 0.5
    shutil.copytree("given", "again")
    import_runs("again", "other", Choices(""), "")
    with pytest.raises(ValueError, match=r"cut episodes short.*aborted: 2 of 4"):
        compare_labels(params.load(), "imported/mine", "imported/other")


def test_an_import_never_replaces_another() -> None:
    import_runs(str(FILES / "openai"), "mine", Choices(""), "")
    with pytest.raises(ValueError, match=r"outputs/imported/mine is there already; take another --as"):
        import_runs(str(FILES / "openai"), "mine", Choices(""), "")
    with pytest.raises(ValueError, match="'my run' is no label"):
        import_runs(str(FILES / "openai"), "my run", Choices(""), "")


def test_messages_come_back_as_they_were() -> None:
    import_runs(str(FILES / "openai"), "mine", Choices(""), "")
    assert export(IMPORTED / "mine", "openai", Path("back.jsonl")) == 3
    given = (FILES / "openai/rollouts.jsonl").read_text().splitlines()
    assert [*map(json.loads, Path("back.jsonl").read_text().splitlines())] == [*map(json.loads, given)]


@pytest.mark.parametrize("name", EXACT)
def test_a_trajectory_of_atif_comes_back_as_it_was(name: str, tokenizer: str) -> None:
    import_runs(str(FILES / name), "mine", Choices(""), tokenizer)
    export(IMPORTED / "mine", "atif", Path("back.jsonl"))
    import_runs("back.jsonl", "again", Choices("atif"), tokenizer)
    for row, again in zip(stored("mine"), stored("again"), strict=True):
        assert again.token_ids.tolist() == row.token_ids.tolist()
        assert again.logprobs.tolist() == row.logprobs.tolist()
        assert again.steps[-1].rewards == row.steps[-1].rewards
    if name == "atif":
        back = [json.loads(line) for line in Path("back.jsonl").read_text().splitlines()]
        given = [json.loads(path.read_text()) for path in sorted((FILES / "atif").rglob("trajectory.json"))]
        assert [{**document, "extra": None} for document in back] == [{**one, "extra": None} for one in given]


def lay_seeds() -> dict[str, np.ndarray]:
    """Three seeds of two runs at two steps of eight questions, and the success [S, N] of the last."""
    rng = np.random.default_rng(0)
    hits = {run: rng.random((3, 2, 8)) < chance for run, chance in (("grpo", 0.3), ("ppo", 0.8))}
    for run, of_run in hits.items():
        for seed, steps in enumerate(of_run):
            files = {
                f"{step}.jsonl": [
                    {"input": f"q{question}", "output": f"a{int(hit)}", "score": float(hit), "step": step}
                    for question, hit in enumerate(row)
                ]
                for step, row in enumerate(steps, start=1)
            }
            lay(Path(f"given/{run}-{seed}-verl/dumps"), files)
    return {run: of_run[:, 1].astype(float) for run, of_run in hits.items()}


def test_runs_of_three_seeds_are_compared_planned_reported_and_tracked() -> None:
    hits = lay_seeds()
    for run in hits:
        import_runs(f"given/{run}-*-verl/dumps", f"{run}-seed*", Choices(""), "")
    settings = params.load()
    comparison = compare_labels(settings, "imported/ppo-seed1", "imported/grpo-seed1")
    assert comparison.a == "imported/ppo-seed1 (not token-exact)"
    [success, *others] = comparison.measured
    assert success.a.mean == pytest.approx(hits["ppo"][1].mean())
    assert success.difference.mean == pytest.approx((hits["ppo"][1] - hits["grpo"][1]).mean())
    assert "tokens_sampled" not in [row.measure for row in others]
    runs = imported_runs(settings, ["grpo-*", "imported/ppo-seed*"])
    assert [run.word for run in runs["ppo"]] == [f"imported/ppo-seed{seed}" for seed in range(3)]
    page = plan(settings, 0, 0, 0, evaluations_of(settings, runs))
    assert "3 x 8 x 1" in page
    gap = hits["ppo"].mean() - hits["grpo"].mean()
    assert f"`ppo` less `grpo`: {gap:+.3f}, told apart with" in page
    report_imported(["grpo-*", "ppo-*"])
    report = Path("outputs/report_imported/report.md").read_text()
    means = " ".join(f"{mean:.3f}" for mean in hits["ppo"].mean(axis=1))
    assert re.search(rf"\| `ppo` \| {hits['ppo'].mean():.3f} \[.*\] \| {means} \|", report)
    assert "imported text, not token-exact" in report
    decision = decide_imported("imported/ppo-seed0", "imported/grpo-seed0", anyway=False)
    assert decision.challenger_success == pytest.approx(hits["ppo"][0].mean())
    assert decision.only_challenger_right == int((hits["ppo"][0] > hits["grpo"][0]).sum())
    view(RunId.meant("imported/ppo-seed0"))
    assert (IMPORTED / "ppo-seed0/view.html").exists()
    client = MlflowClient("sqlite:///.tracking/mlflow.db")
    tracked = client.get_run((IMPORTED / "ppo-seed0/mlflow_run_id").read_text())
    assert tracked.data.metrics["final/success"] == pytest.approx(hits["ppo"][0].mean(), abs=5e-5)
    assert tracked.data.params["engine"] == "verl: imported text, not token-exact"
    curve = client.get_metric_history(tracked.info.run_id, "rollout/success")
    assert [point.step for point in curve] == [1, 2]
    traces = client.search_traces(locations=[tracked.info.experiment_id], run_id=tracked.info.run_id)
    assert len(traces) == 16


def test_health_counts_what_an_imported_reward_lost() -> None:
    """Of two calls, one is no JSON; the other episode earns 1, this one 0: half the episodes lose a reward of 1."""
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{"}}
    broken = {"role": "assistant", "content": None, "tool_calls": [call]}
    whole = {"role": "assistant", "content": "a"}
    lay(Path("given"), {"a.jsonl": [{"messages": [broken], "reward": 0}, {"messages": [whole], "reward": 1}]})
    import_runs("given", "mine", Choices(""), "")
    settings = params.load()
    run, config = open_run(settings, RunId.meant("imported/mine"))
    [kind] = audit(run, config.credit, settings.env.max_tokens)
    assert (kind.kind, kind.share, kind.reward_lost, kind.success_lost) == ("malformed action", 0.5, 0.5, 0.5)


def test_a_replay_needs_ids_and_another_configuration(tokenizer: str) -> None:
    settings = params.load()
    import_runs(str(FILES / "openai"), "text", Choices(""), "")
    with pytest.raises(ValueError, match=r"text, not token-exact; a replay needs ids and logprobs of each action"):
        configurations(settings, RunId.meant("imported/text"), ["grpo"], [])
    import_runs(str(FILES / "nemo_gym"), "exact", Choices(""), tokenizer)
    run = RunId.meant("imported/exact")
    with pytest.raises(ValueError, match=r"name runs of params\.yaml: --as grpo"):
        configurations(settings, run, [], [])
    with pytest.raises(ValueError, match="ppo has a critic or a reference"):
        configurations(settings, run, ["ppo"], [])
    [replayed] = replay(settings, run, configurations(settings, run, ["grpo", "rloo"], []))
    grpo, rloo = (one.metrics for one in replayed.replays)
    assert grpo["reward/total"] == 0.5
    assert rloo["advantage/abs_max"] == pytest.approx(1.0)  # rewards 1 and 0: each less the other one's


@pytest.mark.slow  # the page's commands, a process each
def test_the_page_is_walked(tokenizer: str) -> None:
    """Every import of the page, with the small files in place of a reader's."""
    lines = re.findall(r"^agent-r1 (import [^*]*?)$", PAGE.read_text(), re.MULTILINE)
    names = []
    for line in lines:
        words = line.replace("'", "").split()
        name = words[words.index("--as") + 1]
        words[1] = str(FILES / name)
        if "--tokenizer" in words:
            words[words.index("--tokenizer") + 1] = tokenizer
        app(words, standalone_mode=False)
        names.append(name)
    assert sorted(names) == sorted(path.name for path in FILES.iterdir())
