"""Policy and critic: loading, precision, and contexts that are packed into one row without padding."""

from __future__ import annotations

import itertools
import json
import logging
from collections.abc import Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import (
    AttentionInterface,
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.utils.chat_template_utils import _get_template_variables

from agent_r1.files import load_pretrained
from agent_r1.pretrained import MIXERS, default_device, layer_kinds, load_model, require_packable, require_window

logger = logging.getLogger(__name__)

PACKED = "agent_r1_packed"  # the name under which transformers knows the attention
KEEP_TO_CONTEXTS = {"full_attention", "sliding_attention", *MIXERS}  # layers that take the starts of contexts
_PROBE = "Ab 7\n\n  cd\t<x>\u00dcn\u00ef 2024's \u4e2d"  # tokenizers differ in what they do to blanks and letters
HALVED = (torch.bfloat16, torch.float16)  # precisions of autocast, and of the kernel for packed contexts


def pack(model: PreTrainedModel) -> None:
    """Has a model read packed contexts from now on.

    Two short contexts test that it reads each as it does alone, and that nothing of the first reaches the second: where
    that has no numbers, the second has all of them. Where convolutions and recurrences have no kernel that takes the
    starts of contexts, they run a context at a time. A ValueError refuses a model that fails the test then too.
    """
    require_packable(model.config)
    kinds = layer_kinds(model.config)
    ids = torch.arange(24, device=model.device).reshape(2, 12) % model.config.get_text_config().vocab_size
    mask = torch.arange(12, device=model.device) < torch.tensor([[7], [12]], device=model.device)
    with torch.no_grad():
        _, apart = see(model.base_model, ids, mask)
        model.set_attn_implementation(PACKED)
        fit = _keeps_apart(model, ids, mask, apart)
        if not fit and kinds & {*MIXERS}:
            layers = [layer for layer in model.modules() if isinstance(layer, GradientCheckpointingLayer)]
            for layer in layers:
                for mixer in {*MIXERS.values()} & layer._modules.keys():
                    _run_by_context(layer.get_submodule(mixer))
            fit = _keeps_apart(model, ids, mask, apart)
    if kinds - KEEP_TO_CONTEXTS or not fit:
        raise ValueError(
            f"{type(model).__name__} does not keep contexts apart that are packed into one row; set model.packing: "
            "false"
        )


def _keeps_apart(model: PreTrainedModel, ids: Tensor, mask: Tensor, apart: Tensor) -> bool:
    """Whether a model reads packed contexts as it does `apart`, and the second knows nothing of the first."""
    first = mask[:, 1:].sum(1)[0]

    def without_numbers(_: nn.Module, _inputs: Any, embedded: Tensor) -> Tensor:
        return embedded.index_fill(1, torch.arange(int(first), device=embedded.device), torch.nan)

    _, together = see(model.base_model, ids, mask)
    with model.get_input_embeddings().register_forward_hook(without_numbers):
        second = see(model.base_model, ids, mask)[1][int(first) :]
    tolerance = 1e-3 if model.dtype is torch.float32 else 0.05
    difference = (together - apart).float()
    return bool(second.isfinite().all() and difference.norm() <= tolerance * apart.float().norm())


def _run_by_context(mixer: nn.Module) -> None:
    """Has a convolution or recurrence read each packed context from its start."""
    forward = mixer.forward

    def run(
        hidden_states: Tensor, *, seq_idx: Tensor | None = None, cu_seq_lens_q: Tensor | None = None, **options: Any
    ) -> Tensor:
        if seq_idx is None:
            return cast(Tensor, forward(hidden_states=hidden_states, **options))
        lengths = seq_idx[0].unique_consecutive(return_counts=True)[1].tolist()
        return torch.cat([forward(hidden_states=context, **options) for context in hidden_states.split(lengths, 1)], 1)

    mixer.forward = run


def is_packed(config: Any) -> bool:
    """Whether the model of a configuration reads packed contexts."""
    return bool(config._attn_implementation == PACKED)


def see(backbone: nn.Module, ids: Tensor, mask: Tensor, config: Any = None) -> tuple[Any, Tensor]:
    """Runs a backbone on right-padded ids [B, T]; the mask [B, T] selects tokens.

    Gives its output, and the hidden states [N, hidden size] right before the selected tokens, but for a row's first.
    Packed contexts end with the last of these. `config` is the model's, for a backbone without one.
    """
    if not is_packed(config or backbone.config):
        output = backbone(input_ids=ids, use_cache=False)
        return output, output.last_hidden_state[:, :-1][mask[:, 1:]]
    predictors = F.pad(mask[:, 1:], (0, 1))
    needed = predictors.flip(1).cumsum(1).flip(1) > 0
    lengths = needed.sum(1)
    longest = int(lengths.max())
    starts = F.pad(lengths.cumsum(0), (1, 0)).int()
    contexts = torch.arange(len(ids), device=ids.device, dtype=torch.int32)
    output = backbone(
        input_ids=ids[needed].unsqueeze(0),
        position_ids=(needed.cumsum(1) - 1)[needed].unsqueeze(0),
        use_cache=False,
        cu_seq_lens_q=starts,
        cu_seq_lens_k=starts,
        max_length_q=longest,
        max_length_k=longest,
        seq_idx=contexts.repeat_interleave(lengths).unsqueeze(0),
    )
    return output, output.last_hidden_state.squeeze(0)[predictors[needed]]


def attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    sliding_window: int | None = None,
    cu_seq_lens_q: Tensor | None = None,
    max_length_q: int = 0,
    **options: Any,
) -> tuple[Tensor, None]:
    """Causal attention within packed contexts: [1, H, t, D] -> [1, t, H, D]; [B + 1] holds their starts and the end.

    Keys and values may have fewer heads. Without starts every row is a right-padded context.
    """
    if cu_seq_lens_q is None:
        attention_mask = _window(query.shape[2], sliding_window, query.device)
        return sdpa_attention_forward(module, query, key, value, attention_mask, scaling=scaling, **options)
    if query.is_cuda and value.dtype in HALVED:
        from torch.nn.attention.varlen import varlen_attn  # registers operators, which costs time

        # Rotary positions make float32 of queries and keys where the weights are; no product ever made values that.
        q, k, v = (tensor.squeeze(0).transpose(0, 1).to(value.dtype) for tensor in (query, key, value))
        packed = varlen_attn(
            q,
            k,
            v,
            cu_seq_lens_q,
            cu_seq_lens_q,
            max_length_q,
            max_length_q,
            scale=scaling,
            window_size=(sliding_window - 1 if sliding_window else -1, 0),
            enable_gqa=query.shape[1] != key.shape[1],
        )
        return cast(Tensor, packed).unsqueeze(0), None
    outputs = list[Tensor]()
    for start, stop in itertools.pairwise(cu_seq_lens_q.tolist()):
        if start < stop:
            mask = _window(stop - start, sliding_window, query.device)
            q, k, v = (tensor[:, :, start:stop] for tensor in (query, key, value))
            outputs.append(sdpa_attention_forward(module, q, k, v, mask, scaling=scaling, **options)[0])
    return torch.cat(outputs, 1), None


def _window(length: int, size: int | None, device: torch.device) -> Tensor | None:
    """The mask of a sliding window; None where every query sees all keys before it."""
    if not size or length <= size:
        return None
    distance = torch.arange(length, device=device)[:, None] - torch.arange(length, device=device)
    return ((distance >= 0) & (distance < size))[None, None]


AttentionInterface.register(PACKED, attend)


def precision(device: torch.device, dtype: torch.dtype) -> AbstractContextManager[None]:
    """Runs matrix products in `dtype` over float32 weights: shorter ones would lose steps of a small learning rate."""
    return torch.autocast(device.type, dtype, enabled=dtype in HALVED)


def load_policy(
    path: str | Path,
    dtype: torch.dtype | Literal["auto"] = torch.float32,
    device: torch.device | None = None,
    kind: Any = AutoModelForCausalLM,
    *,
    packed: bool = False,
    waits: bool = False,
) -> PreTrainedModel:
    """Loads a model from a Hugging Face folder or hub id, by default onto the accelerator.

    Arguments are those of `load_model`, whose errors it raises. A ValueError also refuses a model that cannot read
    contexts `packed`.
    """
    return load_model(path, dtype, device or default_device(), kind, pack if packed else None, waits=waits)


def load_tokenizer(
    path: str | Path, reads: int = 0, template: Mapping[str, bool | int | str] = MappingProxyType({})
) -> PreTrainedTokenizerFast:
    """Loads the tokenizer of a Hugging Face folder or hub id, whose chat template takes the arguments of `template`.

    They are written into the template, so that whoever renders it, now or from a saved policy, prompts as in training.
    A ValueError refuses one that is missing or slow, has no chat template or reads no such argument, or has more tokens
    than its model, and a model that `reads` fewer tokens at once.
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
    tokenizer = _as_saved(tokenizer, path)
    if tokenizer.chat_template is None:
        raise ValueError(f"the tokenizer of {str(path)!r} has no chat template; choose an instruction-tuned model")
    if unread := template.keys() - _get_template_variables(tokenizer.chat_template):
        raise ValueError(
            f"model.template has arguments that the chat template of {str(path)!r} does not read, {min(unread)} for "
            "one; leave them out, or correct their names"
        )
    for name, value in template.items():
        default = f"{{%- if {name} is not defined %}}{{%- set {name} = {json.dumps(value)} %}}{{%- endif %}}"
        if not tokenizer.chat_template.startswith(default):
            tokenizer.chat_template = default + tokenizer.chat_template
    if not folder.is_dir() or (folder / "config.json").exists():  # else it is a tokenizer alone
        config = load_pretrained(AutoConfig, path)
        require_window(config, reads)
        rows = config.get_text_config().vocab_size
        ids = max(tokenizer.get_vocab().values()) + 1
        if rows < ids:
            raise ValueError(
                f"the model of {str(path)!r} has a vocabulary of {rows} tokens and its tokenizer has {ids}; use the "
                "tokenizer that belongs to the model, or resize the model's embeddings and save it again"
            )
    return tokenizer


def _as_saved(tokenizer: PreTrainedTokenizerFast, path: str | Path) -> PreTrainedTokenizerFast:
    """The tokenizer as tokenizer.json has it, where the class that its configuration names reads a text otherwise."""
    if type(tokenizer) is PreTrainedTokenizerFast or not (Path(path) / "tokenizer.json").exists():
        return tokenizer
    saved: PreTrainedTokenizerFast = load_pretrained(PreTrainedTokenizerFast, path)
    if saved.tokenize(_PROBE) == tokenizer.tokenize(_PROBE):
        return tokenizer
    logger.warning("%s would read text otherwise than %s/tokenizer.json, which is used", type(tokenizer).__name__, path)
    return saved


def recompute_activations(model: PreTrainedModel) -> None:
    """Turns on gradient checkpointing: an update keeps the input of each layer and computes the rest again.

    transformers needs the layers in training mode. The modules within them, which have most of the dropout, stay out of
    it, and the layers' own dropout (OPT, BART) is set to 0. A ValueError refuses an architecture without support.
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


class Float32Output(nn.Linear):
    """An output layer that computes in float32, whatever the precision of its input and weights.

    Source: MiniMax-M1 (arXiv 2506.13585), where it made sampler and learner agree.
    """

    def forward(self, input: Tensor) -> Tensor:
        bias = None if self.bias is None else self.bias.float()
        with torch.autocast(input.device.type, enabled=False):
            return F.linear(input.float(), self.weight.float(), bias)


def compute_output_in_float32(model: PreTrainedModel) -> None:
    """Replaces a model's output layer by a `Float32Output` of the same weights."""
    layer = model.get_output_embeddings()
    output = Float32Output(layer.in_features, layer.out_features, bias=layer.bias is not None, device="meta")
    output.weight = layer.weight
    output.bias = layer.bias
    model.set_output_embeddings(output)


class Critic(nn.Module):
    """A backbone like the policy's with weights of its own, and a scalar head that starts at 0, as do all values."""

    def __init__(self, path: str | Path, dtype: torch.dtype, device: torch.device, **options: Any) -> None:
        """Starts from a Hugging Face folder or hub id; `dtype` is the backbone's. The rest is as in `load_policy`."""
        super().__init__()
        self.backbone = load_policy(path, dtype, device, AutoModel, **options)
        self.head = Float32Output(self.backbone.config.hidden_size, 1)
        nn.init.zeros_(self.head.weight)
        nn.init.zeros_(self.head.bias)
        self.head.to(device)
        self.eval()

    def forward(self, ids: Tensor, mask: Tensor) -> Tensor:
        """The values [N] in float32 before the tokens that the mask [B, T] selects from right-padded ids [B, T].

        The value at token t comes from the hidden state at t - 1. It estimates the return from the state in which token
        t is about to be emitted: V_n of credit assignment at action token t_n. At the first token it is 0.
        """
        _, hidden = see(self.backbone, ids, mask)
        values = torch.zeros(ids.shape, device=ids.device)
        values[:, 1:][mask[:, 1:]] = self.head(hidden).squeeze(-1)
        return values[mask]
