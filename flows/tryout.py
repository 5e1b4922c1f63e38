"""A few episodes of a run, before it is trained or after: `agent-r1 try RUN`."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence

from agent_r1 import params
from agent_r1.credit import own as own_rewards
from agent_r1.credit.rewards import step_rewards
from agent_r1.evaluation.protocols import open_exam, training_questions
from agent_r1.evaluation.transcript import LABEL, plain_text, transcript
from agent_r1.harmless import harmless
from agent_r1.learn.checkpoint import peek
from agent_r1.params.credit import CreditParams
from agent_r1.params.places import RunId
from agent_r1.records import Question, Trajectory, questions_by_id
from agent_r1.rollout.chat import Chat
from agent_r1.tools.toolbox import require_own
from agent_r1.training.findings import findings
from flows.policies import Policy, policy_at, policy_of
from flows.terminal import counted

logger = logging.getLogger(__name__)


def _greedily(run: RunId, seed: int, *, by_arrival: bool) -> params.Params:
    """The settings of a run under which one greedy sample of each question is played, and a server is asked once."""
    settings = params.load().of(run)
    server = settings.engine.server.model_copy(update={"retries": 0})
    changes = {
        "engine": settings.engine.model_copy(update={"kind": "transformers", "server": server}),
        "env": settings.env.model_copy(update={"order": "arrival" if by_arrival else "rounds"}),
        "evaluate": settings.evaluate.model_copy(update={"samples": 1, "temperature": 0.0, "seed": seed}),
    }
    return settings.model_copy(update=changes)


def play(
    run: RunId, model: str, endpoint: str | None, *, episodes: int = 5, seed: int = 0, prompt: bool = False
) -> Iterator[str]:
    """Plays training questions of a run greedily; gives each episode with its rewards, and lines on all.

    The seed draws the questions, and is that of all chance in their worlds. With `prompt` an episode is shown with all
    that the policy reads first. Without a model the run's latest policy plays, or the warm start. A server is asked
    once, so that a fault is seen at once.
    """
    credit = params.load().run(run).credit
    settings = _greedily(run, seed, by_arrival=bool(endpoint))
    own_parts = own_rewards.functions(credit.rewards)
    require_own(settings.env)
    questions = questions_by_id(training_questions(settings, episodes))
    policy = _policy(run, model, endpoint, settings)
    chat = policy.chat(settings)
    rows = _played(policy, [*questions.values()], chat, settings)
    rows = own_rewards.state(own_parts, rows, questions, chat.decode, aborted_share=settings.env.aborted_share)
    returns = dict[str, float]()
    for row in rows:
        returns[row.trajectory_id], terms = _reward(row, credit, settings.env.max_tokens)
        text = transcript(row, questions[row.question_id], plain_text(chat.tokenizer), with_prompt=prompt)
        yield f"{text}\n{'reward':<{LABEL}}{terms}\n"
    yield f"{harmless(policy.title)}: {sum(row.success for row in rows):g} of {len(rows)} right"
    yield from findings(rows, returns, [*questions.values()], chat, tools=settings.env.agent is None)


def _policy(run: RunId, model: str, endpoint: str | None, settings: params.Params) -> Policy:
    """The named policy, on this machine or at an endpoint; else the run's latest one, or the warm start."""
    if endpoint:
        return policy_at(settings, endpoint, model)
    is_trained = peek(settings.places.training(run) / "checkpoint") is not None
    return policy_of(settings, model or (run if is_trained else ""))


def _reward(row: Trajectory, credit: CreditParams, max_tokens: int) -> tuple[float, str]:
    """The return of an episode, and how its parts add up to it."""
    rewards, parts = step_rewards(row, credit, max_tokens)
    weights = credit.rewards.weights
    terms = [f"{name} {parts[name].sum():.3g} x {weight:g}" for name, weight in weights.items() if weight]
    return rewards.sum(), f"{rewards.sum():.3g} = {' + '.join(terms)}"


def _played(policy: Policy, questions: Sequence[Question], chat: Chat, settings: params.Params) -> list[Trajectory]:
    logger.info("%s plays %d questions", policy.title, len(questions))
    with open_exam("tool_call", questions, chat, settings) as exam, counted("playing", len(questions)) as on_end:
        if policy.remote:
            return exam.by_endpoint(*policy.remote, on_end)
        return exam.by_policy(policy.weights(settings), on_end)
