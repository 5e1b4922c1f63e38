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
    """Two evaluations of one policy; in a pair `a` is of the current one and `b` of the previous."""

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
    """Compares two evaluations of one policy, by data set; `questions` may have more than those asked.

    Raises:
        ValueError: they are of two policies, or were not measured alike.
    """
    if current.hashes[MEANT_TO_DIFFER] != previous.hashes[MEANT_TO_DIFFER]:
        raise ValueError(f"{current.name} and {previous.name} are of two policies: that is no drift; compare them")
    pairs = compare(current, previous, questions, params).pairs
    differences = {}
    for dataset in dict.fromkeys(pair.question.dataset for pair in pairs):
        now, before = zip(*[(pair.a.em, pair.b.em) for pair in pairs if pair.question.dataset == dataset], strict=True)
        differences[dataset] = paired_difference(now, before, params.bootstrap_samples, params.seed)
    changed = [pair for pair in pairs if pair.a.answer != pair.b.answer]
    return Drift(current=current.name, previous=previous.name, changed=changed, differences=differences)


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
        f"exact match now less before: {', '.join(moved)}"
    ]
    for question, now, before in found.changed[:shown]:
        answers = f"{before.answer or '(none)'!r} -> {now.answer or '(none)'!r}"
        lines.append(f"  {question.question_id}: {answers}, em {before.em:g} -> {now.em:g}")
    further = len(found.changed) - len(lines) + 1
    return "\n".join([*lines, f"  and {further} more"] if further else lines)
