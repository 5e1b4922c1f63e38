"""What MLflow runs to load a registered version: its artifacts hold a copy of this file."""

from mlflow.models import set_model

from agent_r1.tracking.answering import Answering
from flows.operation.answering import opened

set_model(Answering(opened))
