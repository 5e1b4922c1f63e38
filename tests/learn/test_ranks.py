"""A learner shared by two ranks against one that a process has for itself: gradients, metrics, weights, checkpoints."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM, Gemma3TextConfig, GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast

from agent_r1.devices.sharing import opened, packed
from agent_r1.learn import builtin, checkpoint
from agent_r1.learn.scoring import deal, pack_by_length
from agent_r1.params import load
from agent_r1.params.sections import override
from agent_r1.params.stages import ModelParams
from agent_r1.params.train import UpdateParams
from agent_r1.records import Source
from benchmarks import families
from tests.learn.learning import LORA, make_credit, make_trajectory
from tests.learn.ranked import Case, Found, in_ranks, learned, learner_of

TOLERANCE = 4e-6  # of the largest gradient
PARAMS = Path(__file__).parents[2] / "params.yaml"
HALVED = ("plain", "adapters")
LENGTHS = (9, 5, 12, 9, 30, 7, 21, 26)

# What each case changes: of the update, of the model, and whether there is a critic.
CASES: dict[str, tuple[dict[str, Any], dict[str, Any], bool]] = {
    "plain": ({}, {}, True),
    "sequence_mean": ({"aggregation": "sequence_mean", "ratio": "sequence"}, {}, False),
    "regularised": ({"kl_loss": 0.1, "entropy_bonus": 0.05, "importance_cap": 2.0}, {}, True),
    "cispo": ({"loss": "cispo", "dual_clip": 0.0, "clip_low": 1.0}, {}, False),
    "adapters": ({"kl_loss": 0.1}, {"lora": LORA}, True),
    "idle": ({"max_tokens_per_microbatch": 4, "entropy_bonus": 0.05}, {}, True),  # seven that are kept, each alone
    "recomputed and packed": ({}, {"gradient_checkpointing": True, "packing": True}, True),
    "experts": ({}, {"packing": True}, False),  # beside gated linear attention
}


def sources(length: int) -> list[int]:
    """Of an episode of two steps, or of one where it is short."""
    acting = length // 3
    prompt, action, observation = (int(each) for each in (Source.PROMPT, Source.ACTION, Source.OBSERVATION))
    first = [prompt] * 2 + [action] * acting
    return first + [observation] * (length - len(first) - acting) + [action] * acting


@pytest.fixture(scope="module")
def cases(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Case]:
    """Eight trajectories, one of which is not kept."""
    update, model = load(PARAMS).train.update, load(PARAMS).model
    experts = tmp_path_factory.mktemp("experts")
    families.make_model("Qwen3.5-MoE", experts)
    small = {"minibatches": 1, "max_tokens_per_microbatch": 32, "learning_rate_decay": "none", "learning_rate": 1e-3}
    own = {"critic": {"epochs": 1, "minibatches": 1, "warmup": {"iterations": 0, "explained_variance": 0, "limit": 0}}}
    drafts = [make_trajectory(index, sources(length)) for index, length in enumerate(LENGTHS)]
    sampled = [
        replace(
            each,
            token_ids=each.token_ids % 380,  # the words of the tiny model
            logprobs=np.where(each.action_mask, np.float32(-6.2), np.float32(0)),
        )
        for each in drafts
    ]
    credits_ = [make_credit(each, kept=index != 1) for index, each in enumerate(sampled)]
    return {
        name: Case(
            path=experts if name == "experts" else tiny_model,
            params=UpdateParams.model_validate(override(update.model_dump(), {**small, **own, **changes})),
            model=ModelParams.model_validate(model.model_copy(update={"dtype": "float32", **of_model}).model_dump()),
            with_critic=with_critic,
            trajectories=sampled,
            credits=credits_,
        )
        for name, (changes, of_model, with_critic) in CASES.items()
    }


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("ranks")


@pytest.fixture(scope="module")
def halved(
    cases: dict[str, Case], tiny_tokenizer: PreTrainedTokenizerFast, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Case]:
    """Learners that compute in bfloat16: the plain one, and one with layer norms."""
    plain = replace(cases["plain"], model=cases["plain"].model.model_copy(update={"dtype": "bfloat16"}))
    folder, words = tmp_path_factory.mktemp("norms"), len(tiny_tokenizer)
    norms = GPT2Config(vocab_size=words, n_embd=32, n_layer=1, n_head=2, n_positions=64)
    torch.manual_seed(0)  # no ratio may lie where rounding decides whether it is clipped
    GPT2LMHeadModel(norms).save_pretrained(folder)
    tiny_tokenizer.save_pretrained(folder)
    return {"bfloat16": plain, "layer norms": replace(plain, path=folder, with_critic=False)}


@pytest.fixture(scope="module")
def starts(
    cases: dict[str, Case], tiny_tokenizer: PreTrainedTokenizerFast, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Case]:
    """Learners that take no step: of files in bfloat16, and of one in float32 beneath adapters in bfloat16."""
    folder = tmp_path_factory.mktemp("starts")
    shape = {"num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 12}
    config = Gemma3TextConfig(vocab_size=len(tiny_tokenizer), hidden_size=24, intermediate_size=40, **shape)
    AutoModelForCausalLM.from_config(config).bfloat16().save_pretrained(folder)
    tiny_tokenizer.save_pretrained(folder)

    def start(name: str, path: Path, **changes: Any) -> Case:
        case = cases[name]
        return replace(case, path=path, updates=0, model=case.model.model_copy(update=changes))

    return {
        "a file in bfloat16": start("plain", folder),
        "a reference in bfloat16": start("plain", folder, dtype="bfloat16", packing=True),
        "adapters beside wider weights": start("adapters", folder),
        "adapters beside narrower weights": start("adapters", cases["adapters"].path, dtype="bfloat16"),
    }


@pytest.fixture(scope="module")
def by_rank(
    cases: dict[str, Case], halved: dict[str, Case], starts: dict[str, Case], folder: Path
) -> list[dict[str, Found]]:
    """All cases, learned by two ranks; two updates of some in one go and with a checkpoint between; and a fault."""
    limits, further = load(PARAMS).env.model_copy(update={"max_tokens": 16, "max_action_tokens": 8}), {}
    for name in HALVED:
        case, half = cases[name], folder / name
        further[f"{name} twice"] = replace(case, updates=2)
        further[f"{name} begun"] = replace(case, end=half, largest=limits)
        further[f"{name} gone on with"] = replace(case, start=half)
    plain = cases["plain"]
    further |= halved | starts
    broken = plain.trajectories[4]
    logprobs = np.where(np.arange(len(broken.token_ids)) == 5, np.float32(np.nan), broken.logprobs)
    trajectories = [replace(each, logprobs=logprobs) if each is broken else each for each in plain.trajectories]
    return in_ranks({**cases, **further, "broken": replace(plain, trajectories=trajectories)}, 2, folder)


@pytest.fixture(scope="module")
def shared(by_rank: list[dict[str, Found]]) -> dict[str, Found]:
    return by_rank[0]


def largest_difference(left: dict[str, Tensor], right: dict[str, Tensor]) -> float:
    assert left.keys() == right.keys()
    largest = max(tensor.abs().max().item() for tensor in right.values())
    return max((left[name] - right[name]).abs().max().item() for name in right) / largest


@pytest.mark.parametrize("name", CASES)
def test_two_ranks_learn_as_one_does(name: str, cases: dict[str, Case], shared: dict[str, Found]) -> None:
    alone, together = learned(cases[name]), shared[name]
    assert len(together.gradients) == len(alone.gradients) == 1 + cases[name].with_critic
    for left, right in zip(together.gradients, alone.gradients, strict=True):
        assert max(gradient.abs().max() for gradient in right.values()) > 1e-3
        assert largest_difference(left, right) < TOLERANCE
    assert together.metrics == [pytest.approx(each, rel=1e-5, abs=1e-6) for each in alone.metrics]
    for left, right in zip(together.scores, alone.scores, strict=True):
        for ours, theirs in zip(left, right, strict=True):
            np.testing.assert_allclose(ours, theirs, atol=2e-5)
    assert largest_difference(together.weights, alone.weights) < 1e-5
    assert together.kept == pytest.approx(alone.kept / 2, rel=0.01), "no rank keeps the weights of the others"


def test_copies_learn_as_one_process_does(cases: dict[str, Case], halved: dict[str, Case], tmp_path: Path) -> None:
    """Two pairs of ranks, each with all weights. One process goes on from their checkpoint."""
    names = ("plain", "adapters", "idle")
    further = {
        "begun": replace(cases["plain"], end=tmp_path / "half"),
        "chunks in bfloat16": replace(halved["bfloat16"], chunk=1024),
    }
    together = in_ranks({name: cases[name] for name in names} | further, 4, tmp_path, copies=2, defers=True)[0]
    for name in names:
        alone = learned(cases[name])
        for left, right in zip(together[name].gradients, alone.gradients, strict=True):
            assert largest_difference(left, right) < TOLERANCE
        assert largest_difference(together[name].weights, alone.weights) < 1e-5
        assert together[name].kept == pytest.approx(alone.kept / 2, rel=0.01), "half of the weights, twice"
    straight = learned(replace(cases["plain"], updates=2))
    later = learned(replace(cases["plain"], start=tmp_path / "half"))
    assert largest_difference(later.weights, straight.weights) < 2e-5, "of two updates"
    [ours, _], [theirs, _] = together["chunks in bfloat16"].gradients, learned(halved["bfloat16"]).gradients
    left, right = (torch.cat([each[key].flatten() for key in theirs]) for each in (ours, theirs))
    assert (left - right).norm() < 0.05 * right.norm()


def test_ranks_start_with_the_bits_of_one(starts: dict[str, Case], shared: dict[str, Found]) -> None:
    """Weights, adapters and buffers of policy, critic and reference, in the same types."""
    for name, case in starts.items():
        found = learned(case)
        alone, together = found.start, shared[name].start
        assert found.sums == shared[name].sums != {}
        assert alone.keys() == together.keys()
        for each, tensor in alone.items():
            assert together[each].dtype is tensor.dtype, (name, each)
            assert torch.equal(together[each], tensor), (name, each)


@pytest.mark.parametrize("name", ["bfloat16", "layer norms"])
def test_ranks_in_bfloat16_learn_as_autocast(name: str, halved: dict[str, Case], shared: dict[str, Found]) -> None:
    """Within what rounding the weights of norms and words does to it; weights and gradients stay float32."""
    alone, together = learned(halved[name]), shared[name]
    for left, right in zip(together.scores[1], alone.scores[1], strict=True):
        np.testing.assert_allclose(left, right, atol=0.03)
    for left, right in zip(together.gradients, alone.gradients, strict=True):
        ours, theirs = (torch.cat([each[key].flatten() for key in right]) for each in (left, right))
        assert ours.dtype is torch.float32
        assert (ours - theirs).norm() < 0.05 * theirs.norm()
    assert all(weight.dtype is torch.float32 for weight in together.weights.values())


@pytest.mark.parametrize("name", HALVED)
def test_two_ranks_go_on_with_the_same_bits(name: str, shared: dict[str, Found]) -> None:
    """From their checkpoint as without it; and the first update is the same bits, where one was measured before too."""
    straight, later = shared[f"{name} twice"].weights, shared[f"{name} gone on with"].weights
    assert straight.keys() == later.keys()
    assert all(torch.equal(straight[each], later[each]) for each in straight)
    once, again = shared[name].weights, shared[f"{name} begun"].weights
    assert all(torch.equal(once[each], again[each]) for each in once)
    assert not all(torch.equal(once[each], straight[each]) for each in once)


def test_ranks_may_change(cases: dict[str, Case], shared: dict[str, Found], folder: Path, tmp_path: Path) -> None:
    """One by itself, and three, who come to what the two that wrote it do."""
    later = {name: replace(cases[name], start=folder / name) for name in HALVED}
    three = in_ranks(later, 3, tmp_path)[0]
    for name, case in later.items():
        for found in (learned(case), three[name]):
            assert largest_difference(found.weights, shared[f"{name} twice"].weights) < 1e-5


@pytest.mark.parametrize("name", HALVED)
def test_ranks_write_the_policy_that_one_writes(
    name: str, cases: dict[str, Case], shared: dict[str, Found], folder: Path, tmp_path: Path
) -> None:
    """The same files, tied weights once; what is merged of adapters may be rounded differently."""
    learner = learner_of(cases[name])
    checkpoint.load(folder / name, learner)
    learner.save_policy(tmp_path / "policy")
    ours, theirs = (
        {path.relative_to(root): path for path in root.rglob("*") if path.is_file()}
        for root in (tmp_path / "policy", folder / name / "policy")
    )
    assert ours.keys() == theirs.keys()
    for each in ours:
        if name == "adapters" and each == Path("model.safetensors"):
            left, right = load_file(ours[each]), load_file(theirs[each])
            assert left.keys() == right.keys()
            assert all(torch.allclose(left[key], right[key], atol=1e-6) for key in left)
        else:
            assert ours[each].read_bytes() == theirs[each].read_bytes(), each
    learner.save_policy(tmp_path / "handed", halved=True)
    ours, theirs = (load_file(root / "model.safetensors") for root in (tmp_path / "handed", folder / f"{name} handed"))
    assert ours.keys() == theirs.keys()
    for each, weight in ours.items():
        assert weight.dtype is theirs[each].dtype is (torch.bfloat16 if weight.dim() > 1 else torch.float32)
        assert name == "adapters" or torch.equal(weight, theirs[each]), "two ranks round as one does"


def test_all_ranks_raise_what_one_finds(cases: dict[str, Case], by_rank: list[dict[str, Found]]) -> None:
    [culprit] = {each["broken"].fault for each in by_rank}
    assert cases["plain"].trajectories[4].trajectory_id in culprit
    assert "not finite" in culprit


LENGTHS_OF_TRAJECTORIES = st.lists(st.lists(st.integers(1, 60), min_size=1, max_size=3), max_size=30)


@given(lengths=LENGTHS_OF_TRAJECTORIES, max_tokens=st.integers(1, 200), ranks=st.integers(1, 6))
def test_dealing(lengths: list[list[int]], max_tokens: int, ranks: int) -> None:
    """Every trajectory once, as many turns for all as they need at least, and no budget is exceeded by what fits it."""
    hands = [deal(lengths, max_tokens, rank=rank, ranks=ranks) for rank in range(ranks)]
    dealt = [pack for hand in hands for pack, idle in hand if not idle]
    assert sorted(index for pack in dealt for index in pack) == list(range(len(lengths)))
    [turns] = {len(hand) for hand in hands}
    assert turns == -(-len(pack_by_length(lengths, max_tokens)) // ranks)
    for pack in dealt:
        padded = max(max(lengths[index]) for index in pack) * sum(len(lengths[index]) for index in pack)
        assert len(pack) == 1 or padded <= max_tokens
    assert all(len(pack) == 1 for hand in hands for pack, idle in hand if idle)


def test_a_model_from_scratch_arrives_at_the_other_ranks_as_it_is(tiny_tokenizer: Any) -> None:
    model = builtin.new_model(tiny_tokenizer, hidden_size=32, layers=2, heads=1, max_tokens=16, seed=3)
    drawn = torch.random.get_rng_state()
    copy = builtin.copy_of(*opened(packed((model.config.to_dict(), model.state_dict())), ()))
    assert torch.equal(torch.random.get_rng_state(), drawn)
    assert copy.config.to_dict() == model.config.to_dict()
    ids = torch.arange(8)[None]
    assert torch.equal(copy(ids).logits, model(ids).logits)
    assert {name: weight.requires_grad for name, weight in copy.named_parameters()} == {
        name: weight.requires_grad for name, weight in model.named_parameters()
    }
