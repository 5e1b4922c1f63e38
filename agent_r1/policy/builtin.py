"""The built-in small agent: a byte-level BPE tokenizer and a Qwen2 model, both from scratch."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

END_OF_TEXT = "<|endoftext|>"
MESSAGE_START, MESSAGE_END = "<|im_start|>", "<|im_end|>"
TAGS = ("<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")
ANSWER_TAGS = ("<answer>", "</answer>")


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer of `vocab_size` ids with the Hermes tags and a ChatML template.

    As in Qwen2.5, the message marks are special tokens and the tags are added tokens that decode as text.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
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
    """A freshly initialised Qwen2 with tied embeddings for contexts of up to `max_tokens` tokens."""
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
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return Qwen2ForCausalLM(config)
