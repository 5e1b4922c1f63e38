"""Hand-made questions, and episodes that a small tokenizer spells out."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from agent_r1.answers import exact_match
from agent_r1.evaluation.comparison import Evaluation
from agent_r1.evaluation.scores import predict
from agent_r1.params.stages import EvaluateParams
from agent_r1.records import Call, CallStatus, Outcome, Question, Source, Trajectory
from tests.trajectories import from_parts, question_fields

THOUGHT = "<think>Find the director first.</think>"
CALL = THOUGHT + '<tool_call>\n{"name": "search", "arguments": {"query": "capital of Veld"}}\n</tool_call>'
PASSAGE = "Veld: The capital of Veld is Tesk.\nTesk: Tesk is a city in Veld."

HASHES = {"questions": "q", "passages": "p", "index": "i", "prompt": "t", "protocol": "tool_call", "limits": "l"}

SEARCHED = Call(tool="search", arguments='{"query": "capital of Veld"}', status=CallStatus.OK)

MakeQuestion = Callable[..., Question]
MakeTrajectory = Callable[..., Trajectory]


@pytest.fixture
def make_question() -> MakeQuestion:
    def make(question_id: str, *, hops: int = 1, kind: str = "lookup", answer: str = "Tesk") -> Question:
        text, strata = f"What is the capital of Veld ({question_id})?", {"hops": str(hops), "kind": kind}
        return Question(**question_fields(question_id, text=text, answers=[answer], strata=strata))

    return make


@pytest.fixture
def make_trajectory(tiny_tokenizer: PreTrainedTokenizerFast) -> MakeTrajectory:
    """An episode of one search per status in `calls`, then the answer."""

    def make(
        question_id: str, *, answer: str = "Tesk", calls: Sequence[str] = ("ok",), progress: float = 1.0
    ) -> Trajectory:
        texts = [(Source.PROMPT, f"<|im_start|>user\nQ {question_id}<|im_end|>\n<|im_start|>assistant\n")]
        steps: list[dict[str, Any]] = []
        for status in calls:
            said = [] if status == "none" else [replace(SEARCHED, status=CallStatus(status))]
            steps.append({"calls": said, "rewards": {"progress": progress} if status == "ok" else {}})
            texts += [
                (Source.ACTION, f"{CALL}<|im_end|>"),
                (Source.TEMPLATE, "\n<|im_start|>user\n<tool_response>\n"),
                (Source.OBSERVATION, PASSAGE),
                (Source.TEMPLATE, "\n</tool_response><|im_end|>\n<|im_start|>assistant\n"),
            ]
        texts.append((Source.ACTION, f"<answer>{answer}</answer><|im_end|>"))
        steps.append({"rewards": {"em": exact_match(answer, ["Tesk"])}})
        parts = [(source, tiny_tokenizer.encode(text, add_special_tokens=False)) for source, text in texts]
        about: dict[str, Any] = {"trajectory_id": f"0/{question_id}/0", "question_id": question_id}
        return from_parts(parts, steps, policy_version=30, answer=answer, **about)

    return make


@pytest.fixture
def draws() -> EvaluateParams:
    """The seed and the number of the bootstrap's samples."""
    return EvaluateParams(seed=0, questions=0, bootstrap_samples=500, history_kept=14)


@pytest.fixture
def make_evaluation(make_trajectory: MakeTrajectory) -> Callable[..., Evaluation]:
    """An evaluation of questions with their answers (Tesk is right, None is aborted), and with `calls` for each."""

    def make(
        name: str, questions: Sequence[Question], answers: Sequence[str | None], calls: int = 1, **hashes: str
    ) -> Evaluation:
        trajectories = [
            make_trajectory(question.question_id, answer=answer, calls=["ok"] * calls)
            if answer is not None
            else replace(make_trajectory(question.question_id), outcome=Outcome.ABORTED, answer="")
            for question, answer in zip(questions, answers, strict=True)
        ]
        return Evaluation(
            name=name,
            predictions=predict(trajectories, questions, name, seed=0),
            trajectories=trajectories,
            hashes={**HASHES, "policy": name, **hashes},
        )

    return make


@pytest.fixture
def decode(tiny_tokenizer: PreTrainedTokenizerFast) -> Callable[[Sequence[int]], str]:
    return lambda ids: str(tiny_tokenizer.decode(list(ids), skip_special_tokens=True))
