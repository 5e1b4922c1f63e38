"""The index stage, and an evaluation whose searches go to a search server."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from agent_r1.records import CallStatus, Trajectory
from agent_r1.search.index import describe
from agent_r1.tables import read_rows
from flows.commands.execute import index
from flows.evaluate import EvaluationRequest, evaluate
from tests.fixtures import PLACES, Inside, WriteParams


def test_agent_searches_on_a_server(
    small_project: Path, tmp_path: Path, serve_index: Callable[[Path], str], inside: Inside, write_params: WriteParams
) -> None:
    served = serve_index(small_project / PLACES.index)
    write_params(tmp_path, {"search": {"kind": "remote", "remote": {"url": served}}})
    for part in ("data/prepared", "outputs/warm_start"):
        shutil.copytree(small_project / part, tmp_path / part)
    folder = tmp_path / PLACES.evaluation("base_tool_call")
    left = folder / ".predictions.parquet.1.tmp"  # of one that was killed
    left.parent.mkdir(parents=True)
    left.touch()
    with inside(tmp_path):
        index()
        evaluate(EvaluationRequest("base_tool_call"))
    assert not left.exists()
    episodes = read_rows(folder / "trajectories.parquet", Trajectory)
    statuses = {step.call_status for episode in episodes for step in episode.steps}
    assert CallStatus.OK in statuses
    assert not statuses & {CallStatus.FAILED, CallStatus.TIMEOUT}
    hashes = json.loads((folder / "hashes.json").read_text())
    assert hashes["index"] == describe(small_project / PLACES.index).index_hash, "the index's hash, wherever it is"

    (tmp_path / PLACES.passages).write_bytes((tmp_path / PLACES.passages).read_bytes() + b" ")
    with inside(tmp_path), pytest.raises(ValueError, match=r"passages.parquet is damaged .*`dvc checkout --force"):
        evaluate(EvaluationRequest("base_tool_call"))
