"""Whether a challenger takes the champion's place: the paired bootstrap of exact match on the same questions."""

from __future__ import annotations

from dataclasses import dataclass

from agent_r1.evaluation import markdown
from agent_r1.evaluation.evaluations import Evaluation, differences_of_setting
from agent_r1.evaluation.statistics import Interval, paired_difference


@dataclass(frozen=True, kw_only=True, slots=True)
class Decision:
    """What was decided about a challenger, and by which numbers."""

    challenger: str  # the evaluations' names
    champion: str
    promoted: bool
    reason: str
    margin: float  # the lower bound of the difference must be above it
    level: float  # of the interval, both tails together
    questions: int  # answered by both, 0 where the two cannot be compared
    challenger_em: float  # mean over these questions; 0 where the two cannot be compared, like what follows
    champion_em: float
    only_challenger_right: int
    only_champion_right: int
    difference: Interval | None  # challenger less champion, paired by question; None where they cannot be compared


def decide(
    challenger: Evaluation, champion: Evaluation, *, margin: float, level: float, samples: int, seed: int
) -> Decision:
    """Promotes a challenger whose lower bound of the difference is above the margin, and refuses any other.

    Two that were not measured alike, on other questions or with other hashes of data, index or prompt, under another
    protocol or other limits, cannot be compared: the challenger is refused.

    Args:
        level: of the two-sided interval; with 0.95 a challenger that is no better is promoted in 1 of 40 cases at most.
        samples: of the bootstrap, and `seed` its seed.
    """
    assert challenger.name != champion.name, "a version is not its own challenger"
    differing = list(differences_of_setting([challenger, champion]))
    pairs = [] if differing else _paired(challenger, champion)
    ours, theirs = [a for a, _ in pairs], [b for _, b in pairs]
    difference = paired_difference(ours, theirs, samples, seed, level) if pairs else None
    promoted = difference is not None and difference.low > margin
    return Decision(
        challenger=challenger.name,
        champion=champion.name,
        promoted=promoted,
        reason=_reason(difference, margin, differing),
        margin=margin,
        level=level,
        questions=len(pairs),
        challenger_em=_mean(ours),
        champion_em=_mean(theirs),
        only_challenger_right=sum(a > b for a, b in pairs),
        only_champion_right=sum(a < b for a, b in pairs),
        difference=difference,
    )


def table(decision: Decision) -> str:
    """The decision in Markdown: a sentence, and the numbers behind it."""
    verdict = "is promoted" if decision.promoted else "is refused"
    sentence = f"{decision.challenger} {verdict} against {decision.champion}: {decision.reason}."
    if decision.difference is None:
        return f"{sentence}\n"
    found = decision.difference
    rows = [
        ["questions", str(decision.questions)],
        [f"exact match of {decision.challenger}", f"{decision.challenger_em:.3f}"],
        [f"exact match of {decision.champion}", f"{decision.champion_em:.3f}"],
        [f"right in {decision.challenger} alone", str(decision.only_challenger_right)],
        [f"right in {decision.champion} alone", str(decision.only_champion_right)],
        ["difference", f"{found.mean:+.3f}"],
        [f"its {decision.level:.0%} interval", f"{found.low:+.3f} to {found.high:+.3f}"],
        ["margin", f"{decision.margin:+.3f}"],
    ]
    return f"{sentence}\n\n{markdown.table(['', ''], rows)}\n"


def _paired(challenger: Evaluation, champion: Evaluation) -> list[tuple[float, float]]:
    """[N] exact match of both, by question."""
    theirs = {prediction.question_id: prediction.em for prediction in champion.predictions}
    return [(prediction.em, theirs[prediction.question_id]) for prediction in challenger.predictions]


def _reason(difference: Interval | None, margin: float, differing: list[str]) -> str:
    if difference is None:
        what = ", ".join(differing)
        return f"they were not measured alike, they differ in {what}; evaluate both under one configuration"
    compared = "is above" if difference.low > margin else "is not above"
    return f"the lower bound {difference.low:+.3f} of the difference {compared} the margin {margin:+.3f}"


def _mean(values: list[float]) -> float:
    return sum(values) / len(values) if values else 0.0
