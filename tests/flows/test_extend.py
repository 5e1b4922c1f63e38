"""Own code and data from `agent-r1 new` to five episodes of `agent-r1 try`, and the faults that are met on the way."""

import json
import os
import re
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
import yaml

from agent_r1 import params
from agent_r1.faults import TooManyAborted
from agent_r1.params import Params
from agent_r1.params.places import RunId
from agent_r1.params.sections import override, validated
from agent_r1.records import Question
from agent_r1.tables import read_rows
from flows.commands.execute import index, prepare
from flows.commands.look import try_run
from flows.new import begin
from flows.overlay import switch
from flows.tryout import play
from flows.warm_start import warm_start
from tests.answering import Heard, Said, answering
from tests.cases import cases
from tests.fixtures import ROOT

KINDS = {"tool": "years", "reward": "brevity", "world": "higher", "data": "faq"}
RUNS = {"tool": "ppo_years", "reward": "ppo_brevity", "world": "grpo", "data": "grpo"}
SMALL = {
    "prepare": {"atlas": {"train_questions": 20, "dev_questions": 4, "test_questions": 4}},
    "env": {"max_steps": 4, "max_tokens": 500, "max_action_tokens": 64},
}


@pytest.fixture
def clone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    shipped = params.load(ROOT / "params.yaml").model_dump(mode="json", by_alias=True)
    settings = validated(Params, override(shipped, SMALL), "small")
    (tmp_path / "params.yaml").write_text(yaml.safe_dump(settings.model_dump(mode="json", by_alias=True)))
    for file in ("pyproject.toml", "prefect.toml"):
        shutil.copy(ROOT / file, tmp_path)
    for code in ("agent_r1", "flows"):
        (tmp_path / code).symlink_to(ROOT / code)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    for name in KINDS.values():
        monkeypatch.delitem(sys.modules, name, raising=False)
    return tmp_path


@pytest.fixture
def begun(clone: Path) -> Path:
    for kind, name in KINDS.items():
        begin(kind, name)
    return clone


def run(*command: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run([sys.executable, "-m", *command], env=environment, capture_output=True, text=True)


@pytest.mark.slow  # two suites of its own
def test_template_comes_with_a_test_that_passes_and_can_fail(begun: Path) -> None:
    tests = [f"tests/test_{name}.py" for name in KINDS.values()]
    passed = run("pytest", *tests)
    assert (passed.returncode, "6 passed" in passed.stdout) == (0, True), passed.stdout
    written = [*tests, *(path.name for path in begun.glob("*.py"))]
    assert run("ruff", "check", "--no-cache", *written).stdout == "All checks passed!\n"
    style = ("--config", str(ROOT / "pyproject.toml"), "--no-cache", "--check")
    assert run("ruff", "format", *style, *written).returncode == 0
    for name in ("years", "brevity", "higher"):
        file = begun / f"{name}.py"
        file.write_text(file.read_text().replace("second)", "2 * second)").replace("1 - ", "2 - ").replace("==", "!="))
    shutil.copy("data/raw/faq/train.jsonl", "data/raw/faq/test.jsonl")
    failed = run("pytest", *tests)
    assert [name for name in KINDS.values() if f"FAILED tests/test_{name}.py" not in failed.stdout] == []


@cases("kind, name, message")
def test_name_that_is_taken_or_cannot_be_used_is_refused(kind: str, name: str, message: str, clone: Path) -> None:
    begin("tool", "years")
    before = {path: path.read_bytes() for path in clone.rglob("*") if path.is_file()}
    with pytest.raises(ValueError, match=message):
        begin(kind, name)
    assert {path: path.read_bytes() for path in clone.rglob("*") if path.is_file()} == before


def lay(overlay: str, model: Path) -> None:
    """Switches to an overlay and makes all that is made before a training."""
    switch(overlay)
    prepare()
    index()
    start = params.load().places.warm_start
    start.parent.mkdir(parents=True)
    start.symlink_to(model)


@pytest.mark.parametrize("kind", KINDS)
def test_try_plays_five_episodes_of_new_code(kind: str, begun: Path, tiny_model: Path) -> None:
    overlay = begun / f"overlays/{KINDS[kind]}.yaml"
    overlay.write_text(overlay.read_text().replace("max_tokens: 1024", "max_tokens: 500"))  # as the tiny model reads
    lay(KINDS[kind], tiny_model)
    *episodes, ending, reason = play(RunId(RUNS[kind]), "", None)
    assert len(episodes) == {"data": 3}.get(kind, 5)
    assert re.match(r"\d+ of \d+ actions are neither a call nor an answer, the first .* env\.examples, ", reason)
    assert ending.startswith(f"the warm start: 0 of {len(episodes)} right")
    assert all(episode.startswith("question ") for episode in episodes)
    earned = [episode.strip().splitlines()[-1].split("= ")[1] for episode in episodes]
    expected = {"reward": r"agent_r1 -\S+ x 1 \+ brevity \S+ x 0.2", "world": "env 0 x 1"}
    assert [line for line in earned if not re.fullmatch(expected.get(kind, r"agent_r1 -\S+ x 1"), line)] == []
    if kind == "tool":
        first = next(play(RunId("ppo_years"), "", None, episodes=1, seed=1, prompt=True))
        assert not episodes[0].startswith(first.partition("\n")[0]), "another seed draws another question"
        assert "\nprompt     " in first
        assert "\nsentence   " in first


def test_world_is_learned_from_its_conversations_and_from_nothing_else(begun: Path) -> None:
    overlay = begun / "overlays/higher.yaml"
    overlay.write_text(overlay.read_text().replace("steps: 100", "steps: 1"))
    switch("higher")
    prepare()
    index()
    warm_start()
    assert (params.load().places.warm_start / "model.safetensors").exists()
    overlay.write_text(re.sub("conversations: [^,]*, ", "", overlay.read_text()))
    switch("higher")
    with pytest.raises(ValueError, match=r"nobody demonstrates these data sets; set warm_start\.conversations, or"):
        warm_start()


def test_endpoint_plays_and_one_that_is_down_is_named_at_once(begun: Path, tiny_model: Path) -> None:
    def search_and_answer(heard: Heard) -> Said:
        call = '<tool_call>{"name": "guess", "arguments": {"number": 38}}</tool_call>'
        text = call if len(heard.body["messages"]) == 2 else "<answer>done</answer>"
        return 200, json.dumps({"choices": [{"message": {"content": text}, "finish_reason": "stop"}]}).encode()

    lay("higher", tiny_model)
    with answering(search_and_answer) as url:
        *episodes, ending = play(RunId("grpo"), "big", url)
        assert ending.startswith(f"big at {url}: ")
        assert [episode for episode in episodes if "guess      38\nreply      " not in episode] == []
    with pytest.raises(ValueError, match="--endpoint is where --model NAME acts; give its name"):
        try_run("grpo", endpoint=url)
    with pytest.raises(TooManyAborted, match=f"the endpoint {url} does not answer"):
        list(play(RunId("grpo"), "big", url))


@cases("file, content, module, message")
def test_missing_module_is_named_early(file: str | None, content: str, module: str, message: str, clone: Path) -> None:
    if file:
        (clone / file).write_text(content)
    laid = yaml.safe_load((clone / "params.yaml").read_text())
    laid["runs"] = {"ppo": {"env": {"tools": {"functions": {"years": {"module": module}}}}}}
    laid |= {
        "repro_runs": ["ppo"],
        "ablations": laid["ablations"] | {"runs": ["ppo"], "closer": {"runs": [], "seeds": []}},
    }
    (clone / "params.yaml").write_text(yaml.safe_dump(laid | {"ablations": laid["ablations"] | {"references": []}}))
    with pytest.raises(ValueError, match=rf"env\.tools\.functions\.years: {message}"):
        list(play(RunId("ppo"), "", None))


def test_table_of_200_questions_becomes_files_that_are_prepared(clone: Path) -> None:
    begin("data", "faq")
    rows = [f'"Who wrote book {number}, then?",Mara Quill,Low Tide|Mara Quill' for number in range(200)]
    Path("questions.csv").write_text("\n".join(["question,answer,gold_titles", *rows]))
    [code] = re.findall(r"```python\n(.*?)```", (ROOT / "docs/own_data.md").read_text(), re.DOTALL)
    exec(compile(code, "docs/own_data.md", "exec"), {})
    overlay = Path("overlays/faq.yaml")
    overlay.write_text(re.sub(r"(train|dev|test)\.jsonl", r"\1.csv", overlay.read_text()))
    switch("faq")
    prepare()
    questions = read_rows(params.load().places.questions, Question)
    assert Counter(question.split for question in questions) == {"train": 130, "dev": 20, "test": 50}
    assert {tuple(question.gold_titles) for question in questions} == {("Low Tide", "Mara Quill")}
