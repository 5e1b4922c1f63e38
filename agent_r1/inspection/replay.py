"""Replays of a run's stored iterations under other configurations, and how credits and gradients agree."""

from __future__ import annotations

import logging
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from rich.progress import track
from torch import Tensor
from transformers import PreTrainedModel

from agent_r1.credit.assign import Indices, assign
from agent_r1.credit.batch import EQUAL, after_prompt, group_statistics, groups_of, returns_to_go
from agent_r1.credit.rewards import step_rewards
from agent_r1.inspection.stored import ImportedRun, PolicyOnDisk, StoredRun, stored_run
from agent_r1.inspection.thoughts import thoughts
from agent_r1.learn import losses
from agent_r1.learn.gradients import join_credit, policy_pass
from agent_r1.learn.learner import Learner, Reference, frozen, reference_of
from agent_r1.learn.model import load_tokenizer
from agent_r1.learn.scoring import Compute, compute_of
from agent_r1.params import Params
from agent_r1.params.credit import CreditParams
from agent_r1.params.places import IMPORTED, RunId, adapter_in
from agent_r1.params.sections import changed, override, validated
from agent_r1.params.train import TrainParams, UpdateParams
from agent_r1.pretrained import default_device
from agent_r1.records import Credit, Floats, Int64s, Metrics, Trajectory
from agent_r1.teaching.teacher import ServedTeacher
from agent_r1.training.watch import accepted_gap

REPLAYED = ("credit", "update")  # sections of `train` that a replay reads
# Keys of `update` that steer the optimiser, which a replay does not use.
OF_STEPS = {
    "learning_rate", "learning_rate_decay", "learning_rate_warmup", "weight_decay", "betas", "critic", "epochs",
    "minibatches", "max_grad_norm",
}  # fmt: skip
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


class Spread(NamedTuple):
    """Groups of an iteration whose returns differ about as much, under the run's own configuration."""

    low: float  # the smallest sample std of a group's returns
    high: float
    groups: int
    metrics: Metrics  # of these groups as one optimiser step; the cosine is with the gradient of all groups


class StoredIteration(NamedTuple):
    """What a run kept of one iteration."""

    number: int
    policy: PolicyOnDisk  # that sampled it, or the nearest
    trajectories: list[Trajectory]
    credits: list[Credit]

    def value_errors(self, params: CreditParams, max_tokens: int | None) -> Metrics:
        """See `value_errors`."""
        return value_errors(self.trajectories, self.credits, params, max_tokens)


class IterationReplay(NamedTuple):
    """One iteration under the run's own configuration and under others."""

    iteration: int
    policy: PolicyOnDisk  # at which the gradients were taken
    replays: list[Replay]  # the run's own first
    values: Metrics  # errors of the run's critic; empty without one
    spreads: list[Spread]  # the smallest first; empty without gradients, or if no question was tried twice
    thoughts: Metrics  # what first thoughts say of their inputs; empty without gradients or thoughts


def configurations(
    settings: Params, run: RunId, others: Sequence[str], changes: Sequence[str], reference: str = ""
) -> list[Configuration]:
    """The run's own configuration in params.yaml, followed by the others.

    Each has the `credit` and `update` of one of `others`, or of the run, with `changes` on top; `reference` is the
    folder of the run's, if that is a registered version. Raises ValueError for an unknown or invalid one, or one that
    needs a critic that the run did not train.
    """
    if run.sweep == IMPORTED:
        return list(_of_imported(settings, ImportedRun(run, settings.places.training(run)), others, changes))
    settings = settings.of(run)
    nested = parse_changes(changes)
    base = settings.run(run)
    base = base.model_copy(update={"reference": reference or base.reference})
    configs = [Configuration(run.run, base)]
    for other in others or ([run.run] if changes else []):
        name = " ".join([other, *changes])
        sections = base.model_dump() | settings.run(RunId(other)).model_dump(include=set(REPLAYED))
        where = f"{run.run} replayed as {name}"
        config = validated(TrainParams, override(sections, nested), where)
        config.require_read(nested, where)
        if config.credit.needs_critic and not base.credit.needs_critic:
            lacking = f"no critic, so it stored no values, which estimator {config.credit.estimator} of {name} needs"
            remedy = "replay a run with a critic, or take an estimator without one"
            raise ValueError(f"{run.run} trained {lacking}; {remedy}")
        configs.append(Configuration(name, config))
    return configs


def _of_imported(
    settings: Params, stored: ImportedRun, others: Sequence[str], changes: Sequence[str]
) -> Iterator[Configuration]:
    """Other runs' configurations, with the rewards that an imported one paid; its own is not known."""
    stored.require_exact()
    if not others:
        raise ValueError(f"how {stored.run} was credited is not in its files; name runs of params.yaml: --as grpo")
    paid = {"rewards": stored.about.rewards.model_dump()}
    for other in others:
        name = " ".join([other, *changes])
        train = override(settings.run(RunId(other)).model_dump(), parse_changes(changes))
        train["credit"] |= paid
        config = validated(TrainParams, train, f"{stored.run} replayed as {name}")
        if config.credit.needs_critic or config.needs_reference:
            raise ValueError(f"{name} has a critic or a reference, and no weights are imported; take one without them")
        yield Configuration(name, config)


def parse_changes(changes: Sequence[str]) -> dict[str, Any]:
    """Parses `["credit.lam=1.0"]` into `{"credit": {"lam": 1.0}}`. Values are YAML."""
    nested: dict[str, Any] = {}
    for change in changes:
        section, *rest = change.partition("=")[0].split(".")
        if not rest or "=" not in change:
            raise ValueError(f"{change!r} is no change to make; write credit.lam=1.0, for instance")
        if section not in REPLAYED:
            raise ValueError(f"{change!r} has no effect: a replay looks at {' and '.join(REPLAYED)} of train alone")
        if section == "update" and rest[0] in OF_STEPS:
            raise ValueError(f"{change!r} has no effect: a replay compares gradients, and takes no step with them")
        nested = override(nested, changed(change))
    return nested


def reads_untrained_values(run: CreditParams, other: CreditParams) -> bool:
    """Whether `other` reads values at tokens on which the critic of `run` was not trained."""
    if run.estimator == "step_gae":
        return other.needs_critic and other.estimator != "step_gae"
    masked = other.advantage_mask.recursion and other.advantage_mask.critic
    return other.needs_critic and run.advantage_mask.critic and not masked


def replay(
    settings: Params,
    run: RunId,
    compared: list[Configuration],
    *,
    folder: Path | None = None,
    iterations: Sequence[str] = (),
    with_gradient: bool = True,
) -> list[IterationReplay]:
    """Credits a run's stored trajectories under all `configurations`.

    Gradients are compared in iterations whose policy is on disk. `folder` replaces the run's own folder; for
    `iterations` see `StoredRun.choose`.
    """
    stored = stored_run(settings, run, folder)
    with_gradient = with_gradient and run.sweep != IMPORTED
    numbers = stored.choose(iterations)
    replayer = Replayer(stored, compared, settings.of(run), with_gradient=with_gradient)
    return [replayer.replay(number) for number in track(numbers, "replay", disable=not sys.stderr.isatty())]


class Replayer:
    """Replays the iterations of a stored run. Loads a model when it is first needed."""

    def __init__(
        self, stored: StoredRun, compared: list[Configuration], settings: Params, *, with_gradient: bool
    ) -> None:
        self.stored = stored
        self.compared = compared
        self.with_gradient = with_gradient
        self.max_tokens = settings.env.max_tokens
        self.model = settings.model
        self.limits = settings.engine.server
        self.taken: Path | None = None  # the folder of the policy that the learner has taken over
        trained = adapter_in(stored.policy_folder).is_dir()
        rank = settings.model.lora.rank
        if with_gradient and trained != bool(rank):
            how = f"{'with' if trained else 'without'} adapters, and model.lora.rank is {rank}"
            raise ValueError(f"{stored.run} was trained {how}; set it back, or compare without gradients")
        needed = any(config.train.needs_reference for config in compared)
        self.reference = self._reference(compared[0].train) if needed else None

    def replay(self, number: int) -> IterationReplay:
        """Replays one iteration under every configuration."""
        logger.info("iteration %d: credit under %s", number, ", ".join(config.name for config in self.compared))
        stored = self._read(number)
        assigned = [self._assign(stored, config) for config in self.compared]
        run_credits = assigned[0][0]
        if stored.credits:
            self._compare_with_stored(stored, run_credits)
        replays = []
        first = None
        for config, (credits_, metrics) in zip(self.compared, assigned, strict=True):
            gradient = self._gradient(stored, stored.trajectories, credits_, config.train)
            first = first or gradient
            metrics |= advantage_comparison(stored.trajectories, credits_, run_credits)
            replays.append(Replay(config, metrics | (gradient.compared_with(first) if gradient and first else {})))
        run = self.compared[0].train
        gradient_of = partial(self._gradient, stored, config=run)
        return IterationReplay(
            iteration=number,
            policy=stored.policy,
            replays=replays,
            values=value_errors(stored.trajectories, stored.credits, run.credit, self.max_tokens)
            if run.credit.needs_critic
            else {},
            spreads=list(spreads(stored.trajectories, run_credits, gradient_of, first)) if first else [],
            thoughts=thoughts(stored.trajectories, self.learner_at(stored.policy)) if first else {},
        )

    def _read(self, number: int) -> StoredIteration:
        trajectories = self.stored.trajectories(number)
        policy = self.stored.policy(trajectories[0].policy_version)
        return StoredIteration(number, policy, trajectories, self.stored.credits(number))

    def _compare_with_stored(self, stored: StoredIteration, assigned: list[Credit]) -> None:
        pairs = zip(assigned, stored.credits, strict=True)
        gap = max(np.abs(new.advantages - old.advantages).max() for new, old in pairs)
        if gap > OTHER_NUMERICS:
            logger.warning(
                "iteration %d: the advantages that %s was trained with differ by up to %.2g from those of its "
                "configuration in params.yaml, which has changed since; the comparison is with params.yaml's",
                *(stored.number, self.stored.run, gap),
            )

    def credited(self, number: int) -> list[list[Credit]]:
        """The credits of an iteration under every configuration."""
        stored = self._read(number)
        return [self._assign(stored, config)[0] for config in self.compared]

    def learner_at(self, policy: PolicyOnDisk) -> Learner:
        """The learner with the weights of a policy that is on disk."""
        if policy.path not in (None, self.stored.warm_start, self.taken):  # the learner begins with the warm start
            self.learner.take_policy(policy.path)
            self.taken = policy.path
        return self.learner

    def _assign(self, stored: StoredIteration, configuration: Configuration) -> tuple[list[Credit], Metrics]:
        """Assigns credit with the values that the run's critic gave in training."""
        train = configuration.train
        values = [row.values for row in stored.credits] if train.credit.needs_critic else None
        reference = None
        if self.reference is not None and train.needs_reference:
            reference = self.reference.logprobs(stored.trajectories, [row.action_mask for row in stored.trajectories])
        credits_, metrics = assign(
            stored.trajectories,
            values,
            train.credit,
            reference=reference,
            questions=train.rollout.questions,
            max_tokens=self.max_tokens,
        )
        if values and any(new.kept and not old.kept for new, old in zip(credits_, stored.credits, strict=True)):
            dropped = f"{configuration.name} keeps trajectories that the filter of {self.stored.run} dropped"
            remedy = "choose the same filter, or an estimator without a critic"
            raise ValueError(f"{dropped}, and no values are stored for those; {remedy}")
        return credits_, metrics

    @cached_property
    def learner(self) -> Learner:
        """The run's learner at its start, without a critic. It needs no more memory than training did."""
        run = self.compared[0].train
        return Learner(self.stored.warm_start, run.update, self.model, with_critic=False, seed=run.seed)

    def _reference(self, config: TrainParams) -> Reference | ServedTeacher:
        """The run's own, or the warm start; with adapters, the learner's own model without them."""
        start = self.stored.warm_start
        if config.reference_at:
            return ServedTeacher(config.reference_at, self.limits, load_tokenizer(start))
        if self.with_gradient and self.model.adapter:
            return reference_of(self.learner, start, config.reference)
        return frozen(config.reference or start, compute_of(self.model, config.update, default_device()))

    def _gradient(
        self, stored: StoredIteration, rows: list[Trajectory], credits_: list[Credit], config: TrainParams
    ) -> PolicyGradient | None:
        policy = stored.policy
        if policy.path is None or not self.with_gradient:
            return None
        logger.info("iteration %d: a gradient over %d trajectories", stored.number, len(rows))
        compute = compute_of(self.model, config.update, default_device())
        gradient = policy_gradient(self.learner_at(policy).policy, rows, credits_, config.update, compute)
        measure, allowed = accepted_gap(compute.dtype, config.update.canary_tolerance)
        gap = gradient.metrics.get(f"policy/mismatch_{measure}", 0.0)
        if policy.sampled_it and gap > OTHER_MODEL * allowed:
            other = f"{policy.path} is not the model that sampled iteration {stored.number} of {self.stored.run}"
            remedy = "bring its outputs back (dvc checkout), or compare without gradients"
            raise ValueError(f"{other}: logprobs differ by {gap:.2g} nats ({measure}); {remedy}")
        return gradient


def spreads(
    rows: Sequence[Trajectory],
    credits_: Sequence[Credit],
    gradient_of: Callable[[list[Trajectory], list[Credit]], PolicyGradient | None],
    whole: PolicyGradient,
) -> Iterator[Spread]:
    """The gradients of an iteration's groups by how much their returns differ; none if no question was tried twice."""
    groups = groups_of(rows)
    if len({*groups.tolist()}) == len(rows):
        return
    _, stds, _ = group_statistics(np.array([credit.return_ for credit in credits_]), groups)
    for part in by_spread(stds, groups):
        gradient = gradient_of([rows[i] for i in part], [credits_[i] for i in part])
        if gradient:
            count = len({*groups[part].tolist()})
            yield Spread(stds[part].min(), stds[part].max(), count, gradient.compared_with(whole))


def by_spread(stds: Floats, groups: Int64s) -> list[Indices]:
    """The rows [B] in parts by their groups' stds: those whose returns are equal, and thirds of the other groups.

    Source: RAGEN-2 (arXiv 2604.06268), gradients by bucket of reward variance.
    """
    differ = stds > EQUAL
    ranked = sorted({*groups[differ].tolist()}, key=lambda group: stds[groups == group][0])
    parts = [~differ, *(np.isin(groups, third) for third in np.array_split(ranked, 3))]
    return [np.flatnonzero(part) for part in parts if part.any()]


def advantage_comparison(
    trajectories: Sequence[Trajectory], credits_: Sequence[Credit], others: Sequence[Credit]
) -> Metrics:
    """The share of tokens with an advantage, and the agreement with other credits of the same trajectories.

    `advantage/nonzero_share` is of the tokens after the first prompt of all trajectories, kept or not. Pearson's
    `advantage/correlation` is at the action tokens that both keep; NaN without such tokens, or if one side is constant.
    """
    after_prompts = np.concatenate([after_prompt(trajectory.source) for trajectory in trajectories])
    rows = zip(trajectories, credits_, others, strict=True)
    acting = np.concatenate([t.action_mask & credit.kept & other.kept for t, credit, other in rows])
    advantages = np.concatenate([credit.advantages for credit in credits_], dtype=np.float64)
    compared = np.concatenate([credit.advantages for credit in others], dtype=np.float64)
    varied = acting.any() and advantages[acting].std() and compared[acting].std()
    return {
        "advantage/kept_share": float(np.mean([credit.kept for credit in credits_])),
        "advantage/nonzero_share": float(np.mean(advantages[after_prompts] != 0)),
        "advantage/correlation": float(np.corrcoef(advantages[acting], compared[acting])[0, 1]) if varied else math.nan,
    }


def value_errors(
    trajectories: Sequence[Trajectory], credits_: Sequence[Credit], params: CreditParams, max_tokens: int | None = None
) -> Metrics:
    """The errors of the kept trajectories' values against the undiscounted return to go.

    For action and observation tokens, if they occur: `value/<tokens>_rmse`, and `value/<tokens>_std` of that return,
    the error of the best constant.
    """
    rows = [row for row, credit in zip(trajectories, credits_, strict=True) if credit.kept]
    if not rows:
        return {}
    values = np.concatenate([credit.values for credit in credits_ if credit.kept])
    targets = np.concatenate([returns_to_go(row, step_rewards(row, params, max_tokens)[0]) for row in rows])
    actions = np.concatenate([row.action_mask for row in rows])
    observations = np.concatenate([after_prompt(row.source) for row in rows]) & ~actions
    errors: Metrics = {}
    for name, mask in (("action", actions), ("observation", observations)):
        if mask.any():
            errors[f"value/{name}_rmse"] = float(np.sqrt(np.mean((values[mask] - targets[mask]) ** 2)))
            errors[f"value/{name}_std"] = float(targets[mask].std())
    return errors


@dataclass(frozen=True, slots=True)
class PolicyGradient:
    """The gradient of a policy loss before clipping: a part through sampled tokens, and one through all others."""

    sampled: Tensor  # [P] float32, on the CPU
    observed: Tensor  # [P] float32, on the CPU; 0 with the loss mask on
    metrics: Metrics  # of the step, as training logs them; empty if no token is trained on
    observed_loss_share: float  # of the sum of the tokens' absolute losses; 0 if that is 0

    @property
    def total(self) -> Tensor:
        """[P] the gradient that the optimiser would get."""
        return self.sampled + self.observed

    @property
    def observed_share(self) -> float:
        """The observed part's share of both squared norms, in [0, 1]; 0 for a gradient of 0."""
        observed = _squared_norm(self.observed)
        both = _squared_norm(self.sampled) + observed
        return observed / both if both else 0.0

    def compared_with(self, other: PolicyGradient) -> Metrics:
        """The metrics of this gradient, and its cosine with another one of the same policy."""
        return {
            **self.metrics,
            "policy/grad_norm": self.total.double().norm().item(),
            "policy/observed_loss_share": self.observed_loss_share,
            "policy/observed_gradient_share": self.observed_share,
            "policy/gradient_cosine": cosine(self.total, other.total),
        }


def policy_gradient(
    policy: PreTrainedModel,
    trajectories: Sequence[Trajectory],
    credits: Sequence[Credit],
    params: UpdateParams,
    compute: Compute,
) -> PolicyGradient:
    """The gradient of all kept trajectories in one step, over the P trainable weights, none of which changes.

    Raises FloatingPointError, which names the trajectories, if a loss is not finite, and ValueError if `kl_loss` needs
    a reference that the credits lack.
    """
    rows = join_credit(policy, trajectories, credits, params, compute)  # those not kept have no loss token
    divisor = losses.normaliser([row.loss_tokens for row in rows], params)
    weights = [weight for weight in policy.parameters() if weight.requires_grad]
    gradients = torch.zeros(2, sum(weight.numel() for weight in weights))  # through sampled tokens, and through others
    batches: list[losses.LossTokens] = []
    for tokens, _ in policy_pass(policy, rows, params, compute, learn=True, whole=True):
        for gradient, part in zip(gradients, _parts(tokens), strict=True):
            if part:
                _add_gradient(gradient, (losses.token_losses(part, params) * part.weights).sum() / divisor, weights)
        batches.append(tokens.detach())
    return PolicyGradient(gradients[0], gradients[1], *_measures(batches, params, divisor))


def _parts(tokens: losses.LossTokens) -> list[losses.LossTokens | None]:
    """The tokens with a graph for those that were sampled alone, and for all others alone; None without any."""
    return [_only(tokens, part) if part.any() else None for part in (tokens.sampled, ~tokens.sampled)]


def _measures(batches: Sequence[losses.LossTokens], params: UpdateParams, divisor: int) -> tuple[Metrics, float]:
    """The metrics of a step, and what tokens that were not sampled have of its loss."""
    if not batches:
        return {}, 0.0
    step = losses.concatenate(batches)
    return _step_metrics(step, params, divisor), _observed_loss_share(step, params)


def _step_metrics(step: losses.LossTokens, params: UpdateParams, divisor: int) -> Metrics:
    acting = step.sampled
    metrics = losses.policy_metrics(step, params, divisor, int(acting.sum()))
    return metrics | losses.mismatch_metrics(step.logprobs[acting], step.sampler_logprobs[acting])


def _observed_loss_share(step: losses.LossTokens, params: UpdateParams) -> float:
    sizes = (losses.token_losses(step, params) * step.weights).abs().double()
    total = sizes.sum().item()
    return sizes[~step.sampled].sum().item() / total if total else 0.0


def _add_gradient(total: Tensor, loss: Tensor, weights: Sequence[Tensor]) -> None:
    """Adds the gradient of a loss to a total [P], and leaves the loss's graph as it is."""
    gradients = torch.autograd.grad(loss, weights, retain_graph=True, materialize_grads=True)
    for piece, gradient in zip(total.split([weight.numel() for weight in weights]), gradients, strict=True):
        piece += gradient.flatten().cpu()


def _squared_norm(vector: Tensor) -> float:
    return vector.double().square().sum().item()


def cosine(one: Tensor, other: Tensor) -> float:
    """The cosine of the angle between two vectors [P]; NaN if one of them is 0."""
    one = one.double()
    other = other.double()
    return float((one @ other / (one.norm() * other.norm())).item())


def _only(tokens: losses.LossTokens, part: Tensor) -> losses.LossTokens:
    """Cuts the graph of all tokens outside `part` [N]. Tokens of one span share a ratio, not a gradient."""
    logprobs = torch.where(part, tokens.logprobs, tokens.logprobs.detach())
    entropy = torch.where(part, tokens.entropy, tokens.entropy.detach())
    return replace(tokens, logprobs=logprobs, entropy=entropy)
