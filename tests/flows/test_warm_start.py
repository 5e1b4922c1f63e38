"""The warm start of a model from elsewhere: passed through as it is stored, refused where it cannot fit."""

import json
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from agent_r1.devices.meeting import MEETING
from agent_r1.devices.sharing import Ranks
from agent_r1.files import model_hash
from agent_r1.learn import memory
from agent_r1.learn.model import load_tokenizer
from agent_r1.records import Question
from agent_r1.tables import read_rows, write_rows
from agent_r1.teaching.supervised import Unfinished
from flows.commands.execute import index, prepare
from flows.warm_start import warm_start
from tests.fixtures import PARAMS, PLACES, Inside, WriteParams

TIMEOUT_S = 300.0


@pytest.fixture
def stored(tmp_path: Path, tiny_model: Path) -> Path:
    folder = tmp_path / "stored"
    AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.bfloat16).save_pretrained(folder)
    load_tokenizer(tiny_model).save_pretrained(folder)
    return folder


def test_model_passes_as_it_is_stored(stored: Path, tmp_path: Path, inside: Inside, write_params: WriteParams) -> None:
    write_params(tmp_path, {"model": {"path": str(stored)}})
    with inside(tmp_path):
        warm_start()
    before, after = (load_file(folder / "model.safetensors") for folder in (stored, tmp_path / PLACES.warm_start))
    assert before.keys() == after.keys()
    assert all(torch.equal(weight, after[name]) for name, weight in before.items())
    assert {weight.dtype for weight in after.values()} == {torch.bfloat16}
    assert load_tokenizer(tmp_path / PLACES.warm_start).get_vocab() == load_tokenizer(stored).get_vocab()
    flipped = tmp_path / PLACES.warm_start / "model.safetensors"
    flipped.write_bytes(flipped.read_bytes()[:-1] + b"\x01")
    with pytest.raises(ValueError, match=r"warm_start/model.safetensors is missing or not as it was written"):
        model_hash(str(tmp_path / PLACES.warm_start))


@pytest.mark.parametrize("rank", [0, 4])
def test_fine_tuning_trains_the_weights_that_training_does(
    rank: int, stored: Path, tmp_path: Path, inside: Inside, write_params: WriteParams
) -> None:
    """All weights, kept in float32; with adapters the linear layers alone, merged into the weights as they came."""
    model = {"path": str(stored), "lora": {"rank": rank}, "dtype": "bfloat16", "gradient_checkpointing": True}
    write_params(tmp_path, {"model": model, "warm_start": {"fine_tune": True, "steps": 2}})
    with inside(tmp_path):
        prepare()
        index()
        warm_start()
    before, after = (load_file(folder / "model.safetensors") for folder in (stored, tmp_path / PLACES.warm_start))
    assert before.keys() == after.keys()
    changed = {name for name, weight in before.items() if not torch.equal(weight.float(), after[name].float())}
    linear = {name for name in before if name.endswith("_proj.weight")}
    assert changed == (linear if rank else set(before))
    assert {weight.dtype for weight in after.values()} == {torch.bfloat16 if rank else torch.float32}


@contextmanager
def leading(folder: Path, processes: int, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Makes this process the first of two ranks, as torchrun does, and starts the other."""
    if processes == 1:
        yield
        return
    place = {"WORLD_SIZE": "2", MEETING: str(folder / "ranks")}
    for name, value in {**place, "RANK": "0", "LOCAL_RANK": "0"}.items():
        monkeypatch.setenv(name, value)
    command = [sys.executable, "-m", "flows", "warm_start"]
    second = {**os.environ, "PYTHONPATH": str(PARAMS.parent), "RANK": "1", "LOCAL_RANK": "1"}
    follower = subprocess.Popen(command, cwd=folder, env=second)
    try:
        yield
        assert follower.wait(TIMEOUT_S) == 0
    finally:
        follower.kill()
        follower.wait()


def test_two_ranks_train_to_the_weights_of_one(
    tmp_path: Path, small_project: Path, inside: Inside, write_params: WriteParams, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The built-in model from scratch, which the leader alone has at first.

    It is killed after the third of four steps, and one process goes on with what both wrote of the second.
    """
    keep = Unfinished.keep
    kept = list[int]()

    def keep_and_die(self: Unfinished, model: Any, optimizer: Any, steps: int, ranks: Ranks) -> None:
        keep(self, model, optimizer, steps, ranks)
        kept.append(steps)
        if ranks.size == 2 and steps == 3:
            raise KeyboardInterrupt

    def trained(name: str, processes: int) -> dict[str, torch.Tensor]:
        folder = tmp_path / name
        start = {"steps": 4, "learning_rate": 1e-4, "checkpoint_every": 2}
        shutil.copytree(small_project / PLACES.data, folder / PLACES.data, dirs_exist_ok=True)
        write_params(folder, {"warm_start": start, "learner": {"processes": processes}})
        with inside(folder), leading(folder, processes, monkeypatch):
            warm_start()
        assert not (folder / PLACES.unfinished_warm_start).exists()
        return load_file(folder / PLACES.warm_start / "model.safetensors")

    monkeypatch.setattr(Unfinished, "keep", keep_and_die)
    one = trained("one", 1)
    with pytest.raises(KeyboardInterrupt):
        trained("two", 2)
    for thread in threading.enumerate():  # it misses the other rank
        if thread.name == "alive":
            thread.join()
    dist.destroy_process_group()  # which the end of a process does too
    two = trained("two", 1)
    assert kept == [1, 2, 3, 4, 1, 2, 3, 3, 4]
    assert one.keys() == two.keys()
    assert max((one[name] - two[name]).abs().max().item() for name in one) < 2e-5  # after steps of 1e-4


@pytest.mark.parametrize("built_in", [True, False])
def test_warm_start_learns_from_conversations_alone(
    built_in: bool, stored: Path, tmp_path: Path, inside: Inside, write_params: WriteParams
) -> None:
    """The built-in tokenizer has the words of a question that stands nowhere else."""
    said = [("user", "Zanzibarazan " * 20), ("assistant", "<answer> Zanzibarazan </answer>")]
    row = {"messages": [{"role": role, "content": content} for role, content in said]}
    (tmp_path / "teacher.jsonl").write_text(f"{json.dumps(row)}\n" * 3)
    start = {"demonstrations": 0, "naive_rag_demonstrations": 0, "conversations": "teacher.jsonl", "steps": 2}
    model = {} if built_in else {"path": str(stored)}
    write_params(tmp_path, {"model": model, "warm_start": start | {"fine_tune": not built_in}})
    with inside(tmp_path):
        prepare()
        index()
        warm_start()
    words = len(load_tokenizer(tmp_path / PLACES.warm_start).encode(" Zanzibarazan"))
    assert words == 1 if built_in else words > 1


@pytest.mark.parametrize("fine_tune", [False, True])
def test_model_that_cannot_fit_is_refused_before_loading(
    fine_tune: bool,
    stored: Path,
    tmp_path: Path,
    inside: Inside,
    write_params: WriteParams,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Only its configuration is there. Fine-tuning so much at once needs more than the runs do."""
    (stored / "model.safetensors").unlink()
    start = {"fine_tune": fine_tune, "max_tokens_per_microbatch": 2**21}
    write_params(tmp_path, {"model": {"path": str(stored)}, "warm_start": start})
    monkeypatch.setattr(memory, "available_gib", lambda device: 20.0 if fine_tune else 0.5)
    with inside(tmp_path), pytest.raises(ValueError, match=r"needs about .* GiB and the device has (0\.5|20\.0):"):
        warm_start()
    assert not (tmp_path / PLACES.warm_start).exists()


def test_demonstrated_question_without_room_is_left_out_or_refused_before_the_model_is_loaded(
    stored: Path, tmp_path: Path, inside: Inside, write_params: WriteParams, caplog: pytest.LogCaptureFixture
) -> None:
    model, weights = {"path": str(stored)}, stored / "model.safetensors"
    start = {"fine_tune": True, "steps": 1, "demonstrations": 8, "naive_rag_demonstrations": 2}
    write_params(tmp_path, {"model": model, "warm_start": start, "env": {"max_tokens": 500}})
    with inside(tmp_path):
        prepare()
        index()
        rows = read_rows(PLACES.questions, Question)
        long = next(row for row in rows if row.split == "train")
        grown = [replace(row, text=f"{row.text} " * 20) if row == long else row for row in rows]
        write_rows(PLACES.questions, grown, Question)
        weights.rename(stored / "elsewhere")
        with pytest.raises(
            ValueError, match=rf"1 of 8 demonstrated questions .* '{long.question_id}'; .*too_long_share 0\.01, up"
        ):
            warm_start()
        (stored / "elsewhere").rename(weights)
        write_params(tmp_path, {"model": model, "warm_start": start, "env": {"max_tokens": 500, "too_long_share": 0.5}})
        warm_start()
    assert (tmp_path / PLACES.warm_start).is_dir()
    for counted in ("1 of 8 demonstrated questions", "1 of 2 questions demonstrated from passages"):
        assert f"{counted} leave no room for an action in env.max_tokens 500" in caplog.text
    assert "2 of 10 demonstrations do not fit in env.max_tokens, and are left out" in caplog.text
