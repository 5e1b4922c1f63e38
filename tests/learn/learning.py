"""Records to learn from, gradients of a loss, and what a folder or a model holds."""

from collections.abc import Sequence
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from agent_r1.learn.adapter import trained_state
from agent_r1.learn.learner import Learner
from agent_r1.learn.optimizers import flat
from agent_r1.params import load
from agent_r1.params.sections import override
from agent_r1.params.stages import LoraParams
from agent_r1.params.train import UpdateParams
from agent_r1.records import Credit, Trajectory
from tests.trajectories import from_parts

CPU = torch.device("cpu")
PARAMS = load(Path(__file__).parents[2] / "params.yaml")
LORA = LoraParams(rank=4, alpha=8.0, targets=["all-linear"])


def with_changes(params: UpdateParams, **changes: Any) -> UpdateParams:
    return UpdateParams.model_validate(override(params.model_dump(), changes))


# One step of policy and critic over all trajectories, and no schedule.
UPDATE = with_changes(
    PARAMS.train.update,
    learning_rate=1e-3,
    learning_rate_decay="none",
    minibatches=1,
    critic={"epochs": 1, "minibatches": 1, "warmup": {"iterations": 0, "explained_variance": 0.0, "limit": 0}},
    max_tokens_per_microbatch=64,
    canary_tolerance={"float32": 1e-4},
)


class Samples(NamedTuple):
    trajectories: list[Trajectory]
    credits: list[Credit]


def gradients(model: nn.Module) -> dict[str, Tensor]:
    """Takes the gradients of all weights that have one away from them."""
    found = {name: weight.grad for name, weight in model.named_parameters() if weight.grad is not None}
    model.zero_grad()
    return found


def weights(*modules: nn.Module | None) -> list[Tensor]:
    return [weight.detach().clone() for module in modules if module for weight in module.parameters()]


def same_bits(left: list[Tensor], right: list[Tensor]) -> bool:
    return len(left) == len(right) and all(map(torch.equal, left, right))


def record_of(learner: Learner) -> list[Any]:
    """All that an update changes, as bytes: weights, gradients, states of the optimisers, torch's random state."""
    states = {name: optimizer.state_dict() for name, optimizer in learner.optimizers.items()}
    own = [weight for module in (learner.policy, learner.critic) if module for weight in module.parameters()]
    kept = dict(sorted(flat({name: state["state"] for name, state in states.items()}).items()))
    tensors = [*own, *(weight.grad for weight in own), *kept.values(), torch.get_rng_state()]
    return [
        [None if each is None else each.detach().reshape(-1).view(torch.uint8).numpy().tobytes() for each in tensors],
        [*kept],
        [state["param_groups"] for state in states.values()],
        learner.policy_version,
    ]


def move(learner: Learner) -> None:
    """Stands for an update of adapters that changes what the policy says, and makes a version more."""
    learner.policy_version += 1
    generator = torch.Generator().manual_seed(learner.policy_version)
    for weight in trained_state(learner.policy).values():
        weight += 0.2 * torch.randn(weight.shape, generator=generator)


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def make_trajectory(
    index: int, source: Sequence[int], logprobs: NDArray[np.float32] | None = None, context_starts: Sequence[int] = (0,)
) -> Trajectory:
    """A trajectory of random tokens with the given sources; every run of actions is a step."""
    ids = iter(np.random.default_rng(index).integers(20, 400, len(source)).tolist())
    parts = [(kind, [next(ids) for _ in run]) for kind, run in groupby(source)]
    names = {"trajectory_id": f"0/q{index}/0", "question_id": f"q{index}", "group": index, "seed": index}
    scores = np.zeros(len(source), np.float32) if logprobs is None else logprobs
    return from_parts(parts, **names, logprobs=scores, context_starts=list(context_starts), answer="")


def make_credit(of: Trajectory, *, loss_mask: Any = None, kept: bool = True) -> Credit:
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
