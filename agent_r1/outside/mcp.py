"""Tools of other programs, over the Model Context Protocol: a command that is started, or an address."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any, Self, TextIO, TypeVar

import anyio
import httpx2
from mcp import Client, MCPError, StdioServerParameters
from mcp.client.stdio import stdio_client
from mcp.client.streamable_http import streamable_http_client
from mcp_types import CONNECTION_CLOSED, INVALID_PARAMS, CallToolResult
from pydantic import ValidationError

from agent_r1.faults import WorldFault
from agent_r1.harmless import harmless, without_password
from agent_r1.http.client import BadAnswerError, read_key
from agent_r1.outside.mcp_wire import (
    SESSION_LOST,
    Bounded,
    as_result,
    handed_on,
    last_words,
    listed,
    log_file,
    said,
)
from agent_r1.params.env import McpParams
from agent_r1.records import CallStatus
from agent_r1.tools.base import Schema, Tool, ToolResult

KEY = "AGENT_R1_MCP_KEY_"  # with a server's name in capitals: what it is sent as a bearer token
START_S = 60.0  # until a server has listed its tools
STOP_S = 15.0
_FAULTS = (  # what a session with a server that is ill can raise
    OSError,
    MCPError,
    ValidationError,
    RuntimeError,  # of a session that has ended, or of a result that is not of its tool's shape
    httpx2.HTTPError,
    BadAnswerError,
    anyio.BrokenResourceError,
    anyio.ClosedResourceError,
    ExceptionGroup,
)

logger = logging.getLogger(__name__)
T = TypeVar("T")


class SessionLost(WorldFault):
    """A server did not carry out a request, because it does not know the session; it may have been restarted."""


class McpTimeout(WorldFault, TimeoutError):
    """A call that a server did not answer in time."""


class Server:
    """A session with one server. A task of its own opens and closes it, so that anybody may, and its end ends no other.

    Its tools are those that it had when it was opened. A session that was lost is opened again by the next request.
    """

    def __init__(self, name: str, params: McpParams, known: Sequence[Tool] = ()) -> None:
        """Nothing is started yet; a ValueError names an environment variable that cannot be handed on.

        `known` are the tools that it is to have, if that is known.
        """
        self.tools = [*known]
        self._name, self._params = name, params
        self._key = read_key(KEY + name.upper().replace("-", "_"))
        self._environment = handed_on(params.environment)
        self._opening = asyncio.Lock()
        self._calls = set[asyncio.Task[CallToolResult]]()  # under way
        logging.getLogger("mcp").setLevel(logging.CRITICAL)  # it logs what a server says out of turn, line by line

    async def __aenter__(self) -> Self:
        """Raises WorldFault if the server cannot be reached, and ValueError if it cannot be used as it is."""
        await self._start()
        self.tools = [_McpTool(self, schema) for schema in self._schemas]
        return self

    def for_episode(self, is_as_kept: Callable[[ToolResult, ToolResult], bool]) -> Sequence[Tool]:
        """What one episode is offered: the tools of the stage's session, or those of a session of its own.

        `is_as_kept` says whether a result is that which was kept of the same call.
        """
        if self._params.scope == "stage":
            return self.tools
        own = _OfEpisode(self._name, self._params, self.tools, is_as_kept)
        return [_McpTool(own, tool.schema) for tool in self.tools]

    async def __aexit__(self, *_: object) -> None:
        await self._stop()

    async def verify(self) -> None:
        """Raises ValueError if the server has other tools now, and WorldFault if it does not say."""
        await self._in_session(self._verify_once)

    async def ask(self, tool: str, arguments: dict[str, Any]) -> ToolResult:
        """The result of a call; raises WorldFault if there is none."""
        return await self._in_session(lambda: self._ask_once(tool, arguments))

    async def _ask_once(self, tool: str, arguments: dict[str, Any]) -> ToolResult:
        """The result of a call in the session that is open; raises SessionLost if the server does not know it."""
        client, limit = self._client, asyncio.timeout(self._params.timeout_s)
        call = asyncio.create_task(client.call_tool(tool, arguments))
        self._calls.add(call)
        call.add_done_callback(self._calls.discard)
        try:
            async with limit:
                return as_result(await call)
        except _FAULTS as fault:
            if isinstance(fault, MCPError) and fault.code == INVALID_PARAMS:
                return ToolResult(text=str(fault), call_status=CallStatus.BAD_ARGUMENTS)
            if limit.expired():
                raise McpTimeout(f"{self.who} took longer than {self._params.timeout_s:g} s for {tool}") from None
            raise self._failed(f"failed in {tool}", fault, client) from fault

    async def recall(self, tool: str, arguments: dict[str, Any], result: ToolResult) -> None:
        """Nothing: the session is not of one episode."""

    async def close(self) -> None:
        """Nothing: the session is not of one episode."""

    @property
    def _is_lost(self) -> bool:
        """Whether the session has ended, by the server's doing."""
        return self._lost or self._task.done()

    async def _in_session(self, request: Callable[[], Awaitable[T]]) -> T:
        """Makes a request, and once more in a new session if the server did not know the old one."""
        await self._open_again()
        try:
            return await request()
        except SessionLost:
            await self._open_again()
            return await request()

    async def _verify_once(self) -> None:
        client = self._client
        try:
            async with asyncio.timeout(self._params.timeout_s):
                self._require_same(await listed(self._client.list_tools, self._params.tools))
        except TimeoutError:
            raise McpTimeout(f"{self.who} did not list its tools within {self._params.timeout_s:g} s") from None
        except _FAULTS as fault:
            raise self._failed("does not list its tools", fault, client) from fault

    def _failed(self, how: str, fault: Exception, client: Client) -> WorldFault:
        """Names a request's fault, and notes whether the session ended with it."""
        code = fault.code if isinstance(fault, MCPError) else None
        if code in (CONNECTION_CLOSED, SESSION_LOST) and client is self._client:
            self._lost = True
        return (SessionLost if code == SESSION_LOST else WorldFault)(f"{self.who} {how}: {said(fault)}")

    async def _open_again(self) -> None:
        """Opens a new session if this one was lost, after the calls that are still under way in it."""
        async with self._opening:
            if self._is_lost:
                if self._calls:
                    await asyncio.wait(self._calls)
                logger.warning("%s is opened again", self.who)
                await self._stop()
                await self._start()

    async def _start(self) -> None:
        self._opened: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._end, self._lost = asyncio.Event(), False
        self._task = asyncio.create_task(self._live(), name=f"mcp {self._name}")
        try:
            await self._opened
        except BaseException:
            if self._opened.cancelled():
                self._task.cancel()
            await self._stop()
            raise

    async def _stop(self) -> None:
        self._end.set()
        _, running = await asyncio.wait([self._task], timeout=STOP_S)
        for task in running:
            task.cancel()
        await asyncio.wait([self._task])
        if not self._task.cancelled() and (fault := self._task.exception()):
            logger.info("%s did not end in peace: %s", self.who, said(fault))

    async def _live(self) -> None:
        """Opens the session, says so, and closes it at the end."""
        async with contextlib.AsyncExitStack() as stack:
            log = stack.enter_context(log_file())
            try:
                async with asyncio.timeout(START_S):
                    self._client = await stack.enter_async_context(self._connected(log))
                    self._require_same(await listed(self._client.list_tools, self._params.tools))
            except FileNotFoundError as fault:
                self._opened.set_exception(ValueError(f"{self.who} has no command {fault.filename!r}"))
            except (ValueError, *_FAULTS) as fault:
                self._opened.set_exception(self._refusal(fault, log))
            else:
                self._opened.set_result(None)
                await self._end.wait()

    @contextlib.asynccontextmanager
    async def _connected(self, log: TextIO) -> AsyncIterator[Client]:
        if self._params.command:
            command, *arguments = self._params.command
            started = StdioServerParameters(command=command, args=arguments, env=self._environment)
            async with Client(stdio_client(started, log), cache=None) as client:
                yield client
            return
        headers = {"accept-encoding": "identity"} | ({"authorization": f"Bearer {self._key}"} if self._key else {})
        limits = httpx2.Timeout(self._params.timeout_s, read=None)  # a call has one of its own
        async with (
            httpx2.AsyncClient(headers=headers, timeout=limits, transport=Bounded()) as http,
            Client(streamable_http_client(self._params.url or "", http_client=http), cache=None) as client,
        ):
            yield client

    def _require_same(self, schemas: list[Schema]) -> None:
        known = [tool.schema for tool in self.tools] or schemas
        if schemas != known:
            changed = [schema for schema in (*schemas, *known) if schema not in schemas or schema not in known]
            names = ", ".join(dict.fromkeys(schema["function"]["name"] for schema in changed)) or "their order"
            raise ValueError(f"{self.who} has other tools than when this began ({names}); begin again")
        self._schemas = schemas

    def _refusal(self, fault: Exception, log: TextIO) -> Exception:
        end = last_words(log)
        if isinstance(fault, TimeoutError):
            return McpTimeout(f"{self.who} did not list its tools within {START_S:g} s{end}")
        if isinstance(fault, ValueError) and not isinstance(fault, _FAULTS):
            return ValueError(f"{self.who}: {fault}")
        return WorldFault(f"{self.who} cannot be used: {said(fault)}{end}")

    @property
    def who(self) -> str:
        where = self._params.url or " ".join((self._params.command or [])[:2])
        return f"the MCP server {self._name} ({harmless(without_password(where))[:200]})"


class _OfEpisode(Server):
    """A session of one episode, opened by its first call and ended with it: what the server remembers is the episode's.

    Of calls that a journal answered the server knows nothing. Before the first that it does not answer they are made
    again, so that the session is where it was; an episode whose session answers them in another way is cut short.
    """

    def __init__(
        self, name: str, params: McpParams, known: Sequence[Tool], is_as_kept: Callable[[ToolResult, ToolResult], bool]
    ) -> None:
        super().__init__(name, params, known)
        self._is_as_kept, self._is_open = is_as_kept, False
        self._recalled: list[tuple[str, dict[str, Any], ToolResult]] = []

    async def ask(self, tool: str, arguments: dict[str, Any]) -> ToolResult:
        """The result of a call; raises WorldFault if there is none, or the session was lost."""
        async with self._opening:
            if not self._is_open:
                await self._start()
                self._is_open = True
            for name, given, result in self._recalled:
                if not self._is_as_kept(await self._ask_once(name, given), result):
                    raise WorldFault(f"{self.who} answers {name} in another way than before the stage was ended")
            self._recalled.clear()
        if self._is_lost:
            raise WorldFault(f"{self.who} ended the session of an episode")
        return await self._ask_once(tool, arguments)

    async def recall(self, tool: str, arguments: dict[str, Any], result: ToolResult) -> None:
        self._recalled.append((tool, arguments, result))

    async def close(self) -> None:
        if self._is_open:
            self._is_open = False
            await self._stop()


@dataclass
class _McpTool(Tool):
    """A tool of a server, which checks the arguments itself."""

    session: Server
    schema: Schema

    def __post_init__(self) -> None:
        self.name: str = self.schema["function"]["name"]
        self.waits = True

    async def call(self, arguments: dict[str, Any]) -> ToolResult:
        return await self.session.ask(self.name, arguments)

    async def recall(self, arguments: dict[str, Any], result: ToolResult) -> None:
        await self.session.recall(self.name, arguments, result)

    async def close(self) -> None:
        await self.session.close()
