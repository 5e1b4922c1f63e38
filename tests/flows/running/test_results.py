"""A server that names, in a state, a result that would run code: no process of a flow reads it."""

import base64
import json
import pickle
from importlib.metadata import version
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest

from tests.answering import Heard, answering
from tests.fixtures import ROOT

STAGE = """
from flows.stage import clean_end, run_stage

def train() -> None:
    pass

with clean_end():
    run_stage(train)
"""
COMMAND = """
from flows.pipeline import run_pipeline

run_pipeline()
"""
DEPLOYED = """
import asyncio, yaml
from prefect import flow
from prefect.deployments.steps.core import run_steps

with open("{file}") as file:
    asyncio.run(run_steps(yaml.safe_load(file)["pull"]))
flow(name="train")(lambda: None)()
"""
IDS = {name: str(uuid4()) for name in ("flow", "run", "block", "type")}


class Touching:
    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.mark,)


def hostile(folder: Path, serializer: dict[str, str], heard: Heard) -> tuple[int, bytes]:
    """What Prefect's server says of a run that is over before it began, and whose result is a file of this folder."""
    now = "2026-01-01T00:00:00Z"
    flow_run = {"id": IDS["run"], "name": "x", "flow_id": IDS["flow"]}
    data = {"storage_key": "result", "serializer": serializer, "storage_block_id": IDS["block"]}
    over = {"type": "COMPLETED", "name": "Completed", "id": str(uuid4()), "timestamp": now, "data": data}
    kind = {"id": IDS["type"], "name": "Local File System", "slug": "local-file-system"}
    schema = {"checksum": "sha256:x", "fields": {}, "block_type_id": IDS["type"], "block_type": kind}
    block = {"id": IDS["block"], "name": "x", "data": {"basepath": str(folder)}, "block_schema_id": str(uuid4())}
    said: dict[str, object] = {
        "/api/admin/version": version("prefect"),
        "/api/flows/": {"id": IDS["flow"], "name": "train"},
        "/api/flow_runs/": flow_run,
        f"/api/flow_runs/{IDS['run']}": flow_run | {"state": over},
        f"/api/flow_runs/{IDS['run']}/set_state": {
            "state": over,
            "status": "REJECT",
            "details": {"type": "reject_details", "reason": "it is over"},
        },
        f"/api/block_documents/{IDS['block']}": block
        | {"block_type_id": IDS["type"], "block_type": kind, "block_schema": schema},
    }
    path = heard.path.partition("?")[0]
    return (
        (200, json.dumps(said.get(path, {})).encode())
        if path != "/api/csrf-token"
        else (422, b"CSRF protection is disabled.")
    )


@pytest.mark.parametrize("script", [STAGE, COMMAND, DEPLOYED.format(file=ROOT / "prefect.yaml")])
def test_no_result_of_another_process_is_unpickled(start: Any, tmp_path: Path, script: str) -> None:
    mark, serializer = tmp_path / "ran", {"type": "pickle"}
    pickled = base64.encodebytes(pickle.dumps(Touching(mark))).decode()
    (tmp_path / "result").write_text(json.dumps({"metadata": {"serializer": serializer}, "result": pickled}))
    with answering(lambda heard: hostile(tmp_path, serializer, heard)) as url:
        process = start("-c", script, PREFECT_API_URL=f"{url}/api", PREFECT_HOME=str(tmp_path))
        _, said = process.communicate()
    assert not mark.exists()
    assert process.returncode == 1
    assert "names a result that this process has not made" in said


def test_no_module_is_imported_that_a_state_names(start: Any, tmp_path: Path) -> None:
    mark = tmp_path / "ran"
    (tmp_path / "named.py").write_text(f"open({str(mark)!r}, 'w')\ndumps = loads = print")
    with answering(lambda heard: hostile(tmp_path, {"type": "pickle", "picklelib": "named"}, heard)) as url:
        process = start("-c", STAGE, PREFECT_API_URL=f"{url}/api", PREFECT_HOME=str(tmp_path))
        process.communicate()
    assert not mark.exists()
