"""How far a supervised training is, on disk while it lasts: a kill costs the steps since, and no bit."""

from __future__ import annotations

import logging
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Self

from torch import nn
from torch.optim import Optimizer

from agent_r1.devices import shards
from agent_r1.devices.ranks import Ranks
from agent_r1.files import move_aside
from agent_r1.learn import checkpoint
from agent_r1.learn.adapter import trained_state
from agent_r1.learn.checkpoint import LEARNER, Progress
from agent_r1.learn.optimizers import blank_state, flat, take_state
from agent_r1.training.identity import Identity, some, write_start

OPTIMIZER = "optimizer"  # what the names of its states begin with

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Unfinished:
    """The folder in which one process, or the ranks that share a model, write down how far a training is.

    What another training left there goes `aside`. Of the ranks only the leader is asked whose it is; all read and
    write, each its part of the weights that train and of what the optimiser keeps of them.
    """

    folder: Path
    aside: Path
    every: int  # optimiser steps; 0 writes nothing
    identity: Identity

    def on(self, **inputs: str) -> Self:
        """The same of a training on further inputs, given by their hashes."""
        return replace(self, identity=replace(self.identity, inputs=self.identity.inputs | inputs))

    def take_up(self, model: nn.Module, optimizer: Optimizer, ranks: Ranks) -> int:
        """Goes on from what was written last, and returns after how many steps that was; 0 where there is nothing.

        Raises ValueError if it is not as it was written.
        """
        [steps] = ranks.gather([self._found()] if ranks.leads else [])
        if steps:
            states = blank_state(optimizer)
            shards.load(self.folder / LEARNER, {**trained_state(model), **flat({OPTIMIZER: states})})
            take_state(optimizer, states)
        return steps

    def keep(self, model: nn.Module, optimizer: Optimizer, steps: int, ranks: Ranks) -> None:
        """Writes what is gone on from after so many steps, whole or not at all, where it is time to.

        Raises OSError if the disk is full or not writable; what was written before is untouched.
        """
        if not self.every or steps % self.every:
            return
        states = flat({OPTIMIZER: optimizer.state_dict()["state"]})
        with ExitStack() as ends:
            [fresh] = ranks.gather([ends.enter_context(checkpoint.written(self.folder))] if ranks.leads else [])
            shards.save(fresh / LEARNER, {**trained_state(model), **states})
            if ranks.leads:
                write_start(fresh, self.identity)
                checkpoint.seal(fresh, Progress(iterations=steps, policy_version=steps))

    def _found(self) -> int:
        """The steps after which this training was left; what is another's is moved aside."""
        try:
            found = checkpoint.progress(self.folder)
            if found is None:
                return 0
            reason, changed = self.identity.compare(self.folder)
            if reason:
                logger.warning("%s; it was moved to %s", reason, move_aside(self.folder, self.aside))
                return 0
            checkpoint.require_whole(self.folder)
        except ValueError as fault:
            raise ValueError(f"{self.folder} cannot be gone on from, remove it to begin anew: {fault}") from fault
        if changed:
            logger.warning("%s: going on, though the code has changed: %s", self.folder, some(changed))
        logger.info("%s: going on after %d steps", self.folder, found.iterations)
        return found.iterations
