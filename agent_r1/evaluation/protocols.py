"""How a policy is put to questions: with tools, from passages in the prompt, or from what it knows."""

from __future__ import annotations

from collections.abc import Sequence

from agent_r1.evaluation.predictions import gold_passages
from agent_r1.params import Params, Protocol
from agent_r1.records import Question, Trajectory
from agent_r1.rollout.attempts import (
    closed_book_attempts,
    gold_passages_attempts,
    naive_rag_attempts,
    tool_attempts,
)
from agent_r1.rollout.chat import Chat
from agent_r1.rollout.engines import open_engine
from agent_r1.rollout.episodes import Attempt, collect
from agent_r1.rollout.sampling import Actor
from agent_r1.search.base import Search
from agent_r1.search.index import open_index


def attempts_under(protocol: Protocol, questions: Sequence[Question], settings: Params) -> list[Attempt]:
    """One attempt at each question."""
    places = settings.places

    def index() -> Search:
        return open_index(settings.search, places.passages, places.index)

    match protocol:
        case "tool_call":
            return tool_attempts(questions, index(), settings.env)
        case "naive_rag":
            return naive_rag_attempts(questions, index(), settings.env)
        case "closed_book":
            return closed_book_attempts(questions, settings.env)
        case "gold_passages":
            return gold_passages_attempts(questions, gold_passages(questions, places.passages), settings.env)


def answer_greedily(
    model: str, attempts: Sequence[Attempt], chat: Chat, settings: Params, *, policy_version: int
) -> list[Trajectory]:
    """The trajectories of a policy that always takes the likeliest token.

    Args:
        model: a Hugging Face folder or hub id.
        policy_version: its updates since the warm start.
    """
    limits = settings.env
    actor = Actor(
        model=model,
        end_id=chat.end_id,
        max_tokens=limits.max_tokens,
        temperature=0.0,
        dtype=settings.model.dtype,
        version=policy_version,
    )
    with open_engine(settings.engine, actor) as engine:
        return collect(
            engine,
            chat,
            attempts,
            max_tokens=limits.max_tokens,
            max_action_tokens=limits.max_action_tokens,
            seed=settings.evaluate.seed,
            policy_version=policy_version,
        )
