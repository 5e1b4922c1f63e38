"""The critic: what return a state promises."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import AutoModel

from agent_r1.policy.model import default_device, settle


class Critic(nn.Module):
    """The policy's backbone with weights of its own and a scalar head.

    The head starts at zero, so that every value is 0 until something was learned.
    """

    def __init__(
        self, path: str | Path, device: torch.device | None = None, *, dtype: torch.dtype = torch.float32
    ) -> None:
        """Starts from the policy of a Hugging Face folder or hub id; `dtype` is the backbone's."""
        super().__init__()
        self.backbone = AutoModel.from_pretrained(path, dtype=dtype, attn_implementation="sdpa")
        self.head = nn.Linear(self.backbone.config.hidden_size, 1)
        nn.init.zeros_(self.head.weight)
        nn.init.zeros_(self.head.bias)
        settle(self, device or default_device())

    def forward(self, ids: Tensor) -> Tensor:
        """Values of the states before each token: [B, T] right-padded ids -> [B, T] float32.

        The value at token t comes from the hidden state at t - 1: it estimates the return from the state in which
        token t is about to be emitted, which is V_n of credit assignment at action token t_n. At the first token it
        is 0: no state comes before.
        """
        hidden = self.backbone(input_ids=ids, use_cache=False).last_hidden_state
        with torch.autocast(ids.device.type, enabled=False):
            values: Tensor = self.head(hidden[:, :-1].float()).squeeze(-1)
        return nn.functional.pad(values, (1, 0))
