"""The user's own code: functions and classes that params.yaml names as `module:name`."""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib import import_module
from importlib.machinery import PathFinder
from pathlib import Path
from types import ModuleType
from typing import Any

from agent_r1.files import sha256
from agent_r1.params.sections import nearest


def load(where: str, named: str) -> Callable[..., Any]:
    """The function or class that the key `where` of params.yaml names; a ValueError says that it is not there."""
    module, _, name = named.partition(":")
    found = vars(_module(where, module))
    call: Callable[..., Any] | None = found.get(name)
    if not callable(call):
        callables = [each for each, value in found.items() if callable(value)]
        raise ValueError(f"{where}: {module} has no {name!r}{nearest(name, callables)}")
    return call


def source_hash(where: str, named: str) -> str:
    """The sha256 of the source file of a function or class, "built in" without one; raises as `load`."""
    file = _module(where, named.partition(":")[0]).__file__
    return sha256(Path(file)) if file else "built in"


def is_taken(name: str) -> bool:
    """Whether Python, an installed library or the project itself has a module of that name."""
    elsewhere = [path for path in sys.path if Path(path).resolve() != Path.cwd()]
    found = PathFinder.find_spec(name, elsewhere)
    return name in sys.stdlib_module_names or Path(name).is_dir() or bool(found and found.origin)


def _module(where: str, name: str) -> ModuleType:
    if (file := Path(name.partition(".")[0]).with_suffix(".py")).exists() and is_taken(file.stem):
        raise ValueError(f"{where}: {file} has the name of a module that Python or a library needs; rename it")
    try:
        return import_module(name)
    except Exception as fault:
        raise ValueError(
            f"{where}: module {name!r} cannot be imported ({type(fault).__name__}: {fault}); "
            f"`python -c 'import {name}'` in the project's root has to find it"
        ) from fault
