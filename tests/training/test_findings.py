"""Why little or nothing is learned from some episodes: sentences by hand."""

import math
from dataclasses import replace
from typing import Any

import pytest

from agent_r1.params import SHIPPED, load
from agent_r1.records import Call, CallStatus, Outcome, Question, Source, Trajectory
from agent_r1.training.findings import REWARDS, TEACH, findings, strays
from tests.cases import cases
from tests.trajectories import from_parts, question_fields

EASY = "; if it pays as much for a lost game, let success ask for more: success_above, success"
PROSE, BROKEN = "I do not know\x1b[2J", "<tool_call>{</tool_call>"


class Letters:
    """A chat in which a token is a letter."""

    def decode(self, token_ids: list[int]) -> str:
        return "".join(map(chr, token_ids))


def episode(group: int, *actions: str, answer: str = "", right: float = 0.0, **fields: Any) -> Trajectory:
    malformed: dict[str, Any] = {"calls": [Call(status=CallStatus.MALFORMED)]}
    texts = [*actions, *[f"<answer>{answer}</answer>"] * bool(answer)]
    parts = [(Source.ACTION, [ord(letter) for letter in text]) for text in texts]
    steps: list[dict[str, Any]] = [*[malformed] * len(actions), *[{"rewards": {"em": right}}] * bool(answer)]
    fields = {"outcome": Outcome.ANSWERED if answer else Outcome.MALFORMED} | fields
    return from_parts(parts, steps, question_id=f"q{group}", group=group, answer=answer, **fields)


def reasons(
    *episodes: Trajectory, returns: Any = (), golds: Any = (), lost: float = math.inf, tools: bool = False
) -> list[str]:
    """Of episodes with returns of 0, or these, to questions whose answer is Tesk, or these."""
    named = [replace(each, trajectory_id=str(place)) for place, each in enumerate(episodes)]
    paid = {each.trajectory_id: 0.0 for each in named} | {str(place): paid for place, paid in enumerate(returns)}
    answers = dict(enumerate(golds))
    questions = [
        Question(**question_fields(f"q{group}", answers=[answers.get(group, "Tesk")]))
        for group in {each.group for each in episodes}
    ]
    chat: Any = Letters()
    return list(findings(named, paid, questions, chat, lost, tools=tools))


def test_a_policy_that_neither_calls_nor_answers_is_quoted_harmlessly_with_what_helps() -> None:
    """Three of four actions are prose; the returns differ in one of two groups."""
    rows = [episode(0, PROSE), episode(0, PROSE), episode(1, "x" * 200 + " y"), episode(1, BROKEN)]
    share = "3 of 4 actions are neither a call nor an answer, the first 'I do not know\\x1b[2J'"
    helps = f"what helps, in this order: {TEACH}"
    assert reasons(*rows, returns=[0, 0, 0, 1]) == [f"{share}, and in 1 of 2 groups all returns are equal; {helps}"]
    assert reasons(rows[0])[0].split(", ")[2].startswith("and all returns are equal;"), "single samples"
    assert "neither" not in reasons(rows[3], rows[3], rows[0])[0], "one in three"


def test_episodes_that_all_end_in_faults_or_at_limits_are_told_where_answers_are_wanted() -> None:
    ends = [Outcome.TURN_LIMIT, Outcome.TURN_LIMIT, Outcome.MALFORMED]
    rows = [episode(group, BROKEN, outcome=end) for group, end in enumerate(ends)]
    [reason] = reasons(*rows, returns=[0, 1])
    assert reason.startswith("no episode comes to an answer (turn_limit 2, malformed 1), and not all returns are equal")
    assert "what helps: env.max_action_tokens, env.max_tokens, env.max_steps" in reason
    assert load(SHIPPED).env.max_steps > 1, "a single turn is not the default"
    assert reasons(*rows, episode(3, answer="Veld"), returns=[0, 1]) == []


def test_groups_without_variance_are_told_from_a_share_on_and_not_where_most_succeed() -> None:
    """Three of four groups of two have equal returns."""
    rows = [episode(group, answer="Veld") for group in (0, 0, 1, 1, 2, 2, 3, 3)]
    [reason] = reasons(*rows, returns=[1], lost=0.75)
    assert reason.startswith("in 3 of 4 groups all returns are equal, and tell no action from another; what helps: ")
    assert "train.credit.filter.refill" in reason
    assert reasons(*rows, returns=[1], lost=1.0) == []
    assert reasons(*[episode(0, answer="Tesk", right=1.0)] * 3, lost=0.75) == []
    assert reasons(*rows) == [], "greedy answers say little of it"


@pytest.mark.parametrize(("paid", "count", "says"), [(0.0005, 8, True), (1.0, 8, False), (0.0005, 7, False)])
def test_success_that_a_lost_game_reaches_is_told(paid: float, count: int, says: bool) -> None:
    """As 2048 of textarena pays 1/2048 for a game that its first move loses."""
    rewards = {"env": paid, "success": 1.0}
    steps = [{"rewards": {"env": 1.0, "success": 1.0}}] * (count - 1) + [{"rewards": rewards}]
    rows = [
        from_parts([(Source.ACTION, [97])], [step], question_id=f"q{at}", group=at, outcome=Outcome.ENDED)
        for at, step in enumerate(steps)
    ]
    said = [reason for reason in reasons(*rows) if "success_above" in reason]
    assert said == [f"all 8 episodes are successes, and the world paid 0.0005 for one of them{EASY}"] * says
    failed = replace(rows[0], steps=[replace(rows[0].steps[0], rewards={"env": 0.0, "success": 0.0})])
    assert not any("success_above" in reason for reason in reasons(*rows, failed))


def test_a_policy_that_calls_no_tool_is_told_where_it_has_tools_and_mostly_fails() -> None:
    rows = [episode(0, answer="Veld"), episode(1, answer="Veld"), episode(2, BROKEN, answer="Tesk", right=1.0)]
    [reason] = reasons(*rows, returns=[1], tools=True)
    assert reason.startswith("no episode calls a tool, so that no call is learned, and not all returns are equal; what")
    assert TEACH in reason
    assert reasons(*rows) == [], "there is no tool"
    assert reasons(*rows[:1], *rows[2:], tools=True) == [], "half of them succeed"
    called = replace(rows[0].steps[0], calls=[Call(tool="search", arguments="{}", status=CallStatus.FAILED)])
    assert reasons(replace(rows[0], steps=[called]), rows[1], tools=True) == []


@cases("returns, rates, said")
def test_a_return_that_rises_alone_is_told_with_both(returns: list[float], rates: list[float], said: bool) -> None:
    rows = [{"reward/total": paid, "rollout/success": rate} for paid, rate in zip(returns, rates, strict=True)]
    rose = "the return rose from -0.500 to 0.100 in 10 iterations, and exact match did not, from "
    found = list(strays(rows, "exact match"))
    assert [each.startswith(rose) and each.endswith(f"; what helps: {REWARDS}") for each in found] == [True] * said


@cases("said, golds, reason")
def test_one_word_for_nearly_all_answers_is_named(said: str, golds: str, reason: str | None) -> None:
    """`said` counts the answers; `golds` are those of the questions, over and over."""
    words = said.split()
    answers = [word for count, word in zip(words[::2], words[1::2], strict=True) for _ in range(int(count))]
    rows = [episode(group, answer=answer) for group, answer in enumerate(answers)]
    other = [episode(20, answer="Tesk", right=1.0)] * 2  # to another question, and rarely yes or no
    told = reasons(*other[: 2 * (answers[0] == "no")], *rows, returns=[1], golds=golds.split() * 5)
    assert [each.partition(";")[0] for each in told] == ([reason] if reason else [])


def test_what_the_world_cut_short_and_worlds_without_answers_are_not_held_against_a_policy() -> None:
    assert reasons(episode(0, PROSE, outcome=Outcome.ABORTED)) == []
    rows = [episode(0, BROKEN, outcome=Outcome.TURN_LIMIT)] * 2
    chat: Any = Letters()
    world = Question(**question_fields("q0", env="gym", answers=[]))
    named = [replace(each, trajectory_id=str(place)) for place, each in enumerate(rows)]
    assert list(findings(named, {"0": 0.0, "1": 1.0}, [world], chat)) == []
