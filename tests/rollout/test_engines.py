"""Choosing a token, padding and generating, on numbers that can be followed by hand."""

from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, PreTrainedModel

from agent_r1.rollout.engines import choose, draw_uniforms, generate
from tests.cases import cases

THREE = torch.tensor([[0.2, 0.3, 0.5]]).log() + 7.0  # logits: adding to all of them changes nothing


@cases("temperature, uniform, token")
def test_token_is_where_cumulated_probabilities_pass_it(temperature: float, uniform: float, token: int) -> None:
    tokens, logprobs = choose(THREE, torch.tensor([uniform], dtype=torch.float64), temperature)
    assert tokens.tolist() == [token]
    assert logprobs.exp().tolist() == pytest.approx([[0.2, 0.3, 0.5][token]])


@given(st.integers(0, 4), st.floats(0, 1, exclude_max=True), st.sampled_from([0.0, 0.7, 1.0]))
def test_what_is_impossible_is_never_chosen(possible: int, uniform: float, temperature: float) -> None:
    logits = torch.full((1, 5), -torch.inf)
    logits[0, possible] = 0.0
    tokens, logprobs = choose(logits, torch.tensor([uniform], dtype=torch.float64), temperature)
    assert (tokens.item(), logprobs.item()) == (possible, 0.0)


@pytest.fixture(scope="module")
def model(tiny_model: Path) -> PreTrainedModel:
    loaded: PreTrainedModel = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)
    return loaded.eval()


CONTEXTS = [[1, 2, 3, 4, 5, 6, 7, 8], [9], [3, 1], [4, 4, 4, 4]]
LIMITS = [1, 6, 3, 9]


def test_company_and_padding_change_nothing(model: PreTrainedModel) -> None:
    """Rows leave after 1, 3, 6 and 9 tokens, so that the cache is cut down three times."""
    uniforms = [draw_uniforms(seed, limit) for seed, limit in enumerate(LIMITS)]
    together = generate(model, CONTEXTS, uniforms, end_ids=(), temperature=1.0)
    assert [len(ids) for ids, _ in together] == LIMITS
    for context, uniform, (ids, logprobs) in zip(CONTEXTS, uniforms, together, strict=True):
        [(alone, alone_logprobs)] = generate(model, [context], [uniform], end_ids=(), temperature=1.0)
        assert alone == ids
        assert logprobs == pytest.approx(alone_logprobs, abs=1e-5)
