"""Own code and data, begun from a template in flows/templates, and examples of a data set: `agent-r1 new KIND NAME`."""

from __future__ import annotations

import json
import keyword
import re
from collections.abc import Mapping
from pathlib import Path
from string import Template

from agent_r1 import own_code, params
from agent_r1.files import write_text
from agent_r1.params.credit import LOGGED, RewardWeights
from agent_r1.params.places import RAW
from agent_r1.params.prepare import BUILT_IN
from agent_r1.params.sections import nearest
from agent_r1.params.tools import ToolsParams
from agent_r1.records import Question
from agent_r1.search.index import open_index
from agent_r1.tables import read_rows

EXAMPLES = 2  # of env.examples; each costs its tokens in every prompt
NAME = re.compile(r"[a-z][a-z0-9_]{0,39}")


def write_examples(name: str) -> str:
    """Writes two examples from the first training rows of a data set; returns path and next lines.

    Raises ValueError for a data set that is not prepared, a file in the way, and rows that cannot be demonstrated.
    """
    settings = params.load()
    if name not in settings.prepare.datasets:
        raise ValueError(f"no data set is prepared called {name!r}{nearest(name, settings.prepare.datasets)}")
    path = RAW / name / "examples.jsonl"
    if path.exists():
        raise ValueError(f"{path} exists, and nothing is replaced; move it away")
    from agent_r1.teaching.warm_start import demonstrate_examples

    rows = read_rows(settings.places.questions, Question)
    questions = [row for row in rows if (row.dataset, row.split) == (name, "train")]
    index = open_index(settings.search, settings.places.passages, settings.places.index)
    examples = demonstrate_examples(settings, questions, index, EXAMPLES)
    write_text(path, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in examples))
    return f"wrote {path}\n\n# Read them, and name the file in params.yaml:\nenv: {{examples: {path}}}"


def begin(kind: str, name: str) -> str:
    """Writes a template's files; returns paths and next commands. ValueError for an unfit name or a file in the way."""
    settings = params.load()
    if not NAME.fullmatch(name) or keyword.iskeyword(name):
        raise ValueError(f"{name!r} is to name a module; take small letters, digits and _, a letter first")
    reserved = {BUILT_IN, "base", *settings.prepare.files, *settings.prepare.worlds, *ToolsParams.model_fields, *LOGGED}
    if name in reserved | RewardWeights.model_fields.keys() or own_code.is_taken(name):
        raise ValueError(f"{name!r} is the name of something that is there; choose another, such as my_{name}")
    words = {"name": name, "Name": name.title().replace("_", ""), "runs": ", ".join(settings.repro_runs)}
    files, commands = filled(kind, words)
    if existing := [path for path in files if Path(path).exists()]:
        raise ValueError(f"{existing[0]} exists, and nothing is replaced; choose another name, or move it away")
    for path, content in files.items():
        write_text(Path(path), content)
    return "\n".join([*(f"wrote {path}" for path in files), "", commands])


def filled(kind: str, words: Mapping[str, str]) -> tuple[dict[str, str], str]:
    """The files of a template by their paths, with words in it, and what is to be typed next."""
    template = Template((Path(__file__).with_name("templates") / f"{kind}.txt").read_text())
    _, *parts = re.split(r"^=== (.+)\n", template.substitute(words), flags=re.MULTILINE)
    files = dict(zip(parts[::2], parts[1::2], strict=True))
    commands = files.pop("next")
    return files, commands
