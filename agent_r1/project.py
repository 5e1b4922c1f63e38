"""Where the project is, and where its stages meet: the folders of the artifacts, relative to its root."""

from __future__ import annotations

from pathlib import Path

PREPARED = Path("data/prepared")
QUESTIONS = PREPARED / "questions.parquet"
PASSAGES = PREPARED / "passages.parquet"
INDEX = Path("data/index")
WARM_START = Path("outputs/warm_start")
MODELS = Path("models")
EVALUATIONS = Path("outputs/evaluations")


def train_dir(run: str, seed: int | None = None, sweep: str | None = None) -> Path:
    """The folder of one run's iterations, checkpoint and metrics."""
    return _root(sweep) / "train" / label(run, seed)


def evaluate_dir(name: str, seed: int | None = None, sweep: str | None = None) -> Path:
    """The folder of one evaluation; `name` is a run or a baseline."""
    return _root(sweep) / "evaluate" / label(name, seed)


def checkpointed_policy(training: Path) -> Path:
    """The policy in the folder of a run: the latest one, a Hugging Face folder."""
    return training / "checkpoint" / "policy"


def kept_policy(label: str, policy_hash: str) -> Path:
    """DVC's file of a registered policy's copy; the copy lies beside it, without the suffix."""
    return MODELS / f"{label}-{policy_hash[:8]}.dvc"


def kept_training(policy: Path) -> Path:
    """DVC's file of the folder of the training that made a registered policy, beside the policy's own."""
    return policy.with_name(f"{policy.stem}-training.dvc")


def report_dir(sweep: str | None = None) -> Path:
    """The folder of a report: of the main graph's runs, or of a sweep's."""
    return _root(sweep) / "report"


def view_file(run: str, seed: int | None = None, sweep: str | None = None) -> Path:
    """The page on which a run's trajectories are looked at."""
    return _root(sweep) / "view" / f"{label(run, seed)}.html"


def label(name: str, seed: int | None = None) -> str:
    """What a run with a seed is called; without one the seed is the run's own."""
    return name if seed is None else f"{name}-seed{seed}"


def _root(sweep: str | None) -> Path:
    return Path("outputs") / (sweep or "")
