"""The size and shape of the house: `python -m benchmarks.structure [FOLDER]`, of this checkout or of another one.

Prints lines and files per room, what the training stage imports, which modules have a single importer, and the
functions over 50 lines.
"""

from __future__ import annotations

import ast
import sys
from collections import Counter
from pathlib import Path

LONG = 50  # lines of a function
WINGS = ("agent_r1", "flows", "benchmarks", "tests")
UPDATE = "agent_r1.learn.learner"
TRAINING = "flows.train"


def read_sources(root: Path, wing: str) -> dict[str, str]:
    """Module name -> source."""
    paths = sorted((root / wing).rglob("*.py"))
    return {
        ".".join(path.relative_to(root).with_suffix("").parts).removesuffix(".__init__"): path.read_text()
        for path in paths
    }


def imports_of(source: str, modules: set[str]) -> set[str]:
    """The modules of the house that a source imports."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names = {f"{node.module}.{alias.name}" for alias in node.names} & modules
            found |= names or {node.module}
    return found & modules


def closure(start: str, graph: dict[str, set[str]], within: str = "") -> set[str]:
    """All that a module imports, directly or not, itself included."""
    found, waiting = set(), [start]
    while waiting:
        module = waiting.pop()
        if module not in found and module.startswith(within):
            found.add(module)
            waiting.extend(graph[module])
    return found


def function_lengths(source: str) -> dict[str, int]:
    """Name -> lines of every function."""
    functions = (node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.FunctionDef))
    return {each.name: (each.end_lineno or each.lineno) - each.lineno + 1 for each in functions}


def main() -> None:
    root = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parents[1]
    sources = {wing: read_sources(root, wing) for wing in WINGS}
    rooms: Counter[str] = Counter()
    files: Counter[str] = Counter()
    for wing, modules in sources.items():
        for name, source in modules.items():
            parts = name.split(".")
            room = wing if wing in ("benchmarks", "tests") else ".".join(parts[: 2 if len(parts) > 2 else 1])
            rooms[room] += source.count("\n")
            files[room] += 1
    print(f"{'room':<24} {'lines':>7} {'files':>6}")
    for room in sorted(rooms):
        print(f"{room:<24} {rooms[room]:>7} {files[room]:>6}")
    house = sources["agent_r1"] | sources["flows"]
    graph = {name: imports_of(source, set(house)) - {name} for name, source in house.items()}
    importers = Counter(imported for names in graph.values() for imported in names)
    lengths = sorted(
        (
            (lines, f"{name}.{function}")
            for name, source in house.items()
            for function, lines in function_lengths(source).items()
        ),
        reverse=True,
    )
    print(f"\nagent_r1 and flows: {sum(s.count(chr(10)) for s in house.values())} lines, {len(house)} modules")
    print(f"{TRAINING} reaches {len(closure(TRAINING, graph)) - 1} modules")
    print(f"an update ({UPDATE}) reaches {len(closure(UPDATE, graph, 'agent_r1.policy'))} modules of its room")
    print(f"modules with one importer: {sum(count == 1 for count in importers.values())}")
    print(f"functions: median {lengths[len(lengths) // 2][0]} lines, longest {lengths[0][0]} ({lengths[0][1]})")
    print(f"over {LONG} lines: {', '.join(f'{name} {lines}' for lines, name in lengths if lines > LONG) or 'none'}")


if __name__ == "__main__":
    main()
