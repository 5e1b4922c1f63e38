"""params.yaml as typed values: every knob, its range, and the combinations that are refused."""

from __future__ import annotations

import difflib
import hashlib
import json
from pathlib import Path
from typing import Annotated, Any, Literal, Self, TypeVar

import yaml
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, model_validator

Count = Annotated[int, Field(ge=1)]
Natural = Annotated[int, Field(ge=0)]
Share = Annotated[float, Field(ge=0, le=1)]
Positive = Annotated[float, Field(gt=0)]
Weight = Annotated[float, Field(ge=0, allow_inf_nan=False)]


def _off_or_above_one(multiple: float) -> float:
    if 0 < multiple <= 1:
        raise ValueError("a multiple that rises is above 1, or 0 to switch it off")
    return multiple


Multiple = Annotated[Weight, AfterValidator(_off_or_above_one)]


class Section(BaseModel):
    """A mapping of params.yaml: every key is required, none is unknown."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class AtlasParams(Section):
    people: Annotated[int, Field(ge=20)]
    films: Annotated[int, Field(ge=10)]
    companies: Annotated[int, Field(ge=5)]
    cities: Annotated[int, Field(ge=5)]
    countries: Annotated[int, Field(ge=3)]
    train_questions: Count
    dev_questions: Count
    test_questions: Count


class HotpotParams(Section):
    train: Path
    dev: Path
    max_questions: Natural


class BM25Params(Section):
    k1: Positive
    b: Share


class PrepareParams(Section):
    dataset: Literal["atlas", "hotpotqa"]
    seed: Natural
    atlas: AtlasParams
    hotpotqa: HotpotParams
    bm25: BM25Params


class ModelParams(Section):
    path: str
    dtype: Literal["auto", "float32", "bfloat16"]


class WarmStartParams(Section):
    seed: Natural
    fine_tune: bool
    vocab_size: Annotated[int, Field(ge=384)]
    hidden_size: Count
    layers: Annotated[int, Field(ge=2)]
    heads: Count
    demonstrations: Count
    naive_rag_demonstrations: Natural
    stop_early: Share
    wrong_relation: Share
    batch_size: Count
    steps: Count
    learning_rate: Positive
    observation_weight: Weight


class EnvParams(Section):
    top_k: Count
    max_steps: Count
    max_tokens: Count
    max_action_tokens: Count

    @model_validator(mode="after")
    def _room_for_an_action(self) -> Self:
        if self.max_action_tokens >= self.max_tokens:
            raise ValueError(
                f"max_action_tokens {self.max_action_tokens} leaves no room for a prompt in "
                f"max_tokens {self.max_tokens}; raise max_tokens"
            )
        return self


class RolloutParams(Section):
    questions: Count
    samples: Count
    temperature: Positive
    top_p: Annotated[float, Field(gt=0, le=1)]

    @model_validator(mode="after")
    def _sampled_logprobs_are_the_policys(self) -> Self:
        if self.top_p < 1:
            raise ValueError(
                f"top_p {self.top_p} cuts the distribution that the loss assumes; training needs top_p: 1.0"
            )
        if self.temperature != 1:
            raise ValueError(
                f"temperature {self.temperature} samples from another distribution than the loss assumes; "
                "training needs temperature: 1.0"
            )
        return self


class AdvantageMask(Section):
    """Where action tokens are the only time steps; see `agent_r1.credit.masks`."""

    recursion: bool
    whitening: bool
    critic: bool


class RewardWeights(Section):
    agent_r1: Weight
    em: Weight
    f1: Weight
    grounded: Weight
    think: Weight
    valid_call: Weight
    failed_call: Weight
    progress: Weight
    repeat_call: Weight
    no_answer: Weight

    @model_validator(mode="after")
    def _some_reward(self) -> Self:
        if not any(self.model_dump().values()):
            raise ValueError("all reward weights are 0: nothing can be learned; set at least one above 0")
        return self


Estimator = Literal[
    "gae", "step_gae", "bi_level_gae", "grpo", "dr_grpo", "rloo", "reinforce_pp", "reinforce_pp_baseline"
]
STEP_LEVEL = frozenset({"step_gae", "bi_level_gae"})  # work on steps, which hold action tokens and no others
WITH_CRITIC = frozenset({"gae", *STEP_LEVEL})
WITH_GROUPS = frozenset({"grpo", "dr_grpo", "rloo", "reinforce_pp_baseline"})  # one advantage per trajectory
WITH_WHITENING = frozenset({*WITH_CRITIC, "reinforce_pp", "reinforce_pp_baseline"})


class FilterParams(Section):
    """Which groups are trained on; see `agent_r1.credit.filters`."""

    kind: Literal["none", "top_p", "top_fraction"]
    share: Annotated[float, Field(gt=0, le=1)]

    @model_validator(mode="after")
    def _share_has_an_effect(self) -> Self:
        if self.kind == "none" and self.share < 1:
            raise ValueError(
                f"share {self.share} has no effect with kind: none, which keeps every group; "
                "choose kind: top_p or top_fraction, or set share: 1.0"
            )
        return self


class CreditParams(Section):
    estimator: Estimator
    gamma: Share
    lam: Share
    step_gamma: Share
    step_lam: Share
    loss_mask: bool
    advantage_mask: AdvantageMask
    kl_reward: Weight
    rewards: RewardWeights
    filter: FilterParams

    @property
    def needs_critic(self) -> bool:
        return self.estimator in WITH_CRITIC

    @property
    def needs_groups(self) -> bool:
        return self.estimator in WITH_GROUPS

    @model_validator(mode="after")
    def _penalty_keeps_its_scale(self) -> Self:
        if self.estimator == "grpo" and self.kl_reward:
            raise ValueError(
                f"kl_reward {self.kl_reward} with estimator grpo: where a group's rewards are equal, the penalty alone "
                "would be scaled up to unit variance, whatever the coefficient; set kl_reward: 0 and "
                "train.update.kl_loss instead"
            )
        return self

    @model_validator(mode="after")
    def _switches_have_an_effect(self) -> Self:
        mask = self.advantage_mask
        if self.estimator in STEP_LEVEL and not (self.loss_mask and mask.recursion and mask.critic):
            raise ValueError(
                f"estimator {self.estimator} works on steps, which hold action tokens only: leave loss_mask, "
                "advantage_mask.recursion and advantage_mask.critic true"
            )
        if not self.loss_mask and mask.recursion:
            raise ValueError(
                "loss_mask: false has no effect while advantage_mask.recursion is true: the advantage at every "
                "observation token is 0; set advantage_mask.recursion: false as well"
            )
        if not self.needs_critic and not mask.critic:
            raise ValueError(f"estimator {self.estimator} trains no critic: leave advantage_mask.critic true")
        if self.estimator not in WITH_WHITENING and not mask.whitening:
            raise ValueError(
                f"estimator {self.estimator} does not whiten over the batch: leave advantage_mask.whitening true"
            )
        if self.loss_mask and mask.whitening and not mask.recursion and self._observations_cannot_matter():
            raise ValueError(
                f"advantage_mask.recursion: false has no effect on estimator {self.estimator} at gamma {self.gamma} "
                f"and lam {self.lam} while the loss mask is on: the advantages at action tokens are the same either "
                "way; set loss_mask: false or recursion: true"
            )
        return self

    def _observations_cannot_matter(self) -> bool:
        """Whether action tokens get the same raw advantages when observation tokens are time steps too (DESIGN §6)."""
        if self.estimator == "gae":
            return self.gamma == self.lam == 1  # the deltas telescope
        return self.needs_groups or self.gamma == 1


class UpdateParams(Section):
    learning_rate: Positive
    critic_learning_rate: Positive
    learning_rate_decay: Literal["none", "linear"]
    critic_warmup_iterations: Natural
    epochs: Count
    minibatches: Count
    ratio: Literal["token", "step", "sequence"]
    clip_low: Annotated[float, Field(gt=0, lt=1)]
    clip_high: Positive
    dual_clip: Annotated[float, Field(gt=1, allow_inf_nan=False)]
    importance_cap: Weight
    kl_loss: Weight
    entropy_bonus: Weight
    aggregation: Literal["token_mean", "sequence_mean", "constant_length"]
    constant_length: Natural
    value_clip: Positive
    max_grad_norm: Positive
    max_tokens_per_microbatch: Count
    canary_tolerance: Positive

    @property
    def regularised(self) -> bool:
        """Whether the policy loss has terms that give a gradient where the advantage is 0."""
        return self.kl_loss > 0 or self.entropy_bonus > 0

    @model_validator(mode="after")
    def _cap_lets_agreement_pass(self) -> Self:
        if 0 < self.importance_cap < 1:
            raise ValueError(
                f"importance_cap {self.importance_cap} cuts the weight even where sampler and learner agree, which "
                "only scales the loss; set it to 1 or more, or to 0 to switch it off"
            )
        return self

    @model_validator(mode="after")
    def _length_goes_with_its_aggregation(self) -> Self:
        if (self.aggregation == "constant_length") != (self.constant_length > 0):
            raise ValueError(
                f"constant_length {self.constant_length} with aggregation {self.aggregation}: it is the tokens that "
                "aggregation constant_length divides a trajectory's sum by, above 0 there and 0 with the others"
            )
        return self


class MonitorThresholds(Section):
    """How far each sign of collapse may go; 0 switches it off. See `agent_r1.credit.collapse`."""

    reward_std_fall: Share
    entropy_fall: Share
    entropy_rise: Multiple
    grad_norm_spike: Multiple
    valid_call_fall: Share
    answer_repetition: Share
    thought_repetition: Share


class MonitorParams(Section):
    on_collapse: Literal["warn", "stop", "rollback"]
    max_rollbacks: Natural
    patience: Count
    first_iterations: Count
    thresholds: MonitorThresholds

    @model_validator(mode="after")
    def _reactions_have_an_effect(self) -> Self:
        if (self.on_collapse == "rollback") != (self.max_rollbacks > 0):
            raise ValueError(
                f"max_rollbacks {self.max_rollbacks} does not go with on_collapse: {self.on_collapse}; "
                "it is at least 1 with rollback, and 0 without"
            )
        if self.on_collapse != "warn" and not any(self.thresholds.model_dump().values()):
            raise ValueError(
                f"on_collapse: {self.on_collapse} has no effect while every threshold is 0; set one above 0, or warn"
            )
        return self


class TrainParams(Section):
    seed: Natural
    iterations: Count
    rollout: RolloutParams
    credit: CreditParams
    update: UpdateParams
    monitor: MonitorParams

    def rate(self, iteration: int) -> float:
        """The share of the learning rates that an iteration's steps take: 1 at first, `1 / iterations` in the last."""
        return 1.0 if self.update.learning_rate_decay == "none" else 1 - iteration / self.iterations

    @property
    def needs_reference(self) -> bool:
        """Whether the policy is held near the model it started from."""
        return self.credit.kl_reward > 0 or self.update.kl_loss > 0

    @model_validator(mode="after")
    def _groups_where_needed(self) -> Self:
        if self.credit.needs_groups and self.rollout.samples < 2:
            raise ValueError(
                f"estimator {self.credit.estimator} compares the episodes of a group, and rollout.samples is "
                f"{self.rollout.samples}; set it to 2 or more"
            )
        return self

    @model_validator(mode="after")
    def _groups_to_filter(self) -> Self:
        kind, samples = self.credit.filter.kind, self.rollout.samples
        if kind == "none":
            return self
        if samples < 2:
            raise ValueError(
                f"credit.filter {kind} looks at how returns differ within a group, and rollout.samples is {samples}; "
                "set it to 2 or more"
            )
        if samples < self.update.minibatches:
            raise ValueError(
                f"credit.filter {kind} may keep a single group, whose {samples} trajectories do not fill "
                f"update.minibatches {self.update.minibatches}; lower it or raise rollout.samples"
            )
        return self

    @model_validator(mode="after")
    def _time_to_react(self) -> Self:
        if self.monitor.on_collapse != "warn" and self.iterations <= self.monitor.patience:
            raise ValueError(
                f"monitor.on_collapse: {self.monitor.on_collapse} has no effect: with monitor.patience "
                f"{self.monitor.patience} no alarm is possible in {self.iterations} iterations; lower the patience"
            )
        return self


class EvaluateParams(Section):
    seed: Natural
    questions: Natural
    bootstrap_samples: Annotated[int, Field(ge=100)]


class Params(Section):
    prepare: PrepareParams
    model: ModelParams
    warm_start: WarmStartParams
    env: EnvParams
    train: TrainParams
    evaluate: EvaluateParams
    runs: dict[str, dict[str, Any] | None]
    repro_runs: list[str]

    @model_validator(mode="after")
    def _runs_resolve(self) -> Self:
        for name in self.runs:
            self.run(name)
        for name in self.repro_runs:
            if name not in self.runs:
                raise ValueError(f"repro_runs names {name!r}, which runs: does not define{_nearest(name, self.runs)}")
        return self

    def run(self, name: str) -> TrainParams:
        """The `train` section with the overrides of one run.

        Raises:
            ValueError: no such run, or its overrides are unknown or refused.
        """
        if name not in self.runs:
            raise ValueError(f"there is no run {name!r} under runs:{_nearest(name, self.runs)}")
        merged = _override(self.train.model_dump(), self.runs[name] or {})
        return _validated(TrainParams, merged, f"runs.{name}")


S = TypeVar("S", bound=Section)


def load(path: Path = Path("params.yaml")) -> Params:
    """Reads and checks a parameter file.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: a key is unknown or missing, or a value is out of range; the message names it.
    """
    if not path.exists():
        raise FileNotFoundError(f"{path.absolute()} does not exist; run from the project's root")
    content = yaml.safe_load(path.read_text())
    if not isinstance(content, dict):
        raise ValueError(f"{path}: expected a mapping of sections, found {type(content).__name__}")
    return _validated(Params, content, str(path))


def fingerprint(*parts: Any) -> str:
    """A short stable hash of parameters and other JSON-like values."""
    plain = [part.model_dump(mode="json") if isinstance(part, BaseModel) else part for part in parts]
    return hashlib.sha256(json.dumps(plain, sort_keys=True).encode()).hexdigest()[:16]


def _override(base: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    merged = dict(base)
    for key, value in changes.items():
        both_mappings = isinstance(value, dict) and isinstance(base.get(key), dict)
        merged[key] = _override(base[key], value) if both_mappings else value
    return merged


def _validated(kind: type[S], content: dict[str, Any], where: str) -> S:
    try:
        return kind.model_validate(content)
    except ValidationError as error:
        raise ValueError("\n".join(_explain(where, kind, problem) for problem in error.errors())) from None


def _explain(where: str, kind: type[Section], problem: Any) -> str:
    location = [str(part) for part in problem["loc"]]
    key = ".".join(location)
    if problem["type"] == "extra_forbidden":
        return f"{where}: unknown key {key!r}{_nearest(location[-1], _keys_at(kind, location[:-1]))}"
    if problem["type"] == "missing":
        return f"{where}: key {key!r} is missing"
    message = problem["msg"].removeprefix("Value error, ")
    given = "" if isinstance(problem["input"], dict) else f"; got {problem['input']!r}"
    return f"{where}: {key + ': ' if key else ''}{message}{given}"


def _keys_at(kind: type[Section], location: list[str]) -> list[str]:
    for part in location:
        annotation = kind.model_fields[part].annotation
        assert isinstance(annotation, type), annotation
        assert issubclass(annotation, Section), annotation
        kind = annotation
    return list(kind.model_fields)


def _nearest(name: str, valid: Any) -> str:
    close = difflib.get_close_matches(name, list(valid), n=1, cutoff=0.4)
    return f"; did you mean {close[0]!r}?" if close else f"; valid names: {', '.join(valid)}"
