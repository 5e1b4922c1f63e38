"""The command line as a whole: its help, its completion, and what is no command."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from typer.main import get_command

from agent_r1 import params
from agent_r1.files import write_text
from flows import commands
from flows.commands.look import results
from flows.commands.options import in_one_word
from tests.cases import cases
from tests.fixtures import ROOT, Inside, WriteParams


def typed(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "flows", *arguments],
        cwd=ROOT,
        env={**os.environ, "TERMINAL_WIDTH": "80", **environment},
        capture_output=True,
        text=True,
        check=False,
    )


def completed(line: str) -> list[str]:
    variables = {"_AGENT_R1_COMPLETE": "complete_bash", "COMP_WORDS": line, "COMP_CWORD": str(line.count(" "))}
    return typed(**variables).stdout.split()


def test_results_need_a_report_and_make_one_page(tmp_path: Path, write_params: WriteParams, inside: Inside) -> None:
    write_params(tmp_path, {})
    with inside(tmp_path):
        for sweep, command in ((None, "agent-r1 pipeline"), ("ablations", "agent-r1 pipeline --sweep ablations")):
            with pytest.raises(ValueError, match=f"at the end of `{command}`"):
                results(sweep)
        write_text(params.load().places.report() / "report.md", "# Report\n\n4 agents.\n")
        results(html=tmp_path / "to/send.html")
        assert "<h1>Report</h1>\n<p>4 agents.</p>" in (tmp_path / "to/send.html").read_text()
        write_text(params.load().places.evaluation("ppo") / "scores.json", '{"success": 0.5}')
        with pytest.raises(ValueError, match=r"view/ppo\.html is not there .* `agent-r1 view ppo` makes it"):
            results(html=tmp_path / "to/send.html")


def test_help_has_a_line_for_every_command_in_the_order_of_the_story() -> None:
    text = typed("--help").stdout
    assert re.findall(r"─ ([A-Z][\w ]+) ─", text) == [
        "Options",
        *(entry.PANEL for entry in (commands.execute, commands.look, commands.operate)),
        commands.operate.SERVERS,
    ]
    lines = text[text.index(commands.execute.PANEL) :].splitlines()
    listed = [line[1:-1].split(maxsplit=1) for line in lines if line.startswith("│")]
    assert [name for name, _ in listed] == [
        entry.name or entry.callback.__name__ for entry in commands.app.registered_commands if entry.callback
    ]
    assert all(does[0].isupper() and does.strip().endswith(".") for _, does in listed), "each takes one line"


def test_shell_completes_commands_options_runs_and_overlays() -> None:
    assert completed("agent-r1 re") == ["register", "report", "results", "recipe", "replay", "restore"]
    assert completed("agent-r1 train --fr") == ["--fresh"]
    assert completed("agent-r1 train ppo_no_") == [
        name for name in params.load(ROOT / "params.yaml").runs if name.startswith("ppo_no_")
    ]
    assert completed("agent-r1 overlay frozen") == ["frozen_lake"]
    assert completed("agent-r1 evaluate nai") == ["naive_rag"]


@cases("line, message")
def test_unknown_command_is_refused_before_any_import(line: list[str], message: str) -> None:
    ended = typed(*line)
    assert (ended.returncode, message in ended.stderr) == (2, True)


@cases("line, code, message")
def test_fault_is_one_line(line: list[str], code: int, message: str) -> None:
    ended = typed(*line)
    assert (ended.returncode, ended.stdout, len(ended.stderr.splitlines())) == (code, "", 1), ended.stderr
    assert message in ended.stderr


@cases("earlier, today")
def test_earlier_options_are_one_word_which_is_said_once(
    earlier: str, today: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert in_one_word(earlier.split()) == today.split()
    assert caplog.messages == ([f"{earlier} is spelled {today} now"] if earlier != today else [])
    caplog.clear()
    monkeypatch.setenv("DVC_ROOT", ".")
    assert in_one_word(earlier.split()) == today.split()
    assert caplog.messages == [], "the commands of dvc.yaml stay as they are"


@cases("sweep, successes, line")
def test_results_lead_to_the_best_run(
    sweep: str,
    successes: dict[str, float],
    line: str,
    tmp_path: Path,
    write_params: WriteParams,
    inside: Inside,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)  # a line is then as long as it is
    write_params(tmp_path, {"repro_runs": ["ppo", "grpo"]})
    with inside(tmp_path):
        places = params.load().places
        write_text(places.report(sweep) / "report.md", "# Report\n\n4 agents.\n\n| agent |\n| --- |\n")
        for label, success in successes.items():
            write_text(places.evaluation(label, sweep) / "scores.json", json.dumps({"success": success}))
        results("ablations" if sweep else None)
    assert capsys.readouterr().out.splitlines()[-1].strip(" •") == line


def shown_in_the_docs() -> list[str]:
    """Every command with options that a page shows, whole or within a sentence."""
    pages = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
    commands_found = {line for page in pages for line in re.findall(r"agent-r1 ([a-z-]+ [^`#|\n]+)", page.read_text())}
    return sorted(line.strip() for line in commands_found if "..." not in line)


@pytest.mark.parametrize("line", shown_in_the_docs())
def test_commands_of_docs_can_be_typed(line: str) -> None:
    group = get_command(commands.app)
    with group.make_context("agent-r1", ["train", "ppo"]) as context:
        name, *arguments = line.split()
        command = group.get_command(context, name)  # type: ignore[attr-defined]
        assert command, f"there is no command {name}"
        command.make_context(name, arguments, parent=context)
