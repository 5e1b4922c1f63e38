"""The GPUs that this process may use."""

from __future__ import annotations

import os

import torch


def visible_gpus() -> list[str]:
    """The names of the GPUs in CUDA_VISIBLE_DEVICES, or their numbers where it is not set."""
    named = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    found = torch.cuda.device_count()
    return named.split(",")[:found] if named else [str(index) for index in range(found)]
