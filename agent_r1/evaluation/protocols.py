"""Protocols under which an agent answers: with tools, from passages in the prompt, or from memory."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import random
from collections.abc import Callable, Iterator, Sequence, Set
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from threading import Lock
from typing import Any

from pydantic import TypeAdapter, ValidationError

from agent_r1.envs.base import Attempt
from agent_r1.envs.kinds import agent_of, attempts_at, openings, played_by, require_playable, scripts_of
from agent_r1.envs.shared import Shared
from agent_r1.envs.tool_env import closed_book_attempts, gold_passages_attempts, naive_rag_attempts
from agent_r1.evaluation.scores import CEILING, FLOOR, gold_passages
from agent_r1.files import sha256
from agent_r1.games.kinds import GAMES
from agent_r1.http.endpoint import Endpoint, Reply
from agent_r1.params import Params
from agent_r1.params.env import EnvParams
from agent_r1.params.stages import Protocol
from agent_r1.records import GREEDY, QA, Question, Trajectory, of_split
from agent_r1.rollout.chat import Chat
from agent_r1.rollout.collecting import collect_all
from agent_r1.rollout.engines import engine_of
from agent_r1.rollout.episode import Play
from agent_r1.rollout.episodes import ScriptedSampler
from agent_r1.rollout.sampling import Action, PolicyWeights, Request, Sampler
from agent_r1.search.index import describe, open_index
from agent_r1.seeds import derive
from agent_r1.tables import read_rows

NOWHERE = Path(os.devnull)
_LINE = TypeAdapter(tuple[int, Reply])  # the hash of a request, and its answer

logger = logging.getLogger(__name__)


class EndpointSampler:
    """Asks a server for the text of every action, and encodes it into the chat's tokens, which all limits count.

    Its actions are not token-exact: the server's own tokens and logprobs are unknown, the ids are one encoding of the
    text, and every logprob is 0. They can be evaluated, never learned from. An action that is longer than its request
    allows is cut, as a policy's is. Every request needs its messages; one without an answer is a WorldFault.
    Answers are `kept` in a file, so that an evaluation that was cut short does not ask for them again.
    """

    def __init__(
        self,
        endpoint: Endpoint,
        model: str,
        chat: Chat,
        *,
        concurrency: int,
        temperature: float = 0.0,
        kept: Path = NOWHERE,
    ) -> None:
        self._endpoint = endpoint
        self._model = model
        self._chat = chat
        self._kept = kept
        self._temperature = temperature
        self._pool = ThreadPoolExecutor(concurrency, thread_name_prefix="endpoint")
        self._lock = Lock()
        self._known = dict[int, Reply]()
        for line in kept.read_bytes().splitlines() if kept.exists() else ():
            with suppress(ValidationError):  # a kill may cut a line short
                self._known |= [_LINE.validate_json(line)]
        if self._known:
            logger.warning("%d answers to an evaluation that was cut short come from %s", len(self._known), kept)

    def sample(self, requests: Sequence[Request]) -> list[Action]:
        """Answers all requests, or raises the first fault."""
        return list(self._pool.map(self._act, requests))

    async def act(self, request: Request) -> Action:
        """Answers one request while others are under way."""
        return await asyncio.wrap_future(self._pool.submit(self._act, request))

    def close(self) -> None:
        """Cancels the requests that wait."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _act(self, request: Request) -> Action:
        options = {"max_tokens": request.max_tokens, "temperature": 0.0 if request.greedy else self._temperature}
        key = derive(self._endpoint.url, self._model, request.seed, json.dumps([options, request.messages]))
        if key not in self._known:
            self._known[key] = self._endpoint.complete(self._model, request.messages, options)
            with self._lock, self._kept.open("ab") as file:
                file.write(b"\n" + _LINE.dump_json((key, self._known[key])))
        reply = self._known[key]
        ids = self._chat.encode_action(self._chat.escape_action(reply.text), request.context)
        if reply.cut and len(ids) > 1:  # the server stopped before the end token
            ids = ids[:-1]
        ids = ids[: request.max_tokens]
        return Action.of(ids, [0.0] * len(ids), self._chat.end_ids)


SCRIPTED: tuple[Protocol, ...] = (FLOOR, CEILING)  # protocols under which a script acts instead of a policy


@dataclass(frozen=True, slots=True)
class Exam:
    """Test questions under one protocol, with everything that their episodes use."""

    protocol: Protocol
    questions: Sequence[Question]
    attempts: Sequence[Attempt]  # `evaluate.samples` at each question, and GREEDY ones
    chat: Chat
    settings: Params
    shared: Shared

    def by_script(self, on_end: Callable[[], None]) -> list[Trajectory]:
        """The trajectories of chance or of the solver, in the chat's tokens. Calls `on_end` as each one ends."""
        seed = self.settings.evaluate.seed
        played, scripts = played_by(self.protocol, self.attempts, self.questions, seed)
        return replace(self, attempts=played)._by(ScriptedSampler(scripts, self.chat), Play(over=on_end))

    def by_policy(self, weights: PolicyWeights, on_end: Callable[[], None]) -> list[Trajectory]:
        """The trajectories of a policy, at `evaluate.temperature`. Calls `on_end` as each one ends."""
        with engine_of(self.settings, weights, self.chat, self.settings.evaluate.temperature) as engine:
            return self._by(engine, Play(policy_version=weights.updates, over=on_end))

    def by_endpoint(
        self, endpoint: Endpoint, model: str, on_end: Callable[[], None], kept: Path = NOWHERE
    ) -> list[Trajectory]:
        """The trajectories of a served model, whose answers are `kept`. Without an answer an episode is ABORTED.

        The settings must be those of `with_endpoint`. Calls `on_end` as each trajectory ends.
        """
        sampler = EndpointSampler(
            endpoint,
            model,
            self.chat,
            concurrency=self.settings.engine.server.concurrency,
            temperature=self.settings.evaluate.temperature,
            kept=kept,
        )
        with closing(sampler):
            return self._by(sampler, Play(told=True, over=on_end))

    def _by(self, sampler: Sampler, play: Play) -> list[Trajectory]:
        """The trajectories of samples, then the greedy ones."""
        seed = self.settings.evaluate.seed
        trajectories = list[Trajectory]()
        for greedy in (False, True):
            if attempts := [attempt for attempt in self.attempts if (attempt.sample == GREEDY) is greedy]:
                how = replace(play, greedy=greedy)
                trajectories += collect_all(sampler, self.chat, attempts, self.shared, seed=seed, play=how)
        return trajectories

    def conditions(self, *, rounded: bool = False, engine: str = "") -> dict[str, str]:
        """The circumstances of the answers by name: hashes, and the limits of an episode in words.

        `rounded`: the model beneath was missing, so adapters answered as merged weights. `engine` names a sampler
        that replaced the engine of the settings.
        """
        settings = self.settings
        places = self.settings.places
        limits = _limits(settings.env, {question.env for question in self.questions})
        limits |= {"engine": engine} if engine else {"dtype": settings.model.dtype, "engine": settings.engine.kind}
        limits |= {"kernels": "AVX2"} if settings.model.portable else {}
        limits |= {"adapters": "merged and rounded"} if rounded else {}
        return {
            "questions": sha256(places.questions),
            "passages": sha256(places.passages),
            "index": describe(places.index).index_hash,
            "prompt": self.chat.prompts_hash(openings(self.attempts, self.questions, self.shared)),
            # naive RAG and gold passages have the same prompt around other passages
            "protocol": "tool_call" if self.protocol in SCRIPTED else self.protocol,
            "samples": str(settings.evaluate.samples),
            "temperature": f"{settings.evaluate.temperature:g}",
            "limits": ", ".join(f"{name} {value}" for name, value in limits.items()),
            **(self.shared.sources() if self.protocol == "tool_call" else {}),
        }


@contextmanager
def open_exam(
    protocol: Protocol, questions: Sequence[Question], chat: Chat, settings: Params, *, greedily: bool = False
) -> Iterator[Exam]:
    """Opens the environments of the questions. The index is opened only where something may be searched for.

    `greedily`: a policy that is sampled at a temperature answers every question greedily as well.
    """
    asks = any(question.env == QA for question in questions)
    places = settings.places
    searches = protocol in ("tool_call", "naive_rag") or (protocol in SCRIPTED and asks)
    index = open_index(settings.search, places.passages, places.index) if searches else None
    beside = greedily and settings.evaluate.temperature > 0 and protocol not in SCRIPTED
    samples = [*range(settings.evaluate.samples), *[GREEDY] * beside]
    with Shared(settings.env, index) as shared:
        attempts = [
            replace(attempt, sample=sample)
            for attempt in _attempts(protocol, questions, settings, shared)
            for sample in samples
        ]
        yield Exam(protocol, questions, attempts, chat, settings, shared)


def _attempts(protocol: Protocol, questions: Sequence[Question], settings: Params, shared: Shared) -> list[Attempt]:
    """One attempt at each question."""
    match protocol:
        case "tool_call" | "random" | "oracle":
            return attempts_at(questions, shared, outside=protocol not in SCRIPTED)
        case "naive_rag":
            return naive_rag_attempts(questions, shared)
        case "closed_book":
            return closed_book_attempts(questions, shared)
        case "gold_passages":
            return gold_passages_attempts(questions, gold_passages(questions, settings.places.passages), shared)


def questions_under(protocol: Protocol, questions: Sequence[Question]) -> list[Question]:
    """The questions that a protocol fits: all, those a script plays, or only answered ones; ValueError if none do."""
    if protocol in SCRIPTED:
        selection = [question for question in questions if protocol in scripts_of(question.env)]
    else:
        selection = [question for question in questions if protocol == "tool_call" or question.env == QA]
    if not selection:
        envs = ", ".join(sorted({question.env for question in questions}))
        raise ValueError(
            f"protocol {protocol} has no question to put, the environments of prepare.datasets are {envs}; leave it "
            "out (of repro_baselines, too)"
        )
    return selection


def training_questions(settings: Params, count: int) -> list[Question]:
    """At most `count` training questions, drawn by `evaluate.seed`. Raises as `require_playable`."""
    train = of_split(read_rows(settings.places.questions, Question), "train")
    drawn = random.Random(settings.evaluate.seed).sample(train, min(count, len(train)))
    require_playable(drawn, settings.env)
    return drawn


def with_endpoint(settings: Params) -> Params:
    """The settings for a served model, which answers each request when it arrives."""
    return settings.model_copy(update={"env": settings.env.model_copy(update={"order": "arrival"})})


def _limits(env: EnvParams, envs: Set[str]) -> dict[str, Any]:
    """The settings that limit an episode in these environments; the prompt's hash covers instructions and examples."""
    excluded = {name for name in env.declared if name not in envs} | (set() if envs & GAMES.keys() else {"games"})
    excluded |= set() if any(agent_of(env_name, env) for env_name in envs) else {"agent", "agents"}
    excluded |= {"answers"} if env.answers == "tagged" else set()
    excluded |= {"calls"} if env.calls == "strict" else set()
    return env.model_dump(exclude={"instructions", "examples", "aborted_share", "too_long_share", *excluded})
