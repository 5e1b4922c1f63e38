"""Which trajectories a page shows."""

from collections.abc import Callable

from agent_r1.inspection.stored import PageTrajectory, When, from_iteration, pairs, quotas
from tests.cases import cases


@cases("iterations, count, recurring, shares")
def test_quotas_by_hand(iterations: int, count: int, recurring: int, shares: list[int]) -> None:
    assert quotas(iterations, count, recurring) == shares


def test_recurring_questions_come_first_in_one_order(make_entry: Callable[..., PageTrajectory]) -> None:
    first = [make_entry(name, iteration=0).trajectory for name in "abcdef"]
    last = [make_entry(name, iteration=9).trajectory for name in "fedxyz"]
    of_first, of_last = (
        [entry.question_id for entry in from_iteration(rows, 4, recurring=set("def"), proved={"0/a/0"}, seed=1)]
        for rows in (first, last)
    )
    assert set(of_first[:3]) == set("def")
    assert of_first[:3] == of_last[:3]
    assert of_first[3] == "a", "the learner was asked about it"


def test_pairs_take_kinds_of_change_in_turns(make_entry: Callable[..., PageTrajectory]) -> None:
    """Twelve questions become right, one becomes wrong, one stays wrong; of the last there is no answer before."""
    kinds = {**{f"up{n}": ("no", "Tesk") for n in range(12)}, "down": ("Tesk", "no"), "low": ("no", "no")}
    before = [make_entry(name, When.BEFORE, answer=answers[0]) for name, answers in kinds.items()]
    after = [make_entry(name, When.AFTER, answer=answers[1]) for name, answers in kinds.items()]
    groups = pairs(before, [*after, make_entry("new", When.AFTER)], 5, seed=0)
    names = [[entry.question.question_id for entry in pair] for pair in groups]
    assert all(one == other for one, other in names)
    assert [name for name, _ in names][1:3] == ["down", "low"]
    assert [name[:2] for name, _ in names] == ["up", "do", "lo", "up", "up"]


def test_pairs_keep_samples_of_a_question_together(make_entry: Callable[..., PageTrajectory]) -> None:
    """Two answers before, two after; one that is right more often has changed."""
    texts = {
        "up": ("no", "no", "no", "Tesk"),
        "same": ("no", "Tesk", "Tesk", "no"),
        "down": ("Tesk", "Tesk", "Tesk", "no"),
    }
    entries = [
        [
            make_entry(name, when, answer=answer)
            for name, answers in texts.items()
            for answer in answers[start : start + 2]
        ]
        for when, start in ((When.BEFORE, 0), (When.AFTER, 2))
    ]
    groups = pairs(*entries, 3, seed=0)
    assert [[row.question.question_id for row in group] for group in groups] == [["up"] * 4, ["down"] * 4, ["same"] * 4]
    assert [row.when for row in groups[0]] == [When.BEFORE] * 2 + [When.AFTER] * 2
