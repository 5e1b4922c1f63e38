from __future__ import annotations

import os
import signal
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from agent_r1.records import StopReason
from agent_r1.rollout.chat import Chat
from agent_r1.rollout.engine import Engine, EngineError
from agent_r1.rollout.sampling import Action, Request
from agent_r1.seeds import derive

CLOSE = 1e-4  # nats, in float32


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


def test_sampled_logprobs_are_the_learners(engine: Engine, tiny_model: Path) -> None:
    engine.load_weights(tiny_model, version=0)
    for request, action in zip(requests(), engine.sample(requests()), strict=True):
        learner = learner_logprobs(tiny_model, request.context + action.token_ids)
        assert np.abs(learner[len(request.context) - 1 :] - action.logprobs).max() < CLOSE


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


def test_new_weights_reach_every_layer(engine: Engine, tiny_model: Path, changed_model: Path) -> None:
    """Law 6. Without the refresh of the tied output layer the scores would be off by more than 1."""
    sequences = [request.context for request in requests()]
    for folder, version in [(changed_model, 1), (tiny_model, 2)]:
        engine.load_weights(folder, version)
        assert engine.version == version
        for ids, scored in zip(sequences, engine.score(sequences), strict=True):
            assert scored.shape == (len(ids) - 1,)
            assert np.abs(scored - learner_logprobs(folder, ids)).max() < CLOSE
    apart = [learner_logprobs(changed_model, ids) - learner_logprobs(tiny_model, ids) for ids in sequences]
    assert np.abs(np.concatenate(apart)).max() > 1


def test_new_weights_are_sampled_with(engine: Engine, tiny_model: Path, changed_model: Path) -> None:
    """The contexts are in the prefix cache of the old weights: sampling again must not use it."""
    engine.load_weights(tiny_model, version=0)
    long = [Request(episode=0, step=0, context=[*range(256)], seed=0, max_tokens=8)]
    engine.sample(long)
    engine.load_weights(changed_model, version=1)
    [action] = engine.sample(long)
    learner = learner_logprobs(changed_model, long[0].context + action.token_ids)
    assert np.abs(learner[255:] - action.logprobs).max() < CLOSE


def test_the_same_requests_give_the_same_bits(engine: Engine, tiny_model: Path, chat: Chat) -> None:
    """Twice in one engine and once in another; other seeds give other actions."""
    engine.load_weights(tiny_model, version=0)
    first = engine.sample(requests())
    engine.load_weights(tiny_model, version=0)
    assert bits(engine.sample(requests())) == bits(first)
    with Engine(tiny_model, end_id=chat.end_id, max_tokens=512) as other:
        assert bits(other.sample(requests())) == bits(first)
    shared = [Request(episode=i, step=0, context=[1, 2, 3], seed=i, max_tokens=8) for i in range(8)]
    assert len({tuple(action.token_ids) for action in engine.sample(shared)}) == 8


def test_greedy_and_the_end_of_the_process(changed_model: Path, tiny_tokenizer: PreTrainedTokenizerFast) -> None:
    """At temperature 0 each token is the learner's most likely one; a killed process is told and leaves nothing."""
    engine = Engine(changed_model, end_id=Chat(tiny_tokenizer).end_id, max_tokens=64, temperature=0.0)
    with engine:
        [request] = requests(1, max_tokens=5)
        [action] = engine.sample([request])
        model = AutoModelForCausalLM.from_pretrained(changed_model, dtype=torch.float32)
        ids = request.context + action.token_ids
        likeliest = model(torch.tensor([ids])).logits[0].argmax(-1).tolist()
        assert likeliest[len(request.context) - 1 : -1] == action.token_ids
        os.kill(engine.pid, signal.SIGKILL)
        with pytest.raises(EngineError, match="ended with code -9"):
            engine.sample([request])
    with pytest.raises(ProcessLookupError):
        os.kill(engine.pid, 0)


def test_a_model_that_does_not_load_is_told(tmp_path: Path) -> None:
    with pytest.raises(EngineError, match="config"):
        Engine(tmp_path, end_id=0, max_tokens=64)
