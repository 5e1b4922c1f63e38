"""What an evaluation is of: a policy, how it is put to the questions, and where the results belong."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agent_r1 import tracking
from agent_r1.evaluation.baselines import BASELINES
from agent_r1.params import PROTOCOLS, Params, Protocol
from agent_r1.params.sections import nearest
from flows.policies import Policy, named, trained, warm_start
from flows.stored.paths import WARM_START, evaluate_dir, label, train_dir

LABEL = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*")
OF_A_SEED = re.compile(r"-seed\d+$")


@dataclass(frozen=True, kw_only=True, slots=True)
class Choice:
    """What the command line says: which policy, and how it is evaluated."""

    name: str | None = None  # a run or a baseline of params.yaml; or else ...
    model: str | None = None  # ... a reference to a registered policy, a Hugging Face folder or a hub id
    seed: int | None = None  # of the run, in place of its own
    sweep: str | None = None  # of which the run is a member
    protocol: str | None = None  # in place of tool_call
    dataset: str | None = None  # the one whose questions are asked, in place of all
    as_label: str | None = None  # what the evaluation is called, in place of what follows from the rest
    into: str | None = None  # the folder of the results, in place of the label's under outputs/evaluate

    @property
    def changes(self) -> list[str]:
        """What tells this evaluation of a run or a baseline from its own, the one that the report shows."""
        return [change for change in (self.protocol, self.dataset, self.as_label) if change]

    def folder(self, own: str) -> Path:
        """Of the results of an evaluation that is called `own`."""
        return Path(self.into) if self.into else evaluate_dir(own, sweep=self.sweep)


@dataclass(frozen=True, kw_only=True, slots=True)
class Agent:
    """A policy as it is evaluated."""

    label: str  # what the evaluation is called
    name: str  # the `run` of its predictions: of a run or a baseline, else the evaluation's label
    seed: int  # of its training; of a model that no stage has made, the evaluation's
    policy: Policy
    protocol: Protocol
    folder: Path  # of the results
    training: Path | None  # the folder of its training, if the scores belong to that one's MLflow run
    shown: dict[str, Any]  # what MLflow shows of it otherwise


def chosen(settings: Params, choice: Choice) -> Agent:
    """The agent that is meant.

    Raises:
        ValueError: there is no such run, baseline, protocol or data set, options exclude each other, or the label is
            taken or not fit for a folder.
        FileNotFoundError: the policy of a run or a baseline was not made yet.
    """
    if (choice.name is None) == (choice.model is None):
        raise ValueError(
            "say what to evaluate: either --name, a run or a baseline, or --model, a reference, folder or hub id"
        )
    _require_known("there is no protocol", choice.protocol, PROTOCOLS)
    _require_known("no data set is prepared called", choice.dataset, settings.prepare.datasets)
    if choice.model is not None:
        return _model(settings, choice, choice.model)
    assert choice.name is not None
    return (_baseline if choice.name in BASELINES else _run)(settings, choice, choice.name)


def _require_known(complaint: str, name: str | None, valid: Sequence[str]) -> None:
    if name is not None and name not in valid:
        raise ValueError(f"{complaint} {name!r}{nearest(name, valid)}")


def _run(settings: Params, choice: Choice, run: str) -> Agent:
    config = settings.run(run, choice.seed, choice.sweep)
    own = _label(settings, choice, label(run, choice.seed))
    name = own if choice.changes else run
    return Agent(
        label=own,
        name=name,
        seed=config.seed,
        policy=trained(settings, run, choice.seed, choice.sweep),
        protocol=_protocol(choice),
        folder=choice.folder(own),
        training=None if choice.changes else train_dir(run, choice.seed, choice.sweep),
        shown=tracking.run_params(name, settings, config),
    )


def _baseline(settings: Params, choice: Choice, baseline: str) -> Agent:
    if choice.seed is not None or choice.sweep or choice.protocol:
        raise ValueError(
            f"{baseline} is the warm-started model, which has no seed or sweep, under a protocol of its own; leave out "
            f"--seed, --sweep and --protocol, or evaluate --model {WARM_START}"
        )
    own = _label(settings, choice, baseline)
    return Agent(
        label=own,
        name=own,
        seed=settings.warm_start.seed,
        policy=warm_start(),
        protocol=BASELINES[baseline],
        folder=choice.folder(own),
        training=None,
        shown=tracking.baseline_params(own, settings),
    )


def _model(settings: Params, choice: Choice, model: str) -> Agent:
    if choice.seed is not None or choice.sweep:
        raise ValueError("--seed and --sweep choose a run; leave them out with --model")
    policy = named(model)
    version = policy.registered
    plain = version.name if version else "--".join(part for part in Path(model).parts if part.strip("/."))
    own = _label(settings, choice, plain)
    return Agent(
        label=own,
        name=own,
        seed=version.descriptor.seed if version else settings.evaluate.seed,
        policy=policy,
        protocol=_protocol(choice),
        folder=choice.folder(own),
        training=None,
        shown=tracking.model_params(own, settings, version.reference if version else model),
    )


def _protocol(choice: Choice) -> Protocol:
    [protocol] = [each for each in PROTOCOLS if each == (choice.protocol or "tool_call")]
    return protocol


def _label(settings: Params, choice: Choice, plain: str) -> str:
    """What the evaluation is called: what was asked for, or the policy with what is changed; refused where taken."""
    own = choice.as_label or "-".join([plain, *choice.changes])
    if not LABEL.fullmatch(own):
        raise ValueError(
            f"{own!r} is to be a folder; give --as a name of letters, digits, _, - and ., - and . not first"
        )
    whose = OF_A_SEED.sub("", own)
    if (choice.model or choice.changes) and (whose in settings.runs or whose in BASELINES):
        raise ValueError(f"{own!r} is the label of {whose}'s own evaluation; choose another with --as")
    return own
