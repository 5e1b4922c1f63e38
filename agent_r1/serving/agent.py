"""A policy that is ready to answer: with engine, renderer, tools and limits, as a stage opens them."""

from __future__ import annotations

import contextlib
import re
import sys
from collections.abc import AsyncGenerator, Iterator, Sequence
from dataclasses import replace
from itertools import accumulate, count, zip_longest
from textwrap import shorten

from agent_r1.envs.base import Conversation, split_action
from agent_r1.envs.kinds import attempts_at
from agent_r1.envs.shared import Shared
from agent_r1.envs.tool_env import asked_attempt
from agent_r1.learn.model import load_tokenizer
from agent_r1.params import Params
from agent_r1.pretrained import end_tokens
from agent_r1.records import Outcome, Question, Source, StopReason
from agent_r1.rollout.chat import Chat
from agent_r1.rollout.collecting import collect_all
from agent_r1.rollout.engines import engine_of
from agent_r1.rollout.episode import PLAY, StepView
from agent_r1.rollout.episodes import at_once, attend, follow
from agent_r1.rollout.sampling import Action, PolicyWeights, Request, Sampler
from agent_r1.search.index import open_index
from agent_r1.training.fitness import require_fit


class Agent:
    """Answers questions. Every question is an episode of its own, token for token as in training."""

    def __init__(self, sampler: Sampler, chat: Chat, shared: Shared) -> None:
        self.shared = shared
        self._sampler = sampler
        self._act = at_once(sampler)
        self._chat = chat
        self._episodes = count()

    def ask(self, text: str, *, seed: int, sample: int = 0) -> Iterator[StepView]:
        """The steps of an episode, an agent's outside once it is over. `sample` numbers repetitions of a question."""
        if self.shared.limits.agent:
            return self._told(text, self.shared.limits.agent, seed, sample)
        attempt = asked_attempt(text, self.shared, sample=sample)
        return follow(self._sampler, self._chat, attempt, self.shared, seed=seed)

    def _told(self, text: str, agent: str, seed: int, sample: int) -> Iterator[StepView]:
        question = Question(question_id=shorten(text, 80), dataset="", split="", text=text, env=agent, strata={})
        attempt = replace(attempts_at([question], self.shared)[0], sample=sample)
        [row] = collect_all(self._sampler, self._chat, [attempt], self.shared, seed=seed, play=PLAY)
        if not row.steps:
            raise ValueError(f"env.agents.{agent} ended as {row.outcome} without asking the policy")
        decode = self._chat.decode
        for step, following in zip_longest(row.steps, row.steps[1:]):
            stop = following.action_start if following else len(row.token_ids)
            text_stop = step.action_stop - (step.stop_reason is StopReason.END)
            read = [at for at in range(step.action_stop, stop) if row.source[at] == Source.OBSERVATION]
            yield StepView(
                step=step,
                action=decode(row.ids(slice(step.action_start, text_stop))),
                observations=(decode(row.token_ids[read].tolist()),),
                outcome=None if following else row.outcome,
                answer="" if following else row.answer,
                fault="",
                tokens=step.action_stop,
            )

    async def attend(
        self, text: str, *, seed: int, most: int | None = None, earlier: Sequence[Conversation] = ()
    ) -> AsyncGenerator[StepView]:
        """The steps of an episode in the loop of `shared`, where other episodes run at the same time.

        The policy samples `most` tokens at most. An episode that is cut there ends with the answer as far as it goes.
        The last of the `earlier` exchanges stand before the question, as many as fit into a quarter of the context.
        """
        attempt = asked_attempt(text, self.shared, earlier=self._last(earlier))
        episode = next(self._episodes)
        budget = most or sys.maxsize

        async def act(request: Request) -> Action:
            return await self._act(replace(request, max_tokens=min(request.max_tokens, budget)))

        running = attend(act, self._chat, attempt, self.shared, seed=seed, episode=episode)
        async with contextlib.aclosing(running) as steps:
            async for view in steps:
                budget -= view.step.action_stop - view.step.action_start
                if budget < 1 and view.outcome not in (Outcome.ANSWERED, Outcome.ABORTED):
                    answer = next((piece.inside for piece in split_action(view.action) if piece.kind == "answer"), "")
                    answer = re.sub(r"</?\w*\Z", "", answer).strip()  # the tag that closes it may be cut too
                    view = replace(view, outcome=Outcome.TOKEN_LIMIT, observations=(), answer=answer)
                    yield replace(view, tokens=view.step.action_stop)
                    return
                yield view

    def _last(self, exchanges: Sequence[Conversation]) -> Sequence[Conversation]:
        room = self.shared.limits.max_tokens // 4
        sizes = accumulate(len(self._chat.encode_action(exchange.text)) for exchange in reversed(exchanges))
        return exchanges[len(exchanges) - sum(size <= room for size in sizes) :]


@contextlib.contextmanager
def open_agent(settings: Params, weights: PolicyWeights, temperature: float) -> Iterator[Agent]:
    """Opens a policy with its tools, in the loop of this project or of the agent outside that `env.agent` names."""
    index = open_index(settings.search, settings.places.passages, settings.places.index)
    with (
        open_policy(settings, weights, temperature) as (engine, chat),
        Shared(settings.env, index) as shared,
    ):
        yield Agent(engine, chat, shared)


@contextlib.contextmanager
def open_policy(settings: Params, weights: PolicyWeights, temperature: float) -> Iterator[tuple[Sampler, Chat]]:
    """Opens a policy. Raises ValueError for a model that `require_fit` refuses."""
    path = weights.path
    if not weights.beneath:
        require_fit(path, settings)
    chat = Chat(load_tokenizer(path, settings.env.max_tokens, settings.model.template), end_tokens(path))
    with engine_of(settings, weights, chat, temperature) as engine:
        yield engine, chat
