"""What the project wrote and a disk changed: tables and checkpoints come back as they were, or are refused."""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path
from random import Random
from typing import Any, cast

import numpy as np
import torch
from safetensors.torch import load_file, save_file

from agent_r1.devices.sharing import load_tensors, save_tensors
from agent_r1.files import sha256
from agent_r1.learn import checkpoint
from agent_r1.learn.checkpoint import Progress
from agent_r1.learn.learner import Learner
from agent_r1.records import (
    Call,
    CallStatus,
    Credit,
    Outcome,
    Passage,
    Prediction,
    Proof,
    Question,
    Step,
    StopReason,
    Trajectory,
)
from agent_r1.tables import read_rows, write_rows
from benchmarks.hostile.kind import Kind, require
from benchmarks.hostile.mutations import as_bytes, as_json, damaged, flipped, mutated, odd_value

_TOKENS = 40


class Tables(Kind):
    """Files of every record with bits flipped, or cut, or overwritten."""

    name, tried = "stored tables", 3000

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self._rows = _records()
        for kind, rows in self._rows.items():
            write_rows(folder / kind.__name__, rows, kind)
        self._content = {kind: (folder / kind.__name__).read_bytes() for kind in self._rows}

    def make(self, rng: Random) -> tuple[type, Path]:
        kind = rng.choice([*self._rows, Trajectory, Trajectory])
        content = self._content[kind]
        file = self.folder / "changed.parquet"
        file.write_bytes(flipped(content, rng) if rng.random() < 0.8 else damaged(content, rng))
        return kind, file

    def judge(self, made: tuple[type, Path]) -> None:
        kind, file = made
        found = read_rows(file, kind)
        require(_same(found, self._rows[kind]), f"a changed file of {kind.__name__} was read as other values")

    def names(self, made: tuple[type, Path]) -> tuple[str, ...]:
        return (str(made[1]),)


class Weights:
    """Stands for a learner: some weights, and a state."""

    def __init__(self) -> None:
        self.weights, self.state = torch.arange(64.0), {"steps": torch.tensor(3), "moments": torch.ones(64)}

    def save_policy(self, folder: Path, *, halved: bool = False) -> None:
        folder.mkdir(parents=True)
        save_file({"weights": self.weights}, folder / "model.safetensors")
        (folder / "config.json").write_text(json.dumps({"model_type": "qwen2", "vocab_size": 512}))

    def save_state(self, folder: Path) -> dict[str, str]:
        return save_tensors(folder, self.state)

    def restore(self, policy: Path, state: Path) -> None:
        self.weights = load_file(policy / "model.safetensors")["weights"]
        self.state = {name: torch.zeros_like(tensor) for name, tensor in self.state.items()}
        load_tensors(state, self.state)
        self.config = (policy / "config.json").read_text()


class Checkpoints(Kind):
    """Checkpoints with a file that was changed or has gone, and records of how far one is, whose hash is right."""

    name, tried = "checkpoints", 1200

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self._progress = Progress(iterations=7, policy_version=5, code=[(0, "abc")])
        self._honest = folder / "honest"
        checkpoint.save(self._honest, cast(Learner, Weights()), self._progress)

    def make(self, rng: Random) -> Path:
        folder = self.folder / "changed"
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(self._honest, folder)
        file = rng.choice(sorted(path for path in folder.rglob("*") if path.is_file()))
        if rng.random() < 0.3:  # somebody else's
            record = json.loads((folder / checkpoint.PROGRESS).read_text())
            changed = odd_value(rng) if rng.random() < 0.1 else mutated(record, rng, 2)
            (folder / checkpoint.PROGRESS).write_bytes(as_bytes(as_json(changed, rng), rng))
            (folder / checkpoint.SUMS).write_text(f"{sha256(folder / checkpoint.PROGRESS)}  {checkpoint.PROGRESS}\n")
            shutil.rmtree(folder / checkpoint.POLICY)
        elif rng.random() < 0.1:
            file.unlink()
        else:
            file.write_bytes(damaged(file.read_bytes(), rng))
        return folder

    def judge(self, made: Path) -> None:
        if not (made / checkpoint.POLICY).exists():
            found = checkpoint.peek(made)
            whole = found is None or {type(found.iterations), type(found.policy_version)} == {int}
            require(whole, f"no progress that a checkpoint has: {found}")
            return
        learner, honest = Weights(), Weights()
        found = checkpoint.load(made, cast(Learner, learner))
        same = torch.equal(learner.weights, honest.weights) and _same(learner.state, honest.state)
        require(
            same and found == self._progress and "512" in learner.config, "a changed checkpoint was read as another"
        )

    def names(self, made: Path) -> tuple[str, ...]:
        return (str(made),)


def _same(found: Any, expected: Any) -> bool:
    """Whether two values are the same bit for bit."""
    if isinstance(expected, torch.Tensor):
        return torch.equal(found, expected)
    if isinstance(expected, np.ndarray):
        return bool(found.dtype == expected.dtype and found.tobytes() == expected.tobytes())
    if isinstance(expected, list):
        return len(found) == len(expected) and all(map(_same, found, expected))
    if isinstance(expected, dict):
        return found.keys() == expected.keys() and all(_same(found[key], expected[key]) for key in expected)
    if dataclasses.is_dataclass(expected):
        return all(
            _same(getattr(found, field.name), getattr(expected, field.name)) for field in dataclasses.fields(expected)
        )
    return bool(found == expected)


def _records() -> dict[type, list[Any]]:
    """Three honest rows of every record."""
    numbers = np.random.default_rng(0)

    def floats() -> Any:
        return numbers.normal(size=_TOKENS).astype(np.float32)

    def mask() -> Any:
        return numbers.random(_TOKENS) < 0.5

    step = Step(
        action_start=10,
        action_stop=20,
        stop_reason=StopReason.END,
        calls=[Call(tool="search", arguments='{"query": "Kiss"}', status=CallStatus.OK, latency_s=0.25)],
        rewards={"think": 1.0, "progress": 1.0},
    )
    return {
        Question: [
            Question(
                question_id=f"q{n}", dataset="own", split="test", text="Who?", answers=["Mara"], gold_titles=["Kiss"],
                strata={"hops": "1", "kind": "x"},
            )
            for n in range(3)
        ],
        Passage: [Passage(passage_id=f"p{n}", title=f"Kiss {n}", text="A film by Mara.") for n in range(3)],
        Trajectory: [
            Trajectory(
                trajectory_id=f"0/q{n}/0", question_id=f"q{n}", group=n, sample=0, seed=2**62 + n, policy_version=1,
                iteration=0,
                token_ids=numbers.integers(0, 512, _TOKENS).astype(np.int32),
                source=numbers.integers(0, 4, _TOKENS).astype(np.uint8),
                logprobs=floats(), context_starts=[0, 30], steps=[step], outcome=Outcome.ANSWERED, answer="Mara",
            )
            for n in range(3)
        ],
        Credit: [
            Credit(
                trajectory_id=f"0/q{n}/0", return_=1.5, advantages=floats(), values=floats(), value_targets=floats(),
                reference_logprobs=floats(), loss_mask=mask(), critic_mask=mask(), kept=True,
            )
            for n in range(3)
        ],
        Proof: [Proof(trajectory_id=f"0/q{n}/0", learner_logprobs=floats()) for n in range(3)],
        Prediction: [
            Prediction(
                run="ppo", seed=n, policy_version=7, question_id=f"q{n}", answer="Mara", success=1.0,
                steps=2,
                facts={"em": 1.0, "f1": 1.0}, tool_calls=1, tokens_read=200, tokens_sampled=40,
            )
            for n in range(3)
        ],
    }  # fmt: skip
