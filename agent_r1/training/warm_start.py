"""The policy that reinforcement learning starts from: a model that was shown demonstrations and conversations.

Both are trajectories like any other; learning from them is supervised.
"""

from __future__ import annotations

import logging
import math
import sys
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from rich.progress import track
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from agent_r1.data.demonstrations import Demonstration, with_tools, without_tools
from agent_r1.data.questions import make_plans
from agent_r1.envs import tool_env
from agent_r1.envs.base import Attempt
from agent_r1.envs.kinds import KINDS, attempts_at, played_by
from agent_r1.envs.scripts import texts_of
from agent_r1.envs.shared import Shared
from agent_r1.envs.tool_env import naive_rag_attempts
from agent_r1.params import Params
from agent_r1.params.env import EnvParams
from agent_r1.params.stages import WarmStartParams
from agent_r1.policy import adapter, builtin
from agent_r1.policy.batching import pack_by_length, pack_tightly, pad
from agent_r1.policy.model import (
    compute_dtype,
    default_device,
    load_policy,
    load_tokenizer,
    precision,
    recompute_activations,
)
from agent_r1.policy.output import token_logprobs
from agent_r1.policy.packing import is_packed
from agent_r1.records import QA, Passage, Question, Source, Trajectory
from agent_r1.rollout.chat import Chat
from agent_r1.rollout.episodes import ScriptedSampler, collect
from agent_r1.search.index import Cached
from agent_r1.seeds import derive
from agent_r1.training.conversations import read_conversations, retell

logger = logging.getLogger(__name__)

BATCHES_SORTED_TOGETHER = 16  # batches of like lengths waste little on padding
SHOWN_GAMES = 500  # whose texts a tokenizer learns its words from


def train_on_demonstrations(
    settings: Params, questions: Sequence[Question], passages: Sequence[Passage], index: Cached
) -> tuple[PreTrainedModel, PreTrainedTokenizerFast]:
    """A model and its tokenizer, trained on demonstrations of the questions, and on conversations.

    Without `model.path` both are the built-in small ones, made from scratch in float32, and the tokenizer learns its
    words from all of these and the passages; with it, those of that folder or hub id, taken as training takes them: its
    precision, adapters and gradient checkpointing. The demonstrator searches the index.
    """
    device, dtype = default_device(), torch.float32
    path = settings.warm_start.conversations
    conversations = read_conversations(Path(path)) if path else []
    asked = [each for each in questions if each.env == QA]
    played = [each for each in questions if "demonstrator" in KINDS[each.env].scripts]
    plan_of, facts = make_plans(settings.prepare, asked)
    calculator = settings.env.tools.calculator is not None
    searching, answering = list[Demonstration](), list[Demonstration]()
    if asked or not played:
        searching = with_tools(asked, plan_of, facts, settings.warm_start, calculator=calculator)
        answering = without_tools(asked, plan_of, index, settings.env.top_k, settings.warm_start)
    if settings.model.path:
        dtype = compute_dtype(settings.model.dtype, device)
        tokenizer, model = load_tokenizer(settings.model.path), _to_fine_tune(settings, dtype)
    else:
        shape = settings.warm_start
        shown = _games_as_text(played, settings)
        texts = chain(_texts(passages, [*searching, *answering]), shown, (each.text for each in conversations))
        tokenizer = builtin.train_tokenizer(texts, shape.vocab_size)
        model = builtin.new_model(
            tokenizer,
            hidden_size=shape.hidden_size,
            layers=shape.layers,
            heads=shape.heads,
            max_tokens=settings.env.max_tokens,
            seed=shape.seed,
        )
    chat = Chat(tokenizer)
    demonstrations = [*_act_out(searching, answering, chat, index, settings), *_play_out(played, chat, settings)]
    retold = retell(conversations, chat, index, settings) if conversations else []
    torch.nn.Module.to(model, device)
    fit(model, demonstrations, settings.warm_start, conversations=retold, dtype=dtype)
    return model, tokenizer


def _to_fine_tune(settings: Params, dtype: torch.dtype) -> PreTrainedModel:
    """The model of `model.path` as a learner would hold its policy."""
    params = settings.model
    model = load_policy(params.path, dtype if params.adapter else torch.float32, packed=params.packing)
    if params.adapter:
        adapter.attach(model, params.adapter, seed=derive(settings.warm_start.seed, "adapter", "policy"))
    if params.gradient_checkpointing:
        recompute_activations(model)
    return model


def _texts(passages: Sequence[Passage], demonstrations: Sequence[Demonstration]) -> Iterator[str]:
    """What the tokenizer learns its words from: the passages, and the conversations with all that surrounds them."""
    for passage in passages:
        yield f"{passage.title}: {passage.text}"
    for demonstration in demonstrations:
        yield "\n".join(["system", tool_env.SYSTEM, "Tools: search(query)", "user", demonstration.question.text])
        yield "\n".join(["system", tool_env.FROM_PASSAGES, *("assistant\n" + act for act in demonstration.actions)])


def _act_out(
    searching: Sequence[Demonstration],
    answering: Sequence[Demonstration],
    chat: Chat,
    index: Cached,
    settings: Params,
) -> list[Trajectory]:
    """The demonstrations as trajectories, made by the loop and the renderer that make the policy's own."""
    limits, trajectories = _unhurried(settings.env), list[Trajectory]()
    bare = limits.model_copy(update={"tools": limits.tools.model_copy(update={"calculator": None})})
    with Shared(limits, index) as shared, Shared(bare, index) as without_calculator:
        for demonstrations, make_attempts, tools in (
            ([each for each in searching if each.calculator], attempts_at, shared),
            ([each for each in searching if not each.calculator], attempts_at, without_calculator),
            (answering, naive_rag_attempts, shared),
        ):
            if not demonstrations:
                continue
            attempts = make_attempts([each.question for each in demonstrations], tools)
            scripts = [[chat.escape_action(act) for act in each.actions] for each in demonstrations]
            sampler = ScriptedSampler(scripts, chat)
            trajectories += collect(sampler, chat, attempts, tools, seed=settings.warm_start.seed)
    return trajectories


def _play_out(questions: Sequence[Question], chat: Chat, settings: Params) -> list[Trajectory]:
    """`warm_start.demonstrations` games as their demonstrator plays them; boards repeat where there are fewer."""
    with Shared(_unhurried(settings.env)) as shared:
        attempts, scripts = _demonstrated(questions, settings, shared)
        if not attempts:
            return []
        return collect(ScriptedSampler(scripts, chat), chat, attempts, shared, seed=settings.warm_start.seed)


def _demonstrated(
    questions: Sequence[Question], settings: Params, shared: Shared
) -> tuple[list[Attempt], list[Iterable[str]]]:
    count = settings.warm_start.demonstrations if questions else 0
    each = attempts_at(questions, shared, samples=-(-count // max(1, len(questions))))
    attempts = sorted(each, key=lambda attempt: attempt.sample)[:count]
    return played_by("demonstrator", attempts, questions, settings.warm_start.seed)


def _games_as_text(questions: Sequence[Question], settings: Params) -> Iterator[str]:
    """What is read and written in some of the demonstrated games, for a tokenizer that is yet to be made."""
    with Shared(_unhurried(settings.env)) as shared:
        for attempt, script in list(zip(*_demonstrated(questions, settings, shared), strict=True))[:SHOWN_GAMES]:
            yield "\n".join(shared.run(texts_of(attempt.env(attempt.sample), script)))


def _unhurried(env: EnvParams) -> EnvParams:
    """The demonstrator finishes what it writes, and a demonstration that the world cut short shows nothing."""
    return env.model_copy(update={"max_action_tokens": env.max_tokens, "aborted_share": 0.0})


def fit(
    model: PreTrainedModel,
    demonstrations: Sequence[Trajectory],
    params: WarmStartParams,
    *,
    conversations: Sequence[Trajectory] = (),
    dtype: torch.dtype = torch.float32,
) -> list[float]:
    """Trains `model` in place for `params.steps` optimiser steps; returns their losses in nats per token.

    The loss is the mean negative log-likelihood over action tokens (weight 1) and, of demonstrations, observation
    tokens (weight `params.observation_weight`, which teaches copying). The learning rate warms up over the
    first 5 % of the steps and then decays along a cosine to a tenth. What is trained is what asks for a gradient;
    matrix products run in `dtype`.
    """
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimiser = torch.optim.AdamW(trained, lr=params.learning_rate, betas=(0.9, 0.95), fused=True)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimiser, lambda step: _rate(step, params.steps))
    taught = ((demonstrations, params.observation_weight), (conversations, 0.0))
    contexts = [(each, span, weight) for rows, weight in taught for each in rows for span in each.contexts]
    token_ids = [each.token_ids[span] for each, span, _ in contexts]
    weights = [_token_weights(each.source[span], weight) for each, span, weight in contexts]
    batches = _batches([len(row) for row in token_ids], params)
    losses: list[float] = []
    for step, batch in enumerate(track(batches, "warm start", total=params.steps, disable=not sys.stderr.isatty())):
        optimiser.zero_grad(set_to_none=True)
        chosen = [token_ids[i] for i in batch], [weights[i] for i in batch]
        losses.append(_add_gradient(model, *chosen, params.max_tokens_per_microbatch, dtype))
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimiser.step()
        schedule.step()
        if (step + 1) % max(1, params.steps // 10) == 0:
            logger.info("warm start: step %d of %d, loss %.3f nats per token", step + 1, params.steps, losses[-1])
    model.eval()
    return losses


def _add_gradient(
    model: PreTrainedModel,
    token_ids: list[NDArray[np.int32]],
    weights: list[NDArray[np.float32]],
    max_tokens: int,
    dtype: torch.dtype,
) -> float:
    """Adds up the gradient of a batch's loss in micro-batches of `max_tokens`, padding included; returns the loss."""
    everything = pad(weights, torch.float32).to(model.device)  # [B, T]
    total, loss = everything[everything > 0].sum(), 0.0
    share_out = pack_tightly if is_packed(model.config) else pack_by_length
    for pack in share_out([[len(row)] for row in token_ids], max_tokens):
        rows = sorted(pack)
        ids = pad([token_ids[row] for row in rows], torch.int64).to(model.device)  # [B, T]
        weight = pad([weights[row] for row in rows], torch.float32).to(model.device)  # [B, T]
        with precision(model.device, dtype):
            logprobs = token_logprobs(model, ids, weight > 0)  # [N]
        share = -(logprobs * weight[weight > 0]).sum() / total
        share.backward()
        loss += share.item()
    return loss


def _token_weights(source: NDArray[np.uint8], observation_weight: float) -> NDArray[np.float32]:
    by_source = {Source.ACTION: 1.0, Source.OBSERVATION: observation_weight}
    return np.select([source == each for each in by_source], list(by_source.values())).astype(np.float32)


def _rate(step: int, steps: int) -> float:
    warm_up = max(1, steps // 20)
    if step < warm_up:
        return (step + 1) / warm_up
    return 0.1 + 0.45 * (1 + math.cos(math.pi * (step - warm_up) / max(1, steps - warm_up)))


def _batches(lengths: Sequence[int], params: WarmStartParams) -> Iterator[NDArray[np.int64]]:
    """`params.steps` batches of row indices, reshuffled every pass over the rows."""
    pool, drawn, passes = params.batch_size * BATCHES_SORTED_TOGETHER, 0, 0
    while True:
        generator = np.random.default_rng(derive(params.seed, "warm_start", passes))
        order = generator.permutation(len(lengths))
        batches = []
        for rows in np.split(order, range(pool, len(order), pool)):
            by_length = rows[np.argsort(np.take(lengths, rows), kind="stable")]
            batches += np.split(by_length, range(params.batch_size, len(rows), params.batch_size))
        for index in generator.permutation(len(batches)):
            if drawn == params.steps:
                return
            yield batches[index]
            drawn += 1
        passes += 1
