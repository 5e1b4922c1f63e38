"""Agents as frameworks' own documents write them: `python -m benchmarks.frameworks --environments FOLDER [--store]`.

Each is a command in an environment of its framework, which is made if it is not there, by pip or npm. A policy that
says what it is told to answers it through the gateway, in the dialect that the framework chooses.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from agent_r1.agents import playing
from agent_r1.envs.kinds import attempts_at
from agent_r1.envs.shared import Shared
from agent_r1.learn.builtin import train_tokenizer
from agent_r1.params import SHIPPED, load
from agent_r1.params.agents import AgentParams
from agent_r1.records import Outcome, Question, Trajectory
from agent_r1.rollout.chat import Chat
from agent_r1.rollout.episode import PLAY
from agent_r1.rollout.sampling import Action, Request
from benchmarks.stored import Row, options, show

HERE = Path(__file__).parent
QUESTION = Question(question_id="q", dataset="atlas", split="train", text="Who?", answers=["Mara Quill"], strata={})


def call(tool: str, arguments: str) -> str:
    return f'<think>So.</think><tool_call>{{"name": "{tool}", "arguments": {arguments}}}</tool_call>'


FOUND = (call("search", '{"query": "it"}'), "<think>Hm.</think>Mara Quill")
TYPED = ("No form.", '{"name": "Mara Quill"}')
NATIVE = TYPED[1:]
LONG_S = 300.0


class Framework(NamedTuple):
    """A script, what its environment needs, and what the policy says to each of its agents."""

    packages: Sequence[str]
    agents: dict[str, Sequence[str]]


def forms(tool: str) -> Sequence[str]:
    """Words where a call is demanded, and then the call."""
    return ("Mara?", call(tool, '{"name": "Mara Quill"}'))


FRAMEWORKS = {
    "of_openai.py": Framework(
        ["openai"],
        {
            "chat": FOUND, "chat_stream": FOUND, "chat_typed": NATIVE,
            "responses": FOUND, "responses_stored": FOUND, "responses_typed": NATIVE,
        },
    ),
    "of_anthropic.py": Framework(["anthropic"], {"whole": FOUND, "stream": FOUND, "thinking": FOUND}),
    "of_agents_sdk.py": Framework(
        ["openai-agents"], {"responses": FOUND, "responses_stream": FOUND, "chat": FOUND, "typed": NATIVE}
    ),
    "of_pydantic_ai.py": Framework(
        ["pydantic-ai-slim[openai,anthropic]"],
        {
            "chat": FOUND, "responses": FOUND, "anthropic": FOUND, "typed": forms("final_result"),
            "typed_responses": forms("final_result"), "native": TYPED, "prompted": TYPED,
        },
    ),
    "of_langchain.py": Framework(
        ["langchain", "langchain-openai", "langchain-anthropic"],
        {"chat": FOUND, "responses": FOUND, "anthropic": FOUND, "typed": NATIVE, "typed_call": forms("Answer")[1:]},
    ),
    "of_smolagents.py": Framework(
        ["smolagents>=1.20", "openai"],
        {
            "calls": (FOUND[0], "Mara", call("final_answer", '{"answer": "Mara Quill"}')),
            "code": ("No code.", "Thought: so.\n<code>\nfinal_answer(search('it'))\n</code>"),
        },
    ),
    "of_instructor.py": Framework(
        ["instructor", "anthropic"], {"calls": forms("Answer"), "schema": TYPED, "anthropic": forms("Answer")}
    ),
    "of_dspy.py": Framework(
        ["dspy"],
        {
            "predict": ('{"answer": "Mara Quill"}',),
            "react": (
                "[[ ## next_thought ## ]]\nSo.\n\n[[ ## next_tool_name ## ]]\nfinish\n\n"
                "[[ ## next_tool_args ## ]]\n{}\n\n[[ ## completed ## ]]",
                "[[ ## reasoning ## ]]\nSo.\n\n[[ ## answer ## ]]\nMara Quill\n\n[[ ## completed ## ]]",
            ),
        },
    ),
    "of_vercel.mjs": Framework(
        ["ai", "@ai-sdk/openai", "@ai-sdk/anthropic", "zod"],
        {"responses": FOUND, "stream": FOUND, "chat": FOUND, "anthropic": FOUND, "typed": NATIVE},
    ),
}  # fmt: skip


class Scripted:
    """A policy that says texts in turn."""

    def __init__(self, chat: Chat, texts: Sequence[str]) -> None:
        self._chat = chat
        self._texts = texts
        self.requests = list[Request]()

    async def act(self, request: Request) -> Action:
        text = self._texts[min(len(self.requests), len(self._texts) - 1)]
        self.requests.append(request)
        ids = self._chat.encode_action(text)[: request.max_tokens]
        return Action.of(ids, [0.0] * len(ids), self._chat.end_ids)

    def sample(self, requests: Sequence[Request]) -> list[Action]:
        raise AssertionError("agents outside ask one by one")


def command(script: str, framework: Framework, folder: Path) -> list[str]:
    """The command of a script in its environment, which is made if it is not there."""
    place = folder / Path(script).stem
    if script.endswith(".mjs"):
        if not (place / "node_modules").exists():
            place.mkdir(parents=True, exist_ok=True)
            subprocess.run(["npm", "install", "--no-audit", "--no-fund", *framework.packages], cwd=place, check=True)
        shutil.copy(HERE / script, place)  # modules are looked for beside it
        return [str(shutil.which("node")), str(place / script)]
    if not place.exists():
        subprocess.run([sys.executable, "-m", "venv", place], check=True)
        subprocess.run([place / "bin/pip", "install", "-q", *framework.packages], check=True)
    return [str(place / "bin/python"), str(HERE / script)]


def played(chat: Chat, words: list[str], texts: Sequence[str]) -> tuple[Trajectory | None, dict[str, float], str]:
    """An agent's episode with its measures, or why there is none."""
    agent = AgentParams(command=words, timeout_s=LONG_S, environment=["PATH", "HOME", "NO_PROXY"])
    changes = {"agents": {"mine": agent}, "agent": "mine", "order": "arrival", "max_tokens": 65_536, "max_steps": 6}
    limits = load(SHIPPED).env.model_copy(update={**changes, "max_action_tokens": 400})
    with Shared(limits) as shared:
        try:
            policy = Scripted(chat, texts)
            [row] = playing.collect(policy, chat, attempts_at([QUESTION], shared), shared, seed=3, play=PLAY)
        except ValueError as fault:
            return None, {}, str(fault)
        return row, shared.take_measures(), ""


def row_of(name: str, chat: Chat, words: list[str], texts: Sequence[str]) -> Row:
    trajectory, measures, fault = played(chat, words, texts)
    answered = trajectory is not None and trajectory.outcome is Outcome.ANSWERED and trajectory.answer == "Mara Quill"
    outcome = trajectory.outcome.value if trajectory else fault[-200:]
    shares = ("agent/requests", "agent/contexts", "agent/kept_share", "agent/unmet_form")
    shown = {metric: f"{measures[metric]:.2f}" if metric in measures else "n/a" for metric in shares}
    return {"agent": name, "answers": "yes" if answered else "no", "ends": outcome, **shown}


def main() -> None:
    parser = options("Plays agents of frameworks.")
    parser.add_argument("--environments", type=Path, required=True, help="the folder of the frameworks' environments")
    parser.add_argument("--only", default="", help="the beginning of a script's name")
    given = parser.parse_args()
    os.environ["NO_PROXY"] = "127.0.0.1"
    chat = Chat(train_tokenizer([], 384))
    rows = list[Row]()
    for script, framework in FRAMEWORKS.items():
        if not script.startswith(f"of_{given.only}"):
            continue
        words = command(script, framework, given.environments.resolve())
        for agent, texts in framework.agents.items():
            rows.append(row_of(f"{Path(script).stem.removeprefix('of_')} {agent}", chat, [*words, agent], texts))
    show("frameworks", rows, store=given.store)


if __name__ == "__main__":
    main()
