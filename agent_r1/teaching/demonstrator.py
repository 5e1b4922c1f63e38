"""Right demonstrations of training questions: their scripts, and trajectories of the episode loop."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import repeat

import numpy as np

from agent_r1.data.demonstrations import demonstrate
from agent_r1.data.from_titles import NotBorneOutError, Pages, Reading, act_from_titles, make_plans
from agent_r1.envs.base import Attempt, without_answer_tags
from agent_r1.envs.kinds import agent_of, scripts_of
from agent_r1.envs.scripts import said, scripted
from agent_r1.envs.shared import Shared
from agent_r1.params import Params
from agent_r1.params.prepare import BUILT_IN
from agent_r1.records import QA, Question, Source, Trajectory, questions_by_id
from agent_r1.rollout.chat import Chat
from agent_r1.rollout.episode import Play
from agent_r1.rollout.episodes import ScriptedSampler, collect
from agent_r1.search.base import Search
from agent_r1.seeds import derive
from agent_r1.tools.search import render_passages

NO_HABITS = {"stop_early": 0.0, "wrong_relation": 0.0, "by_relation": 0.0}  # of `warm_start`


class Demonstrator:
    """Knows how training questions are answered."""

    def __init__(self, settings: Params, questions: Sequence[Question], index: Search) -> None:
        """Raises the errors of `make_plans`."""
        self.env = settings.env
        self.index = index
        self.questions = questions_by_id(questions)
        self.params = settings.warm_start.model_copy(update=NO_HABITS)
        self.plans, self.facts = make_plans(settings.prepare, [row for row in questions if row.env == QA])

    def script(self, question: Question, *, at_once: bool = False) -> list[str]:
        """The actions for a question of real data, or the one from the passages that it finds itself.

        Raises NotBorneOutError.
        """
        passages = self._search(question.text, sys.maxsize) if at_once else None
        reading = Reading(self._search, self.env.max_steps, self.params.quotes)
        return act_from_titles(self.plans[question.question_id], question, reading, passages)

    def play(
        self, attempts: Sequence[Attempt], shared: Shared, chat: Chat, *, seed: int, play: Play
    ) -> list[Trajectory]:
        """Demonstrations in place of attempts; none where the demonstrator cannot, or does not succeed.

        Their actions' tokens are DEMONSTRATION: no policy sampled them, and there is no logprob of one.
        """
        playable = []
        scripts = []
        for attempt in attempts:
            with suppress(NotBorneOutError):
                player, script = self._player(attempt, seed)
                playable.append(player)
                scripts.append(script)
        played = collect(ScriptedSampler(scripts, chat), chat, playable, shared, seed=seed, play=play)
        return [_demonstration(trajectory) for trajectory in played if trajectory.success]

    def require(self, questions: Sequence[Question]) -> None:
        """Raises ValueError, which names the environment, if nobody demonstrates the questions of one."""
        for env in {question.env for question in questions}:
            if agent_of(env, self.env) or (env != QA and "demonstrator" not in scripts_of(env)):
                raise ValueError(f"nobody demonstrates env {env!r}; set train.rollout.demonstrate: 0")

    def _player(self, attempt: Attempt, seed: int) -> tuple[Attempt, Iterable[str]]:
        question = self.questions[attempt.question_id]
        if question.env != QA:
            return scripted(attempt, scripts_of(question.env)["demonstrator"], seed)
        if question.dataset == BUILT_IN:
            calculator = self.env.tools.calculator is not None
            rng = random.Random(derive(seed, "demonstration", question.question_id))
            plan = self.plans[question.question_id]
            actions = demonstrate(plan, question, self.facts, self.params, rng, calculator=calculator)
        else:
            actions = self.script(question)
        if self.env.answers == "plain":
            actions = [without_answer_tags(action) for action in actions]
        return attempt, [*actions, *repeat(said(["unknown"]), self.env.max_steps)]  # where a limit cuts an action

    def _search(self, query: str, characters: int = 0) -> Pages:
        [passages] = self.index.search([query], self.env.top_k)
        text = render_passages(passages)[: characters or self.env.max_result_characters]
        lines = zip(passages, text.split("\n"), strict=False)  # the last passages may be cut off
        return [(passage.title, line.removeprefix(f"{' '.join(passage.title.split())}: ")) for passage, line in lines]


def _demonstration(trajectory: Trajectory) -> Trajectory:
    source = np.where(trajectory.action_mask, np.uint8(Source.DEMONSTRATION), trajectory.source)
    return replace(trajectory, source=source)
