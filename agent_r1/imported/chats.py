"""Rows of a prompt and a completion, in text or in chat messages: verl, TRL, verifiers' results, messages alone.

Sources: `RayPPOTrainer._write_generations` (verl-project/verl), `GRPOTrainer.log` (TRL 1.16), `make_dataset` of
`verifiers.utils.eval_utils` (verifiers 0.1.9).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from agent_r1.data.sources import Row
from agent_r1.imported.episodes import Episode, acted, answers_of, columns_of, messages_of, number, rest_of, step_of

TIMES = ("example_id", "generation_ms", "scoring_ms", "total_ms", "advantage")  # numbers that are no measures


class Fields(NamedTuple):
    """The names of a layout's fields."""

    prompt: str
    completion: str
    score: str = ""  # "" where it is the sum of all columns
    answers: str = "answer"

    def episodes(self, row: Row) -> Iterator[Episode]:
        """The episode of a row."""
        completion = messages_of(row, self.completion, "assistant" * bool(self.prompt))
        known = (self.prompt, self.completion, self.score, "step")
        columns = columns_of(row, (*known, *TIMES, self.answers))
        error = row.fields.get("error")
        yield Episode(
            messages=[
                *(messages_of(row, self.prompt, "user") if self.prompt else ()),
                *acted(row, self.completion, completion),
            ],
            score=number(row, self.score) if self.score or not columns else sum(columns.values()),
            columns=columns,
            step=step_of(row),
            answers=answers_of(row, self.answers),
            fault=error if isinstance(error, str) else "",
            extra=rest_of(row, known),
        )


VERL = Fields("input", "output", "score", "gts")  # without special tokens, and so without turns
TRL = Fields("prompt", "completion")  # without the weights of reward functions: each has 1
RESULTS = Fields("prompt", "completion", "reward")
MESSAGES = Fields("", "messages", "reward")
SCORED = Fields("", "messages", "score")
