"""Whether a challenger takes the champion's place: two tests of exact match on the same questions.

The paired bootstrap bounds the gain. It is an approximation, too bold where the two differ on few questions; so the
exact sign test has to agree. An equal challenger is right as often as the champion on the questions that only one of
them answers right, a coin for each: four of four such questions fall to it in 1 of 16 cases.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass

from scipy.stats import binomtest

from agent_r1.evaluation.comparison import Evaluation, differences_of_setting, markdown_table, paired
from agent_r1.evaluation.statistics import Interval, paired_difference
from agent_r1.params import EvaluateParams, PromoteParams


@dataclass(frozen=True, kw_only=True, slots=True)
class Decision:
    """The verdict on a challenger, and the numbers behind it."""

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
    luck: float  # chance that an equal one has as many of the questions that one alone answers right: the sign test's
    most_luck: float  # what it may be at most: one tail of the interval


def decide(challenger: Evaluation, champion: Evaluation, gate: PromoteParams, draws: EvaluateParams) -> Decision:
    """Promotes a challenger whose gain is beyond the margin and beyond luck, and refuses any other.

    Its lower bound of the difference is above the margin, and the one-sided sign test is significant at the same level.
    Two that were not measured alike, on other questions or with other hashes of data, index or prompt, under another
    protocol or other limits, cannot be compared: the challenger is refused.

    With a level of 0.95 an equal challenger is promoted in 1 of 40 cases at most. How rarely one is that is better by
    less than the margin, the bootstrap only approximates.
    """
    assert challenger.name != champion.name, "a version is not its own challenger"
    differing = list(differences_of_setting([challenger, champion]))
    ours, theirs = ([], []) if differing else paired(challenger, champion)
    sampling = draws.bootstrap_samples, draws.seed, gate.level
    difference = paired_difference(ours, theirs, *sampling) if ours else None
    gained, lost = sum(map(operator.gt, ours, theirs)), sum(map(operator.lt, ours, theirs))
    luck = float(binomtest(gained, gained + lost, alternative="greater").pvalue) if gained + lost else 1.0
    most_luck = (1 - gate.level) / 2
    promoted, reason = _verdict(difference, gate.margin, luck, most_luck, differing)
    return Decision(
        challenger=challenger.name,
        champion=champion.name,
        promoted=promoted,
        reason=reason,
        margin=gate.margin,
        level=gate.level,
        questions=len(ours),
        challenger_em=sum(ours, 0.0) / max(1, len(ours)),
        champion_em=sum(theirs, 0.0) / max(1, len(theirs)),
        only_challenger_right=gained,
        only_champion_right=lost,
        difference=difference,
        luck=luck,
        most_luck=most_luck,
    )


def _verdict(
    difference: Interval | None, margin: float, luck: float, most_luck: float, differing: list[str]
) -> tuple[bool, str]:
    if difference is None:
        named = ", ".join(differing)
        return False, f"they were not measured alike, they differ in {named}; evaluate both under one configuration"
    bound = f"the lower bound {difference.low:+.3f} of the difference"
    if difference.low <= margin:
        return False, f"{bound} is not above the margin {margin:+.3f}"
    above = f"{bound} is above the margin {margin:+.3f}"
    if luck > most_luck:
        return False, f"{above}, but an equal one gains as much with a chance of {luck:.4f}, above {most_luck:.4f}"
    return True, above


def decision_table(decision: Decision) -> str:
    """The decision in Markdown: a sentence, and the numbers behind it."""
    verdict = "is promoted" if decision.promoted else "is refused"
    sentence = f"{decision.challenger} {verdict} against {decision.champion}: {decision.reason}."
    found = decision.difference
    if found is None:
        return f"{sentence}\n"
    rows = [
        ["questions", str(decision.questions)],
        [f"exact match of {decision.challenger}", f"{decision.challenger_em:.3f}"],
        [f"exact match of {decision.champion}", f"{decision.champion_em:.3f}"],
        [f"right in {decision.challenger} alone", str(decision.only_challenger_right)],
        [f"right in {decision.champion} alone", str(decision.only_champion_right)],
        ["difference", f"{found.mean:+.3f}"],
        [f"its {decision.level:.0%} interval", f"{found.low:+.3f} to {found.high:+.3f}"],
        ["margin", f"{decision.margin:+.3f}"],
        ["chance of an equal one (sign test)", f"{decision.luck:.4f}, at most {decision.most_luck:.4f} passes"],
    ]
    return f"{sentence}\n\n{markdown_table(['', ''], rows)}\n"
