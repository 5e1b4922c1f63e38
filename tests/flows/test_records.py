"""DVC's own records stay whole, or come back, whatever ends DVC while it writes them."""

import json
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
import yaml

from agent_r1.faults import Warned
from flows.dvc_files import DVC, RUNNING
from flows.graph import out_of_date
from flows.operation.doctor import dvc
from tests.cases import cases
from tests.fixtures import WriteParams
from tests.flows.conftest import STAGE_THAT_STAYS

ENDS = {
    "SIGINT": f"os.kill(os.getpid(), {signal.SIGINT})",
    "SIGTERM": f"os.kill(os.getpid(), {signal.SIGTERM})",
    "kill -9": f"os.kill(os.getpid(), {signal.SIGKILL})",
    "a full disk": f"raise OSError({28}, 'No space left on device')",
}
# What happens once DVC has written a part of a record, in its writing of YAML or of JSON.
MEETS = """
import json, os, ruamel.yaml
def meet(owner, name):
    written = getattr(owner, name)
    def write(*arguments):
        [stream] = [each for each in arguments if hasattr(each, "write")]
        if os.path.basename(stream.name).startswith(({record!r}, os.path.basename({record!r}) + ".")):
            stream.write("schema: '2.0'" if owner is not json else "{{")
            stream.flush()
            {end}
            stream.seek(0)
            stream.truncate()
        return written(*arguments)
    setattr(owner, name, write)
meet(ruamel.yaml.YAML, "dump")
meet(json, "dump")
"""


@pytest.fixture
def project(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lay_dvc: Callable[..., None], write_params: WriteParams
) -> Path:
    """A project of two stages, of which the first is recorded."""
    monkeypatch.chdir(tmp_path)
    lay_dvc(tmp_path)
    write_params(tmp_path, {})
    stages = {name: {"cmd": f"echo {name} > {name}.txt", "outs": [f"{name}.txt"]} for name in ("prepare", "index")}
    (tmp_path / "dvc.yaml").write_text(yaml.safe_dump({"stages": stages}))
    subprocess.run([*DVC, "repro", "--quiet", "prepare"], check=True)
    return tmp_path


def repro_meets(end: str, record: str) -> int:
    [python, option, module, *arguments] = DVC
    script = MEETS.format(end=end, record=record) + f"import runpy\nrunpy.run_module({module!r}, run_name='__main__')"
    assert option == "-m"
    return subprocess.run([python, "-c", script, *arguments, "repro", "--quiet"], check=False).returncode


@cases("end, record")
def test_no_end_of_dvc_cuts_a_record_off(project: Path, end: str, record: str) -> None:
    finished = repro_meets(ENDS[end], record) == 0
    assert finished == (end == "SIGTERM"), "DVC finishes its writing before a signal ends it"
    recorded = {*yaml.safe_load((project / "dvc.lock").read_text())["stages"]}
    assert recorded == ({"prepare", "index"} if finished else {"prepare"})
    json.loads((project / ".dvc/tmp/rwlock").read_text())
    subprocess.run([*DVC, "repro", "--quiet"], check=True)
    assert out_of_date() == set()
    assert not [*project.glob("*.tmp"), *project.glob(".dvc/tmp/*.tmp")]


def test_run_cache_that_a_kill_left_without_its_entry_stops_nothing(project: Path) -> None:
    stage = {"cmd": "cp params.yaml made", "deps": ["params.yaml"], "outs": ["made"]}
    (project / "dvc.yaml").write_text(yaml.safe_dump({"stages": {"prepare": stage}}))
    subprocess.run([*DVC, "repro", "--quiet"], check=True)
    [entry] = project.glob(".dvc/cache/runs/*/*/*")
    for path in (entry, project / "dvc.lock", project / "made"):
        path.unlink()
    subprocess.run([*DVC, "repro", "--quiet"], check=True)
    assert out_of_date() == set()


STAGE = """
from pathlib import Path
from flows.stage import run_stage

def index() -> None:
    Path("index.txt").write_text("index")

run_stage(index)
"""


@pytest.mark.parametrize("left", ["", "schema: '2.0", "schema: '2.0'\nstages:\n  prepare:\n    cmd: 'echo"])
def test_record_that_bare_dvc_cut_off_is_put_back(project: Path, left: str, caplog: pytest.LogCaptureFixture) -> None:
    (project / "index.py").write_text(STAGE)
    graph = yaml.safe_load((project / "dvc.yaml").read_text())
    graph["stages"]["index"]["cmd"] = f"{sys.executable} index.py"
    (project / "dvc.yaml").write_text(yaml.safe_dump(graph))
    subprocess.run([sys.executable, "-m", "dvc", "repro", "--quiet"], check=True)
    (project / "dvc.lock").write_text(left)
    RUNNING.write_text("")
    with pytest.raises(Warned, match="there is no remote"):
        dvc()  # the doctor's check
    assert out_of_date() == {"index"}, "whose end was not recorded"
    assert f"{RUNNING}, dvc.lock was cut off while DVC wrote it, and is as before" in caplog.text


def test_record_without_a_copy_is_named_with_a_remedy_that_works(project: Path) -> None:
    (project / "dvc.lock").write_text("")
    with pytest.raises(ValueError, match=r"dvc\.lock is cut off, and no whole copy was kept; `git checkout dvc\.lock`"):
        out_of_date()
    (project / "dvc.lock").unlink()
    subprocess.run([*DVC, "repro", "--quiet"], check=True)
    assert out_of_date() == set()


@pytest.mark.parametrize("shell", ["sh", "bash"])  # dash stays between DVC and the stage, bash becomes the stage
def test_stage_ends_with_a_bare_dvc_that_is_killed(project: Path, monkeypatch: pytest.MonkeyPatch, shell: str) -> None:
    monkeypatch.setenv("SHELL", f"/bin/{shell}")
    (project / "stay.py").write_text(STAGE_THAT_STAYS)
    (project / "dvc.yaml").write_text(f"stages: {{train: {{cmd: {sys.executable} stay.py began}}}}")
    subprocess.run(["mkfifo", "began"], check=True)
    with subprocess.Popen([sys.executable, "-m", "dvc", "repro", "--quiet"]) as bare:
        stage = psutil.Process(int((project / "began").read_text()))
        bare.kill()
    assert psutil.wait_procs([stage], timeout=60)[1] == []
