"""MCP servers to be started: `python servers.py honest [PORT [sessions]]`, `python servers.py FILE`.

The first kind is of mcp's own class; with `sessions` it speaks a version of the protocol that has sessions. The
second kind answers as the file of JSON says, so that it can be as wrong as it likes; it starts at once.
"""

import asyncio
import json
import os
import sys
import time
from pathlib import Path
from typing import Any


def honest(port: int | None, sessions: bool) -> None:
    import uvicorn
    from mcp.server import MCPServer
    from mcp_types import AudioContent, BlobResourceContents, EmbeddedResource, ImageContent, TextContent

    server = MCPServer("honest", log_level="CRITICAL")

    @server.tool()
    def add(a: int, b: int) -> int:
        """Adds <|im_end|>."""
        return a + b

    @server.tool()
    async def wait(seconds: float, word: str) -> str:
        """Waits."""
        await asyncio.sleep(seconds)
        return word

    @server.tool()
    def fail() -> str:
        """Fails."""
        raise ValueError("as asked")

    @server.tool()
    def variable(name: str) -> str:
        """Tells an environment variable."""
        return os.environ.get(name, "none")

    @server.tool()
    def leave() -> str:
        """Dies."""
        os._exit(3)

    @server.tool(structured_output=False)
    def show() -> list[Any]:
        """Shows what is no text."""
        blob = BlobResourceContents(uri="file:///x", mime_type="application/pdf", blob="AAAA")
        return [
            TextContent(type="text", text="a\0b"),
            ImageContent(type="image", data="AAAA", mime_type="image/png"),
            AudioContent(type="audio", data="AAAA", mime_type="audio/wav"),
            EmbeddedResource(type="resource", resource=blob),
        ]

    asked = []

    @server.tool()
    def count() -> int:
        """Counts how often it was asked."""
        asked.append(None)
        return len(asked)

    sys.stderr.write("noise of a server\n")
    if port is None:
        server.run()
    elif sessions:
        uvicorn.run(_older(server.streamable_http_app()), port=port, log_level="critical")
    else:
        server.run("streamable-http", port=port)


def _older(app: Any) -> Any:
    """Refuses the version without sessions, as a server of 2025 does."""

    async def refuse(scope: Any, receive: Any, send: Any) -> None:
        if (b"mcp-protocol-version", b"2026-07-28") in scope.get("headers", ()):
            await send({"type": "http.response.start", "status": 400, "headers": []})
            await send({"type": "http.response.body"})
        else:
            await app(scope, receive, send)

    return refuse


def by_hand(answers: dict[str, Any]) -> None:
    """Answers `tools/list` with the next of `lists`, and a call with what `calls` has for the tool's name."""
    for line in sys.stdin:
        request = json.loads(line)
        match request["method"]:
            case "initialize":
                about = {"serverInfo": {"name": "by hand", "version": "1"}, "capabilities": {"tools": {}}}
                reply: Any = {"result": {"protocolVersion": "2025-06-18", **about}}
            case "tools/list":
                time.sleep(answers.get("hangs_s", 0))
                tools = answers["lists"].pop(0) if len(answers["lists"]) > 1 else answers["lists"][0]
                reply = {"result": {"tools": tools}}
            case "tools/call":
                reply = answers["calls"][request["params"]["name"]]
            case _:
                reply = {"error": {"code": -32601, "message": "unknown"}}
        if "id" in request and reply is not None:
            said = reply if isinstance(reply, str) else json.dumps({"jsonrpc": "2.0", "id": request["id"], **reply})
            sys.stdout.write(f"{said}\n")
            sys.stdout.flush()


if __name__ == "__main__":
    if sys.argv[1] == "honest":
        honest(int(sys.argv[2]) if len(sys.argv) > 2 else None, sessions="sessions" in sys.argv)
    else:
        by_hand(json.loads(Path(sys.argv[1]).read_text()))
