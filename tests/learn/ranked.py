"""What each rank of the tests of ranks does, in a process of its own."""

import multiprocessing
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from agent_r1.devices.meeting import Place, joined
from agent_r1.devices.sharing import ALONE, Ranks, led, whole
from agent_r1.learn import checkpoint, scoring
from agent_r1.learn.checkpoint import Progress
from agent_r1.learn.learner import Learner, Options
from agent_r1.learn.memory import measure
from agent_r1.params.env import EnvParams
from agent_r1.params.stages import ModelParams
from agent_r1.params.train import UpdateParams
from agent_r1.records import Credit, Trajectory

TIMEOUT_S = 600.0  # the slowest takes 40 on two quiet cores, and over 100 on busy ones


class Recording(Learner):
    """Remembers the gradients of every optimiser step, before they are clipped."""

    gradients: list[dict[str, Tensor]]

    def _take_step(self, name: str, model: nn.Module, *others: Any) -> float:
        found = {each: weight.grad for each, weight in model.named_parameters() if weight.grad is not None}
        self.gradients.append({f"{name}.{each}": whole(gradient).clone() for each, gradient in found.items()})
        return super()._take_step(name, model, *others)


@dataclass(frozen=True, kw_only=True)
class Case:
    """A learner, and what it learns from in so many updates."""

    path: Path
    params: UpdateParams
    model: ModelParams
    with_critic: bool
    trajectories: list[Trajectory]
    credits: list[Credit]
    updates: int = 1
    start: Path | None = None  # a checkpoint to go on from
    end: Path | None = None  # where one is written
    chunk: int = scoring.CHUNK  # logits that exist at a time
    largest: EnvParams | None = None  # the limits by which the memory that an update needs is measured before


@dataclass
class Found:
    """What a case came to."""

    gradients: list[dict[str, Tensor]] = field(default_factory=list)
    metrics: list[dict[str, float]] = field(default_factory=list)
    scores: list[Any] = field(default_factory=list)
    weights: dict[str, Tensor] = field(default_factory=dict)
    start: dict[str, Tensor] = field(default_factory=dict)  # with buffers and the reference, before any update
    sums: dict[str, int] = field(default_factory=dict)  # of the weights in bfloat16, before any update
    kept: int = 0  # bytes of the policy's weights between two calls
    fault: str = ""


def learner_of(case: Case, ranks: Ranks = ALONE) -> Recording:
    learner = Recording(
        case.path,
        case.params,
        case.model,
        with_critic=case.with_critic,
        seed=3,
        options=Options(with_reference=True, device=torch.device("cpu"), ranks=ranks),
    )
    learner.gradients = []
    return learner


def learned(case: Case, ranks: Ranks = ALONE) -> Found:
    """Scores, updates and what is left of them, the reference's first."""
    learner = learner_of(case, ranks)
    start = {} if case.updates else start_of(learner)
    sums = {} if case.updates else learner.weight_sums("bfloat16")
    scores = [learner.reference_logprobs(case.trajectories), learner.logprobs(case.trajectories)]
    if case.largest:
        measure(learner, case.largest)
    learner.gradients.clear()
    iteration = checkpoint.load(case.start, learner).iterations if case.start else 0
    metrics = [learner.update(case.trajectories, case.credits, iteration + each) for each in range(case.updates)]
    scores += [learner.logprobs(case.trajectories), learner.values(case.trajectories)]
    if case.end:
        checkpoint.save(case.end, learner, Progress(iterations=iteration + case.updates, policy_version=0))
        checkpoint.hand_over(case.end.with_name(f"{case.end.name} handed"), learner, halved=True)
    kept = sum(
        each.to_local().nbytes if isinstance(each, DTensor) else each.nbytes for each in learner.policy.parameters()
    )
    return Found(learner.gradients, metrics, scores, weights_of(learner), start, sums, kept)


@led
def weights_of(learner: Learner) -> dict[str, Tensor]:
    modules = {"policy": learner.policy, **({"critic": learner.critic} if learner.critic else {})}
    return {
        f"{name}.{each}": whole(weight.detach()).clone()
        for name, module in modules.items()
        for each, weight in module.named_parameters()
    }


@led
def start_of(learner: Learner) -> dict[str, Tensor]:
    modules: list[Any] = [learner.policy, learner.critic, learner.reference and learner.reference.policy]
    return {
        f"{index}.{name}": whole(tensor.detach()).clone()
        for index, module in enumerate(each for each in modules if each)
        for name, tensor in [*module.named_parameters(), *module.named_buffers()]
    }


def in_ranks(
    cases: Mapping[str, Case], ranks: int, folder: Path, *, copies: int = 1, defers: bool = False
) -> list[dict[str, Found]]:
    """What each case comes to where so many ranks share its learner, as the leader has it; of the others the faults."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])  # which brings what takes seconds once for all
    file = f"{folder}/ranks"
    places = [Place(rank=rank, size=ranks, local_rank=rank, file=file) for rank in range(ranks)]
    arguments = [(place, cases, folder, copies, defers) for place in places]
    processes = [context.Process(target=_be, args=each, daemon=True) for each in arguments]
    for process in processes:
        process.start()
    for process in processes:
        process.join(TIMEOUT_S)
    codes = [process.exitcode for process in processes]
    for process in processes:
        process.kill()
    if any(code != 0 for code in codes):  # None: one ran out of time
        raise RuntimeError(f"the ranks ended with {codes}; see what they wrote")
    return [torch.load(folder / f"{rank}.pt", weights_only=False) for rank in range(ranks)]


def _be(place: Place, cases: Mapping[str, Case], folder: Path, copies: int, defers: bool) -> None:
    torch.set_num_threads(1)
    found = {}
    with joined(place, copies=copies, defers=defers) as group:
        for name, case in cases.items():
            scoring.CHUNK = case.chunk
            try:
                if group.leads:
                    found[name] = learned(case, group)
                    group.dismiss()
                else:
                    group.follow(learner_of(case, group))
            except FloatingPointError as fault:
                found[name] = Found(fault=str(fault))
    torch.save(found, folder / f"{place.rank}.pt")
