"""Small records to train on: what the policy tests share."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from agent_r1.learn.learner import Learner, Options
from agent_r1.params import load
from agent_r1.params.stages import LoraParams, ModelParams
from agent_r1.params.train import UpdateParams
from agent_r1.records import Credit, Outcome, Source, Step, Trajectory
from tests.learn.learning import CPU, Samples, with_changes
from tests.trajectories import STEP

MakeLearner = Callable[..., Learner]
NO_LORA = LoraParams(rank=0, alpha=1, targets=["all-linear"])


@pytest.fixture
def update_params() -> UpdateParams:
    """The project's own, with one step of policy and critic over all trajectories and no schedule."""
    own = load(Path(__file__).parents[2] / "params.yaml").train.update
    warmup = {"iterations": 0, "explained_variance": 0.0, "limit": 0}
    return with_changes(
        own,
        learning_rate=1e-3,
        learning_rate_decay="none",
        minibatches=1,
        critic={"epochs": 1, "minibatches": 1, "warmup": warmup},
        max_tokens_per_microbatch=64,
        canary_tolerance={"float32": 1e-4},
    )


@pytest.fixture
def make_learner(tiny_model: Path, update_params: UpdateParams) -> MakeLearner:
    """Builds a learner over the tiny model on the CPU; keyword arguments override update parameters."""

    def build(
        *,
        with_critic: bool = True,
        dtype: Any = "float32",
        adapter: LoraParams | None = None,
        gradient_checkpointing: bool = False,
        packing: bool = False,
        float32_output: bool = False,
        merges: bool = True,
        reference: str = "",
        **changes: Any,
    ) -> Learner:
        lora = adapter or NO_LORA
        return Learner(
            tiny_model,
            with_changes(update_params, **changes),
            ModelParams(
                path="",
                dtype=dtype,
                float32_output=float32_output,
                gradient_checkpointing=gradient_checkpointing,
                packing=packing,
                lora=lora,
                threads=1,
            ),
            with_critic=with_critic,
            seed=3,
            options=Options(device=CPU, merges=merges, with_reference=bool(reference), reference=reference),
        )

    return build


def trajectory(
    index: int,
    source: Sequence[int],
    logprobs: NDArray[np.float32] | None = None,
    context_starts: Sequence[int] = (0,),
) -> Trajectory:
    """A trajectory of random tokens with the given sources; every run of actions is a step."""
    edges = np.flatnonzero(np.diff([0, *(np.array(source) == Source.ACTION), 0])).tolist()
    tokens = np.random.default_rng(index).integers(20, 400, len(source)).astype(np.int32)
    return Trajectory(
        trajectory_id=f"0/q{index}/0",
        question_id=f"q{index}",
        group=index,
        sample=0,
        seed=index,
        policy_version=0,
        iteration=0,
        token_ids=tokens,
        source=np.array(source, np.uint8),
        logprobs=np.zeros(len(source), np.float32) if logprobs is None else logprobs,
        context_starts=list(context_starts),
        steps=[
            Step(action_start=start, action_stop=stop, **STEP)
            for start, stop in zip(edges[::2], edges[1::2], strict=True)
        ],
        outcome=Outcome.ANSWERED,
        answer="",
    )


def credit(of: Trajectory, *, loss_mask: Any = None, kept: bool = True) -> Credit:
    """Random advantages, targets and reference on the loss mask, which is the action mask when not given."""
    mask = of.action_mask if loss_mask is None else np.asarray(loss_mask, np.bool_)
    generator = np.random.default_rng([of.group, 1])
    advantages, targets, reference = generator.normal(size=(3, len(mask))).astype(np.float32)
    return Credit(
        trajectory_id=of.trajectory_id,
        return_=0.0,
        advantages=np.where(mask, advantages, 0).astype(np.float32),
        values=np.zeros(len(mask), np.float32),
        value_targets=targets,
        reference_logprobs=np.where(mask, reference / 4 - 6, 0).astype(np.float32),
        loss_mask=mask,
        critic_mask=mask,
        kept=kept,
    )


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
    drafts = [trajectory(index, source) for index, source in enumerate(SOURCES)]
    own = make_learner(with_critic=False).logprobs(drafts)
    return [
        trajectory(index, source, np.where(np.array(source) == A, logprobs, 0).astype(np.float32))
        for index, (source, logprobs) in enumerate(zip(SOURCES, own, strict=True))
    ]


@pytest.fixture
def samples(trajectories: list[Trajectory]) -> Samples:
    return Samples(trajectories, [credit(each) for each in trajectories])


@pytest.fixture(scope="session")
def make_credit() -> Callable[..., Credit]:
    return credit


@pytest.fixture(scope="session")
def make_trajectory() -> Callable[..., Trajectory]:
    return trajectory
