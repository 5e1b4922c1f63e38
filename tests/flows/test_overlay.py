"""Overlays in a real DVC project: composed, refused where something would be lost, and taken off again."""

import json
import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from agent_r1.params import load
from agent_r1.params.places import RunId
from flows.dvc_files import DVC
from flows.overlay import compose, switch
from flows.ranks import shortfalls
from tests.cases import cases, graph, laid
from tests.fixtures import ROOT
from tests.reading import contents

STAGES = graph("overlaid")


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    shutil.copy(ROOT / "params.yaml", tmp_path)
    shutil.copytree(ROOT / "overlays", tmp_path / "overlays", ignore=shutil.ignore_patterns("base.yaml"))
    overlays = laid("overlays")
    for name, text in overlays.items():
        (tmp_path / f"overlays/{name}.yaml").write_text(text)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def dvc(*arguments: str) -> str:
    """DVC's answer. The packages of the project's folder are stand-ins, and none of DVC's process."""
    variables = {**os.environ, "PYTHONSAFEPATH": "1"}
    return subprocess.run([*DVC, *arguments], env=variables, check=True, capture_output=True, text=True).stdout


def test_dvc_lists_every_stage_that_an_overlay_changes_alone(project: Path, lay_dvc: Callable[..., None]) -> None:
    (project / "dvc.yaml").write_text(STAGES)
    lay_dvc(project)
    dvc("repro", "--quiet")
    trained = {f"train@{run}" for run in load().repro_runs}
    switch("small")
    assert set(json.loads(dvc("status", "--json"))) == {"prepare", *trained}
    switch("base")
    assert json.loads(dvc("status", "--json")) == {}


def test_overlay_is_laid_over_the_base_and_taken_off_byte_for_byte(project: Path) -> None:
    """It has places of its own if it says so, and the ones that it names."""
    files_before = contents(project)
    base = load()
    switch("small")
    text = (project / "params.yaml").read_text()
    first, *lines = text.splitlines()
    assert "overlays/small.yaml" in first
    assert "`agent-r1 overlay base` goes back" in first
    assert [load().places.data, load().places.outputs, load().places.scale] == ["small/data", "small/out", ""]
    assert load().train == base.train.model_copy(update={"iterations": 7})
    assert contents(project)["overlays/base.yaml"] == files_before["params.yaml"]
    original = files_before["params.yaml"].decode().splitlines()
    assert [line for line in original if "#" in line and line not in lines] == original[-4:-2]  # of places: realigned
    switch("small")
    assert (project / "params.yaml").read_text() == text
    switch("qwen2.5-3b")
    assert load().train.iterations == 400, "composed from the same base"
    own = [f"scales/qwen2.5-3b/{place}" for place in ("data", "outputs")]
    assert [load().places.data, load().places.outputs, load().places.scale] == [*own, "qwen2.5-3b"]
    for _ in range(2):
        switch("base")
        assert contents(project) == files_before


def test_overlay_has_dvc_watch_the_files_that_it_names(project: Path) -> None:
    own = "prepare: {datasets: [own], files: {own: {format: hotpotqa, test: {file: data/raw/own/test.jsonl}}}}\n"
    (project / "overlays/own.yaml").write_text(own)

    def watched(name: str) -> str:
        return str(yaml.safe_load(compose((project / "params.yaml").read_text(), name))["places"]["raw"])

    assert [watched("small"), watched("own")] == ["data/raw/README.md", "data/raw/own/test.jsonl"]
    assert watched("qwen2.5-3b") == "data/raw"


def test_overlay_at_full_scale_holds_the_published_settings(project: Path) -> None:
    own = load()
    switch("qwen2.5-3b")
    full = load()
    assert full.prepare.files == own.prepare.files
    assert full.prepare.datasets == ["hotpotqa", "2wikimultihopqa", "musique"]
    assert "test" in full.prepare.files["musique"].splits
    assert "train" not in full.prepare.files["musique"].splits
    assert full.model.path == "Qwen/Qwen2.5-3B-Instruct"
    assert (full.train.update.learning_rate, full.train.update.critic.learning_rate) == (1e-5, 1e-4)
    assert [full.run(RunId(name)).update.kl_loss for name in ("ppo", "dapo", "gspo", "cispo")] == [0.001, 0, 0, 0]
    assert full.run(RunId("dapo")).credit.overlong_buffer == full.env.max_tokens // 5
    assert set(full.runs) == {*own.runs, "ppo_lam_95"}


def test_overlay_for_eight_gpus_samples_on_all_that_learn(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.device_count", lambda: 8)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(64))
    switch("qwen2.5-7b")
    full = load()
    assert (full.learner.ranks, full.gpus, [*shortfalls(full)]) == (8, 8, [])
    assert (full.model.adapter, full.model.gradient_checkpointing, full.env.order) == (None, True, "arrival")
    for run in map(RunId, full.ablations.runs):
        trained = full.run(run)
        assert (trained.checkpoint.every, trained.rollout.questions) == (10, 128)
    assert full.run(RunId("ppo")).update.learning_rate == 1e-6


@pytest.mark.parametrize("model", ["qwen2.5-3b", "qwen2.5-3b-weights", "qwen2.5-7b", "qwen3-4b", "qwen3.5-4b"])
def test_overlay_of_the_open_setting_is_its_models_with_another_corpus(project: Path, model: str) -> None:
    switch(model)
    own = load()
    switch(f"{model}-open")
    opened = load()
    corpora = {files.corpus for files in opened.prepare.files.values()}
    assert corpora == {Path("data/raw/wiki-18.jsonl")}
    dense = opened.search.dense
    assert (opened.search.kind, dense.encoder, dense.faiss) == ("dense", "intfloat/e5-base-v2", "sq8")
    assert dense.vectors == "data/e5_Flat.index", "DVC reads all of data/raw"
    changed = {"prepare": own.prepare, "search": own.search, "places": own.places}
    assert opened.model_copy(update=changed) == own
    assert opened.places.outputs == f"scales/{model}-open/outputs"


@cases("name, message")
def test_bad_overlay_is_refused_and_nothing_is_written(project: Path, name: str, message: str) -> None:
    for on in ("base", "small"):
        switch(on)
        files_before = contents(project)
        with pytest.raises(ValueError, match=message):
            switch(name)
        assert contents(project) == files_before


def test_base_of_an_earlier_version_is_taken(project: Path) -> None:
    own = (project / "params.yaml").read_text()
    earlier = "".join(line for line in own.splitlines(keepends=True) if "quotes" not in line)
    (project / "params.yaml").write_text(earlier)
    switch("own")
    assert not load().warm_start.quotes
    switch("base")
    assert (project / "params.yaml").read_text() == earlier


@pytest.mark.parametrize("to", ["base", "small", "qwen2.5-3b"])
def test_parameters_that_were_edited_under_an_overlay_are_kept(project: Path, to: str) -> None:
    switch("small")
    edited = (project / "params.yaml").read_text().replace("iterations: 7\n", "iterations: 9\n")
    (project / "params.yaml").write_text(edited)
    with pytest.raises(ValueError, match=r"under an overlay: train\.iterations 7 -> 9; edit overlays/base\.yaml"):
        switch(to)
    assert (project / "params.yaml").read_text() == edited


def test_edited_overlay_is_composed_again(project: Path) -> None:
    switch("small")
    (project / "overlays/small.yaml").write_text("train: {iterations: 8}\n")
    switch("small")
    assert (load().train.iterations, load().places.data) == (8, "data")


def test_base_that_was_brought_back_by_hand_or_has_gone_is_refused(project: Path) -> None:
    own = (project / "params.yaml").read_text()
    switch("small")
    (project / "params.yaml").write_text(own)  # as git does
    switch("small")
    (project / "params.yaml").write_text(own.replace("top_k: 2 ", "top_k: 3 "))
    with pytest.raises(ValueError, match=r"no composition, but overlays/base\.yaml waits: env\.top_k 2 -> 3; remove"):
        switch("base")
    (project / "params.yaml").write_text(own)
    switch("small")
    (project / "overlays/base.yaml").unlink()
    with pytest.raises(ValueError, match=r"overlays/base\.yaml, which params\.yaml was composed of, is gone"):
        switch("base")


@pytest.fixture
def graphs(project: Path, lay_dvc: Callable[..., None]) -> Path:
    """The project with both graphs, in DVC; the sweep's depends on code."""
    (project / "agent_r1").mkdir()
    (project / "ablations").mkdir()
    (project / "agent_r1/code.py").write_text("first")
    (project / "dvc.yaml").write_text(STAGES)
    (project / "ablations/graph.yaml").write_text(graph("overlaid_sweep"))
    lay_dvc(project)
    return project


def test_scale_keeps_its_own_dvc_lock(graphs: Path) -> None:
    """The files are those of both scales, and DVC finds each up to date once it is laid again."""
    stages = ("prepare", "ablations/dvc.yaml:train@grpo")
    (graphs / "ablations/dvc.yaml").symlink_to("graph.yaml")
    for scale in ("base", "small"):
        switch(scale)
        dvc("repro", "--quiet", *stages)
    for scale in ("base", "small"):
        switch(scale)
        assert json.loads(dvc("status", "--json", *stages)) == {}, scale
