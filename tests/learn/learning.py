"""What models have learned from a loss."""

from __future__ import annotations

from torch import Tensor, nn


def gradients(model: nn.Module) -> dict[str, Tensor]:
    """Takes the gradients of all weights that have one away from them."""
    found = {name: weight.grad for name, weight in model.named_parameters() if weight.grad is not None}
    model.zero_grad()
    return found
