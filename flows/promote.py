"""A stand-in until the promotion gate is there."""

from prefect import flow


@flow(name="promote")
def promote(challenger: str) -> None:
    """Decides whether a challenger becomes the champion."""
