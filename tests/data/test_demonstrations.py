"""The demonstrator: worked examples of each habit, their frequency, how many there are, and what is copied."""

import json
import random
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from agent_r1.answers import contains
from agent_r1.data.atlas import World, tell
from agent_r1.data.demonstrations import Demonstration, _chance, demonstrate, with_tools, without_tools
from agent_r1.data.questions import Plan, generate_questions, look_up
from agent_r1.envs.base import parse_action
from agent_r1.params import load
from agent_r1.params.prepare import AtlasParams, AtlasShares
from agent_r1.params.stages import WarmStartParams
from agent_r1.records import Passage, Question
from agent_r1.search.base import Search
from tests.cases import cases
from tests.data.conftest import ended, searched
from tests.trajectories import question_fields

Rows = list[tuple[Question, Plan]]
TOP_K = 2
WARM_START = load(Path(__file__).parents[2] / "params.yaml").warm_start.model_copy(update={"by_relation": 0.0})
HARBOR = "The Silent Harbor"
FACTS = {
    HARBOR: {"director": "Mara Quill", "release year": "1957"},
    "Mara Quill": {"birth city": "Tesk", "employer": "Orlen Group"},
    "Jon Hale": {"birth city": "Arvik", "employer": "Orlen Group"},
}


def question(kind: str) -> Question:
    return Question(**question_fields(strata={"hops": "2", "kind": kind}))


BRIDGE = Plan((look_up(FACTS, HARBOR, "director"), look_up(FACTS, "Mara Quill", "birth city")), answer="Tesk")
YEARS = {"Low Tide": {"release year": "1990", "studio": "Orlen Group"}, "Jon Hale": {"birth year": "1958"}}
AGE = Plan((look_up(YEARS, "Low Tide", "release year"), look_up(YEARS, "Jon Hale", "birth year")), "32", "-")
SAME = Plan((look_up(FACTS, "Mara Quill", "employer"), look_up(FACTS, "Jon Hale", "employer")), answer="yes")


def habits(stop: float, wrong: float) -> WarmStartParams:
    return WARM_START.model_copy(update={"stop_early": stop, "wrong_relation": wrong})


def act(plan: Plan, kind: str, *, stop: float = 0.0, wrong: float = 0.0, seed: int = 0) -> list[str]:
    return demonstrate(plan, question(kind), FACTS, habits(stop, wrong), random.Random(seed))


def queries(actions: list[str]) -> list[str]:
    calls = [re.search(r"<tool_call>\n(.*)\n</tool_call>$", action) for action in actions[:-1]]
    return [json.loads(call[1])["arguments"]["query"] for call in calls if call]


def answer(actions: list[str]) -> str:
    match = re.search(r"<answer> (.*) </answer>$", actions[-1])
    return match[1]


def test_without_habits_it_follows_the_plan_to_the_letter() -> None:
    assert act(BRIDGE, "bridge") == [
        searched("I need the director, then the birth city.", "director of The Silent Harbor"),
        searched("Found the director Mara Quill. I need the birth city.", "birth city of Mara Quill"),
        ended("Found the birth city Tesk. That answers it.", "Tesk"),
    ]
    assert act(SAME, "comparison") == [
        searched("I compare the employer of Mara Quill and Jon Hale.", "employer of Mara Quill"),
        searched("Found the employer Orlen Group. Next Jon Hale.", "employer of Jon Hale"),
        ended("Found the employer Orlen Group. Found the employer Orlen Group. That answers it.", "yes"),
    ]


@cases("kind, right, habit, query, answers")
def test_habit_ends_the_search(kind: str, right: str, habit: dict[str, float], query: str, answers: list[str]) -> None:
    plan = replace(BRIDGE if kind == "bridge" else SAME, answer=right)
    runs = [act(plan, kind, **habit, seed=seed) for seed in range(30)]
    assert all(queries(actions) == [query] for actions in runs)
    assert {answer(actions) for actions in runs} == {*answers}


def test_after_a_wrong_relation_the_chain_goes_on_from_what_it_truly_leads_to() -> None:
    facts = {
        "Film": {"director": "Mara", "lead actor": "Jon"},
        "Mara": {"birth city": "Tesk"},
        "Jon": {"birth city": "Arvik"},
    }
    plan = Plan((look_up(facts, "Film", "director"), look_up(facts, "Mara", "birth city")), answer="Tesk")
    seen = set()
    for seed in range(200):
        actions = demonstrate(plan, question("bridge"), facts, habits(0, 0.3), random.Random(seed))
        seen.add((tuple(queries(actions)), answer(actions)))
    # a person's only fact here is the birth city, so the second search has no other relation to take
    assert (("lead actor of Film", "birth city of Jon"), "Arvik") in seen
    assert (("director of Film", "birth city of Mara"), "Tesk") in seen


def test_the_habits_have_their_frequencies() -> None:
    """Shares of 2,000 two-hop bridges: straight .88, then not stopped .4: 3 standard errors are .033."""
    runs = [act(BRIDGE, "bridge", stop=0.6, wrong=0.12, seed=seed) for seed in range(2000)]
    right = [queries(actions)[:1] == [BRIDGE.hops[0].query] for actions in runs]
    assert sum(right) / len(runs) == pytest.approx(0.88, abs=0.022)
    went_on = [len(actions) == 3 for actions in runs]
    assert sum(went_on) / len(runs) == pytest.approx(0.88 * 0.4, abs=0.033)


def test_by_relation_a_share_of_the_places_has_the_habit_and_the_mean_stays() -> None:
    """A mean of .25 at .8: .2 * .25 = .05 in three quarters of the places, and .85 in the others."""
    params = habits(0, 0).model_copy(update={"by_relation": 0.8})
    chances = [_chance(0.25, params, "stop early", str(place)) for place in range(1000)]
    assert {round(chance, 6) for chance in chances} == {0.05, 0.85}
    assert sum(chances) / 1000 == pytest.approx(0.25, abs=0.033)  # 3 standard errors
    assert chances == [_chance(0.25, params, "stop early", str(place)) for place in range(1000)]
    other = params.model_copy(update={"seed": 1})
    assert chances != [_chance(0.25, other, "stop early", str(place)) for place in range(1000)]
    assert {_chance(0.25, habits(0, 0), "stop early", str(place)) for place in range(9)} == {0.25}


def test_by_relation_it_believes_its_mistakes_and_makes_the_same_ones() -> None:
    """Always wrong: the director is taken for one other relation, whatever the numbers."""
    params = habits(0, 1).model_copy(update={"by_relation": 1.0})
    facts = {"Film": {"director": "Mara", "lead actor": "Jon", "writer": "Jon"}}
    plan = Plan((look_up(facts, "Film", "director"),), "Mara")
    [(first, last)] = {
        tuple(demonstrate(plan, question("lookup"), facts, params, random.Random(seed))) for seed in range(20)
    }
    [query] = queries([first, last])
    assert query in ("lead actor of Film", "writer of Film")
    wrong = query.removesuffix(" of Film")
    assert first.startswith(f"<think>I need the {wrong}.</think>")
    assert last.startswith(f"<think>Found the {wrong} Jon.")
    assert answer([last]) == "Jon"


def test_everything_it_copies_can_be_seen(atlas: World, rows: Rows, index: Search) -> None:
    """A query's entity stands in the question or in the results so far; so does the answer, unless yes or no."""
    rng = random.Random(0)
    for asked, plan in rows:
        seen = asked.text
        actions = demonstrate(plan, asked, atlas.facts, habits(0.6, 0.12), rng)
        *calls, last = [parse_action(action) for action in actions]
        assert last.answer
        assert {made.tool for call in calls for made in call.calls} == {"search"}
        for query in queries(actions):
            assert contains(seen, [query.split(" of ", 1)[1]]), (asked, query)
            seen += "".join(f"\n{passage.title}\n{passage.text}" for passage in index.search([query], k=2)[0])
        assert contains(seen, [answer(actions)]) or answer(actions) in ("yes", "no"), (asked, actions)


@pytest.fixture(scope="session")
def warm_start_params() -> WarmStartParams:
    return WARM_START.model_copy(update={"seed": 0, "demonstrations": 280, "naive_rag_demonstrations": 280})


@pytest.fixture(scope="module")
def index(atlas: World, bm25_index: Callable[[Sequence[Passage]], Search]) -> Search:
    return bm25_index(tell(atlas, 0))


def searching(atlas: World, rows: Rows, params: WarmStartParams) -> list[Demonstration]:
    return with_tools([asked for asked, _ in rows], plans_of(rows), atlas.facts, params)


def answering(rows: Rows, index: Search, params: WarmStartParams) -> list[Demonstration]:
    return without_tools([asked for asked, _ in rows], plans_of(rows), index, TOP_K, params)


def plans_of(rows: Rows) -> dict[str, Plan]:
    return {asked.question_id: plan for asked, plan in rows}


def test_count_of_demonstrations(atlas: World, rows: Rows, index: Search, warm_start_params: WarmStartParams) -> None:
    params = warm_start_params.model_copy(update={"demonstrations": 300, "naive_rag_demonstrations": 7})
    ids = [each.question.question_id for each in searching(atlas, rows, params)]
    order = [question.question_id for question, _ in rows]
    assert len(order) == 280
    assert ids == order + order[:20]
    assert [each.question.question_id for each in answering(rows, index, params)] == order[:7]
    assert answering(rows, index, params.model_copy(update={"naive_rag_demonstrations": 0})) == []
    for demonstrate_nothing in (lambda: searching(atlas, [], params), lambda: answering([], index, params)):
        with pytest.raises(ValueError, match=r"no training questions to demonstrate on; give a data set of prepare"):
            demonstrate_nothing()


def test_without_tools_it_answers_at_once(rows: Rows, index: Search, warm_start_params: WarmStartParams) -> None:
    for each in answering(rows, index, warm_start_params):
        [passages] = index.search([each.question.text], TOP_K)
        [action] = each.actions
        found = parse_action(action).answer or ""
        shown = [each.question.text, *(f"{passage.title} {passage.text}" for passage in passages)]
        is_shown = any(contains(text, [found]) for text in shown)
        assert is_shown or (each.question.strata["kind"] == "comparison" and found in ("yes", "no"))


def reckon(*, calculator: bool, wrong: float = 0.0, stop: float = 0.0) -> list[str]:
    chance = random.Random(0)
    return demonstrate(AGE, question("arithmetic"), YEARS, habits(stop, wrong), chance, calculator=calculator)


def test_an_age_is_worked_out_by_the_calculator_or_in_its_head() -> None:
    searches = [
        searched("I need the release year of Low Tide and the birth year of Jon Hale.", "release year of Low Tide"),
        searched("Found the release year 1990. Next the birth year of Jon Hale.", "birth year of Jon Hale"),
    ]
    found = "Found the release year 1990. Found the birth year 1958."
    reckoned = searched(f"{found} Now 1990 - 1958.", "1990 - 1958", "calculator", "expression")
    assert reckon(calculator=True) == [*searches, reckoned, ended("That answers it.", "32")]
    assert reckon(calculator=False) == [*searches, ended(f"{found} That answers it.", "32")]


@pytest.mark.parametrize("calculator", [True, False])
def test_what_is_no_year_cannot_be_worked_with(calculator: bool) -> None:
    """It stops at the first year, or goes astray to a studio; the calculator is not bothered."""
    assert answer(reckon(calculator=calculator, stop=1.0)) == "1990"
    astray = reckon(calculator=calculator, wrong=1.0)
    assert answer(astray) == "1958"
    assert not any("calculator" in action for action in astray)


def test_half_offer_a_calculator(atlas: World, atlas_params: AtlasParams, warm_start_params: WarmStartParams) -> None:
    """The other demonstrations stay: the same questions, with another half of the chances."""
    shares = dict.fromkeys(AtlasShares.model_fields, 0.0) | {"sum": 0.5, "age": 0.5}
    rows = generate_questions(atlas, atlas_params.model_copy(update={"shares": AtlasShares(**shares)}), seed=3)
    params = warm_start_params.model_copy(update={"demonstrations": 400, "stop_early": 0.0, "wrong_relation": 0.0})
    made = with_tools([asked for asked, _ in rows], plans_of(rows), atlas.facts, params, calculator=True)
    assert 160 < sum(each.calculator for each in made) < 240
    for each in made:
        assert any('"calculator"' in action for action in each.actions) == each.calculator
        assert answer(each.actions) == each.question.answers[0]
