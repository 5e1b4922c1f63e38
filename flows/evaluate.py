"""The evaluate stage: `agent-r1 evaluate --run NAME`, `--baseline NAME`, or `--model MODEL` for any other policy.

With `--endpoint URL` somebody else serves the model, and it is asked in text. Its evaluation says that it is not
token-exact.
"""

from __future__ import annotations

import json
import logging
import re
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from agent_r1 import params, tracking
from agent_r1.envs.kinds import require_playable
from agent_r1.evaluation.protocols import SCRIPTED, open_exam, questions_under, with_endpoint
from agent_r1.evaluation.scores import (
    BASELINES,
    BOUNDS,
    asked_questions,
    gold_recall_by_step,
    headline,
    in_words,
    outcomes,
    predict,
    score,
)
from agent_r1.evaluation.transcript import plain_text, readable
from agent_r1.files import model_hash, write_text
from agent_r1.http.endpoint import Endpoint
from agent_r1.learn.model import load_tokenizer
from agent_r1.params import Params
from agent_r1.params.places import RunId
from agent_r1.params.sections import nearest
from agent_r1.params.stages import PROTOCOLS, Protocol
from agent_r1.records import Prediction, Question, Trajectory, words_of
from agent_r1.rollout.chat import Chat
from agent_r1.tables import read_rows, write_rows
from agent_r1.tracking.runs import KIND_TAG, VERSION_TAG
from flows.policies import Policy, plain_name
from flows.stage import accelerator
from flows.terminal import counted

LABEL = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*")
OF_A_SEED = re.compile(r"-seed\d+$")
TEXT_LEVEL = "endpoint: text, not token-exact"  # the engine in an evaluation of an endpoint

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class EvaluationRequest:
    """The options of an evaluation. Exactly one of `run`, `baseline` and `model` says which policy."""

    run: RunId | None = None
    sweep: str = ""  # of a baseline that a sweep has for its own
    baseline: str | None = None
    model: str | None = None  # a reference, folder or hub id, or the name at the endpoint
    endpoint: str | None = None  # an address
    protocol: Protocol | None = None  # in place of `tool_call`
    dataset: str | None = None  # in place of all prepared data sets
    as_label: str | None = None  # the name of folder and MLflow run, in place of the default
    into: Path | None = None  # the folder to write; in MLflow such an evaluation stays beside earlier ones

    @property
    def changes(self) -> list[str]:
        """The parts of the default label that tell it from the policy's own evaluation."""
        return [change for change in (self.protocol, self.dataset, self.as_label) if change]

    def require_valid(self, settings: Params) -> None:
        """Raises ValueError for options that do not go together, and for names that do not exist."""
        if [self.run, self.baseline, self.model].count(None) != 2:
            raise ValueError(
                "say what to evaluate: one of --run, --baseline and --model, a reference, folder or hub id"
            )
        if self.endpoint is not None and (self.model is None or self.protocol in SCRIPTED):
            raise ValueError(
                "--endpoint is where --model NAME acts; name one, and no protocol under which no model does"
            )
        _require_known("there is no protocol", self.protocol, PROTOCOLS)
        _require_known("no data set is prepared called", self.dataset, settings.prepare.datasets)
        _require_known("there is no baseline", self.baseline, [*BASELINES])


def _require_known(complaint: str, name: str | None, valid: Sequence[str]) -> None:
    if name is not None and name not in valid:
        raise ValueError(f"{complaint} {name!r}{nearest(name, valid)}")


class Elsewhere(NamedTuple):
    """A model that somebody else serves."""

    endpoint: Endpoint
    model: str  # its name there

    @property
    def title(self) -> str:
        return f"{self.model} at {self.endpoint.url}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Subject:
    """A policy as it is evaluated."""

    label: str  # the name of the evaluation
    name: str  # the `run` of its predictions: a run's or a baseline's name, else the label
    seed: int  # of its training; for a model that no stage made, the evaluation's
    policy: Policy  # for a model elsewhere the warm start, in whose tokens limits are counted
    protocol: Protocol
    known_as: str | None = None  # the model's path in MLflow; None for the warm start and for runs
    training: Path | None = None  # the folder of its training, if the scores belong to that one's MLflow run
    elsewhere: Elsewhere | None = None

    @property
    def title(self) -> str:
        """The name of the policy, for people."""
        return (self.elsewhere or self.policy).title

    def under(self, settings: Params) -> Params:
        """The settings as they hold for it."""
        return with_endpoint(settings) if self.elsewhere else self.policy.as_trained(settings)

    def shown(self, settings: Params) -> dict[str, Any]:
        """The parameters for MLflow, if the scores have a run of their own; `settings` come from `under`."""
        if self.policy.run and not self.known_as:
            return tracking.run_params(self.name, settings, settings.run(self.policy.run))
        engine = {"engine": TEXT_LEVEL} if self.elsewhere else {}
        return tracking.untrained_params(self.label, settings, self.known_as) | engine

    def identity(self) -> str:
        """The hash of its weights, or the name of the script or model that acts in their place.

        Raises ValueError if the weights are not those of the registered version.
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


def subject_of(settings: Params, asked: EvaluationRequest) -> Subject:
    """The policy that is asked for, under its protocol. Raises ValueError if its label is another evaluation's."""
    model, seed, protocol, elsewhere = str(asked.model), settings.evaluate.seed, asked.protocol or "tool_call", None
    known_as = None  # the model in MLflow, where it is not the warm start
    if asked.run is not None:
        plain, seed, policy = asked.run.label, settings.run(asked.run).seed, Policy.of_run(settings, asked.run)
    elif asked.baseline is not None:
        if asked.protocol:
            raise ValueError(
                f"{asked.baseline} is the warm-started model under a protocol of its own; leave out --protocol, or "
                f"evaluate --model {settings.places.warm_start}"
            )
        plain, seed, policy = asked.baseline, settings.warm_start.seed, Policy.of_warm_start(settings)
        protocol = BASELINES[asked.baseline]
    elif asked.endpoint is not None:
        limits = settings.engine.server
        elsewhere = Elsewhere(Endpoint(asked.endpoint, timeout_s=limits.timeout_s, retries=limits.retries), model)
        plain, known_as, policy = plain_name(model), elsewhere.title, Policy.of_warm_start(settings)
    else:
        plain, known_as, policy = plain_name(model), model, Policy.named(model)
        if version := policy.version:
            plain, known_as, seed = policy.name, version.reference, version.descriptor.seed
    label = _label(settings, plain, asked)
    as_trained = asked.run is not None and not asked.changes
    return Subject(
        label=label,
        name=asked.run.name if asked.run and as_trained else label,
        seed=seed,
        policy=policy,
        protocol=protocol,
        known_as=known_as,
        training=settings.places.training(asked.run) if asked.run and as_trained else None,
        elsewhere=elsewhere,
    )


def _label(settings: Params, plain: str, asked: EvaluationRequest) -> str:
    """The name of the evaluation: the one asked for, or the policy's with all changes. Refuses one that is taken."""
    label = asked.as_label or "-".join([plain, *asked.changes])
    if not LABEL.fullmatch(label):
        raise ValueError(
            f"{label!r} is to be a folder; give --as a name of letters, digits, _, - and ., and . not first"
        )
    whose = OF_A_SEED.sub("", label)
    if (asked.changes or asked.model) and (whose in settings.runs or whose in BASELINES):
        raise ValueError(f"{label!r} is the label of {whose}'s own evaluation; choose another with --as")
    return label


def evaluate(asked: EvaluationRequest) -> None:
    """Puts the test questions to a policy, greedily, and grades its answers.

    Writes predictions.parquet, trajectories.parquet, scores.json and hashes.json to a folder under outputs/evaluate.
    The scores and some readable episodes go to MLflow: to the run of the training if a trained run is evaluated as it
    was trained, else to a run of their own.
    """
    settings = params.load()
    asked.require_valid(settings)
    subject = subject_of(settings, asked)
    sweep = asked.run.sweep if asked.run else asked.sweep
    folder = asked.into or settings.places.evaluation(subject.label, sweep)
    tracked = _ask(subject.under(settings), subject, folder, asked)
    write_text(folder / "mlflow_run_id", tracked.run_id)


def _ask(settings: Params, subject: Subject, folder: Path, asked: EvaluationRequest) -> tracking.Run:
    """Asks, grades, and writes the results to the folder and to MLflow."""
    began_s, dataset = time.time(), asked.dataset
    prepared = [row for row in read_rows(settings.places.questions, Question) if dataset in (None, row.dataset)]
    chosen = asked_questions(prepared, settings.evaluate.questions, settings.evaluate.seed)
    questions = questions_under(subject.protocol, chosen)
    require_playable(questions, settings.env)
    logger.info("asking %d questions", len(questions))
    tokenizer = load_tokenizer(subject.policy.path)
    answers = _answers(settings, subject, questions, Chat(tokenizer))
    trajectories = answers.trajectories
    hashes = {**answers.conditions, "policy": subject.identity()}
    predictions = predict(trajectories, questions, subject.name, subject.seed)
    scores = score(predictions, questions, settings.evaluate) | outcomes(trajectories)
    scores = headline(scores | gold_recall_by_step(trajectories, questions) | answers.of_tools)

    write_rows(folder / "predictions.parquet", predictions, Prediction)
    write_rows(folder / "trajectories.parquet", trajectories, Trajectory)
    means = {name: value for name, value in scores.items() if not name.endswith(BOUNDS)}  # no statistic asks anew
    write_text(folder / "scores.json", json.dumps(means, indent=2) + "\n")
    write_text(folder / "hashes.json", json.dumps(hashes, indent=2) + "\n")
    tracked = tracking.run_of(subject.training) if subject.training else None
    tracked = tracked or _run_of_its_own(settings, subject, asked, began_s)
    tracked.uses(tracking.prepared(settings, hashes), "test")
    tracked.final(scores)
    logger.info("%s", in_words(scores, words_of(questions).right))
    for title, text in readable(trajectories, questions, plain_text(tokenizer)).items():
        tracked.text(text, f"examples/{title}.txt")
    return tracked


class Answers(NamedTuple):
    """The episodes of an evaluation, and how they came about."""

    trajectories: list[Trajectory]
    conditions: dict[str, str]
    of_tools: dict[str, float]


def _answers(settings: Params, subject: Subject, questions: Sequence[Question], chat: Chat) -> Answers:
    """Has the subject attempt every question; only a policy of this machine needs the accelerator."""
    policy = subject.policy
    beneath = policy.beneath(settings)
    rounded = beneath is None and policy.would_round(settings)
    engine = TEXT_LEVEL if subject.elsewhere else ""
    with open_exam(subject.protocol, questions, chat, settings) as exam:
        measured = exam.conditions(rounded=rounded, engine=engine)
        with counted(subject.label, len(exam.attempts)) as over:
            if subject.protocol in SCRIPTED:
                made = exam.by_script(over)
            elif subject.elsewhere:
                made = exam.by_endpoint(*subject.elsewhere, over)
            else:
                with accelerator(settings.operate.side_by_side, settings.engine.gpus):
                    made = exam.by_policy(policy.path, policy.updates, beneath, over)
        return Answers(made, measured, exam.shared.use_of_tools(made))


def _run_of_its_own(settings: Params, subject: Subject, asked: EvaluationRequest, began_s: float) -> tracking.Run:
    """A new run, which only holds the scores."""
    version, sweep = subject.policy.version, asked.run.sweep if asked.run else asked.sweep
    tags = tracking.provenance(asked.dataset or settings.prepare.dataset, sweep)
    tags |= {VERSION_TAG: str(version.number)} if version else {}
    tags[KIND_TAG] = "baseline" if subject.label in BASELINES else "evaluation"
    shown, about = subject.shown(settings) | {"protocol": subject.protocol}, f"{subject.title} under {subject.protocol}"
    recurring = asked.into is not None
    with tracking.start(subject.label, shown, tags, about=about, recurring=recurring, began_s=began_s) as run:
        return run
