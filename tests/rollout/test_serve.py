"""The command line that becomes vLLM's server; that it starts is what the engines' tests show."""

from __future__ import annotations

from pathlib import Path

import pytest

from agent_r1.params import Params, load
from agent_r1.rollout.serve import command, environment


@pytest.fixture(scope="module")
def settings() -> Params:
    return load(Path(__file__).parents[2] / "params.yaml")


def options(line: list[str]) -> dict[str, str]:
    """What follows each option; "" where another one does."""
    pairs = zip(line, [*line[1:], "--"], strict=True)
    return {name: "" if value.startswith("--") else value for name, value in pairs if name.startswith("--")}


def test_a_cpu_server_has_the_options_of_the_engine(settings: Params) -> None:
    found = options(command("model", settings, cuda=False))
    expected = {
        "--model": "model",
        "--tokens-only": "",
        "--max-model-len": "512",
        "--max-num-seqs": "256",
        "--dtype": "float32",
        "--kv-cache-memory-bytes": str(2**29),
        "--enforce-eager": "",
        "--no-enable-chunked-prefill": "",
        "--no-async-scheduling": "",
        "--generation-config": "vllm",
        "--worker-extension-cls": "agent_r1.rollout.worker.WorkerExtension",
    }
    assert expected.items() <= found.items()
    assert "--gpu-memory-utilization" not in found


def test_a_gpu_server_has_a_share_of_the_memory(settings: Params) -> None:
    found = options(command("model", settings, cuda=True))
    assert {"--dtype": "bfloat16", "--gpu-memory-utilization": "0.4"}.items() <= found.items()
    assert not found.keys() & {"--kv-cache-memory-bytes", "--enforce-eager"}


def test_the_environment_opens_the_endpoints_for_weights(settings: Params) -> None:
    opened = {"VLLM_SERVER_DEV_MODE": "1", "VLLM_NO_USAGE_STATS": "1"}
    assert environment(settings, cuda=True) == opened
    assert environment(settings, cuda=False) == {**opened, "OMP_NUM_THREADS": "1", "TORCHDYNAMO_DISABLE": "1"}
