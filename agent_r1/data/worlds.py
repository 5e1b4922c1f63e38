"""Questions that are drawn by seeds: a game's board each, or a start of an environment that others wrote."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import NamedTuple

from agent_r1.data.sources import Row, read
from agent_r1.games.kinds import GAMES
from agent_r1.params.outside import OthersParams
from agent_r1.params.prepare import WorldParams
from agent_r1.records import Json, Question

logger = logging.getLogger(__name__)

_DRAWN_FIRST = ("test", "dev", "train")  # the test split comes in whole, and is not trained on
_LENGTHS = ((3, "1-3"), (6, "4-6"))  # of the best solution, and their names; beyond them:
_LONGER = "7 or more"
ASKED = ("question", "prompt")  # fields of a row
ANSWERED = ("answers", "answer")  # likewise


class Drawn(NamedTuple):
    """A start that a seed draws."""

    setup: str
    text: str  # as a person would call it
    strata: dict[str, str]
    answers: Sequence[str] = ()


def draw(name: str, params: WorldParams) -> dict[str, list[Question]]:
    """The questions of every split, in the order of their seeds.

    No setup is in two splits: one that comes up again is left out of the split that is trained on, not of the one that
    is tested on, and the log says how many are. Raises ValueError for rules by which no board can be drawn, and
    if a split is left with none.
    """
    setups: set[str] = set()
    questions: dict[str, list[Question]] = {}
    for split in _DRAWN_FIRST:
        first, stop = params.given.get(split, (0, 0))
        starts = list(zip(range(first, stop), _draws(params, split, first, stop), strict=True))
        new_starts = [(seed, start) for seed, start in starts if start.setup not in setups]
        setups |= {start.setup for _, start in new_starts}
        if len(new_starts) < len(starts):
            logger.info("%s: %d of the %s rows are in another split too", name, len(starts) - len(new_starts), split)
        if starts and not new_starts:
            raise ValueError(
                f"prepare.worlds.{name}.{split}: every row that its seeds draw is in another split too; make boards "
                "larger, or give it other seeds"
            )
        questions[split] = [
            Question(
                question_id=f"{name}-{split}-{seed}",
                dataset=name,
                split=split,
                text=start.text,
                env=params.name if isinstance(params, OthersParams) and params.env == "agent" else params.env,
                setup=start.setup,
                strata=start.strata,
                answers=[*start.answers],
            )
            for seed, start in new_starts
        ]
    return questions


def _draws(params: WorldParams, split: str, first: int, stop: int) -> Iterator[Drawn]:
    if isinstance(params, OthersParams):
        yield from _starts(params, split, first, stop)
        return
    for board, text, solution in GAMES[params.env].starts(params, split, range(first, stop)):
        yield Drawn(board.write(), text, {} if solution is None else _by_length(solution))


def _starts(params: OthersParams, split: str, first: int, stop: int) -> Iterator[Drawn]:
    rows = [*islice(read(params.file), first, stop)] if params.file else [Row({}, Path(), 0)] * (stop - first)
    if len(rows) < stop - first:
        raise ValueError(f"{params.file} ends before row {stop}, and {split} is {[first, stop]}; lower it")
    key, template = {"openenv": ("reset", params.reset), "toolbox": ("row", params.row)}.get(params.env, ("", None))
    if template is None:
        template = {} if params.file else {"seed": "{seed}"}
    for seed, row in zip(range(first, stop), rows, strict=True):
        fields = row.fields | _fill(template, seed=seed, index=seed - first, split=split)
        text, answers = _task_and_answers(row)
        if params.env == "agent":  # which is told its setup, and no answer
            setup = {field: value for field, value in fields.items() if field not in ANSWERED}
        else:
            setup = {"name": params.name, **({key: fields} if key else fields)}
        yield Drawn(json.dumps(setup, default=str), text or f"{params.name}, seed {seed}", {}, answers)


def _fill(template: Json, **values: int | str) -> Json:
    """Arguments with the row's own in place of their names in braces, which YAML reads as mappings without quotes."""
    text = json.dumps(template, default=str)
    for name, value in values.items():
        for placeholder in (f'"{{{name}}}"', f'{{"{name}": null}}'):
            text = text.replace(placeholder, json.dumps(value))
        text = text.replace(f"{{{name}}}", str(value))
    return dict(json.loads(text))


def _task_and_answers(row: Row) -> tuple[str, list[str]]:
    """The task in a row's `question` or `prompt`, a text or one message of the user, "" without; and its answers."""
    field = row.first(*ASKED)
    match row.fields.get(field):
        case [{"role": "user", "content": str(text)}] | str(text):
            pass
        case None:
            text = ""
        case _:
            raise row.fault(field, "must be a text or one message of the user; put others into env.instructions")
    value = row.fields.get(row.first(*ANSWERED))
    answers = value if isinstance(value, list) else [value]
    return text, [str(answer) for answer in answers if isinstance(answer, str | int | float)]


def _by_length(moves: int) -> dict[str, str]:
    """By how many moves the best solution takes."""
    return {"solution": next((words for most, words in _LENGTHS if moves <= most), _LONGER)}
