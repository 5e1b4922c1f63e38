"""One running episode: token ids are only ever appended to its context."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from agent_r1.envs.base import Attempt, Env, Restart, Transition, is_prose, split_action, stored_state
from agent_r1.faults import WorldFault
from agent_r1.params.env import ContextParams, EnvParams
from agent_r1.records import CallStatus, Outcome, Source, Step, StopReason, Trajectory
from agent_r1.rollout.calls import leniently, types_of
from agent_r1.rollout.chat import Chat, Dialogue
from agent_r1.rollout.codec import Encoded
from agent_r1.rollout.sampling import Action, EngineError, Request
from agent_r1.seeds import derive

ASK = "Now sum up what you know so far: you go on with your summary and the text above alone."
SO_FAR = "What you know so far:"


def in_context(env: Env, context: ContextParams) -> Env:
    """The environment with its episode read as `env.context` says."""
    match context.kind:
        case "window":
            return Window(env, context.every)
        case "summary":
            return Summary(env, context.every)
    return env


class _Around(Env):
    def __init__(self, env: Env, interval: int) -> None:
        self._env = env
        self._interval = interval
        self._steps = 0

    @property
    def state(self) -> str:
        return self._env.state

    async def open(self) -> None:
        await self._env.open()
        self.system = self._env.system
        self.user = self._env.user
        self.tools = self._env.tools
        self.examples = self._env.examples

    @property
    def example_call(self) -> str:
        return self._env.example_call

    def redraw(self, seed: int) -> None:
        self._env.redraw(seed)

    async def close(self) -> None:
        await self._env.close()

    async def _answer(self, action: str) -> Transition:
        """The wrapped environment's answer."""
        transition = await self._env.step(action)
        if transition.restart:
            raise ValueError(
                f"{type(self._env).__name__} rewrites its contexts itself; set env.context: {{kind: append, every: 0}}"
            )
        self._steps += 1
        return transition


class Window(_Around):
    """The opening and the last `every` exchanges: from then on, every step begins a new context."""

    async def step(self, action: str) -> Transition:
        """The environment's answer; see `Env.step`."""
        transition = await self._answer(action)
        if transition.outcome is not None or self._steps <= self._interval:
            return transition
        return replace(transition, restart=Restart(user=self.user, keep=self._interval))


class Summary(_Around):
    """After `every` steps of the environment the policy is asked for a summary, below the last observation.

    The next context opens with the question, the summary without its thought, and the last observations. The summary is
    an action like any other, and a step of the trajectory. The environment never sees it, no limit of steps counts it,
    and it earns nothing: each reward of the step before is 0.

    Source: SUPO (arXiv 2510.06727), whose summaries are asked for where the context is full.
    """

    _said: Transition | None = None  # the environment's answer, while a summary is asked for

    @property
    def asks(self) -> bool:
        """Whether the next action is a summary."""
        return self._said is not None

    @property
    def state(self) -> str:
        """None for a summary, which is no action on the environment's state."""
        return "" if self.asks else super().state

    async def step(self, action: str) -> Transition:
        """The environment's answer, or after a summary the new context; see `Env.step`."""
        if self._said:
            reply = self._said
            self._said = None
            user = "\n\n".join([self.user, f"{SO_FAR}\n{_summary(action)}", *reply.observations])
            return Transition(restart=Restart(user=user), rewards=dict.fromkeys(reply.rewards, 0.0))
        transition = await self._answer(action)
        if transition.outcome is not None or self._steps % self._interval:
            return transition
        self._said = transition
        *rest, last = transition.observations
        return replace(transition, observations=(*rest, f"{last}\n\n{ASK}"))


def _summary(action: str) -> str:
    """The text of an action without its thought."""
    return "".join(piece.text for piece in split_action(action) if piece.kind != "thought").strip()


@dataclass(frozen=True, kw_only=True, slots=True)
class StepView:
    """A step that was just taken, as text for people. Nothing of it is tokenised again."""

    step: Step
    action: str  # as its environment read it: with the thought's tag where the prompt wrote it, without the end token
    observations: tuple[str, ...]  # the policy's next reading, for each call; none where the episode ends
    outcome: Outcome | None  # None while the episode goes on
    answer: str  # the text between the answer tags, "" without one
    fault: str  # the world's, where the episode is ABORTED, else ""
    tokens: int  # of the episode so far

    def __str__(self) -> str:
        """The action, said to be a sentence where it is one, and the observations."""
        sentence = self.step.call_status is CallStatus.MALFORMED and is_prose(self.action)
        return "\n".join([self.action + " (no call, no answer)" * sentence, *self.observations])


@dataclass(frozen=True, kw_only=True, slots=True)
class Play:
    """How episodes are played, beside their seed."""

    iteration: int = 0
    policy_version: int = 0
    greedy: bool = False  # the likeliest tokens
    told: bool = False  # requests hold messages too, for a sampler that knows no tokens
    over: Callable[[], None] | None = None  # called as each episode ends


PLAY = Play()


@dataclass(eq=False, slots=True)
class Tape:
    """What an episode is made of: its tokens as they are read and sampled, in contexts, and its steps."""

    ids: list[int] = field(default_factory=list)
    source: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    starts: list[int] = field(default_factory=lambda: [0])  # where each context begins
    steps: list[Step] = field(default_factory=list)

    @property
    def context(self) -> list[int]:
        """The tokens of the last context."""
        return self.ids[self.starts[-1] :]

    def begin(self) -> None:
        """Begins a context, unless nothing stands before it."""
        if self.ids:
            self.starts.append(len(self.ids))

    def read(self, tokens: Encoded) -> None:
        self.ids += tokens.ids
        self.source += tokens.source
        self.logprobs += [0.0] * len(tokens.ids)

    def sample(self, action: Action) -> None:
        self.ids += action.token_ids
        self.source += [Source.ACTION] * len(action.token_ids)
        self.logprobs += action.logprobs.tolist()

    def trajectory(
        self, attempt: Attempt, play: Play, parts: Sequence[int | str], outcome: Outcome, answer: str
    ) -> Trajectory:
        """The record of the episode; `parts` are those of its seed."""
        return Trajectory(
            trajectory_id=f"{play.iteration}/{attempt.question_id}/{attempt.sample}",
            question_id=attempt.question_id,
            group=attempt.group,
            sample=attempt.sample,
            seed=derive(*parts),
            policy_version=play.policy_version,
            iteration=play.iteration,
            token_ids=np.array(self.ids, np.int32),
            source=np.array(self.source, np.uint8),
            logprobs=np.array(self.logprobs, np.float32),
            context_starts=self.starts,
            steps=self.steps,
            outcome=outcome,
            answer=answer,
        )


class PromptTooLong(ValueError):
    """A question leaves no room for an action in its context."""

    def __init__(self, question: str, tokens: int, most: int, examples: int = 0) -> None:
        """`examples` of the prompt's tokens are those of `env.examples`."""
        of_these = f", {examples} of them for env.examples," if examples else ""
        fewer = "shorten env.examples" if examples else "show fewer passages"
        super().__init__(
            f"the prompt of question {question!r} has {tokens} tokens{of_these} and max_tokens is {most}: no room for "
            f"an action; raise env.max_tokens or {fewer}"
        )
        self.tokens = tokens
        self.most = most


def require_fit(action: Action, request: Request, end_ids: Collection[int], who: str) -> None:
    """Raises EngineError for an action that does not answer its request; an engine is trusted no further."""
    ids = action.token_ids
    logprobs = action.logprobs
    most = request.max_tokens
    if not 1 <= len(ids) == len(logprobs) <= most:
        raise EngineError(f"an action of at most {most} tokens has {len(ids)} and {len(logprobs)} logprobs")
    if not np.isfinite(logprobs).all():
        raise EngineError(
            f"an action's logprobs are not all finite: {who}; start again from the checkpoint with a lower "
            "train.update.learning_rate"
        )
    if (action.stop_reason is StopReason.END) != (ids[-1] in end_ids):
        raise EngineError(f"an action stopped by {action.stop_reason} ends with token {ids[-1]}")


class Episode:
    """The state of one running episode."""

    def __init__(self, attempt: Attempt, chat: Chat, limits: EnvParams, seed: int, play: Play = PLAY) -> None:
        """`seed` is the collection's."""
        self._attempt = attempt
        self._chat = chat
        self._limits = limits
        self._play = play
        self._seed_parts: tuple[int | str, ...] = (seed, play.iteration, attempt.question_id, attempt.sample)
        self._env = in_context(attempt.env(derive(*self._seed_parts, "env")), limits.context)
        self._tape = Tape()
        self._answer = ""
        self.lenient = 0  # actions whose calls were read leniently
        self.outcome: Outcome | None = None
        self.fault = self.full = ""  # the world's fault, and the words with which the model's context was full

    async def open(self) -> None:
        """Opens the environment and begins the first context; raises PromptTooLong if an action has no room there."""
        self._step_began_s = time.monotonic()
        try:
            await self._env.open()
        except WorldFault as fault:
            self.abort(fault)
            return
        self._dialogue = Dialogue.of(self._chat, self._env)
        opening = self._dialogue.opening
        tokens = len(opening.ids)
        if tokens >= self._limits.max_tokens:
            bare = Dialogue(self._chat, self._env.system, self._env.user, self._env.tools)
            examples = tokens - len(bare.opening.ids)
            raise PromptTooLong(self._attempt.question_id, tokens, self._limits.max_tokens, examples)
        self._tape.read(opening)

    async def close(self) -> None:
        await self._env.close()

    def abort(self, fault: WorldFault) -> None:
        """Ends the episode, because the world failed between two steps."""
        self.outcome = Outcome.ABORTED
        self.fault = fault.words

    def request(self, index: int) -> Request:
        """The next action to sample; `index` is the episode's number. Behind a prefix all chance is drawn anew."""
        prefix = self._attempt.prefix
        if prefix and len(self._tape.steps) == prefix.step:
            self._seed_parts += (prefix.step, prefix.draw)
            self._env.redraw(derive(*self._seed_parts, "env"))
        return Request(
            episode=index,
            step=len(self._tape.steps),
            context=self._tape.context,
            seed=derive(*self._seed_parts, len(self._tape.steps)),
            max_tokens=min(self._limits.max_action_tokens, self._room()),
            greedy=self._play.greedy,
            summary=isinstance(self._env, Summary) and self._env.asks,
            messages=self._dialogue.messages() if self._play.told else (),
        )

    def given(self, request: Request) -> Action | None:
        """The action that the attempt's prefix has for a request; None behind the prefix, and without one.

        A ValueError says that the stored step had another context.
        """
        prefix = self._attempt.prefix
        number = len(self._tape.steps)
        if prefix is None or number > prefix.step:
            return None
        stored = prefix.trajectory
        step = prefix.trajectory.steps[number]
        context_start = max(start for start in stored.context_starts if start <= step.action_start)
        if request.context != stored.ids(slice(context_start, step.action_start)):
            raise ValueError(
                f"the context of step {number} of trajectory {stored.trajectory_id!r} is another one now: its tools, "
                "its prompts or the chat template have changed; set them back, or train the run again"
            )
        if number == prefix.step:
            return None
        action = slice(step.action_start, step.action_stop)
        return Action(token_ids=stored.ids(action), logprobs=stored.logprobs[action], stop_reason=step.stop_reason)

    async def advance(self, request: Request, action: Action) -> StepView:
        """Appends the sampled action, lets the environment answer it, and appends the answer."""
        self._check(request, action)
        start = len(self._tape.ids)
        self._tape.sample(action)
        closed = action.stop_reason is StopReason.END
        action_text = self._chat.decode(action.token_ids[:-1] if closed else action.token_ids)
        text = self._chat.understood(self._chat.opened(request.context) + action_text, self._env.tools)
        if self._limits.calls == "lenient":
            strict = text
            text = leniently(strict, types_of(self._env.tools))
            self.lenient += text != strict
        state = stored_state(self._env)
        try:
            transition = await self._env.step(text)
        except WorldFault as fault:
            transition = Transition(outcome=Outcome.ABORTED, fault=fault.words)
        self._observe(transition, action.token_ids, closed)
        read = self.outcome is None
        now_s = time.monotonic()
        step = Step(
            action_start=start,
            action_stop=start + len(action.token_ids),
            stop_reason=action.stop_reason,
            calls=list(transition.calls),
            rewards=transition.rewards | (transition.rewards_when_read if read else {}),
            state=state,
            duration_s=now_s - self._step_began_s,
        )
        self._step_began_s = now_s
        self._tape.steps.append(step)
        return StepView(
            step=step,
            action=text,
            observations=transition.observations if read else (),
            outcome=self.outcome,
            answer=self._answer,
            fault=self.fault,
            tokens=len(self._tape.ids),
        )

    def finish(self) -> Trajectory:
        if self.outcome is None:
            raise RuntimeError(f"the episode of question {self._attempt.question_id!r} is not over")
        return self._tape.trajectory(self._attempt, self._play, self._seed_parts, self.outcome, self._answer)

    def _check(self, request: Request, action: Action) -> None:
        """Refuses an action that does not answer the request."""
        who = f"question {self._attempt.question_id!r}, sample {self._attempt.sample}, step {request.step}"
        require_fit(action, request, self._chat.end_ids, f"{who}, weights of version {self._play.policy_version}")
        if self._tape.context != request.context:
            raise RuntimeError("a context changed while its action was sampled: only its episode may append to it")

    def _observe(self, transition: Transition, action: list[int], closed: bool) -> None:
        if transition.outcome is not None:
            self.outcome = transition.outcome
            self._answer = transition.answer
            self.fault = transition.fault
            return
        reply = self._dialogue.reply(action, transition.observations, closed=closed, restart=transition.restart)
        if len(reply.ids) >= (self._limits.max_tokens if reply.restarts else self._room()):
            self.outcome = Outcome.TOKEN_LIMIT
            return
        if reply.restarts:
            self._tape.begin()
        self._tape.read(reply)

    def _room(self) -> int:
        return self._limits.max_tokens - (len(self._tape.ids) - self._tape.starts[-1])
