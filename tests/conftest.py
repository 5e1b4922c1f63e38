"""How the suite runs: who has its fixtures, how many processes, what is slow and comes first, what is made once."""

import contextlib
import gc
import os
import shutil
import signal
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest
from filelock import FileLock

# Fixtures that take seconds, or are for what does: a test that uses one of them is marked as slow.
SLOW = {
    "browser",
    "by_rank",
    "company",
    "counted",
    "empty_project",
    "endpoint",
    "engine_server",
    "grpo",
    "inside",
    "lay_dvc",
    "mlflow_server",
    "newer_prefect",
    "one_action_task",
    "ppo",
    "prefect_api",
    "pushed",
    "origin",
    "repository",
    "wheels",
    "serve_index",
    "served",
    "small_project",
    "start",
    "teacher_server",
    "venv",
}

# Tests reach no server, store or account of whoever runs them, follow none of their settings, and tell nobody.
LAUNCHED = ("LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "RANK", "WORLD_SIZE")
FOREIGN = (*LAUNCHED, "AGENT_R1_", "AWS_", "DVC_", "GOMP_", "MLFLOW_", "PREFECT_", "THP_")
NOWHERE = str(Path(__file__).parent / "nowhere")
OWN = {
    "DO_NOT_TRACK": "1",
    "DVC_GLOBAL_CONFIG_DIR": NOWHERE,
    "DVC_NO_ANALYTICS": "1",
    "DVC_SITE_CACHE_DIR": tempfile.mkdtemp(prefix="agent_r1-dvc-"),
    "DVC_SYSTEM_CONFIG_DIR": NOWHERE,
    "GIT_CONFIG_COUNT": "2",
    "GIT_CONFIG_KEY_0": "commit.gpgSign",
    "GIT_CONFIG_VALUE_0": "false",
    "GIT_CONFIG_KEY_1": "core.hooksPath",
    "GIT_CONFIG_VALUE_1": NOWHERE,
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "PREFECT_PROFILES_PATH": NOWHERE,
}

for variable in [name for name in os.environ if name.startswith(FOREIGN)]:
    del os.environ[variable]
os.environ.update(OWN)

# At the tests' size more threads are slower, the more so beside another process of the suite.
os.environ["OMP_NUM_THREADS"] = "1"

# A shell starts what it puts into the background with interrupts ignored, and that would reach the tests' processes.
signal.signal(signal.SIGINT, signal.default_int_handler)


# Imports make a million objects that stay: nobody looks whether they are garbage.
gc.disable()


def pytest_collection_finish() -> None:
    gc.freeze()
    gc.enable()


def pytest_unconfigure() -> None:
    shutil.rmtree(OWN["DVC_SITE_CACHE_DIR"], ignore_errors=True)
    gc.unfreeze()  # or modules of C++ take what is left at the end for leaks, and say so


@pytest.hookimpl(trylast=True)
def pytest_configure(config: pytest.Config) -> None:
    """Loads the fixtures, and torch with them, except in the process that only deals the tests out."""
    if not config.pluginmanager.hasplugin("dsession"):
        config.pluginmanager.import_plugin("tests.fixtures")


def pytest_xdist_auto_num_workers() -> int:
    """One more than there are cores, since servers and processes are waited for; four at most."""
    return min(4, len(os.sched_getaffinity(0)) + 1)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Marks what takes long, by what it is made of, and puts its files first: what is short fills the gaps at the end.

    Engines are the very first, because the other long ones wait for the small project.
    """
    first, long = set[Path](), set[Path]()
    for item in items:
        if not isinstance(item, pytest.Function) or item.get_closest_marker("walk"):
            continue
        of_engines = "VllmEngine" in vars(item.module)
        if SLOW & set(item.fixturenames) or of_engines:
            item.add_marker(pytest.mark.slow)
            (first if of_engines else long).add(item.path)
    items.sort(key=lambda item: (item.path not in first, item.path not in long))


def _shared(factory: pytest.TempPathFactory) -> Path:
    """The folder of what is made once for all processes of the suite."""
    own = factory.getbasetemp()
    return (own.parent if os.environ.get("PYTEST_XDIST_WORKER") else own) / "built"


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Ends the servers that the processes of the suite shared, when all of them are through."""
    if not os.environ.get("PYTEST_XDIST_WORKER"):
        for pid in _shared(session.config._tmp_path_factory).glob("*/pid"):  # type: ignore[attr-defined]
            with contextlib.suppress(ProcessLookupError):
                os.killpg(int(pid.read_text()), signal.SIGKILL)


@pytest.fixture(scope="session")
def build_once(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, Callable[[Path], None]], Path]:
    """Fills a folder once for all processes of the suite; they only read it."""
    shared = _shared(tmp_path_factory)

    def build(name: str, fill: Callable[[Path], None]) -> Path:
        folder = shared / name
        done = folder.with_suffix(".done")
        folder.parent.mkdir(exist_ok=True)
        with FileLock(folder.with_suffix(".lock")):
            if not done.exists():
                shutil.rmtree(folder, ignore_errors=True)  # what is left of an attempt that failed
                folder.mkdir()
                fill(folder)
                done.touch()
        return folder

    return build
