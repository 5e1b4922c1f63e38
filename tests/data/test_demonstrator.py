"""The demonstrator: worked examples of each habit, their frequency, and that it copies only what it can see."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable, Sequence

import pytest

from agent_r1.answers import contains
from agent_r1.data import world
from agent_r1.data.demonstrations import demonstrate
from agent_r1.data.questions import Hop, Plan, look_up, plan_from_titles
from agent_r1.data.world import World
from agent_r1.records import Passage, Question
from agent_r1.search.base import Search

FACTS = {
    "The Silent Harbor": {"director": "Mara Quill", "release year": "1957"},
    "Mara Quill": {"birth city": "Tesk", "employer": "Orlen Group"},
    "Jon Hale": {"birth city": "Arvik", "employer": "Orlen Group"},
}


def question(kind: str, text: str = "?") -> Question:
    return Question(
        question_id="q", dataset="atlas", split="train", text=text, answers=["x"], gold_titles=[], hops=2, kind=kind
    )


BRIDGE = Plan(
    (look_up(FACTS, "The Silent Harbor", "director"), look_up(FACTS, "Mara Quill", "birth city")), answer="Tesk"
)
SAME = Plan((look_up(FACTS, "Mara Quill", "employer"), look_up(FACTS, "Jon Hale", "employer")), answer="yes")


def act(plan: Plan, kind: str, *, stop: float = 0.0, wrong: float = 0.0, seed: int = 0) -> list[str]:
    return demonstrate(
        plan, question(kind), facts=FACTS, stop_early=stop, wrong_relation=wrong, rng=random.Random(seed)
    )


def queries(actions: list[str]) -> list[str]:
    calls = [re.search(r"<tool_call>\n(.*)\n</tool_call>$", action) for action in actions[:-1]]
    return [json.loads(call[1])["arguments"]["query"] for call in calls if call]


def answer(actions: list[str]) -> str:
    match = re.search(r"<answer> (.*) </answer>$", actions[-1])
    assert match
    return match[1]


def test_without_habits_it_follows_the_plan_to_the_letter() -> None:
    assert act(BRIDGE, "bridge") == [
        "<think>I need the director, then the birth city.</think>\n<tool_call>\n"
        '{"name": "search", "arguments": {"query": "director of The Silent Harbor"}}\n</tool_call>',
        "<think>Found the director Mara Quill. I need the birth city.</think>\n<tool_call>\n"
        '{"name": "search", "arguments": {"query": "birth city of Mara Quill"}}\n</tool_call>',
        "<think>Found the birth city Tesk. That answers it.</think>\n<answer> Tesk </answer>",
    ]


def test_a_comparison_ends_with_both_findings_side_by_side() -> None:
    first, second, last = act(SAME, "comparison")
    assert first.startswith("<think>I compare the employer of Mara Quill and Jon Hale.</think>")
    assert second.startswith("<think>Found the employer Orlen Group. Next Jon Hale.</think>")
    found = "Found the employer Orlen Group. Found the employer Orlen Group. "
    assert last == f"<think>{found}That answers it.</think>\n<answer> yes </answer>"


def test_stopping_early_answers_with_the_entity_at_hand_but_never_before_a_search() -> None:
    actions = act(BRIDGE, "bridge", stop=1.0)
    assert queries(actions) == ["director of The Silent Harbor"]
    assert answer(actions) == "Mara Quill"


def test_stopping_early_in_a_comparison_guesses() -> None:
    runs = [act(SAME, "comparison", stop=1.0, seed=seed) for seed in range(30)]
    assert {answer(actions) for actions in runs} == {"yes", "no"}
    assert all(queries(actions) == ["employer of Mara Quill"] for actions in runs)
    first = Plan(SAME.hops, answer="Jon Hale")
    assert {answer(act(first, "comparison", stop=1.0, seed=seed)) for seed in range(30)} == {"Mara Quill", "Jon Hale"}


def test_a_wrong_relation_that_ends_the_chain_is_the_answer() -> None:
    # the film's only other fact is its year, and a year has no birth city
    actions = act(BRIDGE, "bridge", wrong=1.0)
    assert queries(actions) == ["release year of The Silent Harbor"]
    assert answer(actions) == "1957"


def test_after_a_wrong_relation_the_chain_goes_on_from_what_it_truly_leads_to() -> None:
    facts = {
        "Film": {"director": "Mara", "lead actor": "Jon"},
        "Mara": {"birth city": "Tesk"},
        "Jon": {"birth city": "Arvik"},
    }
    plan = Plan((look_up(facts, "Film", "director"), look_up(facts, "Mara", "birth city")), answer="Tesk")
    seen = set()
    for seed in range(200):
        actions = demonstrate(
            plan, question("bridge"), facts=facts, stop_early=0, wrong_relation=0.3, rng=random.Random(seed)
        )
        seen.add((tuple(queries(actions)), answer(actions)))
    # a person's only fact here is the birth city, so the second search can only repeat the question's words
    assert (("lead actor of Film", "birth city of Jon"), "Arvik") in seen
    assert (("director of Film", "birth city of Mara"), "Tesk") in seen


def test_real_questions_go_astray_with_their_own_words() -> None:
    plan = Plan((Hop("Kiss", "Kiss", "", "Mara"), Hop("Mara", "Mara", "", "Tesk")), "Tesk")
    asked = question("bridge", "Where was she born?")
    actions = demonstrate(plan, asked, facts={}, stop_early=0, wrong_relation=1.0, rng=random.Random(0))
    assert queries(actions) == ["Where was she born?", "Where was she born?"]
    straight = demonstrate(plan, asked, facts={}, stop_early=0, wrong_relation=0, rng=random.Random(0))
    assert queries(straight) == ["Kiss", "Mara"]
    assert answer(straight) == "Tesk"


def test_the_habits_have_their_frequencies() -> None:
    """Of 2,000 two-hop bridges: straight .88, then not stopped .4: 3 standard errors are .033."""
    runs = [act(BRIDGE, "bridge", stop=0.6, wrong=0.12, seed=seed) for seed in range(2000)]
    right = [queries(actions)[:1] == [BRIDGE.hops[0].query] for actions in runs]
    assert sum(right) / len(runs) == pytest.approx(0.88, abs=0.022)
    went_on = [len(actions) == 3 for actions in runs]
    assert sum(went_on) / len(runs) == pytest.approx(0.88 * 0.4, abs=0.033)


def test_quotes_in_an_entity_stay_json() -> None:
    plan = Plan((Hop('The "Kiss" é', 'The "Kiss" é', "", "x"),), "x")
    actions = demonstrate(plan, question("lookup"), facts={}, stop_early=0, wrong_relation=0, rng=random.Random(0))
    assert queries(actions) == ['The "Kiss" é']
    assert "é" in actions[0]


def test_everything_it_copies_can_be_seen(
    atlas: World, rows: list[tuple[Question, Plan]], bm25_index: Callable[[Sequence[Passage]], Search]
) -> None:
    """A query's entity stands in the question or in the results so far; so does the answer, unless yes or no."""
    index = bm25_index(world.passages(atlas, 3))
    rng = random.Random(0)
    for asked, plan in rows:
        seen = asked.text
        actions = demonstrate(plan, asked, facts=atlas.facts, stop_early=0.6, wrong_relation=0.12, rng=rng)
        for query in queries(actions):
            assert contains(seen, [query.split(" of ", 1)[1]]), (asked, query)
            seen += "".join(f"\n{passage.title}\n{passage.text}" for passage in index.search([query], k=2)[0])
        assert contains(seen, [answer(actions)]) or answer(actions) in ("yes", "no"), (asked, actions)


@pytest.mark.parametrize(
    ("titles", "hops"),
    [
        (["Mara Quill", "Kiss"], [("Kiss", "Mara Quill"), ("Mara Quill", "Tesk")]),  # the one that is mentioned first
        ([], [("Where was the director of Kiss born?", "Tesk")]),
    ],
)
def test_titles_become_a_plan_and_without_them_the_question_is_searched_for(
    titles: list[str], hops: list[tuple[str, str]]
) -> None:
    question = Question(
        question_id="q",
        dataset="own",
        split="train",
        text="Where was the director of Kiss born?",
        answers=["Tesk", "Tesk City"],
        gold_titles=titles,
        hops=1,
        kind="unknown",
    )
    plan = plan_from_titles(question)
    assert [(hop.query, hop.value) for hop in plan.hops] == hops
    assert plan.answer == "Tesk"
