"""How a policy is put to questions: with tools, from passages in the prompt, or from what it knows."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence, Set
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from typing import Any

from agent_r1.envs.base import Attempt
from agent_r1.envs.kinds import KINDS, attempts_at, openings, played_by
from agent_r1.envs.shared import Shared
from agent_r1.envs.tool_env import closed_book_attempts, gold_passages_attempts, naive_rag_attempts
from agent_r1.envs.turns import GAMES
from agent_r1.evaluation.scores import CEILING, FLOOR, gold_passages
from agent_r1.files import sha256
from agent_r1.http.endpoint import Endpoint
from agent_r1.params import Params
from agent_r1.params.env import EnvParams
from agent_r1.params.stages import Protocol
from agent_r1.records import QA, Question, Trajectory
from agent_r1.rollout.chat import Chat
from agent_r1.rollout.engines import open_engine
from agent_r1.rollout.episode import Play
from agent_r1.rollout.episodes import ScriptedSampler, collect
from agent_r1.rollout.sampling import Action, Actor, Beneath, Request
from agent_r1.search.index import describe, open_index


class EndpointSampler:
    """Asks for every action's text, and puts it into the chat's tokens, in which all limits are counted.

    Nothing of it is token-exact: the model's own tokens and logprobs are not known, the ids are those that another
    policy would sample to write the text, and every logprob is 0. So it may be evaluated, and never learned from. What
    is longer than its request allows is cut, as a policy's action is. Requests need their messages; each is answered
    for itself, and one that is not answered is a WorldFault.
    """

    def __init__(self, endpoint: Endpoint, model: str, chat: Chat, *, concurrency: int) -> None:
        self._endpoint, self._model, self._chat = endpoint, model, chat
        self._pool = ThreadPoolExecutor(concurrency, thread_name_prefix="endpoint")

    def sample(self, requests: Sequence[Request]) -> list[Action]:
        """All of them, or the first fault."""
        return list(self._pool.map(self._act, requests))

    async def act(self, request: Request) -> Action:
        """One of them, while others are under way."""
        return await asyncio.wrap_future(self._pool.submit(self._act, request))

    def close(self) -> None:
        """Asks nothing more."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _act(self, request: Request) -> Action:
        said = self._endpoint.complete(self._model, request.messages, max_tokens=request.max_tokens)
        ids = self._chat.encode_action(self._chat.escape_action(said.text), request.context)
        if said.cut and len(ids) > 1:  # without the end token, which it did not come to
            ids = ids[:-1]
        ids = ids[: request.max_tokens]
        return Action.of(ids, [0.0] * len(ids), self._chat.end_id)


SCRIPTED = (FLOOR, CEILING)  # protocols under which no policy acts, in the environment of the runs


def open_shared(protocol: Protocol, settings: Params) -> Shared:
    """What the episodes use; an index only where they search."""
    places, searches = settings.places, protocol in ("tool_call", "naive_rag")
    return Shared(settings.env, open_index(settings.search, places.passages, places.index) if searches else None)


def attempts_under(
    protocol: Protocol, questions: Sequence[Question], settings: Params, shared: Shared
) -> list[Attempt]:
    """One attempt at each question."""
    match protocol:
        case "tool_call" | "random" | "oracle":
            return attempts_at(questions, shared)
        case "naive_rag":
            return naive_rag_attempts(questions, shared)
        case "closed_book":
            return closed_book_attempts(questions, shared)
        case "gold_passages":
            return gold_passages_attempts(questions, gold_passages(questions, settings.places.passages), shared)


def questions_under(protocol: Protocol, questions: Sequence[Question]) -> list[Question]:
    """Those that can be put so: in any way but with tools only questions that ask for an answer, or only games.

    Raises ValueError if none can.
    """
    if protocol in SCRIPTED:
        found = [question for question in questions if protocol in KINDS[question.env].scripts]
    else:
        found = [question for question in questions if protocol == "tool_call" or question.env == QA]
    if not found:
        envs = ", ".join(sorted({question.env for question in questions}))
        raise ValueError(
            f"protocol {protocol} has no question to put, the environments of prepare.datasets are {envs}; leave it "
            "out (of repro_baselines, too)"
        )
    return found


def play_by_script(
    name: str,
    attempts: Sequence[Attempt],
    questions: Sequence[Question],
    chat: Chat,
    settings: Params,
    shared: Shared,
    over: Callable[[], None],
) -> list[Trajectory]:
    """The trajectories of an agent without a model, in the chat's tokens; `over` is called as each ends."""
    played, scripts = played_by(name, attempts, questions, settings.evaluate.seed)
    sampler = ScriptedSampler(scripts, chat)
    return collect(sampler, chat, played, shared, seed=settings.evaluate.seed, play=Play(over=over))


def answer_greedily(
    model: str,
    attempts: Sequence[Attempt],
    chat: Chat,
    settings: Params,
    shared: Shared,
    over: Callable[[], None],
    *,
    policy_version: int,
    beneath: Beneath | None = None,
) -> list[Trajectory]:
    """The trajectories of a policy that always takes the likeliest token; `model` is its folder or hub id.

    Its adapters, and not the weights that they are merged into, run where there is a model `beneath` them. `over` is
    called as each trajectory ends.
    """
    actor = Actor(
        model=model,
        end_id=chat.end_id,
        max_tokens=settings.env.max_tokens,
        temperature=0.0,
        dtype=settings.model.dtype,
        version=policy_version,
    )
    with open_engine(settings.engine, actor.beside(beneath)) as engine:
        play = Play(policy_version=policy_version, over=over)
        return collect(engine, chat, attempts, shared, seed=settings.evaluate.seed, play=play)


def answer_by_endpoint(
    endpoint: Endpoint,
    model: str,
    attempts: Sequence[Attempt],
    chat: Chat,
    settings: Params,
    shared: Shared,
    over: Callable[[], None],
) -> list[Trajectory]:
    """The trajectories of a model behind an endpoint, in the chat's tokens; what it does not answer is ABORTED.

    The limits of `shared` are to be those of `by_endpoint`; `over` is called as each trajectory ends.
    """
    with closing(EndpointSampler(endpoint, model, chat, concurrency=settings.engine.server.concurrency)) as sampler:
        return collect(sampler, chat, attempts, shared, seed=settings.evaluate.seed, play=Play(told=True, over=over))


def by_endpoint(settings: Params) -> Params:
    """The settings as they hold for a model behind an endpoint, which answers each request for itself."""
    return settings.model_copy(update={"env": settings.env.model_copy(update={"order": "arrival"})})


def conditions(
    protocol: Protocol,
    attempts: Sequence[Attempt],
    questions: Sequence[Question],
    chat: Chat,
    settings: Params,
    shared: Shared,
    *,
    rounded: bool = False,
    engine: str = "",
) -> dict[str, str]:
    """Under which circumstances a policy answered, by name: hashes, and in words the bounds of an episode.

    `rounded` says that what was trained as adapters answered with merged weights, for want of the model beneath;
    `engine` what sampled in place of the engine of the settings.
    """
    places = settings.places
    limits = _bounds(settings.env, {question.env for question in questions})
    limits |= {"engine": engine} if engine else {"dtype": settings.model.dtype, "engine": settings.engine.kind}
    limits |= {"adapters": "merged and rounded"} if rounded else {}
    return {
        "questions": sha256(places.questions),
        "passages": sha256(places.passages),
        "index": describe(places.index).index_hash,
        "prompt": chat.prompts_hash(openings(attempts, questions, shared)),
        # naive RAG and gold passages have the same prompt around other passages
        "protocol": "tool_call" if protocol in SCRIPTED else protocol,
        "limits": ", ".join(f"{name} {value}" for name, value in limits.items()),
        **(shared.sources() if protocol == "tool_call" else {}),
    }


def _bounds(env: EnvParams, played: Set[str]) -> dict[str, Any]:
    """What of `env` an episode in these environments may be bound by; the prompt's hash has the instructions."""
    others = {name for name in env.declared if name not in played} | (set() if played & GAMES.keys() else {"games"})
    return env.model_dump(exclude={"instructions", "aborted_share", *others})
