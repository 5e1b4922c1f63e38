"""Environments behind an OpenEnv server (github.com/huggingface/OpenEnv), played in text over its WebSocket.

The wire: `/ws` is a session, which is asked `{"type": "reset" | "step", "data": {...}}` and answers with an
observation or an error; `GET /schema` says of which fields actions and observations are made.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Annotated, Any, Literal

from mcp_types import CallToolResult
from mcp_types import Tool as Listed
from pydantic import BaseModel, Field, FiniteFloat, RootModel, TypeAdapter
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed, WebSocketException

from agent_r1.envs.base import Transition, opened
from agent_r1.envs.shared import Shared
from agent_r1.envs.text_env import Moved, Setup, TextEnv, ToolWorld, ended, meant
from agent_r1.faults import WorldFault, WorldTimeout
from agent_r1.harmless import harmless
from agent_r1.http.client import EXCERPT, Client, in_words, parsed, read_key, tls
from agent_r1.outside.mcp import as_result
from agent_r1.params.env import EnvParams
from agent_r1.params.outside import OpenEnvParams
from agent_r1.params.sections import nearest
from agent_r1.records import CallStatus, Json, Outcome, Question
from agent_r1.tools.base import ServedTool, ToolError, ToolResult, function_schema

KEY = "AGENT_R1_OPENENV_KEY_"  # with a server's name in capitals: the bearer token that it is sent
MAX_ANSWER_BYTES = 1 << 22
CLOSE_S = 5.0
_SEEDS = 1 << 31  # the seeds that every generator of random numbers takes
_REFUSED = "VALIDATION_ERROR"  # the code of an action that is not of the shape that the environment takes

logger = logging.getLogger(__name__)
_wire = logging.getLogger(f"{__name__}.wire")  # it would log the key with DEBUG


class OpenEnvSetup(Setup):
    """Arguments of the reset. Without a seed the episode's own is sent, so that a group begins in several ways."""

    reset: Json = Field(default={})


class _State(BaseModel):
    observation: Json = Field(default={})
    reward: FiniteFloat | None = None
    done: bool


class _Detail(BaseModel):
    msg: str = ""


class _Problem(BaseModel):
    message: str = ""
    code: str = ""
    errors: list[_Detail] = Field(default=[])

    def __str__(self) -> str:
        return harmless("; ".join([self.message, *(detail.msg for detail in self.errors)])[:EXCERPT])


class _Observed(BaseModel):
    type: Literal["observation"]
    data: _State


class _Failed(BaseModel):
    type: Literal["error"]
    data: _Problem


_Frame = RootModel[Annotated[_Observed | _Failed, Field(discriminator="type")]]


class _Fields(BaseModel):
    properties: Json = Field(default={})
    required: list[str] = Field(default=[])


class _Schema(BaseModel):
    action: _Fields
    observation: _Fields
    reset_observation: _Fields | None = None


class OpenEnv(TextEnv):
    """One session of a server. The server's faults are WorldFaults; an action of another shape is the agent's."""

    def __init__(self, question: Question, shared: Shared, seed: int) -> None:
        """`seed` is sent if the row has none."""
        setup, self.params = meant(question, OpenEnvSetup, shared.limits.openenv)
        super().__init__(self.params.task or question.text, shared.limits)
        self._reset = {"seed": seed % _SEEDS} | setup.reset
        self.who = _who(setup.name, self.params)
        self._key = read_key(KEY, setup.name)
        self._session: ClientConnection | None = None
        self._one_at_a_time = asyncio.Lock()

    async def begin(self) -> str:
        self._session = await self._connected()
        answer = await self.ask("reset", self._reset)
        if isinstance(answer, _Problem):
            raise WorldFault(f"{self.who} does not begin: {answer}")
        if answer.done:
            raise WorldFault(f"{self.who} has ended before it began")
        return self._read(answer)

    async def move(self, text: str) -> Moved:
        answer = await self.ask("step", {str(self.params.action): text})
        if isinstance(answer, _Problem):
            raise ToolError(str(answer))
        if answer.reward is None:
            raise WorldFault(f"{self.who} gave no reward for a step")
        success = answer.reward > self.params.success_above
        if answer.done:
            return Moved("", answer.reward, success, Outcome.ENDED)
        return Moved(self._read(answer), answer.reward, success)

    async def close(self) -> None:
        """Leaves the session, at once if the server does not close it in time."""
        if self._session:
            with contextlib.suppress(OSError, WebSocketException):
                await self._session.close()

    async def _connected(self) -> ClientConnection:
        url = f"ws{self.params.url.removeprefix('http')}/ws"
        _wire.setLevel(logging.INFO)
        with self.named("connection"):
            return await connect(
                url,
                additional_headers={"Authorization": f"Bearer {self._key}"} if self._key else {},
                compression=None,  # compressed, a small answer could become a large one while it is read
                logger=_wire,
                max_size=MAX_ANSWER_BYTES,
                open_timeout=self.params.timeout_s,
                ping_timeout=None,  # a step may keep a server from anything else, and has a limit of its own
                close_timeout=CLOSE_S,
                ssl=tls() if url.startswith("wss://") else None,
            )

    async def ask(self, kind: str, data: Json) -> _State | _Problem:
        """The state that a request leads to, or its refusal. Raises WorldFault for any other answer, or none."""
        if self._session is None:
            raise RuntimeError("the environment was not opened")
        with self.named(kind):
            async with self._one_at_a_time, asyncio.timeout(self.params.timeout_s):
                with contextlib.suppress(ConnectionClosed):  # a server that is full has said so before it is asked
                    await self._session.send(json.dumps({"type": kind, "data": data}))
                answer = parsed(await self._session.recv(decode=False), _Frame).root.data
        if isinstance(answer, _Problem) and answer.code != _REFUSED:
            code = harmless(answer.code[:EXCERPT]) or "an error without a code"
            raise WorldFault(f"{self.who} failed in a {kind}: {code}: {answer}")
        return answer

    @contextlib.contextmanager
    def named(self, kind: str) -> Iterator[None]:
        """Turns the faults of a request into WorldFaults that name the server and the request."""
        try:
            yield
        except TimeoutError:
            raise WorldTimeout(f"{self.who} did not answer a {kind} within {self.params.timeout_s:g} s") from None
        except (OSError, WebSocketException, ValueError) as fault:
            raise WorldFault(f"{self.who} failed in a {kind}: {in_words(fault)}") from fault

    def _read(self, state: _State) -> str:
        name = self.params.observation
        if name is not None and name not in state.observation:
            raise WorldFault(f"{self.who} sent an observation without {name!r}{nearest(name, state.observation)}")
        return _text(state.observation if name is None else state.observation[name])


class OpenEnvTools(ToolWorld):
    """One session of a server whose environment has tools, played with these.

    Rewards are `env`, the sum over a step's calls, and at the end `success`, a last reward above `success_above`.
    """

    def __init__(self, question: Question, shared: Shared, seed: int) -> None:
        """`seed` is sent if the row has none."""
        self._world = OpenEnv(question, shared, seed)
        super().__init__(question, self._world.params.task, shared)
        self._paid = 0.0  # by the calls of a step
        self._last = -math.inf  # by the last call that was paid
        self._done = False

    async def open(self) -> None:
        self.show(await self._world.begin())
        answer = await self._world.ask("step", {"type": "list_tools"})
        if isinstance(answer, _Problem):
            raise ValueError("it knows no tools; name the fields of its action and its observation")
        with self._world.named("list of its tools"):
            tools = TypeAdapter(list[Listed]).validate_python(answer.observation.get("tools"))
        schemas = [function_schema(tool.name, tool.description or "", tool.input_schema) for tool in tools]
        self.offer([ServedTool(schema, self._call_tool) for schema in schemas])

    async def close(self) -> None:
        await self._world.close()

    async def step(self, action: str) -> Transition:
        """Takes an action's text, without its end token."""
        self._paid = 0.0
        reply = await super().step(action)
        if self._done:
            reply = ended(reply)
        if reply.outcome is Outcome.ABORTED:
            return reply
        success = {"success": float(self._last > self._world.params.success_above)} if reply.outcome else {}
        return replace(reply, rewards=reply.rewards | {"env": self._paid} | success)

    async def _call_tool(self, tool: str, arguments: Json) -> ToolResult:
        answer = await self._world.ask("step", {"type": "call_tool", "tool_name": tool, "arguments": arguments})
        if isinstance(answer, _Problem):
            return ToolResult(text=str(answer), call_status=CallStatus.BAD_ARGUMENTS)
        if answer.reward is not None:
            self._paid += answer.reward
            self._last = answer.reward
        self._done |= answer.done
        with self._world.named(f"call of {tool}"):
            return _result(answer.observation)


def _result(observation: Mapping[str, Any]) -> ToolResult:
    """The result of a call. Raises WorldFault if the call did not reach the tool, and ValueError for another shape."""
    match observation:
        case {"error": {"error_type": "transport_error", "message": message}}:
            raise WorldFault(harmless(str(message)[:EXCERPT]))
        case {"error": {"error_type": kind, "message": message}}:
            status = CallStatus.TIMEOUT if kind == "timeout" else CallStatus.FAILED
            return ToolResult(text=str(message), call_status=status)
        case {"result": {"content": _} as result}:
            return as_result(CallToolResult.model_validate(result))
    return ToolResult(text=_text(observation.get("result", observation)))


def _text(content: Any) -> str:
    return content if isinstance(content, str) else json.dumps(content, ensure_ascii=False)


def played(question: Question, shared: Shared, seed: int) -> OpenEnv | OpenEnvTools:
    """An episode with the server that a question names, with its tools unless params.yaml names an action's field."""
    _, params = meant(question, OpenEnvSetup, shared.limits.openenv)
    return (OpenEnv if params.action else OpenEnvTools)(question, shared, seed)


def require_openenv(questions: Sequence[Question], limits: EnvParams) -> None:
    """Checks the questions' servers: ValueError if undeclared or of other fields, WorldFault if silent."""
    by_server = {meant(question, OpenEnvSetup, limits.openenv)[0].name: question for question in questions}
    for name, question in by_server.items():
        params = limits.openenv[name]
        try:
            if params.action is None:
                asyncio.run(opened(OpenEnvTools(question, Shared(limits), 0)))
                continue
            answer = Client(params.url, params.timeout_s, read_key(KEY, name)).ask("GET", "/schema")
            if answer.status != 200:
                raise OSError(f"status {answer.status}: {answer.reason}")
            _require_fields(answer.parse(_Schema), params)
        except OSError as fault:
            raise WorldFault(f"{_who(name, params)} does not say its schema: {in_words(fault)}") from fault
        except ValueError as fault:
            raise ValueError(f"{_who(name, params)}: {fault}") from None


def _require_fields(schema: _Schema, params: OpenEnvParams) -> None:
    observations = [
        fields for fields in (schema.observation, schema.reset_observation) if fields and params.observation
    ]
    sides = [("action", params.action, schema.action)]
    sides += [("observation", params.observation, fields) for fields in observations]
    for side, name, fields in sides:
        if name not in fields.properties:
            tools = "; leave out `action` to call its tools" if "tool_name" in fields.properties else ""
            raise ValueError(f"its {side} has no field {name!r}{nearest(str(name), fields.properties)}{tools}")
    if missing := [name for name in schema.action.required if name != params.action]:
        raise ValueError(f"its action needs {missing[0]!r} too, and the policy writes one text")


def _who(name: str, params: OpenEnvParams) -> str:
    return f"the OpenEnv server {name} ({harmless(params.url)[:200]})"
