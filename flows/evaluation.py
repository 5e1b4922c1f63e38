"""A stand-in until the recurring evaluation is there."""

from prefect import flow


@flow(name="evaluation")
def evaluation(models: list[str] | None = None, dataset: str | None = None) -> None:
    """Evaluates models on the prepared data."""
