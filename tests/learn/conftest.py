"""Learners of the tiny model, and what they learn from."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from agent_r1.learn.learner import Learner, Options
from agent_r1.params.stages import LoraParams, ModelParams
from agent_r1.records import Source, Trajectory
from tests.learn.learning import CPU, PARAMS, UPDATE, Samples, make_credit, make_trajectory, with_changes

MakeLearner = Callable[..., Learner]
NO_LORA = LoraParams(rank=0, alpha=1, targets=["all-linear"])


@pytest.fixture
def make_learner(tiny_model: Path) -> MakeLearner:
    """Builds a learner over the tiny model on the CPU; keyword arguments override parameters of model and update."""

    def build(
        *,
        with_critic: bool = True,
        adapter: LoraParams | None = None,
        merges: bool = True,
        reference: str = "",
        **changes: Any,
    ) -> Learner:
        of_model = {name: changes.pop(name) for name in [*changes] if name in ModelParams.model_fields}
        plain = {"dtype": "float32", "threads": 1, "lora": adapter or NO_LORA}
        return Learner(
            tiny_model,
            with_changes(UPDATE, **changes),
            PARAMS.model.model_copy(update=plain | of_model),
            with_critic=with_critic,
            seed=3,
            options=Options(device=CPU, merges=merges, with_reference=bool(reference), reference=reference),
        )

    return build


P, A, O = int(Source.PROMPT), int(Source.ACTION), int(Source.OBSERVATION)  # noqa: E741
SOURCES = [
    [P, P, A, A, A, O, O, A, A],
    [P, P, P, A, A],
    [P, A, A, O, O, O, O, O, A, A, A, A],
    [P, P, A, A, O, A, A, O, A],
]


@pytest.fixture
def trajectories(make_learner: MakeLearner) -> list[Trajectory]:
    """Four trajectories whose logprobs are those of the tiny model."""
    drafts = [make_trajectory(index, source) for index, source in enumerate(SOURCES)]
    own = make_learner(with_critic=False).logprobs(drafts)
    return [
        make_trajectory(index, source, np.where(np.array(source) == A, logprobs, 0).astype(np.float32))
        for index, (source, logprobs) in enumerate(zip(SOURCES, own, strict=True))
    ]


@pytest.fixture
def samples(trajectories: list[Trajectory]) -> Samples:
    return Samples(trajectories, [make_credit(each) for each in trajectories])
