"""The GPUs that this process may use."""

from __future__ import annotations

import ctypes
import os

import torch


def visible_gpus() -> list[str]:
    """The names of the GPUs in CUDA_VISIBLE_DEVICES, or their numbers where it is not set.

    Asks the driver, so that the variable can still be narrowed: CUDA reads it once. Raises ValueError if the driver is
    older than the CUDA that torch was built for, with which nothing would run on its GPUs.
    """
    variable = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    count = torch.cuda.device_count()
    if count:
        require_driver(count, driver_cuda())
    return variable.split(",")[:count] if variable else [str(index) for index in range(count)]


def driver_cuda() -> tuple[int, int]:
    """The newest CUDA that the driver runs, as (major, minor); (0, 0) if it brings none, as in some containers."""
    version = ctypes.c_int()
    try:
        ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(version))
    except OSError:
        return 0, 0
    return version.value // 1000, version.value % 1000 // 10


def require_driver(count: int, cuda: tuple[int, int]) -> None:
    """Raises ValueError if so many GPUs cannot run torch, whose CUDA asks for a driver of its major version."""
    built = torch.version.cuda
    if built is None or cuda >= (int(built.split(".")[0]), 0):  # None: torch is built for GPUs of another kind
        return
    has = f"runs CUDA {cuda[0]}.{cuda[1]} at most" if any(cuda) else "has no libcuda.so.1 in this place"
    raise ValueError(
        f"the NVIDIA driver counts {count} GPUs, and {has}, while torch {torch.__version__} is built for CUDA {built}; "
        "update the driver (CUDA 13 needs 580 or newer; a container needs NVIDIA_DRIVER_CAPABILITIES=compute,utility), "
        "or set CUDA_VISIBLE_DEVICES=-1 to use the CPU"
    )
