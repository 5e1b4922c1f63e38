"""The GPUs that this process may use, if there are any."""

from __future__ import annotations

import os

import torch


def visible_gpus() -> list[str]:
    """What CUDA_VISIBLE_DEVICES calls each of them; their numbers where it is not set."""
    named = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    found = torch.cuda.device_count()
    return named.split(",")[:found] if named else [str(index) for index in range(found)]


def default_device() -> torch.device:
    """The accelerator where there is one, else the CPU."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")
