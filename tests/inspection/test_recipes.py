"""Runs held against the bands of recipes: curves by hand, files that somebody sent, and the command."""

import json
import re
from collections.abc import Callable
from pathlib import Path

import pandas as pd
import pytest

from agent_r1.files import write_text
from agent_r1.identity import Identity, write_start
from agent_r1.inspection.recipes import METRICS, check, curve_of, read_curves, write_band
from agent_r1.learn.checkpoint import Progress, seal
from flows.commands import look
from tests.cases import cases

ITERATIONS = 8
HASHES = {name: f"{number}" * 16 for number, name in enumerate(("model", "data", "prompt", "settings"))}
RISE = [0.1 + 0.05 * iteration for iteration in range(ITERATIONS)]


def curve(seed: int = 9, **metrics: list[float] | float) -> pd.DataFrame:
    """A curve that rises by .05 an iteration, with other values for metrics by the last part of their names."""
    values = {name: metrics.get(name.partition("/")[2], 0.0) for name in METRICS}
    values["rollout/success"] = metrics.get("success", RISE)
    return pd.DataFrame({"iteration": range(ITERATIONS), **values, "seed": str(seed), **HASHES, "hardware": "2 cores"})


@pytest.fixture
def band() -> pd.DataFrame:
    """Seeds .02 apart: the limits are .02 * sqrt(4/3) * 2.447 = .0565 from the middle one, as in the test of those."""
    seeds = [[value + offset for value in RISE] for offset in (-0.02, 0.0, 0.02)]
    return pd.concat([curve(seed, success=values) for seed, values in enumerate(seeds)])


FLAT = [0.15] * ITERATIONS  # .2 - .0565 is above it: it is below the band from iteration 3 on


@cases("metrics, state, event")
def test_check_finds_run_inside_above_below_or_collapsed(
    metrics: dict[str, list[float] | float], state: str, event: str, band: pd.DataFrame
) -> None:
    verdict, panels = check(curve(**metrics), band)
    assert verdict.startswith(f"{state} after 8 iterations")
    assert event in verdict
    assert (";" in verdict) == bool(event)
    assert panels["rollout/success"][1:, 4].tolist() == pytest.approx([0.3 - 0.0565, 0.3, 0.3 + 0.0565], abs=1e-4)


def test_check_takes_iterations_that_both_have(band: pd.DataFrame) -> None:
    assert check(curve().head(5), band)[0] == "inside after 5 iterations"
    assert check(curve(), band[band["iteration"] < 6])[0] == "inside after 6 iterations"


@pytest.mark.parametrize("name", ["model", "data", "prompt"])
def test_check_refuses_other_model_data_or_prompt(name: str, band: pd.DataFrame) -> None:
    with pytest.raises(ValueError, match=f"not compared: {name} is abcd, the recipe's {HASHES[name]}; choose another"):
        check(curve().assign(**{name: "abcd"}), band)


@cases("pattern, text, message")
def test_read_curves_refuses_gaps(pattern: str, text: str, message: str, tmp_path: Path, band: pd.DataFrame) -> None:
    file = tmp_path / "band.csv"
    write_band(file, [rows for _, rows in band.groupby("seed")])
    assert check(curve(), read_curves(file))[0].startswith("inside")
    file.write_text(re.sub(pattern, text, file.read_text()))
    with pytest.raises(ValueError, match=rf"band\.csv is no file of `agent-r1 recipe`: .*{message}"):
        read_curves(file)


@pytest.mark.parametrize("text", ["[", "[1, 2]", '{"seed": 1}', "[" * 20_000, json.dumps({"iteration": {"a": [1]}})])
def test_read_curves_refuses_other_json(text: str, tmp_path: Path) -> None:
    (tmp_path / "sent.json").write_text(text)
    with pytest.raises(ValueError, match=r"sent\.json is no file of `agent-r1 recipe`"):
        read_curves(tmp_path / "sent.json")


def test_write_band_refuses_two_seeds(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="2 seeds say nothing about another one; take 3 or more"):
        write_band(tmp_path / "band.csv", [curve(0), curve(1)])
    with pytest.raises(ValueError, match="duplicate entries"):
        write_band(tmp_path / "band.csv", [curve(0), curve(0), curve(1)])
    assert not (tmp_path / "band.csv").exists()


@pytest.fixture
def train(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Path]:
    """Writes the folder of a training of the project in the current folder."""
    (tmp_path / "params.yaml").write_text((Path(__file__).parents[2] / "params.yaml").read_text())
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(look, "RECIPES", tmp_path / "recipes")

    def write(seed: int, rate: float = 1.0, **metrics: list[float] | float) -> Path:
        folder = tmp_path / f"outputs/train/ppo-seed{seed}"
        rows = curve(**metrics)[["iteration", *METRICS]].to_dict("records")
        write_text(folder / "metrics.jsonl", "".join(json.dumps(row) + "\n" for row in rows))
        write_text(folder / "trajectories/000.parquet", "")
        write_text(folder / "checkpoint/policy/tokenizer.json", "{}")
        write_text(folder / "checkpoint/policy/model.safetensors", f"weights of {seed}")
        seal(folder / "checkpoint", Progress(iterations=ITERATIONS, policy_version=1))
        parameters = {"train.seed": seed, "train.update.learning_rate": rate, "model.path": "", "env.top_k": 2}
        hashes = dict.fromkeys(("questions", "passages", "prompt", "warm_start"), "ab" * 32)
        write_start(folder, Identity(parameters=parameters, inputs=hashes))
        return folder

    return write


def test_recipe_band_and_check(train: Callable[..., Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for seed, offset in enumerate((-0.02, 0.0, 0.02)):
        train(seed, success=[value + offset for value in RISE])
    look.recipe("band", ["ppo-seed0", "ppo-seed1", "ppo-seed2"], "mine")
    with pytest.raises(ValueError, match=r"mine\.csv exists, and no band is replaced; move it away, or give another"):
        look.recipe("band", ["ppo-seed0", "ppo-seed1", "ppo-seed2"], "mine")
    train(3, rate=30.0, success=FLAT)
    look.recipe("check", ["ppo-seed3"], "mine")
    line = capsys.readouterr().out
    assert line.startswith("ppo-seed3: below after 8 iterations; rollout/success left below in iteration 3")
    assert line.endswith("; its settings are others (outputs/recipe/ppo-seed3.png)\n")
    assert (tmp_path / "outputs/recipe/ppo-seed3.png").stat().st_size > 10_000
    sent = (tmp_path / "outputs/recipe/ppo-seed3.json").rename(tmp_path / "sent.json")
    look.recipe("check", [str(sent)], "mine")
    assert capsys.readouterr().out == line.replace("ppo-seed3", "sent")


def test_curve_of_iteration_without_update_has_no_mismatch(train: Callable[..., Path]) -> None:
    folder = train(0, mismatch_kl=0.5)
    first, *others = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    del first["policy/mismatch_kl"]
    write_text(folder / "metrics.jsonl", "".join(json.dumps(row) + "\n" for row in (first, *others)))
    assert curve_of(folder)["policy/mismatch_kl"].tolist() == [0.0] + [0.5] * (ITERATIONS - 1)
