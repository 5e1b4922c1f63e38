"""Which overlay fits a GPU, asked without one: the longest lengths, remedies, and questions that have no answer."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from transformers import Qwen2Config

from agent_r1.learn.fit import CHANGES, STEP, fit, remedy
from agent_r1.learn.memory import total_gib
from agent_r1.params.places import RunId
from flows.operation.fit import show_fits
from flows.overlay import of_models
from tests.cases import cases

ROOT = Path(__file__).parents[3]
SHAPE = {
    "hidden_size": 2048,
    "num_hidden_layers": 36,
    "num_attention_heads": 16,
    "num_key_value_heads": 2,
    "intermediate_size": 11008,
    "vocab_size": 151936,
    "tie_word_embeddings": True,
}


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The configuration of a model of 3 billion weights, and no weights."""
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("COLUMNS", "80")
    Qwen2Config(**SHAPE, max_position_embeddings=32768).save_pretrained(tmp_path / "model")
    (tmp_path / "model" / "tokenizer_config.json").write_text("{}")
    return tmp_path / "model"


def test_the_longest_context_fits_and_one_step_more_does_not(model: Path) -> None:
    result = fit(Qwen2Config.from_pretrained(model), of_models()["qwen2.5-3b"], RunId("ppo"), 40)
    assert result.need_gib == total_gib(result.demand)
    longest = replace(result.demand, tokens=result.longest)
    assert total_gib(longest) <= 40 < total_gib(replace(longest, tokens=result.longest + STEP))


def test_every_overlay_has_its_lengths_and_what_is_short(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    show_fits(str(model), 80, 1)
    heading, *rows = capsys.readouterr().out.splitlines()
    assert heading.split() == ["overlay", "run", "trains", "context", "micro-batch", "GiB", "fits"]
    assert max(map(len, rows)) <= 80
    cells = {row.split()[0]: row.split() for row in rows}
    assert cells["qwen2.5-3b"][1:4] == ["ppo", "adapters", "8,192"]
    assert cells["qwen2.5-3b"][6:] == ["up", "to", "32,768"], "the model's window"
    need, short = float(cells["qwen2.5-7b"][5]), float(cells["qwen2.5-7b"][6])
    assert need - short == pytest.approx(80, abs=0.1)
    show_fits(str(model), 80, 8)
    shared = {row.split()[0]: row.split() for row in capsys.readouterr().out.splitlines()}
    assert float(shared["qwen2.5-7b"][5]) < need, "eight ranks share the weights"


@cases("gpu_gib, message")
def test_nothing_that_fits_says_by_how_much_and_the_nearest_remedy(model: Path, gpu_gib: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        show_fits(str(model), gpu_gib, 1)


def test_the_remedy_is_enough(model: Path) -> None:
    result = fit(Qwen2Config.from_pretrained(model), of_models()["qwen2.5-3b"], RunId("ppo"), 32)
    shorter = replace(result.demand, tokens=result.longest)
    assert remedy(result, 32) == f"contexts and micro-batches of {result.longest:,} tokens fit"
    assert total_gib(shorter) <= 32 < total_gib(result.demand)
    [setting] = [name for name in CHANGES if remedy(result._replace(longest=0), 32) == f"set {name}"]
    assert total_gib(replace(result.demand, **CHANGES[setting])) <= 32


def test_no_length_goes_beyond_the_window(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Qwen2Config(**SHAPE, max_position_embeddings=4096).save_pretrained(model)
    show_fits(str(model), 1000, 1)
    rows = {row.split()[0]: row.split()[6:] for row in capsys.readouterr().out.splitlines()}
    assert rows["qwen2.5-3b"] == ["up", "to", "4,096"]
    assert rows["smollm2"] == ["up", "to", "4,096"]


def test_what_is_no_model_is_named(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(FileNotFoundError, match=r"there is no folder \./nothing; name one, or a hub id"):
        show_fits("./nothing", 24, 1)
    with pytest.raises(FileNotFoundError, match=r"has no config\.json; save a model and its tokenizer"):
        show_fits(str(tmp_path), 24, 1)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(ValueError, match=r"no config\.json comes from no-such/model: .*; name a folder"):
        show_fits("no-such/model", 24, 1)
    config = Qwen2Config(**SHAPE, quantization_config={"quant_method": "gptq", "bits": 4})
    config.save_pretrained(model)
    with pytest.raises(ValueError, match=r"is quantised \(gptq\); take the release in bfloat16"):
        show_fits(str(model), 24, 1)
