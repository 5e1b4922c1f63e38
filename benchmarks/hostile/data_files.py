"""Data files of every format, and files of passages: what is prepared from them can be read again, or is refused."""

from __future__ import annotations

import gzip
import json
import shutil
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq

from agent_r1.data.prepare import PASSAGES, QUESTIONS, write
from agent_r1.params import SHIPPED, load
from agent_r1.params.prepare import FilesParams, PrepareParams, SplitParams
from agent_r1.records import Passage, Question
from agent_r1.tables import read_rows
from benchmarks.hostile.kind import Kind, require
from benchmarks.hostile.mutations import LONG, as_bytes, as_json, damaged, mutated, odd_text

_SUPPORTED = {
    "_id": "id1",
    "question": "Who directed Kiss?",
    "answer": "Mara",
    "type": "comparison",
    "supporting_facts": [["Kiss", 0], ["Mara", 0], ["Kiss", 1]],
    "context": [["Kiss", ["A film.", " By Mara."]], ["Mara", ["A director."]]],
}
HONEST: dict[str, dict[str, Any]] = {
    "hotpotqa": _SUPPORTED,
    "2wikimultihopqa": _SUPPORTED,
    "musique": {
        "id": "2hop__1_2",
        "question": "Who directed Kiss?",
        "answer": "Mara",
        "answer_aliases": ["Mara Quill"],
        "answerable": True,
        "question_decomposition": [{"id": 1}, {"id": 2}],
        "paragraphs": [{"title": "Kiss", "paragraph_text": "By Mara.", "is_supporting": True}],
    },
    "generic": {"question": "Who?", "answers": ["Mara"], "gold_titles": ["Kiss"], "hops": 1, "kind": "own", "id": 7},
}
_CORPUS = [{"title": "Kiss", "text": "A film by Mara.", "id": 1}, {"title": "Mara", "text": "A director."}]
_MEBIBYTE = 1 << 20
_ATLAS = load(SHIPPED).prepare.atlas


class Given(NamedTuple):
    """A file of questions, and one of passages where its format has none."""

    form: str
    file: Path
    corpus: Path | None = None


class Texts(Kind):
    """JSON, JSON lines and text, plain or packed."""

    name, tried, limit_mib, limit_s = "data texts", 1000, 1024, 20

    def make(self, rng: Random) -> Given:
        form = rng.choice([*HONEST])
        if form == "generic" and rng.random() < 0.5:
            return Given(form, _write(self.folder / "q.jsonl", [HONEST[form]], rng, 0.0), self._corpus(rng))
        corpus = _write(self.folder / "honest.jsonl", _CORPUS, rng, 0.0) if form == "generic" else None
        name = f"q.{rng.choice(('json', 'jsonl'))}{rng.choice(('', '', '.gz'))}"
        return Given(form, _write(self.folder / name, _rows(HONEST[form], rng), rng), corpus)

    def judge(self, made: Given) -> None:
        prepare(made, self.folder / "prepared")

    def names(self, made: Given) -> tuple[str, ...]:
        return (str(made.file), str(made.corpus), "prepare.files")

    def _corpus(self, rng: Random) -> Path:
        if rng.random() < 0.7:
            return _write(self.folder / f"c.jsonl{rng.choice(('', '.gz'))}", mutated(_CORPUS, rng, 2), rng)
        file = self.folder / "c.txt"
        file.write_bytes(as_bytes("\n\n".join(odd_text(rng) for _ in range(rng.randrange(4))), rng))
        return file


class Parquet(Texts):
    """Parquet files with other columns, types and sizes, and with bits flipped."""

    name, tried = "data parquet", 50

    def make(self, rng: Random) -> Given:
        form = rng.choice([*HONEST])
        corpus = _write(self.folder / "honest.jsonl", _CORPUS, rng, 0.0) if form == "generic" else None
        file = self.folder / "q.parquet"
        pq.write_table(_table(HONEST[form], rng), file, compression=rng.choice(("snappy", "zstd", "none")))
        if rng.random() < 0.4:
            file.write_bytes(damaged(file.read_bytes(), rng))
        return Given(form, file, corpus)


def prepare(given: Given, target: Path) -> None:
    """Prepares the questions of a file; raises Defect if what was written cannot be read."""
    split = SplitParams(file=given.file, questions=0)
    files = {"own": FilesParams.model_validate({"format": given.form, "test": split, "corpus": given.corpus})}
    shutil.rmtree(target, ignore_errors=True)
    target.mkdir()
    write(PrepareParams(datasets=["own"], seed=0, atlas=_ATLAS, files=files, worlds={}), target)
    try:
        questions, passages = read_rows(target / QUESTIONS, Question), read_rows(target / PASSAGES, Passage)
    except Exception as fault:
        require(False, f"what was prepared cannot be read: {type(fault).__name__}: {fault}")
    require(bool(questions and passages), "nothing was prepared, and nothing said")
    require(len({each.question_id for each in questions}) == len(questions), "two questions of one id")
    require(len({each.passage_id for each in passages}) == len(passages), "two passages of one id")


def _rows(honest: dict[str, Any], rng: Random) -> list[Any]:
    rows = [{**honest, next(name for name in ("_id", "id") if name in honest): number} for number in range(3)]
    rows[rng.randrange(3)] = mutated(honest, rng, rng.choice((0, 1, 1, 3)))
    return rows


def _write(file: Path, rows: list[Any], rng: Random, share: float = 0.3) -> Path:
    """Writes rows as JSON, of which a share is broken as a text, and as a packed file where its name says so."""
    broken = [as_json(row, rng) if rng.random() < share else json.dumps(row) for row in rows]
    if ".jsonl" in file.name:
        text = "\n".join(broken)
    else:
        text = f"[{','.join(broken)}{rng.choice((']', ']', ']', '', ',]', ']x'))}"
    if share and rng.random() < 0.01:
        text = rng.choice((" ", "[", '{"a":', "\n", '"a", ', "[[],")) * (_MEBIBYTE * rng.choice((1, 1, 48)) // 4)
    content = as_bytes(text, rng) if share else text.encode()
    if file.suffix == ".gz":
        content = gzip.compress(content, 1)
        content = damaged(content, rng) if rng.random() < 0.3 else content
    file.write_bytes(content)
    return file


def _table(honest: dict[str, Any], rng: Random) -> pa.Table:
    """Rows of a data set as Parquet has them, with a column that is another one, or far larger than its file."""
    columns = {name: [value] * 3 for name, value in {**honest, "id": None, "_id": None}.items()}
    columns["id"] = ["a", "b", "c"]
    columns |= {
        name: [json.dumps(pairs)] * 3
        for name, (pairs, *_) in columns.items()
        if name in ("supporting_facts", "context")
    }
    changed = rng.choice(sorted(columns))
    rows = rng.choice((3, 3, 3, 5000, 2_000_000))
    if rows > 3:  # one value, many times
        columns = {
            name: pa.array(values[:1]).take(pa.array([0] * rows, pa.int32())) for name, values in columns.items()
        }
        columns["id"] = pa.array(range(rows)) if rows == 5000 else columns["id"]
    match rng.randrange(6):
        case 0:
            columns.pop(changed)
        case 1:
            columns[changed] = pa.array([b"\xff\xfe" * rng.choice((1, LONG))] * rows if rows == 3 else [b""] * rows)
        case 2 if rows == 3:
            columns[changed] = pa.array([odd_text(rng).encode(errors="replace").decode() for _ in range(3)])
        case 3 if rows == 3:
            columns[changed] = pa.array(["x" * rng.choice((1, 9_000_000))] * 3).dictionary_encode()
        case 4 if rows == 3:
            columns[changed] = pa.array(
                [2**62, None, -1], rng.choice((pa.timestamp("ns"), pa.duration("s"), pa.time64("ns"), pa.int64()))
            )
        case 5 if rows == 3:
            columns[changed] = pa.array([[[None] * rng.choice((1, 3_000_000))]] * 3, pa.list_(pa.list_(pa.null())))
    return pa.table(columns)
