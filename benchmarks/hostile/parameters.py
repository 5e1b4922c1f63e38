"""params.yaml: texts that are hardly YAML, values that are hardly parameters."""

from __future__ import annotations

import re
from pathlib import Path
from random import Random
from typing import Any

import yaml

from agent_r1.params import SHIPPED, Params, load
from agent_r1.params.places import PARAMS
from agent_r1.params.sections import validated
from benchmarks.hostile.kind import Kind, require
from benchmarks.hostile.mutations import DEEP, NUMBERS, PASSWORD, mutated, odd_text, odd_value

_WORD = re.compile(r"\w+", re.ASCII)
_PIECES = (
    "!!timestamp x", "!!int ''", "!!float ''", "!!bool x", "!!binary \u00e9",
    "!!python/object/apply:os.system ['touch hacked']",
    "!!python/name:os.system", "!!set {a, b}", "!!omap [a: 1]", "2001-13-45", "1:61:61", "0b", "0x", "9" * 5000, "=",
    "<<: [1]",
    "{[a]: b}", "? [a]", "&a [*a]", "&a {a: *a}", "*nobody", "%TAG x", "@x", "\t- x", "'", "\"\\x\"", "|9", "- - -",
    "{",
    "[" * 200, "[" * 50_000, "...\n---\n", "\x07", "\ufffe", "1e999", ".nan", ".inf", "-.inf", "~", "<<: *a", "? ? ?",
    "!<x> y",
)  # fmt: skip
_BOMB = "x0: &x0 [a,a,a,a,a,a,a,a,a]\n" + "".join(
    f"x{n}: &x{n} [{','.join([f'*x{n - 1}'] * 9)}]\n" for n in range(1, 9)
)  # a few hundred bytes that are 400 million values when they are written out


class Values(Kind):
    """The sections with changed values, as a file of YAML gives them."""

    name, tried, holds_secrets = "params values", 1200, True

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self._honest = yaml.safe_load(SHIPPED.read_text())

    def make(self, rng: Random) -> Any:
        made = self._honest
        if rng.random() < 0.3:  # what names of params.yaml reach
            made = _with(made, rng.choice(("runs", "repro_runs", "ablations", "places", "prepare", "search")), rng)
        return mutated(made, rng, rng.choice((1, 1, 2, 4)))

    def judge(self, made: Any) -> None:
        accepted(validated(Params, made, PARAMS))

    def names(self, made: Any) -> tuple[str, ...]:
        return (PARAMS,)


class Texts(Kind):
    """Files whose text has been changed: lines, indents, anchors, tags, bytes."""

    name, tried, holds_secrets = "params texts", 500, True

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self._honest = yaml.safe_dump(yaml.safe_load(SHIPPED.read_text()), sort_keys=False)

    def make(self, rng: Random) -> Path:
        lines = self._honest.splitlines()
        for _ in range(rng.choice((1, 1, 3))):
            _disturb(lines, rng)
        text = "\n".join(lines).encode(errors="surrogatepass")
        file = self.folder / PARAMS
        file.write_bytes(text[: rng.randrange(len(text))] if rng.random() < 0.1 else text)
        return file

    def judge(self, made: Path) -> None:
        accepted(load(made))

    def names(self, made: Path) -> tuple[str, ...]:
        return (str(made),)


def accepted(params: Params) -> None:
    """Raises Defect if parameters were accepted that name what a shell or a disk takes for something else."""
    names = [*params.runs, *params.repro_runs, *params.repro_baselines, *params.ablations.runs]
    require(all(_WORD.fullmatch(name) for name in names), f"a name that a shell may read: {names}")
    require(all(type(seed) is int and seed >= 0 for seed in params.ablations.seeds), "a seed that is no number")
    for place in (params.places.data, params.places.outputs):
        inside = not Path(place).is_absolute() and ".." not in Path(place).parts
        require(inside and place.isprintable(), f"a place outside of the project: {place!r}")
    require(PASSWORD not in f"{params.search.remote.url} {params.engine.server.urls}", "an address with a password")


def _with(content: dict[str, Any], section: str, rng: Random) -> dict[str, Any]:
    """The content with a section that was changed many times."""
    return {**content, section: mutated(content[section], rng, 3)}


def _disturb(lines: list[str], rng: Random) -> None:
    at = rng.randrange(len(lines))
    head, colon, _ = lines[at].partition(":")
    match rng.randrange(9):
        case 0:
            lines[at] = " " * rng.randrange(5) + lines[at]
        case 1:
            del lines[at]
        case 2:
            lines.insert(rng.randrange(len(lines)), lines[at])
        case 3 | 4:
            lines[at] = f"{head}{colon} {rng.choice(_PIECES)}"
        case 5:
            lines[at] = f"{head}{colon} {odd_text(rng)}"
        case 6:
            lines[at] = f"{head}{colon} {rng.choice((odd_value(rng), *NUMBERS))!r}".replace(DEEP, "[" * 1000)
        case 7:
            lines.insert(at, rng.choice((_BOMB, *_PIECES)))
        case 8:
            lines[:0] = [_BOMB.rstrip()]
            lines[rng.randrange(9, len(lines))] = f"{head}{colon} *x{rng.randrange(9)}"
