"""The built-in tokenizer and model: ordinary Hugging Face parts, made by a seed."""

import unicodedata
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

from agent_r1.learn.builtin import (
    ANSWER_TAGS,
    END_OF_TEXT,
    MESSAGE_END,
    MESSAGE_START,
    TAGS,
    new_model,
    train_tokenizer,
)

SHAPE: dict[str, Any] = {"hidden_size": 64, "layers": 2, "heads": 2, "max_tokens": 128}
BYTES = train_tokenizer(["a tokenizer of bytes knows every text"], vocab_size=384)


def test_marks_and_tags_are_one_token_each(tiny_tokenizer: PreTrainedTokenizerFast) -> None:
    for mark in (END_OF_TEXT, MESSAGE_START, MESSAGE_END, *TAGS, *ANSWER_TAGS):
        [token] = tiny_tokenizer.encode(mark, add_special_tokens=False)
        assert tiny_tokenizer.decode([token]) == mark
    assert tiny_tokenizer.eos_token == MESSAGE_END


@given(st.text())
def test_any_text_comes_back(text: str) -> None:
    """But for Unicode's composed form, into which Qwen2's tokenizer brings it."""
    assert BYTES.decode(BYTES.encode(text, add_special_tokens=False)) == unicodedata.normalize("NFC", text)


def test_a_saved_model_loads_in_plain_transformers(tiny_tokenizer: PreTrainedTokenizerFast, tmp_path: Path) -> None:
    """And cuts text as it was trained to, though transformers has Qwen2's own word cutting."""
    model = new_model(tiny_tokenizer, **SHAPE, seed=1)
    model.save_pretrained(tmp_path)
    tiny_tokenizer.save_pretrained(tmp_path)
    loaded, tokenizer = AutoModelForCausalLM.from_pretrained(tmp_path), AutoTokenizer.from_pretrained(tmp_path)
    assert all(map(torch.equal, model.parameters(), loaded.parameters()))
    assert loaded.get_output_embeddings().weight is loaded.get_input_embeddings().weight
    assert loaded.config.max_position_embeddings == 128
    assert tokenizer.chat_template == tiny_tokenizer.chat_template
    text = '<tool_call>\n{"name": "search"}\n</tool_call><|im_end|>Born in 1968, it\'s said: a\n\n b \u00e9'
    assert tokenizer.encode(text) == tiny_tokenizer.encode(text)


@pytest.mark.parametrize(("hidden_size", "heads"), [(64, 3), (64, 4)])
def test_impossible_heads_are_refused(tiny_tokenizer: PreTrainedTokenizerFast, hidden_size: int, heads: int) -> None:
    """64 over 3 is no whole number; 64 over 4 is 16, and the engine on a CPU needs a multiple of 32."""
    with pytest.raises(ValueError, match=f"hidden_size 64 over {heads} heads gives heads of"):
        new_model(tiny_tokenizer, hidden_size=hidden_size, layers=1, heads=heads, max_tokens=64, seed=0)
