"""Demonstrations for the warm start: an imperfect demonstrator acts out plans with two bad habits."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise, takewhile
from types import MappingProxyType

from agent_r1.data.questions import Facts, Hop, Plan, calculate, look_up
from agent_r1.params.stages import WarmStartParams
from agent_r1.records import Passage, Question
from agent_r1.search.base import Search
from agent_r1.seeds import derive


@dataclass(frozen=True, slots=True)
class Demonstration:
    """The demonstrator's actions for one question."""

    question: Question
    actions: list[str]  # the texts, without end tokens
    calculator: bool = False  # whether it is offered; else the demonstrator works out in its head


def with_tools(
    questions: Sequence[Question],
    plans: Mapping[str, Plan],
    facts: Facts,
    params: WarmStartParams,
    *,
    calculator: bool = False,
    scripts: Mapping[str, list[str]] = MappingProxyType({}),
) -> list[Demonstration]:
    """`params.demonstrations` searches for answers; questions repeat, differently, where there are fewer.

    With a calculator among the tools half of them are offered it, so that a policy with it and one without may start
    from them. Of questions in `scripts`, by question_id, the actions are those.
    """
    demonstrations = []
    for question, rng in _take(questions, params.demonstrations, params.seed, "demonstration"):
        offered = calculator and rng.random() < 0.5
        actions = scripts.get(question.question_id)
        if actions is None:
            actions = demonstrate(plans[question.question_id], question, facts, params, rng, calculator=offered)
        demonstrations.append(Demonstration(question, actions, offered))
    return demonstrations


def without_tools(
    questions: Sequence[Question],
    plans: Mapping[str, Plan],
    index: Search,
    top_k: int,
    params: WarmStartParams,
    scripts: Mapping[str, list[str]] = MappingProxyType({}),
) -> list[Demonstration]:
    """`params.naive_rag_demonstrations` answers from the passages that the question itself finds.

    Of questions in `scripts`, by question_id, the actions are those.
    """
    draws = _take(questions, params.naive_rag_demonstrations, params.seed, "naive rag demonstration")
    results = index.search([question.text for question, _ in draws], top_k)
    return [
        Demonstration(
            question,
            scripts.get(question.question_id) or [answer_at_once(plans[question.question_id], question, passages, rng)],
        )
        for (question, rng), passages in zip(draws, results, strict=True)
    ]


def _take(questions: Sequence[Question], count: int, seed: int, purpose: str) -> list[tuple[Question, random.Random]]:
    """`count` questions in turn, each with the random numbers of its demonstration."""
    if count and not questions:
        raise ValueError(
            "there are no training questions to demonstrate on; give a data set of prepare.files a train file, and its "
            "rows gold_titles of passages that a search finds"
        )
    return [(questions[i % len(questions)], random.Random(derive(seed, purpose, i))) for i in range(count)]


def demonstrate(
    plan: Plan,
    question: Question,
    facts: Facts,
    params: WarmStartParams,
    rng: random.Random,
    *,
    calculator: bool = False,
) -> list[str]:
    """The texts of the demonstrator's actions, without end tokens: one search per hop, then an answer.

    A sum or difference of two years goes to the calculator first, where there is one.

    With the chance `stop_early`, at every hop but the first, it answers with the entity at hand instead, and guesses
    in a comparison. With the chance `wrong_relation`, at every hop, it asks for another relation of the same entity and
    goes on from its true value, or answers with it where the plan does not apply to it. `by_relation` makes the
    chances differ; see `_chance`.

    Its thoughts name the open needs of the plan, even where the habits leave the plan; with `by_relation` it believes
    its mistakes, and its thoughts name them. An action copies only from the question, an earlier thought or the result
    of the previous search.
    """
    hops = _hops_made(plan, question, facts, params, rng)
    kind = question.strata["kind"]
    if kind in _THOUGHTS:
        thoughts = _THOUGHTS[kind](plan, hops)
    else:
        thoughts = _follow(plan, hops, believed=params.by_relation > 0)
    searches = [
        call_action(thought, "search", {"query": hop.query}) for thought, hop in zip(thoughts, hops, strict=True)
    ]
    conclusion = _conclusion(plan, question, hops, rng)
    if calculator and _can_calculate(plan, hops):
        expression = f"{hops[0].value} {plan.sign} {hops[1].value}"
        calculation = call_action(f"{findings(hops)}Now {expression}.", "calculator", {"expression": expression})
        return [*searches, calculation, answer_action(conclusion, "")]
    return [*searches, answer_action(conclusion, findings(hops if kind in _THOUGHTS else hops[-1:]))]


def answer_at_once(plan: Plan, question: Question, passages: Sequence[Passage], rng: random.Random) -> str:
    """One action that answers from the passages that are shown; hops count up to the first whose passage is missing."""
    titles = {passage.title for passage in passages}
    hops = list(takewhile(lambda hop: hop.entity in titles, plan.hops))
    text = _conclusion(plan, question, hops, rng) if hops else rng.choice(sorted(titles) or ["unknown"])
    return answer_action(text, findings(hops))


def _hops_made(plan: Plan, question: Question, facts: Facts, params: WarmStartParams, rng: random.Random) -> list[Hop]:
    hops: list[Hop] = []
    for hop in plan.hops:
        if hops and rng.random() < _chance(params.stop_early, params, "stop early", hops[-1].relation, hop.relation):
            return hops
        at_hand = hops[-1].value if hops and question.strata["kind"] == "bridge" else hop.entity
        if at_hand != hop.entity:
            if hop.relation not in facts.get(at_hand, {}):
                return hops
            hop = look_up(facts, at_hand, hop.relation)
        if rng.random() < _chance(params.wrong_relation, params, "wrong relation", hop.relation):
            relations = [relation for relation in facts.get(hop.entity, {}) if relation != hop.relation]
            hop = look_up(facts, hop.entity, _habitual(relations, params, rng, hop.relation)) if relations else hop
        hops.append(hop)
    return hops


def _chance(mean: float, params: WarmStartParams, *place: str) -> float:
    """The chance of a habit in a place, such as a relation or two in a row; `mean` without `by_relation`.

    With it the seed draws a share `mean` of the places, in which the chance is `by_relation` higher than in all others.
    The mean over the places stays.
    """
    if not params.by_relation:
        return mean
    drawn = random.Random(derive(params.seed, "habit", *place)).random() < mean
    return (1 - params.by_relation) * mean + params.by_relation * drawn


def _habitual(relations: Sequence[str], params: WarmStartParams, rng: random.Random, place: str) -> str:
    """A relation out of some; with `by_relation` always the same in a place."""
    return (random.Random(derive(params.seed, "habit", place)) if params.by_relation else rng).choice(relations)


def _conclusion(plan: Plan, question: Question, hops: list[Hop], rng: random.Random) -> str:
    if _can_calculate(plan, hops):
        return calculate(hops[0].value, plan.sign, hops[1].value)
    if question.strata["kind"] != "comparison":
        return hops[-1].value
    if hops == list(plan.hops):
        return plan.answer
    return rng.choice(["yes", "no"] if plan.answer in ("yes", "no") else [hop.entity for hop in plan.hops])


def _follow(plan: Plan, hops: Sequence[Hop], *, believed: bool) -> list[str]:
    """A thought before each search along a chain: the last finding, and all that is still needed, or believed to be."""
    last_findings = ["", *(findings([hop]) for hop in hops[:-1])]
    firsts = hops if believed else [*plan.hops, *hops[len(plan.hops) :]]
    return [finding + _need([firsts[place], *plan.hops[place + 1 :]]) for place, finding in enumerate(last_findings)]


def _compare(plan: Plan, hops: Sequence[Hop]) -> list[str]:
    """A thought before each search of a comparison: its entities, then the last finding and the next entity."""
    entities = " and ".join(hop.entity for hop in plan.hops)
    what = f"the {plan.hops[0].relation} of {entities}" if plan.hops[0].relation else entities
    return [f"I compare {what}.", *(f"{findings([previous])}Next {hop.entity}." for previous, hop in pairwise(hops))]


def _add_up(plan: Plan, hops: Sequence[Hop]) -> list[str]:
    """A thought before each search of two years: both needs, then the first finding and the second need."""
    needs = [f"the {hop.relation} of {hop.entity}" for hop in plan.hops]
    return [f"I need {' and '.join(needs)}.", *(f"{findings([hop])}Next {needs[1]}." for hop in hops[:-1])]


def _can_calculate(plan: Plan, hops: Sequence[Hop]) -> bool:
    """Whether both hops gave a year."""
    return bool(plan.sign) and len(hops) == 2 and all(hop.value.isdecimal() for hop in hops)


def _need(hops: Sequence[Hop]) -> str:
    """Names the relations that are left to follow, or the next entity where relations are not known."""
    if not hops[0].relation:
        return f"I need {hops[0].entity}."
    return f"I need {', then '.join(f'the {hop.relation}' for hop in hops)}."


def call_action(thought: str, tool: str, arguments: dict[str, str]) -> str:
    """The text of an action that thinks and calls a tool."""
    call = json.dumps({"name": tool, "arguments": arguments}, ensure_ascii=False)
    return f"<think>{thought}</think>\n<tool_call>\n{call}\n</tool_call>"


def answer_action(text: str, thought: str) -> str:
    """With spaces inside the tags a name has the same tokens as in the question and the passages: it can be copied."""
    return f"<think>{thought}That answers it.</think>\n<answer> {text} </answer>"


def findings(hops: Sequence[Hop]) -> str:
    """States the findings in the passages' words, which a small model learns to read off them."""
    return "".join(f"Found the {hop.relation} {hop.value}. " for hop in hops if hop.relation)


# How thoughts before the searches go, by the kind of question; `_follow` where it is none of these.
_THOUGHTS: dict[str, Callable[[Plan, Sequence[Hop]], list[str]]] = {"comparison": _compare, "arithmetic": _add_up}
