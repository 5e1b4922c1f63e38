"""The evaluate stage: `python -m flows.evaluate --name NAME`, where NAME is a run or a baseline."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer, PreTrainedTokenizerFast

from agent_r1 import params, tracking
from agent_r1.evaluation.baselines import BASELINES, NAIVE_RAG
from agent_r1.evaluation.examples import worth_reading
from agent_r1.evaluation.predictions import asked_questions, gold_recall_by_step, predict
from agent_r1.evaluation.scores import headline, score
from agent_r1.evaluation.transcript import transcript
from agent_r1.hashes import sha256
from agent_r1.params import Params, TrainParams
from agent_r1.records import Prediction, Question, Trajectory
from agent_r1.rollout.attempts import naive_rag_attempts, tool_attempts
from agent_r1.rollout.chat import Chat
from agent_r1.rollout.engines import open_engine
from agent_r1.rollout.episodes import Attempt, collect
from agent_r1.search.index import describe, open_index
from agent_r1.tables import read_rows, replacing, write_rows
from flows.lock import accelerator
from flows.paths import INDEX, PASSAGES, QUESTIONS, WARM_START, evaluate_dir, label, train_dir


def evaluate(name: str, seed: int | None = None, sweep: str | None = None) -> None:
    """Answers the test questions greedily with a run's policy, or as a baseline with the warm-started model.

    Writes predictions.parquet, trajectories.parquet, scores.json and hashes.json, and adds the scores and some
    readable episodes to the MLflow run.

    Raises:
        ValueError: there is no such run or baseline.
        FileNotFoundError: the model or the data were not made yet.
    """
    settings = params.load()
    if name in BASELINES and (seed is not None or sweep):
        raise ValueError(f"{name} is the warm-started model, which has no seed or sweep; leave out --seed and --sweep")
    config = None if name in BASELINES else settings.run(name, seed, sweep)
    model = train_dir(name, seed, sweep) / "checkpoint" / "policy" if config else WARM_START
    if not model.is_dir():
        raise FileNotFoundError(f"there is no model at {model}; train it first (`dvc repro` knows the stage)")
    questions = asked_questions(read_rows(QUESTIONS, Question), settings.evaluate.questions, settings.evaluate.seed)
    tokenizer = AutoTokenizer.from_pretrained(model)
    assert isinstance(tokenizer, PreTrainedTokenizerFast), type(tokenizer)  # warm_start and train saved it
    chat = Chat(tokenizer)
    index = open_index(settings.search, PASSAGES, INDEX)
    attempts = (naive_rag_attempts if name == NAIVE_RAG else tool_attempts)(questions, index, settings.env)
    trajectories = _answer(model, chat, attempts, settings, _policy_version(model))
    predictions = predict(trajectories, questions, name, config.seed if config else settings.warm_start.seed)
    scores = score(predictions, questions, settings.evaluate.bootstrap_samples, settings.evaluate.seed)
    scores = headline(scores | gold_recall_by_step(trajectories, questions))

    folder = evaluate_dir(name, seed, sweep)
    write_rows(folder / "predictions.parquet", predictions, Prediction)
    write_rows(folder / "trajectories.parquet", trajectories, Trajectory)
    _write_json(folder / "scores.json", scores)
    _write_json(folder / "hashes.json", _hashes(model, chat.prompt_hash(attempts[0].env.system, attempts[0].env.tools)))
    run = _trained(train_dir(name, seed, sweep)) if config else None
    run = run or _untrained(name, settings, config, sweep)
    run.final(scores)
    for title, text in _readable(trajectories, questions, tokenizer).items():
        run.text(text, f"examples/{title}.txt")
    with replacing(folder / "mlflow_run_id") as temporary:
        temporary.write_text(run.run_id)


def _answer(
    model: Path, chat: Chat, attempts: Sequence[Attempt], settings: Params, policy_version: int
) -> list[Trajectory]:
    with (
        accelerator(),
        open_engine(
            settings.engine,
            model,
            end_id=chat.end_id,
            max_tokens=settings.env.max_tokens,
            temperature=0.0,
            dtype=settings.model.dtype,
            version=policy_version,
        ) as engine,
    ):
        return collect(
            engine,
            chat,
            attempts,
            max_tokens=settings.env.max_tokens,
            max_action_tokens=settings.env.max_action_tokens,
            seed=settings.evaluate.seed,
            policy_version=policy_version,
        )


def _policy_version(model: Path) -> int:
    """Updates since the warm start, as the checkpoint around the model says; 0 for the warm start itself."""
    progress = model.parent / "progress.json"
    return int(json.loads(progress.read_text())["policy_version"]) if progress.exists() else 0


def _hashes(model: Path, prompt_hash: str) -> dict[str, str]:
    return {
        "questions": sha256(QUESTIONS),
        "passages": sha256(PASSAGES),
        "index": describe(INDEX).index_hash,
        "prompt": prompt_hash,
        "policy": sha256(model),
    }


def _trained(folder: Path) -> tracking.Run | None:
    """The run that training opened, where the store has it."""
    run_id = folder / "mlflow_run_id"
    return tracking.resume(run_id.read_text()) if run_id.exists() else None


def _untrained(name: str, settings: Params, config: TrainParams | None, sweep: str | None) -> tracking.Run:
    """A new run, which only holds the scores: of a baseline, or of a policy that was trained elsewhere."""
    shown = tracking.run_params(name, settings, config) if config else tracking.baseline_params(name, settings)
    tags = tracking.provenance(settings.prepare.dataset, sweep)
    with tracking.start(label(name, shown["seed"]), shown, tags) as run:
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
    with replacing(path) as temporary:
        temporary.write_text(json.dumps(content, indent=2) + "\n")


if __name__ == "__main__":
    from flows.stage import add_member_arguments, run_stage

    parser = argparse.ArgumentParser(description="Evaluates one agent on the test questions.")
    parser.add_argument("--name", required=True, help=f"a run of params.yaml, or one of {', '.join(BASELINES)}")
    add_member_arguments(parser)
    arguments = parser.parse_args()
    run_stage(evaluate, name=arguments.name, seed=arguments.seed, sweep=arguments.sweep)
