"""How a stock server of vLLM takes new weights, by each way there is: `python -m benchmarks.ways [--ways WAY ...]`.

`file` has the server load a folder, as trainings do, on a CPU too. `ipc` shares the memory of one GPU with the server,
and `nccl` sends to a second GPU, by vLLM's own transfer. Random weights change before every transfer, and sums prove
afterwards that the server computes with the new ones. Times are medians. A way that fails says why, and the next one
is tried. The server unpickles what `ipc` sends, so it listens on loopback, and ends with this process.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from urllib.request import urlopen

import torch

from agent_r1.learn.adapter import trained_state
from agent_r1.learn.learner import Learner
from agent_r1.params.stages import ServerParams
from agent_r1.rollout.engine_wire import EXTENSION
from agent_r1.rollout.server_engine import StockServer
from agent_r1.training.watch import prove_held
from benchmarks.kit import Row, show_rows, tried
from benchmarks.restarts import free_port
from benchmarks.synthetic import make_model, shipped_with
from benchmarks.transfers import SIZES

WAYS = ("file", "ipc", "nccl")
TIMES, TOKENS, PATIENCE_S = 5, 256, 600.0
OPTIONS = (
    "-m vllm.entrypoints.openai.api_server --tokens-only --host 127.0.0.1 --generation-config vllm --enforce-eager "
    f"--max-model-len {TOKENS} --kv-cache-memory-bytes 268435456 --worker-extension-cls {EXTENSION}"
).split()
Send = Callable[[int], None]  # hands over the weights, as a version


@contextmanager
def served(model: Path, way: str) -> Iterator[str]:
    """The address of a server that takes weights in a way, on the GPU that the way is for."""
    port = free_port()
    own = {"VLLM_SERVER_DEV_MODE": "1", "VLLM_NO_USAGE_STATS": "1", "VLLM_ALLOW_INSECURE_SERIALIZATION": "1"}
    command = [sys.executable, *OPTIONS, "--model", str(model), "--port", str(port)]
    if way != "file":
        command += ["--weight-transfer-config", json.dumps({"backend": way})]
    if way == "nccl":
        own["CUDA_VISIBLE_DEVICES"] = "1"
    log = model.with_name(f"{way}.log")
    with log.open("wb") as output:
        process = subprocess.Popen(command, env=os.environ | own, stdout=output, stderr=subprocess.STDOUT)
    try:
        ends = time.monotonic() + PATIENCE_S
        while not _answers(f"http://127.0.0.1:{port}/health"):
            if process.poll() is not None or time.monotonic() > ends:
                raise OSError(f"the server did not come up: {log.read_text()[-500:]}")
            time.sleep(1.0)
        yield f"http://127.0.0.1:{port}"
    finally:
        process.terminate()
        process.wait()


def _answers(address: str) -> bool:
    try:
        with urlopen(address, timeout=5):
            return True
    except OSError:
        return False


def by_file(server: StockServer, learner: Learner, scratch: Path) -> Send:
    def send(version: int) -> None:
        folder = scratch / str(version)
        learner.save_policy(folder, halved=server.model.dtype == "bfloat16")
        asyncio.run(server.load_weights(str(folder), str(version)))

    return send


def by_vllm(address: str, learner: Learner, way: str) -> Send:
    """vLLM's own transfer, which gathers what ranks hold in parts."""
    from vllm.distributed.weight_transfer.base import ModuleSource, TrainerInitInfo
    from vllm.distributed.weight_transfer.clients import HTTPVLLMWeightSyncClient
    from vllm.distributed.weight_transfer.ipc_engine import IPCTrainerInitInfo, IPCTrainerWeightTransferEngine
    from vllm.distributed.weight_transfer.nccl_engine import NCCLTrainerInitInfo, NCCLTrainerWeightTransferEngine

    client, source = HTTPVLLMWeightSyncClient(address), ModuleSource(learner.policy)
    about: TrainerInitInfo
    if way == "ipc":
        about = IPCTrainerInitInfo(rank=0)
        engine = IPCTrainerWeightTransferEngine.trainer_init(about, client=client, source=source)
    else:
        about = NCCLTrainerInitInfo("127.0.0.1", free_port(), 2, rank=0)
        engine = NCCLTrainerWeightTransferEngine.trainer_init(about, client=client, source=source)
    return lambda _: engine.send_weights()


def measure(way: str, shape: str) -> Row:
    """The seconds of a transfer and of its proof."""
    settings = shipped_with({"model": {"lora": {"rank": 0}}})
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder) / "model"
        make_model(model, (*SIZES[shape], 0), TOKENS)
        learner = Learner(model, settings.train.update, settings.model, with_critic=False, seed=0)
        with served(model, way) as address:
            server = StockServer(address, ServerParams(urls=[address], concurrency=1, timeout_s=PATIENCE_S, retries=0))
            asyncio.run(server.describe())
            send = by_file(server, learner, Path(folder)) if way == "file" else by_vllm(address, learner, way)
            seconds = [_transfer(server, learner, send, version) for version in range(1, TIMES + 1)]
    sent_s, proved_s = map(statistics.median, zip(*seconds, strict=True))
    return {"way": way, "parameters": shape, "sent_s": sent_s, "proved_s": proved_s}


def _transfer(server: StockServer, learner: Learner, send: Send, version: int) -> tuple[float, float]:
    """The seconds of one transfer of changed weights, and of its proof."""
    for weight in trained_state(learner.policy).values():
        weight += weight.abs().mean().clamp(min=1e-3) / 100 * torch.randn_like(weight)
    learner.policy_version = version
    began = time.perf_counter()
    send(version)
    sent = time.perf_counter()
    held = asyncio.run(server.held())
    if unproved := prove_held(held, learner.weight_sums(held.dtype)):
        raise ValueError(f"nothing proves {', '.join(sorted(unproved))}")
    return sent - began, time.perf_counter() - sent


def main() -> None:
    parser = argparse.ArgumentParser(description="Measures the ways in which a stock server takes new weights.")
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=[*WAYS])
    parser.add_argument("--shapes", nargs="+", choices=SIZES, default=["tiny", "200M"])
    parser.add_argument("--out", type=Path, default=Path(), help="the folder of ways.json")
    choice = parser.parse_args()
    parts = {f"{way} {shape}": partial(measure, way, shape) for way in choice.ways for shape in choice.shapes}
    print(show_rows(tried(parts, choice.out / "ways.json")))


if __name__ == "__main__":
    main()
