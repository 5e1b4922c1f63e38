"""What episodes cost whose tools wait, hang or are killed with their training: `python -m benchmarks.waiting`.

A script acts, so that nothing but the waiting is measured; the world outside is a real HTTP server on loopback that
answers at random, and counts what it is asked.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import httpx

from agent_r1.envs.base import Attempt
from agent_r1.envs.shared import Shared
from agent_r1.envs.tool_env import ToolEnv
from agent_r1.faults import TooManyAborted, WorldFault
from agent_r1.learn import builtin
from agent_r1.params import SHIPPED, load
from agent_r1.records import Trajectory
from agent_r1.rollout.chat import Chat
from agent_r1.rollout.episodes import ScriptedSampler, collect
from agent_r1.tables import read_rows, write_rows
from agent_r1.tools.base import FunctionTool

EPISODES = 64
LIMIT_S = 2.0
STEPS = 3  # calls of an episode
LIMITS = load(SHIPPED).env.model_copy(update={"max_tokens": 2048})


def play(make_tool: Callable[[], FunctionTool], episodes: int, journal: Path | None = None) -> list[Trajectory]:
    """Episodes of `STEPS` calls and an answer."""
    texts = ["system user Who? ask what answer", json.dumps({"name": "ask", "arguments": {"what": "0.1"}})]
    chat = Chat(builtin.train_tokenizer(texts, 400))
    scripts = [
        [call(f"{episode}.{step}") for step in range(STEPS)] + ["<answer>a</answer>"] for episode in range(episodes)
    ]

    def env(shared: Shared, seed: int) -> ToolEnv:
        return ToolEnv("Who?", [make_tool()], max_steps=STEPS + 1, journal=shared.journal, seed=seed)

    with Shared(LIMITS) as shared:
        attempts = [
            Attempt(question_id=f"q{number}", group=number, sample=0, env=partial(env, shared))
            for number in range(episodes)
        ]
        if journal is None:
            return collect(ScriptedSampler(scripts, chat), chat, attempts, shared, seed=0)
        with shared.journaled(journal):
            return collect(ScriptedSampler(scripts, chat), chat, attempts, shared, seed=0)


def call(what: str) -> str:
    return f"<tool_call>{json.dumps({'name': 'ask', 'arguments': {'what': what}})}</tool_call>"


def sleeping(seconds: float, *, of_the_world: bool) -> FunctionTool:
    async def ask(what: str) -> str:
        """Answers after a while; a server says so itself when its time is up."""
        if of_the_world:
            await asyncio.sleep(LIMIT_S)
            raise WorldFault(f"the server took longer than {LIMIT_S:g} s")
        await asyncio.sleep(seconds)
        return what

    return FunctionTool(ask, timeout_s=None if of_the_world else LIMIT_S + 0.5)


class World(ThreadingHTTPServer):
    """Never says the same twice, unless it was told what to say."""

    daemon_threads = True

    def __init__(self, answers: dict[str, str] | None = None) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.answers, self.told, self.asked = answers or {}, dict[str, str](), list[str]()
        Thread(target=self.serve_forever, daemon=True).start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}/"


class _Handler(BaseHTTPRequestHandler):
    server: World

    def do_GET(self) -> None:
        what = self.path.lstrip("/")
        self.server.asked.append(what)
        time.sleep(random.random() / 20)
        said = self.server.answers.get(what) or str(random.random())
        self.server.told[what] = said
        self.send_response(200)
        self.send_header("content-length", str(len(said)))
        self.end_headers()
        self.wfile.write(said.encode())

    def log_message(self, format: str, *_: object) -> None:
        return


def asking(url: str) -> FunctionTool:
    async def ask(what: str) -> str:
        """Asks the world."""
        async with httpx.AsyncClient() as client:
            return (await client.get(url + what, timeout=30)).text

    return FunctionTool(ask)


def killed(kills: int, seed: int) -> tuple[int, int, bool]:
    """Kills, journaled calls that were made again, and whether the bits are those of a run that was left alone."""
    rng, made, again = random.Random(seed), 0, 0
    with tempfile.TemporaryDirectory() as folder:
        while made < kills:
            world, journal, rows = World(), Path(folder) / f"{made}.jsonl", Path(folder) / f"{made}.parquet"
            known: set[str] = set()
            while True:
                begun = len(world.asked)
                child = subprocess.Popen(
                    [sys.executable, "-m", "benchmarks.waiting", "--child", world.url, journal, rows]
                )
                try:
                    ended = child.wait(rng.uniform(2.0, 6.0)) if made < kills else child.wait()
                except subprocess.TimeoutExpired:
                    child.send_signal(signal.SIGKILL)
                    child.wait()
                    ended, made = -9, made + 1
                again += len(known & set(world.asked[begun:]))
                written = journal.read_text().splitlines() if journal.exists() else []
                entries = [json.loads(line) for line in written if line.endswith("}")]
                known = {json.loads(entry["arguments"])["what"] for entry in entries}
                if ended == 0:
                    break
            heard = {json.loads(entry["arguments"])["what"]: entry["text"] for entry in entries}
            alone = play(partial(asking, World(heard).url), EPISODES)
            same = [each.token_ids.tolist() for each in alone] == [
                each.token_ids.tolist() for each in read_rows(rows, Trajectory)
            ]
            if not same:
                return made, again, False
    return made, again, True


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--child", nargs=3, metavar=("URL", "JOURNAL", "ROWS"), help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.child:
        url, journal, rows = given.child
        write_rows(Path(rows), play(partial(asking, url), EPISODES, Path(journal)), Trajectory)
        return
    started = time.perf_counter()
    play(partial(sleeping, LIMIT_S, of_the_world=False), EPISODES)
    took = time.perf_counter() - started
    print(
        f"{EPISODES} episodes, {STEPS} calls of {LIMIT_S:g} s: {took:.2f} s, "
        f"{took / (STEPS * LIMIT_S):.2f} of the ideal"
    )
    started = time.perf_counter()
    found = play(partial(sleeping, 3600.0, of_the_world=False), EPISODES)
    took, limit = time.perf_counter() - started, (LIMIT_S + 0.5) * STEPS
    statuses = Counter(made.status for each in found for step in each.steps for made in step.calls)
    print(
        f"a tool of ours that never answers: {took:.2f} s, {took / limit:.2f} of limit x steps; calls: {dict(statuses)}"
    )
    started = time.perf_counter()
    try:
        play(partial(sleeping, 0.0, of_the_world=True), EPISODES)
    except TooManyAborted as ended:
        took = time.perf_counter() - started
        print(f"a server that never answers: {took:.2f} s, {took / (2 * LIMIT_S):.2f} of two limits; {ended}")
    made, again, same = killed(given.kills, given.seed)
    print(f"{made} kills: journaled calls made again {again}, bits {'the same' if same else 'OTHERS'}")


if __name__ == "__main__":
    main()
