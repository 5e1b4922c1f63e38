"""Tools of other programs, over the Model Context Protocol: a command that is started, or an address."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any, Self, TypeVar

from agent_r1.faults import WorldFault
from agent_r1.outside.mcp_wire import Session, SessionLost
from agent_r1.params.env import McpParams
from agent_r1.tools.base import Schema, Tool, ToolResult

T = TypeVar("T")


class Server:
    """The tools of one server, as they were when it was opened. A lost session is opened again by the next request."""

    def __init__(self, name: str, params: McpParams, known: Sequence[Tool] = ()) -> None:
        """Starts nothing yet. The server must have the tools `known`, if any; for errors see `Session`."""
        self.tools = [*known]
        self._name, self._params = name, params
        self._session = Session(name, params)
        self._opening = asyncio.Lock()

    async def __aenter__(self) -> Self:
        """Raises WorldFault if the server cannot be reached, and ValueError if it cannot be used as it is."""
        schemas = await self._session.open(self._require_same)
        self.tools = [_McpTool(self, schema) for schema in schemas]
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._session.close()

    def for_episode(self, is_as_kept: Callable[[ToolResult, ToolResult], bool]) -> Sequence[Tool]:
        """The tools of one episode: those of the stage's session, or of a session of its own.

        `is_as_kept` compares a result with the one that was kept of the same call.
        """
        if self._params.scope == "stage":
            return self.tools
        own = _OfEpisode(self._name, self._params, self.tools, is_as_kept)
        return [_McpTool(own, tool.schema) for tool in self.tools]

    async def verify(self) -> None:
        """Raises ValueError if the server has other tools now, and WorldFault if it does not say."""
        self._require_same(await self._in_session(self._session.schemas))

    async def ask(self, tool: str, arguments: dict[str, Any]) -> ToolResult:
        """The result of a call; raises WorldFault if there is none."""
        return await self._in_session(lambda: self._session.call(tool, arguments))

    async def recall(self, tool: str, arguments: dict[str, Any], result: ToolResult) -> None:
        """Does nothing: the session is not of one episode."""

    async def close(self) -> None:
        """Does nothing: the session is not of one episode."""

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
        known = [tool.schema for tool in self.tools] or schemas
        if schemas != known:
            changed = [schema for schema in (*schemas, *known) if schema not in schemas or schema not in known]
            names = ", ".join(dict.fromkeys(schema["function"]["name"] for schema in changed)) or "their order"
            raise ValueError(f"{self._session.who} has other tools than when this began ({names}); begin again")


class _OfEpisode(Server):
    """A session of one episode, opened by its first call and closed with it, so that its state is the episode's own.

    The server knows nothing of calls that a journal answered. They are made again before the first call that the
    journal does not answer, and an episode whose session answers them in another way is cut short.
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
                await self._session.open(self._require_same)
                self._is_open = True
            for name, given, result in self._recalled:
                if not self._is_as_kept(await self._session.call(name, given), result):
                    raise WorldFault(
                        f"{self._session.who} answers {name} in another way than before the stage was ended"
                    )
            self._recalled.clear()
        if self._session.is_lost:
            raise WorldFault(f"{self._session.who} ended the session of an episode")
        return await self._session.call(tool, arguments)

    async def recall(self, tool: str, arguments: dict[str, Any], result: ToolResult) -> None:
        """Notes a call that a journal answered."""
        self._recalled.append((tool, arguments, result))

    async def close(self) -> None:
        """Closes the session, if a call has opened it."""
        if self._is_open:
            self._is_open = False
            await self._session.close()


@dataclass
class _McpTool(Tool):
    """A tool of a server, which checks the arguments itself."""

    server: Server
    schema: Schema

    def __post_init__(self) -> None:
        self.name: str = self.schema["function"]["name"]
        self.waits = True

    async def call(self, arguments: dict[str, Any]) -> ToolResult:
        return await self.server.ask(self.name, arguments)

    async def recall(self, arguments: dict[str, Any], result: ToolResult) -> None:
        await self.server.recall(self.name, arguments, result)

    async def close(self) -> None:
        await self.server.close()
