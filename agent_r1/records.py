"""Every record that crosses a stage boundary. Records only check themselves.

Legend for shapes: L = all tokens of a trajectory, K = its steps, C = its contexts.
The Arrow schema of each record is in `agent_r1.tables`.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

Mask = NDArray[np.bool_]
Floats = NDArray[np.float64]
Floats32 = NDArray[np.float32]
Int64s = NDArray[np.int64]
Int32s = NDArray[np.int32]


class Source(enum.IntEnum):
    """Where a token came from. `source == ACTION` is the action mask; it is never rebuilt from text."""

    PROMPT = 0  # the opening of a context; in a later one, history as the chat template renders it again
    ACTION = 1
    OBSERVATION = 2
    TEMPLATE = 3
    DEMONSTRATION = 4  # an action's token that a demonstrator wrote, and no policy sampled


class CallStatus(enum.StrEnum):
    """The fate of a call, or of all calls of an action."""

    OK = "ok"
    MALFORMED = "malformed"
    UNKNOWN_TOOL = "unknown_tool"
    BAD_ARGUMENTS = "bad_arguments"
    FAILED = "failed"
    TIMEOUT = "timeout"
    NONE = "none"  # an action without calls


class StopReason(enum.StrEnum):
    """Why the sampler stopped an action."""

    END = "end"  # the policy sampled its end-of-message token
    LENGTH = "length"  # the action reached `max_action_tokens` or the token budget
    STOP = "stop"  # it completed a text that an agent outside asked to stop at


class Outcome(enum.StrEnum):
    """How an episode ended."""

    ANSWERED = "answered"
    ENDED = "ended"  # a world that asks for no answer came to its end
    TURN_LIMIT = "turn_limit"
    TOKEN_LIMIT = "token_limit"
    MALFORMED = "malformed"
    ABORTED = "aborted"


QA = "qa"  # the environment of question answering
GREEDY = -1  # the sample that is the greedy answer, beside those at a temperature
LONGEST_STATE = 256  # characters of a state's key
Decode = Callable[[Sequence[int]], str]  # token ids -> text
Metrics = dict[str, float]  # by name
Json = dict[str, Any]  # an object of JSON


@dataclass(frozen=True, kw_only=True, slots=True)
class Question:
    """One task."""

    question_id: str  # unique among all that are prepared
    dataset: str  # "atlas", or its name under prepare.files
    split: str  # "train", "dev" or "test"
    text: str  # the question as a person would ask it
    env: str = QA  # the environment that it is attempted in
    setup: str = ""  # the environment's start as JSON: a board, a name of params.yaml; "" under QA
    strata: dict[str, str]  # by which results are told apart, such as {"hops": "2", "kind": "bridge"}
    answers: list[str] = field(default_factory=list)  # accepted ones, the canonical one first; never empty under QA
    gold_titles: list[str] = field(default_factory=list)  # titles of the passages that hold the evidence

    def __post_init__(self) -> None:
        if not self.text.strip():
            raise ValueError(f"question {self.question_id!r}: field 'text' is empty")
        if self.env == QA and not (self.answers and all(answer.strip() for answer in self.answers)):
            needed = f"needs at least one answer, none of them empty; got {self.answers!r}"
            raise ValueError(f"question {self.question_id!r}: field 'answers' {needed}")


def questions_by_id(questions: Iterable[Question]) -> dict[str, Question]:
    """Questions by their ids, in their order; of those with one id the last."""
    return {question.question_id: question for question in questions}


def of_split(questions: Iterable[Question], split: str) -> list[Question]:
    """The questions of a split, in their order."""
    return [question for question in questions if question.split == split]


class Words(NamedTuple):
    """An environment's words for success and for its lack."""

    right: str
    wrong: str


_WORDS = {
    QA: Words("exact match", "no exact match"),
    "bandit": Words("better arm", "worse arm"),
    "frozen_lake": Words("goal reached", "goal not reached"),
    "sokoban": Words("solved", "not solved"),
}


def words_of(questions: Sequence[Question]) -> Words:
    """The words of the questions' environment; plain ones where it has none, or the questions have several."""
    envs = {question.env for question in questions}
    return _WORDS.get(envs.pop() if len(envs) == 1 else "", Words("success", "no success"))


@dataclass(frozen=True, kw_only=True, slots=True)
class Passage:
    """One searchable piece of text."""

    passage_id: str  # unique in its corpus
    title: str  # as in gold_titles
    text: str  # the body, without the title


@dataclass(frozen=True, kw_only=True, slots=True)
class Call:
    """A call of an action. A malformed action makes one too, without a tool."""

    tool: str = ""  # name the policy called
    arguments: str = ""  # as JSON
    status: CallStatus
    latency_s: float = 0.0  # seconds the tool took; not part of the reproducible bits


def status_of(calls: Sequence[Call]) -> CallStatus:
    """The status of the first call that did not succeed; OK where all did, NONE where there is none."""
    failed = (call.status for call in calls if call.status is not CallStatus.OK)
    return next(failed, CallStatus.OK if calls else CallStatus.NONE)


@dataclass(frozen=True, kw_only=True, slots=True)
class Step:
    """One MDP transition: the action's token span, and its consequences."""

    action_start: int  # index of the action's first token in token_ids
    action_stop: int  # one past its last sampled token
    stop_reason: StopReason
    calls: list[Call]  # in the order of the action; an answer makes none
    rewards: dict[str, float]  # named reward parts as the environment saw them, unweighted
    state: str = ""  # the key of the environment's state before it, equal for equal ones; "" where none is stated
    # Seconds since the step before it, or the opening, waiting for others too; not part of the reproducible bits.
    duration_s: float = field(default=0.0, compare=False, repr=False)

    def __post_init__(self) -> None:
        if not 0 <= self.action_start < self.action_stop:
            raise ValueError(f"step spans tokens [{self.action_start}, {self.action_stop}): it needs at least one")
        if len(self.state) > LONGEST_STATE:
            raise ValueError(f"step: field 'state' has {len(self.state)} characters; it holds at most {LONGEST_STATE}")

    @property
    def call_status(self) -> CallStatus:
        """The status of all calls together; see `status_of`."""
        return status_of(self.calls)


@dataclass(frozen=True, kw_only=True, slots=True)
class Trajectory:
    """The finished record of one episode."""

    trajectory_id: str  # "{iteration}/{question_id}/{sample}"
    question_id: str
    group: int  # index of the question within the iteration
    sample: int  # index of the episode within its group, or GREEDY
    seed: int  # the episode's own seed, derived from (seed, iteration, question, sample)
    policy_version: int  # weights that sampled it: updates since the warm start
    iteration: int
    token_ids: Int32s  # [L] exactly as sampled or appended
    source: NDArray[np.uint8]  # [L] values of Source
    logprobs: Floats32  # [L] the sampler's, nats; 0 where source is not ACTION
    context_starts: list[int]  # [C] index where each context begins, 0 first; append-only episodes have [0]
    steps: list[Step]  # [K]
    outcome: Outcome
    answer: str  # the text between the answer tags, "" without one

    def __post_init__(self) -> None:
        length = len(self.token_ids)
        this = f"trajectory {self.trajectory_id!r}"
        for name, values in (("source", self.source), ("logprobs", self.logprobs)):
            if len(values) != length:
                raise ValueError(f"{this}: field {name!r} has {len(values)} entries for {length} tokens")
        if any(step.action_stop > length for step in self.steps):
            raise ValueError(f"{this}: a step ends after token {length}")
        bounds = [*self.context_starts, length]
        starts = f"{this}: field 'context_starts' is {self.context_starts}"
        rising = all(start < stop for start, stop in pairwise(bounds)) or bounds == [0, 0]
        if bounds[0] != 0 or not rising:
            raise ValueError(f"{starts} for {length} tokens; it begins with 0 and rises")
        if any(step.action_start < start < step.action_stop for step in self.steps for start in self.context_starts):
            raise ValueError(f"{starts}, and one of them cuts an action in two")

    @property
    def contexts(self) -> list[slice]:
        """[C] the tokens of each context, which the policy reads as one sequence, from position 0."""
        return [slice(*bounds) for bounds in pairwise([*self.context_starts, len(self.token_ids)])]

    @property
    def replies(self) -> list[slice]:
        """[K] the tokens between each action and the next one, or the end."""
        stops = [*(step.action_start for step in self.steps[1:]), len(self.token_ids)]
        return [slice(step.action_stop, stop) for step, stop in zip(self.steps, stops, strict=False)]

    def ids(self, span: slice, source: Source | None = None) -> list[int]:
        """The token ids of a span, or of one source in it."""
        ids = self.token_ids[span]
        indices: list[int] = (ids if source is None else ids[self.source[span] == source]).tolist()
        return indices

    @property
    def aborted(self) -> bool:
        """Whether a fault of the world cut it short."""
        return self.outcome is Outcome.ABORTED

    @property
    def counts(self) -> bool:
        """Whether credit knows of it: the world did not cut it short, and the policy acted."""
        return not self.aborted and bool(self.steps)

    @property
    def truncated(self) -> bool:
        """Whether a limit cut it: of tokens, of steps, or of one action's tokens."""
        cut = any(step.stop_reason is StopReason.LENGTH for step in self.steps)
        return cut or self.outcome in (Outcome.TOKEN_LIMIT, Outcome.TURN_LIMIT)

    @property
    def success(self) -> float:
        """1.0 or 0.0: `success` as the environment stated it on the last step, else `em`, else 0.0."""
        stated = self.steps[-1].rewards if self.steps else {}
        return stated.get("success", stated.get("em", 0.0))

    @property
    def action_mask(self) -> Mask:
        """[L] true where the policy sampled the token."""
        return np.equal(self.source, Source.ACTION)

    @property
    def demonstration_mask(self) -> Mask:
        """[L] true where a demonstrator wrote the token of an action."""
        return np.equal(self.source, Source.DEMONSTRATION)


@dataclass(frozen=True, kw_only=True, slots=True)
class Credit:
    """The outcome of credit assignment for one trajectory."""

    trajectory_id: str
    return_: float  # undiscounted sum of the step rewards
    advantages: Floats32  # [L] exactly 0 where the advantage mask drops the token
    values: Floats32  # [L] the critic's, before the update; 0 without a critic
    value_targets: Floats32  # [L] the critic's targets
    reference_logprobs: Floats32  # [L] the reference's of action tokens, nats; 0 elsewhere or without one
    loss_mask: Mask  # [L] tokens the policy loss runs over
    critic_mask: Mask  # [L] tokens the value loss runs over
    kept: bool  # false: filtered out, no part of the update in any way; its masks are empty

    def __post_init__(self) -> None:
        length = len(self.advantages)
        for name in ("values", "value_targets", "reference_logprobs", "loss_mask", "critic_mask"):
            entries = len(getattr(self, name))
            if entries != length:
                problem = f"field {name!r} has {entries} entries, 'advantages' has {length}"
                raise ValueError(f"credit of {self.trajectory_id!r}: {problem}")


@dataclass(frozen=True, kw_only=True, slots=True)
class Proof:
    """The learner's scores of a trajectory that proved that the sampler runs the learner's weights."""

    trajectory_id: str
    learner_logprobs: Floats32  # [L] of every token, nats; 0 at a context's first


@dataclass(frozen=True, kw_only=True, slots=True)
class Prediction:
    """One answer of one evaluated agent to one question."""

    run: str
    seed: int
    policy_version: int
    question_id: str
    sample: int = 0  # of the answers to the question, or GREEDY
    answer: str
    success: float  # 1.0 or 0.0, as the environment judges; of an answered question its exact match
    facts: dict[str, float]  # further facts of the episode; of an answered question its scores
    steps: int
    tool_calls: int  # malformed ones too, and moves
    tokens_read: int  # of prompt, observations and the template around them, each counted once
    tokens_sampled: int  # of the actions
