"""Models and episodes of random numbers, in real shapes: what is measured where nothing is learned."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from agent_r1.learn import builtin
from agent_r1.params import SHIPPED, Params, load
from agent_r1.params.sections import override, validated
from agent_r1.pretrained import default_device
from agent_r1.records import Credit, Outcome, Source, Step, StopReason, Trajectory
from agent_r1.rollout.sampling import Action, Request

SHAPES = {  # hidden size, layers, heads, heads of keys and values, width of the MLP, words, tokens of a micro-batch
    "tiny": (64, 2, 2, 2, 128, 512, 256),
    "0.5B": (896, 24, 14, 2, 4864, 151936, 4096),
    "1.5B": (1536, 28, 12, 2, 8960, 151936, 4096),
    "3B": (2048, 36, 16, 2, 11008, 151936, 2048),
    "7B": (3584, 28, 28, 4, 18944, 152064, 4096),
}
NO_WARMUP = {"iterations": 0, "explained_variance": 0.0, "limit": 0}  # so that the policy learns from the first on


@dataclass(frozen=True, kw_only=True, slots=True)
class Work:
    """What is sampled and learned from."""

    episodes: int
    prompt: int  # tokens
    action: int
    microbatch: int = 0  # tokens; 0 for those of the shape

    @property
    def tokens(self) -> int:
        return self.prompt + self.action


def make_model(folder: Path, shape: Sequence[int], tokens: int, device: torch.device | None = None) -> None:
    """Writes a model of random weights in a shape of `SHAPES`, with a tokenizer of a few hundred words."""
    tokenizer = builtin.train_tokenizer(["a question and an answer"], 400)
    config = config_of(shape, tokens)
    config.eos_token_id, config.pad_token_id = tokenizer.eos_token_id, tokenizer.pad_token_id
    torch.manual_seed(0)
    with device or default_device():
        Qwen2ForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def shipped_with(changes: dict[str, Any]) -> Params:
    """The shipped params.yaml with changes."""
    return validated(Params, override(load(SHIPPED).model_dump(by_alias=True), changes), "benchmarks")


def config_of(shape: Sequence[int], tokens: int) -> Qwen2Config:
    """The configuration of a shape of `SHAPES`, for contexts of so many tokens."""
    hidden, layers, heads, key_heads, width, words = shape[:6]
    return Qwen2Config(
        vocab_size=words,
        hidden_size=hidden,
        intermediate_size=width,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=key_heads,
        max_position_embeddings=max(tokens, 1024),
        tie_word_embeddings=hidden < 3584,
    )


def random_requests(work: Work, words: int, shortest: int = 0) -> Iterator[Request]:
    """One for each episode, with prompts of the same length or, down to the `shortest`, of different lengths."""
    draws = np.random.default_rng(0)
    for episode in range(work.episodes):
        length = draws.integers(shortest, work.prompt, endpoint=True) if shortest else work.prompt
        context = draws.integers(0, words, length).tolist()
        yield Request(episode=episode, step=0, context=context, seed=episode, max_tokens=work.action)


def trajectory_of(request: Request, action: Action) -> Trajectory:
    """An episode of one action."""
    prompt, sampled = len(request.context), len(action.token_ids)
    step = Step(action_start=prompt, action_stop=prompt + sampled, stop_reason=StopReason.LENGTH, calls=[], rewards={})
    return unanswered(
        request.episode,
        seed=request.seed,
        token_ids=np.array([*request.context, *action.token_ids], np.int32),
        source=np.array([Source.PROMPT] * prompt + [Source.ACTION] * sampled, np.uint8),
        logprobs=np.concatenate([np.zeros(prompt, np.float32), action.logprobs]),
        steps=[step],
    )


def unanswered(episode: int, **fields: Any) -> Trajectory:
    """An episode of this number that ends without an answer, in one context and with its number as seed by default."""
    alone = {"trajectory_id": str(episode), "question_id": str(episode), "group": episode, "sample": 0, "seed": episode}
    ends = {"policy_version": 0, "iteration": 0, "context_starts": [0], "outcome": Outcome.TURN_LIMIT, "answer": ""}
    return Trajectory(**{**alone, **ends, **fields})


def random_episodes(work: Work, words: int) -> list[Trajectory]:
    """Episodes of prompts of different lengths and one action, as a policy of random weights would sample them."""
    draws = np.random.default_rng(1)
    found = []
    for request in random_requests(work, words, shortest=work.prompt // 4):
        ids = draws.integers(0, words, work.action).tolist()
        action = Action.of(ids, [-math.log(words)] * work.action, end_ids=())
        found.append(trajectory_of(request, action))
    return found


def credit_of(trajectory: Trajectory, sign: int) -> Credit:
    acted, zeros = trajectory.action_mask, np.zeros(len(trajectory.token_ids), np.float32)
    return Credit(
        trajectory_id=trajectory.trajectory_id,
        return_=float(sign),
        advantages=np.where(acted, sign, 0).astype(np.float32),
        values=zeros,
        value_targets=zeros,
        reference_logprobs=zeros,
        loss_mask=acted,
        critic_mask=zeros > 0,
        kept=True,
    )


def seconds_of(work: Callable[[], object], device: torch.device) -> float:
    started = time.perf_counter()
    work()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - started
