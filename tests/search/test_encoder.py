"""Vectors by hand: prefixes, pooling, length 1, and that neither batch nor padding changes a passage."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModel, AutoTokenizer

from agent_r1.params import DenseParams
from agent_r1.search.dense import Encoder

TEXTS = ["tesk is a city in veld .", "twin", "mara quill was born in tesk", "veld is a country"]


def by_hand(params: DenseParams, text: str) -> Any:
    """The unit vector of one text, alone and without padding."""
    tokenizer, model = AutoTokenizer.from_pretrained(params.encoder), AutoModel.from_pretrained(params.encoder).eval()
    with torch.no_grad():
        hidden = model(**tokenizer(text, return_tensors="pt")).last_hidden_state[0]
    vector = hidden[0] if params.pooling == "cls" else hidden.mean(0)
    return (vector / vector.norm()).numpy()


@pytest.mark.parametrize("pooling", ["mean", "cls"])
def test_vectors_have_their_prefix_their_pooling_and_length_1(dense_params: DenseParams, pooling: str) -> None:
    params = dense_params.model_copy(update={"pooling": pooling})
    encoder = Encoder(params)
    expected = [by_hand(params, "passage: " + text) for text in TEXTS]
    np.testing.assert_allclose(encoder.passages(TEXTS), expected, atol=1e-6)
    np.testing.assert_allclose(encoder.query(TEXTS[0])[0], by_hand(params, "query: " + TEXTS[0]), atol=1e-6)
    np.testing.assert_allclose(np.linalg.norm(encoder.passages(TEXTS), axis=1), 1, atol=1e-6)


def test_long_texts_are_cut(dense_params: DenseParams) -> None:
    encoder = Encoder(dense_params.model_copy(update={"max_tokens": 6, "passage_prefix": ""}))
    cut, longer = encoder.passages(["tesk is a city", "tesk is a city in veld ."])  # [CLS], four words, [SEP]
    np.testing.assert_allclose(cut, longer, atol=1e-6)


def test_more_tokens_than_the_encoder_reads_are_refused(dense_params: DenseParams) -> None:
    with pytest.raises(ValueError, match=r"search\.dense\.max_tokens 33 is more than encoder .* lower it to 32"):
        Encoder(dense_params.model_copy(update={"max_tokens": 33}))
