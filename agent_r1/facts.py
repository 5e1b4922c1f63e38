"""Facts: names with values or hashes that say whether two things are the same, and how they differ."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

NAMED = 5  # differences in a message
SHOWN = 40  # characters of a value that a message holds at most
SHORTENED = 12  # characters that it holds of a longer one


def differences(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """The differences in words such as `train.credit.lam 0.99 -> 0.95`; `none` where one side lacks the fact."""
    return [f"{name} {_short(old.get(name))} -> {_short(new.get(name))}" for name in differing(old, new)]


def differing(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """The names of the facts that differ, those of `old` first."""
    return [name for name in {**old, **new} if old.get(name) != new.get(name)]


def some(names: Sequence[str]) -> str:
    """The first few names or differences, and how many more there are."""
    more = f" and {len(names) - NAMED} more" if len(names) > NAMED else ""
    return ", ".join(names[:NAMED]) + more


def read(file: Path, group_names: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Reads groups of facts. Raises ValueError if the file is damaged, or its groups are not those of these names."""
    try:
        groups = {group: dict(facts) for group, facts in json.loads(file.read_text()).items()}
        if names := differing(dict.fromkeys(groups, True), dict.fromkeys(group_names, True)):
            raise ValueError(", ".join(f"{name} is {'unknown' if name in groups else 'missing'}" for name in names))
    except (ValueError, TypeError, AttributeError) as fault:
        raise ValueError(f"{file} is damaged, or of another version of the project: {fault}") from fault
    return groups


def _short(value: Any) -> str:
    text = "none" if value is None else str(value)
    return text if len(text) <= SHOWN else f"{text[:SHORTENED]}..."
