"""Whether a model can be trained and asked as params.yaml says: the same checks for its user and for every start."""

from __future__ import annotations

import logging
from contextlib import suppress
from functools import cached_property
from importlib.util import find_spec
from pathlib import Path

from huggingface_hub import ModelCard
from transformers import PreTrainedTokenizerFast
from yaml import YAMLError

from agent_r1.faults import Warned
from agent_r1.learn.adapter import count_parameters
from agent_r1.learn.model import KEEP_TO_CONTEXTS, load_tokenizer
from agent_r1.params import Params
from agent_r1.pretrained import (
    FAMILIES,
    dropped_by_sdpa,
    end_tokens,
    experts_of,
    layer_kinds,
    read_config,
    require_full_precision,
    require_packable,
    require_sampled,
    require_window,
)
from agent_r1.rollout.chat import Chat

logger = logging.getLogger(__name__)


class Candidate:
    """A model and the settings that it is to run under. Its parts are read when a check needs them, and no weights."""

    def __init__(self, path: str | Path, settings: Params) -> None:
        """Raises ValueError or OSError if there is no model."""
        self.path = path
        self.settings = settings
        self.config = read_config(path)

    @cached_property
    def chat(self) -> Chat:
        return Chat(self.tokenizer, end_tokens(self.path))

    @cached_property
    def tokenizer(self) -> PreTrainedTokenizerFast:
        return load_tokenizer(self.path, template=self.settings.model.template)


def family(model: Candidate) -> str:
    """Names the family and what is known of it: docs/families.md has what was measured."""
    text = model.config.get_text_config()
    facts = [FAMILIES.get(text.model_type, text.model_type), f"a vocabulary of {text.vocab_size:,} tokens"]
    if kinds := layer_kinds(text):
        facts.append(f"layers of {', '.join(sorted(kinds))}")
    packs = not dropped_by_sdpa(text) and kinds <= KEEP_TO_CONTEXTS
    facts.append("contexts can be packed" if packs else "contexts cannot be packed")
    if experts := experts_of(text):
        facts.append(f"{experts} experts a layer, which get no adapters")
    if text is not model.config:
        facts.append("its text model alone is loaded")
    if text.model_type not in FAMILIES:
        raise Warned(f"{', '.join(facts)}; it is in no row of docs/families.md: train a little, and look at the canary")
    return ", ".join(facts)


def window(model: Candidate) -> str:
    """Compares the tokens that the model reads at once with `env.max_tokens`."""
    max_tokens = model.settings.env.max_tokens
    require_window(model.config, max_tokens)
    most = getattr(model.config.get_text_config(), "max_position_embeddings", "any number of")
    return f"reads {most} tokens at once, env.max_tokens is {max_tokens}"


def weights(model: Candidate) -> str:
    """Counts the weights, which must not be quantised, and those of `model.lora`."""
    require_full_precision(model.config)
    if model.settings.model.base == "four_bit" and not find_spec("bitsandbytes"):
        raise ValueError(
            "model.base: four_bit needs bitsandbytes; `pip install bitsandbytes==0.50.2`, or set it to full"
        )
    count = count_parameters(model.config, model.settings.model.adapter)
    return f"{count.policy:,} weights, stored in {model.config.dtype}; {count.adapters or count.policy:,} train"


def attention(model: Candidate) -> str:
    """Names what the learner's fast attention would leave out: the model's own then runs instead."""
    if model.settings.model.packing:
        require_packable(model.config)
    if dropped := dropped_by_sdpa(model.config):
        raise Warned(f"it has {dropped}; the model's own is used, whose memory grows with the square of a context")
    return "PyTorch's fused one"


def sampler(model: Candidate) -> str:
    """Asks whether this machine's vLLM can sample with the model."""
    kind = model.settings.engine.kind
    if kind == "vllm":
        own = model.settings.model
        require_sampled(model.config, own.dtype, adapters=own.adapter is not None)
    return f"engine.kind {kind}"


def tokens(model: Candidate) -> str:
    """Reads the tokenizer, and the tokens that end an action."""
    return "end tokens: " + ", ".join(f"{model.chat.decode([index])} ({index})" for index in model.chat.end_ids)


def template(model: Candidate) -> str:
    """Says what the chat template renders by itself."""
    dialect = model.chat.template.dialect
    form = "in a form of its own" if model.chat.calls else "in Hermes' form"
    ways = [
        f"calls {form}" if dialect.tools else "tools told in words",
        "system messages" if dialect.system else "system text in the user's",
        "tool messages" if dialect.observations else "observations as the user's",
    ]
    if "enable_thinking" in model.tokenizer.chat_template:
        ways.append("thinking is off" if model.settings.model.template.get("enable_thinking") is False else "it thinks")
    if model.chat.rewrites:
        ways.append(f"history rewritten ({model.chat.rewrites}); each step that is begins a new context")
        raise Warned(", ".join(ways))
    return ", ".join(ways)


def licence(model: Candidate) -> str:
    """Reads the licence that the model's card states."""
    folder = Path(model.path)
    with suppress(OSError, ValueError, YAMLError):
        if stated := ModelCard.load(folder / "README.md" if folder.is_dir() else model.path).data.get("license"):
            return str(stated)
    raise Warned("its card states none; look at the model's page before you pass on what you train")


CHECKS = (family, window, weights, attention, sampler, tokens, template, licence)


def require_fit(path: str | Path, settings: Params) -> None:
    """Raises ValueError for a model that a check refuses, before its weights are loaded; says that none knows it."""
    candidate = Candidate(path, settings)
    for check in CHECKS[:-1]:  # a licence is for people
        try:
            check(candidate)
        except Warned as warning:
            logger.log(logging.WARNING if check is family else logging.DEBUG, "%s: %s", path, warning)
