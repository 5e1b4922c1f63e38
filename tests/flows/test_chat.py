"""Conversations with the small project's agents: real processes behind a pipe and at a terminal, and their faults."""

import io
import os
import pty
import re
import socket
import subprocess
import sys
import termios
from collections.abc import Callable
from contextlib import closing, nullcontext
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from transformers import PreTrainedTokenizerFast
from typer.main import get_command

from agent_r1 import params
from agent_r1.envs.shared import Shared
from agent_r1.params import SHIPPED, load
from agent_r1.params.places import RunId
from agent_r1.records import Passage, Question
from agent_r1.rollout.chat import Chat
from agent_r1.rollout.episodes import ScriptedSampler
from agent_r1.search.base import Search
from agent_r1.serving.agent import Agent
from agent_r1.serving.conversation import Screen, converse, local_answerer
from agent_r1.tables import read_rows
from flows.commands import app
from flows.operation.register import register
from flows.policies import policy_of, version_of
from tests.cases import cases
from tests.fixtures import ROOT, Inside, WriteParams

FOOTER = re.compile(r"\d steps?, \d calls?, \d+ tokens, \d+\.\d s")
CALL = '<think>The film first.</think><tool_call>{"name": "search", "arguments": {"query": "Low Tide"}}</tool_call>'


@pytest.fixture
def project(small_project: Path, tmp_path: Path, write_params: WriteParams) -> Path:
    """The small project's data and warm start, with an engine that starts at once."""
    for name in ("data", "outputs", ".tracking"):
        (tmp_path / name).symlink_to(small_project / name)
    write_params(tmp_path, {})
    return tmp_path


@pytest.fixture
def asked(small_project: Path) -> list[str]:
    """Two questions of one hop, which the warm start attempts in the right form."""
    return [
        row.text
        for row in read_rows(small_project / "data/prepared/questions.parquet", Question)
        if int(row.strata["hops"]) == 1
    ][:2]


def started(folder: Path, *arguments: str, **streams: Any) -> subprocess.Popen[bytes]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "TMPDIR": str(folder)}
    return subprocess.Popen([sys.executable, "-m", "flows", "chat", *arguments], cwd=folder, env=environment, **streams)


class Terminal:
    """A process at a terminal of 60 columns, and the person in front of it."""

    def __init__(self, folder: Path, *arguments: str) -> None:
        self._master, slave = pty.openpty()
        termios.tcsetwinsize(slave, (24, 60))
        streams = dict.fromkeys(("stdin", "stdout", "stderr"), slave)
        self.process = started(folder, *arguments, **streams, start_new_session=True)
        os.close(slave)

    def type(self, text: str) -> None:
        os.write(self._master, text.encode())

    def until(self, text: str) -> str:
        output = ""
        while text not in output:
            output += os.read(self._master, 65536).decode(errors="replace")
        return output

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self._master)


def test_piped_lines_are_answered_by_default_engine(project: Path, write_params: WriteParams, asked: list[str]) -> None:
    write_params(project, {})
    process = started(project, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    process.stdin.write(f"{asked[0]}\n".encode())
    process.stdin.flush()
    who, first = (process.stdout.readline().decode() for _ in range(2))  # at once, though the pipe stays open
    assert who == "the warm start, untrained (`chat RUN` asks a run), answers\n"
    output, errors = process.communicate("\n".join(["", "  ", asked[1], ""]).encode())
    text = first + output.decode()
    assert process.returncode == 0, errors.decode()
    assert [line for line in text.splitlines() if line.startswith("question")] == [f"question  {q}" for q in asked]
    assert len(FOOTER.findall(text)) == 2
    assert re.search(r"^  (search|answer) ", text, re.MULTILINE)
    assert "\x1b" not in text
    assert errors == b""


def test_conversation_at_a_terminal_answers_typed_questions(project: Path, asked: list[str]) -> None:
    """Two questions, each with a prompt after it; an empty line between them is nothing; Ctrl-D at the prompt ends."""
    with closing(Terminal(project)) as screen:
        head = " ".join(re.sub(r"\x1b\[[\d;]*m", "", screen.until("question> ")).split())
        title, _, about = head.partition(" answers; Ctrl-D ends ")
        assert title.endswith("the warm start, untrained (`chat RUN` asks a run),")
        assert re.match(r"It has \d\.\d million weights, and knows atlas alone\. Ask it such as: ", about)
        questions = read_rows(project / "data/prepared/questions.parquet", Question)
        assert all(row.text in about for row in [row for row in questions if row.split == "test"][:3])
        screen.type("Hi, who are you?\r")
        assert "It never read 'hi'. It has" in " ".join(screen.until("question> ").split())
        screen.type(f"{asked[0]}\r")
        first = screen.until("question> ")
        assert "\x1b[2;3m" in first  # a thought, dim and italic
        assert FOOTER.search(first)
        screen.type("\r")
        assert not FOOTER.search(screen.until("question> "))
        screen.type(f"{asked[1]}\r")
        assert FOOTER.search(screen.until("question> "))
        screen.type("\x04")
        assert screen.process.wait(300) == 0


class Film(Search):
    def search(self, queries: list[str], k: int) -> list[list[Passage]]:
        return [[Passage(passage_id="0", title="Low Tide", text="by \x1b[31m[red]Mara Quill")]] * len(queries)


LIMITS = {"top_k": 1, "max_tokens": 400, "max_action_tokens": 100, "aborted_share": 0.0}


def test_session_prints_steps_and_answers(tiny_tokenizer: PreTrainedTokenizerFast) -> None:
    """Two episodes of their own with a question between them that is too long, with a script in the policy's place."""
    env = load(SHIPPED).env.model_copy(update=LIMITS | {"max_steps": 2})
    chat = Chat(tiny_tokenizer)
    script = Agent(ScriptedSampler([[CALL, "<answer>Mara Quill</answer>"]], chat), chat, Shared(env, Film()))
    file = io.StringIO()
    with local_answerer(nullcontext(script), 0, "a script", (), ()) as agent:
        screen = Screen(Console(file=file, highlight=False, width=80), agent.limits)
        converse(agent, screen, ["Who?", "word " * 400, "Who?"], echo=False)
    episode = [
        "  thought The film first.",
        "  search  Low Tide",
        "    Low Tide: by \ufffd[31m[red]Mara Quill",
        "  answer  Mara Quill",
    ]
    lines = file.getvalue().splitlines()
    assert lines[:4] == lines[-6:-2] == episode
    assert FOOTER.search(lines[4])
    assert re.search(r"the prompt of question 'word word .*\[\.\.\.\]' has \d+ tokens and max_tokens is 400", lines[6])


def test_repeated_question_draws_again(tiny_tokenizer: PreTrainedTokenizerFast) -> None:
    env = load(SHIPPED).env.model_copy(update=LIMITS | {"max_steps": 1})
    chat, seeds = Chat(tiny_tokenizer), []

    class Noting(ScriptedSampler):
        def sample(self, requests: Any) -> Any:
            seeds.extend(request.seed for request in requests)
            return super().sample(requests)

    for _ in range(2):
        noting = Agent(Noting([["<answer>a</answer>"]], chat), chat, Shared(env, Film()))
        with local_answerer(nullcontext(noting), 3, "a script", (), ()) as agent:
            for text in ("Who?", "Who?", "Where?"):
                list(agent.ask(text))
    assert len(set(seeds[:3])) == 3
    assert seeds[:3] == seeds[3:]


@pytest.fixture
def said(
    tmp_path: Path,
    write_params: WriteParams,
    inside: Inside,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> Callable[..., str]:
    monkeypatch.setattr("flows.commands.options.prepare_process", lambda: None)  # this process is the tests'
    write_params(tmp_path, {})

    def run(*arguments: str) -> str:
        with inside(tmp_path), pytest.raises((SystemExit, ValueError, OSError)) as ended:
            get_command(app).main(["chat", *arguments])
        return capsys.readouterr().err if isinstance(ended.value, SystemExit) else str(ended.value)

    return run


@cases("arguments, message")
def test_faults_of_command_line_are_named(arguments: list[str], message: str, said: Callable[..., str]) -> None:
    assert message in said(*arguments)


def test_word_chooses_policy_that_answers(project: Path, ppo: Path, inside: Inside) -> None:
    with inside(project):
        settings = params.load()
        policy = policy_of(settings, RunId("ppo"))
        assert (policy.title, policy.path) == (
            "ppo after 3 iterations",
            str(ppo.relative_to(ppo.parents[2]) / "checkpoint/policy"),
        )
        assert policy.updates == policy_of(settings, policy.path).updates == 2
        assert policy_of(settings, "").path == str(settings.places.warm_start)
        assert policy_of(settings, "owner/name").path == "owner/name"
        register(RunId("ppo"))
        version = version_of("ppo", settings)
        registered = policy_of(settings, version.reference)
        assert (registered.title, registered.version) == (f"version {version.number}, ppo", version)
        assert (registered.path, registered.updates) == (policy.path, 2)


@pytest.mark.slow  # a process that imports all
def test_a_command_of_a_project_with_agents_keeps_its_key_inside(tmp_path: Path, write_params: WriteParams) -> None:
    """The server hears the key; whoever looks at the process does not."""
    write_params(tmp_path, {"env": {"agents": {"mine": {"command": ["true"], "timeout_s": 60}}}})
    with socket.create_server(("127.0.0.1", 0)) as listening:
        url = f"http://127.0.0.1:{listening.getsockname()[1]}"
        command = [sys.executable, "-m", "flows", "chat", "--endpoint", url, "--question", "Who?"]
        with subprocess.Popen(command, cwd=tmp_path, env={**os.environ, "AGENT_R1_ENDPOINT_KEY": "canary"}) as process:
            listening.settimeout(120)
            connection, _ = listening.accept()
            head = connection.recv(1 << 16)
            shown = Path(f"/proc/{process.pid}/environ").read_bytes()
            process.kill()
        connection.close()
    assert b"Bearer canary" in head
    assert b"canary" not in shown
    assert b"AGENT_R1_SEALED" in shown
