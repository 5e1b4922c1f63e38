"""The kits for a GPU in miniature: their parts run on a CPU, and what cannot run is named."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from torch.nn.attention import varlen

from benchmarks import cuda, gpu, kit
from benchmarks.synthetic import make_model

SMALL = ["--sizes", "tiny", "--samplers", "transformers", "--tokens", "160", "96", "--episodes", "8", "--out"]


def test_the_kit_measures_what_fits_and_names_what_it_leaves_out(tmp_path: Path) -> None:
    parts = gpu.campaign(gpu.parsed([*SMALL, str(tmp_path), "--no-outputs"]))
    assert [part["part"] for part in parts] == [
        *(f"tiny: {trains}" for trains in gpu.TRAINS),
        "tiny: all weights, transformers",
        "tiny: adapters, transformers",
        "tiny: weights through the disk",
        "tiny: all weights, checkpoint",
    ]
    assert [part["part"] for part in parts if "left out" in part] == []
    for part in parts[: len(gpu.TRAINS)]:
        assert part["updated tokens/s"] > 0 < part["share of the products' rate"]
    for part in parts[len(gpu.TRAINS) : -2]:
        assert 0 <= part["canary"] < 1e-4
        assert 0 <= part["canary after an update"] < 1e-4
    stored = json.loads((tmp_path / "gpu.json").read_text())
    assert (stored["device"], stored["parts"]) == ("CPU", parts)
    late = gpu.campaign(gpu.parsed([*SMALL, str(tmp_path), "--budget", "0"]))
    assert {part["left out"] for part in late} == {"out of time"}
    assert kit.show_rows(late[:1]).splitlines()[-1].startswith("| tiny: all weights | out of time |")
    few = ["--tokens", "16", "8", "--trains", "all weights", "--no-outputs", "--no-disk"]
    [small, _] = gpu.campaign(gpu.parsed([*SMALL, str(tmp_path), *few]))
    assert small["left out"].startswith("ValueError: benchmarks.gpu: runs.dapo: credit.overlong_buffer 102")


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


def test_a_kernel_without_a_word_for_grouped_heads_is_given_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(varlen, "varlen_attn", lambda query, *, scale: (query, scale))
    kit.accept_grouped_heads()
    with kit.counted_kernel() as calls:
        assert varlen.varlen_attn([0, 0], scale=2.0, enable_gqa=True) == ([0, 0], 2.0)
    assert calls == [2]
