"""Examples of the pages in packages of others: `python -m benchmarks.frameworks.pages --environments FOLDER [--store]`.

Each is written to a project with tasks of its own, and played through the gateway, or as a toolbox, by a policy that
says what it is told to: first what is right, then what is not. An environment is made by pip where it is not there;
NeMo Gym and Harbor want one of Python 3.12 or newer, as FOLDER/nemo and FOLDER/harbor. Harbor's box is this machine.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import shutil
import socket
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from agent_r1.agents import playing
from agent_r1.envs.base import Env
from agent_r1.envs.kinds import attempts_at
from agent_r1.envs.shared import Shared
from agent_r1.learn.builtin import train_tokenizer
from agent_r1.outside import openenv
from agent_r1.outside.toolbox_env import ToolboxEnv, require_toolbox
from agent_r1.params import SHIPPED, load
from agent_r1.params.agents import AgentParams
from agent_r1.params.env import EnvParams
from agent_r1.params.outside import OpenEnvParams, ToolboxParams
from agent_r1.records import Question
from agent_r1.rollout.chat import Chat
from agent_r1.rollout.episode import PLAY
from benchmarks.frameworks.__main__ import Scripted, call
from benchmarks.stored import ROOT, Row, options, show

TASKS = Path(__file__).parent / "tasks"
NEMO = "resources_servers.example_multi_step"
NEMO_PORT = 8300
OPENENV_PORT = 8301
VALUES = "extract_synonym_values"  # a tool of NeMo Gym's example
QUESTION = partial(Question, question_id="q", dataset="d", split="train", text="?", strata={})
VARIABLES = ["PATH", "HOME", "NO_PROXY", "SSL_CERT_FILE"]


class Example(NamedTuple):
    """A module of a page, the packages of its environment, and what a policy says that is right, and that is not."""

    module: str
    packages: Sequence[str]
    right: Sequence[str]
    wrong: Sequence[str]
    parts: Sequence[str] = ()
    row: Mapping[str, Any] = MappingProxyType({})


def typed(text: str) -> str:
    """An action of Terminus, Harbor's agent."""
    commands = [{"keystrokes": f"{text}\n", "duration": 0.5}]
    return json.dumps({"analysis": "a", "plan": "p", "commands": commands, "task_complete": True})


AGENTS = {
    "verifiers": Example("vf_agent", ["verifiers", "uv"], ["Paris"], ["Lima"], ["right"]),
    "inspect": Example(
        "inspect_agent",
        ["inspect-ai", "openai"],
        [call("look_up", '{"land": "France"}'), "Paris"],
        [call("look_up", '{"land": "Peru"}'), "Lima"],
        ["includes"],
    ),
    "nemo": Example(
        "nemo_agent",
        ["nemo-gym"],
        [call("get_synonym_value", '{"synonym": "Warm"}'), call(VALUES, '{"synonym_values": [711, 407]}'), "Done."],
        [call(VALUES, '{"synonym_values": [7]}'), "Done."],
        ["reward"],
    ),
    "harbor": Example(
        "harbor_agent",
        ["harbor"],
        [typed("echo 'Hello, world!' > hello.txt")] * 2,
        [typed("echo Bye > hello.txt")] * 2,
        ["reward"],
        {"path": "hello", "environment": {"import_path": "local_box:LocalBox"}},
    ),
}  # fmt: skip
BOXES = {
    "aviary": Example(
        "flock",
        ["fhaviary"],
        [call("cast_int", '{"x": 3.2}'), call("print_story", '{"story": "A fox."}')],
        [call("cast_int", '{"x": 3.2}'), "<answer>done</answer>"],
    ),
    "reasoning_gym": Example("riddle", ["reasoning-gym"], ["<answer>-61</answer>"], ["<answer>qqq</answer>"]),
    "textarena": Example(
        "game",
        ["textarena"],
        [call("move", f'{{"text": "[{number}]"}}') for number in range(1, 21)],
        [call("move", '{"text": "?"}')] * 2,
        row={"name": "GuessTheNumber-v0-raw"},
    ),
}


WORLDS = {  # of OpenEnv; the row has what env.openenv declares
    "openenv": Example(
        "words",
        ["openenv-core"],
        ["<answer>5</answer>", "<answer>7</answer>"],
        ["<answer>5</answer>"],
        row={"action": "message", "observation": "prompt"},
    ),
    "openenv_tools": Example(
        "tools",
        ["openenv-core"],
        [call("add", '{"a": "x", "b": 3}'), call("add", '{"a": 2, "b": 3}')],
        [call("add", '{"a": 2, "b": 2}'), "<answer>4</answer>"],
    ),
}


def text_of(module: str) -> str:
    """The text of a module, as a page has it."""
    pages = "".join(page.read_text() for page in (ROOT / "docs").glob("*.md"))
    [text] = re.findall(rf"```python\n(# {module}\.py\n.*?)```", pages, re.DOTALL)
    return str(text)


def interpreter(name: str, example: Example, folder: Path) -> str:
    """The interpreter of an example's environment; one of a toolbox finds this project's packages, too."""
    place = folder / name
    if not place.exists():
        subprocess.run([sys.executable, "-m", "venv", place], check=True)
        subprocess.run([place / "bin/pip", "install", "-q", *example.packages], check=True)
    if name in BOXES:
        for packages in place.glob("lib/*/site-packages"):
            (packages / "agent_r1_needs.pth").write_text(sysconfig.get_path("purelib"))
    return str(place / "bin/python")


def version_of(python: str, package: str) -> str:
    code = f"from importlib.metadata import version; print(version({package!r}))"
    return subprocess.run([python, "-c", code], capture_output=True, text=True, check=True).stdout.strip()


def settings(**changes: Any) -> EnvParams:
    sizes = {"order": "arrival", "max_tokens": 65_536, "max_steps": 24, "max_action_tokens": 400}
    return load(SHIPPED).env.model_copy(update=sizes | changes)


@contextmanager
def served(words: Sequence[str], port: int) -> Iterator[None]:
    """While a server runs, once it listens."""
    with subprocess.Popen(words) as process:
        try:
            while process.poll() is None:
                with socket.socket() as probe:
                    if not probe.connect_ex(("127.0.0.1", port)):
                        break
                time.sleep(0.2)
            yield
        finally:
            process.terminate()


def nemo_row(python: str) -> dict[str, Any]:
    """The first row of NeMo Gym's own example."""
    code = f"import {NEMO} as server; print(open([*server.__path__][0] + '/data/example.jsonl').read())"
    rows = subprocess.run([python, "-c", code], capture_output=True, text=True, check=True).stdout
    row: dict[str, Any] = json.loads(rows.splitlines()[0])
    return row


def played(example: Example, python: str, row: dict[str, Any]) -> dict[str, str]:
    """The successes of two episodes of an agent, their kept share, and the seconds that each took."""
    agent = AgentParams(
        function=f"{example.module}:solve",
        python=python,
        timeout_s=300,
        environment=[name for name in VARIABLES if name in os.environ],
        rewards=[*example.parts],
    )
    chat = Chat(train_tokenizer([], 384))
    question = Question(
        question_id="q", dataset="d", split="train", text="?", env="mine", setup=json.dumps(row), strata={}
    )
    outcomes = list[str]()
    seconds = list[str]()
    with Shared(settings(agents={"mine": agent}, agent="mine")) as shared:
        for texts in (example.right, example.wrong):
            begun_s = time.monotonic()
            policy = Scripted(chat, texts)
            [episode] = playing.collect(policy, chat, attempts_at([question], shared), shared, seed=3, play=PLAY)
            seconds.append(f"{time.monotonic() - begun_s:.1f}")
            outcomes.append(f"{episode.outcome.value}, {episode.success:g}")
        share = shared.take_measures().get("agent/kept_share")
    kept = "n/a" if share is None else f"{share:.2f}"
    return {"right": outcomes[0], "wrong": outcomes[1], "kept_share": kept, "first_s": seconds[0], "next_s": seconds[1]}


async def boxed(example: Example) -> dict[str, str]:
    """The successes of two episodes of a toolbox in this interpreter."""
    params = ToolboxParams.model_validate(
        {"class": f"{example.module}:{example.module.title()}", "success_above": 0.99}
        | ({"timeout_s": 30} if example.module == "flock" else {})
    )
    setup = json.dumps({"name": "mine", "row": {"seed": 1 if example.module == "flock" else 3} | example.row})
    question = QUESTION(env="toolbox", setup=setup)
    limits = settings(toolbox={"mine": params})
    require_toolbox([question], limits)
    return await stepped(lambda: ToolboxEnv(question, Shared(limits), 0), example)


async def in_world(example: Example) -> dict[str, str]:
    """The successes of two episodes at a server of OpenEnv."""
    url = f"http://127.0.0.1:{OPENENV_PORT}"
    params = OpenEnvParams.model_validate({"url": url, "timeout_s": 30, **example.row})
    limits = settings(openenv={"mine": params})
    question = QUESTION(env="openenv", setup=json.dumps({"name": "mine", "reset": {"seed": 7}}))
    return await stepped(lambda: openenv.played(question, Shared(limits), 0), example)


async def stepped(begin: Callable[[], Env], example: Example) -> dict[str, str]:
    """The outcomes of two episodes in an environment, and whether each is a success."""
    outcomes = list[str]()
    for texts in (example.right, example.wrong):
        env = begin()
        await env.open()
        for text in texts:
            end = await env.step(text)
            if end.outcome:
                break
        await env.close()
        outcomes.append(f"{end.outcome or 'goes on'}, {end.rewards.get('success', 0.0):g}")
    return {"right": outcomes[0], "wrong": outcomes[1], "kept_share": "n/a", "first_s": "n/a", "next_s": "n/a"}


def row_of(name: str, environments: Path) -> Row:
    """What comes of an example, in a project that has its module alone and the tasks."""
    example = (AGENTS | BOXES | WORLDS)[name]
    python = interpreter(name.removesuffix("_tools"), example, environments)
    text = "" if name in WORLDS else text_of(example.module)
    with tempfile.TemporaryDirectory() as folder:
        shutil.copytree(TASKS, folder, dirs_exist_ok=True)
        Path(folder, f"{example.module}.py").write_text(text)
        os.chdir(folder)
        if name in BOXES:
            words = [python, "-m", "benchmarks.frameworks.pages", "--environments", str(environments), "--box", name]
            known = {**os.environ, "PYTHONPATH": f"{folder}{os.pathsep}{ROOT}"}
            output = subprocess.run(words, env=known, stdout=subprocess.PIPE, text=True, check=True).stdout
            outcome = json.loads(output.splitlines()[-1])
        elif name == "nemo":
            words = [
                python,
                str(TASKS / "nemo_server.py"),
                f"{NEMO}.app",
                "ExampleMultiStepResourcesServer",
                str(NEMO_PORT),
            ]
            with served(words, NEMO_PORT):
                outcome = played(example, sys.executable, nemo_row(python))
        elif name in WORLDS:
            with served([python, str(TASKS / "openenv_server.py"), example.module, str(OPENENV_PORT)], OPENENV_PORT):
                outcome = asyncio.run(in_world(example))
        else:
            outcome = played(example, python, {"seed": 0} | example.row)
        os.chdir(ROOT)
    lines = sum(bool(line.strip()) for line in text.splitlines()) - 1 if text else "n/a"
    package = f"{example.packages[0]} {version_of(python, example.packages[0])}"
    return {"example": name, "package": package, "lines": str(lines), **outcome}


def main() -> None:
    parser = options("Plays the examples of the pages.")
    parser.add_argument("--environments", type=Path, required=True, help="the folder of the packages' environments")
    parser.add_argument("--only", nargs="+", default=[*AGENTS, *BOXES, *WORLDS])
    parser.add_argument("--box", choices=BOXES, help="play this one here, and print what comes of it as JSON")
    given = parser.parse_args()
    if given.box:
        print(json.dumps(asyncio.run(boxed(BOXES[given.box]))))
        return
    os.environ["NO_PROXY"] = "127.0.0.1"
    show("pages", [row_of(name, given.environments.resolve()) for name in given.only], store=given.store)


if __name__ == "__main__":
    main()
