"""A coding agent of the command line beside the engine: `python -m benchmarks.frameworks.coding --program FILE`.

The program is Claude Code's, of npm's @anthropic-ai/claude-code. It asks a random model with a window of 65,536
tokens, in vLLM, for one episode by Anthropic's messages; what it says that it read and wrote is compared with what the
engine was sent and gave.
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from agent_r1.agents import playing
from agent_r1.envs.kinds import attempts_at
from agent_r1.envs.shared import Shared
from agent_r1.learn.builtin import new_model, train_tokenizer
from agent_r1.params import SHIPPED, load
from agent_r1.params.agents import AgentParams
from agent_r1.records import Question
from agent_r1.rollout.chat import Chat
from agent_r1.rollout.engines import open_engine
from agent_r1.rollout.episode import PLAY
from agent_r1.rollout.sampling import Action, Actor, Request
from benchmarks.stored import ROOT, options, show

WINDOW = 65_536
SHAPE: dict[str, Any] = {"hidden_size": 64, "layers": 2, "heads": 2, "max_tokens": WINDOW, "seed": 0}
VARIABLES = {
    "DISABLE_TELEMETRY": "1",
    "DISABLE_ERROR_REPORTING": "1",
    "DISABLE_AUTOUPDATER": "1",
    "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
}
# States the answer, and as parts the tokens that the program counted.
SCRIPT = """
import json, os, subprocess, sys
question = json.load(sys.stdin)["question"]["text"]
os.environ["HOME"] = os.getcwd()
words = [sys.argv[1], "-p", question, "--output-format", "json"]
result = json.loads(subprocess.run(words, stdout=subprocess.PIPE, stdin=subprocess.DEVNULL).stdout)
usage = result["usage"]
parts = {"read": usage["input_tokens"], "sampled": usage["output_tokens"]}
print(json.dumps({"answer": result["result"], "parts": parts}))
"""


class Logged:
    """A sampler that keeps what the engine was sent, and what it gave."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine
        self.log = list[tuple[Request, Action]]()

    async def act(self, request: Request) -> Action:
        action: Action = await self._engine.act(request)
        self.log.append((request, action))
        return action

    def sample(self, requests: Sequence[Request]) -> list[Action]:
        raise AssertionError("agents outside ask one by one")


def main() -> None:
    parser = options("Compares a coding agent's token counts with the engine's.")
    parser.add_argument("--program", type=Path, required=True)
    given = parser.parse_args()
    os.environ |= VARIABLES | {"NO_PROXY": "127.0.0.1"}
    settings = load(SHIPPED)
    tokenizer = train_tokenizer([page.read_text() for page in (ROOT / "docs").glob("*.md")], 4096)
    agent = AgentParams(
        command=[sys.executable, "-c", SCRIPT, str(given.program.resolve())],
        timeout_s=500,
        environment=["PATH", "NO_PROXY", *VARIABLES],
        rewards=["read", "sampled"],
    )
    changes = {"agents": {"mine": agent}, "agent": "mine", "order": "arrival", "max_tokens": WINDOW, "max_steps": 30}
    limits = settings.env.model_copy(update={**changes, "max_action_tokens": 64})
    question = Question(question_id="q", dataset="d", split="train", text="Say hi.", answers=["hi"], strata={})
    with tempfile.TemporaryDirectory() as folder, Shared(limits) as shared:
        new_model(tokenizer, **SHAPE).save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        chat = Chat(tokenizer)
        actor = Actor(model=folder, end_ids=chat.end_ids, max_tokens=WINDOW, temperature=1.0, dtype="float32")
        with open_engine(settings.engine, actor) as engine:
            sampler = Logged(engine)
            [episode] = playing.collect(sampler, chat, attempts_at([question], shared), shared, seed=3, play=PLAY)
        measures = shared.take_measures()
    read = sum(len(request.context) for request, _ in sampler.log)
    sampled = sum(len(action.token_ids) for _, action in sampler.log)
    parts = episode.steps[-1].rewards
    row = {
        "program": "Claude Code",
        "ends": episode.outcome.value,
        "requests": f"{measures['agent/requests']:.0f}",
        "read, by the program": f"{parts['read']:.0f}",
        "by the engine": f"{read}",
        "sampled, by the program": f"{parts['sampled']:.0f}",
        "of the engine": f"{sampled}",
        "of the trajectory": f"{int(episode.action_mask.sum())}",
    }
    show("coding", [row], store=given.store)


if __name__ == "__main__":
    main()
