"""A base in four bits beneath adapters: NF4 of QLoRA (Dettmers et al. 2023, arXiv 2305.14314), by bitsandbytes.

The warm start rounds the layers' matrices to numbers that NF4 and bfloat16 both hold exactly. So the learner's four
bits, the sampler's weights and those that adapters are merged into are one model, bit for bit.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from bitsandbytes.functional import dequantize_4bit, quantize_4bit
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from agent_r1.learn.model import load_policy
from agent_r1.pretrained import linear_layers


class FourBit(nn.Linear):
    """A layer whose matrix is held in four bits, and multiplies as the matrix would. Its state is the matrix."""

    def __init__(self, layer: nn.Linear, device: torch.device) -> None:
        super().__init__(layer.in_features, layer.out_features, bias=False, device="meta")
        halves, self._scales = _quantised(layer.weight.data.to(device))
        self._dtype = layer.weight.dtype
        self.weight = nn.Parameter(halves, requires_grad=False)
        self.bias = layer.bias

    def matrix(self) -> Tensor:
        """The matrix [out, in]."""
        numbers: Tensor = dequantize_4bit(self.weight.data, self._scales)
        return numbers.view(self.out_features, self.in_features).to(self._dtype)

    def forward(self, input: Tensor) -> Tensor:
        """Unpacks the matrix again for the backward pass, and keeps it for neither."""
        product: Tensor = checkpoint(lambda x: F.linear(x, self.matrix(), self.bias), input, use_reentrant=False)
        return product

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[f"{prefix}weight"] = self.matrix().cpu()


def round_off(folder: Path) -> None:
    """Rounds a model in a Hugging Face folder to what four bits hold."""
    model = load_policy(folder, "auto", torch.device("cpu"))
    for layer in linear_layers(model).values():
        layer.weight.data = FourBit(layer, layer.weight.device).matrix()
    model.save_pretrained(folder)


def compress(model: PreTrainedModel, device: torch.device) -> None:
    """Moves a model from the CPU to a device, its layers in four bits; ValueError for one not rounded to them."""
    for name, layer in linear_layers(model).items():
        compressed = FourBit(layer, device)
        if not torch.equal(compressed.state_dict()["weight"], layer.weight.data):
            raise ValueError(
                f"{model.name_or_path} is not rounded to four bits ({name}); make the warm start anew (`dvc repro "
                "warm_start`), or set model.base: full"
            )
        model.set_submodule(name, compressed)
    nn.Module.to(model, device)


def _quantised(weight: Tensor) -> tuple[Tensor, Any]:
    row = weight.bfloat16().flatten()  # bitsandbytes 0.50 mixes up the scales of rows of other lengths than blocks
    halves, scales = quantize_4bit(row, blocksize=64, compress_statistics=False, quant_type="nf4")
    return halves, scales
