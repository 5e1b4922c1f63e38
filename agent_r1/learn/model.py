"""Policy and critic: loading them, and the critic's values."""

from __future__ import annotations

from contextlib import AbstractContextManager
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)
from transformers.modeling_layers import GradientCheckpointingLayer

from agent_r1.devices.gpus import default_device
from agent_r1.files import load_pretrained
from agent_r1.learn.packing import pack, see

DtypeName = Literal["auto", "float32", "bfloat16"]


def compute_dtype(name: DtypeName, device: torch.device) -> torch.dtype:
    """What matrix products run in; `auto` is bfloat16 on CUDA and float32 elsewhere."""
    halved = name == "bfloat16" or (name == "auto" and device.type == "cuda")
    return torch.bfloat16 if halved else torch.float32


def precision(device: torch.device, dtype: torch.dtype) -> AbstractContextManager[None]:
    """Runs matrix products in `dtype` over float32 weights.

    The weights stay float32 because a learning rate of 1e-6 moves them by less than bfloat16 can hold.
    """
    return torch.autocast(device.type, torch.bfloat16, enabled=dtype is torch.bfloat16)


def load_policy(
    path: str | Path,
    dtype: torch.dtype | Literal["auto"] = torch.float32,
    device: torch.device | None = None,
    *,
    packed: bool = False,
) -> PreTrainedModel:
    """A causal language model from a Hugging Face folder or hub id, without dropout, by default on the accelerator.

    `dtype` is that of the weights; `auto` leaves them as they are stored. A ValueError says that there is no model at
    `path`, that some of its weights are missing, or that it cannot see contexts `packed`.
    """
    folder = Path(path)
    if folder.is_dir() and not (folder / "config.json").exists():
        raise ValueError(f"{path} holds no model (config.json is missing); save one there or correct model.path")
    try:
        loaded = load_pretrained(
            AutoModelForCausalLM, path, dtype=dtype, attn_implementation="sdpa", output_loading_info=True
        )
    except OSError as error:
        raise ValueError(f"no model can be loaded from {str(path)!r}; correct model.path: {error}") from error
    model: PreTrainedModel
    model, about = loaded
    if missing := sorted(about["missing_keys"]):  # transformers gives them random values, tied ones aside
        raise ValueError(
            f"{str(path)!r} lacks the weights of {len(missing)} tensors of its {type(model).__name__}, {missing[0]} "
            "for one; download or save the model again"
        )
    _settle(model, device or default_device())
    if packed:
        pack(model)
    return model


def load_tokenizer(path: str | Path) -> PreTrainedTokenizerFast:
    """The tokenizer of a Hugging Face folder or hub id.

    A ValueError refuses one that is missing or slow, has no chat template or does not fit the embeddings of its model.
    """
    folder = Path(path)
    if folder.is_dir() and not (folder / "tokenizer_config.json").exists():
        raise ValueError(
            f"{path} holds no tokenizer (tokenizer_config.json is missing); save the model's tokenizer into it"
        )
    try:
        tokenizer = load_pretrained(AutoTokenizer, path)
    except OSError as error:
        raise ValueError(
            f"no tokenizer can be loaded from {str(path)!r}; correct the folder or hub id: {error}"
        ) from error
    if not isinstance(tokenizer, PreTrainedTokenizerFast):
        raise ValueError(
            f"the tokenizer of {str(path)!r} has no fast implementation; choose a model with tokenizer.json"
        )
    if tokenizer.chat_template is None:
        raise ValueError(f"the tokenizer of {str(path)!r} has no chat template; choose an instruction-tuned model")
    _require_vocabulary(path, tokenizer)
    return tokenizer


def recompute_activations(model: PreTrainedModel) -> None:
    """Gradient checkpointing: an update keeps what goes into each layer and computes the rest a second time.

    Only the layers themselves are put into training mode, which is what transformers asks for; the modules in them,
    where most dropout would be, stay out of it. What a layer drops out itself (OPT, BART) it drops at a rate of 0. A
    ValueError refuses an architecture that does not support it.
    """
    layers = [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
    if not layers or not model.supports_gradient_checkpointing:
        raise ValueError(
            f"{type(model).__name__} does not support gradient checkpointing; set model.gradient_checkpointing: false"
        )
    model.gradient_checkpointing_enable({"use_reentrant": False})
    for layer in layers:
        layer.training = True
        for name in [name for name, value in vars(layer).items() if "drop" in name and isinstance(value, float)]:
            setattr(layer, name, 0.0)


class Critic(nn.Module):
    """The policy's backbone with weights of its own and a scalar head.

    The head starts at zero, so that every value is 0 until something was learned.
    """

    def __init__(self, path: str | Path, dtype: torch.dtype, device: torch.device, *, packed: bool = False) -> None:
        """Starts from the policy of a Hugging Face folder or hub id; `dtype` is the backbone's.

        Raises as `load_policy`.
        """
        super().__init__()
        self.backbone = load_pretrained(AutoModel, path, dtype=dtype, attn_implementation="sdpa")
        self.head = nn.Linear(self.backbone.config.hidden_size, 1)
        nn.init.zeros_(self.head.weight)
        nn.init.zeros_(self.head.bias)
        _settle(self, device)
        if packed:
            pack(self.backbone)

    def forward(self, ids: Tensor, mask: Tensor) -> Tensor:
        """Values of the states before the tokens that the mask [B, T] selects: [B, T] right-padded ids -> [N] float32.

        The value at token t comes from the hidden state at t - 1: it estimates the return from the state in which
        token t is about to be emitted, which is V_n of credit assignment at action token t_n. At the first token it
        is 0: no state comes before.
        """
        hidden = see(self.backbone, ids, mask).last_hidden_state
        with torch.autocast(ids.device.type, enabled=False):
            values: Tensor = self.head(hidden[:, :-1].float()).squeeze(-1)
        return nn.functional.pad(values, (1, 0))[mask]


def _settle(model: nn.Module, device: torch.device) -> None:
    """Puts a freshly loaded model on its device, without dropout: it would make learner and sampler disagree.

    The weights move out of the mapped file, whose alignment changes the last bits and which may be replaced.
    """
    for parameter in model.parameters():
        parameter.data = parameter.data.clone(memory_format=torch.contiguous_format)
    model.to(device).eval()


def _require_vocabulary(path: str | Path, tokenizer: PreTrainedTokenizerFast) -> None:
    if Path(path).is_dir() and not (Path(path) / "config.json").exists():
        return  # a tokenizer alone
    rows = load_pretrained(AutoConfig, path).get_text_config().vocab_size
    ids = max(tokenizer.get_vocab().values()) + 1
    if rows < ids:
        raise ValueError(
            f"the model of {str(path)!r} has a vocabulary of {rows} tokens and its tokenizer has {ids}; use the "
            "tokenizer that belongs to the model, or resize the model's embeddings and save it again"
        )
