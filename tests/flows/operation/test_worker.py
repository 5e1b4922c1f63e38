"""A sweep over two clones' workers: real servers, workers and DVC, with small scripts as stages."""

import shutil
import subprocess
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import pytest
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.objects import WorkerStatus
from prefect.exceptions import PrefectHTTPStatusError
from prefect.settings import PREFECT_API_URL, temporary_settings

from flows.dvc_files import ask_dvc
from flows.graph import out_of_date
from flows.operation.deploy import CRASH_DETECTION, of_processes, offer
from flows.pipeline import ablations
from tests.answering import wait_for
from tests.cases import graph
from tests.fixtures import WriteParams

POOL = "gpus"
PATIENCE_S = 300.0
# Ends once two clones have begun to train.
TRAIN = """
import pathlib, sys, time

label, clone = sys.argv[1], pathlib.Path.cwd()
(clone.parent / f"{clone.name}.begun").touch()
while len([*clone.parent.glob("*.begun")]) < 2:
    time.sleep(0.1)
with (clone.parent / "trained.txt").open("a") as said:
    said.write(f"{clone.name} {label}\\n")
folder = pathlib.Path("outputs/train") / label
folder.mkdir(parents=True)
(folder / "policy").write_text(f"{label} of {pathlib.Path('prepared.txt').read_text()}")
"""


@pytest.fixture
def clones(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    write_params: WriteParams,
    lay_dvc: Callable[..., None],
    prefect_api: str,
) -> dict[str, Path]:
    """Three clones of a project with one remote; this process is in the first."""
    lead = tmp_path / "lead"
    (lead / "ablations").mkdir(parents=True)
    graphs = {"dvc.yaml": graph("worked"), "ablations/graph.yaml": graph("worked_sweep")}
    for name, content in {**graphs, "train.py": TRAIN}.items():
        (lead / name).write_text(content)
    (lead / "source.txt").write_text("1\n")
    write_params(lead, {"operate": {"pool_patience_s": PATIENCE_S}})
    lay_dvc(lead, str(tmp_path / "storage"))
    for other in ("one", "two"):
        shutil.copytree(lead, tmp_path / other)
    monkeypatch.chdir(lead)
    monkeypatch.setenv("PREFECT_API_URL", prefect_api)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:1")  # which nothing here asks
    return {name: tmp_path / name for name in ("lead", "one", "two")}


@pytest.fixture
def workers(
    prefect_api: str, clones: dict[str, Path], start_in: Callable[..., subprocess.Popen[str]]
) -> Iterator[None]:
    started = [start_in(clones[name], "worker", "--pool", POOL, PREFECT_API_URL=prefect_api) for name in ("one", "two")]
    wait_for(lambda: are_online() == len(started), *started, pause_s=0.5)
    yield
    for process in started:
        process.terminate()
    assert [process.wait() for process in started] == [143, 143]


def are_online() -> int:
    with get_client(sync_client=True) as client:
        try:
            found = client.read_workers_for_work_pool(POOL)
        except PrefectHTTPStatusError:
            return 0
    return sum(worker.status == WorkerStatus.ONLINE for worker in found)


@pytest.mark.usefixtures("workers")
def test_sweep_trained_by_two_clones_is_whole_in_the_clone_that_sent_it(clones: dict[str, Path]) -> None:
    ablations(POOL)
    labels = [f"a-seed{seed}" for seed in (0, 1)]
    assert Path("report.txt").read_text() == "".join(f"{label} of 1\n" for label in labels)
    trained = [line.split() for line in (clones["lead"].parent / "trained.txt").read_text().splitlines()]
    assert sorted(label for _, label in trained) == labels
    assert {clone for clone, _ in trained} == {"one", "two"}
    assert not out_of_date()
    assert "didn't change" in ask_dvc("repro", "ablations/dvc.yaml").stdout


def test_workers_that_start_at_the_same_time_offer_one_pool(prefect_api: str) -> None:
    together = threading.Barrier(2)

    def start(client: SyncPrefectClient) -> None:
        together.wait(PATIENCE_S)
        offer(client, of_processes("others", None))

    with ExitStack() as clients:
        clients.enter_context(temporary_settings({PREFECT_API_URL: prefect_api}))
        both = [clients.enter_context(get_client(sync_client=True)) for _ in range(2)]
        with ThreadPoolExecutor(2) as workers:
            list(workers.map(start, both))
        assert both[0].read_work_pool("others").concurrency_limit is None
        assert len(both[0].read_automations_by_name(CRASH_DETECTION.name)) == 1
