"""The size and shape of the house: `python -m benchmarks.structure [FOLDER]`, of this checkout or of another one.

`--names` prints the name of everything that is counted. `--write` lowers the ceilings of benchmarks/size.yaml to the
measures. tests/test_size.py holds the house under these ceilings.
"""

from __future__ import annotations

import argparse
import ast
import functools
import re
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path
from typing import Any

import yaml

HOUSE = ("agent_r1", "flows")
UPDATE = "agent_r1.learn.learner"  # an update of the policy begins in this module
UPDATE_ROOMS = ("agent_r1.learn", "agent_r1.devices")  # and stays in these rooms
STAGES = ("warm_start", "train", "evaluate", "report", "pipeline")
STARTS = (*(f"flows.{stage}" for stage in STAGES), "agent_r1.training.loop")
COMMAND = "python -m benchmarks.structure"
SIZE = "benchmarks/size.yaml"
LOOSE = 50  # a ceiling may be above its measure by one part in so many

FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
RUN = {"run", "seed", "sweep"}
DOCUMENTED = (ast.Module, ast.ClassDef, *FUNCTIONS)
INNER = (*FUNCTIONS, ast.ClassDef, ast.Lambda)
NESTS = (ast.If, ast.For, ast.While, ast.With, ast.AsyncFor, ast.AsyncWith, ast.Try, ast.Match)
OPENING = re.compile(r"(What|Of|Those|The same|As)\b")
LEANING = re.compile(r"(The same|As in|As |See |Where that|Its |Of (a|an|all|the)\b|Those |One of|They |It )")
RELATIVE = re.compile(r"\b(what|whoever|whatever|those that|that which)\b")
GENERATED = re.compile(r"^<!--.*-->\n+(\|.*\n)+", re.MULTILINE)  # a table that docs/results.py writes
TYPE = re.compile(r"[A-Z][A-Z0-9_]*[a-z]\w*")


@functools.cache
def nodes(source: str) -> list[ast.AST]:
    """All nodes of a source, the module first."""
    return list(ast.walk(ast.parse(source)))


def read_sources(root: Path, *wings: str) -> dict[str, str]:
    """Module name -> source."""
    names = {path: ".".join(path.relative_to(root).with_suffix("").parts) for path in _paths(root, *wings)}
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


def graph(sources: dict[str, str], typing: bool = True) -> dict[str, set[str]]:
    """Module -> the modules of the house that it imports."""
    return {name: (imports(text, sources, typing) & sources.keys()) - {name} for name, text in sources.items()}


def within(module: str, packages: Collection[str]) -> bool:
    """Whether a module is one of these packages, or in one of them."""
    return any(module == package or module.startswith(f"{package}.") for package in packages)


def closure(start: str, edges: dict[str, set[str]], packages: Collection[str] = HOUSE) -> set[str]:
    """All modules that a module imports, directly or not, itself included, as far as they are in `packages`."""
    found, waiting = set(), [start]
    while waiting:
        module = waiting.pop()
        if module not in found and within(module, packages):
            found.add(module)
            waiting.extend(edges[module])
    return found


@functools.cache
def kinds(source: str) -> Counter[str]:
    """The number of lines of code, import, docstring, comment and blank."""
    lines = source.split("\n")
    kind = ["blank" if not line.strip() else "comment" if line.lstrip().startswith("#") else "code" for line in lines]
    for node in nodes(source):
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            kind[node.lineno - 1 : node.end_lineno] = ["import"] * _length(node)
        elif isinstance(node, DOCUMENTED) and ast.get_docstring(node) is not None:
            text = node.body[0]
            kind[text.lineno - 1 : text.end_lineno] = ["docstring"] * _length(text)
    return Counter(kind[: source.count("\n")])


def rooms(root: Path, *wings: str) -> dict[str, Counter[str]]:
    """Room -> its lines by kind. A room is a package, with all that is deeper than two folders."""
    found: dict[str, Counter[str]] = defaultdict(Counter)
    for path in _paths(root, *wings):
        found[".".join(path.relative_to(root).parent.parts[:2])] += kinds(path.read_text())
    return dict(sorted(found.items()))


def count(sources: dict[str, str]) -> dict[str, list[str]]:
    """Measure -> the name of everything that it counts."""
    live = {name for name, source in sources.items() if source.strip()}
    importers = Counter(name for names in graph(sources).values() for name in names)
    edges = graph(sources, typing=False)
    walked = [(module, node) for module, source in sources.items() for node in nodes(source)]
    functions = [(f"{module}.{each.name}", each) for module, source in sources.items() for each in _functions(source)]
    documented = [(module, ast.get_docstring(node)) for module, node in walked if isinstance(node, DOCUMENTED)]
    texts = [(f"{module}: {text.splitlines()[0]}", text) for module, text in documented if text]
    return {
        "modules": sorted(live),
        "modules with one importer": sorted(name for name in live if importers[name] == 1),
        **{f"modules behind {each}": sorted((closure(each, edges) & live) - {each}) for each in STARTS if each in live},
        "files of an update": sorted(closure(UPDATE, edges, UPDATE_ROOMS) & live) if UPDATE in live else [],
        "functions over 6 parameters": [name for name, node in functions if len(_parameters(node)) > 6],
        "functions over 50 lines": [name for name, node in functions if _length(node) > 50],
        "signatures with run, seed and sweep": [name for name, node in functions if _parameters(node) >= RUN],
        "classes over 120 lines": [
            f"{n}.{c.name}" for n, c in walked if isinstance(c, ast.ClassDef) and _length(c) > 120
        ],
        "class names used twice": _twice((each, name) for name, text in sources.items() for each in _types(text)),
        "file names used twice": _twice((name.split(".")[-1], name) for name in live),
        "docstrings that begin with What": [name for name, text in texts if text.split()[0] == "What"],
        "docstrings that begin with What, Of, Those, The same or As": [n for n, text in texts if OPENING.match(text)],
        "docstrings that lean on a neighbour": [name for name, text in texts if LEANING.match(text)],
        "what, whoever, those that": [f"{n}: {word}" for n, text in sources.items() for word in RELATIVE.findall(text)],
    }


def measure(root: Path) -> dict[str, int]:
    """Every measure that has a ceiling."""
    sources = read_sources(root, *HOUSE)
    lines = sum((kinds(source) for source in sources.values()), Counter())
    texts = {page.name: page.read_text() for page in (root / "README.md", *sorted((root / "docs").glob("*.md")))}
    params = (root / "params.yaml").read_text()
    items = count(sources)
    training = {"flows.train", *items.get("modules behind flows.train", [])}
    return {
        **{f"lines of {room}": each.total() for room, each in rooms(root, *HOUSE, "benchmarks").items()},
        "lines of agent_r1 and flows": lines.total(),
        "lines of code of agent_r1 and flows": lines["code"],
        "lines of flows.train and all behind it": sum(kinds(sources.get(each, "")).total() for each in training),
        **{name: len(found) for name, found in items.items()},
        "deepest nesting": max([0, *(_nesting(node) for source in sources.values() for node in _functions(source))]),
        "lines of README.md": texts["README.md"].count("\n"),
        "words of README.md and docs": sum(len(GENERATED.sub("", text).split()) for text in texts.values()),
        "keys of params.yaml": len([key for key in _keys(yaml.safe_load(params)) if not key.startswith("runs.")]),
        "lines of params.yaml": params.count("\n"),
    }


def read_ceilings(root: Path) -> dict[str, int]:
    """The ceilings of a checkout by name; none where it has no such file."""
    return dict(yaml.safe_load((root / SIZE).read_text())) if (root / SIZE).is_file() else {}


def complaints(measured: dict[str, int], ceilings: dict[str, int]) -> list[str]:
    """A sentence for each measure over its ceiling, each ceiling that is too loose, and each one without the other."""
    found = [f"{name}: nothing measures it. Remove its line from {SIZE}." for name in ceilings.keys() - measured]
    for name, value in measured.items():
        ceiling = ceilings.get(name)
        if ceiling is None:
            found.append(f"{name}: no ceiling. Write `{name}: {value}` into {SIZE}, and in its line what users get.")
        elif value > ceiling:
            remedy = f"Make it smaller, or write {value} into {SIZE} and in the same line what users get for it"
            found.append(
                f"{name}: {value}, over the ceiling of {ceiling}. {remedy}. `{COMMAND} --names` says what counts."
            )
        elif ceiling - value > value // LOOSE:
            found.append(f"{name}: {value}, ceiling {ceiling}. Write {value}, as `{COMMAND} --write` does.")
    return found


def lower(text: str, measured: dict[str, int]) -> str:
    """A file of ceilings, none of them above its measure. Raises none, and drops lines of what is not measured."""

    def line(match: re.Match[str]) -> str:
        name, ceiling, rest = match.groups()
        return f"{name}: {min(int(ceiling), measured[name])}{rest}" if name in measured else ""

    return re.sub(r"^([^#:\n]+): (\d+)(.*\n)", line, text, flags=re.MULTILINE)


def main() -> None:
    parser = argparse.ArgumentParser(prog=COMMAND, description="Measures a checkout.")
    parser.add_argument("folder", type=Path, nargs="?", default=Path(__file__).parents[1])
    parser.add_argument("--names", action="store_true", help="print the name of everything that is counted")
    parser.add_argument("--write", action="store_true", help=f"lower the ceilings of {SIZE} to the measures")
    given = parser.parse_args()
    if not read_sources(given.folder, *HOUSE):
        parser.error(f"{given.folder} has no sources of {' or '.join(HOUSE)}: name the folder of a checkout")
    measured = measure(given.folder)
    if given.write:
        (given.folder / SIZE).write_text(lower((given.folder / SIZE).read_text(), measured))
    _print(given.folder, measured, given.names)


def _print(root: Path, measured: dict[str, int], names: bool) -> None:
    columns = ("code", "import", "docstring", "comment", "blank")
    print(f"{'':<24}{'lines':>8}" + "".join(f"{column:>10}" for column in columns))
    table = rooms(root, *HOUSE, "benchmarks", "tests")
    for wing in (*HOUSE, "benchmarks", "tests"):
        table[f"all of {wing}"] = sum((each for room, each in table.items() if within(room, [wing])), Counter())
    table["the house"] = house = table["all of agent_r1"] + table["all of flows"]
    for room, each in table.items():
        print(f"{room:<24}{each.total():>8}" + "".join(f"{each[column]:>10}" for column in columns))
    print("of the house: " + ", ".join(f"{kind} {house[kind] / house.total():.1%}" for kind in columns))
    sources, ceilings = read_sources(root, *HOUSE), read_ceilings(root)
    items = count(sources)
    print(f"\n{'':<60}{'measure':>8}{'ceiling':>8}")
    for name, value in measured.items():
        start = name.removeprefix("modules behind ")
        lines = sum(kinds(sources[each]).total() for each in (start, *items[name])) if start in sources else 0
        print(f"{name:<60}{value:>8}{ceilings.get(name, ''):>8}" + (f"  {lines} lines with it" if lines else ""))
        for item, times in Counter(items.get(name, []) if names else []).items():
            print(f"    {item}" + (f" ({times} times)" if times > 1 else ""))


def _paths(root: Path, *wings: str) -> list[Path]:
    return [path for wing in wings for path in sorted((root / wing).rglob("*.py"))]


def _functions(source: str) -> list[Any]:
    return [node for node in nodes(source) if isinstance(node, FUNCTIONS)]


def _length(node: Any) -> int:
    return int(node.end_lineno - node.lineno + 1)


def _parameters(node: Any) -> set[str]:
    every = (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)
    return {each.arg for each in every} - {"self", "cls"}


def _nesting(node: ast.AST, level: int = 0) -> int:
    """The deepest block within blocks. An `elif` is as deep as its `if`, and inner functions count for themselves."""
    inner = [child for child in ast.iter_child_nodes(node) if not isinstance(child, INNER)]
    elifs = {each for each in node.orelse if isinstance(each, ast.If)} if isinstance(node, ast.If) else set()
    return max([level, *(_nesting(each, level + (isinstance(each, NESTS) and each not in elifs)) for each in inner)])


def _types(source: str) -> Iterator[str]:
    """The classes of a module, and its names of types: `Names = dict[str, str]`."""
    for node in ast.iter_child_nodes(nodes(source)[0]):
        if isinstance(node, ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.Assign) and TYPE.fullmatch(name := ast.unparse(node.targets[0])):
            yield name


def _twice(named: Iterable[tuple[str, str]]) -> list[str]:
    places = defaultdict(list)
    for name, place in named:
        places[name].append(place)
    return [f"{name}: {', '.join(sorted(found))}" for name, found in sorted(places.items()) if len(found) > 1]


def _keys(section: dict[str, Any], prefix: str = "") -> Iterator[str]:
    for key, value in section.items():
        if isinstance(value, dict) and value:
            yield from _keys(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}"


if __name__ == "__main__":
    main()
