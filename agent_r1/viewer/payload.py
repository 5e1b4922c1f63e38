"""Trajectories as compact JSON: what the page's script reads, see `model.js`.

Every text and every token is there once, in a table; masks are run lengths; numbers have four significant digits.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby
from typing import Any

import numpy as np
from numpy.typing import NDArray

from agent_r1.records import Step, StopReason
from agent_r1.viewer.pieces import Pieces, action_parts
from agent_r1.viewer.shown import Decode, Shown

DIGITS = 4


class Payload:
    """Collects the trajectories of a page."""

    def __init__(self, decode: Decode) -> None:
        self._pieces = Pieces(decode)
        self._tokens: dict[tuple[int, str], int] = {}  # id and text -> place in the table
        self._questions: dict[str, int] = {}  # id -> place in the list
        self._content: dict[str, list[Any]] = {"questions": [], "episodes": []}

    def add(self, shown: Shown) -> None:
        """Adds a trajectory."""
        question = shown.question
        if question.question_id not in self._questions:
            self._questions[question.question_id] = len(self._questions)
            self._content["questions"].append(
                {
                    "id": question.question_id,
                    "dataset": question.dataset,
                    "text": question.text,
                    "answers": question.answers,
                    "hops": question.hops,
                    "kind": question.kind,
                }
            )
        self._content["episodes"].append(self._episode(shown, self._questions[question.question_id]))

    def content(self, about: Mapping[str, Any]) -> dict[str, Any]:
        """All of it, with what is said about the page as a whole."""
        return {**about, "tokens": [list(token) for token in self._tokens], **self._content}

    def _episode(self, shown: Shown, question: int) -> dict[str, Any]:
        trajectory = shown.trajectory
        ids = trajectory.token_ids.tolist()
        pieces = [text for context in trajectory.contexts for text in self._pieces.of(ids[context])]
        table = [self._tokens.setdefault(token, len(self._tokens)) for token in zip(ids, pieces, strict=True)]
        return {
            "id": trajectory.trajectory_id,
            "question": question,
            "when": shown.when,
            "iteration": trajectory.iteration,
            "version": trajectory.policy_version,
            "outcome": trajectory.outcome,
            "answer": trajectory.answer,
            "right": shown.right,
            "return": _number(float(shown.totals.sum())),
            "contexts": trajectory.context_starts,
            "tokens": table,
            "source": run_lengths(trajectory.source.tolist()),
            "logprobs": _numbers(trajectory.logprobs),
            "steps": _steps(shown, pieces),
            **_credit(shown),
            **_gap(shown),
        }


def _steps(shown: Shown, pieces: Sequence[str]) -> list[dict[str, Any]]:
    stops = [step.action_start for step in shown.trajectory.steps[1:]] + [len(pieces)]
    return [
        _step(shown, place, step, stop, action_parts(_action(pieces, step), ended=step.stop_reason is StopReason.END))
        for place, (step, stop) in enumerate(zip(shown.trajectory.steps, stops, strict=True))
    ]


def _action(pieces: Sequence[str], step: Step) -> Sequence[str]:
    return pieces[step.action_start : step.action_stop]


def _step(shown: Shown, place: int, step: Step, stop: int, parts: Iterable[tuple[str, int]]) -> dict[str, Any]:
    return {
        "start": step.action_start,
        "action_stop": step.action_stop,
        "stop": stop,
        "parts": list(parts),
        "stopped": step.stop_reason,
        "tool": step.tool,
        "status": step.call_status,
        "latency_ms": _number(1e3 * step.latency_s),
        "rewards": {name: _number(part[place]) for name, part in shown.parts.items() if part[place]},
        "reward": _number(shown.totals[place]),
    }


def _credit(shown: Shown) -> dict[str, Any]:
    credit = shown.credit
    if credit is None:
        return {}
    values = {"values": credit.values, "targets": credit.value_targets} if credit.values.any() else {}
    reference = {"reference": credit.reference_logprobs} if credit.reference_logprobs.any() else {}
    numbers = {"advantages": credit.advantages, **values, **reference}
    return {
        "kept": credit.kept,
        "loss": run_lengths(credit.loss_mask.astype(int).tolist()),
        **{name: _numbers(array) for name, array in numbers.items()},
    }


def _gap(shown: Shown) -> dict[str, Any]:
    """The sampler's logprobs less the learner's, at the tokens that were sampled."""
    if shown.learner_logprobs is None:
        return {}
    gap = np.subtract(shown.trajectory.logprobs, shown.learner_logprobs, dtype=np.float64)
    return {"gap": _numbers(np.where(shown.trajectory.action_mask, gap, 0.0))}


def run_lengths(values: Sequence[int]) -> list[int]:
    """A value and how often it comes in a row, then the next: [1, 1, 0] is [1, 2, 0, 1]."""
    return [number for value, run in groupby(values) for number in (value, len(list(run)))]


def _numbers(array: NDArray[np.floating[Any]]) -> list[float | int | None]:
    return [_number(value) for value in array.tolist()]


def _number(value: float) -> float | int | None:
    """Short to write; None where it is not finite, which JSON cannot say."""
    if not math.isfinite(value):
        return None
    short = float(f"{value:.{DIGITS}g}")
    return int(short) if short.is_integer() else short
