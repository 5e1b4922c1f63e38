"""Measures the memory that an update takes, and frees a learner's unused memory."""

from __future__ import annotations

import logging
import resource
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch

from agent_r1.devices.sharing import led
from agent_r1.learn.gradients import CreditedTrajectory, join_credit
from agent_r1.learn.learner import Learner
from agent_r1.learn.memory import GIB, REMEDIES, available_gib
from agent_r1.learn.optimizers import take_state, weights
from agent_r1.params.env import EnvParams
from agent_r1.records import Credit, Outcome, Source, Trajectory

logger = logging.getLogger(__name__)


@led
def measure(learner: Learner, env: EnvParams) -> float:
    """Runs updates of the largest micro-batches that the limits allow, undoes them, and returns the peak in GiB.

    Call it with the sampler and the reference loaded. It takes two optimiser steps of two micro-batches each: in the
    second, gradients and optimiser states are there while a micro-batch is computed, as in training. Weights,
    gradients, optimiser and random states are restored bit for bit. The peak on CUDA is the most that torch has
    reserved for this process, and on a CPU the most that the process has ever used. Raises ValueError if the device has
    too little memory; the message names remedies.
    """
    device, refusal = learner.compute.device, ""
    with _taken_back(learner):
        try:
            rows = _largest_step(learner, env)
            for _ in range(2):
                learner.policy_step(rows, learn=True, first=True)
                learner.critic_step(rows)
        except torch.OutOfMemoryError as error:  # raised below, once this error has released the activations
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
    """Returns PyTorch's free memory to a GPU, for a sampler that shares it."""
    if learner.compute.device.type == "cuda":
        torch.cuda.empty_cache()


@contextmanager
def _taken_back(learner: Learner) -> Iterator[None]:
    """Undoes optimiser steps of a learner. Its weights and optimiser states are meanwhile kept on the CPU."""
    optimizers = list(learner.optimizers.values())
    trained = [weight for each in optimizers for weight in weights(each)]
    before = [weight.detach().to("cpu", copy=True) for weight in trained]
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
        for weight, old, gradient in zip(trained, before, gradients, strict=True):
            weight.data.copy_(old)
            weight.grad = gradient
        for optimizer, state in zip(optimizers, states, strict=True):
            take_state(optimizer, state)
        if learner.compute.device.type == "cuda":
            torch.cuda.empty_cache()


def _largest_step(learner: Learner, env: EnvParams) -> list[CreditedTrajectory]:
    """An optimiser step of two micro-batches of the largest size, whose loss runs over all tokens but the first."""
    budget = learner.params.max_tokens_per_microbatch
    contexts = -(-budget // env.max_tokens)  # the fewest and longest; one beyond the budget is a micro-batch
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
