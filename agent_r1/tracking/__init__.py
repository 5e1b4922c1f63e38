"""MLflow, which no other room knows.

Without `MLFLOW_TRACKING_URI` everything goes into one SQLite file and one artifact folder under `<root>/.tracking`;
`mlflow ui --backend-store-uri sqlite:///<root>/.tracking/mlflow.db` shows them. The root is `$DVC_ROOT`, or else the
nearest folder from the current one upwards that holds params.yaml.
"""

from agent_r1.tracking.genai import keep_prompt as keep_prompt
from agent_r1.tracking.genai import keep_questions as keep_questions
from agent_r1.tracking.runs import Run as Run
from agent_r1.tracking.runs import overrides as overrides
from agent_r1.tracking.runs import prepared as prepared
from agent_r1.tracking.runs import provenance as provenance
from agent_r1.tracking.runs import resume as resume
from agent_r1.tracking.runs import run_of as run_of
from agent_r1.tracking.runs import run_params as run_params
from agent_r1.tracking.runs import start as start
from agent_r1.tracking.runs import start_training as start_training
from agent_r1.tracking.runs import untrained_params as untrained_params
from agent_r1.tracking.traces import Rewarded as Rewarded
from agent_r1.tracking.traces import log_traces as log_traces
