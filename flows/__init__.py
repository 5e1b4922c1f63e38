"""The stages of the pipeline and the pipeline itself.

Importing the package sets the environment that the libraries below read while they are imported, so that a stage is
the same process under `make`, `dvc repro`, a deployment and a test. A variable that is already set stays as it is.
"""

import os
import sys

CPUS = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1

ENVIRONMENT = {
    "DO_NOT_TRACK": "1",  # vLLM, Prefect and Hugging Face
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "DVC_NO_ANALYTICS": "1",
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",  # transformers draws one for every checkpoint it reads or writes
    "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
    "OMP_NUM_THREADS": str(CPUS),  # without it a vLLM engine cuts torch to one thread in this process
    "MALLOC_MMAP_MAX_": "0",  # the next two are for child processes; this one calls keep_freed_memory
    "MALLOC_TRIM_THRESHOLD_": str(16 * 2**30),
}

for name, value in ENVIRONMENT.items():
    os.environ.setdefault(name, value)
