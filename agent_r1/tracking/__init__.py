"""MLflow, and nothing else of the project knows it.

Without `MLFLOW_TRACKING_URI` everything goes into one SQLite file and one artifact folder under `<root>/.tracking`;
`mlflow ui --backend-store-uri sqlite:///<root>/.tracking/mlflow.db` shows them. The root is `$DVC_ROOT`, or else the
nearest folder from the current one upwards that holds params.yaml.
"""

from agent_r1.tracking.runs import Run, baseline_params, model_params, provenance, resume, run_params, start
from agent_r1.tracking.traces import log_traces

__all__ = ["Run", "baseline_params", "log_traces", "model_params", "provenance", "resume", "run_params", "start"]
