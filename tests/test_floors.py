"""The house keeps its floors: what may import what, read from the source of every module."""

from __future__ import annotations

import ast
import functools
import graphlib
import re
import subprocess
import sys
from collections.abc import Collection
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

# What each module of the ground floor may import of the house.
GROUND = {
    "agent_r1.records": set[str](),
    "agent_r1.params": {"agent_r1.harmless"},
    "agent_r1.seeds": set[str](),
    "agent_r1.letters": set[str](),
    "agent_r1.answers": {"agent_r1.letters"},
    "agent_r1.gpus": set[str](),
    "agent_r1.costs": set[str](),
    "agent_r1.files": {"agent_r1.harmless"},
    "agent_r1.surroundings": {"agent_r1.files"},
    "agent_r1.facts": {"agent_r1.files"},
    "agent_r1.weight_sums": set[str](),
    "agent_r1.pretrained": {"agent_r1.files", "agent_r1.gpus", "agent_r1.params"},
    "agent_r1.harmless": set[str](),
    "agent_r1.own_code": {"agent_r1.files", "agent_r1.params"},
    "agent_r1.faults": set[str](),
    "agent_r1.http": {"agent_r1.faults", "agent_r1.harmless", "agent_r1.params"},
    "agent_r1.tables": {"agent_r1.records", "agent_r1.files"},
    "agent_r1.tracking": {
        "agent_r1.records",
        "agent_r1.params",
        "agent_r1.files",
        "agent_r1.harmless",
        "agent_r1.tables",
    },
}
# Which other rooms each room may import. Acting and learning meet only in records, and in training.
ROOMS = {
    "search": set[str](),
    "games": set[str](),
    "tools": {"search"},
    "envs": {"tools", "search", "games", "data"},
    "outside": {"envs", "tools", "search"},
    "agents": {"rollout", "envs", "tools", "search"},
    "rollout": {"envs", "tools", "search"},
    "credit": set[str](),
    "devices": set[str](),
    "learn": {"devices"},
    "data": {"search", "games"},
    "evaluation": {"rollout", "envs", "search"},
    "training": {"rollout", "envs", "credit", "learn", "devices", "data", "search", "tools"},
    "inspection": {
        "training",
        "evaluation",
        "agents",
        "rollout",
        "envs",
        "credit",
        "learn",
        "devices",
        "data",
        "search",
    },
}
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
}
# Wings that are entered by one door, and which modules are doors.
DOORS = {
    "agent_r1.inspection": {"flows.commands.look", "flows.commands.operate"},
    "flows.operation": {
        "flows.commands.execute",
        "flows.commands.look",
        "flows.commands.operate",
    },
}
# Where heavy libraries may be imported: modules, or packages with all below them.
PLACES = {
    "vllm": ("agent_r1.rollout.vllm_process", "agent_r1.rollout.vllm_worker"),
    "mlflow": ("agent_r1.tracking", "flows.apps"),
    "prefect": ("flows",),
    "dvc": (),
    "faiss": ("agent_r1.search.dense",),
    "mcp": ("agent_r1.outside.mcp",),
    "pydantic_monty": ("agent_r1.outside.sandbox",),
    "gymnasium": ("agent_r1.outside.gym_env",),
    "websockets": ("agent_r1.outside.openenv",),
}


@functools.cache
def nodes(source: str) -> list[ast.AST]:
    """All nodes of a source, the module first."""
    return list(ast.walk(ast.parse(source)))


def read_sources(root: Path, *wings: str) -> dict[str, str]:
    """Module name -> source."""
    paths = [path for wing in wings for path in sorted((root / wing).rglob("*.py"))]
    names = {path: ".".join(path.relative_to(root).with_suffix("").parts) for path in paths}
    return {name.removesuffix(".__init__"): path.read_text() for path, name in names.items()}


def imports(source: str, modules: Collection[str], typing: bool = True) -> set[str]:
    """Every module that a source imports, inside functions too; `from package import module` counts as the module.

    Without `typing`, imports under `if TYPE_CHECKING` do not count.
    """
    found = set()
    blocks = [] if typing else [node for node in nodes(source) if isinstance(node, ast.If)]
    skipped = {each for block in blocks if ast.unparse(block.test) == "TYPE_CHECKING" for each in ast.walk(block)}
    for node in set(nodes(source)) - skipped:
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            if node.level or not node.module:
                raise ValueError(f"line {node.lineno}: a relative import; the house imports by absolute names")
            names = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= names.intersection(modules) or {node.module}
    return found


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
    """Whether a module is one of these packages, or in one of them."""
    return any(module == package or module.startswith(f"{package}.") for package in packages)


SOURCES = read_sources(ROOT, "agent_r1", "flows")
HOUSE = {name: imports(source, SOURCES) for name, source in SOURCES.items()}


def of_the_house(module: str) -> set[str]:
    return {name for name in HOUSE[module] if within(name, ("agent_r1", "flows"))}


def offences(package: str, allowed: set[str]) -> set[tuple[str, str]]:
    """The imports of the house, from a module or package, of anything that is not allowed."""
    modules = {module for module in HOUSE if within(module, {package})}
    return {(module, name) for module in modules for name in of_the_house(module) if not within(name, allowed)}


def test_every_module_has_a_floor() -> None:
    rooms = {f"agent_r1.{room}" for room in ROOMS}
    homeless = {name for name in HOUSE if not within(name, rooms | set(GROUND) | {"flows"})}
    assert homeless == {"agent_r1"}, "a new room needs a line in ROOMS above"


@pytest.mark.parametrize("module", GROUND)
def test_the_ground_floor_knows_nothing_above_it(module: str) -> None:
    assert offences(module, {module, *GROUND[module]}) == set()


@pytest.mark.parametrize("room", ROOMS)
def test_rooms_import_only_downward(room: str) -> None:
    allowed = set(GROUND) | {f"agent_r1.{name}" for name in (room, *ROOMS[room])}
    assert offences(f"agent_r1.{room}", allowed) == set()


def test_modules_are_imported_by_name_where_params_ask_and_nowhere_else() -> None:
    """A name in a string is an import that no other test of floors sees."""
    naming = {(name, module) for module, source in SOURCES.items() for name in named(source, SOURCES) if "." in name}
    packages = {name for name in SOURCES if any(other.startswith(f"{name}.") for other in SOURCES)}
    allowed = {(name, module) for name, modules in PROCESSES.items() for module in modules}
    for room, modules in BY_NAME.items():
        allowed |= {(name, module) for name in SOURCES for module in modules if within(name, {f"agent_r1.{room}"})}
    assert {pair for pair in naming - allowed if pair[0] not in packages} == set()


def test_the_rules_of_games_know_nothing_of_the_house() -> None:
    assert offences("agent_r1.games", {"agent_r1.games"}) == set()


@pytest.mark.parametrize("wing", DOORS)
def test_a_wing_is_entered_by_its_doors(wing: str) -> None:
    """The commands' table names modules as text, so that a door there imports nothing before it is opened."""
    entering = {
        module
        for module in HOUSE
        if any(within(name, {wing}) for name in HOUSE[module] | named(SOURCES[module], SOURCES))
    }
    assert {module for module in entering if not within(module, {wing})} == DOORS[wing]


def test_the_library_knows_no_flow() -> None:
    assert offences("agent_r1", {"agent_r1"}) == set()


@pytest.mark.parametrize("library", PLACES)
def test_heavy_libraries_stay_in_their_place(library: str) -> None:
    importers = {module for module, names in HOUSE.items() if any(within(name, (library,)) for name in names)}
    assert {module for module in importers if not within(module, PLACES[library])} == set()


def test_models_are_loaded_by_one_function() -> None:
    """The one that runs no code of a model's folder."""
    assert {name for name, source in SOURCES.items() if ".from_pretrained(" in source} == {"agent_r1.files"}


def test_no_cycles() -> None:
    graph = {module: of_the_house(module) for module in HOUSE}
    assert list(graphlib.TopologicalSorter(graph).static_order()), "CycleError names the modules"


def test_no_utils() -> None:
    words = {word for module in HOUSE for word in module.split(".")}
    assert not words & {"utils", "util", "helpers", "common", "misc"}


@pytest.mark.parametrize(
    ("modules", "libraries"),
    [
        (["agent_r1.params", "agent_r1.records", "agent_r1.credit.assign"], {"torch", "mlflow", "prefect", "scipy"}),
        (["flows.operation.register", "flows.operation.deployments"], {"torch", "scipy", "mlflow"}),
    ],
)
def test_importing_loads_no_library_that_is_only_waited_for(modules: list[str], libraries: set[str]) -> None:
    """The ground floor and credit are for whoever has nothing else; a flow that starts stages needs no model."""
    code = f"import sys, {', '.join(modules)}; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    loaded = set(done.stdout.split())
    assert loaded >= set(modules)
    assert not loaded & {*libraries, "transformers", "vllm", "dvc"}


def test_imports_are_found_wherever_they_stand() -> None:
    source = "import a.b\nfrom c import d\ndef f():\n    from c import e\n    import g as h\n"
    source += "if TYPE_CHECKING:\n    import i\n"
    assert imports(source, {"c", "c.d"}) == {"a.b", "c.d", "c", "g", "i"}
    assert imports(source, {"c", "c.d"}, typing=False) == {"a.b", "c.d", "c", "g"}


def test_modules_are_named_by_strings() -> None:
    modules = {"a", "a.b", "a.b.c", "a.bc", "d"}
    assert named('"a.b", "d:run", "a.bc is prose", "no"', modules) == {"a.b", "d"}
    assert named('f"a.b.{kind}:run", f"{kind}.d", f"see d {kind}"', modules) == {"a.b.c"}
    assert named('f"a.b{kind}", f"d:{name}"', modules) == {"a.b", "a.b.c", "a.bc", "d"}


def test_relative_imports_are_refused() -> None:
    with pytest.raises(ValueError, match="absolute names"):
        imports("from . import records", set())
