"""The kits for a GPU in miniature: their parts run on a CPU, and what cannot run is named."""

import fnmatch
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import cuda, gpu, kit
from benchmarks.synthetic import Work, make_model

ROOT = Path(__file__).parents[1]
pytestmark = pytest.mark.slow  # every part of the kit runs, and one of them hangs

SMALL = ["--sizes", "tiny", "--samplers", "transformers", "--tokens", "96", "32", "--episodes", "4", "--out"]


@pytest.mark.usefixtures("only_traced")
def test_the_kit_measures_what_fits_and_names_what_it_leaves_out(tmp_path: Path) -> None:
    parts = gpu.campaign(gpu.parsed([*SMALL, str(tmp_path), "--no-outputs"]))
    sampled = [f"tiny: {trains}, transformers, " for trains in gpu.SAMPLED["transformers"]]
    assert [part["part"] for part in parts] == [
        "tiny: adapters",
        "tiny: all weights",
        "tiny: all weights, checkpoint",
        "CPU seconds between rounds",
        *(name + asked for name in sampled for asked in ("again", "reloaded", "rested")),
        "tiny: all weights, packed",
        "tiny: all weights, packed and compiled",
        "tiny: all weights, offloaded",
    ]
    assert [part for part in parts if "left out" in part] == []
    rows = {part["part"]: part for part in parts}
    for trains in gpu.TRAINS:
        assert rows[f"tiny: {trains}"]["updated tokens/s"] > 0 < rows[f"tiny: {trains}"]["share of the products' rate"]
    for name in sampled:
        assert rows[f"{name}again"]["same bits twice"]
        assert 0 <= rows[f"{name}reloaded"]["canary"] < 1e-4
        assert 0 <= rows[f"{name}reloaded"]["updated, canary"] < 1e-4
        assert 0 <= rows[f"{name}rested"]["canary"] < 1e-4
    stored = json.loads((tmp_path / "gpu.json").read_text())
    assert (stored["device"], stored["parts"]) == ("CPU", parts)
    late = gpu.campaign(gpu.parsed([*SMALL, str(tmp_path / "late"), "--budget", "0"]))
    assert {part["left out"] for part in late} == {"out of time"}
    assert kit.show_rows(late[:1]).splitlines()[-1].startswith("| tiny: output in chunks of 2^25, blocks of 2^20 | out")


def test_a_part_that_hangs_is_ended_and_the_others_are_measured(tmp_path: Path) -> None:
    script = tmp_path / "three.py"
    script.write_text(
        "import time\n"
        "from pathlib import Path\n"
        "from benchmarks.kit import tried\n"
        "parts = {'first': lambda: {'a': 1.0}, 'hangs': lambda: time.sleep(600), 'last': lambda: {'a': 2.0}}\n"
        f"tried(parts, Path({str(tmp_path / 'gpu.json')!r}), limit=2)\n"
    )
    own = "import runpy, sys; sys.path.insert(0, '.'); runpy.run_path(sys.argv[1])"
    first, hangs, last = kit.attended([sys.executable, "-c", own, str(script)], tmp_path / "gpu.json", 60)
    assert (first["a"], last["a"]) == (1.0, 2.0)
    assert hangs == {"part": "hangs", "left out": "it hung, or its process was killed"}


def test_the_kit_begins_on_a_machine_with_little_installed() -> None:
    hidden = {"vllm", "pyarrow", "httpx", "prefect", "mlflow", "dvc"}
    code = (
        "import sys\n"
        "from importlib.machinery import PathFinder\n"
        "class Bare(PathFinder):\n"
        "    @classmethod\n"
        "    def find_spec(cls, name, path=None, target=None):\n"
        f"        hidden = name.split('.')[0] in {hidden}\n"
        "        return None if hidden else super().find_spec(name, path, target)\n"
        "sys.meta_path = [Bare if each is PathFinder else each for each in sys.meta_path]\n"
        "import benchmarks.gpu, benchmarks.cuda\n"
    )
    ended = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=240)
    assert ended.returncode == 0, ended.stderr[-3000:]


def test_the_page_explains_every_part_and_no_other(tmp_path: Path) -> None:
    page = (ROOT / "docs" / "first_hour_gpu.md").read_text()
    rows = [line for line in page.splitlines() if line.startswith("| `")]
    patterns = [pattern for row in rows for pattern in re.findall(r"`([^`]+)`", row.split(" | ")[0])]
    given, work = gpu.parsed(["--sizes", "0.5B", "3B"]), Work(episodes=2, prompt=160, action=96)
    measured = dict(gpu.parts_of(given, work, 1.0, dict.fromkeys(given.sizes, tmp_path)))
    parts = [*cuda.parts_of(tmp_path, 1, 1), *measured]
    for part in parts:
        assert sum(fnmatch.fnmatchcase(part, pattern) for pattern in patterns) == 1, part
    assert [pattern for pattern in patterns if not fnmatch.filter(parts, pattern)] == []


def test_what_is_learned_here_is_what_is_learned_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU both sides are the same, so every difference in float32 is none."""
    monkeypatch.setattr(cuda, "LENGTHS", (12, 20, 15, 18))
    make_model(tmp_path, (*cuda.SHAPE, 512), 512, device=cuda.CPU)
    parts = cuda.parts_of(tmp_path, 1, 1)
    found = parts["learner: packing, gradient checkpointing"]()
    assert {value for name, value in found.items() if name.startswith("float32")} == {0.0, True}
    assert 0 < found["bfloat16: policy gradient"] < 0.02
    assert parts["supervised learning"]() == {"losses": 0.0, "offloaded": 0.0}
    assert parts["checkpoint: adapters"]() == {"same": True, "same after an update": True}
    assert parts["attention: window 20, heads of 64"]()["of keys"] < 0.01
