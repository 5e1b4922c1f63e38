"""What the import contracts of pyproject.toml cannot hold: imports by name, and what an import loads."""

import ast
import functools
import re
import subprocess
import sys
from collections.abc import Collection
from pathlib import Path

from tests.cases import cases

ROOT = Path(__file__).parents[1]

# Rooms that are imported by a name in a string, where params.yaml asks for them, and the modules that do so.
BY_NAME = {
    "outside": {"agent_r1.envs.kinds", "agent_r1.tools.toolbox"},
    "agents": {"agent_r1.rollout.collecting"},
    "devices": set[str](),
}
# Modules that run as a process of their own, which another module starts by name.
PROCESSES = {
    "agent_r1.agents.functions": {"agent_r1.agents.programs"},
    "agent_r1.data.trial": {"agent_r1.data.sources"},
    "agent_r1.rollout.vllm_process": {"agent_r1.rollout.vllm_engine"},
    "agent_r1.rollout.vllm_worker": {"agent_r1.rollout.engine_wire"},
    "flows.apps": {"flows.operation.serving", "flows.processes"},
    "flows.dvc_process": {"flows.dvc_files"},
}


@functools.cache
def nodes(source: str) -> list[ast.AST]:
    return list(ast.walk(ast.parse(source)))


def read_sources(root: Path, *wings: str) -> dict[str, str]:
    paths = [path for wing in wings for path in sorted((root / wing).rglob("*.py"))]
    names = {path: ".".join(path.relative_to(root).with_suffix("").parts) for path in paths}
    return {name.removesuffix(".__init__"): path.read_text() for path, name in names.items()}


def named(source: str, modules: Collection[str]) -> set[str]:
    """Every module that a string of a source names, to be imported later: `module` or `module:name`.

    An f-string that begins like `agent_r1.outside.{kind}` names every module with this beginning.
    """
    found = set()
    for node in nodes(source):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            if match := re.fullmatch(r"([\w.]+)(:[\w.]*)?", node.value):
                found |= {match[1]}.intersection(modules)
        elif isinstance(node, ast.JoinedStr) and node.values and isinstance(node.values[0], ast.Constant):
            beginning = str(node.values[0].value)
            found |= {name for name in modules if "." in beginning and name.startswith(beginning)}
    return found


def within(module: str, packages: Collection[str]) -> bool:
    return any(module == package or module.startswith(f"{package}.") for package in packages)


SOURCES = read_sources(ROOT, "agent_r1", "flows")


def test_modules_are_imported_by_name_where_params_ask_and_nowhere_else() -> None:
    """A name in a string is an import that no contract sees."""
    naming = {(name, module) for module, source in SOURCES.items() for name in named(source, SOURCES) if "." in name}
    packages = {name for name in SOURCES if any(other.startswith(f"{name}.") for other in SOURCES)}
    allowed = {(name, module) for name, modules in PROCESSES.items() for module in modules}
    for room, modules in BY_NAME.items():
        allowed |= {(name, module) for name in SOURCES for module in modules if within(name, {f"agent_r1.{room}"})}
    assert {pair for pair in naming - allowed if pair[0] not in packages} == set()


def test_models_are_loaded_by_one_function() -> None:
    """The one that runs no code of a model's folder."""
    assert {name for name, source in SOURCES.items() if ".from_pretrained(" in source} == {"agent_r1.files"}


@cases("modules, libraries")
def test_importing_loads_no_library_that_is_only_waited_for(modules: list[str], libraries: list[str]) -> None:
    """The ground floor and credit are for whoever has nothing else; a flow that starts stages needs no model."""
    code = f"import sys, {', '.join(modules)}; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    loaded = set(done.stdout.split())
    assert loaded >= set(modules)
    assert not loaded & {*libraries, "transformers", "vllm", "dvc"}
