"""What the doctor looks at of the machine that trains: its room, its ranks, its engine."""

from __future__ import annotations

import math
import os
import shutil
import sys
from pathlib import Path
from subprocess import TimeoutExpired
from tempfile import TemporaryDirectory, TemporaryFile

from agent_r1 import params
from agent_r1.files import load_pretrained
from agent_r1.params.places import RunId
from agent_r1.params.stages import EngineParams
from flows.operation.checks import FAILED, INSTALL, OK, Finding
from flows.operation.serving import ANSWER_S
from flows.processes import process_group

RESERVE_GIB = 1.0  # of disk: data, indexes, rows, MLflow and Prefect at the built-in scale
CHECKPOINTS = 3  # of a run at once, at most: the latest, the one that is being written, and a good one or DVC's copy
ENGINE_TIMEOUT_S = 150.0
TINY_TOKENS = 128


def room() -> Finding:
    """Compares free disk and free memory of the device that trains with what the runs of repro_runs take."""
    from transformers import AutoConfig

    from agent_r1.devices.gpus import default_device
    from agent_r1.learn import memory

    settings = params.load()
    made = settings.places.warm_start.is_dir()  # before that nothing is known of the model
    runs = [RunId(run) for run in settings.repro_runs]
    config, device = load_pretrained(AutoConfig, settings.places.warm_start) if made else None, default_device()
    demands = [memory.demand_of(config, settings, run, device) for run in runs] if config else []
    free = shutil.disk_usage(Path.cwd()).free / memory.GIB
    needs = [sum(memory.estimate(each).values()) for each in demands]
    checkpoints = [memory.checkpoint_gib(each) for each in demands]
    return compare_room(free, checkpoints, memory.available_gib(device), max(needs, default=0.0))


def compare_room(disk_gib: float, checkpoints_gib: list[float], free_gib: float, need_gib: float) -> Finding:
    """Compares the disk with all checkpoints, which stay in folders and DVC's cache, and memory with the largest run.

    Before the warm start, checkpoints and need are not known and empty or 0.
    """
    disk_need = RESERVE_GIB + (CHECKPOINTS - 1) * sum(checkpoints_gib) + max(checkpoints_gib, default=0.0)
    disk = f"disk: {disk_gib:.1f} GiB free, about {disk_need:.1f} needed"
    memory = f"memory: {free_gib:.1f} GiB free, about {need_gib:.1f} needed by the largest run"
    if disk_gib < disk_need:
        return Finding(FAILED, disk, "`dvc gc --workspace` drops what no version here names; or train fewer runs")
    if free_gib < need_gib:
        return Finding(FAILED, memory, "end what else runs here, or lower train.update.max_tokens_per_microbatch")
    return Finding(OK, f"{disk}; {memory}")


def ranks() -> Finding:
    """Compares the ranks of params.yaml with what this machine has, and with what a launcher gave this process."""
    from agent_r1.devices.group import require_meeting_place
    from flows.ranks import given_place, require_devices

    learner = params.load().learner
    if place := given_place(learner):
        require_meeting_place(place)
        return Finding(OK, f"this is rank {place.rank} of {place.size}, which meet at {place.address}:{place.port}")
    return Finding(OK, f"learner.processes is {learner.processes}, and there are {require_devices(learner)} here")


def engine() -> Finding:
    """Has the engine of params.yaml sample one action of a tiny model; of servers, asks whether they answer.

    A process with a time limit does it: vLLM can hang, or end without a word.
    """
    settings = params.load().engine
    if settings.kind == "server":  # it holds what a training has given it, so it gets no tiny model
        from agent_r1.rollout.server_engine import connect
        from agent_r1.rollout.vllm_engine import SERVER_KEY

        for url in settings.server.urls:
            try:
                connect(url, ANSWER_S).require_health()
            except (OSError, ValueError) as fault:
                remedy = f"start it: agent-r1 serve_engine MODEL --port PORT; 401: its key is {SERVER_KEY}"
                return Finding(FAILED, f"the engine server {url} does not answer: {fault}", remedy)
        return Finding(OK, f"{len(settings.server.urls)} servers answer")
    command = [sys.executable, "-m", "flows", "doctor", "--engine"]
    with TemporaryFile("w+") as log, process_group(command, os.environ, output=log) as process:
        try:
            code = process.wait(ENGINE_TIMEOUT_S)
            wrong = f"its process ended with {code}"
        except TimeoutExpired:
            code, wrong = 1, f"no answer within {ENGINE_TIMEOUT_S:.0f} s"
        log.seek(0)
        said = log.read().strip().splitlines()
    if code:
        remedy = f"{INSTALL}; `engine.kind: transformers` does without vLLM; `{' '.join(command[1:])}` shows all"
        return Finding(FAILED, f"{settings.kind}: {wrong}: {said[-1] if said else 'no word'}", remedy)
    return Finding(OK, f"{settings.kind} loaded a tiny model and sampled from it")


def try_engine(settings: EngineParams) -> None:
    """Samples an action of a model with random weights, small enough for any machine."""
    from agent_r1.learn.builtin import new_model, train_tokenizer
    from agent_r1.rollout.engines import open_engine
    from agent_r1.rollout.sampling import Actor, EngineError, Request

    tokenizer = train_tokenizer(["Who is the mayor of the city where Nils Lowe was born?"], vocab_size=512)
    end_id, length = int(tokenizer.eos_token_id), TINY_TOKENS
    with TemporaryDirectory() as folder:
        new_model(tokenizer, hidden_size=64, layers=2, heads=2, max_tokens=length, seed=0).save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        actor = Actor(model=folder, end_id=end_id, max_tokens=length, temperature=1.0, dtype="auto")
        with open_engine(settings, actor) as tiny:
            context = tokenizer.encode("Who is the mayor?")
            [action] = tiny.sample([Request(episode=0, step=0, context=context, seed=0, max_tokens=8)])
    if not all(map(math.isfinite, action.logprobs)):
        raise EngineError(f"logprobs that are no numbers: {action.logprobs.tolist()}")
