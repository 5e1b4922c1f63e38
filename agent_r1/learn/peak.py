"""A learner's share of a device's memory: what an update takes, measured without a trace, and what it gives back."""

from __future__ import annotations

import logging
import resource
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch

from agent_r1.devices.ranks import led
from agent_r1.learn.gradients import CreditedTrajectory, join_credit
from agent_r1.learn.learner import Learner
from agent_r1.learn.memory import GIB, REMEDIES, available_gib
from agent_r1.learn.optimizers import take_state
from agent_r1.params.env import EnvParams
from agent_r1.records import Credit, Outcome, Source, Trajectory

logger = logging.getLogger(__name__)


@led
def measure(learner: Learner, env: EnvParams) -> float:
    """Runs updates of the largest micro-batches that the limits allow, takes them back, and returns the peak in GiB.

    Call it with the sampler and the reference loaded. There are two optimiser steps of two micro-batches each: only in
    the second are the gradients and the optimiser's states there while a micro-batch is computed, as in training.
    Weights, gradients, the optimisers' and the random states are afterwards what they were, bit for bit. The peak is on
    CUDA the most that torch has reserved for this process, on a CPU the most that the process has ever taken. Raises
    ValueError if the device has too little memory; the message says what lowers the need.
    """
    device, refusal = learner.compute.device, ""
    with _taken_back(learner):
        try:
            rows = _largest_step(learner, env)
            for _ in range(2):
                learner.policy_step(rows, learn=True, first=True)
                learner.critic_step(rows)
        except torch.OutOfMemoryError as error:  # raised below, when this one holds the activations no more
            refusal = str(error)
        peak, free = _peak_gib(device), available_gib(device)
    tokens = len(rows) // 2 * len(rows[0].trajectory.token_ids)
    if refusal:
        raise ValueError(
            f"an update of micro-batches of {tokens} tokens does not fit into the memory of {device}, of which "
            f"{free:.1f} GiB were free beside it: {refusal}\n{REMEDIES}"
        )
    logger.info("memory at the peak, measured: %.2f GiB for micro-batches of %d tokens, %.2f free", peak, tokens, free)
    return peak


@led
def release(learner: Learner) -> None:
    """Gives a GPU back what PyTorch holds of memory that is free, for a sampler that shares the device."""
    if learner.compute.device.type == "cuda":
        torch.cuda.empty_cache()


@contextmanager
def _taken_back(learner: Learner) -> Iterator[None]:
    """Undoes what optimiser steps do to a learner; meanwhile its weights and optimiser states are kept on the CPU."""
    optimizers = [each for each in (learner.policy_optimizer, learner.critic_optimizer) if each]
    trained = [weight for each in optimizers for group in each.param_groups for weight in group["params"]]
    weights = [weight.detach().to("cpu", copy=True) for weight in trained]
    gradients = [weight.grad for weight in trained]
    states = [
        {
            index: {name: entry.to("cpu", copy=True) for name, entry in entries.items()}
            for index, entries in kept.items()
        }
        for kept in (each.state_dict()["state"] for each in optimizers)
    ]
    for weight in trained:
        weight.grad = None
    if learner.compute.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(learner.compute.device)
    try:
        with torch.random.fork_rng():
            yield
    finally:
        for weight, before, gradient in zip(trained, weights, gradients, strict=True):
            weight.data.copy_(before)
            weight.grad = gradient
        for optimizer, state in zip(optimizers, states, strict=True):
            take_state(optimizer, state)
        if learner.compute.device.type == "cuda":
            torch.cuda.empty_cache()


def _largest_step(learner: Learner, env: EnvParams) -> list[CreditedTrajectory]:
    """An optimiser step of two micro-batches of the largest size; the loss runs over all tokens but the first."""
    budget = learner.params.max_tokens_per_microbatch
    contexts = -(-budget // env.max_tokens)  # the fewest and longest: one beyond the budget has its own micro-batch
    length = budget // contexts if contexts > 1 else env.max_tokens
    mask = np.arange(length) > 0
    ones, zeros = mask.astype(np.float32), np.zeros(length, np.float32)
    trajectory = Trajectory(
        trajectory_id="",
        question_id="",
        group=0,
        sample=0,
        seed=0,
        policy_version=0,
        iteration=0,
        token_ids=np.zeros(length, np.int32),
        source=np.where(mask, Source.ACTION, Source.PROMPT).astype(np.uint8),
        logprobs=-ones,
        context_starts=[0],
        steps=[],
        outcome=Outcome.TURN_LIMIT,
        answer="",
    )
    credit = Credit(
        trajectory_id="",
        return_=1.0,
        advantages=ones,
        values=zeros,
        value_targets=ones,
        reference_logprobs=-ones,
        loss_mask=mask,
        critic_mask=mask if learner.critic else zeros > 0,
        kept=True,
    )
    count = 2 * contexts
    return join_credit(learner.policy, [trajectory] * count, [credit] * count, learner.params, learner.compute)


def _peak_gib(device: torch.device) -> float:
    if device.type == "cuda":
        return torch.cuda.max_memory_reserved(device) / GIB
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / GIB
