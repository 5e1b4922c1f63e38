"""params.yaml as typed values: every knob, its range, and the combinations that are refused."""

from __future__ import annotations

import logging
from copy import deepcopy
from functools import lru_cache
from pathlib import Path
from typing import Any

import yaml

from agent_r1.params.places import PARAMS, RunId
from agent_r1.params.sections import bring_up, validated
from agent_r1.params.whole import Params, fingerprint, variant_of

__all__ = ["SHIPPED", "Params", "RunId", "fingerprint", "load", "variant_of"]

logger = logging.getLogger(__name__)

SHIPPED = Path(__file__).with_name("shipped.yaml")  # the project's params.yaml, which travels with the package


def load(path: Path = Path(PARAMS)) -> Params:
    """Reads a parameter file. A FileNotFoundError says that there is none, a ValueError names every refused key."""
    if not path.exists():
        raise FileNotFoundError(f"{path.absolute()} does not exist; run from the project's root")
    try:
        content = deepcopy(_parsed(path.read_text()))
    except (yaml.YAMLError, ValueError, RecursionError, AttributeError, LookupError) as fault:  # PyYAML on odd scalars
        mark = getattr(fault, "problem_mark", None)
        where = f" at line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        problem = str(getattr(fault, "problem", None) or fault).splitlines()[0]
        raise ValueError(f"{path} cannot be read as YAML{where}: {problem}") from fault
    if not isinstance(content, dict):
        raise ValueError(f"{path}: expected a mapping of sections, found {type(content).__name__}")
    return validated(Params, content, str(path))


@lru_cache(maxsize=8)
def _parsed(text: str) -> Any:
    """What YAML says; a stage asks several times, and its reader takes longer than all checks."""
    content = yaml.safe_load(text)
    if changes := list(bring_up(content)):
        logger.warning("the parameters are an earlier version's; bring them up to date: %s", "; ".join(changes))
    return content
