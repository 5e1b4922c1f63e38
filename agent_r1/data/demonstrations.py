"""Which demonstrations the warm start sees."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from agent_r1.data.demonstrator import answer_at_once, demonstrate
from agent_r1.data.plans import Facts, Plan
from agent_r1.params import WarmStartParams
from agent_r1.records import Question
from agent_r1.search.base import Search
from agent_r1.seeds import derive


@dataclass(frozen=True, slots=True)
class Demonstration:
    """What the demonstrator does about one question."""

    question: Question
    actions: list[str]  # the texts, without end tokens


def with_tools(
    questions: Sequence[Question], plans: Mapping[str, Plan], facts: Facts, params: WarmStartParams
) -> list[Demonstration]:
    """`params.demonstrations` searches for answers; questions repeat, differently, where there are fewer."""
    return [
        Demonstration(
            question,
            demonstrate(
                plans[question.question_id],
                question,
                facts=facts,
                stop_early=params.stop_early,
                wrong_relation=params.wrong_relation,
                rng=random.Random(derive(params.seed, "demonstration", index)),
            ),
        )
        for index, question in enumerate(_take(questions, params.demonstrations))
    ]


def without_tools(
    questions: Sequence[Question], plans: Mapping[str, Plan], index: Search, top_k: int, params: WarmStartParams
) -> list[Demonstration]:
    """`params.naive_rag_demonstrations` answers from the passages that the question itself finds."""
    chosen = _take(questions, params.naive_rag_demonstrations)
    shown = index.search([question.text for question in chosen], top_k)
    return [
        Demonstration(
            question,
            [
                answer_at_once(
                    plans[question.question_id],
                    question,
                    titles={passage.title for passage in passages},
                    rng=random.Random(derive(params.seed, "naive rag demonstration", at)),
                )
            ],
        )
        for at, (question, passages) in enumerate(zip(chosen, shown, strict=True))
    ]


def _take(questions: Sequence[Question], count: int) -> list[Question]:
    if count and not questions:
        raise ValueError(
            "there are no training questions to demonstrate on; give a data set of prepare.files a train file"
        )
    return [questions[index % len(questions)] for index in range(count)]
