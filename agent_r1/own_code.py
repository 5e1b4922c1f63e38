"""The user's own code: functions and classes that params.yaml names as `module:name`."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
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


def _module(where: str, name: str) -> ModuleType:
    try:
        module = import_module(name)
    except (Exception, SystemExit) as fault:
        raise ValueError(
            f"{where}: module {name!r} cannot be imported ({type(fault).__name__}: {fault}); "
            f"`python -c 'import {name}'` in the project's root has to find it"
        ) from fault
    own, found = Path(f"{name.replace('.', '/')}.py"), vars(module).get("__file__")
    if own.exists() and not (found and own.samefile(found)):
        raise ValueError(f"{where}: module {name!r} is {found or 'built in'}, which hides {own}; rename yours")
    return module
