"""Whether a CUDA device learns what a CPU learns: `python -m benchmarks.cuda --out FOLDER`, in about two minutes.

A small model with grouped heads learns from random episodes in every setting of the learner, on the CPU in float32 and
on the device in float32 and bfloat16. Attention, supervised learning, checkpoints and the canary are compared beside
that, and two processes train the built-in model from the same seed. Writes cuda.json after every part, and prints a
table at the end; what fails is named there, and the others go on.
"""

from __future__ import annotations

import argparse
import json
import logging
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from agent_r1.learn import checkpoint
from agent_r1.learn.gradients import add_critic_gradient, add_policy_gradient, join_credit
from agent_r1.learn.learner import Learner, Options
from agent_r1.learn.memory import measure
from agent_r1.learn.model import load_policy
from agent_r1.params import SHIPPED, load
from agent_r1.params.sections import override, validated
from agent_r1.params.stages import ModelParams
from agent_r1.params.train import TrainParams
from agent_r1.pretrained import default_device
from agent_r1.records import Credit, Source, Step, StopReason, Trajectory
from agent_r1.teaching.supervised import Lessons, fit
from benchmarks.attention import compare_attention, far
from benchmarks.gpu import Sampled
from benchmarks.kit import Row, accept_grouped_heads, counted_kernel, show_rows, tried
from benchmarks.synthetic import NO_WARMUP, SHAPES, Work, make_model, unanswered

SHAPE = 128, 2, 4, 2, 256  # as in synthetic.SHAPES, but for the words
WORDS = 40000  # so many that logprobs are made in several blocks
LENGTHS = (30, 200, 57, 181, 64, 33, 140, 96)  # tokens of the episodes; every third has two contexts
EVERYTHING: dict[str, Any] = {
    "credit": {"estimator": "grpo"},
    "rollout": {"samples": 8},
    "update": {"kl_loss": 0.1, "entropy_bonus": 0.1, "importance_cap": 2.0},
}
SETTINGS: dict[str, dict[str, Any]] = {  # what of params.yaml is changed
    "critic": {},
    "no critic, everything in the loss": EVERYTHING,
    "ratios of sequences": {"update": {"ratio": "sequence"}},
    "ratios of steps, cispo": {"update": {"ratio": "step", "loss": "cispo", "dual_clip": 0.0}},
    "packing": {"model": {"packing": True}},
    "packing, compiled": {"model": {"packing": True, "compile": True}},
    "gradient checkpointing": {"model": {"gradient_checkpointing": True}},
    "packing, gradient checkpointing": {"model": {"packing": True, "gradient_checkpointing": True}},
    "adapters": {"model": {"lora": {"rank": 8}}},
    "adapters, packing": {"model": {"lora": {"rank": 8}, "packing": True}},
    "adapters, gradient checkpointing": {"model": {"lora": {"rank": 8}, "gradient_checkpointing": True}},
    "offloaded optimiser": {"offload": True},
    "float32 output": {"model": {"float32_output": True}},
    "no critic, packing, everything in the loss": {**EVERYTHING, "model": {"packing": True}},
    "adapters, packing, gradient checkpointing": {
        "model": {"lora": {"rank": 8}, "packing": True, "gradient_checkpointing": True}
    },
    "adapters, everything in the loss, offloaded optimiser": {
        **EVERYTHING,
        "model": {"lora": {"rank": 8}},
        "offload": True,
    },
}
CPU = torch.device("cpu")

Floats = NDArray[Any]


def learner_on(device: torch.device, dtype: str, changes: dict[str, Any], model: Path) -> Learner:
    """The learner of one of `SETTINGS`."""
    plain, shared = load(SHIPPED), {"minibatches": 2, "max_tokens_per_microbatch": 512, "critic": {"warmup": NO_WARMUP}}
    train = {name: changes.get(name, {}) for name in ("credit", "rollout")}
    train["update"] = {**shared, **changes.get("update", {})}
    config = validated(TrainParams, override(plain.train.model_dump(by_alias=True), train), "train")
    shape = override(plain.model.model_dump(), {"dtype": dtype, **changes.get("model", {})})
    learner = Learner(
        model,
        config.update,
        validated(ModelParams, shape, "model"),
        with_critic=config.credit.needs_critic,
        seed=0,
        options=Options(with_reference=config.needs_reference, device=device, offload=changes.get("offload", False)),
    )
    if learner.critic is not None:
        start = torch.randn(learner.critic.head.weight.shape, generator=torch.Generator().manual_seed(0)) / 20
        learner.critic.head.weight.data.copy_(start)
    return learner


def episodes(words: int) -> list[tuple[Trajectory, Credit]]:
    """Random episodes of two or three actions, and random credit."""
    draws = np.random.default_rng(0)
    made = []
    for index, length in enumerate(LENGTHS):
        cuts = np.sort(draws.choice(np.arange(4, length - 1), 3, replace=False)).tolist()
        source = np.full(length, Source.OBSERVATION, np.uint8)
        source[: cuts[0]], source[cuts[0] : cuts[1]], source[cuts[2] :] = Source.PROMPT, Source.ACTION, Source.ACTION
        acted = source == Source.ACTION
        steps = [
            Step(action_start=start, action_stop=stop, stop_reason=StopReason.END, calls=[], rewards={})
            for start, stop in ((cuts[0], cuts[1]), (cuts[2], length))
        ]
        advantages, targets, noise = draws.normal(size=(3, length)).astype(np.float32)
        trajectory = unanswered(
            index,
            token_ids=draws.integers(0, words, length).astype(np.int32),
            source=source,
            logprobs=np.where(acted, noise / 10 - np.log(words), 0).astype(np.float32),
            context_starts=[0, cuts[1]] if index % 3 == 0 else [0],
            steps=steps,
        )
        credit = Credit(
            trajectory_id=str(index),
            return_=0.0,
            advantages=np.where(acted, advantages, 0).astype(np.float32),
            values=np.zeros(length, np.float32),
            value_targets=targets,
            reference_logprobs=np.where(acted, trajectory.logprobs + noise / 5, 0).astype(np.float32),
            loss_mask=acted,
            critic_mask=acted,
            kept=True,
        )
        made.append((trajectory, credit))
    return made


def learned(learner: Learner) -> dict[str, Any]:
    """Logprobs, values, gradients, and the weights after two updates."""
    trajectories, credits_ = map(list, zip(*episodes(learner.policy.config.vocab_size), strict=True))
    references = learner.reference_logprobs(trajectories) if learner.reference else []
    found: dict[str, Any] = {
        "logprobs": np.concatenate([*learner.logprobs(trajectories), *references]),
        "values": np.concatenate(learner.values(trajectories)),
    }
    rows = join_credit(learner.policy, trajectories, credits_, learner.params, learner.compute)
    add_policy_gradient(learner.policy, rows, 400, learner.params, learner.compute, learn=True)
    found["policy"] = flat_gradient(learner.policy)
    if learner.critic is not None:
        add_critic_gradient(learner.critic, rows, 400, learner.params.critic, learner.compute)
        found["critic"] = flat_gradient(learner.critic)
    metrics = [learner.update(trajectories, credits_, iteration) for iteration in (0, 1)]
    found["loss"] = metrics[1].get("policy/loss", 0.0)
    found["weights"] = flat(weight.detach() for weight in learner.policy.parameters() if weight.requires_grad)
    return found


def flat_gradient(model: nn.Module) -> Floats:
    found = flat(weight.grad for weight in model.parameters() if weight.grad is not None)
    model.zero_grad()
    return found


def flat(tensors: Iterator[Tensor]) -> Floats:
    return torch.cat([each.float().cpu().flatten() for each in tensors]).numpy()


def compare_learner(changes: dict[str, Any], model: Path, runs: int) -> Row:
    """How far the device's learner is from the CPU's in float32, and whether it gives the same bits twice."""
    widened = changes.get("model", {}).get("float32_output", False)  # which in float32 is refused
    expected = learned(learner_on(CPU, "float32", {} if widened else changes, model))
    row: Row = {}
    for dtype in ["float32", "bfloat16"][widened:]:
        found, *again = (learned(learner_on(default_device(), dtype, changes, model)) for _ in range(runs))
        row[f"{dtype}: logprobs, max nats"] = float(np.abs(found["logprobs"] - expected["logprobs"]).max())
        row[f"{dtype}: policy gradient"] = far(found["policy"], expected["policy"])
        if "critic" in expected:
            row[f"{dtype}: critic gradient"] = far(found["critic"], expected["critic"])
        if again:
            row[f"{dtype}: same bits twice"] = bool(np.array_equal(found["weights"], again[0]["weights"]))
    return row


def count_kernel(model: Path) -> Row:
    """How often packed attention reaches the kernel in two updates, with all weights and with adapters."""
    row: Row = {}
    for name, changes in (("all weights", {}), ("adapters", {"lora": {"rank": 8}})):
        with counted_kernel() as calls:
            learned(learner_on(default_device(), "bfloat16", {"model": {"packing": True, **changes}}, model))
        row[f"kernel calls, {name}"] = len(calls)
    return row


def compare_fit(model: Path) -> Row:
    """The losses of 30 steps of supervised learning."""
    params = load(SHIPPED).warm_start.model_copy(update={"steps": 30, "batch_size": 4})
    trajectories = [each for each, _ in episodes(load_policy(model, device=CPU).config.vocab_size)]
    lessons = Lessons.of(trajectories, [], 0.0)
    found = [np.array(fit(load_policy(model, device=each), lessons, params)) for each in (CPU, default_device())]
    offloaded = np.array(fit(load_policy(model), lessons, params, offload=True))
    return {"losses": far(found[1], found[0]), "offloaded": far(offloaded, found[0])}


def compare_checkpoint(changes: dict[str, Any], model: Path) -> Row:
    """Whether a learner goes on from a checkpoint of the device with the bits of the one that wrote it."""
    first, second = (learner_on(default_device(), "auto", changes, model) for _ in range(2))
    trajectories, credits_ = map(list, zip(*episodes(first.policy.config.vocab_size), strict=True))
    first.update(trajectories, credits_, 0)
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) / "checkpoint"
        checkpoint.save(folder, first, checkpoint.Progress(iterations=1, policy_version=1))
        checkpoint.load(folder, second)
    same = [bits(learner) for learner in (first, second)]
    for learner in (first, second):
        learner.update(trajectories, credits_, 1)
    after = [bits(learner) for learner in (first, second)]
    return {"same": same[0] == same[1], "same after an update": after[0] == after[1] != same[0]}


def bits(learner: Learner) -> list[bytes]:
    states = learner.policy_optimizer.state_dict()["state"]
    kept = [states[index][name] for index in sorted(states) for name in sorted(states[index])]
    return [each.detach().float().cpu().numpy().tobytes() for each in (*learner.policy.parameters(), *kept)]


def two_trainings(steps: int, iterations: int) -> Row:
    """The built-in model, warm-started and trained with the transformers engine by two processes of the same seed."""
    command = [sys.executable, "-m", "benchmarks.small_training", str(steps), str(iterations)]
    started = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    said = [each.communicate(timeout=240)[0] for each in started]
    if any(each.returncode for each in started):
        raise RuntimeError("a training failed; what it said stands above")
    first, second = (json.loads(each.splitlines()[-1]) for each in said)
    same = {f"same {name}": first[name] == second[name] for name in ("started", "policy")}
    return {**first, **same, "other returns": second["returns"]}


def compare_probe(changes: dict[str, Any], model: Path) -> Row:
    """Whether the measurement that opens a training leaves the bits as they were."""
    learner = learner_on(default_device(), "auto", changes, model)
    samples = [*map(list, zip(*episodes(learner.policy.config.vocab_size), strict=True))]
    learner.update(*samples, 0)
    before = bits(learner)
    peak = measure(learner, load(SHIPPED).env.model_copy(update={"max_tokens": 256}))
    same = bits(learner) == before
    learner.update(*samples, 1)
    return {"memory GiB": peak, "same": same}


def compare_sampler(trains: str) -> Row:
    """The canary of the transformers engine before and after an update."""
    work = Work(episodes=4, prompt=150, action=110)
    with tempfile.TemporaryDirectory() as folder:
        make_model(Path(folder), SHAPES["tiny"], work.tokens, device=CPU)
        found = Sampled("tiny", "transformers", trains, work, Path(folder)).reload()
    return {name: value for name, value in found.items() if "canary" in name}


def wrong(row: Row) -> bool:
    """Whether a part failed, is further from the CPU than rounding explains, lost bits, or never called the kernel."""
    far_off = [
        value > (1e-4 if name.startswith("float32") else 0.05)
        for name, value in row.items()
        if isinstance(value, float) and name not in ("seconds", "memory GiB")
    ]
    idle = any("calls" in name and value == 0 for name, value in row.items())
    return "left out" in row or any(far_off) or idle or not row.get("same", True)


def parts_of(model: Path, steps: int, iterations: int, runs: int = 2) -> dict[str, Callable[[], Row]]:
    named: dict[str, Callable[[], Row]] = {
        f"learner: {name}": partial(compare_learner, changes, model, runs) for name, changes in SETTINGS.items()
    }
    for window in (None, 20):
        for size in (64, 128):
            named[f"attention: window {window}, heads of {size}"] = partial(compare_attention, window, size)
    named["attention: calls"] = partial(count_kernel, model)
    named["supervised learning"] = partial(compare_fit, model)
    for name in ("critic", "adapters", "offloaded optimiser"):
        named[f"checkpoint: {name}"] = partial(compare_checkpoint, SETTINGS[name], model)
        named[f"probe: {name}"] = partial(compare_probe, SETTINGS[name], model)
    for trains in ("all weights", "adapters"):
        named[f"sampler: {trains}"] = partial(compare_sampler, trains)
    named["training"] = partial(two_trainings, steps, iterations)
    return named


def main() -> None:
    parser = argparse.ArgumentParser(description="Compares what a CUDA device learns with what a CPU learns.")
    parser.add_argument("--out", type=Path, default=Path(), help="the folder of cuda.json")
    parser.add_argument("--parts", nargs="+", default=[""], help="those whose names contain one of these")
    parser.add_argument("--steps", type=int, default=400, help="of the warm start that two processes train")
    parser.add_argument("--words", type=int, default=WORDS, help="of the model that is compared")
    parser.add_argument("--iterations", type=int, default=4)
    parser.add_argument("--runs", type=int, default=2, choices=(1, 2), help="of a learner; two are compared")
    given = parser.parse_args()
    logging.basicConfig(level=logging.INFO)
    accept_grouped_heads()
    (given.out / "cuda.json").unlink(missing_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        make_model(Path(folder), (*SHAPE, given.words), 512, device=CPU)
        parts = parts_of(Path(folder), given.steps, given.iterations, given.runs)
        chosen = {name: part for name, part in parts.items() if any(word in name for word in given.parts)}
        rows = tried(chosen, given.out / "cuda.json")
    print(show_rows(rows))
    if failed := [row["part"] for row in rows if row["part"] != "training" and wrong(row)]:
        raise SystemExit(f"unlike a CPU: {', '.join(failed)}")


if __name__ == "__main__":
    main()
