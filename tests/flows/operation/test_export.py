"""An exported folder on a Hub of this machine, which HF_ENDPOINT names."""

import base64
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest

from flows.operation.export import require_pushable
from tests.cases import cases

TOKEN = "hf_secret"
ROOT = Path(__file__).parents[3]
PUSH = """
import sys, pathlib
from flows.operation.export import push
for name in sys.argv[2:]:
    push(pathlib.Path(sys.argv[1]), name)
"""


class Hub(ThreadingHTTPServer):
    """Takes commits to repositories of `me`."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.made: list[dict[str, Any]] = []
        self.files: dict[str, bytes] = {}

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class Handler(BaseHTTPRequestHandler):
    server: Hub

    def do_POST(self) -> None:
        lines = self.rfile.read(int(self.headers["content-length"])).splitlines()
        body = json.loads(lines[0])
        if self.headers["authorization"] != f"Bearer {TOKEN}" or "/other/" in self.path or "other" in str(body):
            self.say(403, {"error": "you may not write there"})
        elif self.path == "/api/repos/create":
            self.server.made.append(body)
            self.say(200, {"url": f"{self.server.url}/me/agent", "id": "1"})
        elif self.path.endswith("/preupload/main"):
            files = [{"path": file["path"], "uploadMode": "regular", "shouldIgnore": False} for file in body["files"]]
            self.say(200, {"files": files})
        elif self.path.endswith("/commit/main"):
            for line in map(json.loads, lines[1:]):
                self.server.files[line["value"]["path"]] = base64.b64decode(line["value"]["content"])
            url = f"{self.server.url}/me/agent/commit/abc"
            self.say(200, {"commitUrl": url, "commitOid": "abc", "pullRequestUrl": None})
        else:
            self.say(200, {"errors": [], "warnings": []})  # of the card

    def say(self, status: int, body: dict[str, Any]) -> None:
        content = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def hub() -> Iterator[Hub]:
    with Hub() as server:
        thread = Thread(target=server.serve_forever)
        thread.start()
        yield server
        server.shutdown()
        thread.join()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    exported = tmp_path / "agent"
    exported.mkdir()
    (exported / "README.md").write_text("---\nlicense: mit\n---\n# A card\n")
    (exported / "model.safetensors").write_bytes(bytes(100))
    return exported


def test_folder_is_committed_with_its_card_and_a_refusal_names_the_remedy_and_no_token(folder: Path, hub: Hub) -> None:
    own = {"HF_ENDPOINT": hub.url, "HF_TOKEN": TOKEN, "HF_HUB_OFFLINE": "0", "HF_HUB_DISABLE_XET": "1"}
    command = [sys.executable, "-c", PUSH, str(folder), "me/agent", "other/agent"]
    ended = subprocess.run(command, cwd=ROOT, env={**os.environ, **own}, capture_output=True, text=True)
    assert hub.files == {file.name: file.read_bytes() for file in folder.iterdir()}
    [made] = hub.made
    assert (made["organization"], made["name"]) == ("me", "agent")
    assert made.get("private") or made["visibility"] == "private"
    assert f"ValueError: {folder} is written, and {hub.url} did not take it as other/agent: " in ended.stderr
    assert "correct name or HF_TOKEN, and push it with `hf upload`" in ended.stderr
    assert TOKEN not in ended.stderr


@cases("token, name, message")
def test_push_needs_token_and_name(token: str, name: str, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", token)
    with pytest.raises(ValueError, match=message):
        require_pushable(name)
