"""What comes over connections to the gateway: heads that are none, keys that are none, and bodies of its dialects."""

from __future__ import annotations

import asyncio
import json
from contextlib import suppress
from pathlib import Path
from random import Random
from typing import NamedTuple
from urllib.parse import urlsplit

from agent_r1.agents.gateway import Gateway, OpenEpisode
from agent_r1.agents.session import Session
from agent_r1.http.dialects import DIALECTS
from agent_r1.learn.builtin import train_tokenizer
from agent_r1.params import SHIPPED, load
from agent_r1.params.agents import AgentParams
from agent_r1.rollout.chat import Chat
from agent_r1.rollout.episode import PLAY
from agent_r1.rollout.sampling import Action, Request
from benchmarks.hostile.dialects import HONEST, STORED
from benchmarks.hostile.kind import Defect, Kind, Refused, require
from benchmarks.hostile.mutations import as_bytes, as_json, mutated, odd_text

_ANSWER_S = 20.0
_PATIENCE_S = 0.5  # with a request that may never be whole
CLIENT = "@client@"
REWARD = "@reward@"


class Sent(NamedTuple):
    """What is written to a connection, with CLIENT and REWARD in place of keys."""

    content: bytes
    is_known: bool  # whether the request in it has the client's key and the host of a program


class GatewayRequests(Kind):
    """Nobody without a key or from a web page is answered with more than a refusal, and the episode goes on."""

    name, tried, refusals = "gateway", 500, (Refused,)

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self._chat = Chat(train_tokenizer([], 384))
        self._loop = asyncio.new_event_loop()
        self._gateway = Gateway(1)
        self._loop.run_until_complete(self._gateway.__aenter__())

    def make(self, rng: Random) -> Sent:
        number = rng.randrange(len(DIALECTS))
        key = rng.choice((CLIENT,) * 6 + (REWARD, CLIENT[1:], "", odd_text(rng)[:99]))
        host = rng.choice(("127.0.0.1",) * 6 + ("localhost", "evil.example", "127.0.0.1.evil.example", ""))
        headers = {"host": host, "authorization": f"Bearer {_line(key)}"}
        if rng.random() < 0.1:
            headers["origin"] = rng.choice(("null", "http://127.0.0.1", "http://evil.example"))
        body = as_bytes(as_json(mutated(HONEST[number], rng, rng.choice((0, 0, 1, 2))), rng), rng)
        content = _request(DIALECTS[number].path, headers, body * rng.choice((1,) * 30 + (50,)))
        known = key == CLIENT and host in ("127.0.0.1", "localhost") and "origin" not in headers
        if rng.random() < 0.2:  # a head that is none, or two requests in one
            place = rng.randrange(content.index(b"\r\n\r\n"))
            return Sent(content[:place] + odd_text(rng)[:200].encode(errors="replace") + content[place:], known)
        return Sent(content, known)

    def judge(self, made: Sent) -> None:
        self._loop.run_until_complete(self._judge(made))

    async def _judge(self, made: Sent) -> None:
        limits = load(SHIPPED).env.model_copy(update={"max_tokens": 2000, "max_steps": 9})
        session = Session(self._chat, limits, AgentParams(function="m:f", timeout_s=60.0), (0, 0, "q", 0), PLAY)
        episode = OpenEpisode(session, self._act, 0, parallel=True, parts=[])
        episode.stored |= STORED
        keys = self._gateway.open(episode)
        honest = _request(DIALECTS[0].path, {"host": "127.0.0.1", "x-api-key": CLIENT}, json.dumps(HONEST[0]).encode())
        status, body = await self._asked(made.content, keys, _PATIENCE_S)
        after, words = await self._asked(honest, keys, _ANSWER_S)
        self._gateway.close(*keys)
        require(after == 200, f"an honest request behind it is answered with {after}: {words:.200}")
        if status >= 500:
            raise Defect(f"the gateway failed with {status}: {body:.200}")
        if status >= 400 or not status:
            raise Refused(body)
        require(made.is_known, f"a request of somebody else was answered with {status}")

    async def _act(self, request: Request) -> Action:
        ids = self._chat.encode_action("yes")[: request.max_tokens]
        return Action.of(ids, [-0.5] * len(ids), self._chat.end_ids)

    async def _asked(self, content: bytes, keys: tuple[str, str], seconds: float) -> tuple[int, str]:
        """The status and the body of an answer; 0 where none comes."""
        url = urlsplit(self._gateway.url)
        for name, key in zip((CLIENT, REWARD), keys, strict=True):
            content = content.replace(name.encode(), key.encode())
        reader, writer = await asyncio.open_connection(url.hostname, url.port)
        writer.write(content)
        answer = b""
        with suppress(ConnectionError, TimeoutError):
            async with asyncio.timeout(seconds):
                answer = await reader.read()
        writer.close()
        head, _, body = answer.partition(b"\r\n\r\n")
        return int(head.split(b" ")[1]) if head else 0, body.decode(errors="replace")


def _line(text: str) -> str:
    return "".join(letter for letter in text if letter not in "\r\n\0")


def _request(path: str, headers: dict[str, str], body: bytes) -> bytes:
    fields = {**headers, "content-type": "application/json", "content-length": str(len(body)), "connection": "close"}
    lines = "".join(f"{name}: {value}\r\n" for name, value in fields.items())
    return f"POST {path} HTTP/1.1\r\n{lines}\r\n".encode("latin-1", "replace") + body
