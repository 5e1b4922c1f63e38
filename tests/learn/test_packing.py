"""Contexts packed into one row: what a model says of them, and its gradients, are those of contexts apart."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import (
    AutoModelForCausalLM,
    GPT2Config,
    Lfm2Config,
    MambaConfig,
    MistralConfig,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3_5TextConfig,
    Qwen3Config,
)

from agent_r1.learn.gradients import add_critic_gradient, add_policy_gradient, join_credit
from agent_r1.learn.learner import Learner
from agent_r1.learn.model import SPANS, attend, load_policy, pack, recompute_activations, see
from agent_r1.learn.prefixes import Neighbours, Segment, Tree
from agent_r1.learn.scoring import deal, pack_by_length, pack_tightly, pad, token_logprobs
from tests.learn.learning import CPU, Samples, gradients

SHAPE = {"vocab_size": 97, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
OTHERS = {"num_key_value_heads": 2, "intermediate_size": 64}
CONFIGS = {
    "plain": Qwen2Config(**SHAPE, **OTHERS),
    "normed": Qwen3Config(**SHAPE, **OTHERS, head_dim=16),
    "windows": MistralConfig(**SHAPE, **OTHERS, sliding_window=3),
    "older": GPT2Config(vocab_size=97, n_embd=32, n_layer=2, n_head=2, eos_token_id=1, bos_token_id=1),
}
# Layers of other kinds than attention: gated linear attention computes in float32 alone.
LINEAR = {
    "recurrences": Qwen3_5TextConfig(
        **SHAPE | {"num_hidden_layers": 4},
        **OTHERS,
        head_dim=16,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=8,
        linear_value_head_dim=8,
    ),
    "convolutions": Lfm2Config(**SHAPE, **OTHERS, layer_types=["conv", "full_attention"]),
}
IDS = torch.tensor([[30, 31, 32, 33, 34, 35], [40, 41, 42, 43, 0, 0], [50, 51, 0, 0, 0, 0]])
MASK = torch.tensor(
    [
        [False, True, False, False, True, False],
        [False, False, True, True, False, False],
        [False, False, False, False, False, False],
    ]
)


def model_of(config: PreTrainedConfig) -> PreTrainedModel:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model: PreTrainedModel = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa").eval()
    with torch.no_grad():
        for weight in model.parameters():
            weight *= 5  # so that what a token attends to is felt
    return model


def learned(model: PreTrainedModel, ids: Tensor, mask: Tensor, weights: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """The logprobs of the masked tokens, and the gradients of their weighted sum."""
    logprobs = token_logprobs(model, ids, mask)
    (logprobs * weights).sum().backward()
    return logprobs.detach(), gradients(model)


def test_packed_rows_by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of three contexts the states up to the last token asked for: four, three and none. Those before one come back."""
    model = model_of(CONFIGS["plain"])
    pack(model)
    given: list[dict[str, Any]] = []
    forward = model.base_model.forward
    monkeypatch.setattr(model.base_model, "forward", lambda **named: (given.append(named), forward(**named))[1])
    output, hidden = see(model.base_model, IDS, MASK)
    [named] = given
    assert named["input_ids"].tolist() == [[30, 31, 32, 33, 40, 41, 42]]
    assert named["position_ids"].tolist() == [[0, 1, 2, 3, 0, 1, 2]]
    assert named["cu_seq_lens_q"].tolist() == named["cu_seq_lens_k"].tolist() == [0, 4, 7]
    assert named["max_length_q"] == 4
    assert hidden.tolist() == output.last_hidden_state[0, [0, 3, 5, 6]].tolist()


@pytest.mark.parametrize("recomputed", [False, True])
@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_packed_logprobs_and_gradients_are_those_of_padded_rows(config: PreTrainedConfig, recomputed: bool) -> None:
    """In float64: by how much float32 differs depends on the processor."""
    model, weights = model_of(config).double(), torch.tensor([1.0, -2.0, 0.5, 3.0])
    if recomputed:
        recompute_activations(model)

    expected, apart = learned(model, IDS, MASK, weights)
    pack(model)
    found, together = learned(model, IDS, MASK, weights)
    assert expected.std() > 0.1
    assert torch.allclose(found, expected, atol=1e-6)  # logprobs are float32
    largest = max(float(gradient.abs().max()) for gradient in apart.values())
    assert together.keys() == apart.keys()
    for name, gradient in together.items():
        assert torch.allclose(gradient, apart[name], atol=1e-12 * largest), name


# Of 40 tokens that all share, and 33 more that two do; the last context ends inside of what it shares.
SHARED = [[*range(40), *tail] for tail in ([*range(50, 90)], [*range(50, 83), 7, 8], [9, 8, 7], [])] + [
    [96, *range(50)]
]


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_gradients_of_contexts_that_begin_alike_are_those_of_contexts_apart(config: PreTrainedConfig) -> None:
    """With a window of three tokens too, which a segment's first queries have in the one before. Norms are float32."""
    model = model_of(config).double()
    ids = pad([np.array(tokens) for tokens in SHARED], torch.long)
    mask = torch.zeros_like(ids, dtype=torch.bool)
    for row, tokens in enumerate(SHARED):
        mask[row, [5, 39, len(tokens) - 1]] = True
    weights = torch.linspace(-1, 2, int(mask.sum()))
    rows = []

    expected, apart = learned(model, ids, mask, weights)
    pack(model)
    with model.get_input_embeddings().register_forward_hook(lambda _, inputs, __: rows.append(inputs[0].shape[1])):
        logprobs, together = learned(model, ids, mask, weights)
    assert rows == [39 + 34 + 6 + 1 + 3 + 50]  # without the last token of each context, which predicts nothing
    assert torch.allclose(logprobs, expected, atol=1e-6)  # logprobs are float32
    largest = max(float(gradient.abs().max()) for gradient in apart.values())
    for name, gradient in together.items():
        assert torch.allclose(gradient, apart[name], atol=1e-6 * largest), name


def test_tree_of_contexts_by_hand() -> None:
    lengths = [len(tokens) for tokens in SHARED]
    ids = pad([np.array(tokens) for tokens in SHARED], torch.long)
    tree = Tree.of(ids, torch.tensor(lengths), shared=True)
    spans = {(segment.start, segment.stop, len(segment.path)) for segment in tree.segments}
    assert spans == {(0, 40, 1), (40, 73, 2), (73, 80, 3), (73, 75, 3), (40, 43, 2), (0, 51, 1)}
    for row, length in enumerate(lengths):
        assert ids.flatten()[tree.source][tree.place[row, :length]].tolist() == SHARED[row]
        assert tree.positions[tree.place[row, :length]].tolist() == [*range(length)]


def test_neighbours_share_a_pack_and_count_once() -> None:
    """The two of 73 alike tokens cost 80, and 75 - 73 with an eighth of 73; the 40 of the next cost 5."""
    contexts = [np.array(tokens, np.int32) for tokens in SHARED]
    neighbours = Neighbours.of(contexts)
    lengths = [len(context) for context in contexts]
    [alike] = [pack for pack in neighbours.packs(lengths, 80 + 2 + 10 + 3 + 5 + 5) if 0 in pack]
    assert {*alike} == {0, 1, 2, 3}
    assert sorted(map(len, neighbours.packs(lengths, 40))) == [1, 1, 1, 1, 1]


@pytest.mark.parametrize("config", LINEAR.values(), ids=LINEAR)
def test_states_and_gradients_of_linear_layers_are_those_of_contexts_alone(config: PreTrainedConfig) -> None:
    """Padded to the right without a mask, and packed. The lengths are those that one packed pass computes."""
    model = model_of(config)
    lengths = [5, 3, 1]

    def learned(*rows: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        model.zero_grad()
        states = torch.cat([see(model.base_model, ids, mask)[1] for ids, mask in rows])
        (states * torch.linspace(-1, 1, states.shape[1])).square().sum().backward()
        return states.detach(), torch.cat([gradient.flatten() for gradient in gradients(model).values()])

    read = torch.arange(6) <= torch.tensor(lengths)[:, None]
    read[:, 0] = False
    alone = learned(*((IDS[at : at + 1, : n + 1], read[at : at + 1, : n + 1]) for at, n in enumerate(lengths)))
    padded = learned((IDS, read))
    pack(model)
    for found in (padded, learned((IDS, read))):
        for values, expected in zip(found, alone, strict=True):
            assert (values - expected).norm() <= 1e-5 * expected.norm()


@pytest.mark.parametrize("config", LINEAR.values(), ids=LINEAR)
def test_layer_that_drops_a_boundary_is_refused(config: PreTrainedConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    """A millionth of the token before, which no difference of states would show in bfloat16."""
    monkeypatch.setattr("agent_r1.learn.model._run_by_context", lambda mixer: None)
    model = model_of(config)
    for name, weight in model.named_parameters():
        if "conv.weight" in name or "conv1d.weight" in name:
            weight.data[:, :, :-1] *= 1e-6
        if name.endswith("A_log"):
            weight.data.fill_(3.0)  # the recurrence forgets at once
    with pytest.raises(ValueError, match="does not keep contexts apart"):
        pack(model.to(torch.bfloat16))


def test_a_model_that_mixes_tokens_otherwise_is_refused() -> None:
    config = MambaConfig(vocab_size=97, hidden_size=32, num_hidden_layers=2, state_size=4)
    model = AutoModelForCausalLM.from_config(config).eval()
    with pytest.raises(ValueError, match=r"(does not keep contexts apart|cannot be packed).* set model.packing: false"):
        pack(model)


def test_a_model_that_does_not_hand_on_where_contexts_begin_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model = model_of(CONFIGS["plain"])
    for layer in model.base_model.layers:
        plain = layer.self_attn.forward
        deaf = lambda plain=plain, tree=None, **named: plain(**named)  # noqa: E731
        monkeypatch.setattr(layer.self_attn, "forward", deaf)
    with pytest.raises(ValueError, match="does not keep contexts apart"):
        pack(model)


def test_long_and_short_share_a_pack_without_padding() -> None:
    """Twelve tokens: 9 + 3 and 5 + 4 + 2 fit, where rows of 5 would be three; two contexts count with both."""
    lengths = [[5], [9], [4], [1, 2], [2]]
    assert pack_by_length(lengths, 12) == [[1], [0, 2], [3, 4]]
    assert pack_tightly(lengths, 12) == [[1, 3], [0, 2, 4]]
    assert pack_tightly([[20], [3]], 12) == [[0], [1]]
    # Two trajectories for each of two ranks: 9 + 1 and 6 + 4, where alike ones make 9 + 6 and 4 + 1.
    lengths = [[9], [6], [4], [1]]
    for packed, shares in ((False, [[0, 1], [2, 3]]), (True, [[0, 3], [1, 2]])):
        assert [deal(lengths, 20, packed=packed, rank=rank, ranks=2) for rank in range(2)] == [
            [(each, False)] for each in shares
        ]


@pytest.mark.parametrize("rotated", [torch.bfloat16, torch.float32])
def test_the_kernel_is_called_as_it_is_declared(rotated: torch.dtype) -> None:
    """On tensors of a GPU that have shapes and no numbers: grouped heads, a window, two contexts that share a segment.

    Over float32 weights, under autocast, rotary positions leave queries and keys in float32.
    """
    with FakeTensorMode():
        query = torch.empty(1, 4, 7, 16, device="cuda", dtype=rotated)
        key = torch.empty(1, 2, 7, 16, device="cuda", dtype=rotated)
        value = torch.empty(1, 2, 7, 16, device="cuda", dtype=torch.bfloat16)
        starts = torch.empty(4, device="cuda", dtype=torch.int32)
        segments = [Segment(0, 0, 3, (0,)), Segment(0, 3, 5, (0, 1)), Segment(1, 3, 5, (0, 2))]
        for window in (None, 3):
            ends = dict(zip(SPANS, (starts, starts, 3, 5), strict=True))
            tree = Tree(segments, starts, starts, starts)
            options = {"scaling": 0.25, "sliding_window": window, "tree": tree, **ends}
            attended, _ = attend(nn.Module(), query, key, value, None, **options)
            assert attended.shape == (1, 7, 4, 16)
            assert attended.dtype is torch.bfloat16


def test_a_learner_learns_packed_what_it_learns_padded(make_learner: Callable[..., Learner], samples: Samples) -> None:
    """Values, logprobs, and the gradients of policy and critic, in micro-batches of some trajectories each."""
    trajectories, credits = samples
    credits_, found = credits, []
    for packing in (False, True):
        learner = make_learner(packing=packing, max_tokens_per_microbatch=24, kl_loss=0.1)
        nn.init.normal_(learner.critic.head.weight, generator=torch.Generator().manual_seed(0))
        scores = [*learner.values(trajectories), *learner.logprobs(trajectories)]
        rows = join_credit(learner.policy, trajectories, credits_, learner.params, learner.compute)
        add_policy_gradient(learner.policy, rows, 10, learner.params, learner.compute, learn=True)
        add_critic_gradient(learner.critic, rows, 10, learner.params.critic, learner.compute)
        found.append((scores, [gradients(learner.policy), gradients(learner.critic)]))
    (padded_scores, padded), (packed_scores, packed) = found
    for ours, theirs in zip(packed_scores, padded_scores, strict=True):
        np.testing.assert_allclose(ours, theirs, atol=1e-4)
    for together, apart in zip(packed, padded, strict=True):
        largest = max(float(gradient.abs().max()) for gradient in apart.values())
        assert together.keys() == apart.keys()
        assert all(torch.allclose(together[name], apart[name], atol=4e-6 * largest) for name in apart)


def test_what_is_saved_of_a_packed_model_is_an_ordinary_one(tiny_model: Path, tmp_path: Path) -> None:
    load_policy(tiny_model, device=CPU, packed=True).save_pretrained(tmp_path)
    assert "agent_r1" not in (tmp_path / "config.json").read_text()
