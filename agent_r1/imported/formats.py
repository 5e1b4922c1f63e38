"""The formats of other trainers' rollouts, and the files of each."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from fnmatch import fnmatch
from pathlib import Path
from typing import NamedTuple

from agent_r1.data.sources import Row, data_files, read, suffix
from agent_r1.imported import chats, traces
from agent_r1.imported.episodes import Episode


class Format(NamedTuple):
    """How the rows of a format are read."""

    episodes: Callable[[Row], Iterator[Episode]]
    fields: set[str]  # by which a row is known
    files: str = "*"  # in a folder, those of rollouts


# By the name on the command line; a format with two layouts has a second one. The first that fits a row has it.
FORMATS: dict[str, tuple[Format, ...]] = {
    "verl": (Format(chats.VERL.episodes, {"input", "output", "score"}, "*.jsonl"),),
    "trl": (Format(chats.TRL.episodes, {"step", "prompt", "completion"}, "completions_*.parquet"),),
    "verifiers": (
        Format(traces.verifiers, {"traces"}, "traces.jsonl"),
        Format(chats.RESULTS.episodes, {"prompt", "completion", "reward"}, "results.jsonl"),
    ),
    "nemo_gym": (Format(traces.nemo_gym, {"responses_create_params", "response"}, "*.jsonl"),),
    "atif": (Format(traces.atif, {"schema_version", "steps"}, "trajectory*.json"),),
    "openai": (
        Format(chats.SCORED.episodes, {"messages", "score"}, "*.jsonl"),
        Format(chats.MESSAGES.episodes, {"messages"}, "*.jsonl"),
    ),
}
BESIDE = ("*_failures.jsonl", "*_materialized_inputs.jsonl")  # what NeMo Gym writes beside rollouts
PARQUET = b"PAR1"


def known(row: Row) -> str:
    """The format that a row looks like; "" for none."""
    fits = (name for name, layouts in FORMATS.items() if any(row.fields.keys() >= each.fields for each in layouts))
    return next(fits, "")


def episodes_of(row: Row, name: str) -> Iterator[Episode]:
    """The episodes of a row of a format. A ValueError says which format it looks like, if it is another's."""
    for layout in FORMATS[name]:
        if row.fields.keys() >= layout.fields:
            return layout.episodes(row)
    fields = " or ".join(", ".join(sorted(layout.fields)) for layout in FORMATS[name])
    likeness = known(row)
    hint = (
        f"it looks like {likeness}: --format {likeness}" if likeness else f"it has {', '.join(map(repr, row.fields))}"
    )
    raise ValueError(f"{row}: no row of {name}, whose fields are {fields}; {hint[:300]}")


def rollout_files(path: Path, name: str) -> tuple[str, list[Path]]:
    """The format, without a `name` that of the first row, and its files at a path, by the numbers in their names.

    Raises FileNotFoundError if there is none, and ValueError for one of no known format, or with a wrong suffix.
    """
    files = _sorted(data_files(path, remedy="name a file, a folder or a pattern in quotation marks"))
    if path.is_dir():
        files = _of_rollouts(files, [name] if name else FORMATS)
    if not files:
        raise FileNotFoundError(f"{path} holds no file of rollouts{f' of {name}' * bool(name)}; name it")
    for file in files:
        with file.open("rb") as content:
            is_parquet = content.read(len(PARQUET)) == PARQUET
        if is_parquet != (suffix(file) == ".parquet"):
            kind = "is" if is_parquet else "is not"
            raise ValueError(f"{file} {kind} a Parquet file, and its name says otherwise; rename it")
    if not name:
        first = next(read(files[0]), None)
        name = known(first) if first else ""
        if not name:
            raise ValueError(f"{files[0]}: its first row has the fields of no format; --format: {', '.join(FORMATS)}")
        files = _of_rollouts(files, [name]) if path.is_dir() else files
    return name, files


def _of_rollouts(files: list[Path], names: Iterable[str]) -> list[Path]:
    """The files of a folder that are named as these formats' rollouts are."""
    patterns = [layout.files for name in names for layout in FORMATS[name]]
    files = [file for file in files if any(fnmatch(file.name, pattern) for pattern in patterns)]
    return [file for file in files if not any(fnmatch(file.name, pattern) for pattern in BESIDE)]


def _sorted(paths: list[Path]) -> list[Path]:
    return sorted(paths, key=lambda path: re.sub(r"\d+", lambda digits: digits[0].zfill(20), str(path)))
