"""The policy that reinforcement learning starts from: a model that was shown demonstrations and conversations.

Both are trajectories like any other; learning from them is supervised.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from agent_r1.data.demonstrations import Demonstration, with_tools, without_tools
from agent_r1.data.from_titles import borne_out
from agent_r1.devices.sharing import ALONE, Ranks
from agent_r1.envs import tool_env
from agent_r1.envs.base import Attempt, opened, without_answer_tags
from agent_r1.envs.conversations import read_conversations
from agent_r1.envs.kinds import attempts_at, played_by, scripts_of
from agent_r1.envs.scripts import texts_of
from agent_r1.envs.shared import Shared
from agent_r1.envs.tool_env import naive_rag_attempts
from agent_r1.learn import adapter, builtin
from agent_r1.learn.model import load_policy, load_tokenizer, recompute_activations
from agent_r1.params import Params
from agent_r1.params.env import EnvParams
from agent_r1.params.prepare import BUILT_IN
from agent_r1.pretrained import compute_dtype
from agent_r1.records import QA, Outcome, Passage, Question, Trajectory, of_split
from agent_r1.rollout.chat import Chat
from agent_r1.rollout.episodes import ScriptedSampler, collect
from agent_r1.rollout.prompts import without_room
from agent_r1.search.index import Cached
from agent_r1.seeds import derive
from agent_r1.teaching.conversations import retell
from agent_r1.teaching.demonstrator import NO_HABITS, Demonstrator
from agent_r1.teaching.supervised import Lessons, Unfinished, compute_of, fit

logger = logging.getLogger(__name__)

LOOKED_AT = 16  # demonstrations of which examples are chosen
SHOWN_GAMES = 500  # whose texts a tokenizer learns its words from


def train_on_demonstrations(
    settings: Params,
    questions: Sequence[Question],
    passages: Sequence[Passage],
    index: Cached,
    *,
    ranks: Ranks = ALONE,
    unfinished: Unfinished | None = None,
) -> tuple[PreTrainedModel, PreTrainedTokenizerFast]:
    """A model and its tokenizer, trained on demonstrations of the training questions, and on conversations.

    Without `model.path` both are small and made from scratch, in float32, and the tokenizer learns its words from these
    texts and the passages. With it, both come from that folder or hub id, with the precision, adapters and gradient
    checkpointing of a training. The demonstrator searches the index. This is the leader's part; every rank is left with
    its part of the model. An `unfinished` training goes on.
    """
    source = settings.warm_start.conversations
    conversations = read_conversations(Path(source)) if source else []
    asks = [row for row in of_split(questions, "train") if row.env == QA]
    games = [row for row in of_split(questions, "train") if "demonstrator" in scripts_of(row.env)]
    scripts: tuple[list[Demonstration], list[Demonstration]] = ([], [])
    if asks or (settings.prepare.asks and not games):
        scripts = _demonstrations(settings, asks, index)
    if settings.model.path:
        tokenizer = load_tokenizer(settings.model.path, template=settings.model.template)
    else:
        tokenizer = builtin.train_tokenizer(
            chain(
                _texts(passages, [*chain(*scripts)]),
                _games_as_text(games, settings),
                (row.text for row in conversations),
            ),
            settings.warm_start.vocab_size,
        )
    chat = Chat(tokenizer)
    _require_room(*scripts, games, chat, index, settings)
    model = _to_fine_tune(settings, ranks) if settings.model.path else _new_model(settings, tokenizer)
    lessons = Lessons.of(
        [*act_out(*scripts, chat, index, settings), *_play_out(games, chat, settings)],
        retell(conversations, questions, chat, index, settings) if conversations else [],
        settings.warm_start.observation_weight,
    )
    built_in = None if settings.model.path else (model.config.to_dict(), model.state_dict())
    ranks.gather([(lessons, built_in)], Lessons)
    _teach(model, lessons, settings, ranks, unfinished)
    return model, tokenizer


def _require_room(
    searching: Sequence[Demonstration],
    answering: Sequence[Demonstration],
    games: Sequence[Question],
    chat: Chat,
    index: Cached,
    settings: Params,
) -> None:
    """Raises as `without_room` for questions that are demonstrated step by step, or from passages."""
    acting = [demonstration.question for demonstration in searching]
    if settings.warm_start.demonstrations:
        acting.extend(games)
    with Shared(settings.env, index) as shared:
        without_room(attempts_at(acting, shared, outside=False), chat, shared, "demonstrated questions")
        if answering:
            attempts = naive_rag_attempts([demonstration.question for demonstration in answering], shared)
            without_room(attempts, chat, shared, "questions demonstrated from passages")


def _new_model(settings: Params, tokenizer: PreTrainedTokenizerFast) -> PreTrainedModel:
    taught = settings.warm_start
    return builtin.new_model(
        tokenizer,
        hidden_size=taught.hidden_size,
        layers=taught.layers,
        heads=taught.heads,
        max_tokens=settings.env.max_tokens,
        seed=taught.seed,
    )


def _demonstrations(
    settings: Params, questions: Sequence[Question], index: Cached
) -> tuple[list[Demonstration], list[Demonstration]]:
    """Demonstrations with the search tool and from passages, of real questions as far as the index bears them out."""
    taught = settings.warm_start
    demonstrator = Demonstrator(settings, questions, index)
    usable, scripts = borne_out(questions, taught.demonstrations, demonstrator.script)
    calculator = settings.env.tools.calculator is not None
    searching = with_tools(
        usable, demonstrator.plans, demonstrator.facts, taught, calculator=calculator, scripts=scripts
    )
    usable, scripts = borne_out(questions, taught.naive_rag_demonstrations, partial(demonstrator.script, at_once=True))
    if questions and not usable:
        return searching, []
    return searching, without_tools(usable, demonstrator.plans, index, settings.env.top_k, taught, scripts)


def demonstrate_examples(
    settings: Params, questions: Sequence[Question], index: Cached, count: int
) -> list[dict[str, Any]]:
    """Rows for `env.examples`: the `count` shortest demonstrations of the first questions that the index bears out.

    The observations are those of the questions' environment. The first action of a row is a call without a thought:
    behind a thought an untaught model often ends. Raises ValueError if fewer can be demonstrated.
    """
    taught = settings.warm_start.model_copy(
        update=NO_HABITS | {"demonstrations": LOOKED_AT, "naive_rag_demonstrations": 0, "seed": 0}
    )
    calm = settings.model_copy(update={"warm_start": taught})
    demonstrations, _ = _demonstrations(calm, questions, index)
    distinct = {demonstration.question.question_id: demonstration for demonstration in demonstrations}
    if len(distinct) < count:
        raise ValueError(f"fewer than {count} training questions can be demonstrated; see the reasons above")
    bare = settings.env.model_copy(update={"examples": ""})
    with Shared(bare, index) as shared:
        rows = [{"messages": _messages(demonstration, shared)} for demonstration in distinct.values()]
    return sorted(rows, key=lambda row: len(str(row)))[:count]


def _messages(demonstration: Demonstration, shared: Shared) -> list[dict[str, str]]:
    """A demonstration as a conversation, without the thought of its first action."""
    messages = [{"role": "user", "content": demonstration.question.text}]
    env = shared.run(opened(attempts_at([demonstration.question], shared, outside=False)[0].env(0)))
    first, *others = demonstration.actions
    for action in (first.partition("</think>\n")[2], *others):
        text = without_answer_tags(action) if shared.limits.answers == "plain" else action
        transition = shared.run(env.step(text))
        messages.append({"role": "assistant", "content": text})
        messages += [{"role": "tool", "content": observation} for observation in transition.observations]
    return messages


def train_with_leader(settings: Params, ranks: Ranks, unfinished: Unfinished) -> PreTrainedModel:
    """The followers' part while the leader is in `train_on_demonstrations`. Returns this rank's part of the model."""
    model = _to_fine_tune(settings, ranks) if settings.model.path else None
    [(lessons, built_in)] = ranks.gather(list[tuple[Lessons, Any]](), Lessons)
    if model is None:
        model = builtin.copy_of(*built_in)
    _teach(model, lessons, settings, ranks, unfinished)
    return model


def _teach(
    model: PreTrainedModel, lessons: Lessons, settings: Params, ranks: Ranks, unfinished: Unfinished | None
) -> None:
    if not settings.model.path:
        torch.nn.Module.to(model, ranks.device)
    dtype = _dtype(settings, ranks)
    ranks.share_out(model, dtype)
    fit(
        model,
        lessons,
        settings.warm_start,
        compute=compute_of(model, settings.warm_start, dtype=dtype, ranks=ranks),
        offload=settings.learner.optimizer_offload,
        unfinished=unfinished,
    )


def _dtype(settings: Params, ranks: Ranks) -> torch.dtype:
    return compute_dtype(settings.model.dtype, ranks.device) if settings.model.path else torch.float32


def _to_fine_tune(settings: Params, ranks: Ranks) -> PreTrainedModel:
    """The model of `model.path` as a learner would hold its policy, not yet sharded."""
    params = settings.model
    dtype = _dtype(settings, ranks)
    stored = dtype if params.adapter else torch.float32
    model = load_policy(params.path, stored, ranks.device, packed=params.packing, waits=ranks.size > 1)
    if params.adapter:
        adapter.attach(model, params.adapter, seed=derive(settings.warm_start.seed, "adapter", "policy"))
    if params.gradient_checkpointing:
        recompute_activations(model)
    if params.compile:
        from agent_r1.learn.compiled import compile_layers  # with torch's compiler, a slow import

        compile_layers(model)
    return model


def _texts(passages: Sequence[Passage], demonstrations: Sequence[Demonstration]) -> Iterator[str]:
    """The passages, and the conversations with the text around them, for a tokenizer to learn its words from."""
    for passage in passages:
        yield f"{passage.title}: {passage.text}"
    for demonstration in demonstrations:
        yield "\n".join(["system", tool_env.SYSTEM, "Tools: search(query)", "user", demonstration.question.text])
        yield "\n".join(["system", tool_env.FROM_PASSAGES, *("assistant\n" + act for act in demonstration.actions)])


def act_out(
    searching: Sequence[Demonstration], answering: Sequence[Demonstration], chat: Chat, index: Cached, settings: Params
) -> list[Trajectory]:
    """The demonstrations as trajectories, made by the loop and the renderer that make the policy's own."""
    trajectories = list[Trajectory]()
    for limits, part in _readings(settings):
        bare = limits.model_copy(update={"tools": limits.tools.model_copy(update={"calculator": None})})
        act = partial(_act, chat, settings.warm_start.seed)
        with Shared(limits, index) as shared, Shared(bare, index) as simple:
            trajectories += act([script for script in searching[part] if script.calculator], attempts_at, shared)
            trajectories += act([script for script in searching[part] if not script.calculator], attempts_at, simple)
            trajectories += act(answering[part], naive_rag_attempts, shared)
    return _complete(trajectories, [script.question for script in (*searching, *answering)])


def _complete(trajectories: Sequence[Trajectory], questions: Sequence[Question]) -> list[Trajectory]:
    """The trajectories that act, and that come to an answer where the question is a real one."""
    made_up = {question.question_id for question in questions if question.dataset == BUILT_IN}
    acting = [row for row in trajectories if row.steps]
    complete = [row for row in acting if row.outcome is Outcome.ANSWERED or row.question_id in made_up]
    cut = len(trajectories) - len(complete)
    if cut:
        logger.warning("%d of %d demonstrations do not fit in env.max_tokens, and are left out", cut, len(trajectories))
    return complete


def _act(
    chat: Chat,
    seed: int,
    demonstrations: Sequence[Demonstration],
    make_attempts: Callable[[Sequence[Question], Shared], list[Attempt]],
    shared: Shared,
) -> list[Trajectory]:
    """Demonstrations as trajectories in one kind of environment."""
    if not demonstrations:
        return []
    attempts = make_attempts([demonstration.question for demonstration in demonstrations], shared)
    scripts = [demonstration.actions for demonstration in demonstrations]
    if shared.limits.answers == "plain":
        scripts = [[without_answer_tags(action) for action in actions] for actions in scripts]
    return collect(ScriptedSampler(scripts, chat), chat, attempts, shared, seed=seed)


def _play_out(questions: Sequence[Question], chat: Chat, settings: Params) -> list[Trajectory]:
    """`warm_start.demonstrations` games as their demonstrator plays them; boards repeat where there are fewer."""
    trajectories = list[Trajectory]()
    for limits, part in _readings(settings):
        with Shared(limits) as shared:
            attempts, scripts = _demonstrated(questions, settings, shared)
            if attempts[part]:
                sampler = ScriptedSampler(scripts[part], chat)
                trajectories += collect(sampler, chat, attempts[part], shared, seed=settings.warm_start.seed)
    return [row for row in trajectories if row.steps]


def _readings(settings: Params) -> Iterator[tuple[EnvParams, slice]]:
    """The contexts in which demonstrations are read, that of `env` first, and the part that is read in each."""
    contexts = [settings.env.context, *settings.warm_start.contexts]
    for number, context in enumerate(contexts):
        yield _unhurried(settings.env).model_copy(update={"context": context}), slice(number, None, len(contexts))


def _demonstrated(
    questions: Sequence[Question], settings: Params, shared: Shared
) -> tuple[list[Attempt], list[Iterable[str]]]:
    count = settings.warm_start.demonstrations if questions else 0
    attempts = attempts_at(questions, shared, samples=-(-count // max(1, len(questions))), outside=False)
    first = sorted(attempts, key=lambda attempt: attempt.sample)[:count]
    return played_by("demonstrator", first, questions, settings.warm_start.seed)


def _games_as_text(questions: Sequence[Question], settings: Params) -> Iterator[str]:
    """The texts of some demonstrated games, for a tokenizer to learn its words from."""
    with Shared(_unhurried(settings.env)) as shared:
        for attempt, script in list(zip(*_demonstrated(questions, settings, shared), strict=True))[:SHOWN_GAMES]:
            yield "\n".join(shared.run(texts_of(attempt.env(attempt.sample), script)))


def _unhurried(env: EnvParams) -> EnvParams:
    """Lets the demonstrator finish every action, and refuses demonstrations that the world cut short."""
    return env.model_copy(update={"max_action_tokens": env.max_tokens, "aborted_share": 0.0})
