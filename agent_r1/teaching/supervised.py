"""Supervised learning: a model is trained on contexts whose tokens are given, alone or shared by ranks."""

from __future__ import annotations

import logging
import math
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from hashlib import sha256
from itertools import islice
from pathlib import Path
from typing import Self

import numpy as np
import torch
from numpy.typing import NDArray
from rich.progress import track
from torch import Tensor, nn
from torch.optim import Optimizer
from transformers import PreTrainedModel

from agent_r1.devices.sharing import ALONE, Ranks, load_tensors, save_tensors
from agent_r1.files import move_aside
from agent_r1.identity import Identity, write_start
from agent_r1.learn import checkpoint
from agent_r1.learn.adapter import trained_state
from agent_r1.learn.checkpoint import LEARNER, Progress
from agent_r1.learn.model import precision
from agent_r1.learn.optimizers import accumulate, adamw, blank_state, flat, set_rate, take_state
from agent_r1.learn.scoring import Compute, pad, token_logprobs
from agent_r1.params.stages import WarmStartParams
from agent_r1.records import Floats32, Int32s, Int64s, Source, Trajectory
from agent_r1.seeds import derive

OPTIMIZER = "optimizer"  # the prefix of its states' names
BATCHES_SORTED_TOGETHER = 16  # batches of like lengths waste little on padding

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Unfinished:
    """The folder in which one process, or the ranks that share a model, write down the progress of a training.

    The folder of another training goes `aside`. Only the leader is asked whose it is. Every rank reads and writes its
    part of the weights that train and of the optimiser's states.
    """

    folder: Path
    aside: Path
    every: int  # optimiser steps; 0 writes nothing
    identity: Identity

    def with_lessons(self, digest: str) -> Unfinished:
        """The training on lessons, whose digest is among its inputs."""
        return replace(self, identity=replace(self.identity, inputs=self.identity.inputs | {"lessons": digest}))

    def take_up(self, model: nn.Module, optimizer: Optimizer, ranks: Ranks, last: int) -> int:
        """Loads the latest state, and returns the steps after which it was written; 0 without one.

        Under changed code a state of the `last` step is moved aside, and an earlier one is gone on from. Raises
        ValueError if it is not as it was written.
        """
        [steps] = ranks.gather([self._found(last)] if ranks.leads else [])
        if steps:
            states = blank_state(optimizer)
            load_tensors(self.folder / LEARNER, {**trained_state(model), **flat({OPTIMIZER: states})})
            take_state(optimizer, states)
        return steps

    def keep(self, model: nn.Module, optimizer: Optimizer, steps: int, ranks: Ranks) -> None:
        """Writes the state after so many steps, whole or not at all, if it is due. An OSError leaves the last one."""
        if not self.every or steps % self.every:
            return
        states = flat({OPTIMIZER: optimizer.state_dict()["state"]})
        with ExitStack() as ends:
            [fresh] = ranks.gather([ends.enter_context(checkpoint.written(self.folder))] if ranks.leads else [])
            hashes = save_tensors(fresh / LEARNER, {**trained_state(model), **states}, ranks)
            if ranks.leads:
                write_start(fresh, self.identity)
                checkpoint.seal(fresh, Progress(iterations=steps, policy_version=steps), hashes)

    def _found(self, last: int) -> int:
        """The steps after which this training was left; another one is moved aside."""
        try:
            progress = checkpoint.progress(self.folder)
            if progress is None:
                return 0
            complete = progress.iterations == last
            if reason := self.identity.refusal(self.folder, complete=complete):
                logger.warning("%s; it was moved to %s", reason, move_aside(self.folder, self.aside))
                return 0
            checkpoint.require_whole(self.folder)
        except ValueError as fault:
            raise ValueError(f"{str(fault).partition('; ')[0]}; remove {self.folder} to begin anew") from fault
        self.identity.go_on(self.folder, f"{progress.iterations} steps", complete=complete)
        return progress.iterations


@dataclass(frozen=True, slots=True)
class Lessons:
    """The contexts that a model learns from: their tokens, and the weight of each token in the loss."""

    token_ids: list[Int32s]
    weights: list[Floats32]

    @property
    def digest(self) -> str:
        """The sha256 of all of them."""
        digest = sha256(str([len(row) for row in self.token_ids]).encode())
        for pair in zip(self.token_ids, self.weights, strict=True):
            for part in pair:
                digest.update(part.tobytes())
        return digest.hexdigest()

    def take(self, indices: Iterable[int]) -> Lessons:
        """Some of them."""
        return Lessons([self.token_ids[index] for index in indices], [self.weights[index] for index in indices])

    @classmethod
    def of(cls, demonstrations: Sequence[Trajectory], conversations: Sequence[Trajectory], observed: float) -> Self:
        """Action tokens weigh 1, and the observations of demonstrations `observed`. Raises ValueError for nothing."""
        taught = ((demonstrations, observed), (conversations, 0.0))
        contexts = [
            (trajectory, span, weight) for rows, weight in taught for trajectory in rows for span in trajectory.contexts
        ]
        if not contexts:
            raise ValueError("nobody demonstrates these data sets; set warm_start.conversations, or take a model.path")
        return cls(
            [trajectory.token_ids[span] for trajectory, span, _ in contexts],
            [_token_weights(trajectory.source[span], weight) for trajectory, span, weight in contexts],
        )


def fit(
    model: PreTrainedModel,
    lessons: Lessons,
    params: WarmStartParams,
    *,
    compute: Compute | None = None,
    offload: bool = False,
    unfinished: Unfinished | None = None,
) -> list[float]:
    """Trains `model` in place for `params.steps` optimiser steps; returns their losses in nats per token.

    The loss is the weighted mean of the negative log-likelihood over the tokens that count. The learning rate warms up
    over the first 5 % of the steps and then decays along a cosine to a tenth. Every weight that asks for a gradient is
    trained. Without `compute` it runs in float32 on one rank. All ranks that share the model call it with the same
    lessons. An `unfinished` training goes on, and the losses are those of its remaining steps.
    """
    compute = compute or compute_of(model, params)
    ranks = compute.ranks
    optimiser = adamw(model, params.learning_rate, betas=(0.9, 0.95), weight_decay=0.01, offload=offload)
    if unfinished and ranks.leads:
        unfinished = unfinished.with_lessons(lessons.digest)
    start = unfinished.take_up(model, optimiser, ranks, params.steps) if unfinished else 0
    batches = islice(_batches([*map(len, lessons.token_ids)], params), start, None)
    progress = track(
        batches,
        "warm start",
        total=params.steps,
        completed=start,
        disable=not (ranks.leads and sys.stderr.isatty()),
    )
    losses = list[float]()  # this rank's part of each step's loss
    for step, batch in enumerate(progress, start):
        set_rate(optimiser, params.learning_rate * _rate(step, params.steps))
        losses.append(_step(model, lessons.take(batch), optimiser, compute))
        if unfinished:
            unfinished.keep(model, optimiser, step + 1, ranks)
        if (step + 1) % max(1, params.steps // 10) == 0:
            loss = sum(ranks.gather(losses[-1:]))
            if ranks.leads:
                logger.info("warm start: step %d of %d, loss %.3f nats per token", step + 1, params.steps, loss)
    model.eval()
    return [*map(sum, zip(*ranks.gather([losses]), strict=True))]


def _step(model: PreTrainedModel, batch: Lessons, optimiser: Optimizer, compute: Compute) -> float:
    """Takes an optimiser step; returns this rank's part of the loss."""
    optimiser.zero_grad(set_to_none=True)
    tokens = sum(float(row.sum()) for row in batch.weights)
    loss = accumulate(partial(_add_gradient, model, batch), optimiser, tokens, compute)
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimiser.step()
    return loss


def compute_of(
    model: PreTrainedModel, params: WarmStartParams, *, dtype: torch.dtype = torch.float32, ranks: Ranks = ALONE
) -> Compute:
    """The micro-batches of a warm start; matrix products run in `dtype`, and the `ranks` share the model."""
    compute = Compute(device=model.device, dtype=dtype, max_tokens=params.max_tokens_per_microbatch, ranks=ranks)
    return compute.of(model)


def _add_gradient(model: PreTrainedModel, batch: Lessons, compute: Compute) -> float:
    """Adds up a batch's gradient, scaled, micro-batch by micro-batch; returns this rank's part of the loss."""
    everything = pad(batch.weights, torch.float32).to(compute.device)  # [B, T]
    total = everything[everything > 0].sum()
    loss = 0.0
    deals = compute.deal([[row] for row in batch.token_ids])
    for turn, (pack, idle) in enumerate(deals, 1):
        compute.ranks.reduce(model, last=turn == len(deals))
        share = _loss(model, batch.take(sorted(pack)), compute) / total * (not idle)
        (share * compute.scale).backward()
        loss += share.item()
    return loss


def _loss(model: PreTrainedModel, lessons: Lessons, compute: Compute) -> Tensor:
    """The weighted sum over the tokens of lessons that go through the model together."""
    ids = pad(lessons.token_ids, torch.int64).to(compute.device)  # [B, T]
    weight = pad(lessons.weights, torch.float32).to(compute.device)  # [B, T]
    with precision(compute.device, compute.dtype):
        logprobs = token_logprobs(model, ids, weight > 0, backbone=compute.ranks.backbone(model))  # [N]
    return -(logprobs * weight[weight > 0]).sum()


def _token_weights(source: NDArray[np.uint8], observation_weight: float) -> Floats32:
    by_source = {Source.ACTION: 1.0, Source.OBSERVATION: observation_weight}
    return np.select([source == kind for kind in by_source], list(by_source.values())).astype(np.float32)


def _rate(step: int, steps: int) -> float:
    warm_up = max(1, steps // 20)
    if step < warm_up:
        return (step + 1) / warm_up
    return 0.1 + 0.45 * (1 + math.cos(math.pi * (step - warm_up) / max(1, steps - warm_up)))


def _batches(lengths: Sequence[int], params: WarmStartParams) -> Iterator[Int64s]:
    """`params.steps` batches of row indices, reshuffled every pass over the rows."""
    pool = params.batch_size * BATCHES_SORTED_TOGETHER
    drawn = 0
    passes = 0
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
