"""Verdicts on a policy: whether its answers drifted, and whether a challenger replaces the champion.

Drift: equal weights give equal greedy answers to equal questions. A changed answer means that something else changed:
the engine, a library, the machine.

Promotion: two tests of success on the same questions. The paired bootstrap bounds the gain, but is too bold if the two
differ on few questions. So the exact sign test must agree: for an equal challenger, each question that only one of the
two answers right is a coin toss, and it wins four of four such questions in 1 of 16 cases.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass

from agent_r1.evaluation import comparison
from agent_r1.evaluation.comparison import AnswerPair, Evaluation
from agent_r1.evaluation.statistics import Interval, paired_difference
from agent_r1.harmless import harmless, in_markdown
from agent_r1.params.stages import EvaluateParams, PromoteParams
from agent_r1.records import Question, words_of


@dataclass(frozen=True, kw_only=True, slots=True)
class Drift:
    """Two evaluations of one policy. In every pair, `a` is current and `b` previous."""

    current: str  # the evaluations' names
    previous: str
    changed: list[AnswerPair]  # questions with another answer, in the current order
    differences: dict[str, Interval]  # data set -> success now minus before, paired by question
    word: str  # for success

    @property
    def beyond(self) -> list[str]:
        """The data sets on which success changed beyond chance."""
        return [dataset for dataset, difference in self.differences.items() if difference.excludes_zero]


def drift(current: Evaluation, previous: Evaluation, questions: Sequence[Question], params: EvaluateParams) -> Drift:
    """Compares two evaluations of one policy, by data set. The questions asked must be among `questions`.

    Raises ValueError if they are of two policies, were not measured alike, or the world cut episodes short.
    """
    if current.hashes[comparison.POLICY] != previous.hashes[comparison.POLICY]:
        raise ValueError(f"{current.name} and {previous.name} are of two policies: that is no drift; compare them")
    pairs = comparison.compare(current, previous, questions, params).pairs
    differences = {}
    for dataset in dict.fromkeys(pair.question.dataset for pair in pairs):
        members = [pair for pair in pairs if pair.question.dataset == dataset]
        current_success = [pair.a.success for pair in members]
        previous_success = [pair.b.success for pair in members]
        differences[dataset] = paired_difference(
            current_success, previous_success, params.bootstrap_samples, params.seed
        )
    changed = [pair for pair in pairs if (pair.a.answers, pair.a.success) != (pair.b.answers, pair.b.success)]
    word = words_of([pair.question for pair in pairs]).right
    return Drift(current=current.name, previous=previous.name, changed=changed, differences=differences, word=word)


def explain(change: Drift, shown: int | None = None) -> str:
    """A sentence on the drift, and a line per changed question, at most `shown` of them."""
    if not change.changed:
        return f"{change.current} answers every question as {change.previous} did"
    differences = [
        f"{dataset} {interval.mean:+.3f} ({interval.low:+.3f} to {interval.high:+.3f})"
        for dataset, interval in change.differences.items()
    ]
    lines = [
        f"{change.current} answers {len(change.changed)} question{'s' * (len(change.changed) > 1)} differently from "
        f"{change.previous}, "
        + (f"beyond chance on {', '.join(change.beyond)}" if change.beyond else "within chance")
        + f"; {change.word} now less before: {', '.join(differences)}"
    ]
    for question, now, past in change.changed[:shown]:
        answers = " -> ".join(", ".join(repr(answer or "(none)") for answer in row.answers) for row in (past, now))
        lines.append(f"  {harmless(question.question_id)}: {answers}, success {past.success:g} -> {now.success:g}")
    rest = len(change.changed) - len(lines) + 1
    return "\n".join([*lines, f"  and {rest} more"] if rest else lines)


@dataclass(frozen=True, kw_only=True, slots=True)
class Decision:
    """The verdict on a challenger, and the numbers behind it."""

    challenger: str  # the evaluations' names
    champion: str
    promoted: bool
    reason: str
    margin: float  # the lower bound of the difference must be above it
    level: float  # of the interval, both tails together
    questions: int  # answered by both; 0 if the two cannot be compared
    challenger_success: float  # mean over these questions; 0 if the two cannot be compared, like all below
    champion_success: float
    greedily: list[float]  # success of both in greedy answers beside samples, over all questions; empty without
    only_challenger_right: int
    only_champion_right: int
    difference: Interval | None  # challenger minus champion, paired by question; None if they cannot be compared
    luck: float  # p-value of the sign test: the chance that an equal challenger gains as much
    most_luck: float  # the largest luck that passes: one tail of the interval


def decide(
    challenger: Evaluation,
    champion: Evaluation,
    gate: PromoteParams,
    draws: EvaluateParams,
    *,
    anyway: bool = False,
) -> Decision:
    """Promotes a challenger whose gain is beyond the margin and beyond luck, and refuses any other.

    The lower bound of the difference must be above the margin, and the one-sided sign test significant at the same
    level. Refuses a challenger that was not measured like the champion: with other questions, hashes, protocol or
    limits. Refuses too if the world cut episodes short; with `anyway` it compares the questions that both answered.

    At level 0.95 an equal challenger is promoted in at most 1 of 40 cases. The bootstrap only approximates how rarely
    one passes that is better by less than the margin.
    """
    from scipy.stats import binomtest  # its import takes longer than a decision

    if challenger.name == champion.name:
        raise ValueError(f"{champion.name} is no challenger of its own; name another version")
    obstacle = _obstacle(challenger, champion, anyway=anyway)
    pair = ([], []) if obstacle else comparison.paired(challenger, champion)
    difference = paired_difference(*pair, draws.bootstrap_samples, draws.seed, gate.level) if pair[0] else None
    greedily = [side.greedily for side in (challenger, champion) if side.greedily is not None]
    gained = sum(map(operator.gt, *pair))
    lost = sum(map(operator.lt, *pair))
    # the chance that a fair coin shows heads so often
    luck = float(binomtest(gained, gained + lost, alternative="greater").pvalue) if gained + lost else 1.0
    most_luck = (1 - gate.level) / 2
    promoted, reason = _verdict(difference, gate.margin, luck, most_luck, obstacle)
    return Decision(
        challenger=challenger.name,
        champion=champion.name,
        promoted=promoted,
        reason=reason,
        margin=gate.margin,
        level=gate.level,
        questions=len(pair[0]),
        challenger_success=sum(pair[0], 0.0) / max(1, len(pair[0])),
        champion_success=sum(pair[1], 0.0) / max(1, len(pair[0])),
        greedily=greedily if len(greedily) == 2 else [],
        only_challenger_right=gained,
        only_champion_right=lost,
        difference=difference,
        luck=luck,
        most_luck=most_luck,
    )


def _obstacle(challenger: Evaluation, champion: Evaluation, *, anyway: bool) -> str:
    """The reason why the two cannot be compared; "" if they can."""
    differing = ", ".join(comparison.differences_of_setting([challenger, champion]))
    if differing:
        return f"they were not measured alike, they differ in {differing}; evaluate both under one configuration"
    aborted = "" if anyway else comparison.cut_short([challenger, champion])
    return f"the world cut episodes short, {aborted}; evaluate again, or decide --anyway" if aborted else ""


def _verdict(
    difference: Interval | None, margin: float, luck: float, most_luck: float, obstacle: str
) -> tuple[bool, str]:
    if difference is None:
        return False, obstacle
    bound = f"the lower bound {difference.low:+.3f} of the difference"
    if difference.low <= margin:
        return False, f"{bound} is not above the margin {margin:+.3f}"
    above = f"{bound} is above the margin {margin:+.3f}"
    if luck > most_luck:
        return False, f"{above}, but an equal one gains as much with a chance of {luck:.4f}, above {most_luck:.4f}"
    return True, above


def verdict(decision: Decision) -> str:
    """The decision in one line, such as `refused: -0.035 [-0.065, -0.003], the lower bound -0.065 ...`."""
    difference = decision.difference
    by = f"{difference.mean:+.3f} [{difference.low:+.3f}, {difference.high:+.3f}], " if difference else ""
    by += "greedily {:.3f} against {:.3f}, ".format(*decision.greedily) if decision.greedily else ""
    return f"{'promoted' if decision.promoted else 'refused'}: {by}{decision.reason}"


def decision_table(decision: Decision) -> str:
    """The decision in Markdown: a sentence and a table of its numbers."""
    verdict = "is promoted" if decision.promoted else "is refused"
    sentence = f"{decision.challenger} {verdict} against {decision.champion}: {in_markdown(decision.reason)}."
    difference = decision.difference
    if difference is None:
        return f"{sentence}\n"
    greedily = zip((decision.challenger, decision.champion), decision.greedily, strict=False)
    rows = [
        ["questions", str(decision.questions)],
        [f"success of {decision.challenger}", f"{decision.challenger_success:.3f}"],
        [f"success of {decision.champion}", f"{decision.champion_success:.3f}"],
        *([f"success of {name}, greedily", f"{success:.3f}"] for name, success in greedily),
        [f"right in {decision.challenger} alone", str(decision.only_challenger_right)],
        [f"right in {decision.champion} alone", str(decision.only_champion_right)],
        ["difference", f"{difference.mean:+.3f}"],
        [f"its {decision.level:.0%} interval", f"{difference.low:+.3f} to {difference.high:+.3f}"],
        ["margin", f"{decision.margin:+.3f}"],
        ["chance of an equal one (sign test)", f"{decision.luck:.4f}, at most {decision.most_luck:.4f} passes"],
    ]
    return f"{sentence}\n\n{comparison.markdown_table(['', ''], rows)}\n"
