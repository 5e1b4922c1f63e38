"""The user's own code: functions and classes that params.yaml names as `module:name`."""

from __future__ import annotations

import hashlib
import inspect
import json
import shutil
import sys
from collections.abc import Callable
from contextlib import suppress
from importlib import import_module
from importlib.machinery import PathFinder
from pathlib import Path
from types import ModuleType
from typing import Any

from agent_r1.files import sha256
from agent_r1.params.agents import AgentParams
from agent_r1.params.sections import nearest


def load(where: str, reference: str) -> Callable[..., Any]:
    """The function or class that the key `where` of params.yaml names; a ValueError says that it is not there."""
    module, _, name = reference.partition(":")
    members = vars(_module(where, module))
    call: Callable[..., Any] | None = members.get(name)
    if not callable(call):
        callables = [member for member, value in members.items() if callable(value)]
        raise ValueError(f"{where}: {module} has no {name!r}{nearest(name, callables)}")
    return call


def source_hash(where: str, reference: str) -> str:
    """The sha256 of a function's or class's file, or in a notebook of its source, else "built in"; raises as `load`."""
    function = load(where, reference)
    if file := vars(_module(where, reference.partition(":")[0])).get("__file__"):
        return sha256(Path(file))
    try:
        return hashlib.sha256(inspect.getsource(function).encode()).hexdigest()
    except (OSError, TypeError):
        return "built in"


def command(name: str, agent: AgentParams) -> list[str]:
    """An agent's command or interpreter, if it has one, for a process in another folder; else raises ValueError."""
    words = agent.command or ([agent.python] if agent.python else [])
    if words and not shutil.which(words[0]):
        key = "command" if agent.command else "python"
        raise ValueError(f"env.agents.{name}.{key}: there is no {words[0]!r}; install it, or name its path")
    program = [shutil.which(words[0]) or "", *words[1:]] if words else []
    return [str(Path(word).absolute()) if _is_file(word) else word for word in program]


def agent_hash(name: str, agent: AgentParams) -> str:
    """The sha256 of an agent's declaration, and of its function's module or the files that its command names.

    Runs no code of it. Raises ValueError for a module or a command that is not there.
    """
    files = [word for word in command(name, agent)[1:] if _is_file(word)]
    if agent.function:
        files = [_file(f"env.agents.{name}.function", agent.function.partition(":")[0])]
    without = {"python"} if agent.python is None else None  # so is it in runs that lack the key, which go on
    declared = agent.model_dump(exclude=without)
    parts = [json.dumps(declared, sort_keys=True), *(sha256(Path(file)) for file in files)]
    return hashlib.sha256("".join(parts).encode()).hexdigest()


def _is_file(word: str) -> bool:
    """Whether a word of a command is a file; a long one, such as a script, is none."""
    with suppress(OSError):
        return Path(word).is_file()
    return False


def _file(where: str, module: str) -> str:
    """The file of a module of the user's, found without importing it."""
    spec = None
    places = [str(Path.cwd()), *sys.path]
    parts = module.split(".")
    for number, _ in enumerate(parts, start=1):
        spec = PathFinder.find_spec(".".join(parts[:number]), places)
        places = spec.submodule_search_locations or [] if spec else []
    if not (spec and spec.origin and Path(spec.origin).is_file()):
        raise ValueError(f"{where}: there is no module {module!r}; it has to be found from the project's root")
    return spec.origin


def reference(function: Callable[..., Any]) -> tuple[str, str]:
    """Module and name by which `load` finds a function; a ValueError says that it has none."""
    if not inspect.isfunction(function) or vars(sys.modules[function.__module__]).get(function.__name__) != function:
        remedy = "define it with def, in a cell of a notebook or at the top level of a module"
        raise ValueError(f"{function!r} cannot be found by a name; {remedy}")
    return function.__module__, function.__name__


def is_taken(name: str) -> bool:
    """Whether Python, an installed library or the project itself has a module of that name."""
    paths = [path for path in sys.path if Path(path).resolve() != Path.cwd()]
    spec = PathFinder.find_spec(name, paths)
    return name in sys.stdlib_module_names or Path(name).is_dir() or bool(spec and spec.origin)


def _module(where: str, name: str) -> ModuleType:
    file = Path(name.partition(".")[0]).with_suffix(".py")
    if file.exists() and is_taken(file.stem):
        raise ValueError(f"{where}: {file} has the name of a module that Python or a library needs; rename it")
    try:
        module = import_module(name)
    except (Exception, SystemExit) as fault:
        remedy = f"`python -c 'import {name}'` in the project's root has to find it"
        problem = f"{type(fault).__name__}: {fault}"
        raise ValueError(f"{where}: module {name!r} cannot be imported ({problem}); {remedy}") from fault
    source = Path(f"{name.replace('.', '/')}.py")
    origin = vars(module).get("__file__")
    if source.exists() and not (origin and source.samefile(origin)):
        raise ValueError(f"{where}: module {name!r} is {origin or 'built in'}, which hides {source}; rename yours")
    return module
