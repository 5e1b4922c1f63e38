"""Trajectories from stretches of tokens."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from agent_r1.records import Credit, Outcome, Source, Step, StopReason, Trajectory

STEP: dict[str, Any] = {"stop_reason": StopReason.END, "calls": [], "rewards": {}}


def from_parts(
    parts: Sequence[tuple[int, Sequence[int]]], steps: Sequence[Mapping[str, Any]] = (), **fields: Any
) -> Trajectory:
    """An episode of stretches, each a source with its token ids. Every stretch of actions is a step.

    `steps` are the fields in which the first steps differ from a plain one.
    """
    stops = np.cumsum([len(ids) for _, ids in parts]).tolist()
    actions = [
        (stop - len(ids), stop) for (source, ids), stop in zip(parts, stops, strict=True) if source == Source.ACTION
    ]
    given = [*steps, *[{}] * (len(actions) - len(steps))]
    plain: dict[str, Any] = {
        "trajectory_id": "0/q/0",
        "question_id": "q",
        **dict.fromkeys(("group", "sample", "seed", "policy_version", "iteration"), 0),
        "token_ids": np.array([token for _, ids in parts for token in ids], np.int32),
        "source": np.repeat([int(source) for source, _ in parts], [len(ids) for _, ids in parts]).astype(np.uint8),
        "logprobs": np.zeros(stops[-1], np.float32),
        "context_starts": [0],
        "steps": [
            Step(action_start=start, action_stop=stop, **{**STEP, **each})
            for (start, stop), each in zip(actions, given, strict=True)
        ],
        "outcome": Outcome.ANSWERED,
        "answer": "Tesk",
    }
    return Trajectory(**{**plain, **fields})


def question_fields(question_id: str = "q", **changes: Any) -> dict[str, Any]:
    """The fields of a question of one hop about the capital of Veld."""
    plain = {"dataset": "atlas", "split": "test", "text": f"Who is it ({question_id})?", "answers": ["Tesk"]}
    strata = {"hops": "1", "kind": "lookup"}
    return {"question_id": question_id, **plain, "gold_titles": ["Veld"], "strata": strata, **changes}


def credit_of(advantages: Sequence[float] | np.ndarray, **fields: Any) -> Credit:
    """The credit of an episode with these advantages; numbers are 0 and masks empty, unless they are given."""
    zeros, nowhere = np.zeros(len(advantages), np.float32), np.zeros(len(advantages), np.bool_)
    plain: dict[str, Any] = {
        **dict.fromkeys(("values", "value_targets", "reference_logprobs"), zeros),
        **dict.fromkeys(("loss_mask", "critic_mask"), nowhere),
    }
    plain |= {"trajectory_id": "0/q/0", "return_": 0.0, "kept": True}
    return Credit(advantages=np.array(advantages, np.float32), **{**plain, **fields})
