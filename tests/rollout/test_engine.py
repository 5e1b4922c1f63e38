"""Every engine keeps the same promises; what only one of them promises comes last."""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from agent_r1.params import EngineParams, load
from agent_r1.records import StopReason
from agent_r1.rollout.chat import Chat
from agent_r1.rollout.engines import open_engine
from agent_r1.rollout.sampling import Action, Engine, EngineError, Request
from agent_r1.rollout.transformers_engine import TransformersEngine
from agent_r1.rollout.vllm_engine import VllmEngine
from agent_r1.seeds import derive

CLOSE = 1e-4  # nats, in float32
KINDS = ["vllm", "transformers", "server"]
PARAMS = Path(__file__).parents[2] / "params.yaml"

Open = Callable[..., Engine]


@pytest.fixture(scope="module", params=KINDS)
def open_kind(request: pytest.FixtureRequest) -> Open:
    """`open_engine` for each kind; a batch of transformers is small, so that there are several."""
    settings = load(PARAMS).engine.model_dump() | {"kind": request.param, "transformers": {"batch_size": 10}}
    if request.param == "server":
        settings["server"]["urls"] = [request.getfixturevalue("engine_server")]
    return partial(open_engine, EngineParams.model_validate(settings))


@pytest.fixture(scope="module")
def engine(open_kind: Open, tiny_model: Path, chat: Chat) -> Iterator[Engine]:
    """Samples with the weights that the last test loaded; a test that minds loads its own."""
    with open_kind(tiny_model, end_id=chat.end_id, max_tokens=512) as engine:
        yield engine


def requests(count: int = 24, max_tokens: int = 30) -> list[Request]:
    """Contexts of 20 to 40 arbitrary tokens."""
    rng = np.random.default_rng(0)
    return [
        Request(
            episode=index,
            step=0,
            context=rng.integers(0, 256, 20 + index % 21).tolist(),
            seed=derive(index),
            max_tokens=max_tokens,
        )
        for index in range(count)
    ]


@torch.no_grad()
def learner_logprobs(folder: Path, ids: list[int]) -> NDArray[np.float32]:
    """[T - 1] what transformers thinks of the tokens after the first."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    logits = model(torch.tensor([ids])).logits[0, :-1]
    return logits.log_softmax(-1).gather(1, torch.tensor(ids[1:])[:, None])[:, 0].numpy()


def bits(actions: list[Action]) -> list[tuple[list[int], bytes]]:
    return [(action.token_ids, action.logprobs.tobytes()) for action in actions]


@pytest.fixture(scope="module")
def changed_model(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model with embeddings moved far enough to change what it says; they are tied to its output."""
    model = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)
    generator = torch.Generator().manual_seed(1)
    weight = model.get_input_embeddings().weight
    assert weight is model.get_output_embeddings().weight
    weight.data += 0.2 * torch.randn(weight.shape, generator=generator)
    folder = tmp_path_factory.mktemp("changed")
    model.save_pretrained(folder)
    return folder


def test_actions_end_with_the_end_token_or_at_their_limit(engine: Engine, chat: Chat) -> None:
    asked = requests(200)
    actions = engine.sample(asked)
    assert {action.stop_reason for action in actions} == set(StopReason)
    for request, action in zip(asked, actions, strict=True):
        assert len(action.token_ids) == len(action.logprobs) <= request.max_tokens
        assert chat.end_id not in action.token_ids[:-1]
        assert (action.stop_reason is StopReason.END) == (action.token_ids[-1] == chat.end_id)
        assert action.stop_reason is StopReason.END or len(action.token_ids) == request.max_tokens


def test_a_limit_of_one_token(engine: Engine) -> None:
    assert all(len(action.token_ids) == 1 for action in engine.sample(requests(4, max_tokens=1)))


def test_sampled_logprobs_are_the_learners_whatever_was_loaded_last(
    engine: Engine, tiny_model: Path, changed_model: Path
) -> None:
    """Law 6. Without the refresh of the tied output layer they would be off by more than 1."""
    for folder, version, other in [(changed_model, 1, tiny_model), (tiny_model, 2, changed_model)]:
        engine.load_weights(folder, version)
        assert engine.version == version
        gaps, apart = [], []
        for request, action in zip(requests(), engine.sample(requests()), strict=True):
            ids, drawn = request.context + action.token_ids, slice(len(request.context) - 1, None)
            learner = learner_logprobs(folder, ids)[drawn]
            gaps.append(np.abs(action.logprobs - learner).max())
            apart.append(np.abs(learner_logprobs(other, ids)[drawn] - learner).max())
        assert max(gaps) < CLOSE
        assert max(apart) > 1


def test_new_weights_are_sampled_with(engine: Engine, tiny_model: Path, changed_model: Path) -> None:
    """The contexts are in the prefix cache of the old weights: sampling again must not use it."""
    engine.load_weights(tiny_model, version=0)
    long = [Request(episode=0, step=0, context=[*range(256)], seed=0, max_tokens=8)]
    engine.sample(long)
    engine.load_weights(changed_model, version=1)
    [action] = engine.sample(long)
    learner = learner_logprobs(changed_model, long[0].context + action.token_ids)
    assert np.abs(learner[255:] - action.logprobs).max() < CLOSE


def test_the_same_requests_give_the_same_actions(engine: Engine, tiny_model: Path) -> None:
    """In the same company bit for bit, but for a server; alone, or after others, up to rounding."""
    engine.load_weights(tiny_model, version=0)
    asked = requests()
    first = engine.sample(asked)
    engine.load_weights(tiny_model, version=0)
    again, alone, turned = engine.sample(asked), engine.sample(asked[:1]), engine.sample(asked[::-1])
    for other, actions in ((again, first), (alone, first[:1]), (turned, first[::-1])):
        for one, action in zip(other, actions, strict=True):
            assert one.token_ids == action.token_ids
            assert np.abs(one.logprobs - action.logprobs).max() < CLOSE


def test_every_seed_has_its_own_draws(engine: Engine) -> None:
    shared = [Request(episode=i, step=0, context=[1, 2, 3], seed=i, max_tokens=8) for i in range(8)]
    assert len({tuple(action.token_ids) for action in engine.sample(shared)}) == 8


def test_greedy_tokens_are_the_learners_likeliest(open_kind: Open, changed_model: Path, chat: Chat) -> None:
    """So all engines agree on them. Their logprobs are those of temperature 1."""
    with open_kind(changed_model, end_id=chat.end_id, max_tokens=64, temperature=0.0) as engine:
        asked = requests(12, max_tokens=5)
        model = AutoModelForCausalLM.from_pretrained(changed_model, dtype=torch.float32)
        for request, action in zip(asked, engine.sample(asked), strict=True):
            ids = request.context + action.token_ids
            likeliest = model(torch.tensor([ids])).logits[0].argmax(-1).tolist()
            assert likeliest[len(request.context) - 1 : -1] == action.token_ids
            learner = learner_logprobs(changed_model, ids)[len(request.context) - 1 :]
            assert np.abs(learner - action.logprobs).max() < CLOSE


def test_a_model_that_is_not_there_is_told(open_kind: Open, tmp_path: Path) -> None:
    with pytest.raises(EngineError, match="config"):
        open_kind(tmp_path, end_id=0, max_tokens=64)


@pytest.mark.parametrize("open_kind", ["vllm", "transformers"], indirect=True)
def test_in_one_process_the_same_requests_give_the_same_bits(open_kind: Open, tiny_model: Path, chat: Chat) -> None:
    """In one engine and in another."""
    found = []
    for _ in range(2):
        with open_kind(tiny_model, end_id=chat.end_id, max_tokens=512) as engine:
            found.append(bits(engine.sample(requests())))
            engine.load_weights(tiny_model, version=1)
            found.append(bits(engine.sample(requests())))
    assert found == found[:1] * 4


def test_a_killed_process_is_told_and_leaves_nothing(tiny_model: Path, chat: Chat) -> None:
    with VllmEngine(tiny_model, end_id=chat.end_id, max_tokens=64) as engine:
        os.kill(engine.pid, signal.SIGKILL)
        with pytest.raises(EngineError, match="ended with code -9"):
            engine.sample(requests(1, max_tokens=5))
    with pytest.raises(ProcessLookupError):
        os.kill(engine.pid, 0)


@pytest.mark.parametrize("open_kind", ["transformers", "server"], indirect=True)
def test_a_model_that_reads_too_few_tokens_is_told(open_kind: Open, tiny_model: Path) -> None:
    with pytest.raises(EngineError, match=r"reads (512|1024) tokens at most.* env.max_tokens"):
        open_kind(tiny_model, end_id=0, max_tokens=2048)


def test_transformers_misses_weights_that_are_not_there(tiny_model: Path, tmp_path: Path) -> None:
    """Otherwise it would go on with random ones."""
    folder = shutil.copytree(tiny_model, tmp_path / "model")
    weights = load_file(folder / "model.safetensors")
    del weights["model.norm.weight"]
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(EngineError, match=r"lacks weights of its model: model\.norm\.weight"):
        TransformersEngine(folder, end_id=0, max_tokens=64)
