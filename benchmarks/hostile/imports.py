"""Rollouts of other trainers: what is imported can be read again, or is refused."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from random import Random
from typing import NamedTuple

from agent_r1.imported.exported import export
from agent_r1.imported.formats import rollout_files
from agent_r1.imported.store import Choices, Importing, read_imported, rows_of
from agent_r1.imported.tokens import Tokens
from agent_r1.learn.builtin import train_tokenizer
from agent_r1.params.places import RunId
from agent_r1.records import Trajectory
from agent_r1.tables import read_rows
from benchmarks.hostile.kind import Kind, require
from benchmarks.hostile.mutations import as_bytes, as_json, mutated
from tests.fixtures import TEXTS

ROOT = Path(__file__).parents[2]
FILES = ROOT / "tests/imported/files"  # small ones of each format
RUN = RunId.meant("imported/mine")


class Rollouts(NamedTuple):
    """A file of rollouts."""

    form: str
    file: Path


class Imports(Kind):
    """Rows with another field, type, size or text."""

    name, tried, limit_mib, limit_s = "imported rollouts", 1000, 1024, 20

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        train_tokenizer(TEXTS, vocab_size=512).save_pretrained(folder / "tokenizer")
        self._tokens = Tokens(folder / "tokenizer")

    def make(self, rng: Random) -> Rollouts:
        source = rng.choice([path for path in sorted(FILES.rglob("*.json*")) if path.name not in ASIDE])
        text = source.read_text()
        rows = [json.loads(text)] if source.suffix == ".json" else [*map(json.loads, text.splitlines())]
        rows = [mutated(row, rng, rng.choice((0, 1, 1, 3))) for row in rows]
        written = "\n".join(as_json(row, rng) if rng.random() < 0.1 else json.dumps(row) for row in rows)
        file = self.folder / "rollouts.jsonl"
        file.write_bytes(as_bytes(written, rng) if rng.random() < 0.1 else written.encode(errors="replace"))
        form = {"trl": "trl", "traces": "verifiers"}.get(part := source.relative_to(FILES).parts[0], part)
        return Rollouts(form, file)

    def judge(self, made: Rollouts) -> None:
        folder = self.folder / "mine"
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        form, files = rollout_files(made.file, made.form)
        importing = Importing(RUN, Choices(form, "reward>=1"), self._tokens, folder)
        about = importing.take(files)
        rows = [row for step in about.steps for row in read_rows(rows_of(folder, step), Trajectory)]
        require(len(rows) == about.rows, f"{len(rows)} rows of {about.rows}")
        require(sum(row.aborted for row in rows) == about.ungraded, "rows without a reward are not counted")
        read_imported("mine", folder)
        for layout in ("openai", "atif"):
            target = self.folder / f"{layout}.out"
            target.unlink(missing_ok=True)
            require(export(folder, layout, target) == about.rows, "fewer were exported")

    def names(self, made: Rollouts) -> tuple[str, ...]:
        return (str(made.file), "no row has a number")


ASIDE = ("metadata.json", "result.json", "rollouts_failures.jsonl")  # what lies beside rollouts
