"""What several rooms' tests share: a small tokenizer and a small untrained model on disk."""

from __future__ import annotations

from pathlib import Path

import pytest
from transformers import PreTrainedTokenizerFast

from agent_r1.policy.builtin import new_model, train_tokenizer

TEXTS = [
    'You answer questions. Tools: search(query)\n{"name": "search", "arguments": {"query": "capital of Veld"}}',
    "The director of the film is Mara Quill. Mara Quill was born in Tesk in 1950. Tesk is a city in Veld.",
    "Search for facts, then answer. yes no <|im_end|> </tool_response>",
] * 20


@pytest.fixture(scope="session")
def tiny_tokenizer() -> PreTrainedTokenizerFast:
    return train_tokenizer(TEXTS, vocab_size=512)


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory, tiny_tokenizer: PreTrainedTokenizerFast) -> Path:
    """A Hugging Face folder: 2 layers, hidden 64, tied embeddings, random weights of seed 0."""
    folder = tmp_path_factory.mktemp("tiny_model")
    new_model(tiny_tokenizer, hidden_size=64, layers=2, heads=2, max_tokens=512, seed=0).save_pretrained(folder)
    tiny_tokenizer.save_pretrained(folder)
    return folder
