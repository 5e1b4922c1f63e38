"""Code of one's own that params.yaml names by the module in which it is: tools, and classes of worlds."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

from agent_r1.files import sha256
from agent_r1.params.env import EnvParams, ToolsParams
from agent_r1.params.sections import nearest
from agent_r1.tools.base import FunctionTool


def own_tools(params: ToolsParams) -> list[FunctionTool]:
    """The functions as tools; a ValueError says which module or function is not there, or is no tool."""
    return [
        FunctionTool(
            named(name, function.module, f"env.tools.functions.{name}"),
            timeout_s=function.timeout_s,
        )
        for name, function in params.functions.items()
    ]


def require(params: EnvParams) -> None:
    """Raises ValueError for a tool or a class of one's own that is not there, or is none."""
    own_tools(params.tools)
    for name, each in params.toolbox.items():
        module, _, kind = each.class_.partition(":")
        named(kind, module, f"env.toolbox.{name}")


def sources(params: EnvParams) -> dict[str, str]:
    """The sha256 of the source file of each tool and class of one's own; raises as `named`."""
    modules = {
        f"tool {name}": _module(each.module, f"env.tools.functions.{name}")
        for name, each in params.tools.functions.items()
    } | {
        f"toolbox {name}": _module(each.class_.partition(":")[0], f"env.toolbox.{name}")
        for name, each in params.toolbox.items()
    }
    return {name: sha256(Path(each.__file__)) if each.__file__ else "built in" for name, each in modules.items()}


def named(name: str, module: str, where: str) -> Callable[..., Any]:
    """A function or class by its name; a ValueError says that it, or its module, is not there, and where."""
    found = vars(_module(module, where))
    if not callable(found.get(name)):
        functions = [each for each, value in found.items() if callable(value)]
        raise ValueError(f"{where}: {module} has no {name!r}{nearest(name, functions)}")
    call: Callable[..., Any] = found[name]
    return call


def _module(name: str, where: str) -> ModuleType:
    try:
        return import_module(name)
    except Exception as fault:
        raise ValueError(
            f"{where}: module {name!r} cannot be imported ({type(fault).__name__}: {fault}); "
            f"`python -c 'import {name}'` in the project's root has to find it"
        ) from fault
