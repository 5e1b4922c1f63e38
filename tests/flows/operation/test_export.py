"""An exported folder on a Hub of this machine, which HF_ENDPOINT names."""

import base64
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from flows.operation.export import require_pushable
from tests.answering import Heard, Said, answering
from tests.cases import cases

TOKEN = "hf_secret"
ROOT = Path(__file__).parents[3]
PUSH = """
import sys, pathlib
from flows.operation.export import push
for name in sys.argv[2:]:
    push(pathlib.Path(sys.argv[1]), name)
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    exported = tmp_path / "agent"
    exported.mkdir()
    (exported / "README.md").write_text("---\nlicense: mit\n---\n# A card\n")
    (exported / "model.safetensors").write_bytes(bytes(100))
    return exported


@pytest.mark.slow  # a process that imports huggingface_hub
def test_folder_is_committed_with_its_card_and_a_refusal_names_the_remedy_and_no_token(folder: Path) -> None:
    """A Hub that takes commits to repositories of `me`."""
    made = list[dict[str, Any]]()
    files = dict[str, bytes]()

    def hub(heard: Heard) -> Said:
        about, *lines = heard.body if isinstance(heard.body, list) else [heard.body]
        said: dict[str, Any] = {"errors": [], "warnings": []}  # of the card
        if heard.headers["authorization"] != f"Bearer {TOKEN}" or "/other/" in heard.path or "other" in str(about):
            return 403, b'{"error": "you may not write there"}'
        if heard.path == "/api/repos/create":
            made.append(about)
            said = {"url": f"{url}/me/agent", "id": "1"}
        elif heard.path.endswith("/preupload/main"):
            regular = {"uploadMode": "regular", "shouldIgnore": False}
            said = {"files": [{"path": file["path"], **regular} for file in about["files"]]}
        elif heard.path.endswith("/commit/main"):
            files.update({line["value"]["path"]: base64.b64decode(line["value"]["content"]) for line in lines})
            said = {"commitUrl": f"{url}/me/agent/commit/abc", "commitOid": "abc", "pullRequestUrl": None}
        return 200, json.dumps(said).encode()

    with answering(hub) as url:
        own = {"HF_ENDPOINT": url, "HF_TOKEN": TOKEN, "HF_HUB_OFFLINE": "0", "HF_HUB_DISABLE_XET": "1"}
        command = [sys.executable, "-c", PUSH, str(folder), "me/agent", "other/agent"]
        ended = subprocess.run(command, cwd=ROOT, env={**os.environ, **own}, capture_output=True, text=True)
    assert files == {file.name: file.read_bytes() for file in folder.iterdir()}, ended.stderr
    assert [(each["organization"], each["name"]) for each in made] == [("me", "agent")]
    assert made[0].get("private") or made[0]["visibility"] == "private"
    assert f"ValueError: {folder} is written, and {url} did not take it as other/agent: " in ended.stderr
    assert "correct name or HF_TOKEN, and push it with `hf upload`" in ended.stderr
    assert TOKEN not in ended.stderr


@cases("token, name, message")
def test_push_needs_token_and_name(token: str, name: str, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", token)
    with pytest.raises(ValueError, match=message):
        require_pushable(name)
