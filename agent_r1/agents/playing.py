"""Episodes whose loop is outside: a program asks the policy through the gateway, and says what came of it."""

from __future__ import annotations

import asyncio
import gc
import json
import logging
import tempfile
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import AsyncExitStack, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Self

import numpy as np

from agent_r1.agents.gateway import MODEL, Gateway, OpenEpisode, Posted
from agent_r1.agents.programs import Programs
from agent_r1.agents.session import Session
from agent_r1.agents.task import Ending, Task
from agent_r1.answers import exact_match, f1
from agent_r1.envs.base import Attempt
from agent_r1.envs.shared import Shared
from agent_r1.faults import WorldFault
from agent_r1.params.env import EnvParams
from agent_r1.records import CallStatus, Metrics, Outcome, Question, Source, Trajectory
from agent_r1.rollout.chat import Chat
from agent_r1.rollout.codec import Encoded
from agent_r1.rollout.episode import Play, Tape
from agent_r1.rollout.episodes import Act, flowing, together, twice
from agent_r1.rollout.sampling import Sampler
from agent_r1.seeds import derive
from agent_r1.tables import from_line, to_line

logger = logging.getLogger(__name__)


class Outside:
    """The agents outside of a stage, with the gateway through which they ask, and the measures of their episodes."""

    def __init__(self, limits: EnvParams) -> None:
        self._limits = limits
        self.counts = Counter[str]()

    async def __aenter__(self) -> Self:
        async with AsyncExitStack() as opening:
            agents = self._limits.agents
            most = max(agent.concurrency for agent in agents.values())
            self.gateway = await opening.enter_async_context(Gateway(most))
            folder = Path(tempfile.mkdtemp(prefix="agent_r1_agents_"))
            self.programs = await opening.enter_async_context(Programs(agents, most, folder))
            self._open = opening.pop_all()
        gc.freeze()  # what is imported is not searched for garbage, which would take half a second once an iteration
        return self

    async def __aexit__(self, *fault: Any) -> None:
        gc.unfreeze()
        await self._open.__aexit__(*fault)

    def take_measures(self) -> Metrics:
        """The metrics of the episodes since the last call: means of an episode, and shares."""
        counts = self.counts
        self.counts = Counter[str]()
        episodes = counts.pop("episodes", 0)
        visible = counts.pop("shown", 0)
        unchanged = counts.pop("kept", 0)
        shares = {"agent/kept_share": unchanged / visible} if visible else {}
        return shares | {f"agent/{name}": counts[name] / episodes for name in counts}


@dataclass(frozen=True, slots=True)
class Ended:
    """A finished episode, with its measures."""

    trajectory: Trajectory
    counts: Mapping[str, int]
    fault: str = ""  # of its program or the world


def collect(
    sampler: Sampler, chat: Chat, attempts: Sequence[Attempt], shared: Shared, *, seed: int, play: Play
) -> list[Trajectory]:
    """Runs all episodes of agents outside to their ends, as `episodes.collect` does those of the loop of this project.

    An episode that is over is journaled at once, where there is a journal, and not played again. Raises ValueError if
    each of the first `concurrency` episodes of an agent is cut short: then its program is at fault.
    """
    limits = shared.limits
    outside = shared.once(Outside)
    scene = Scene(outside, chat, flowing(sampler, limits.order).act, shared, seed, play)

    def run(indices: Collection[int]) -> dict[int, Ended]:
        ended = dict[int, Ended]()

        async def play(index: int) -> None:
            ended[index] = await scene.play(attempts[index], index)
            if len(indices) == len(attempts):
                scene.require_sound(attempts[index].agent, ended.values(), len(attempts))

        shared.run(together(play(index) for index in indices))
        return ended

    message = "%d of %d agents outside were cut short: %s"
    ended = twice(
        run,
        len(attempts),
        lambda episode: episode.fault if episode.trajectory.aborted else "",
        limits.aborted_share,
        message,
    )
    for episode in ended.values():
        outside.counts.update({"episodes": 1, **episode.counts})
    return [ended[index].trajectory for index in range(len(attempts))]


class Scene:
    """The episodes of one collection."""

    def __init__(self, outside: Outside, chat: Chat, act: Act, shared: Shared, seed: int, play: Play) -> None:
        self._outside = outside
        self._chat = chat
        self._act = act
        self._seed = seed
        self._play = play
        self._limits = shared.limits
        self._examples = shared.examples
        self._journal = shared.journal.beside("episodes") if shared.journal else None
        self._known = dict(_journaled(self._journal)) if self._journal else {}

    async def play(self, attempt: Attempt, number: int) -> Ended:
        """Plays an episode to its end, or takes it from the journal."""
        play = self._play
        parts = (self._seed, play.iteration, attempt.question_id, attempt.sample)
        journaled = self._known.get(derive(*parts))
        if journaled and journaled.trajectory.policy_version == play.policy_version:
            return journaled
        section = self._limits.agents[attempt.agent]
        if attempt.question is None:
            raise ValueError("an agent outside is asked questions that are prepared, and no others")
        session = Session(self._chat, self._limits, section, parts, play, self._examples if section.examples else ())
        episode = OpenEpisode(session, self._act, number, parallel=section.parallel, parts=section.rewards)
        ending, outcome = await self._run(attempt.agent, attempt.question, episode)
        tape = _taped(session, _facts(ending, outcome, attempt.question, section.rewards))
        row = tape.trajectory(attempt, play, parts, outcome, ending.answer or "")
        ended = Ended(row, _counts(session, row, ending), ending.fault)
        self._note(ended)
        if play.over:
            play.over()
        return ended

    def _note(self, ended: Ended) -> None:
        """Keeps an episode in the journal, unless it was cut short."""
        if self._journal and not ended.trajectory.aborted:
            with self._journal.open("a") as file:
                file.write("\n" + json.dumps({"counts": ended.counts, "row": to_line(ended.trajectory, Trajectory)}))

    def _task(self, question: Question, key: str, reward_key: str) -> Task:
        return Task(
            question_id=question.question_id,
            text=question.text,
            setup=json.loads(question.setup or "{}"),
            strata=question.strata,
            base_url=self._outside.gateway.url,
            key=key,
            reward_key=reward_key,
            model=MODEL,
        )

    async def _run(self, agent: str, question: Question, episode: OpenEpisode) -> tuple[Ending, Outcome]:
        """The ending of an episode with what was posted, and its outcome."""
        keys = self._outside.gateway.open(episode)
        try:
            ending = _merged(await self._ending(agent, episode, self._task(question, *keys)), episode.posted)
            return ending, _outcome(episode.session, ending)
        except WorldFault as fault:
            return _merged(Ending(fault=fault.words), episode.posted), Outcome.ABORTED
        finally:
            self._outside.gateway.close(*keys)

    async def _ending(self, agent: str, episode: OpenEpisode, task: Task) -> Ending:
        """The ending of an episode; raises the fault that ends it before its program does."""
        playing = asyncio.create_task(self._outside.programs.play(agent, task))
        try:
            both: set[asyncio.Future[Any]] = {playing, episode.broken}
            await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
            if episode.broken.done():
                episode.broken.result()
            return playing.result()
        finally:
            playing.cancel()
            await asyncio.wait({playing})

    def require_sound(self, agent: str, ended: Iterable[Ended], episodes: int) -> None:
        """Raises ValueError if so many episodes are over as run at a time, and all of them were cut short."""
        faults = [episode.fault for episode in ended if episode.trajectory.aborted]
        first = min(self._limits.agents[agent].concurrency, episodes)
        if len(faults) == first == len(list(ended)):
            kind = OSError if self._outside.gateway.server.starved_s else ValueError  # the first may pass
            raise kind(f"env.agents.{agent}: its first {first} episodes all failed, the last with {faults[-1]}")


def _journaled(path: Path) -> Iterable[tuple[int, Ended]]:
    """The episodes of a journal, by their seeds."""
    for line in path.read_text().splitlines() if path.exists() else ():
        with suppress(json.JSONDecodeError):  # a kill may cut a line short
            fields = json.loads(line)
            row = from_line(fields["row"], Trajectory)
            yield row.seed, Ended(row, fields["counts"])


def _merged(ending: Ending, posted: Posted | None) -> Ending:
    """An ending, with the facts that were posted before it."""
    posted_facts = posted.model_dump(exclude_defaults=True) if posted else {}
    if twice := [name for name, value in asdict(ending).items() if value not in (None, {}) and name in posted_facts]:
        return replace(ending, fault=f"it posted {twice[0]} to /v1/reward, and stated it again in the end")
    return replace(ending, **posted_facts)


def _outcome(session: Session, ending: Ending) -> Outcome:
    """How an episode ended. A program that fails behind an action that it may be unable to bear is data."""
    if session.refused and (ending.fault or ending.answer is None):
        last = session.contexts()[-1][-1].step.call_status if session.drawn else CallStatus.NONE
        malformed = last is CallStatus.MALFORMED and session.refused is Outcome.TURN_LIMIT
        return Outcome.MALFORMED if malformed else session.refused
    if ending.fault:
        return Outcome.MALFORMED if session.may_be_at_fault else Outcome.ABORTED
    return Outcome.ENDED if ending.answer is None else Outcome.ANSWERED


def _facts(ending: Ending, outcome: Outcome, question: Question, parts: Sequence[str]) -> dict[str, float]:
    """The facts of an episode's last step."""
    if ending.fault and outcome in (Outcome.MALFORMED, Outcome.ABORTED):
        return dict.fromkeys(parts, 0.0)
    facts = {name: float(ending.parts.get(name, 0.0)) for name in parts}
    if ending.success is not None:
        facts["success"] = float(ending.success)
    if outcome is Outcome.ANSWERED and question.answers:
        answer = ending.answer or ""
        facts |= {"em": exact_match(answer, question.answers), "f1": f1(answer, question.answers)}
    return facts


def _taped(session: Session, facts: Mapping[str, float]) -> Tape:
    """An episode's tokens and steps; the last step has the facts. Actions of an earlier context are no steps."""
    tape = Tape()
    stored = set[object]()
    for path in session.contexts():
        tape.begin()
        for drawn in path:
            action = drawn.action
            if drawn in stored:
                ids = [*drawn.place.read.ids, *action.token_ids]
                tape.read(Encoded(ids, [Source.PROMPT] * len(ids)))
                continue
            stored.add(drawn)
            tape.read(drawn.place.read)
            start = len(tape.ids)
            tape.sample(action)
            tape.steps.append(replace(drawn.step, action_start=start, action_stop=len(tape.ids)))
    if tape.steps:
        last = tape.steps[-1]
        tape.steps[-1] = replace(last, rewards={**last.rewards, **facts})
    return tape


def _counts(session: Session, row: Trajectory, ending: Ending) -> dict[str, int]:
    """The measures of an episode; tokens are read again where a context holds what an earlier one held."""
    opening = len(session.drawn[0].place.read.ids) if session.drawn else 0
    return {
        **asdict(session.counts),
        "contexts": len(row.context_starts),
        "reread_tokens": int(np.count_nonzero(row.source == Source.PROMPT)) - opening,
        "faults_learned": int(bool(ending.fault) and not row.aborted),
        "aborted": int(row.aborted),
        "never_asked": int(not row.steps),
    }
