"""The mismatch that routing makes: `python -m benchmarks.routing [--store]`, small models with experts on a CPU.

vLLM samples in bfloat16, a request at a time, and its routers say their choices. `otherwise` are the shares of choices,
and of tokens with such a choice in any layer, that the learner makes otherwise at the same tokens. Mismatches are
mean/largest in nats: as it is, and with the sampler's choices in place of the learner's own (replay), whose weights
stay its own. On a CPU vLLM has `enable_return_routed_experts` refused, so that routers are asked here by their hook.
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from agent_r1.learn.learner import Learner
from agent_r1.records import Trajectory
from agent_r1.rollout import engine_wire as wire
from agent_r1.rollout import vllm_process
from agent_r1.rollout.sampling import Action
from benchmarks.families import FAMILIES, STAND_INS, WORDS, WORK, Family, make_model
from benchmarks.stored import Row, options, show
from benchmarks.synthetic import random_requests, shipped_with, trajectory_of

DTYPE = "bfloat16"
FINER = {"num_experts": 64, "num_experts_per_tok": 8, "num_hidden_layers": 4, "norm_topk_prob": True}
CASES: Sequence[tuple[str, dict[str, Any]]] = (("Qwen3-MoE", {}), ("Qwen3-MoE", FINER), ("Qwen3.5-MoE", {}))


@dataclass(frozen=True, slots=True)
class Routed:
    """An episode, and the sampler's choices [L - 1, layers, k]."""

    trajectory: Trajectory
    experts: NDArray[np.int64]


def sampled(model: Path) -> list[Routed]:
    """Episodes of one action each, by an engine in this process."""
    from vllm.model_executor.layers.fused_moe.runner.moe_runner import MoERunner

    launch = wire.Launch(vllm=shipped_with({}).engine.vllm, model=str(model), max_tokens=WORK.tokens, dtype=DTYPE)
    engine = vllm_process.open_engine(launch)
    worker = engine.model_executor.driver_worker.worker
    routers = [layer.router for layer in worker.model_runner.get_model().modules() if isinstance(layer, MoERunner)]
    choices: list[list[Tensor]] = [[] for _ in routers]
    for router, calls in zip(routers, choices, strict=True):
        router.set_capture_fn(lambda experts, calls=calls: calls.append(experts.long().clone()))
    episodes = list[Routed]()
    for request in random_requests(WORK, WORDS):
        for calls in choices:
            calls.clear()
        sampling = wire.Sampling(seed=request.seed, max_tokens=WORK.action, temperature=1.0, stop_token_ids=[])
        draw = wire.Draw(token_ids=request.context, sampling_params=sampling)
        engine.add_request(str(request.episode), *vllm_process._in_vllm(draw))
        finished = list[Any]()
        while not finished:
            finished = [output for output in engine.step() if output.finished]
        answer = vllm_process._sampled(finished[0])
        trajectory = trajectory_of(request, Action.of(answer.ids, answer.logprobs, end_ids=()))
        experts = torch.stack([torch.cat(calls) for calls in choices], 1).numpy()
        episodes.append(Routed(trajectory, experts))
    return episodes


@contextmanager
def hooked(learner: Learner, choices: list[Tensor], replay: Sequence[Tensor] = ()) -> Iterator[None]:
    """Notes the choices [L, k] of each router, or has it take those [L - 1, k] of `replay`, and its own at the end."""
    routers = [module for module in learner.policy.modules() if type(module).__name__.endswith("TopKRouter")]

    def note(_: nn.Module, __: Any, output: tuple[Tensor, Tensor, Tensor]) -> None:
        choices.append(output[2])

    def take(router: Any, _: Any, output: tuple[Tensor, Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        logits, weights, own = output
        experts = torch.cat([replay[routers.index(router)], own[-1:]])
        shares = logits.softmax(-1, dtype=torch.float32).gather(-1, experts)
        if getattr(router, "norm_topk_prob", True):
            shares = shares / shares.sum(-1, keepdim=True)
        return logits, shares.to(weights.dtype), experts

    with ExitStack() as hooks:
        for router in routers:
            handle = router.register_forward_hook(take if replay else note)
            hooks.callback(handle.remove)
        yield


def gaps(learner: Learner, episode: Routed, choices: list[Tensor], replay: Sequence[Tensor] = ()) -> NDArray[Any]:
    """The differences of the logprobs of learner and sampler at sampled tokens."""
    trajectory = episode.trajectory
    with hooked(learner, choices, replay):
        [logprobs] = learner.logprobs([trajectory])
    difference: NDArray[Any] = np.abs(logprobs - trajectory.logprobs)[trajectory.action_mask]
    return difference


def measure(name: str, changes: dict[str, Any]) -> Row:
    with tempfile.TemporaryDirectory() as scratch:
        family = Family(name, Path(scratch) / "model", Path(scratch))
        make_model(name, family.model, **changes)
        learner = family.learner(DTYPE)
        episodes = sampled(family.model)
        own = list[NDArray[Any]]()
        replayed = list[NDArray[Any]]()
        otherwise = list[NDArray[Any]]()
        for episode in episodes:
            choices = list[Tensor]()
            own.append(gaps(learner, episode, choices))
            learners = torch.stack(choices, 1)[: len(episode.experts)].sort(-1).values.numpy()
            otherwise.append((learners != np.sort(episode.experts, -1)).any(-1))
            replayed.append(gaps(learner, episode, [], list(torch.from_numpy(episode.experts).unbind(1))))
    layers = np.concatenate(otherwise)
    fields = {**FAMILIES[name][1], **changes}
    return {
        "family": name,
        "experts": f"{fields['num_experts_per_tok']} of {fields['num_experts']}, {layers.shape[1]} layers",
        "tokens": f"{len(layers):,}",
        "choices otherwise": f"{100 * layers.mean():.2f} %",
        "tokens otherwise": f"{100 * layers.any(-1).mean():.1f} %",
        "mismatch": _gap(own),
        "with replay": _gap(replayed),
    }


def _gap(pieces: Sequence[NDArray[Any]]) -> str:
    every = np.concatenate(pieces)
    return f"{every.mean():.1e}/{every.max():.1e}"


def main() -> None:
    parser = options("Measures the mismatch that routing makes.")
    given = parser.parse_args()
    os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_NO_USAGE_STATS": "1", "OMP_NUM_THREADS": "1"}
    sys.path.append(str(STAND_INS))
    torch.set_num_threads(1)
    show("routing", [measure(*case) for case in CASES], store=given.store, keys=2)


if __name__ == "__main__":
    main()
