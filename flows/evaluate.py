"""The evaluate stage: `agent-r1 evaluate POLICY`, for any policy, or a baseline.

With `--endpoint URL` somebody else serves the model, and it is asked in text. Its evaluation says that it is not
token-exact.
"""

from __future__ import annotations

import json
import logging
import re
import time
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import Any, NamedTuple

from agent_r1 import params, tracking
from agent_r1.costs import Costs, Purpose
from agent_r1.envs.kinds import require_playable
from agent_r1.evaluation import scores
from agent_r1.evaluation.protocols import SCRIPTED, open_exam, questions_under, with_endpoint
from agent_r1.evaluation.transcript import plain_text, readable
from agent_r1.files import EVALUATION_HASHES, METRICS, remove_unfinished, sha256, write_json, write_text
from agent_r1.gpus import visible_gpus
from agent_r1.learn.checkpoint import PROGRESS
from agent_r1.params import Params
from agent_r1.params.places import RunId
from agent_r1.params.sections import nearest
from agent_r1.params.stages import PROTOCOLS, Protocol
from agent_r1.records import GREEDY, Metrics, Prediction, Question, Source, Trajectory, questions_by_id, words_of
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
    dataset: str | None  # whose questions it is asked; None for those of all
    label: str  # the name of the evaluation
    folder: Path  # which gets its results
    recurring: bool  # whether it stays beside earlier ones in MLflow
    name: str  # the `run` of its predictions: a run's or a baseline's name, else the label
    sweep: str
    training: Path | None = None  # the folder of its training, if the scores belong to that one's MLflow run

    def parameters(self, settings: Params) -> dict[str, Any]:
        """The parameters for MLflow, if the scores have a run of their own."""
        reference = self.policy.known_as
        if self.policy.run and not reference:
            return tracking.run_params(self.name, settings, settings.run(self.policy.run))
        engine = {"engine": TEXT_LEVEL} if self.policy.remote else {}
        return tracking.untrained_params(self.label, settings, reference) | engine


def subject_of(settings: Params, request: EvaluationRequest) -> Subject:
    """The policy that is asked for, under its protocol; ValueError for options, names or labels that do not fit."""
    word = request.policy
    name = word.label if isinstance(word, RunId) else word
    baseline = scores.BASELINES.get(name)
    _require_fit(settings, request, name)
    policy = _policy_of(settings, request, name)
    changes = [change for change in (request.protocol, request.dataset, request.as_label) if change]
    trained_run = policy.run if not (policy.version or changes) else None
    label = request.as_label or "-".join([policy.name if policy.run else plain_name(name), *changes])
    if not LABEL.fullmatch(label):
        raise ValueError(
            f"{label!r} is to be a folder; give --as a name of letters, digits, _, - and ., and . not first"
        )
    owner = OF_A_SEED.sub("", label)
    if not trained_run and (changes or not baseline) and (owner in settings.runs or owner in scores.BASELINES):
        raise ValueError(f"{label!r} is the label of {owner}'s own evaluation; choose another with --as")
    graph = policy.run if policy.run and not policy.version else word
    sweep = graph.sweep if isinstance(graph, RunId) else ""
    return Subject(
        policy=policy,
        protocol=baseline or request.protocol or "tool_call",
        dataset=request.dataset,
        label=label,
        folder=request.into or settings.places.evaluation(label, sweep),
        recurring=request.into is not None,
        name=trained_run.name if trained_run else label,
        sweep=sweep,
        training=settings.places.training(trained_run) if trained_run else None,
    )


def _require_fit(settings: Params, request: EvaluationRequest, name: str) -> None:
    """Raises ValueError for options that do not fit together, or names that are unknown."""
    baseline = name in scores.BASELINES
    if request.endpoint is not None and (baseline or isinstance(request.policy, RunId) or request.protocol in SCRIPTED):
        raise ValueError("--endpoint is where a model acts; name it, and no protocol under which no model does")
    if baseline and request.protocol:
        remedy = f"leave out --protocol, or evaluate {settings.places.warm_start}"
        raise ValueError(f"{name} is the warm-started model under a protocol of its own; {remedy}")
    _require_known("there is no protocol", request.protocol, PROTOCOLS)
    _require_known("no data set is prepared called", request.dataset, settings.prepare.datasets)


def _policy_of(settings: Params, request: EvaluationRequest, name: str) -> Policy:
    if request.endpoint is not None:
        return policy_at(settings, request.endpoint, name)
    if name in (scores.AS_SHIPPED, scores.WITH_EXAMPLES):
        return policy_of(settings, settings.model.path)
    return policy_of(settings, "" if name in scores.BASELINES else request.policy)


def _require_known(complaint: str, name: str | None, valid: Collection[str]) -> None:
    if name is not None and name not in valid:
        raise ValueError(f"{complaint} {name!r}{nearest(name, valid)}")


def evaluate(request: EvaluationRequest) -> None:
    """Puts the test questions to a policy, and grades its answers: samples, and the greedy one beside them.

    Writes predictions.parquet, trajectories.parquet, scores.json and hashes.json to a folder under outputs/evaluate. An
    agent of the report gets a file of hashes in outputs/compared too, so that the report depends on no other agents.
    The scores and some readable episodes go to MLflow: to the run of the training if a trained run is evaluated as it
    was trained, else to a run of their own.
    """
    settings = params.load()
    subject = subject_of(settings, request)
    if subject.label == scores.WITH_EXAMPLES:
        env = settings.env.model_copy(update={"examples": settings.evaluate.examples})
        settings = settings.model_copy(update={"env": env})
    policy = subject.policy
    tracked = _examine(with_endpoint(settings) if policy.remote else policy.as_trained(settings), subject)
    write_text(subject.folder / "mlflow_run_id", tracked.run_id)
    if not subject.recurring and subject.label in settings.reported(subject.sweep):
        files = [subject.folder / name for name in ("predictions.parquet", "trajectories.parquet", EVALUATION_HASHES)]
        files += [subject.training / METRICS, subject.training / "checkpoint" / PROGRESS] if subject.training else []
        hashes = {str(path): sha256(path) for path in files}
        write_json(subject.folder.parents[1] / f"compared/{subject.label}.json", hashes)


class ExamResult(NamedTuple):
    """The test questions that a subject attempted, and how."""

    questions: list[Question]
    trajectories: list[Trajectory]
    hashes: dict[str, str]  # of the conditions under which they came about, and of the policy
    tool_use: Metrics  # the use of tools
    chat: Chat


def _examine(settings: Params, subject: Subject) -> tracking.Run:
    """Asks, grades, and writes the results to the subject's folder and to MLflow."""
    start_s = time.time()
    folder = subject.folder
    remove_unfinished(folder)
    costs = Costs()
    costs.spent["cost/evaluation_core_s"] = time.process_time()  # that it took to get here
    answers = folder.with_name(f"{folder.name}.answers.jsonl")
    result = _attempt(settings, subject, answers, costs)
    measures = _grade(settings, subject, result)
    answers.unlink(missing_ok=True)
    costs.charge(Purpose.EVALUATION)
    spent = {name: value for name, value in costs.spent.items() if "evaluation" in name}  # the engine's memory is gone
    write_text(folder / METRICS, json.dumps(spent) + "\n")
    tracked = tracking.run_of(subject.training) if subject.training else None
    tracked = tracked or _run_of_its_own(settings, subject, start_s)
    _tie(tracked, settings, subject.dataset, result)
    is_whole = not subject.dataset and subject.protocol == "tool_call"
    tracked.final(measures | spent, subject.policy.version.tag if subject.policy.version and is_whole else "")
    logger.info("%s", scores.in_words(measures, words_of(result.questions).right))
    _warn(settings, subject, result)
    _show(tracked, result)
    return tracked


def _grade(settings: Params, subject: Subject, result: ExamResult) -> Metrics:
    """The scores of a result. Writes them, the answers and their conditions to the subject's folder."""
    folder = subject.folder
    seed = settings.evaluate.seed if subject.policy.seed is None else subject.policy.seed
    predictions = scores.predict(result.trajectories, result.questions, subject.name, seed)
    measures = scores.score(predictions, result.questions, settings.evaluate) | scores.outcomes(result.trajectories)
    by_step = scores.gold_recall_by_step(result.trajectories, result.questions)
    measures = scores.headline(measures | by_step | result.tool_use)
    write_rows(folder / "predictions.parquet", predictions, Prediction)
    write_rows(folder / "trajectories.parquet", result.trajectories, Trajectory)
    means = {name: value for name, value in measures.items() if not name.endswith(scores.BOUNDS)}  # bounds are redrawn
    write_json(folder / "scores.json", means)
    write_json(folder / EVALUATION_HASHES, result.hashes)
    return measures


def _warn(settings: Params, subject: Subject, result: ExamResult) -> None:
    """Says why a training of the policy could learn little from such episodes."""
    if subject.protocol in SCRIPTED:
        return
    tools = subject.protocol == "tool_call" and settings.env.agent is None
    for reason in findings(_samples(result.trajectories), {}, result.questions, result.chat, tools=tools):
        logger.warning("a training of %s has little to learn from: %s", subject.policy.title, reason)


def _tie(tracked: tracking.Run, settings: Params, dataset: str | None, result: ExamResult) -> None:
    """Has MLflow keep the test questions and the prompt, by their hashes, and tie the run to them."""
    digest = result.hashes["questions"]
    name = f"{dataset or settings.prepare.dataset}{TESTED}{digest[:DIGEST]}, {len(result.questions)}"
    measured_on = {name: (settings.places.questions, digest)}
    tracked.uses(tracking.prepared(settings, result.hashes) | measured_on, "test")
    tracking.keep_questions(name, digest, result.questions)
    prompt = str(result.chat.tokenizer.decode(result.trajectories[0].ids(slice(None), Source.PROMPT)))
    tracking.keep_prompt(tracked.run_id, f"{settings.places.model}-prompt", result.hashes["prompt"], prompt)


def _samples(trajectories: Iterable[Trajectory]) -> list[Trajectory]:
    return [trajectory for trajectory in trajectories if trajectory.sample != GREEDY]


def _questions(settings: Params, subject: Subject) -> list[Question]:
    """The test questions that a subject is asked. A ValueError says which cannot be played."""
    prepared = [row for row in read_rows(settings.places.questions, Question) if subject.dataset in (None, row.dataset)]
    drawn = scores.asked_questions(prepared, settings.evaluate.questions, settings.evaluate.seed)
    questions = questions_under(subject.protocol, drawn)
    require_playable(questions, settings.env)
    logger.info("asking %d question%s", len(questions), "s" * (len(questions) > 1))
    return questions


def _show(tracked: tracking.Run, result: ExamResult) -> None:
    """Has MLflow show episodes as texts, and some of them as traces."""
    for title, text in readable(result.trajectories, result.questions, plain_text(result.chat.tokenizer)).items():
        tracked.text(text, f"examples/{title}.txt")
    by_id = questions_by_id(result.questions)
    stride = -(-len(result.trajectories) // TRACED)
    ids = [question.question_id for question in result.questions[::stride]]  # with all of their samples
    sample = [trajectory for trajectory in result.trajectories if trajectory.question_id in ids]
    episodes = [tracking.Rewarded("test", by_id[trajectory.question_id], trajectory) for trajectory in sample]
    decode = result.chat.tokenizer.decode
    tracking.log_traces(tracked.run_id, episodes, lambda token_ids: str(decode(list(token_ids))))


def _attempt(settings: Params, subject: Subject, answers: Path, costs: Costs) -> ExamResult:
    """Has the subject attempt every question; only a policy of this machine needs the accelerator.

    A server's `answers` are kept in a file. Raises as `without_room`.
    """
    questions = _questions(settings, subject)
    policy = subject.policy
    chat = policy.chat(settings)
    weights = policy.weights(settings)
    rounded = weights.beneath is None and policy.would_round(settings)
    with open_exam(subject.protocol, questions, chat, settings, greedily=True) as exam:
        without_room(exam.attempts, chat, exam.shared, "test questions", UNANSWERED)
        hashes = exam.conditions(rounded=rounded, engine=TEXT_LEVEL if policy.remote else "")
        with counted(subject.label, len(exam.attempts)) as on_end:
            if subject.protocol in SCRIPTED:
                trajectories = exam.by_script(on_end)
            elif policy.remote:
                answers.parent.mkdir(parents=True, exist_ok=True)
                trajectories = exam.by_endpoint(*policy.remote, on_end, answers)
                hashes["limits"] += "".join(f", without {option}" for option in sorted(policy.remote[0].untold))
            else:
                with _accelerator(settings, costs):
                    trajectories = exam.by_policy(weights, on_end)
        hashes["policy"] = subject.protocol if subject.protocol in SCRIPTED else policy.identity()
        return ExamResult(
            questions=questions,
            trajectories=trajectories,
            hashes=hashes,
            tool_use=exam.shared.use_of_tools(_samples(trajectories)),
            chat=chat,
        )


@contextmanager
def _accelerator(settings: Params, costs: Costs) -> Iterator[None]:
    """The accelerator, for which others may be waited; the time of that is charged apart."""
    costs.charge(Purpose.EVALUATION)
    with accelerator(settings.operate.side_by_side, settings.engine.gpus):
        costs.charge(Purpose.WAITING)
        costs.devices = len(visible_gpus()) or 1
        yield


def _run_of_its_own(settings: Params, subject: Subject, start_s: float) -> tracking.Run:
    policy = subject.policy
    tags = tracking.provenance(subject.dataset or settings.prepare.dataset, subject.sweep)
    if policy.version:
        tags[VERSION_TAG] = policy.version.tag
    tags[KIND_TAG] = "baseline" if subject.label in scores.BASELINES else "evaluation"
    parameters = subject.parameters(settings) | {"protocol": subject.protocol}
    about = f"{policy.title[0].upper()}{policy.title[1:]} {PROTOCOLS[subject.protocol]}."
    with tracking.start(
        subject.label, parameters, tags, about=about, recurring=subject.recurring, began_s=start_s
    ) as run:
        return run
