"""Decoder layers by torch.compile: products as they are, and what stands between them in one pass over memory."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Sequence
from functools import cache, wraps
from typing import Any

import torch
from torch import nn
from torch._dynamo.exc import FailOnRecompileLimitHit, TorchDynamoException
from transformers import AttentionInterface, PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from agent_r1.files import closed_folder
from agent_r1.surroundings import home

logger = logging.getLogger(__name__)


def compile_layers(model: PreTrainedModel) -> None:
    """Has a model's layers compiled as they are first called, for contexts of all lengths.

    Later processes find what was compiled in a folder of this user. A layer that cannot be compiled, or would be again
    and again, computes as it is from then on, and so do those behind it, which is said once.
    """
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(closed_folder(home() / ".cache/agent_r1/torchinductor")))
    torch._dynamo.config.fail_on_recompile_limit_hit = True
    torch._functorch.config.force_non_lazy_backward_lowering = True  # else a backward pass may fail alone
    attention = model.config._attn_implementation
    if attention.startswith("agent_r1"):  # a loop over contexts, which are others in every micro-batch
        AttentionInterface.register(attention, torch.compiler.disable(AttentionInterface()[attention]))
    layers = [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
    for index, layer in enumerate(layers):
        layer.forward = _compiled_or_plain(layer.forward, layers[index:])


def _compiled_or_plain(plain: Callable[..., Any], behind: Sequence[nn.Module]) -> Callable[..., Any]:
    """The compiled `forward` of the first of some layers; where there is none, all of them are left plain."""
    compiled = torch.compile(plain, dynamic=True, options={"compile_threads": 1})  # more are processes of their own

    @wraps(plain)
    def forward(*inputs: Any, **options: Any) -> Any:
        try:
            return compiled(*inputs, **options)
        except (TorchDynamoException, FailOnRecompileLimitHit) as fault:
            _say(str(fault.__cause__ or fault).strip().partition("\n")[0])
        for layer in behind:  # those before it keep to what a backward pass may compute again
            vars(layer).pop("forward", None)
        return plain(*inputs, **options)

    return forward


@cache
def _say(reason: str) -> None:
    logger.warning(
        "layers are computed uncompiled from here on: %s; set model.compile: false, or install a C++ compiler (g++) if "
        "there is none",
        reason,
    )
