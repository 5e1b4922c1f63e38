"""dvc.yaml against the code: commands that exist, dependencies that are exactly what a stage can execute."""

import ast
import functools
import re
import shutil
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path
from typing import Any

import pytest
import yaml

from flows.dvc_files import ask_dvc, collect_graph, require_dvc, run_dvc
from flows.graph import out_of_date, stages
from flows.operation.deployments import STARTS_FROM
from tests.fixtures import ROOT
from tests.flows.conftest import LayDvc, WriteParams

# What a stage executes and does not depend on: it changes how a stage runs, never what it writes.
RUNTIME = {
    *("flows/__main__.py", "flows/commands", "flows/stage.py", "flows/made_of.py", "flows/processes.py"),
    *("flows/terminal.py", "flows/dvc_process.py"),
    *("agent_r1/tracking", "agent_r1/params", "agent_r1/replaced.py"),
}


@functools.cache
def definitions() -> dict[str, dict[str, Any]]:
    contents = {file: yaml.safe_load((ROOT / file).read_text()) for file in ("dvc.yaml", "ablations/graph.yaml")}
    return {
        str(Path(file).with_name(name)): stage.get("do", stage)
        for file, content in contents.items()
        for name, stage in content["stages"].items()
    }


def flow_file(stage: str) -> Path:
    """`python -m flows train --run x` -> flows/train.py"""
    python, option, door, command, *_ = definitions()[stage]["cmd"].split()
    assert (python, option, door) == ("python", "-m", "flows")
    [function] = [
        node
        for file in (ROOT / "flows/commands").glob("*.py")
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.FunctionDef) and node.name == command
    ]
    modules = {str(node.module) for node in ast.walk(function) if isinstance(node, ast.ImportFrom)}
    [module] = modules - {"flows.imported"}  # what another trainer wrote is no part of the graph
    return source_of(module)


def source_of(module: str) -> Path:
    return Path(*module.split(".")).with_suffix(".py")


def executed(node: ast.AST) -> Iterator[ast.AST]:
    """All nodes of a source, without what only a type checker reads."""
    yield node
    if isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING":
        return
    for child in ast.iter_child_nodes(node):
        yield from executed(child)


@functools.cache
def used(file: Path) -> set[Path]:
    """The project's files that a file imports, starts as a module, or reads from beside itself."""
    names, beside = set(), set()
    if file.suffix != ".py":
        return set()
    for node in executed(ast.parse((ROOT / file).read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and re.fullmatch(r"[\w.]+", node.value):
            names.add(node.value)
            beside.add(file.parent / node.value)
    modules = {source_of(name) for name in names if name.startswith(("agent_r1.", "flows."))}
    return {path for path in modules | beside if (ROOT / path).is_file()}


def reached(file: Path) -> set[Path]:
    """A file and all it uses, directly or not, as far as a stage depends on it."""
    visited, waiting = set(), {file}
    while waiting:
        current = waiting.pop()
        visited.add(current)
        waiting |= {module for module in used(current) - visited if not any(holds(path, module) for path in RUNTIME)}
    return visited


def holds(dependency: str, file: Path) -> bool:
    """A dependency is a file, or a folder with all that is in it."""
    return file.is_relative_to(dependency)


def files_of(dependency: str) -> set[Path]:
    """What DVC hashes, without packages' empty files."""
    path = ROOT / dependency
    files = [path] if path.is_file() else [file for file in path.rglob("*") if file.is_file()]
    return {file.relative_to(ROOT) for file in files if "__pycache__" not in file.parts and file.stat().st_size}


def test_pipeline_runs_every_stage_after_those_that_it_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    needs = stages("dvc.yaml")
    settings = yaml.safe_load(Path("params.yaml").read_text())
    runs, baselines = settings["repro_runs"], settings["repro_baselines"]
    assert needs.keys() == {
        "prepare",
        "index",
        "warm_start",
        *(f"{stage}@{run}" for stage in ("train", "register", "evaluate") for run in runs),
        *(f"baseline@{baseline}" for baseline in baselines),
        "report",
    }
    assert [*TopologicalSorter(needs).static_order()][:3] == ["prepare", "index", "warm_start"]
    assert all(f"train@{run}" in needs[f"evaluate@{run}"] for run in runs)


@pytest.mark.parametrize("stage", [name for name in definitions() if name.startswith("ablations/")])
def test_sweeps_stages_depend_on_what_the_main_graphs_do(stage: str) -> None:
    main_stage = definitions()[Path(stage).name.removesuffix("_closer")]
    sweep_stage = definitions()[stage]
    code = [
        {path for path in stage_["deps"] if path.startswith(("agent_r1", "flows", "${places.data}"))}
        for stage_ in (main_stage, sweep_stage)
    ]
    assert code[0] == code[1]
    sweep_only = {"repro_runs", "repro_baselines", "runs.${item}"}  # the sweep has lists of its own
    assert {*main_stage.get("params", [])} - sweep_only <= {*sweep_stage.get("params", [])}


def test_sweep_has_a_stage_per_run_and_seed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And DVC knows of none before the sweep is asked for."""
    for name in ("params.yaml", "dvc.yaml", "ablations/graph.yaml", ".dvc/config"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    (tmp_path / ".dvc/config.local").write_text(f"[core]\n no_scm = true\n site_cache_dir = {tmp_path}/site\n")
    monkeypatch.chdir(tmp_path)
    listed = ask_dvc("stage", "list", "--all", "--name-only").stdout
    assert "ablations" not in listed
    assert "report" in listed.split()
    assert collect_graph(Path("ablations")) == "ablations/dvc.yaml"
    listed = ask_dvc("stage", "list", "--name-only", "ablations/dvc.yaml").stdout.split()
    ablations = yaml.safe_load(Path("params.yaml").read_text())["ablations"]
    members = {
        suffix: [f"{run}-{seed}" for run in some["runs"] for seed in some["seeds"]]
        for suffix, some in (("", ablations), ("_closer", ablations["closer"]))
    }
    assert {name.removeprefix("ablations/dvc.yaml:") for name in listed} == {
        *(
            f"{stage}{suffix}@{member}"
            for stage in ("train", "register", "evaluate")
            for suffix, some in members.items()
            for member in some
        ),
        *(f"baseline@{baseline}" for baseline in ablations["baselines"]),
        "report",
    }


@pytest.mark.parametrize("stage", definitions())
def test_stage_depends_on_exactly_the_code_that_it_can_execute(stage: str) -> None:
    listed = [path for path in definitions()[stage]["deps"] if path.startswith(("agent_r1", "flows"))]
    assert len({*listed}) == len(listed)
    depended = {file for path in listed for file in files_of(path)}
    needed = reached(flow_file(stage))
    assert (needed - depended, depended - needed) == (set(), set())


def test_code_of_no_stage_is_listed_in_graphs_header() -> None:
    header = (ROOT / "dvc.yaml").read_text().partition("stages:")[0]
    assert all(path in header for path in RUNTIME)


def test_store_that_knows_an_evaluation_is_no_part_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that a report that was pulled is up to date; a training needs its run to go on."""
    monkeypatch.chdir(ROOT)
    folders = ("outputs/evaluate/ppo", "outputs/ablations/evaluate/ppo-seed1", "outputs/train/ppo")
    listed = ask_dvc("check-ignore", *(f"{folder}/mlflow_run_id" for folder in folders)).stdout.split()
    assert listed == [f"{folder}/mlflow_run_id" for folder in folders[:2]]


def test_training_starts_from_all_that_its_stage_depends_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every output that `train` reads is made by one of them, and they come in the order of the graph."""
    outputs = {
        out: stage
        for stage, definition in definitions().items()
        for outs in [definition.get("outs", [])]
        for out in (next(iter(out_)) if isinstance(out_, dict) else out_ for out_ in outs)
    }
    needed = {
        stage for out, stage in outputs.items() for read in definitions()["train"]["deps"] if holds(read, Path(out))
    }
    assert needed == set(STARTS_FROM)
    monkeypatch.chdir(ROOT)
    assert tuple(stage for stage in stages("dvc.yaml") if stage in STARTS_FROM) == STARTS_FROM


def write_without_code(folder: Path) -> None:
    """The project's graph with its parameters, data and outputs, and commands that copy what they depend on."""
    graph = yaml.safe_load((ROOT / "dvc.yaml").read_text())
    for stage in (each.get("do", each) for each in graph["stages"].values()):
        read = stage["deps"] = [path for path in stage["deps"] if not path.startswith(("agent_r1", "flows"))]
        outs = [
            next(iter(out)) if isinstance(out, dict) else out for out in (*stage["outs"], *stage.get("metrics", []))
        ]
        made = [f"mkdir -p $(dirname {out}) && cat $(find {' '.join(read)} -type f) > {out}" for out in outs]
        stage["cmd"] = " && ".join(["test ! -e ended", *made])
    (folder / "dvc.yaml").write_text(yaml.safe_dump(graph | {"plots": []}))
    (folder / "data/raw/own").mkdir(parents=True)
    for file in ("README.md", "own/train.jsonl", "own/test.jsonl"):
        (folder / "data/raw" / file).write_text(f"{file}\n")


def test_stage_is_out_of_date_by_what_it_reads_and_ended_leaves_what_it_was_to_replace(
    tmp_path: Path, write_params: WriteParams, lay_dvc: LayDvc, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_without_code(tmp_path)
    few = {"repro_runs": ["ppo"], "repro_baselines": ["closed_book"]}
    write_params(tmp_path, few)
    lay_dvc(tmp_path)
    monkeypatch.chdir(tmp_path)
    require_dvc("repro", "--quiet")
    for file in ("mine.jsonl", "yours.jsonl", "own/train.jsonl"):
        (tmp_path / "data/raw" / file).write_text("a file of somebody's own\n")
    for outside in ("train/grpo", "evaluate/grpo", "evaluate/models"):  # as deployments of Prefect write them
        (tmp_path / "outputs" / outside).parent.mkdir(exist_ok=True)
        (tmp_path / "outputs" / outside).write_text("of no stage")
    assert out_of_date() == set()

    files = {split: {"file": f"data/raw/own/{split}.jsonl"} for split in ("train", "test")}
    prepare = {"datasets": ["own"], "files": {"own": {"format": "hotpotqa", **files}}}
    write_params(tmp_path, few | {"prepare": prepare, "places": {"raw": "data/raw/own"}})
    outputs = [Path("data/prepared/questions.parquet"), Path("data/index"), Path("outputs/warm_start")]
    contents_before = [path.read_bytes() for path in outputs]
    Path("ended").touch()
    for stage in ("prepare", "index", "warm_start"):
        assert run_dvc("repro", "--force", "--single-item", stage), "the stage is ended"
    assert [path.read_bytes() for path in outputs] == contents_before
    assert out_of_date() >= {"prepare", "warm_start"}, "and what is there is not taken for new"
    Path("ended").unlink()
    require_dvc("repro", "--quiet")
    Path("data/raw/mine.jsonl").write_text("edited\n")
    assert out_of_date() == set()
    Path("data/raw/own/test.jsonl").write_text("edited\n")
    assert out_of_date() == {"prepare", "warm_start", "train@ppo"}
