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
from agent_r1.evaluation.predictions import asked_questions, predict
from agent_r1.evaluation.scores import headline, score
from agent_r1.evaluation.transcript import transcript
from agent_r1.hashes import sha256
from agent_r1.params import Params
from agent_r1.records import Prediction, Question, Trajectory
from agent_r1.rollout.attempts import naive_rag_attempts, tool_attempts
from agent_r1.rollout.chat import Chat
from agent_r1.rollout.engine import Engine
from agent_r1.rollout.episodes import Attempt, collect
from agent_r1.search.index import describe, open_index
from agent_r1.tables import read_rows, replacing, write_rows
from flows.lock import accelerator
from flows.paths import INDEX, PASSAGES, QUESTIONS, WARM_START, evaluate_dir, train_dir


def evaluate(name: str) -> None:
    """Answers the test questions greedily with a run's policy, or as a baseline with the warm-started model.

    Writes predictions.parquet, trajectories.parquet, scores.json and hashes.json, and adds the scores and some
    readable episodes to the MLflow run.

    Raises:
        ValueError: there is no such run or baseline.
        FileNotFoundError: the model or the data were not made yet.
    """
    settings = params.load()
    seed = settings.warm_start.seed if name in BASELINES else settings.run(name).seed
    model = WARM_START if name in BASELINES else train_dir(name) / "checkpoint" / "policy"
    if not model.is_dir():
        raise FileNotFoundError(f"there is no model at {model}; train it first (`dvc repro` knows the stage)")
    questions = asked_questions(read_rows(QUESTIONS, Question), settings.evaluate.questions, settings.evaluate.seed)
    tokenizer = AutoTokenizer.from_pretrained(model)
    assert isinstance(tokenizer, PreTrainedTokenizerFast), type(tokenizer)  # warm_start and train saved it
    chat = Chat(tokenizer)
    index = open_index(settings.search, PASSAGES, INDEX)
    attempts = (naive_rag_attempts if name == NAIVE_RAG else tool_attempts)(questions, index, settings.env)
    trajectories = _answer(model, chat, attempts, settings, _policy_version(model))
    predictions = predict(trajectories, questions, name, seed)
    scores = headline(score(predictions, questions, settings.evaluate.bootstrap_samples, settings.evaluate.seed))

    folder = evaluate_dir(name)
    write_rows(folder / "predictions.parquet", predictions, Prediction)
    write_rows(folder / "trajectories.parquet", trajectories, Trajectory)
    _write_json(folder / "scores.json", scores)
    _write_json(folder / "hashes.json", _hashes(model, chat.prompt_hash(attempts[0].env.system, attempts[0].env.tools)))
    run = _tracked_run(name, settings)
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
        Engine(
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


def _tracked_run(name: str, settings: Params) -> tracking.Run:
    """The run that training opened, where the store has it; else a new one that only holds the scores."""
    trained = train_dir(name) / "mlflow_run_id"
    found = tracking.resume(trained.read_text()) if name not in BASELINES and trained.exists() else None
    if found is not None:
        return found
    shown = (tracking.baseline_params if name in BASELINES else tracking.run_params)(name, settings)
    with tracking.start(f"{name}-seed{shown['seed']}", shown, tracking.provenance(settings.prepare.dataset)) as run:
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
    from flows.stage import run_stage

    parser = argparse.ArgumentParser(description="Evaluates one agent on the test questions.")
    parser.add_argument("--name", required=True, help=f"a run of params.yaml, or one of {', '.join(BASELINES)}")
    run_stage(evaluate, name=parser.parse_args().name)
