from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
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
    Qwen2Config,
)

from agent_r1.learn import scoring
from agent_r1.learn.model import load_policy
from agent_r1.learn.scoring import TokenScores, output_of, token_logprobs
from tests.learn.learning import CPU, gradients

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


@pytest.fixture
def chunks_of_two_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scoring, "CHUNK", 2 * WORDS)


def test_selected_logprobs_equal_those_of_the_full_forward(tiny_model: Path) -> None:
    model = load_policy(tiny_model, device=CPU)
    full = model(input_ids=IDS).logits.log_softmax(-1)
    expected = [full[row, token - 1, IDS[row, token]].item() for row, token in MASK.nonzero().tolist()]
    assert token_logprobs(model, IDS, MASK).tolist() == pytest.approx(expected, abs=1e-5)


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


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
@pytest.mark.parametrize("in_parts", [True, False])
def test_chunks_change_nothing_but_rounding(
    config: PreTrainedConfig, in_parts: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, weights = model_of(config), torch.tensor([1.0, -2.0, 0.5, 3.0])

    def scores() -> Tensor:
        """[N] of the four tokens, after the backward of a sum that weighs each of them and its entropy."""
        whole = output_of(model, IDS, MASK)
        parts, start, seen = whole.cut() if in_parts else [whole], 0, []
        for part in parts:
            logprobs, entropy = part.scores(entropy=True)
            stop = start + len(logprobs)
            ((logprobs + 0.1 * entropy) * weights[start:stop]).sum().backward()
            seen.append(logprobs.detach())
            start = stop
        whole.join(parts)
        assert start == 4
        return torch.cat(seen)

    expected, all_at_once = scores(), gradients(model)
    monkeypatch.setattr(scoring, "CHUNK", 2 * WORDS)
    assert len(output_of(model, IDS, MASK).cut()) == 2
    assert torch.allclose(scores(), expected, atol=1e-5)
    largest, found = max(float(gradient.abs().max()) for gradient in all_at_once.values()), gradients(model)
    assert found.keys() == all_at_once.keys()
    for name, gradient in found.items():
        assert torch.allclose(gradient, all_at_once[name], atol=1e-6 * largest), name


class Largest(TorchDispatchMode):
    """Notes the most logits of any tensor that is made, the layer's weights aside."""

    most = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        for each in made if isinstance(made, (tuple, list)) else [made]:
            if isinstance(each, Tensor) and each.shape[-1:] == (WORDS,) and each.shape[-2:] != (HIDDEN, WORDS):
                self.most = max(self.most, each.numel())
        return made


@pytest.mark.parametrize("learn", [True, False])
@pytest.mark.parametrize("in_parts", [True, False])
def test_no_more_logits_exist_than_a_chunk_has(chunks_of_two_tokens: None, learn: bool, in_parts: bool) -> None:
    model = model_of(CONFIGS["scaled"])
    with Largest() as largest, torch.set_grad_enabled(learn):
        whole = output_of(model, IDS, MASK)
        parts = whole.cut() if in_parts else [whole]
        for part in parts:
            logprobs, _ = part.scores(entropy=False)
            if learn:
                logprobs.sum().backward()
    assert largest.most == 2 * WORDS


def test_hidden_states_of_masked_tokens_have_exactly_no_gradient(tiny_model: Path) -> None:
    model = load_policy(tiny_model, device=CPU)
    seen: list[Tensor] = []
    model.base_model.register_forward_hook(lambda _module, _args, output: seen.append(output.last_hidden_state))
    logprobs = token_logprobs(model, IDS, MASK)
    seen[0].retain_grad()
    logprobs.sum().backward()
    assert len(logprobs) == MASK.sum()
    assert seen[0].grad is not None
    assert torch.equal((seen[0].grad != 0).any(-1), F.pad(MASK[:, 1:], (0, 1)))


def test_the_first_token_of_a_row_is_refused(tiny_model: Path) -> None:
    with pytest.raises(ValueError, match="selects the first token of a row, which nothing predicts"):
        output_of(load_policy(tiny_model, device=CPU), IDS, torch.ones_like(MASK))


def test_a_model_that_reads_other_states_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model = model_of(CONFIGS["nested"])
    monkeypatch.setattr(model, "get_decoder", lambda: model.base_model)  # its model asks the decoder in that
    with pytest.raises(ValueError, match=r"OPTForCausalLM does not go on from what its get_decoder\(\) says"):
        token_logprobs(model, IDS, MASK)


@pytest.fixture(params=[1, 14, 1000])
def rows_at_a_time(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scoring, "BLOCK", request.param)


@pytest.mark.parametrize(("kind", "chunks", "block"), [("cpu", 3, 2**20), ("cuda", 1, 2**24)])
def test_a_gpu_holds_more_logits_at_a_time(kind: str, chunks: int, block: int) -> None:
    """500 tokens over 152,000 words are 76 million logits, of which 2^25 or 2^27 are a chunk."""
    model = AutoModelForCausalLM.from_config(
        Qwen2Config(vocab_size=152000, hidden_size=8, num_hidden_layers=1, num_attention_heads=2)
    )
    with FakeTensorMode():
        tokens = torch.empty(500, 8, device=kind)
        assert scoring.Output(model, None, tokens, tokens)._chunks == chunks
    assert scoring.room(kind)[1] == block


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


def test_gradients_agree_with_finite_differences(rows_at_a_time: None) -> None:
    draws = torch.Generator().manual_seed(0)
    logits = torch.randn(5, 7, generator=draws, dtype=torch.float64).requires_grad_()
    chosen = torch.randint(7, (5,), generator=draws)
    assert torch.autograd.gradcheck(lambda logits: TokenScores.apply(logits.clone(), chosen, True), [logits])


def test_whoever_needs_the_logits_that_became_logprobs_is_refused() -> None:
    logits = torch.randn(5, 7).requires_grad_()
    needed = logits.exp()  # whose gradient is of itself
    logprobs, _ = TokenScores.apply(needed, torch.zeros(5, dtype=torch.long), False)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        logprobs.sum().backward()
