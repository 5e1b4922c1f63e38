"""Warm start: supervised learning on demonstrations, which are trajectories like any other."""

from __future__ import annotations

import logging
import math
import sys
from collections.abc import Iterator, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from rich.progress import track
from transformers import PreTrainedModel

from agent_r1.params import WarmStartParams
from agent_r1.policy.batching import pad
from agent_r1.policy.model import token_logprobs
from agent_r1.records import Source, Trajectory
from agent_r1.seeds import derive

logger = logging.getLogger(__name__)

BATCHES_SORTED_TOGETHER = 16  # batches of like lengths waste little on padding


def fit(model: PreTrainedModel, demonstrations: Sequence[Trajectory], params: WarmStartParams) -> list[float]:
    """Trains `model` in place for `params.steps` optimiser steps; returns their losses in nats per token.

    The loss is the mean negative log-likelihood over action tokens (weight 1) and observation tokens
    (weight `params.observation_weight`, which teaches copying). The learning rate warms up over the
    first 5 % of the steps and then decays along a cosine to a tenth.
    """
    optimiser = torch.optim.AdamW(model.parameters(), lr=params.learning_rate, betas=(0.9, 0.95), fused=True)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimiser, lambda step: _rate(step, params.steps))
    contexts = [(trajectory, span) for trajectory in demonstrations for span in trajectory.contexts]
    token_ids = [trajectory.token_ids[span] for trajectory, span in contexts]
    weights = [_token_weights(trajectory.source[span], params.observation_weight) for trajectory, span in contexts]
    batches = _batches([len(row) for row in token_ids], params)
    model.train()
    losses: list[float] = []
    for step, batch in enumerate(track(batches, "warm start", total=params.steps, disable=not sys.stderr.isatty())):
        loss = _loss(model, [token_ids[i] for i in batch], [weights[i] for i in batch])
        optimiser.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimiser.step()
        schedule.step()
        losses.append(loss.item())
        if (step + 1) % max(1, params.steps // 10) == 0:
            logger.info("warm start: step %d of %d, loss %.3f nats per token", step + 1, params.steps, losses[-1])
    model.eval()
    return losses


def _loss(
    model: PreTrainedModel, token_ids: list[NDArray[np.int32]], weights: list[NDArray[np.float32]]
) -> torch.Tensor:
    ids = pad(token_ids, torch.int64).to(model.device)  # [B, T]
    weight = pad(weights, torch.float32).to(model.device)  # [B, T]
    logprobs = token_logprobs(model, ids, weight > 0)  # [N]
    chosen = weight[weight > 0]
    return -(logprobs * chosen).sum() / chosen.sum()


def _token_weights(source: NDArray[np.uint8], observation_weight: float) -> NDArray[np.float32]:
    weights = np.zeros(len(source), dtype=np.float32)
    weights[source == Source.OBSERVATION] = observation_weight
    weights[source == Source.ACTION] = 1.0
    return weights


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
