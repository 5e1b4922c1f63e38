"""Replays of a run's stored iterations under other configurations."""

from __future__ import annotations

import logging
import sys
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import yaml
from rich.progress import track
from transformers import PreTrainedModel

from agent_r1.credit.assign import assign
from agent_r1.inspection.agreement import PolicyGradient, advantage_comparison, policy_gradient, value_errors
from agent_r1.inspection.stored import PolicyOnDisk, StoredRun
from agent_r1.learn.learner import Learner, Reference, frozen, reference_of
from agent_r1.learn.losses import Metrics
from agent_r1.learn.scoring import compute_of
from agent_r1.params import Params
from agent_r1.params.credit import CreditParams
from agent_r1.params.places import RunId, adapter_in
from agent_r1.params.sections import override, validated
from agent_r1.params.train import TrainParams
from agent_r1.pretrained import default_device
from agent_r1.records import Credit, Trajectory
from agent_r1.training.watch import accepted_gap

REPLAYED = ("credit", "update")  # sections of `train` that a replay reads
OF_STEPS = {  # keys of `update` that steer the optimiser, which a replay does not use
    "learning_rate",
    "learning_rate_decay",
    "learning_rate_warmup",
    "weight_decay",
    "betas",
    "critic",
    "epochs",
    "minibatches",
    "max_grad_norm",
}
OTHER_NUMERICS = 1e-4  # of advantages, whose scale is 1; the same parameters and code give the same bits
OTHER_MODEL = 10  # times the canary's tolerance, because here every token of an iteration is looked at

logger = logging.getLogger(__name__)


class Configuration(NamedTuple):
    """A named configuration of credit and update."""

    name: str
    train: TrainParams


class Replay(NamedTuple):
    """One iteration under one configuration."""

    configuration: Configuration
    metrics: Metrics  # of training, and of the comparison with the run's own configuration


class Replayed(NamedTuple):
    """One iteration under the run's own configuration and under others."""

    iteration: int
    policy: PolicyOnDisk  # at which the gradients were taken
    replays: list[Replay]  # the run's own first
    values: Metrics  # errors of the run's critic; empty without one


def configurations(settings: Params, run: RunId, others: Sequence[str], changes: Sequence[str]) -> list[Configuration]:
    """The run's own configuration in params.yaml, followed by the others.

    Each of the others has the `credit` and `update` of one of `others`, or of the run, with `changes` such as
    `credit.lam=1.0` on top. Raises ValueError if one is unknown or invalid, or needs a critic that the run did not
    train.
    """
    settings = settings.of(run)
    own, wanted = settings.run(run), parse_changes(changes)
    found = [Configuration(run.run, own)]
    for other in others or [run.run]:
        name = " ".join([other, *changes])
        base = own.model_dump() | settings.run(RunId(other)).model_dump(include=set(REPLAYED))
        where = f"{run.run} replayed as {name}"
        config = validated(TrainParams, override(base, wanted), where)
        config.require_read(wanted, where)
        if config.credit.needs_critic and not own.credit.needs_critic:
            raise ValueError(
                f"{run.run} trained no critic, so it stored no values, which estimator {config.credit.estimator} of "
                f"{name} needs; replay a run with a critic, or take an estimator without one"
            )
        found.append(Configuration(name, config))
    return found


def parse_changes(changes: Sequence[str]) -> dict[str, Any]:
    """Parses `["credit.lam=1.0"]` into `{"credit": {"lam": 1.0}}`. Values are YAML."""
    nested: dict[str, Any] = {}
    for change in changes:
        key, equals, value = change.partition("=")
        section, *rest = key.split(".")
        if not equals or not rest:
            raise ValueError(f"{change!r} is no change to make; write credit.lam=1.0, for instance")
        if section not in REPLAYED:
            raise ValueError(f"{change!r} has no effect: a replay looks at {' and '.join(REPLAYED)} of train alone")
        if section == "update" and rest[0] in OF_STEPS:
            raise ValueError(f"{change!r} has no effect: a replay compares gradients, and takes no step with them")
        content = yaml.safe_load(value)
        for part in reversed(rest):
            content = {part: content}
        nested = override(nested, {section: content})
    return nested


def reads_untrained_values(own: CreditParams, other: CreditParams) -> bool:
    """Whether `other` reads values at tokens on which a critic under `own` was not trained."""
    if own.estimator == "step_gae":
        return other.needs_critic and other.estimator != "step_gae"
    masked = other.advantage_mask.recursion and other.advantage_mask.critic
    return other.needs_critic and own.advantage_mask.critic and not masked


def replay(
    settings: Params,
    run: RunId,
    compared: list[Configuration],
    *,
    folder: Path | None = None,
    iterations: Sequence[str] = (),
    with_gradient: bool = True,
) -> list[Replayed]:
    """Credits a run's stored trajectories under all `configurations`.

    Gradients are compared in iterations whose policy is on disk. `folder` replaces the run's own folder; for
    `iterations` see `StoredRun.choose`.
    """
    settings = settings.of(run)
    stored = StoredRun(run.run, folder or settings.places.training(run), settings.places.warm_start)
    chosen = stored.choose(iterations)
    replayer = Replayer(stored, compared, settings, with_gradient=with_gradient)
    return [replayer.replay(number) for number in track(chosen, "replay", disable=not sys.stderr.isatty())]


class Replayer:
    """Replays the iterations of a stored run. Loads a model when it is first needed."""

    def __init__(
        self, stored: StoredRun, compared: list[Configuration], settings: Params, *, with_gradient: bool
    ) -> None:
        self.stored, self.compared, self.with_gradient = stored, compared, with_gradient
        self.max_tokens, self.model = settings.env.max_tokens, settings.model
        self.taken: Path | None = None  # the folder of the policy that the learner has taken over
        if with_gradient:
            _require_like_adapters(stored, settings)
        needed = any(each.train.needs_reference for each in compared)
        self.reference = self._reference(compared[0].train) if needed else None

    def replay(self, number: int) -> Replayed:
        """Replays one iteration under every configuration."""
        logger.info("iteration %d: credit under %s", number, ", ".join(each.name for each in self.compared))
        trajectories, stored = self.stored.trajectories(number), self.stored.credits(number)
        policy = self.stored.policy(trajectories[0].policy_version)
        own, *others = self.compared
        if self.stored.was_stabilised(number):
            own = own._replace(train=own.train.stabilised)
        under = [own, *others]
        assigned = [self._assign(trajectories, stored, each) for each in under]
        self._compare_with_stored(number, assigned[0][0], stored)
        replays, first = [], None
        for each, (credits_, metrics) in zip(under, assigned, strict=True):
            gradient = self._gradient(number, policy, trajectories, credits_, each.train)
            first = first or gradient
            compared = advantage_comparison(trajectories, credits_, assigned[0][0])
            angles = gradient.compared_with(first) if gradient and first else {}
            replays.append(Replay(each, metrics | compared | angles))
        credit = own.train.credit
        values = value_errors(trajectories, stored, credit, self.max_tokens) if credit.needs_critic else {}
        return Replayed(number, policy, replays, values)

    def _assign(
        self, trajectories: list[Trajectory], stored: list[Credit], configuration: Configuration
    ) -> tuple[list[Credit], Metrics]:
        """Assigns credit with the values that the run's critic gave in training."""
        credit = configuration.train.credit
        values = [row.values for row in stored] if credit.needs_critic else None
        reference = None
        if self.reference is not None and configuration.train.needs_reference:
            reference = self.reference.logprobs(trajectories, [each.action_mask for each in trajectories])
        questions = configuration.train.rollout.questions
        credits_, metrics = assign(
            trajectories, values, credit, reference=reference, questions=questions, max_tokens=self.max_tokens
        )
        if values and any(new.kept and not old.kept for new, old in zip(credits_, stored, strict=True)):
            raise ValueError(
                f"{configuration.name} keeps trajectories that the filter of {self.stored.run} dropped, and no values "
                "are stored for those; choose the same filter, or an estimator without a critic"
            )
        return credits_, metrics

    @cached_property
    def learner(self) -> Learner:
        """The run's learner at its start, without a critic. It needs no more memory than training did."""
        own = self.compared[0].train
        return Learner(self.stored.warm_start, own.update, self.model, with_critic=False, seed=own.seed)

    def _policy(self, path: Path) -> PreTrainedModel:
        """The learner's policy with the weights at `path`. It starts with the warm start's."""
        if path not in (self.stored.warm_start, self.taken):
            self.learner.take_policy(path)
            self.taken = path
        return self.learner.policy

    def _reference(self, config: TrainParams) -> Reference:
        """The warm start; with adapters, the learner's own model without them."""
        if self.with_gradient and self.model.adapter:
            return reference_of(self.learner, self.stored.warm_start)
        return frozen(self.stored.warm_start, compute_of(self.model, config.update, default_device()))

    def _gradient(
        self, number: int, policy: PolicyOnDisk, rows: list[Trajectory], credits_: list[Credit], config: TrainParams
    ) -> PolicyGradient | None:
        if policy.path is None or not self.with_gradient:
            return None
        logger.info("iteration %d: a gradient over %d trajectories", number, len(rows))
        compute = compute_of(self.model, config.update, default_device())
        gradient = policy_gradient(self._policy(policy.path), rows, credits_, config.update, compute)
        measure, allowed = accepted_gap(compute.dtype, config.update.canary_tolerance)
        gap = gradient.metrics.get(f"policy/mismatch_{measure}", 0.0)
        if policy.sampled_it and gap > OTHER_MODEL * allowed:
            raise ValueError(
                f"{policy.path} is not the model that sampled iteration {number} of {self.stored.run}: logprobs differ "
                f"by {gap:.2g} nats ({measure}); bring its outputs back (dvc checkout), or compare without gradients"
            )
        return gradient

    def _compare_with_stored(self, number: int, credits_: list[Credit], stored: list[Credit]) -> None:
        gap = max(np.abs(new.advantages - old.advantages).max() for new, old in zip(credits_, stored, strict=True))
        if gap > OTHER_NUMERICS:
            logger.warning(
                "iteration %d: the advantages that %s was trained with differ by up to %.2g from those of its "
                "configuration in params.yaml, which has changed since; the comparison is with params.yaml's",
                number,
                self.stored.run,
                gap,
            )


def _require_like_adapters(stored: StoredRun, settings: Params) -> None:
    """Raises ValueError if only one of params.yaml and the run has adapters."""
    trained, rank = adapter_in(stored.policy_folder).is_dir(), settings.model.lora.rank
    if trained != bool(rank):
        raise ValueError(
            f"{stored.run} was trained {'with' if trained else 'without'} adapters, and model.lora.rank is {rank}; set "
            "it back, or compare without gradients"
        )
