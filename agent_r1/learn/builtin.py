"""The built-in small agent: a byte-level BPE tokenizer and a Qwen2 model, both from scratch."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from torch import Tensor
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM
from transformers.models.qwen2.tokenization_qwen2 import PRETOKENIZE_REGEX

END_OF_TEXT = "<|endoftext|>"
MESSAGE_START = "<|im_start|>"
MESSAGE_END = "<|im_end|>"
TAGS = ("<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")
ANSWER_TAGS = ("<answer>", "</answer>")

ROPE_THETA = 1e6  # of Qwen2.5: most rotary pairs are slow enough to compare contents over hundreds of tokens
EMBEDDING_STD = 0.05
PREVIOUS_SHARPNESS = 4.0
MATCH_SHARPNESS = 2.0
SLOW = 0.01  # radians per token


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> PreTrainedTokenizerFast:
    """Trains a byte-level BPE tokenizer of `vocab_size` ids with the Hermes tags and a ChatML template.

    The message marks are special tokens and the tags are added tokens that decode as text, as in Qwen2.5. Words are
    split as by Qwen2: transformers reads the tokenizer of a Qwen2 model in no other way.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PRETOKENIZE_REGEX), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    added = [END_OF_TEXT, MESSAGE_START, MESSAGE_END, *TAGS, *ANSWER_TAGS]
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size - len(added),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.add_special_tokens([AddedToken(mark, special=True) for mark in added[:3]])
    tokenizer.add_tokens([AddedToken(tag, special=False, normalized=False) for tag in added[3:]])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=MESSAGE_END,
        pad_token=END_OF_TEXT,
        chat_template=(Path(__file__).parent / "chat_template.jinja").read_text(),
        clean_up_tokenization_spaces=False,
    )


def new_model(
    tokenizer: PreTrainedTokenizerFast, *, hidden_size: int, layers: int, heads: int, max_tokens: int, seed: int
) -> Qwen2ForCausalLM:
    """A fresh Qwen2 with tied embeddings for contexts of up to `max_tokens` tokens."""
    if hidden_size % heads or (hidden_size // heads) % 32:
        raise ValueError(
            f"hidden_size {hidden_size} over {heads} heads gives heads of {hidden_size / heads:g}; "
            "the CPU engine needs a multiple of 32"
        )
    config = Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=hidden_size,
        intermediate_size=2 * hidden_size,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=heads,
        max_position_embeddings=max_tokens,
        rope_parameters={"rope_type": "default", "rope_theta": ROPE_THETA},
        initializer_range=EMBEDDING_STD,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = Qwen2ForCausalLM(config)
        start_as_induction(model)
        return model


def copy_of(config: Mapping[str, Any], weights: Mapping[str, Tensor]) -> Qwen2ForCausalLM:
    """The model of a configuration's fields and these weights."""
    with torch.random.fork_rng(devices=[]):
        model = Qwen2ForCausalLM(Qwen2Config(**config))
    model.load_state_dict(weights)
    return model


@torch.no_grad()
def start_as_induction(model: Qwen2ForCausalLM) -> None:
    """Sets the first two layers of a fresh model so that it repeats the token that followed the current one before.

    The small agent must copy names out of passages, and attention with random weights takes millions of tokens to learn
    that. Layer 0 attends to the previous token through its query and key biases alone, which rotary embedding turns
    into a preference for one distance. It writes that token, rotated, into the residual stream. Slow rotary pairs tell
    no distances apart, and would only add a large number to every score, which costs precision. Layer 1 finds the
    places whose previous token is the current one, in the slow rotary pairs, which hardly depend on the distance, and
    copies their tokens. Training may change all of this.

    Source: induction heads, Olsson et al. 2022 (arXiv 2209.11895); starting attention from the structure that it tends
    to learn, Trockman and Kolter 2023 (arXiv 2305.09828).
    """
    size = model.config.hidden_size
    heads = model.config.num_attention_heads
    width = size // heads
    rates = ROPE_THETA ** (-torch.arange(0, width, 2) / width)  # [width / 2] radians per token
    rotation = _orthonormal(size)  # of the previous token in the residual stream
    values = [_orthonormal(size) for _ in range(2)]  # of the two layers

    previous = model.model.layers[0].self_attn
    _prefer_previous(previous, rates, heads)
    previous.v_proj.weight.copy_(values[0])
    previous.o_proj.weight.copy_(EMBEDDING_STD * rotation.T @ values[0].T)

    matching = model.model.layers[1].self_attn
    queries = torch.cat([_orthonormal(size)[:width] for _ in range(heads)])
    queries = MATCH_SHARPNESS * (rates < SLOW).repeat(2).repeat(heads)[:, None] * queries  # in the slow pairs
    matching.q_proj.weight.copy_(queries)
    matching.k_proj.weight.copy_(queries @ rotation)
    matching.v_proj.weight.copy_(values[1])
    matching.o_proj.weight.copy_(2 * EMBEDDING_STD * values[1].T)

    for layer in model.model.layers:  # less noise around the circuit
        layer.mlp.down_proj.weight.mul_(0.1)
    for layer in model.model.layers[2:]:
        layer.self_attn.o_proj.weight.mul_(0.3)


def _prefer_previous(attention: Any, rates: Tensor, heads: int) -> None:
    """Sets query and key biases so that attention goes to the token before, whatever the tokens are."""
    fast = PREVIOUS_SHARPNESS * (rates >= SLOW)  # [width / 2]
    attention.q_proj.bias.copy_(torch.cat([fast * rates.cos(), -fast * rates.sin()]).repeat(heads))
    attention.k_proj.bias.copy_(torch.cat([fast, torch.zeros_like(fast)]).repeat(heads))
    for projection in (attention.q_proj, attention.k_proj):
        projection.weight.mul_(0.1)


def _orthonormal(size: int) -> Tensor:
    basis: Tensor = torch.linalg.qr(torch.randn(size, size))[0]
    return basis
