"""The evaluate stage: `agent-r1 evaluate --run NAME`, or `--baseline NAME`, or `--model MODEL` for any other.

With `--endpoint URL` the model is one that somebody serves, asked in text: its evaluation stands beside the others, and
says of itself that it is not token-exact.
"""

from __future__ import annotations

import json
import logging
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from agent_r1 import params, tracking
from agent_r1.envs.kinds import require_playable
from agent_r1.evaluation.protocols import SCRIPTED, Exam, open_exam, questions_under, with_endpoint
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
from agent_r1.rollout.sampling import Beneath
from agent_r1.tables import read_rows, write_rows
from agent_r1.tracking.runs import KIND_TAG, VERSION_TAG
from flows.accelerator import accelerator
from flows.policies import Policy, plain_name
from flows.terminal import episodes_shown

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
        return with_endpoint(settings) if self.elsewhere else self.policy.as_trained(settings)

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
    shown = tracking.untrained_params(label, with_endpoint(settings), elsewhere.title) | {"engine": TEXT_LEVEL}
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


logger = logging.getLogger(__name__)


def evaluate(
    run: str | None = None,
    seed: int | None = None,
    sweep: str = "",
    baseline: str | None = None,
    model: str | None = None,
    endpoint: str | None = None,
    protocol: Protocol | None = None,
    dataset: str | None = None,
    as_label: str | None = None,
    into: str | None = None,
) -> None:
    """Puts the test questions to a policy, greedily, and grades its answers.

    Writes predictions.parquet, trajectories.parquet, scores.json and hashes.json to a folder under outputs/evaluate.
    The scores and some readable episodes go to MLflow too: to the run of the training, where a trained run is evaluated
    as it was trained, else to one of their own.

    Args:
        run, seed, sweep: a training; or else `baseline`, which a sweep may have for its own, or else `model`.
        endpoint: the address at which `model` is a name.
        protocol, dataset: in place of `tool_call` and of all prepared data sets.
        as_label: what the folder and the MLflow run are called, in place of what follows from the other arguments.
        into: the folder that is written; in MLflow such an evaluation stays beside those that it repeats.
    """
    settings = params.load()
    if [run, baseline, model].count(None) != 2:
        raise ValueError("say what to evaluate: one of --run, --baseline and --model, a reference, folder or hub id")
    if endpoint is not None and (model is None or protocol in SCRIPTED):
        raise ValueError("--endpoint is where --model NAME acts; name one, and no protocol under which no model does")
    require_known("there is no protocol", protocol, PROTOCOLS)
    require_known("no data set is prepared called", dataset, settings.prepare.datasets)
    if run is None and (seed is not None or (sweep and model is not None)):
        raise ValueError("--seed and --sweep choose a training; leave them out with --baseline and --model")
    changes = [change for change in (protocol, dataset, as_label) if change]
    of_run = RunId.named(run, seed, sweep) if run is not None else None
    subject = subject_of(settings, of_run, baseline, str(model), endpoint, protocol, changes, as_label)
    folder = Path(into) if into else settings.places.evaluation(subject.label, sweep)
    tracked = _ask(subject.under(settings), subject, folder, dataset, sweep, recurring=into is not None)
    write_text(folder / "mlflow_run_id", tracked.run_id)


def _ask(
    settings: Params, subject: Subject, folder: Path, dataset: str | None, sweep: str, *, recurring: bool
) -> tracking.Run:
    """Asks, grades, and writes what came of it to the folder and to MLflow."""
    began_s, policy = time.time(), subject.policy
    prepared = [row for row in read_rows(settings.places.questions, Question) if dataset in (None, row.dataset)]
    asked = asked_questions(prepared, settings.evaluate.questions, settings.evaluate.seed)
    questions = questions_under(subject.protocol, asked)
    require_playable(questions, settings.env)
    logger.info("asking %d questions", len(questions))
    tokenizer = load_tokenizer(policy.path)
    chat = Chat(tokenizer)
    beneath = policy.beneath(settings)
    rounded = beneath is None and policy.would_round(settings)
    engine = TEXT_LEVEL if subject.elsewhere else ""
    with open_exam(subject.protocol, questions, chat, settings) as exam:
        measured = exam.conditions(rounded=rounded, engine=engine)
        with episodes_shown(subject.label, len(exam.attempts)) as over:
            trajectories = _attempt(subject, exam, beneath, over)
        of_tools = exam.shared.use_of_tools(trajectories)
    hashes = {**measured, "policy": subject.identity()}
    predictions = predict(trajectories, questions, subject.name, subject.seed)
    scores = score(predictions, questions, settings.evaluate)
    scores = headline(scores | outcomes(trajectories) | gold_recall_by_step(trajectories, questions) | of_tools)

    write_rows(folder / "predictions.parquet", predictions, Prediction)
    write_rows(folder / "trajectories.parquet", trajectories, Trajectory)
    means = {name: value for name, value in scores.items() if not name.endswith(BOUNDS)}  # no statistic asks anew
    write_text(folder / "scores.json", json.dumps(means, indent=2) + "\n")
    write_text(folder / "hashes.json", json.dumps(hashes, indent=2) + "\n")
    tracked = tracking.run_of(subject.training) if subject.training else None
    dataset = dataset or settings.prepare.dataset
    tracked = tracked or _run_of_its_own(subject, dataset, sweep, began_s, recurring=recurring)
    tracked.uses(tracking.prepared(settings, hashes), "test")
    tracked.final(scores)
    logger.info("%s", in_words(scores, words_of(questions).right))
    for title, text in readable(trajectories, questions, plain_text(tokenizer)).items():
        tracked.text(text, f"examples/{title}.txt")
    return tracked


def _attempt(subject: Subject, exam: Exam, beneath: Beneath | None, over: Callable[[], None]) -> list[Trajectory]:
    """Has the subject, with a model `beneath` its adapters, make the attempts; `over` is called as each ends."""
    if subject.protocol in SCRIPTED:
        return exam.by_script(over)
    if subject.elsewhere:
        return exam.by_endpoint(*subject.elsewhere, over)
    policy, settings = subject.policy, exam.settings
    with accelerator(settings.operate.side_by_side, settings.engine.gpus):
        return exam.by_policy(policy.path, policy.updates, beneath, over)


def _run_of_its_own(subject: Subject, dataset: str, sweep: str, began_s: float, *, recurring: bool) -> tracking.Run:
    """A new run, which only holds the scores."""
    version = subject.policy.version
    tags = tracking.provenance(dataset, sweep) | ({VERSION_TAG: str(version.number)} if version else {})
    tags[KIND_TAG] = "baseline" if subject.label in BASELINES else "evaluation"
    shown, about = subject.shown | {"protocol": subject.protocol}, f"{subject.title} under {subject.protocol}"
    with tracking.start(subject.label, shown, tags, about=about, recurring=recurring, began_s=began_s) as run:
        return run
