"""Environments behind an OpenEnv server (github.com/huggingface/OpenEnv), played in text over its WebSocket.

The wire: `/ws` is a session, which is asked `{"type": "reset" | "step", "data": {...}}` and answers with an
observation or an error; `GET /schema` says of which fields actions and observations are made.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import logging
import ssl
from collections.abc import Sequence
from typing import Annotated, Any, Literal

import httpx
from pydantic import BaseModel, Field, FiniteFloat, RootModel
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed, WebSocketException

from agent_r1.envs.shared import Shared
from agent_r1.envs.text_env import Reply, Setup, TextEnv, meant
from agent_r1.faults import WorldFault
from agent_r1.harmless import harmless, without_password
from agent_r1.http.client import BadAnswerError, Client, parsed, read_key
from agent_r1.params.env import EnvParams
from agent_r1.params.sections import nearest
from agent_r1.params.worlds import OpenEnvParams
from agent_r1.records import Outcome, Question
from agent_r1.tools.base import ToolError

KEY = "AGENT_R1_OPENENV_KEY_"  # with a server's name in capitals: what it is sent as a bearer token
MAX_ANSWER_BYTES = 1 << 22
CLOSE_S = 5.0
_SEEDS = 1 << 31  # what every generator of random numbers takes
_EXCERPT = 500  # characters of a server's own words in a message
_REFUSED = "VALIDATION_ERROR"  # the code of an action that is not of the shape that the environment takes

logger = logging.getLogger(__name__)
_wire = logging.getLogger(f"{__name__}.wire")  # it would log the key with DEBUG


class OpenEnvSetup(Setup):
    """Arguments of the reset; one without a seed is sent the episode's own, so that a group begins in several ways."""

    reset: dict[str, Any] = Field(default={})


class _State(BaseModel):
    observation: dict[str, Any] = Field(default={})
    reward: FiniteFloat | None = None
    done: bool


class _Detail(BaseModel):
    msg: str = ""


class _Problem(BaseModel):
    message: str = ""
    code: str = ""
    errors: list[_Detail] = Field(default=[])

    def __str__(self) -> str:
        return harmless("; ".join([self.message, *(each.msg for each in self.errors)])[:_EXCERPT])


class _Observed(BaseModel):
    type: Literal["observation"]
    data: _State


class _Failed(BaseModel):
    type: Literal["error"]
    data: _Problem


class _Frame(RootModel[Annotated[_Observed | _Failed, Field(discriminator="type")]]):
    """What a server answers."""


class _Fields(BaseModel):
    properties: dict[str, Any] = Field(default={})
    required: list[str] = Field(default=[])


class _Schema(BaseModel):
    action: _Fields
    observation: _Fields
    reset_observation: _Fields | None = None


class OpenEnv(TextEnv):
    """One session of a server. Whatever it does wrong is a WorldFault; an action of another shape is the agent's."""

    def __init__(self, question: Question, shared: Shared, seed: int) -> None:
        """`seed` is sent where the row has none."""
        setup, self._params = meant(question, OpenEnvSetup, shared.limits.openenv)
        super().__init__(self._params.task or question.text, shared.limits)
        self._reset = {"seed": seed % _SEEDS} | setup.reset
        self._who, self._key = _who(setup.name, self._params), _key(setup.name)
        self._session: ClientConnection | None = None

    async def begin(self) -> str:
        self._session = await self._connected()
        begun = await self._ask("reset", self._reset)
        if isinstance(begun, _Problem):
            raise WorldFault(f"{self._who} does not begin: {begun}")
        if begun.done:
            raise WorldFault(f"{self._who} has ended before it began")
        return self._read(begun)

    async def move(self, text: str) -> Reply:
        reached = await self._ask("step", {self._params.action: text})
        if isinstance(reached, _Problem):
            raise ToolError(str(reached))
        if reached.reward is None:
            raise WorldFault(f"{self._who} gave no reward for a step")
        success = reached.reward > self._params.success_above
        if reached.done:
            return Reply("", reached.reward, success, Outcome.ENDED)
        return Reply(self._read(reached), reached.reward, success)

    async def close(self) -> None:
        """Leaves the session; a server that does not let go is left behind."""
        if self._session:
            with contextlib.suppress(OSError, WebSocketException):
                await self._session.close()

    async def _connected(self) -> ClientConnection:
        url = f"ws{self._params.url.removeprefix('http')}/ws"
        headers = {"Authorization": f"Bearer {self._key}"} if self._key else {}
        _wire.setLevel(logging.INFO)
        try:
            return await connect(
                url,
                additional_headers=headers,
                compression=None,  # compressed, a small answer could become a large one while it is read
                logger=_wire,
                max_size=MAX_ANSWER_BYTES,
                open_timeout=self._params.timeout_s,
                ping_timeout=None,  # a step may keep a server from anything else, and has a limit of its own
                close_timeout=CLOSE_S,
                ssl=_tls() if url.startswith("wss://") else None,
            )
        except TimeoutError:
            raise WorldFault(f"{self._who} was not reached within {self._params.timeout_s:g} s") from None
        except (OSError, WebSocketException, ValueError) as fault:
            raise WorldFault(f"{self._who} cannot be reached: {_said(fault)}") from fault

    async def _ask(self, kind: str, data: dict[str, Any]) -> _State | _Problem:
        """What came of it, or how it was refused; any other answer, or none, is a WorldFault."""
        if self._session is None:
            raise RuntimeError("the environment was not opened")
        try:
            async with asyncio.timeout(self._params.timeout_s):
                with contextlib.suppress(ConnectionClosed):  # a server that is full has said so before it is asked
                    await self._session.send(json.dumps({"type": kind, "data": data}))
                answer = parsed(await self._session.recv(decode=False), _Frame).root.data
        except TimeoutError:
            raise WorldFault(f"{self._who} did not answer a {kind} within {self._params.timeout_s:g} s") from None
        except (OSError, WebSocketException, BadAnswerError) as fault:
            raise WorldFault(f"{self._who} failed in a {kind}: {_said(fault)}") from fault
        if isinstance(answer, _Problem) and answer.code != _REFUSED:
            code = harmless(answer.code[:_EXCERPT])
            raise WorldFault(f"{self._who} failed in a {kind}: {code or 'an error without a code'}: {answer}")
        return answer

    def _read(self, state: _State) -> str:
        name = self._params.observation
        if name not in state.observation:
            raise WorldFault(f"{self._who} sent an observation without {name!r}{nearest(name, state.observation)}")
        said = state.observation[name]
        return said if isinstance(said, str) else json.dumps(said, ensure_ascii=False)


def require_openenv(questions: Sequence[Question], limits: EnvParams) -> None:
    """Looks at the schemas of the servers that the questions name.

    Raises ValueError for a question whose server is not declared, and for one that has other fields than params.yaml
    says; WorldFault for one that does not answer.
    """
    used = [meant(question, OpenEnvSetup, limits.openenv) for question in questions]
    for name, params in {setup.name: params for setup, params in used}.items():
        try:
            answer = Client(params.url, params.timeout_s, _key(name)).ask("GET", "/schema")
            if answer.status != 200:
                raise OSError(f"status {answer.status}: {answer.excerpt}")
            _require_fields(answer.parse(_Schema), params)
        except OSError as fault:
            raise WorldFault(f"{_who(name, params)} does not say its schema: {_said(fault)}") from fault
        except ValueError as fault:
            raise ValueError(f"{_who(name, params)}: {fault}") from None


def _require_fields(schema: _Schema, params: OpenEnvParams) -> None:
    shown = [schema.observation, *([schema.reset_observation] if schema.reset_observation else [])]
    for what, name, fields in [
        ("action", params.action, schema.action),
        *(("observation", params.observation, fields) for fields in shown),
    ]:
        if name not in fields.properties:
            raise ValueError(f"its {what} has no field {name!r}{nearest(name, fields.properties)}")
    if more := [name for name in schema.action.required if name != params.action]:
        raise ValueError(f"its action needs {more[0]!r} too, and the policy writes one text")


@functools.cache
def _tls() -> ssl.SSLContext:
    """Takes longer to make than a step to take."""
    return httpx.create_ssl_context()


def _key(name: str) -> str:
    return read_key(KEY + name.upper().replace("-", "_"))


def _who(name: str, params: OpenEnvParams) -> str:
    return f"the OpenEnv server {name} ({harmless(params.url)[:200]})"


def _said(fault: BaseException) -> str:
    return harmless(without_password(f"{type(fault).__name__}: {fault}"[:_EXCERPT])).rstrip(": ")
