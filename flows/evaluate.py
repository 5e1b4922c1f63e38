"""The evaluate stage: `agent-r1 evaluate POLICY`, for any policy, or a baseline.

With `--endpoint URL` somebody else serves the model, and it is asked in text. Its evaluation says that it is not
token-exact.
"""

from __future__ import annotations

import json
import logging
import re
import time
from collections.abc import Collection, Iterable, Mapping
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import Any, NamedTuple

from transformers import PreTrainedTokenizerBase

from agent_r1 import params, tracking
from agent_r1.costs import Costs, Purpose
from agent_r1.envs.kinds import require_playable
from agent_r1.evaluation import scores
from agent_r1.evaluation.protocols import SCRIPTED, open_exam, questions_under, with_endpoint
from agent_r1.evaluation.transcript import plain_text, readable
from agent_r1.files import METRICS, sha256, write_text
from agent_r1.gpus import visible_gpus
from agent_r1.learn.checkpoint import PROGRESS
from agent_r1.params import Params
from agent_r1.params.places import RunId
from agent_r1.params.sections import nearest
from agent_r1.params.stages import PROTOCOLS, Protocol
from agent_r1.records import GREEDY, Prediction, Question, Source, Trajectory, words_of
from agent_r1.rollout.chat import Chat
from agent_r1.rollout.prompts import UNANSWERED, without_room
from agent_r1.tables import read_rows, write_rows
from agent_r1.tracking.runs import DIGEST, KIND_TAG, VERSION_TAG
from agent_r1.tracking.store import TESTED
from agent_r1.training.findings import findings
from flows.policies import Policy, plain_name, policy_at, policy_of
from flows.stage import accelerator
from flows.terminal import counted

LABEL = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*")
OF_A_SEED = re.compile(r"-seed\d+$")
TRACED = 10  # episodes of an evaluation, at most
TEXT_LEVEL = "endpoint: text, not token-exact"  # the engine in an evaluation of an endpoint

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class EvaluationRequest:
    """The options of an evaluation."""

    policy: RunId | str  # a word of `policy_of`, a baseline of a graph, or with `endpoint` the name of the model there
    _: KW_ONLY
    endpoint: str | None = None  # an address
    protocol: Protocol | None = None  # in place of `tool_call`
    dataset: str | None = None  # in place of all prepared data sets
    as_label: str | None = None  # the name of folder and MLflow run, in place of the default
    into: Path | None = None  # the folder to write; in MLflow such an evaluation stays beside earlier ones


@dataclass(frozen=True, kw_only=True, slots=True)
class Subject:
    """A policy as it is evaluated."""

    policy: Policy
    protocol: Protocol
    label: str  # the name of the evaluation
    name: str  # the `run` of its predictions: a run's or a baseline's name, else the label
    sweep: str
    training: Path | None = None  # the folder of its training, if the scores belong to that one's MLflow run

    def shown(self, settings: Params) -> dict[str, Any]:
        """The parameters for MLflow, if the scores have a run of their own."""
        known_as, engine = self.policy.known_as, {"engine": TEXT_LEVEL} if self.policy.elsewhere else {}
        if self.policy.run and not known_as:
            return tracking.run_params(self.name, settings, settings.run(self.policy.run))
        return tracking.untrained_params(self.label, settings, known_as) | engine


def subject_of(settings: Params, asked: EvaluationRequest) -> Subject:
    """The policy that is asked for, under its protocol; ValueError for options, names or labels that do not fit."""
    word, places = asked.policy, settings.places
    name = word.label if isinstance(word, RunId) else word
    baseline = scores.BASELINES.get(name)
    if asked.endpoint is not None and (baseline or not isinstance(word, str) or asked.protocol in SCRIPTED):
        raise ValueError("--endpoint is where a model acts; name it, and no protocol under which no model does")
    if baseline and asked.protocol:
        remedy = f"leave out --protocol, or evaluate {places.warm_start}"
        raise ValueError(f"{name} is the warm-started model under a protocol of its own; {remedy}")
    _require_known("there is no protocol", asked.protocol, PROTOCOLS)
    _require_known("no data set is prepared called", asked.dataset, settings.prepare.datasets)
    if asked.endpoint is not None:
        policy = policy_at(settings, asked.endpoint, name)
    else:
        shipped = name in (scores.AS_SHIPPED, scores.WITH_EXAMPLES)
        policy = policy_of(settings, settings.model.path if shipped else "" if baseline else word)
    changes = [change for change in (asked.protocol, asked.dataset, asked.as_label) if change]
    as_trained = policy.run if not (policy.version or changes) else None
    label = asked.as_label or "-".join([policy.name if policy.run else plain_name(name), *changes])
    if not LABEL.fullmatch(label):
        remedy = "give --as a name of letters, digits, _, - and ., and . not first"
        raise ValueError(f"{label!r} is to be a folder; {remedy}")
    whose = OF_A_SEED.sub("", label)
    if not as_trained and (changes or not baseline) and (whose in settings.runs or whose in scores.BASELINES):
        raise ValueError(f"{label!r} is the label of {whose}'s own evaluation; choose another with --as")
    graph = policy.run if policy.run and not policy.version else word
    return Subject(
        policy=policy,
        protocol=baseline or asked.protocol or "tool_call",
        label=label,
        name=as_trained.name if as_trained else label,
        sweep=graph.sweep if isinstance(graph, RunId) else "",
        training=places.training(as_trained) if as_trained else None,
    )


def _require_known(complaint: str, name: str | None, valid: Collection[str]) -> None:
    if name is not None and name not in valid:
        raise ValueError(f"{complaint} {name!r}{nearest(name, valid)}")


def evaluate(asked: EvaluationRequest) -> None:
    """Puts the test questions to a policy, and grades its answers: samples, and the greedy one beside them.

    Writes predictions.parquet, trajectories.parquet, scores.json and hashes.json to a folder under outputs/evaluate. An
    agent of the report gets a file of hashes in outputs/compared too, so that the report depends on no other agents.
    The scores and some readable episodes go to MLflow: to the run of the training if a trained run is evaluated as it
    was trained, else to a run of their own.
    """
    settings = params.load()
    subject = subject_of(settings, asked)
    if subject.label == scores.WITH_EXAMPLES:
        env = settings.env.model_copy(update={"examples": settings.evaluate.examples})
        settings = settings.model_copy(update={"env": env})
    folder = asked.into or settings.places.evaluation(subject.label, subject.sweep)
    policy = subject.policy
    tracked = _ask(with_endpoint(settings) if policy.elsewhere else policy.as_trained(settings), subject, folder, asked)
    write_text(folder / "mlflow_run_id", tracked.run_id)
    if not asked.into and subject.label in settings.reported(subject.sweep):
        read = [folder / name for name in ("predictions.parquet", "trajectories.parquet", "hashes.json")]
        read += [subject.training / METRICS, subject.training / "checkpoint" / PROGRESS] if subject.training else []
        hashes = {str(path): sha256(path) for path in read}
        _write_json(folder.parents[1] / f"compared/{subject.label}.json", hashes)


class Attempted(NamedTuple):
    """The test questions that a subject attempted, and how."""

    questions: list[Question]
    trajectories: list[Trajectory]
    hashes: dict[str, str]  # of the conditions under which they came about, and of the policy
    of_tools: dict[str, float]  # the use of tools
    tokenizer: PreTrainedTokenizerBase
    chat: Chat


def _ask(settings: Params, subject: Subject, folder: Path, asked: EvaluationRequest) -> tracking.Run:
    """Asks, grades, and writes the results to the folder and to MLflow."""
    began_s, costs = time.time(), Costs()
    costs.spent["cost/evaluation_core_s"] = time.process_time()  # that it took to get here
    kept = folder.with_name(f"{folder.name}.answers.jsonl")
    made = _attempt(settings, subject, asked.dataset, kept, costs)
    seed = settings.evaluate.seed if subject.policy.seed is None else subject.policy.seed
    predictions = scores.predict(made.trajectories, made.questions, subject.name, seed)
    graded = scores.score(predictions, made.questions, settings.evaluate) | scores.outcomes(made.trajectories)
    by_step = scores.gold_recall_by_step(made.trajectories, made.questions)
    graded = scores.headline(graded | by_step | made.of_tools)

    write_rows(folder / "predictions.parquet", predictions, Prediction)
    write_rows(folder / "trajectories.parquet", made.trajectories, Trajectory)
    stated = {name: value for name, value in graded.items() if not name.endswith(scores.BOUNDS)}  # bounds are redrawn
    _write_json(folder / "scores.json", stated)
    _write_json(folder / "hashes.json", made.hashes)
    kept.unlink(missing_ok=True)
    costs.charge(Purpose.EVALUATION)
    spent = {name: value for name, value in costs.spent.items() if "evaluation" in name}  # the engine's memory is gone
    write_text(folder / METRICS, json.dumps(spent) + "\n")
    tracked = tracking.run_of(subject.training) if subject.training else None
    tracked = tracked or _run_of_its_own(settings, subject, asked, began_s)
    _tie(tracked, settings, asked.dataset, made)
    is_whole = not asked.dataset and subject.protocol == "tool_call"
    tracked.final(graded | spent, subject.policy.version.tag if subject.policy.version and is_whole else "")
    logger.info("%s", scores.in_words(graded, words_of(made.questions).right))
    if subject.protocol not in SCRIPTED:
        tools = subject.protocol == "tool_call" and settings.env.agent is None
        for reason in findings(_samples(made.trajectories), {}, made.questions, made.chat, tools=tools):
            logger.warning("a training of %s has little to learn from: %s", subject.policy.title, reason)
    _show(tracked, made)
    return tracked


def _tie(tracked: tracking.Run, settings: Params, dataset: str | None, made: Attempted) -> None:
    """Has MLflow keep the test questions and the prompt, by their hashes, and tie the run to them."""
    digest = made.hashes["questions"]
    name = f"{dataset or settings.prepare.dataset}{TESTED}{digest[:DIGEST]}, {len(made.questions)}"
    measured_on = {name: (settings.places.questions, digest)}
    tracked.uses(tracking.prepared(settings, made.hashes) | measured_on, "test")
    tracking.keep_questions(name, digest, made.questions)
    prompt = str(made.tokenizer.decode(made.trajectories[0].ids(slice(None), Source.PROMPT)))
    tracking.keep_prompt(tracked.run_id, f"{settings.places.model}-prompt", made.hashes["prompt"], prompt)


def _write_json(path: Path, content: Mapping[str, Any]) -> None:
    write_text(path, json.dumps(content, indent=2) + "\n")


def _samples(trajectories: Iterable[Trajectory]) -> list[Trajectory]:
    return [trajectory for trajectory in trajectories if trajectory.sample != GREEDY]


def _questions(settings: Params, protocol: Protocol, dataset: str | None) -> list[Question]:
    """The test questions that a protocol is asked. A ValueError says which cannot be played."""
    prepared = [row for row in read_rows(settings.places.questions, Question) if dataset in (None, row.dataset)]
    chosen = scores.asked_questions(prepared, settings.evaluate.questions, settings.evaluate.seed)
    questions = questions_under(protocol, chosen)
    require_playable(questions, settings.env)
    logger.info("asking %d question%s", len(questions), "s" * (len(questions) > 1))
    return questions


def _show(tracked: tracking.Run, made: Attempted) -> None:
    """Has MLflow show episodes as texts, and some of them as traces."""
    for title, text in readable(made.trajectories, made.questions, plain_text(made.tokenizer)).items():
        tracked.text(text, f"examples/{title}.txt")
    by_id = {question.question_id: question for question in made.questions}
    every = -(-len(made.trajectories) // TRACED)
    chosen = [question.question_id for question in made.questions[::every]]  # with all of their samples
    sample = [trajectory for trajectory in made.trajectories if trajectory.question_id in chosen]
    episodes = [tracking.Rewarded("test", by_id[trajectory.question_id], trajectory) for trajectory in sample]
    tracking.log_traces(tracked.run_id, episodes, lambda token_ids: str(made.tokenizer.decode(list(token_ids))))


def _attempt(settings: Params, subject: Subject, dataset: str | None, kept: Path, costs: Costs) -> Attempted:
    """Has the subject attempt every question; only a policy of this machine needs the accelerator.

    A server's answers are `kept` in a file. Raises as `without_room`.
    """
    questions, policy = _questions(settings, subject.protocol, dataset), subject.policy
    tokenizer, chat = policy.read(settings)
    beneath = policy.beneath(settings)
    rounded = beneath is None and policy.would_round(settings)
    with open_exam(subject.protocol, questions, chat, settings, greedily=True) as exam:
        without_room(exam.attempts, chat, exam.shared, "test questions", UNANSWERED)
        hashes = exam.conditions(rounded=rounded, engine=TEXT_LEVEL if policy.elsewhere else "")
        with counted(subject.label, len(exam.attempts)) as over:
            if subject.protocol in SCRIPTED:
                trajectories = exam.by_script(over)
            elif policy.elsewhere:
                kept.parent.mkdir(parents=True, exist_ok=True)
                trajectories = exam.by_endpoint(*policy.elsewhere, over, kept)
                hashes["limits"] += "".join(f", without {name}" for name in sorted(policy.elsewhere[0].untold))
            else:
                costs.charge(Purpose.EVALUATION)
                with accelerator(settings.operate.side_by_side, settings.engine.gpus):
                    costs.charge(Purpose.WAITING)
                    costs.devices = len(visible_gpus()) or 1
                    trajectories = exam.by_policy(policy.path, policy.updates, beneath, over)
        hashes["policy"] = subject.protocol if subject.protocol in SCRIPTED else policy.identity()
        of_tools = exam.shared.use_of_tools(_samples(trajectories))
        return Attempted(questions, trajectories, hashes, of_tools, tokenizer, chat)


def _run_of_its_own(settings: Params, subject: Subject, asked: EvaluationRequest, began_s: float) -> tracking.Run:
    policy, version = subject.policy, subject.policy.version
    tags = tracking.provenance(asked.dataset or settings.prepare.dataset, subject.sweep)
    tags |= {VERSION_TAG: version.tag} if version else {}
    tags[KIND_TAG] = "baseline" if subject.label in scores.BASELINES else "evaluation"
    shown = subject.shown(settings) | {"protocol": subject.protocol}
    title, recurring = policy.title, asked.into is not None
    about = f"{title[0].upper()}{title[1:]} {PROTOCOLS[subject.protocol]}."
    with tracking.start(subject.label, shown, tags, about=about, recurring=recurring, began_s=began_s) as run:
        return run
