"""A small training of the built-in model without tracking: `python -m benchmarks.small_training STEPS ITERATIONS`.

On the accelerator where there is one, with the transformers engine, in a temporary folder. A third argument changes
parameters, in JSON. The last line that it prints says in JSON what came of it.
"""

from __future__ import annotations

import json
import logging
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from agent_r1.data.prepare import PASSAGES, QUESTIONS, prepare
from agent_r1.envs.shared import Shared
from agent_r1.files import model_hash
from agent_r1.identity import Identity
from agent_r1.learn.adapter import save_merged
from agent_r1.params.sections import override
from agent_r1.records import Passage, Question
from agent_r1.search.index import build, open_index
from agent_r1.tables import read_rows
from agent_r1.teaching.warm_start import train_on_demonstrations
from agent_r1.training.folder import RunFolder
from agent_r1.training.loop import Training, iterate
from benchmarks.synthetic import NO_WARMUP, shipped_with

ATLAS = {"train_questions": 1200, "dev_questions": 20, "test_questions": 20}


def train(steps: int, iterations: int, folder: Path, more: dict[str, Any]) -> dict[str, Any]:
    """Data, index, warm start of so many steps, iterations; seconds, returns, canary gaps and the policy's hash."""
    changes = {
        "prepare": {"atlas": ATLAS},
        "warm_start": {"steps": steps, "demonstrations": 1200, "naive_rag_demonstrations": 120},
        "engine": {"kind": "transformers", "transformers": {"batch_size": 256}},
        "train": {"iterations": iterations, "update": {"critic": {"warmup": NO_WARMUP}}},
    }
    settings = shipped_with(override(changes, more))
    prepare(settings.prepare, folder)
    build(settings.search, folder / PASSAGES, folder / "index")
    questions, passages = read_rows(folder / QUESTIONS, Question), read_rows(folder / PASSAGES, Passage)
    index, model = open_index(settings.search, folder / PASSAGES, folder / "index"), folder / "warm_start"
    began = time.perf_counter()
    policy, tokenizer = train_on_demonstrations(
        settings, [each for each in questions if each.split == "train"], passages, index
    )
    save_merged(policy, model)
    tokenizer.save_pretrained(model)
    taught = time.perf_counter()
    run = RunFolder(folder / "run", Identity.of(settings, settings.train), settings.train)
    with (
        run.opened(folder / "aside") as opened,
        Shared(settings.env, index) as shared,
        Training(settings, questions=questions, shared=shared, model=model, folder=opened) as training,
    ):
        iterate(training)
        history = opened.history()
    return {
        "warm start s": taught - began,
        "iterations s": time.perf_counter() - taught,
        "returns": [each["reward/total"] for each in history],
        "canary": [each["rollout/canary_gap"] for each in history],
        "seconds": {name: sum(each[name] for each in history) for name in history[0] if name.startswith("time/")},
        "started": model_hash(str(model)),
        "policy": model_hash(str(folder / "run" / "checkpoint" / "policy")),
    }


def main() -> None:
    logging.basicConfig(level=logging.INFO, stream=sys.stderr)
    with tempfile.TemporaryDirectory() as folder:
        steps, iterations, *more = map(json.loads, sys.argv[1:])
        print(json.dumps(train(steps, iterations, Path(folder), *(more or [{}]))))


if __name__ == "__main__":
    main()
