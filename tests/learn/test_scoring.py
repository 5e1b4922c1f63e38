"""Scores of tokens: micro-batches, chunks and blocks change nothing, whatever a model does to its logits."""

import dataclasses

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from transformers import (
    AutoModelForCausalLM,
    CohereConfig,
    Gemma2Config,
    GPT2Config,
    GraniteConfig,
    MixtralConfig,
    OPTConfig,
    PreTrainedConfig,
    PreTrainedModel,
)

from agent_r1.learn import scoring
from agent_r1.learn.scoring import (
    Compute,
    TokenScores,
    micro_batches,
    minibatches,
    output_of,
    pack_by_length,
    token_logprobs,
)
from tests.learn.learning import CPU, UPDATE, gradients, make_trajectory, with_changes

WORDS, HIDDEN = 97, 32
IDS = torch.tensor([[30, 31, 32, 33, 34], [40, 41, 42, 0, 0]])
MASK = torch.tensor([[False, True, False, True, True], [False, False, True, False, False]])
SHAPE = {"vocab_size": WORDS, "hidden_size": HIDDEN, "num_hidden_layers": 2, "num_attention_heads": 2}
OTHERS = {"num_key_value_heads": 2, "intermediate_size": 64}
CONFIGS = {
    "scaled": GraniteConfig(**SHAPE, **OTHERS, logits_scaling=8.0),
    "multiplied": CohereConfig(**SHAPE, **OTHERS, eos_token_id=1, logit_scale=0.1),
    "capped": Gemma2Config(**SHAPE, **OTHERS, head_dim=16),
    "of experts": MixtralConfig(**SHAPE, **OTHERS, num_local_experts=4),
    "older": GPT2Config(vocab_size=WORDS, n_embd=32, n_layer=2, n_head=2, eos_token_id=1, bos_token_id=1),
    "nested": OPTConfig(**SHAPE, ffn_dim=16, max_position_embeddings=32, word_embed_proj_dim=32),
}


def model_of(config: PreTrainedConfig) -> PreTrainedModel:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model: PreTrainedModel = AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        model.get_output_embeddings().weight *= 100  # so that a cap and a scale are felt
    return model


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_scores_are_the_models_own_whatever_it_does_to_its_logits(config: PreTrainedConfig) -> None:
    """To the bit, and so are the gradients."""
    model = model_of(config)
    own = model(input_ids=IDS).logits[:, :-1][MASK[:, 1:]].log_softmax(-1)
    own.gather(1, IDS[MASK].unsqueeze(1)).sum().backward()
    expected = gradients(model)
    logprobs, entropy = output_of(model, IDS, MASK).scores(entropy=True)
    logprobs.sum().backward()
    found = gradients(model)
    assert own.min() < -5
    assert torch.equal(logprobs, own.gather(1, IDS[MASK].unsqueeze(1)).squeeze(1))
    assert torch.equal(entropy, -(own.exp() * own).sum(-1))
    assert found.keys() == expected.keys()
    # the addition to tied embeddings comes in another order
    assert all(torch.allclose(found[name], expected[name], rtol=1e-5, atol=1e-6) for name in expected)


def test_a_first_token_and_a_model_that_reads_other_states_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model = model_of(CONFIGS["nested"])
    with pytest.raises(ValueError, match="selects the first token of a row, which nothing predicts"):
        output_of(model, IDS, torch.ones_like(MASK))
    monkeypatch.setattr(model, "get_decoder", lambda: model.base_model)  # its model asks the decoder in that
    with pytest.raises(ValueError, match=r"OPTForCausalLM does not go on from what its get_decoder\(\) says"):
        token_logprobs(model, IDS, MASK)


@pytest.fixture(params=[1, 14, 1000])
def rows_at_a_time(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scoring, "BLOCK", request.param)


def test_blocks_of_rows_change_no_bit(rows_at_a_time: None) -> None:
    draws = torch.Generator().manual_seed(0)
    logits = (4 * torch.randn(5, 7, generator=draws)).requires_grad_()
    chosen, given = torch.randint(7, (5,), generator=draws), torch.randn(5, generator=draws)
    own = -F.cross_entropy(logits, chosen, reduction="none")
    [expected] = torch.autograd.grad(own, logits, given)
    logprobs, _ = TokenScores.apply(logits, chosen, False)
    [found] = torch.autograd.grad(logprobs, logits, given)
    assert torch.equal(logprobs, own)
    assert torch.equal(found, expected)


def test_micro_batches_by_hand() -> None:
    # Sorted: 9 | 5 4 | 4 2 1 with a budget of 12: 9 alone, 2 rows of 5 are 10 (3 would be 15), 3 rows of 4 are 12.
    assert pack_by_length([[4], [9], [1], [5], [4], [2]], max_tokens=12) == [[1], [3, 0], [4, 5, 2]]
    # The contexts of a trajectory stay together: three rows of 4 are 12, and a fourth makes 16; four are too many.
    assert pack_by_length([[2, 3], [4], [3]], max_tokens=12) == [[1, 0], [2]]
    assert pack_by_length([[4], [4, 1, 1, 1], [2]], max_tokens=12) == [[0], [1], [2]]


def test_minibatches_split_all_rows_by_iteration_and_epoch() -> None:
    """Each row is one where there are fewer: a filter keeps a group of 4, and the world cut one of them short."""
    params = with_changes(UPDATE, minibatches=3, epochs=2)

    def split(iteration: int) -> list[list[list[int]]]:
        found = list(minibatches(range(10), params, seed=1, iteration=iteration))
        return [found[:3], found[3:]]

    for epoch in split(0):
        assert [len(part) for part in epoch] == [4, 3, 3]
        assert sorted(row for part in epoch for row in part) == list(range(10))
    assert split(0) == split(0)
    assert len({str(epoch) for iteration in range(2) for epoch in split(iteration)}) == 4
    few = list(minibatches(range(3), with_changes(params, minibatches=4), seed=0, iteration=0))
    assert sorted(few[:3]) == sorted(few[3:]) == [[0], [1], [2]]
    assert not list(minibatches([], params, seed=0, iteration=0))


def test_a_micro_batch_takes_entries_in_the_order_of_its_mask() -> None:
    lengths, starts = [2, 6, 1], [[0], [0, 4], [0]]
    rows = [make_trajectory(i, [0] * length, None, starts[i]) for i, length in enumerate(lengths)]
    sequences = [np.arange(10 * i, 10 * i + length, dtype=np.int32) for i, length in enumerate(lengths, start=1)]
    rows = [dataclasses.replace(row, token_ids=ids) for row, ids in zip(rows, sequences, strict=True)]
    masks = [np.isin(ids, [11, 21, 23, 25]) for ids in sequences]
    (batch,) = micro_batches(rows, masks, Compute(device=CPU, dtype=torch.float32, max_tokens=100))
    assert batch.rows == [1, 0]  # the longest first; the one without a selected token is left out
    assert batch.ids.tolist() == [[20, 21, 22, 23], [24, 25, 0, 0], [10, 11, 0, 0]]  # a context is a row
    assert batch.take(sequences).tolist() == batch.ids[batch.mask].tolist() == [21, 23, 25, 11]
    assert [piece.tolist() for piece in batch.split(batch.take(sequences))] == [[21, 23, 25], [11]]
