"""Restarts of an MCP server in the middle of episodes: `python -m benchmarks.restarts`.

The server has sessions, and is killed and started again between the two calls of an episode: ten times under a stage,
which plays eight episodes at once, and ten times under an agent that is served over HTTP. Prints how many restarts
every episode outlived, with two calls that succeeded.
"""

from __future__ import annotations

import argparse
import contextlib
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence

import httpx
from uvicorn import Server

from agent_r1.envs.shared import Shared
from agent_r1.envs.tool_env import asked_attempt
from agent_r1.evaluation.comparison import markdown_table
from agent_r1.http.guard import configured
from agent_r1.learn.builtin import train_tokenizer
from agent_r1.params import SHIPPED, load
from agent_r1.params.env import EnvParams
from agent_r1.params.sections import override, validated
from agent_r1.records import CallStatus, Outcome
from agent_r1.rollout.chat import Chat
from agent_r1.rollout.episodes import collect
from agent_r1.rollout.sampling import Action, Request
from agent_r1.serving.agent import Agent
from agent_r1.serving.served import Lasting, Service

RESTARTS, EPISODES, PATIENCE_S = 10, 8, 60.0
CALL = '<tool_call>{"name": "count", "arguments": {}}</tool_call>'
SERVER = """
import sys
from mcp.server import MCPServer
import uvicorn
server, asked = MCPServer("counts", log_level="CRITICAL"), []
@server.tool()
def count() -> int:
    "Counts how often it was asked."
    asked.append(None)
    return len(asked)
app = server.streamable_http_app()
async def of_2025(scope, receive, send):  # refuses the version without sessions
    if (b"mcp-protocol-version", b"2026-07-28") in scope.get("headers", ()):
        await send({"type": "http.response.start", "status": 400, "headers": []})
        await send({"type": "http.response.body"})
    else:
        await app(scope, receive, send)
uvicorn.run(of_2025, port=int(sys.argv[1]), log_level="critical")
"""


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Mortal:
    """The MCP server, and a policy that has it killed before the second call of its episodes."""

    def __init__(self, chat: Chat) -> None:
        self.port, self._chat = free_port(), chat
        self._process: subprocess.Popen[bytes] | None = None
        self.start()

    def start(self) -> None:
        """Starts it, again if it runs."""
        self.close()
        self._process = subprocess.Popen([sys.executable, "-c", SERVER, str(self.port)], stderr=subprocess.DEVNULL)
        for _ in range(int(PATIENCE_S / 0.05)):
            with socket.socket() as probe:
                if not probe.connect_ex(("127.0.0.1", self.port)):
                    return
            time.sleep(0.05)
        raise RuntimeError("the MCP server does not start")

    def close(self) -> None:
        """Kills it."""
        if self._process:
            self._process.kill()
            self._process.wait()

    def sample(self, requests: Sequence[Request]) -> list[Action]:
        """The actions of episodes that are all at the same step: two calls and an answer."""
        if requests[0].step == 1:
            self.start()
        texts = ["<answer>done</answer>" if request.step > 1 else CALL for request in requests]
        found = [self._chat.encode_action(text, each.context) for text, each in zip(texts, requests, strict=True)]
        return [Action.of(ids, [0.0] * len(ids), self._chat.end_ids) for ids in found]

    async def act(self, request: Request) -> Action:
        """The action of one episode."""
        return self.sample([request])[0]


@contextlib.contextmanager
def opened() -> Iterator[tuple[Mortal, Chat, Shared]]:
    """A server that runs, and the episodes' side of it."""
    chat = Chat(train_tokenizer([CALL, "<answer>done</answer> Error: search"] * 20, vocab_size=400))
    with contextlib.closing(Mortal(chat)) as server:
        tools = {"search": None, "mcp": {"counts": {"url": f"http://127.0.0.1:{server.port}/mcp", "timeout_s": 30}}}
        changes = {"tools": tools, "max_steps": 3, "max_tokens": 1000, "aborted_share": 1.0}
        with Shared(validated(EnvParams, override(load(SHIPPED).env.model_dump(), changes), "env")) as shared:
            yield server, chat, shared


def under_a_stage(restarts: int) -> int:
    """How many restarts all episodes of a stage outlived."""
    with opened() as (server, chat, shared):
        outlived = 0
        for _ in range(restarts):
            attempts = [asked_attempt("Count.", shared, sample=sample) for sample in range(EPISODES)]
            played = collect(server, chat, attempts, shared, seed=0)
            calls = [call.status is CallStatus.OK for each in played for step in each.steps for call in step.calls]
            outlived += all(each.outcome is Outcome.ANSWERED for each in played) and sum(calls) == 2 * EPISODES
            shared.verify()
    return outlived


def under_a_served_agent(restarts: int) -> int:
    """How many restarts an agent outlived that is asked over HTTP."""
    with opened() as (policy, chat, shared):
        port = free_port()
        service = Service(Agent(policy, chat, shared), "agent")
        app = service.app()
        server = Server(configured(app, "127.0.0.1", port, Lasting(opens=app.opens)))
        shared.tools(0)
        thread = threading.Thread(target=lambda: shared.run(server.serve()))
        thread.start()
        try:
            while not server.started:
                time.sleep(0.05)
            asked = {"model": "agent", "messages": [{"role": "user", "content": "Count."}]}
            url = f"http://127.0.0.1:{port}/v1/chat/completions"
            return sum(httpx.post(url, json=asked, timeout=PATIENCE_S).is_success for _ in range(restarts))
        finally:
            server.should_exit = True
            thread.join(PATIENCE_S)


def main() -> None:
    parser = argparse.ArgumentParser(description="Restarts of an MCP server in the middle of episodes.")
    parser.add_argument("--restarts", type=int, default=RESTARTS, help="under each")
    restarts = parser.parse_args().restarts
    plays = {"a stage": under_a_stage, "a served agent": under_a_served_agent}
    rows = [[who, str(restarts), str(play(restarts))] for who, play in plays.items()]
    print(markdown_table(["under", "restarts", "went on"], rows))


if __name__ == "__main__":
    main()
