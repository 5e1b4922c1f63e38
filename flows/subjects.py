"""Who is evaluated: a run, a baseline, any model, or one behind an endpoint, each under one protocol."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from agent_r1 import tracking
from agent_r1.evaluation.protocols import (
    SCRIPTED,
    by_endpoint,
)
from agent_r1.evaluation.scores import (
    BASELINES,
)
from agent_r1.files import model_hash
from agent_r1.http.endpoint import Endpoint
from agent_r1.params import Params
from agent_r1.params.places import RunId
from agent_r1.params.sections import nearest
from agent_r1.params.stages import Protocol
from flows.policies import Policy, plain_name

LABEL = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*")
OF_A_SEED = re.compile(r"-seed\d+$")
TEXT_LEVEL = "endpoint: text, not token-exact"  # what an evaluation says of its engine


class Elsewhere(NamedTuple):
    """A model that somebody else serves."""

    endpoint: Endpoint
    model: str  # its name there

    @property
    def title(self) -> str:
        return f"{self.model} at {self.endpoint.url}"


@dataclass(frozen=True, slots=True)
class Subject:
    """A policy as it is evaluated."""

    label: str  # what the evaluation is called
    name: str  # the `run` of its predictions: of a run or a baseline, else the evaluation's label
    seed: int  # of its training; of a model that no stage has made, the evaluation's
    policy: Policy  # where it acts elsewhere the warm start, in whose tokens limits are counted
    protocol: Protocol
    shown: dict[str, Any]  # what MLflow shows of it, where the scores have a run of their own
    training: Path | None = None  # the folder of its training, if the scores belong to that one's MLflow run
    elsewhere: Elsewhere | None = None

    @property
    def title(self) -> str:
        """Who acts, for people."""
        return (self.elsewhere or self.policy).title

    def under(self, settings: Params) -> Params:
        """The settings as they hold for it."""
        return by_endpoint(settings) if self.elsewhere else self.policy.as_trained(settings)

    def identity(self) -> str:
        """What tells it from others: the hash of its weights, or who acts in their place.

        Raises ValueError if they are not those of the version that was meant.
        """
        if self.protocol in SCRIPTED:
            return self.protocol
        if self.elsewhere:
            return self.elsewhere.title
        version, found = self.policy.version, model_hash(self.policy.path)
        if version and found != version.descriptor.policy_hash:  # it was the right one before
            raise ValueError(
                f"{self.policy.path} was changed while {version.reference} was evaluated; evaluate it again"
            )
        return found


def require_known(complaint: str, name: str | None, valid: Sequence[str]) -> None:
    if name is not None and name not in valid:
        raise ValueError(f"{complaint} {name!r}{nearest(name, valid)}")


def subject_of(
    settings: Params,
    run: RunId | None,
    baseline: str | None,
    model: str,
    endpoint: str | None,
    protocol: Protocol | None,
    changes: Sequence[str],
    as_label: str | None,
) -> Subject:
    """The policy of the run, or else of the baseline, or else the model, of the endpoint where there is one."""
    if run is not None:
        config = settings.run(run)
        label = _label(settings, run.label, changes, as_label)
        name = label if changes else run.name
        policy, seed = Policy.of_run(settings, run), config.seed
        shown = tracking.run_params(name, policy.as_trained(settings), config)
        training = None if changes else settings.places.training(run)
        return Subject(label, name, seed, policy, protocol or "tool_call", shown, training)
    if baseline is not None:
        require_known("there is no baseline", baseline, [*BASELINES])
        if protocol:
            raise ValueError(
                f"{baseline} is the warm-started model under a protocol of its own; leave out --protocol, or evaluate "
                f"--model {settings.places.warm_start}"
            )
        label = _label(settings, baseline, changes, as_label)
        policy, shown = Policy.of_warm_start(settings), tracking.untrained_params(label, settings)
        return Subject(label, label, settings.warm_start.seed, policy, BASELINES[baseline], shown)
    if endpoint is not None:
        return _served(settings, model, endpoint, protocol or "tool_call", changes, as_label)
    policy = Policy.named(model)
    version = policy.version
    label = _label(settings, policy.name if version else plain_name(model), changes, as_label, foreign=True)
    seed = version.descriptor.seed if version else settings.evaluate.seed
    shown = tracking.untrained_params(label, policy.as_trained(settings), version.reference if version else model)
    return Subject(label, label, seed, policy, protocol or "tool_call", shown)


def _served(
    settings: Params, model: str, url: str, protocol: Protocol, changes: Sequence[str], as_label: str | None
) -> Subject:
    """A model by its name at an address, under the limits that `engine.server` has for servers."""
    limits = settings.engine.server
    elsewhere = Elsewhere(Endpoint(url, timeout_s=limits.timeout_s, retries=limits.retries), model)
    label = _label(settings, plain_name(model), changes, as_label, foreign=True)
    shown = tracking.untrained_params(label, by_endpoint(settings), elsewhere.title) | {"engine": TEXT_LEVEL}
    policy = Policy.of_warm_start(settings)
    return Subject(label, label, settings.evaluate.seed, policy, protocol, shown, elsewhere=elsewhere)


def _label(settings: Params, plain: str, changes: Sequence[str], as_label: str | None, *, foreign: bool = False) -> str:
    """What the evaluation is called: what was asked for, or the policy with what is changed; refused where taken."""
    label = as_label or "-".join([plain, *changes])
    if not LABEL.fullmatch(label):
        raise ValueError(
            f"{label!r} is to be a folder; give --as a name of letters, digits, _, - and ., - and . not first"
        )
    whose = OF_A_SEED.sub("", label)
    if (changes or foreign) and (whose in settings.runs or whose in BASELINES):
        raise ValueError(f"{label!r} is the label of {whose}'s own evaluation; choose another with --as")
    return label
