"""Questions: true, of the promised mix, and apart from each other."""

from collections import Counter

import pytest

from agent_r1.answers import contains
from agent_r1.data.atlas import World
from agent_r1.data.questions import Facts, Plan, generate_questions, plan_from_titles
from agent_r1.params.prepare import AtlasParams, AtlasShares
from agent_r1.records import Question
from tests.cases import cases
from tests.trajectories import question_fields

Rows = list[tuple[Question, Plan]]
NOTHING = dict.fromkeys(AtlasShares.model_fields, 0.0)


def reference_answer(question: Question, plan: Plan, facts: Facts) -> str:
    relations = [hop.relation for hop in plan.hops]
    if question.strata["kind"] != "comparison":
        value = plan.hops[0].entity
        for relation in relations:
            value = facts[value][relation]
        return value
    one, other = (hop.entity for hop in plan.hops)
    assert relations[0] == relations[1]
    assert facts[one][relations[0]] != facts[other][relations[0]] or plan.answer == "yes"
    if plan.answer in ("yes", "no"):
        return "yes" if facts[one][relations[0]] == facts[other][relations[0]] else "no"
    return min((one, other), key=lambda entity: facts[entity][relations[0]])


def test_answers_are_true(rows: Rows, atlas: World) -> None:
    """And stand in no question, unless it offers two."""
    for question, plan in rows:
        assert question.answers == [plan.answer] == [reference_answer(question, plan, atlas.facts)], question
        offers = [hop.entity for hop in plan.hops] if question.strata["kind"] == "comparison" else []
        assert contains(question.text, question.answers) == (plan.answer in offers), question


def test_every_hop_is_a_fact_and_leads_to_the_next(rows: Rows, atlas: World) -> None:
    for question, plan in rows:
        assert all(atlas.facts[hop.entity][hop.relation] == hop.value for hop in plan.hops)
        assert all(hop.query == f"{hop.relation} of {hop.entity}" for hop in plan.hops)
        assert question.gold_titles == [hop.entity for hop in plan.hops]
        assert int(question.strata["hops"]) == len(plan.hops) == len(set(question.gold_titles))
        asked = plan.hops if question.strata["kind"] == "comparison" else plan.hops[:1]
        assert all(f" {hop.entity}" in question.text for hop in asked)
        if question.strata["kind"] == "bridge":
            assert [hop.value for hop in plan.hops[:-1]] == [hop.entity for hop in plan.hops[1:]]


def test_the_mix(rows: Rows) -> None:
    """200 questions: 40 lookups, 70 and 60 bridges, and 30 comparisons: 14 yes/no (7 each), 16 earlier."""
    train = [(question, plan) for question, plan in rows if question.split == "train"]
    kinds = Counter(f"{question.strata['kind']} {question.strata['hops']}" for question, _ in train)
    assert kinds == {"lookup 1": 40, "bridge 2": 70, "bridge 3": 60, "comparison 2": 30}
    yes, no = (Counter(plan.hops[0].relation for _, plan in train if plan.answer == answer) for answer in ("yes", "no"))
    assert yes == no, "the relation does not give the answer away"
    assert yes.total() == 7
    assert Counter(question.split for question, _ in rows) == {"train": 200, "dev": 40, "test": 40}


def test_no_two_questions_are_alike(rows: Rows) -> None:
    asked = set()
    for question, plan in rows:
        hops = [(hop.entity, hop.relation) for hop in plan.hops]
        asked.add(frozenset(hops) if question.strata["kind"] == "comparison" else tuple(hops))
    texts = {question.text for question, _ in rows}
    ids = {question.question_id for question, _ in rows}
    assert len(asked) == len(texts) == len(ids) == len(rows)


def test_a_world_too_small_and_shares_of_less_than_all_are_refused(atlas: World, atlas_params: AtlasParams) -> None:
    """61 people with 4 facts (one unmarried), 30 films with 4, 12 companies with 3, 10 cities with 2, 4 countries
    with 3: 243 + 120 + 36 + 20 + 12 = 431 lookups."""
    params = atlas_params.model_copy(update={"train_questions": 5000})
    with pytest.raises(ValueError, match=r"431 lookup questions and 1016 are asked for; raise people"):
        generate_questions(atlas, params, 3)
    with pytest.raises(ValueError, match=r"together make 0\.9 of all"):
        AtlasShares(**NOTHING | {"lookup": 0.9})


TEXT = "Where was the director of Kiss and Tell born?"


@cases("titles, hops")
def test_titles_become_a_plan_and_without_them_the_question_is(titles: list[str], hops: list[list[str]]) -> None:
    fields = question_fields(text=TEXT, answers=["Tesk", "Tesk City"], gold_titles=titles)
    plan = plan_from_titles(Question(**fields))
    assert [[hop.query, hop.value] for hop in plan.hops] == hops
    assert plan.answer == "Tesk"


@pytest.fixture(scope="module")
def arithmetic(atlas: World, atlas_params: AtlasParams) -> Rows:
    shares = NOTHING | {"sum": 0.5, "age": 0.5}
    return generate_questions(atlas, atlas_params.model_copy(update={"shares": AtlasShares(**shares)}), seed=3)


def test_sums_and_ages_are_worked_out_of_the_years_that_are_asked_for(atlas: World, arithmetic: Rows) -> None:
    """And no two of them alike."""
    assert {plan.sign for _, plan in arithmetic} == {"+", "-"}
    for question, plan in arithmetic:
        first, second = (int(atlas.facts[hop.entity][hop.relation]) for hop in plan.hops)
        expected = first + second if plan.sign == "+" else first - second
        assert question.answers == [str(expected)]
        assert question.strata == {"hops": "2", "kind": "arithmetic"}
        assert expected > 0
        assert all(hop.entity in question.text for hop in plan.hops)
        if plan.sign == "-":
            assert plan.hops[1].relation == "birth year"
            assert question.text.startswith(("How old was ", "What was the age of ")), question.text
    asked = {(plan.sign, frozenset(hop.entity for hop in plan.hops)) for _, plan in arithmetic}
    assert len(asked) == len({question.text for question, _ in arithmetic}) == len(arithmetic)
