"""Policy and critic: loading, precision, and contexts that are packed into one row without padding."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
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
from agent_r1.learn.prefixes import LEAST, Segment, Tree
from agent_r1.pretrained import (
    MIXERS,
    default_device,
    experts_of,
    layer_kinds,
    load_model,
    require_packable,
    require_window,
)

logger = logging.getLogger(__name__)

PACKED = "agent_r1_packed"  # the name under which transformers knows the attention
SPANS = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k")  # [S + 1] starts and end, int32; longest
SHARED = "agent_r1_shared"  # the same, of a model that computes once what contexts share
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
    if not kinds & {*MIXERS}:
        _share(model)


def _share(model: PreTrainedModel) -> None:
    """Has a model compute once what contexts share, unless two that share something show that it does not."""
    lengths = torch.tensor([[LEAST + 7], [LEAST + 12]], device=model.device)
    positions = torch.arange(LEAST + 12, device=model.device)
    words = model.config.get_text_config().vocab_size
    ids = torch.stack([positions, positions + (positions >= LEAST)]) % words
    with torch.no_grad():
        _, apart = see(model.base_model, ids, positions < lengths)
        model.set_attn_implementation(SHARED)
        _, together = see(model.base_model, ids, positions < lengths)
    if not _alike(together, apart):
        model.set_attn_implementation(PACKED)


def _alike(states: Tensor, expected: Tensor) -> bool:
    """Whether hidden states differ by rounding alone."""
    tolerance = 1e-3 if states.dtype is torch.float32 else 0.05
    return bool((states - expected).float().norm() <= tolerance * expected.float().norm())


def _keeps_apart(model: PreTrainedModel, ids: Tensor, mask: Tensor, apart: Tensor) -> bool:
    """Whether a model reads packed contexts as it does `apart`, and the second knows nothing of the first."""
    first = mask[:, 1:].sum(1)[0]

    def without_numbers(_: nn.Module, _inputs: Any, embedded: Tensor) -> Tensor:
        return embedded.index_fill(1, torch.arange(int(first), device=embedded.device), torch.nan)

    _, together = see(model.base_model, ids, mask)
    with model.get_input_embeddings().register_forward_hook(without_numbers):
        second = see(model.base_model, ids, mask)[1][int(first) :]
    return bool(second.isfinite().all() and _alike(together, apart))


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
    return config._attn_implementation in (PACKED, SHARED)


def shares_prefixes(config: Any) -> bool:
    """Whether the model of a configuration computes once what packed contexts share."""
    return bool(config._attn_implementation == SHARED)


def see(backbone: nn.Module, ids: Tensor, mask: Tensor, config: Any = None) -> tuple[Any, Tensor]:
    """Runs a backbone on right-padded ids [B, T]; the mask [B, T] selects tokens.

    Gives its output, and the hidden states [N, hidden size] right before the selected tokens, but for a row's first.
    The output of routers to experts, one [N, experts] a layer, is of these too. Packed contexts end with the last of
    these. `config` is the model's, for a backbone without one.
    """
    config = config or backbone.config
    routed = {"output_router_logits": True} if experts_of(config) else {}
    predictors = F.pad(mask[:, 1:], (0, 1))
    if not is_packed(config):
        return _at(predictors.flatten(), backbone(input_ids=ids, use_cache=False, **routed))
    needed = predictors.flip(1).cumsum(1).flip(1) > 0
    tree = Tree.of(ids, needed.sum(1), shared=shares_prefixes(config))
    lengths = torch.tensor([segment.length for segment in tree.segments], device=ids.device)
    keys = torch.tensor([segment.stop for segment in tree.segments], device=ids.device)  # that each one sees
    numbers = torch.arange(len(lengths), device=ids.device, dtype=torch.int32)
    output = backbone(
        input_ids=ids.flatten()[tree.source].unsqueeze(0),
        position_ids=tree.positions.unsqueeze(0),
        use_cache=False,
        cu_seq_lens_q=F.pad(lengths.cumsum(0), (1, 0)).int(),
        cu_seq_lens_k=F.pad(keys.cumsum(0), (1, 0)).int(),
        max_length_q=max(segment.length for segment in tree.segments),
        max_length_k=max(segment.stop for segment in tree.segments),
        seq_idx=numbers.repeat_interleave(lengths).unsqueeze(0),
        tree=tree,
        **routed,
    )
    return _at(tree.place[predictors], output)


def _at(places: Tensor, output: Any) -> tuple[Any, Tensor]:
    """A backbone's output and its hidden states at `places` [N] of all tokens; routers' logits are kept there alone."""
    if routers := output.get("router_logits"):
        output.router_logits = tuple(logits[places] for logits in routers)
    return output, output.last_hidden_state.flatten(0, 1)[places]


def attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    sliding_window: int | None = None,
    tree: Tree | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """Causal attention within packed contexts: [1, H, t, D] -> [1, t, H, D].

    The row is made of the segments of `tree`, each of which sees those of its path. The options named in `SPANS` say
    the same to a kernel. Keys and values may have fewer heads. Without a tree every row is a right-padded context.
    """
    if not tree:
        attention_mask = _lower_right(query.shape[2], query.shape[2], sliding_window, query.device)
        return sdpa_attention_forward(module, query, key, value, attention_mask, scaling=scaling, **options)
    lengths = [segment.length for segment in tree.segments]
    keys, values = (_seen(tensor.split(lengths, 2), tree.segments) for tensor in (key, value))
    if query.is_cuda and value.dtype in HALVED:
        return _attend_by_kernel(query, keys, values, [options[name] for name in SPANS], scaling, sliding_window), None
    outputs = list[Tensor]()
    for q, k, v in zip(query.split(lengths, 2), keys, values, strict=True):
        attention_mask = _lower_right(q.shape[2], k.shape[2], sliding_window, query.device)
        outputs.append(sdpa_attention_forward(module, q, k, v, attention_mask, scaling=scaling, **options)[0])
    return torch.cat(outputs, 1), None


def _attend_by_kernel(
    query: Tensor,
    keys: Sequence[Tensor],
    values: Sequence[Tensor],
    spans: Sequence[Any],
    scaling: float | None,
    window: int | None,
) -> Tensor:
    """The attention of all segments in one kernel of CUDA, to which `spans` says the values of `SPANS`."""
    from torch.nn.attention.varlen import varlen_attn  # registers operators, which costs time

    # Rotary positions make float32 of queries and keys where the weights are; no product ever made values that.
    wide = (query, torch.cat([*keys], 2), torch.cat([*values], 2))
    q, k, v = (tensor.squeeze(0).transpose(0, 1).to(values[0].dtype) for tensor in wide)
    packed = varlen_attn(
        q,
        k,
        v,
        *spans,
        scale=scaling,
        window_size=(window - 1 if window else -1, 0),  # the queries are at the last of the keys
        enable_gqa=query.shape[1] != keys[0].shape[1],
    )
    return cast(Tensor, packed).unsqueeze(0)


def _seen(pieces: Sequence[Tensor], segments: Sequence[Segment]) -> list[Tensor]:
    """The keys or values [1, H, k, D] that each segment sees, from those of the segments."""
    return [
        pieces[segment.path[0]] if len(segment.path) == 1 else torch.cat([pieces[at] for at in segment.path], 2)
        for segment in segments
    ]


def _lower_right(queries: int, keys: int, window: int | None, device: torch.device) -> Tensor | None:
    """The mask of the last queries of so many keys; None where each sees all keys before it, from the first on."""
    if queries == keys and (not window or keys <= window):
        return None
    distance = torch.arange(keys - queries, keys, device=device)[:, None] - torch.arange(keys, device=device)
    return ((distance >= 0) & (distance < (window or keys)))[None, None]


AttentionInterface.register(PACKED, attend)
AttentionInterface.register(SHARED, attend)


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
