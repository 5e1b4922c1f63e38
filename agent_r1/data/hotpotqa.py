"""HotpotQA in its release format (Yang et al. 2018, distractor setting): JSON lists, plain or gzipped."""

from __future__ import annotations

import gzip
import hashlib
import json
import zlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from agent_r1.params import HotpotParams
from agent_r1.records import Passage, Question

_KINDS = ("bridge", "comparison")


def load(params: HotpotParams) -> tuple[list[Question], list[Passage]]:
    """The questions of both files and every paragraph of their contexts, once each.

    The first half of the dev file becomes split `dev`, the second `test`; the release's own test file has no
    answers. A row may have fewer than ten paragraphs, as some of the release have.

    Raises:
        FileNotFoundError: a file is missing.
        ValueError: a file or a row is malformed; the message names the file, the row (from 1) and the field.
    """
    train, dev = (_read_rows(path, params.max_questions) for path in (params.train, params.dev))
    half = len(dev) // 2
    splits = ["train"] * len(train) + ["dev"] * half + ["test"] * (len(dev) - half)
    rows = [*_placed(params.train, train), *_placed(params.dev, dev)]
    questions = [_question(row, where, split) for (where, row), split in zip(rows, splits, strict=True)]
    _check_unique(questions, [where for where, _ in rows])
    return questions, _passages(row for _, row in rows)


def _read_rows(path: Path, max_questions: int) -> list[Any]:
    if not path.exists():
        raise FileNotFoundError(f"{path} does not exist; set prepare.hotpotqa in params.yaml to the release's files")
    try:
        raw = path.read_bytes()
        rows = json.loads(gzip.decompress(raw) if path.suffix == ".gz" else raw)
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise ValueError(f"{path}: not a whole gzip file ({error}); download it again") from None
    except ValueError as error:  # JSON or UTF-8
        raise ValueError(f"{path}: not a JSON file ({error}); download it again") from None
    if not isinstance(rows, list) or not rows:
        raise ValueError(f"{path}: expected a JSON list of questions, as in the HotpotQA release")
    return rows[:max_questions] if max_questions else rows


def _placed(path: Path, rows: list[Any]) -> list[tuple[str, Any]]:
    return [(f"{path}, row {number}", row) for number, row in enumerate(rows, start=1)]


def _question(row: Any, where: str, split: str) -> Question:
    if not isinstance(row, dict):
        raise ValueError(f"{where}: expected an object with the fields of a question, found {row!r:.80}")
    _check_context(row, where)
    gold_titles = _gold_titles(row, where)
    return Question(
        question_id=_id(row, where),
        dataset="hotpotqa",
        split=split,
        text=_text(row, "question", where),
        answers=[_text(row, "answer", where)],
        gold_titles=gold_titles,
        hops=len(gold_titles),
        kind=_kind(row, where),
    )


def _id(row: dict[str, Any], where: str) -> str:
    """Some collections of HotpotQA number their rows instead of keeping the release's ids."""
    return str(row["_id"]) if type(row.get("_id")) is int else _text(row, "_id", where)


def _text(row: dict[str, Any], field: str, where: str) -> str:
    value = row.get(field)
    if not isinstance(value, str) or not value.strip():
        raise ValueError(f"{where}: field {field!r} must be a text that is not empty, found {value!r:.80}")
    return value


def _kind(row: dict[str, Any], where: str) -> str:
    kind = _text(row, "type", where)
    if kind not in _KINDS:
        raise ValueError(f"{where}: field 'type' must be one of {', '.join(_KINDS)}, found {kind!r:.80}")
    return kind


def _check_context(row: dict[str, Any], where: str) -> None:
    match row.get("context"):
        case [_, *_] as paragraphs if all(_is_paragraph(paragraph) for paragraph in paragraphs):
            return
        case other:
            raise ValueError(f"{where}: field 'context' must hold [title, [sentence, ...]] pairs, found {other!r:.80}")


def _is_paragraph(paragraph: Any) -> bool:
    match paragraph:
        case [str(), [*sentences]]:
            return all(isinstance(sentence, str) for sentence in sentences)
    return False


def _gold_titles(row: dict[str, Any], where: str) -> list[str]:
    match row.get("supporting_facts"):
        case [_, *_] as facts if all(isinstance(fact, list) and fact and isinstance(fact[0], str) for fact in facts):
            titles = list(dict.fromkeys(fact[0] for fact in facts))
        case other:
            raise ValueError(f"{where}: field 'supporting_facts' must hold [title, number] pairs, found {other!r:.80}")
    missing = set(titles) - {title for title, _ in row["context"]}
    if missing:
        raise ValueError(
            f"{where}: field 'supporting_facts' names {sorted(missing)}, which 'context' lacks; "
            "use the distractor files, not the fullwiki ones"
        )
    return titles


def _check_unique(questions: list[Question], places: list[str]) -> None:
    seen: dict[str, str] = {}
    for question, where in zip(questions, places, strict=True):
        if question.question_id in seen:
            raise ValueError(f"{where}: field '_id' repeats {question.question_id!r} of {seen[question.question_id]}")
        seen[question.question_id] = where


def _passages(rows: Iterable[dict[str, Any]]) -> list[Passage]:
    contents = {(title, "".join(sentences).strip()): None for row in rows for title, sentences in row["context"]}
    return [Passage(passage_id=_passage_id(title, text), title=title, text=text) for title, text in contents]


def _passage_id(title: str, text: str) -> str:
    """The same for the same paragraph, whichever files it comes from."""
    return hashlib.blake2b(f"{title}\n{text}".encode(), digest_size=8).hexdigest()
