"""Five episodes of a run before anything is trained: `agent-r1 try RUN`."""

from __future__ import annotations

from agent_r1 import params
from agent_r1.credit import own as own_rewards
from agent_r1.credit.rewards import step_rewards
from agent_r1.envs.kinds import require_playable
from agent_r1.evaluation.protocols import open_exam
from agent_r1.evaluation.transcript import LABEL, transcript
from agent_r1.harmless import harmless
from agent_r1.learn.checkpoint import peek
from agent_r1.learn.model import load_tokenizer
from agent_r1.params import Params
from agent_r1.params.credit import CreditParams
from agent_r1.params.places import RunId, policy_in
from agent_r1.records import Question, Trajectory, words_of
from agent_r1.rollout.chat import Chat
from agent_r1.tables import read_rows
from agent_r1.tools.toolbox import require_own
from agent_r1.training.questions import draw
from flows.overlay import BASE
from flows.policies import Policy, policy_at, policy_of
from flows.terminal import counted

EPISODES = 5


def play(run: RunId, model: str | None, endpoint: str | None) -> list[str]:
    """Plays the first questions of a training greedily; returns each episode as text, and what all came to.

    The run's own tools, rewards and limits hold. Without a model its latest policy plays, or the warm start. Sampling
    is done in this process, and a server is asked once, so that a fault is seen at once.
    """
    settings = params.load()
    config, settings = settings.run(run), at_once(settings.of(run))
    own = own_rewards.load(config.credit.rewards)
    require_own(settings.env)
    rows = [row for row in read_rows(settings.places.questions, Question) if row.split == "train"]
    questions = draw(rows, min(EPISODES, len(rows)), iteration=0, seed=config.seed)
    require_playable(questions, settings.env)
    policy = player(settings, run, model, endpoint)
    chat, asked = Chat(load_tokenizer(policy.path)), {question.question_id: question for question in questions}
    with open_exam("tool_call", questions, chat, settings) as exam, counted("playing", len(questions)) as over:
        if policy.elsewhere:
            played = exam.by_endpoint(*policy.elsewhere, over)
        else:
            played = exam.by_policy(policy.path, policy.updates, policy.beneath(settings), over)
    played = own_rewards.state(own, played, asked, chat.decode, aborted_share=settings.env.aborted_share)
    shown = [transcript(each, asked[each.question_id], chat.decode) for each in played]
    earned = [earnings(each, config.credit, settings.env.max_tokens) for each in played]
    right = sum(each.success for each in played)
    ending = f"{harmless(policy.title)} played {run.label}: {right} of {len(played)} {words_of(questions).right}"
    return [*(f"{text}\n{reward}\n" for text, reward in zip(shown, earned, strict=True)), ending]


def at_once(settings: Params) -> Params:
    """The settings with the sampler in this process, and no patience with servers."""
    server = settings.engine.server.model_copy(update={"retries": 0})
    engine = settings.engine.model_copy(update={"kind": "transformers", "server": server})
    env = settings.env.model_copy(update={"order": "rounds"})
    return settings.model_copy(update={"engine": engine, "env": env})


def player(settings: Params, run: RunId, model: str | None, endpoint: str | None) -> Policy:
    """The policy that plays; under an overlay without a warm start yet, the base's stands in for it."""
    if endpoint and not model:
        raise ValueError("--endpoint is where --model NAME acts; give its name")
    if not settings.places.warm_start.is_dir() and BASE.exists():
        settings = settings.model_copy(update={"places": params.load(BASE).places})
    if endpoint:
        return policy_at(settings, endpoint, str(model))
    trained = peek(policy_in(settings.places.training(run)).parent)
    return policy_of(settings, model or (run if trained else ""))


def earnings(trajectory: Trajectory, credit: CreditParams, max_tokens: int) -> str:
    """The return of an episode as a line: a sum of its parts times their weights."""
    rewards, parts = step_rewards(trajectory, credit, max_tokens)
    weights = {name: weight for name, weight in credit.rewards.weights.items() if weight}
    terms = [f"{weight:g} x {name} {parts[name].sum():.3g}" for name, weight in weights.items()]
    return f"{'reward':<{LABEL}}{rewards.sum():.3g} = {' + '.join(terms)}"
