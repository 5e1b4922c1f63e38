"""Stands in for torchvision, which has no build for a CPU's torch: vLLM imports it for models that may read images.

Whatever is taken from it is a class of names.
"""

import sys
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

__version__ = "0.28.0"


class _Names(type):
    """The kind of a class whose every attribute is its name."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return name


class _Empty(ModuleType):
    """A module that has every name."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return sys.modules.get(f"{self.__name__}.{name}") or _Names(name, (), {})


for _path in ("transforms", "transforms.functional", "transforms.v2", "transforms.v2.functional", "io"):
    _module = _Empty(f"{__name__}.{_path}")
    _module.__path__ = []
    _module.__spec__ = ModuleSpec(_module.__name__, None, is_package=True)
    sys.modules[_module.__name__] = _module
transforms = sys.modules[f"{__name__}.transforms"]
io = sys.modules[f"{__name__}.io"]
