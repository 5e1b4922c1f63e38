"""The statements in which the code of two trees differs: comments, docstrings, imports and moved functions apart.

A unit is a function, or what a class or a module holds beside its functions. It is compared with the unit of the same
name in the same file, else with the most similar one of that name whose place is gone: a file or a class that moved.
"""

from __future__ import annotations

import ast
import copy
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from difflib import SequenceMatcher
from types import CodeType

BLOCKS = ("body", "orelse", "finalbody", "handlers", "cases")


@dataclass(frozen=True)
class Statement:
    """A simple statement, or the header of a compound one."""

    text: str  # after the headers that it stands below
    file: str
    lines: frozenset[int]  # that hold code of it


@dataclass(frozen=True)
class Unit:
    name: str
    file: str
    statements: list[Statement] = field(default_factory=list)

    @property
    def texts(self) -> list[str]:
        return [each.text for each in self.statements]


def changed(before: Mapping[str, str], after: Mapping[str, str]) -> tuple[list[Statement], list[Statement]]:
    """The statements that only the first or only the second of two trees has, each given as file -> source.

    A whole function or class that is gone counts only by what called it; a method counts, for it may override another.
    """
    edited = {file for file in before.keys() | after.keys() if before.get(file) != after.get(file)}
    old, new = ({(unit.file, unit.name): unit for unit in _units(tree, edited)} for tree in (before, after))
    names = {name for _, name in new}
    left = {place: unit for place, unit in old.items() if place not in new}
    gone, came = list[Statement](), list[Statement]()
    for place, unit in new.items():
        earlier = old.get(place) or _most_similar(unit, [each for each in left.values() if each.name == unit.name])
        left.pop((earlier.file, earlier.name), None)
        for kind, i, j, k, m in SequenceMatcher(None, earlier.texts, unit.texts, autojunk=False).get_opcodes():
            if kind != "equal":
                gone += earlier.statements[i:j]
                came += unit.statements[k:m]
    for unit in left.values():
        if unit.name.rpartition(".")[0] in names - {""}:
            gone += unit.statements
    return gone, came


def _most_similar(unit: Unit, candidates: Sequence[Unit]) -> Unit:
    texts = {*unit.texts}
    return max(candidates, key=lambda each: len(texts & {*each.texts}), default=Unit("", ""))


def _units(tree: Mapping[str, str], files: Set[str]) -> Iterator[Unit]:
    """The units of some files. A file that is no Python is one statement, which is never found to have run."""
    for file in sorted(tree.keys() & files):
        source = tree[file]
        if file.endswith(".py"):
            found = [Unit("", file)]
            _collect(ast.parse(source).body, found, found[0], _lines_with_code(compile(source, file, "exec")), "")
            yield from found
        else:
            yield Unit(file.rpartition("/")[2], file, [Statement(source, file, frozenset({0}))])


def _collect(body: Sequence[ast.AST], found: list[Unit], unit: Unit, code: set[int], above: str) -> None:
    """Adds statements to a unit. A function or class below no compound statement becomes a unit of its own."""
    for node in body:
        if not _counts(node):
            continue
        blocks = {name: getattr(node, name) for name in BLOCKS if isinstance(getattr(node, name, None), list)}
        header = copy.copy(node)
        for name in blocks:
            setattr(header, name, [])
        text = f"{above}{ast.unparse(header)}"
        inner = {line for block in blocks.values() for each in block for line in _span(each)}
        unit.statements.append(Statement(text, unit.file, frozenset(({*_span(node)} - inner) & code)))
        for name, block in blocks.items():
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) and not above:
                found.append(Unit(f"{unit.name}.{node.name}".lstrip("."), unit.file))
                _collect(block, found, found[-1], code, "")
            else:
                _collect(block, found, unit, code, f"{text}\n{name} ")


def _counts(node: ast.AST) -> bool:
    """Whether a statement does something, imports apart."""
    if isinstance(node, ast.Import | ast.ImportFrom):
        return False
    if isinstance(node, ast.If):
        return ast.unparse(node.test) != "TYPE_CHECKING"
    return not (isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant))


def _span(node: ast.AST) -> range:
    """Its lines, with its decorators and its blocks; those of a `case` begin with its pattern."""
    places = [
        each for each in ast.walk(node) if isinstance(each, ast.stmt | ast.expr | ast.pattern | ast.excepthandler)
    ]
    return range(min(each.lineno for each in places), max(each.end_lineno or 0 for each in places) + 1)


def _lines_with_code(code: CodeType) -> set[int]:
    found = {line for *_, line in code.co_lines() if line}
    return found.union(*(_lines_with_code(each) for each in code.co_consts if isinstance(each, CodeType)))
