"""The engine that params.yaml asks for, and the one that runs in this process, for machines without vLLM."""

from __future__ import annotations

import json
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import cast

import numpy as np
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from agent_r1.params import Params
from agent_r1.params.places import adapter_in
from agent_r1.params.stages import DtypeName, EngineParams, TransformersParams
from agent_r1.pretrained import adaptable, compute_dtype, default_device, load_model
from agent_r1.records import Floats
from agent_r1.rollout.chat import Chat
from agent_r1.rollout.sampling import Action, Actor, Engine, EngineError, HeldWeights, PolicyWeights, Request
from agent_r1.rollout.server_engine import ServerEngine
from agent_r1.rollout.vllm_engine import VllmEngine
from agent_r1.weight_sums import adapter_sums, sums_of

_ADAPTER = "engine"  # the adapters' name in the layers


def draw_uniforms(seed: int, count: int) -> Floats:
    """[count] uniform in [0, 1): all the randomness of one action, a number per token."""
    return np.random.default_rng(seed).random(count)


def choose(logits: Tensor, uniforms: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """Tokens [B], and their logprobs [B] float32 in nats at temperature 1, at every temperature.

    A row's token is where the cumulated probabilities of its logits [B, V] pass its uniform number [B] in [0, 1), so
    that a rounding error in a logit changes it once in many thousand draws. At temperature 0 it is the likeliest
    token. No row depends on the others.
    """
    logprobs = logits.float().log_softmax(-1)
    if temperature == 0:
        tokens = logprobs.argmax(-1)
    else:
        cumulated = (logprobs.double() / temperature).softmax(-1).cumsum(-1)
        target = uniforms[:, None] * cumulated[:, -1:]
        tokens = torch.searchsorted(cumulated, target, right=True)[:, 0].clamp(max=logits.shape[1] - 1)
    return tokens, logprobs.gather(1, tokens[:, None])[:, 0]


def pad_left(contexts: Sequence[Sequence[int]]) -> tuple[Tensor, Tensor]:
    """Ids [B, T] with 0 before the shorter contexts, and the mask [B, T] that is 1 where there is a token."""
    width = max(map(len, contexts))
    ids = torch.tensor([[0] * (width - len(context)) + list(context) for context in contexts])
    mask = torch.tensor([[0] * (width - len(context)) + [1] * len(context) for context in contexts])
    return ids, mask


@dataclass(slots=True)
class _Draft:
    """An action that is being sampled."""

    uniforms: Floats  # one for each token that it may have
    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)

    @property
    def next_uniform(self) -> float:
        return float(self.uniforms[len(self.ids)])

    def goes_on(self, end_ids: Collection[int]) -> bool:
        return self.ids[-1] not in end_ids and len(self.ids) < len(self.uniforms)


class _Reading:
    """What a model has read of contexts [B], and what it is to read next."""

    def __init__(self, model: PreTrainedModel, contexts: Sequence[Sequence[int]]) -> None:
        self._model = model
        self._cache = DynamicCache(config=model.config)
        ids, mask = pad_left(contexts)
        self._unread = ids.to(model.device)
        self._mask = mask.to(model.device)

    def logits(self) -> Tensor:
        """[B, V] for the token behind each context, which the cache then holds."""
        output = self._model(
            input_ids=self._unread,
            attention_mask=self._mask,
            position_ids=(self._mask.cumsum(1) - 1).clamp(min=0)[:, -self._unread.shape[1] :],
            past_key_values=self._cache,
            use_cache=True,
            logits_to_keep=1,
        )
        return cast(Tensor, output.logits[:, -1])

    def append(self, tokens: Tensor, going: Sequence[int]) -> None:
        """Appends tokens [B] to their contexts, and leaves the contexts out that do not go on."""
        if len(going) < len(tokens):
            rows = torch.tensor(going, dtype=torch.long, device=tokens.device)
            self._cache.reorder_cache(rows)  # type: ignore[arg-type]  # layers of every kind have it
            tokens = tokens[rows]
            self._mask = self._mask[rows]
        self._unread = tokens[:, None]
        self._mask = torch.cat([self._mask, torch.ones_like(self._unread)], dim=1)


@torch.inference_mode()
def generate(
    model: PreTrainedModel,
    contexts: Sequence[Sequence[int]],
    uniforms: Sequence[Floats],
    *,
    end_ids: Collection[int],
    temperature: float,
) -> list[tuple[list[int], list[float]]]:
    """Ids and logprobs of one action per context, up to one of `end_ids` or its last uniform number."""
    drafts = [*map(_Draft, uniforms)]
    running = drafts
    reading = _Reading(model, contexts)
    while running:
        draws = torch.tensor([draft.next_uniform for draft in running], dtype=torch.float64, device=model.device)
        tokens, logprobs = choose(reading.logits(), draws, temperature)
        for draft, token, logprob in zip(running, tokens.tolist(), logprobs.tolist(), strict=True):
            draft.ids.append(token)
            draft.logprobs.append(logprob)
        going = [row for row, draft in enumerate(running) if draft.goes_on(end_ids)]
        reading.append(tokens, going)
        running = [running[row] for row in going]
    return [(draft.ids, draft.logprobs) for draft in drafts]


class TransformersEngine(Engine):
    """Samples actions in batches, on CUDA if there is a device and else on the CPU, with the threads of this process.

    On a CPU, the same requests to an engine of the same weights, threads and `batch_size` give the same ids and
    logprobs, bit for bit. In another batch a request gives the same but for the rounding of matrix products.
    """

    def __init__(self, settings: TransformersParams, actor: Actor) -> None:
        """Loads the model. Raises EngineError if there is none, or it lacks weights."""
        self._device = default_device()
        self._dtype = compute_dtype(actor.dtype, self._device)
        self.halved = self._dtype is torch.bfloat16
        self._actor = actor
        self._batch_size = settings.batch_size
        self._model = self._load(actor.model)
        self.version = actor.version
        self._adapted = False  # whether there are adapters in it
        if actor.adapters:
            self._load_adapter(Path(actor.adapters))

    def sample(self, requests: Sequence[Request]) -> list[Action]:
        by_length = sorted(range(len(requests)), key=lambda index: len(requests[index].context))  # little padding
        actions = dict[int, Action]()
        for start in range(0, len(requests), self._batch_size):
            batch = by_length[start : start + self._batch_size]
            actions |= zip(batch, self._act([requests[index] for index in batch]), strict=True)
        return [actions[index] for index in range(len(requests))]

    def load_weights(self, folder: Path, version: int) -> None:
        """Loads the model of a Hugging Face folder, or its adapters; no cache outlives `sample`."""
        if self._actor.adapter_rank:
            self._load_adapter(folder)
        else:
            del self._model  # before there is another: one may be all that fits
            self._model = self._load(folder)
        self.version = version

    def held(self) -> list[HeldWeights]:
        state = self._model.state_dict().items()
        if self._actor.adapter_rank:  # adapters stay in float32
            sums = adapter_sums(self._model, state, torch.float32)
            return [HeldWeights(sampler="the engine", dtype="float32", sums=sums)]
        dtype = str(self._dtype).removeprefix("torch.")
        return [HeldWeights(sampler="the engine", dtype=cast(DtypeName, dtype), sums=sums_of(state, self._dtype))]

    def close(self) -> None:
        """Does nothing: memory is all that the engine holds, and it is freed with the engine."""

    def _act(self, requests: Sequence[Request]) -> list[Action]:
        contexts = [request.context for request in requests]
        uniforms = [draw_uniforms(request.seed, request.max_tokens) for request in requests]
        end_ids = self._actor.end_ids
        temperature = 0.0 if requests[0].greedy else self._actor.temperature
        actions = generate(self._model, contexts, uniforms, end_ids=end_ids, temperature=temperature)
        return [Action.of(ids, logprobs, end_ids) for ids, logprobs in actions]

    def _load_adapter(self, folder: Path) -> None:
        """Puts the adapters of a policy's folder in the place of the last ones, in float32 as they were trained."""
        from peft import LoraConfig, inject_adapter_in_model  # take a while, and only adapters need them

        adapter_folder = adapter_in(folder)
        if not self._adapted:
            config = json.loads((adapter_folder / "adapter_config.json").read_text())
            config["target_modules"] = adaptable(self._model, config["target_modules"])
            with torch.random.fork_rng(devices=[]):  # the generator is the learner's, in this process
                inject_adapter_in_model(LoraConfig(**config), self._model, _ADAPTER)
            self._adapted = True
        layers = {name: weight for name, weight in self._model.named_parameters() if f".{_ADAPTER}." in name}
        stored = load_file(adapter_folder / "adapter_model.safetensors")
        for name, weight in layers.items():
            own_name = "base_model.model." + name.replace(f".{_ADAPTER}.", ".")
            weight.data = stored[own_name].to(weight.device, torch.float32)

    def _load(self, path: Path | str) -> PreTrainedModel:
        try:
            return load_model(path, self._dtype, self._device)
        except (OSError, ValueError) as error:
            raise EngineError(str(error)) from error


def engine_of(settings: Params, weights: PolicyWeights, chat: Chat, temperature: float) -> Engine:
    """The engine of params.yaml with a policy's weights; its actions end as the chat's do. Raises as `open_engine`."""
    actor = Actor(
        model=weights.path,
        end_ids=chat.end_ids,
        max_tokens=settings.env.max_tokens,
        temperature=temperature,
        dtype=settings.model.dtype,
        version=weights.updates,
    )
    return open_engine(settings.engine, actor.beside(weights.beneath))


def open_engine(settings: EngineParams, actor: Actor) -> Engine:
    """The engine of `settings.kind`, with its own section. Raises EngineError if it cannot be opened."""
    match settings.kind:
        case "vllm":
            return VllmEngine(settings.vllm, actor)
        case "transformers":
            return TransformersEngine(settings.transformers, actor)
        case "server":
            return ServerEngine(settings.server, actor)
