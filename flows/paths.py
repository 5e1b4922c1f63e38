"""Where the stages meet: the folders of the artifacts, relative to the project's root."""

from pathlib import Path

PREPARED = Path("data/prepared")
QUESTIONS = PREPARED / "questions.parquet"
PASSAGES = PREPARED / "passages.parquet"
INDEX = Path("data/index")
WARM_START = Path("outputs/warm_start")
REPORT = Path("outputs/report")


def train_dir(run: str) -> Path:
    """The folder of one run's iterations, checkpoint and metrics."""
    return Path("outputs/train") / run


def evaluate_dir(name: str) -> Path:
    """The folder of one evaluation; `name` is a run or a baseline."""
    return Path("outputs/evaluate") / name
