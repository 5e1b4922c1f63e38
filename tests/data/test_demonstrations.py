"""What the warm start sees: how many demonstrations, that they differ, and that they copy only what is shown."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from agent_r1.answers import contains
from agent_r1.data import world
from agent_r1.data.demonstrations import Demonstration, with_tools, without_tools
from agent_r1.data.questions import Plan
from agent_r1.data.world import World
from agent_r1.envs.actions import parse_action
from agent_r1.params import WarmStartParams, load
from agent_r1.records import CallStatus, Passage, Question
from agent_r1.search.base import Search

Rows = list[tuple[Question, Plan]]
TOP_K = 2


@pytest.fixture(scope="session")
def warm_start_params() -> WarmStartParams:
    """Those of params.yaml, for as many demonstrations as the small world has questions."""
    params = load(Path(__file__).parents[2] / "params.yaml").warm_start
    return params.model_copy(update={"seed": 0, "demonstrations": 280, "naive_rag_demonstrations": 280})


@pytest.fixture(scope="module")
def index(atlas: World, bm25_index: Callable[[Sequence[Passage]], Search]) -> Search:
    return bm25_index(world.passages(atlas, 0))


def searching(atlas: World, rows: Rows, params: WarmStartParams) -> list[Demonstration]:
    questions, plans = [question for question, _ in rows], {question.question_id: plan for question, plan in rows}
    return with_tools(questions, plans, atlas.facts, params)


def answering(rows: Rows, index: Search, params: WarmStartParams) -> list[Demonstration]:
    questions, plans = [question for question, _ in rows], {question.question_id: plan for question, plan in rows}
    return without_tools(questions, plans, index, TOP_K, params)


def test_there_are_as_many_as_asked_for(
    atlas: World, rows: Rows, index: Search, warm_start_params: WarmStartParams
) -> None:
    params = warm_start_params.model_copy(update={"demonstrations": 300, "naive_rag_demonstrations": 7})
    ids = [each.question.question_id for each in searching(atlas, rows, params)]
    order = [question.question_id for question, _ in rows]
    assert len(order) == 280
    assert ids == order + order[:20]
    assert [each.question.question_id for each in answering(rows, index, params)] == order[:7]
    nothing = params.model_copy(update={"naive_rag_demonstrations": 0})
    assert answering(rows, index, nothing) == []


def test_a_repeated_question_is_not_a_repeated_demonstration(
    atlas: World, rows: Rows, warm_start_params: WarmStartParams
) -> None:
    """One question of three hops, 60 times: it stops at each of them."""
    [chosen, *_] = [(question, plan) for question, plan in rows if len(plan.hops) == 3]
    found = searching(atlas, [chosen], warm_start_params.model_copy(update={"demonstrations": 60}))
    assert {len(each.actions) for each in found} == {2, 3, 4}


def test_the_seed_decides(atlas: World, rows: Rows, index: Search, warm_start_params: WarmStartParams) -> None:
    other = warm_start_params.model_copy(update={"seed": 1})
    assert searching(atlas, rows, warm_start_params) == searching(atlas, rows, warm_start_params)
    assert searching(atlas, rows, warm_start_params) != searching(atlas, rows, other)
    assert answering(rows, index, warm_start_params) == answering(rows, index, warm_start_params)
    assert answering(rows, index, warm_start_params) != answering(rows, index, other)


def test_every_script_calls_well_and_ends_with_an_answer(
    atlas: World, rows: Rows, warm_start_params: WarmStartParams
) -> None:
    for each in searching(atlas, rows, warm_start_params):
        *calls, last = [parse_action(action) for action in each.actions]
        assert calls
        assert all((call.tool, call.call_status) == ("search", CallStatus.OK) for call in calls)
        assert last.answer


def test_without_tools_it_answers_at_once_with_what_is_shown(
    rows: Rows, index: Search, warm_start_params: WarmStartParams
) -> None:
    for each in answering(rows, index, warm_start_params):
        [passages] = index.search([each.question.text], TOP_K)
        [action] = each.actions
        assert is_shown(parse_action(action).answer or "", each.question, passages)


def is_shown(answer: str, question: Question, passages: list[Passage]) -> bool:
    if question.kind == "comparison" and answer in ("yes", "no"):
        return True
    shown = [question.text, *(f"{passage.title} {passage.text}" for passage in passages)]
    return any(contains(text, [answer]) for text in shown)


def test_without_training_questions_there_is_nothing_to_demonstrate(
    atlas: World, index: Search, warm_start_params: WarmStartParams
) -> None:
    with pytest.raises(ValueError, match=r"no training questions to demonstrate on; give a data set of prepare\.files"):
        searching(atlas, [], warm_start_params)
    with pytest.raises(ValueError, match="no training questions"):
        answering([], index, warm_start_params)
