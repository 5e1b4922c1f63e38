"""MLflow, and nothing else of the project knows it.

Without `MLFLOW_TRACKING_URI` everything goes into one SQLite file and one artifact folder under `<root>/.tracking`;
`mlflow ui --backend-store-uri sqlite:///<root>/.tracking/mlflow.db` shows them. The root is `$DVC_ROOT`, or else the
nearest folder from the current one upwards that holds params.yaml.
"""

from agent_r1.tracking.runs import (
    Run,
    overrides,
    prepared,
    provenance,
    resume,
    run_of,
    run_params,
    start,
    untrained_params,
)
from agent_r1.tracking.traces import log_traces

__all__ = [
    "Run",
    "log_traces",
    "overrides",
    "prepared",
    "provenance",
    "resume",
    "run_of",
    "run_params",
    "start",
    "untrained_params",
]
