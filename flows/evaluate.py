"""The evaluate stage: `python -m flows.evaluate --name NAME` for a run or a baseline, `--model MODEL` for any other."""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerFast

from agent_r1 import params, tracking
from agent_r1.evaluation.predictions import BASELINES, asked_questions, gold_passages, gold_recall_by_step, predict
from agent_r1.evaluation.scores import headline, score
from agent_r1.evaluation.transcript import transcript, worth_reading
from agent_r1.hashes import model_hash, sha256
from agent_r1.params import PROTOCOLS, Params, Protocol
from agent_r1.params.sections import nearest
from agent_r1.policy.model import load_tokenizer
from agent_r1.project import INDEX, PASSAGES, QUESTIONS, WARM_START, evaluate_dir, label, train_dir
from agent_r1.records import Prediction, Question, Trajectory
from agent_r1.rollout.attempts import (
    closed_book_attempts,
    gold_passages_attempts,
    naive_rag_attempts,
    tool_attempts,
)
from agent_r1.rollout.chat import Chat
from agent_r1.rollout.engines import open_engine
from agent_r1.rollout.episodes import Attempt, collect
from agent_r1.search.index import describe, open_index
from agent_r1.tables import read_rows, write_rows, write_text
from agent_r1.tracking.registry import VERSION_TAG
from flows.policies import Policy, named, trained, warm_start
from flows.stage import accelerator

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


def evaluate(
    name: str | None = None,
    seed: int | None = None,
    sweep: str | None = None,
    model: str | None = None,
    protocol: str | None = None,
    dataset: str | None = None,
    as_label: str | None = None,
    into: str | None = None,
) -> None:
    """Puts the test questions to a policy, greedily, and grades its answers.

    Writes predictions.parquet, trajectories.parquet, scores.json and hashes.json to a folder under outputs/evaluate.
    The scores and some readable episodes go to MLflow too: to the run of the training, where a trained run is evaluated
    as it was trained, else to one of their own.

    Args:
        name: a run or a baseline of params.yaml; or else
        model: a reference such as `models:/agent_r1@champion`, a Hugging Face folder or a hub id.
        seed: of a run, in place of its own.
        sweep: of which the run is a member.
        protocol: one of `agent_r1.params.Protocol`, in place of `tool_call`.
        dataset: asks the questions of this prepared data set alone.
        as_label: what the folder and the MLflow run are called, in place of what follows from the other arguments.
        into: the folder that is written, in place of the label's under outputs/evaluate; in MLflow such an evaluation
            stays beside those that it repeats.

    Raises:
        ValueError: there is no such run, baseline, version, protocol or data set, two arguments exclude each other, the
            label is taken, or the policy of a version has gone.
        FileNotFoundError: the policy or the data were not made yet.
    """
    settings = params.load()
    choice = Choice(
        name=name,
        model=model,
        seed=seed,
        sweep=sweep,
        protocol=protocol,
        dataset=dataset,
        as_label=as_label,
        into=into,
    )
    agent = chosen(settings, choice)
    prepared = [row for row in read_rows(QUESTIONS, Question) if dataset in (None, row.dataset)]
    questions = asked_questions(prepared, settings.evaluate.questions, settings.evaluate.seed)
    tokenizer = load_tokenizer(agent.policy.path)
    chat = Chat(tokenizer)
    attempts = _attempts(agent.protocol, questions, settings)
    trajectories = _answer(agent.policy, chat, attempts, settings)
    hashes = _hashes(agent, chat.prompt_hash(attempts[0].env.system, attempts[0].env.tools), settings)
    predictions = predict(trajectories, questions, agent.name, agent.seed)
    scores = score(predictions, questions, settings.evaluate.bootstrap_samples, settings.evaluate.seed)
    scores = headline(scores | gold_recall_by_step(trajectories, questions))

    write_rows(agent.folder / "predictions.parquet", predictions, Prediction)
    write_rows(agent.folder / "trajectories.parquet", trajectories, Trajectory)
    _write_json(agent.folder / "scores.json", scores)
    _write_json(agent.folder / "hashes.json", hashes)
    run = _trained(agent.training) if agent.training else None
    run = run or _untrained(agent, dataset or settings.prepare.dataset, sweep, recurring=into is not None)
    run.final(scores)
    for title, text in _readable(trajectories, questions, tokenizer).items():
        run.text(text, f"examples/{title}.txt")
    write_text(agent.folder / "mlflow_run_id", run.run_id)


def _attempts(protocol: Protocol, questions: Sequence[Question], settings: Params) -> list[Attempt]:
    match protocol:
        case "tool_call":
            return tool_attempts(questions, open_index(settings.search, PASSAGES, INDEX), settings.env)
        case "naive_rag":
            return naive_rag_attempts(questions, open_index(settings.search, PASSAGES, INDEX), settings.env)
        case "closed_book":
            return closed_book_attempts(questions, settings.env)
        case "gold_passages":
            return gold_passages_attempts(questions, gold_passages(questions, PASSAGES), settings.env)


def _answer(policy: Policy, chat: Chat, attempts: Sequence[Attempt], settings: Params) -> list[Trajectory]:
    with (
        accelerator(),
        open_engine(
            settings.engine,
            policy.path,
            end_id=chat.end_id,
            max_tokens=settings.env.max_tokens,
            temperature=0.0,
            dtype=settings.model.dtype,
            version=policy.updates,
        ) as engine,
    ):
        return collect(
            engine,
            chat,
            attempts,
            max_tokens=settings.env.max_tokens,
            max_action_tokens=settings.env.max_action_tokens,
            seed=settings.evaluate.seed,
            policy_version=policy.updates,
        )


def _hashes(agent: Agent, prompt_hash: str, settings: Params) -> dict[str, str]:
    return {
        "questions": sha256(QUESTIONS),
        "passages": sha256(PASSAGES),
        "index": describe(INDEX).index_hash,
        "prompt": prompt_hash,
        "protocol": agent.protocol,  # naive RAG and gold passages have the same prompt around other passages
        "limits": _limits(settings),
        "policy": _policy_hash(agent.policy),
    }


def _limits(settings: Params) -> str:
    """What bounds an episode besides its prompt, and what samples it, in words."""
    limits = settings.env.model_dump(exclude={"instructions"})  # the prompt's hash has those
    limits |= {"dtype": settings.model.dtype, "engine": settings.engine.kind}
    return ", ".join(f"{name} {value}" for name, value in limits.items())


def _policy_hash(policy: Policy) -> str:
    found = model_hash(policy.path)
    if policy.registered and found != policy.registered.descriptor.policy_hash:
        raise ValueError(
            f"{policy.path} was changed while {policy.registered.reference} was evaluated; evaluate it again"
        )
    return found


def _trained(folder: Path) -> tracking.Run | None:
    """The run that training opened, where the store has it."""
    run_id = folder / "mlflow_run_id"
    return tracking.resume(run_id.read_text()) if run_id.exists() else None


def _untrained(agent: Agent, dataset: str, sweep: str | None, *, recurring: bool) -> tracking.Run:
    """A new run, which only holds the scores."""
    version = agent.policy.registered
    tags = tracking.provenance(dataset, sweep) | ({VERSION_TAG: str(version.number)} if version else {})
    shown = agent.shown | {"protocol": agent.protocol}
    with tracking.start(agent.label, shown, tags, recurring=recurring) as run:
        return run


def _readable(
    trajectories: Sequence[Trajectory], questions: Sequence[Question], tokenizer: PreTrainedTokenizerFast
) -> dict[str, str]:
    """A right and a wrong episode, prompts included, as text."""
    by_id = {question.question_id: question for question in questions}

    def decode(token_ids: Sequence[int]) -> str:
        return str(tokenizer.decode(list(token_ids), skip_special_tokens=True))

    return {
        title: transcript(trajectory, by_id[trajectory.question_id], decode, with_prompt=True)
        for title, trajectory in worth_reading(trajectories, questions).items()
    }


def _write_json(path: Path, content: dict[str, Any]) -> None:
    write_text(path, json.dumps(content, indent=2) + "\n")


if __name__ == "__main__":
    from flows.stage import add_member_arguments, run_stage

    parser = argparse.ArgumentParser(description="Evaluates one policy on the test questions.")
    parser.add_argument("--name", help=f"a run of params.yaml, or one of {', '.join(BASELINES)}")
    add_member_arguments(parser)
    parser.add_argument("--model", help="in place of --name: models:/agent_r1@champion, a folder or a hub id")
    parser.add_argument("--protocol", choices=PROTOCOLS, help="in place of tool_call, how runs are trained")
    parser.add_argument("--dataset", help="asks the questions of this prepared data set alone")
    parser.add_argument("--as", dest="as_label", metavar="LABEL", help="of the results: outputs/evaluate/LABEL")
    parser.add_argument("--into", metavar="FOLDER", help="of the results, in place of outputs/evaluate/LABEL")
    run_stage(evaluate, **vars(parser.parse_args()))
