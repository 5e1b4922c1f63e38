"""Tools of other programs, over the Model Context Protocol: a command that is started, or an address."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import logging
import os
import re
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import IO, Self, TextIO, TypeVar, cast

import anyio
import httpx2
from mcp import Client, MCPError, StdioServerParameters
from mcp.client.stdio import stdio_client
from mcp.client.streamable_http import streamable_http_client
from mcp_types import (
    CONNECTION_CLOSED,
    INVALID_PARAMS,
    AudioContent,
    CallToolResult,
    EmbeddedResource,
    ImageContent,
    ResourceLink,
    TextContent,
    TextResourceContents,
)
from pydantic import ValidationError

from agent_r1.faults import WorldFault, WorldTimeout
from agent_r1.harmless import harmless, without_password
from agent_r1.http.client import EXCERPT, BadAnswerError, in_words, read_key, require_plain, require_small
from agent_r1.params.tools import McpParams
from agent_r1.records import CallStatus, Json
from agent_r1.tools.base import Schema, ServedTool, Tool, ToolResult, function_schema

KEY = "AGENT_R1_MCP_KEY_"  # with a server's name in capitals: the bearer token that it is sent
START_S = 60.0  # until a server has listed its tools
STOP_S = 15.0
MAX_TOOLS = 64
SESSION_LOST = 40_404  # in place of a server's code: it does not know the session of a request, and did nothing
_ASKS = re.compile("elicit|sampling|roots/", re.IGNORECASE)  # in a server's words, of a tool that asks its client back
_LOST = {"code": SESSION_LOST, "message": "the server does not know the session"}
_FAULTS = (  # of a session with a server that is ill
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

T = TypeVar("T")
Check = Callable[[list[Schema]], None]  # raises ValueError for schemas that cannot be offered
logger = logging.getLogger(__name__)


class SessionLost(WorldFault):
    """A server did not carry out a request, because it does not know the session; it may have been restarted."""


class McpSession:
    """A session with one server in a task of its own: any task may open or close it, and open it again."""

    def __init__(self, name: str, params: McpParams) -> None:
        """Starts nothing yet. Raises ValueError for an environment variable that cannot be handed on."""
        where = params.url or " ".join((params.command or [])[:2])
        self.who = f"the MCP server {name} ({harmless(without_password(where))[:200]})"
        self._params = params
        self._key = read_key(KEY, name)
        if missing := [variable for variable in params.environment if variable not in os.environ]:
            raise ValueError(f"env.tools.mcp hands on {missing[0]}, which is not set in the environment; set it")
        self._calls = set[asyncio.Task[CallToolResult]]()  # under way
        logging.getLogger("mcp").setLevel(logging.CRITICAL)  # it logs a server's unasked words line by line

    async def open(self, check: Check) -> list[Schema]:
        """The checked schemas of the tools; WorldFault if the server is out of reach, ValueError if it is unfit."""
        self._opened: asyncio.Future[list[Schema]] = asyncio.get_running_loop().create_future()
        self._end = asyncio.Event()
        self._lost = False
        self._task = asyncio.create_task(self._live(check), name=self.who)
        try:
            return await self._opened
        except BaseException:
            if self._opened.cancelled():
                self._task.cancel()
            await self.close()
            raise

    async def close(self) -> None:
        self._end.set()
        _, pending = await asyncio.wait([self._task], timeout=STOP_S)
        for task in pending:
            task.cancel()
        await asyncio.wait([self._task])
        fault = None if self._task.cancelled() else self._task.exception()
        if fault:
            logger.info("%s did not end in peace: %s", self.who, in_words(fault))

    @property
    def is_lost(self) -> bool:
        """Whether the server has ended the session."""
        return self._lost or self._task.done()

    async def open_again(self, check: Check) -> None:
        """Opens a new session, after the calls that are still under way in this one; see `open`."""
        if self._calls:
            await asyncio.wait(self._calls)
        logger.warning("%s is opened again", self.who)
        await self.close()
        await self.open(check)

    async def call(self, tool: str, arguments: Json) -> ToolResult:
        """The result of a call. Raises SessionLost if the server does not know the session, else WorldFault."""
        call = asyncio.create_task(self._client.call_tool(tool, arguments))
        self._calls.add(call)
        call.add_done_callback(self._calls.discard)
        try:
            return as_result(await self._answered(call, tool))
        except WorldFault as fault:
            cause = fault.__cause__
            if isinstance(cause, MCPError) and cause.code == INVALID_PARAMS:
                return ToolResult(text=str(cause), call_status=CallStatus.BAD_ARGUMENTS)
            if isinstance(cause, MCPError) and _ASKS.search(str(cause)):
                _warn_once(f"{self.who}: its tool {tool} asks a person or a model; leave it out by the key tools")
                return ToolResult(text=str(cause), call_status=CallStatus.FAILED)
            raise

    async def schemas(self) -> list[Schema]:
        """The schemas of the tools now. Raises ValueError if they cannot be offered, and else the errors of `call`."""
        return await self._answered(self._listed(), "the list of its tools")

    async def _answered(self, request: Awaitable[T], what: str) -> T:
        """The answer to a request, within its limit of time. A fault of the session is noted."""
        client = self._client
        limit = asyncio.timeout(self._params.timeout_s)
        try:
            async with limit:
                return await request
        except _FAULTS as fault:
            if limit.expired():
                raise WorldTimeout(f"{self.who} took longer than {self._params.timeout_s:g} s for {what}") from None
            code = fault.code if isinstance(fault, MCPError) else None
            if code in (CONNECTION_CLOSED, SESSION_LOST) and client is self._client:
                self._lost = True
            kind = SessionLost if code == SESSION_LOST else WorldFault
            raise kind(f"{self.who} failed in {what}: {in_words(fault)}") from fault

    async def _listed(self) -> list[Schema]:
        """The schemas of the tools that params.yaml names, or of all; a ValueError says why they cannot be offered."""
        names = self._params.tools
        page = await self._client.list_tools()
        tools = [*page.tools]
        while page.next_cursor is not None and page.tools and len(tools) <= MAX_TOOLS:
            page = await self._client.list_tools(cursor=page.next_cursor)
            tools += page.tools
        available = [tool.name for tool in tools]
        if missing := [name for name in names or () if name not in available]:
            raise ValueError(f"it has no tool {missing[0]!r}, only {', '.join(available)[:EXCERPT]}")
        tools = [tool for tool in tools if names is None or tool.name in names]
        if not 0 < len(tools) <= MAX_TOOLS:
            raise ValueError(f"it offers {len(tools)} tools, and not 1 to {MAX_TOOLS}; name some under its key tools")
        schemas = []
        for tool in tools:
            try:
                if tool.execution and tool.execution.task_support == "required":
                    raise ValueError(f"tool {tool.name[:80]!r}: it runs as a task, whose result nobody would fetch")
                schemas.append(function_schema(tool.name, tool.description or "", tool.input_schema))
            except ValueError as fault:
                if names or (tool is tools[-1] and not schemas):  # nothing would be left
                    raise
                _warn_once(f"{self.who}: {harmless(str(fault))}; it is left out")
        return schemas

    async def _live(self, check: Check) -> None:
        """Opens the session, says so, and closes it at the end."""
        with tempfile.TemporaryFile("w+", errors="replace") as log:
            async with contextlib.AsyncExitStack() as stack:
                try:
                    async with asyncio.timeout(START_S):
                        self._client = await stack.enter_async_context(_connected(self._params, self._key, log))
                        # The policy reads texts: no schema of the server's is worth its unbounded validator.
                        self._client.session.validate_tool_result = _unchecked  # type: ignore[method-assign]
                        schemas = await self._listed()
                        check(schemas)
                except FileNotFoundError as fault:
                    self._opened.set_exception(ValueError(f"{self.who} has no command {fault.filename!r}"))
                except (ValueError, *_FAULTS) as fault:
                    self._opened.set_exception(self._refusal(fault, log))
                else:
                    self._opened.set_result(schemas)
                    await self._end.wait()

    def _refusal(self, fault: Exception, log: IO[str]) -> Exception:
        """A fault in opening, with the end of a command's log."""
        log.seek(0)
        words = harmless(log.read()[-EXCERPT:]).strip()
        end = f"; its last words: {words}" if words else ""
        if isinstance(fault, TimeoutError):
            return WorldTimeout(f"{self.who} did not list its tools within {START_S:g} s{end}")
        if isinstance(fault, ValueError) and not isinstance(fault, _FAULTS):
            return ValueError(f"{self.who}: {fault}")
        return WorldFault(f"{self.who} cannot be used: {in_words(fault)}{end}")


class Server:
    """The tools of one server, as they were when it was opened. A lost session is opened again by the next request."""

    def __init__(self, name: str, params: McpParams, tools: Sequence[Tool] = ()) -> None:
        """Starts nothing yet. The server must have the `tools`, if any; for errors see `McpSession`."""
        self.tools = [*tools]
        self._name = name
        self._params = params
        self._session = McpSession(name, params)
        self._opening = asyncio.Lock()

    async def __aenter__(self) -> Self:
        """Raises WorldFault if the server cannot be reached, and ValueError if it cannot be used as it is."""
        schemas = await self._session.open(self._require_same)
        self.tools = [ServedTool(schema, self.ask) for schema in schemas]
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._session.close()

    def for_episode(self, is_as_kept: Callable[[ToolResult, ToolResult], bool]) -> Sequence[Tool]:
        """The tools of one episode: those of the stage's session, or of a session of its own."""
        if self._params.scope == "stage":
            return self.tools
        server = _EpisodeServer(self._name, self._params, self.tools, is_as_kept)
        return [_EpisodeTool(tool.schema, server) for tool in self.tools]

    async def verify(self) -> None:
        """Raises ValueError if the server has other tools now, and WorldFault if it does not say."""
        self._require_same(await self._in_session(self._session.schemas))

    async def ask(self, tool: str, arguments: Json) -> ToolResult:
        """The result of a call; raises WorldFault if there is none."""
        return await self._in_session(lambda: self._session.call(tool, arguments))

    async def _in_session(self, request: Callable[[], Awaitable[T]]) -> T:
        """Makes a request, and once more in a new session if the server did not know the old one."""
        await self._open_again()
        try:
            return await request()
        except SessionLost:
            await self._open_again()
            return await request()

    async def _open_again(self) -> None:
        """Opens a new session if this one was lost."""
        async with self._opening:
            if self._session.is_lost:
                await self._session.open_again(self._require_same)

    def _require_same(self, schemas: list[Schema]) -> None:
        expected = [tool.schema for tool in self.tools] or schemas
        if schemas != expected:
            differences = [
                schema for schema in (*schemas, *expected) if schema not in schemas or schema not in expected
            ]
            names = ", ".join(dict.fromkeys(schema["function"]["name"] for schema in differences)) or "their order"
            raise ValueError(f"{self._session.who} has other tools than when this began ({names}); begin again")


class _EpisodeTool(ServedTool):
    """A tool of an episode's own session."""

    def __init__(self, schema: Schema, server: _EpisodeServer) -> None:
        super().__init__(schema, server.ask)
        self._server = server

    async def recall(self, arguments: Json, result: ToolResult) -> None:
        self._server.recalled.append((self.name, arguments, result))

    async def close(self) -> None:
        await self._server.close()


class _EpisodeServer(Server):
    """A session of one episode, opened by its first call and closed with it, so that its state is the episode's own.

    The server knows nothing of calls that a journal answered. They are made again before the first call that the
    journal does not answer, and an episode whose session answers them in another way is cut short.
    """

    def __init__(
        self, name: str, params: McpParams, tools: Sequence[Tool], is_as_kept: Callable[[ToolResult, ToolResult], bool]
    ) -> None:
        super().__init__(name, params, tools)
        self._is_as_kept = is_as_kept
        self._is_open = False
        self.recalled: list[tuple[str, Json, ToolResult]] = []  # calls that a journal answered

    async def ask(self, tool: str, arguments: Json) -> ToolResult:
        """The result of a call; raises WorldFault if there is none, or the session was lost."""
        who = self._session.who
        async with self._opening:
            if not self._is_open:
                await self._session.open(self._require_same)
                self._is_open = True
            for name, past_arguments, past_result in self.recalled:
                if not self._is_as_kept(await self._session.call(name, past_arguments), past_result):
                    raise WorldFault(f"{who} answers {name} in another way than before the stage was ended")
            self.recalled.clear()
        if self._session.is_lost:
            raise WorldFault(f"{who} ended the session of an episode")
        return await self._session.call(tool, arguments)

    async def close(self) -> None:
        """Closes the session, if a call has opened it."""
        if self._is_open:
            self._is_open = False
            await self._session.close()


@contextlib.asynccontextmanager
async def _connected(params: McpParams, key: str, log: IO[str]) -> AsyncIterator[Client]:
    """A client of a command, which writes beside its answers to `log`, or of an address, which is sent the key."""
    if params.command:
        command, *arguments = params.command
        environment = {name: os.environ[name] for name in params.environment}
        server = StdioServerParameters(command=command, args=arguments, env=environment)
        async with Client(stdio_client(server, cast(TextIO, log)), cache=None) as client:
            yield client
        return
    headers = {"accept-encoding": "identity"} | ({"authorization": f"Bearer {key}"} if key else {})
    limits = httpx2.Timeout(params.timeout_s, read=None)  # a call has one of its own
    async with (
        httpx2.AsyncClient(headers=headers, timeout=limits, transport=_BoundedAnswers()) as http,
        Client(streamable_http_client(params.url or "", http_client=http), cache=None) as client,
    ):
        yield client


class _BoundedAnswers(httpx2.AsyncHTTPTransport):
    """Limits the answer to a request while it is read. A server's unasked words have no end, and no limit.

    By the protocol, 404 to a request of a session says that the server does not know the session.
    """

    async def handle_async_request(self, request: httpx2.Request) -> httpx2.Response:
        response = await super().handle_async_request(request)
        if request.method == "POST":
            if response.status_code == httpx2.codes.NOT_FOUND and "mcp-session-id" in request.headers:
                await response.aclose()
                return httpx2.Response(httpx2.codes.NOT_FOUND, json={"jsonrpc": "2.0", "id": None, "error": _LOST})
            require_plain(response.headers)
            response.stream = _Counted(cast("httpx2.AsyncByteStream", response.stream))
        return response


@dataclass
class _Counted(httpx2.AsyncByteStream):
    """The bytes of an answer, as long as it is small enough."""

    stream: httpx2.AsyncByteStream

    async def __aiter__(self) -> AsyncIterator[bytes]:
        size = 0
        async for piece in self.stream:
            size += len(piece)
            require_small(size)
            yield piece

    async def aclose(self) -> None:
        await self.stream.aclose()


async def _unchecked(name: str, result: CallToolResult) -> None:
    """Takes every result for one of its tool's declared shape."""


@functools.cache  # a server is asked again and again
def _warn_once(words: str) -> None:
    logger.warning("%s", words)


def as_result(result: CallToolResult) -> ToolResult:
    """Joins the text blocks, notes each other block as left out, and falls back to the structured content."""
    text = "\n".join(_texts(result))
    if not result.content and result.structured_content is not None:
        text = json.dumps(result.structured_content, ensure_ascii=False)
    return ToolResult(text=text, call_status=CallStatus.FAILED if result.is_error else CallStatus.OK)


def _texts(result: CallToolResult) -> Iterator[str]:
    for block in result.content:
        match block:
            case TextContent():
                yield block.text
            case EmbeddedResource(resource=TextResourceContents() as resource):
                yield resource.text
            case EmbeddedResource():
                yield f"[a file ({block.resource.mime_type or 'binary'}) left out]"
            case ImageContent():
                yield f"[an image ({block.mime_type}) left out]"
            case AudioContent():
                yield f"[a sound ({block.mime_type}) left out]"
            case ResourceLink():
                yield f"[a link to {block.name}: {block.uri}]"
