"""A few episodes of a run, before it is trained or after: `agent-r1 try RUN`."""

from __future__ import annotations

import logging
import random
from collections.abc import Iterator, Mapping, Sequence

from agent_r1 import params
from agent_r1.credit import own as own_rewards
from agent_r1.credit.batch import Floats
from agent_r1.credit.rewards import step_rewards
from agent_r1.envs.kinds import require_playable
from agent_r1.evaluation.protocols import open_exam
from agent_r1.evaluation.transcript import LABEL, plain_text, transcript
from agent_r1.harmless import harmless
from agent_r1.learn.checkpoint import peek
from agent_r1.params.places import RunId
from agent_r1.records import Question, Trajectory
from agent_r1.rollout.chat import Chat
from agent_r1.tables import read_rows
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


def _terms(parts: Mapping[str, Floats], weights: Mapping[str, float]) -> str:
    return " + ".join(f"{name} {parts[name].sum():.3g} x {weight:g}" for name, weight in weights.items() if weight)


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
    own_parts = own_rewards.load(credit.rewards)
    require_own(settings.env)
    training = [row for row in read_rows(settings.places.questions, Question) if row.split == "train"]
    questions = random.Random(seed).sample(training, min(episodes, len(training)))
    require_playable(questions, settings.env)
    word = model or (run if peek(settings.places.training(run) / "checkpoint") else "")
    policy = policy_at(settings, endpoint, model) if endpoint else policy_of(settings, word)
    tokenizer, chat = policy.read(settings)
    rows = _played(policy, questions, chat, settings)
    by_id = {question.question_id: question for question in questions}
    rows = own_rewards.state(own_parts, rows, by_id, chat.decode, aborted_share=settings.env.aborted_share)
    returns = dict[str, float]()
    for row in rows:
        rewards, parts = step_rewards(row, credit, settings.env.max_tokens)
        returns[row.trajectory_id] = rewards.sum()
        text = transcript(row, by_id[row.question_id], plain_text(tokenizer), with_prompt=prompt)
        yield f"{text}\n{'reward':<{LABEL}}{rewards.sum():.3g} = {_terms(parts, credit.rewards.weights)}\n"
    yield f"{harmless(policy.title)}: {sum(row.success for row in rows):g} of {len(rows)} right"
    yield from findings(rows, returns, questions, chat, tools=settings.env.agent is None)


def _played(policy: Policy, questions: Sequence[Question], chat: Chat, settings: params.Params) -> list[Trajectory]:
    logger.info("%s plays %d questions", policy.title, len(questions))
    with open_exam("tool_call", questions, chat, settings) as exam, counted("playing", len(questions)) as on_end:
        if policy.remote:
            return exam.by_endpoint(*policy.remote, on_end)
        return exam.by_policy(policy.path, policy.updates, policy.base_model(settings), on_end)
