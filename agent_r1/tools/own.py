"""Tools of one's own: functions that `env.tools.functions` names, each by the module in which it is."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from types import ModuleType

from agent_r1.files import sha256
from agent_r1.params.sections import nearest
from agent_r1.params.stages import ToolsParams
from agent_r1.tools.base import FunctionTool


def own_tools(params: ToolsParams) -> list[FunctionTool]:
    """The functions as tools; a ValueError says which module or function is not there, or is no tool."""
    found = []
    for name, function in params.functions.items():
        module = _module(name, function.module)
        call = vars(module).get(name)
        if not callable(call):
            functions = [each for each, value in vars(module).items() if callable(value)]
            raise ValueError(f"env.tools.functions.{name}: {module.__name__} has no {name!r}{nearest(name, functions)}")
        found.append(FunctionTool(call, timeout_s=function.timeout_s))
    return found


def sources(params: ToolsParams) -> dict[str, str]:
    """The sha256 of each function's source file, by the name of its tool; raises as `own_tools`."""
    files = {name: _module(name, function.module).__file__ for name, function in params.functions.items()}
    return {f"tool {name}": sha256(Path(file)) if file else "built in" for name, file in files.items()}


def _module(name: str, module: str) -> ModuleType:
    try:
        return import_module(module)
    except Exception as fault:
        raise ValueError(
            f"env.tools.functions.{name}: module {module!r} cannot be imported ({type(fault).__name__}: {fault}); "
            f"`python -c 'import {module}'` in the project's root has to find it"
        ) from fault
