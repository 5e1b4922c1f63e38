"""Whether an agent still answers as it did.

The same weights asked the same questions greedily give the same answers. Where one changed, something else did: the
engine, a library, the machine.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from agent_r1.evaluation.comparison import MEANT_TO_DIFFER, Evaluation, Pair, compare, differences_of_setting
from agent_r1.evaluation.statistics import Interval, paired_difference
from agent_r1.params import EvaluateParams
from agent_r1.records import Question


@dataclass(frozen=True, kw_only=True, slots=True)
class Drift:
    """Two evaluations of one policy; in a pair `a` is the current one and `b` the previous."""

    current: str  # the evaluations' names
    previous: str
    changed: list[Pair]  # the questions with another answer, in the current one's order
    differences: dict[str, Interval]  # data set -> exact match now less before, paired by question

    @property
    def beyond(self) -> list[str]:
        """The data sets on which exact match has changed by more than chance."""
        return [dataset for dataset, difference in self.differences.items() if difference.excludes_zero]


def same_setting(a: Evaluation, b: Evaluation) -> bool:
    """Whether two evaluations are of one policy and were measured alike."""
    return a.hashes[MEANT_TO_DIFFER] == b.hashes[MEANT_TO_DIFFER] and not differences_of_setting([a, b])


def drift(current: Evaluation, previous: Evaluation, questions: Sequence[Question], params: EvaluateParams) -> Drift:
    """Compares two evaluations of one policy, by data set; `questions` has those asked and may have more.

    Raises:
        ValueError: they are of two policies, or were not measured alike.
    """
    if current.hashes[MEANT_TO_DIFFER] != previous.hashes[MEANT_TO_DIFFER]:
        raise ValueError(f"{current.name} and {previous.name} are of two policies: that is no drift; compare them")
    pairs = compare(current, previous, questions, params).pairs
    by_dataset: dict[str, list[Pair]] = {}
    for pair in pairs:
        by_dataset.setdefault(pair.question.dataset, []).append(pair)
    return Drift(
        current=current.name,
        previous=previous.name,
        changed=[pair for pair in pairs if pair.a.answer != pair.b.answer],
        differences={dataset: _difference(own, params) for dataset, own in by_dataset.items()},
    )


def _difference(pairs: Sequence[Pair], params: EvaluateParams) -> Interval:
    now, before = [pair.a.em for pair in pairs], [pair.b.em for pair in pairs]
    return paired_difference(now, before, params.bootstrap_samples, params.seed)


def explain(found: Drift, shown: int | None = None) -> str:
    """A sentence on how far answers drifted, and a line for each changed question or for the first `shown`."""
    if not found.changed:
        return f"{found.current} answers every question as {found.previous} did"
    moved = [
        f"{dataset} {each.mean:+.3f} ({each.low:+.3f} to {each.high:+.3f})"
        for dataset, each in found.differences.items()
    ]
    weight = f"beyond chance on {', '.join(found.beyond)}" if found.beyond else "within chance"
    count = f"{len(found.changed)} question{'s' if len(found.changed) > 1 else ''}"
    lines = [
        f"{found.current} answers {count} differently from {found.previous}, {weight}; "
        f"exact match now less before: {', '.join(moved)}",
        *map(_line, found.changed[:shown]),
    ]
    further = len(found.changed) - len(lines) + 1
    return "\n".join([*lines, f"  and {further} more"] if further else lines)


def _line(pair: Pair) -> str:
    grades = f"{pair.b.em:g} -> {pair.a.em:g}"
    return f"  {pair.question.question_id}: {pair.b.answer or '(none)'!r} -> {pair.a.answer or '(none)'!r}, em {grades}"
