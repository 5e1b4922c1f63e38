"""Trajectories of imported episodes: with the sampler's own tokens, or with text for people to look at.

Text has a token for each character, or those of a tokenizer. Its actions are not those that a policy sampled: their
source is DEMONSTRATION, so that no action mask, loss or replay ever has them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from transformers import AutoTokenizer

from agent_r1.data.sources import Row
from agent_r1.files import load_pretrained
from agent_r1.imported.episodes import Episode, Message, actions_of, calls_of, text_of
from agent_r1.records import Floats32, Int32s, Source, Step, StopReason


class Span(NamedTuple):
    """Tokens of one source in a row."""

    source: Source
    ids: Int32s
    logprobs: Floats32
    begins: bool = False  # a context of its own


class Characters:
    """A token for each character."""

    size = 0x110000

    def encode(self, text: str) -> Int32s:
        """The code point of each character."""
        return np.frombuffer(text.encode("utf-32-le"), np.int32)

    def decode(self, token_ids: Sequence[int]) -> str:
        """The characters of code points."""
        return "".join(map(chr, token_ids))


class Tokens:
    """The tokens of a Hugging Face tokenizer."""

    def __init__(self, path: str | Path) -> None:
        self.tokenizer = load_pretrained(AutoTokenizer, path)
        self.size = len(self.tokenizer)

    def encode(self, text: str) -> Int32s:
        """Token ids, in which no text is a special token."""
        return np.array(self.tokenizer.encode(text, add_special_tokens=False, split_special_tokens=True), np.int32)

    def decode(self, token_ids: Sequence[int]) -> str:
        """The text, with special tokens."""
        return str(self.tokenizer.decode(list(token_ids), clean_up_tokenization_spaces=False))


def require_own_ids(row: Row, episode: Episode, tokens: Tokens | Characters, *, read: bool) -> None:
    """Raises ValueError if an episode's ids are not those of the tokenizer; it may `read` them, which takes time."""
    if isinstance(tokens, Characters):
        raise ValueError(
            f"{row}: holds token ids; give the tokenizer of the model that sampled them: --tokenizer FOLDER"
        )
    for action, sampled in zip(episode.actions, episode.sampled, strict=True):
        largest = max(sampled.ids.max(), sampled.prompt.max(initial=0))
        alien = f"id {largest}, and the tokenizer has {tokens.size}" if largest >= tokens.size else ""
        if read and not alien:
            written = text_of(action.get("content"))
            alien = "other text than the message" * (_plain(written) not in _plain(tokens.decode(sampled.ids.tolist())))
        if alien:
            raise ValueError(
                f"{row}: token ids of another tokenizer ({alien}); give that of its model: --tokenizer FOLDER"
            )


def _plain(text: str) -> str:
    return "".join(text.split())


def spans_of(episode: Episode, tokens: Tokens | Characters) -> Iterator[Span]:
    """The tokens of an episode in order: the sampler's where it has them, else those of its text."""
    if not episode.sampled:
        yield from _of_text(episode.messages, tokens)
        return
    context = np.zeros(0, np.int32)
    for action in episode.sampled:
        grown = 0 < len(context) <= len(action.prompt) and np.array_equal(context, action.prompt[: len(context)])
        new = action.prompt[len(context) :] if grown else action.prompt
        yield Span(Source.OBSERVATION if grown else Source.PROMPT, new, _none(new), begins=not grown)
        yield Span(Source.ACTION, action.ids, action.logprobs)
        context = np.concatenate([action.prompt, action.ids])


def _of_text(messages: Sequence[Message], tokens: Tokens | Characters) -> Iterator[Span]:
    source = Source.PROMPT
    for place, message in enumerate(messages):
        heading = tokens.encode(f"{message['role']}:\n")
        acts = message["role"] == "assistant"
        text = tokens.encode((_shown(message) or "(nothing)" * acts) + "\n\n")
        yield Span(Source.TEMPLATE, heading, _none(heading), begins=not place)
        yield Span(Source.DEMONSTRATION if acts else source, text, _none(text))
        source = Source.OBSERVATION if acts else source


def _none(ids: Int32s) -> Floats32:
    return np.zeros(len(ids), np.float32)


def _shown(message: Message) -> str:
    """A message as people read it, with thoughts and calls in this project's form."""
    thought = text_of(message.get("reasoning_content"))
    calls = "".join(
        f'\n<tool_call>\n{{"name": "{call.tool}", "arguments": {call.arguments or "{}"}}}\n</tool_call>'
        for call in calls_of(message)
    )
    return f"<think>{thought}</think>\n" * bool(thought) + text_of(message.get("content")) + calls


def steps_of(messages: Sequence[Message], spans: Sequence[Span], rewards: dict[str, float]) -> list[Step]:
    """The steps of an episode, whose rewards stand on the last."""
    stops = np.cumsum([len(span.ids) for span in spans]).tolist()
    acting = [
        (stop - len(span.ids), stop)
        for span, stop in zip(spans, stops, strict=True)
        if span.source in (Source.ACTION, Source.DEMONSTRATION)
    ]
    return [
        Step(
            action_start=start,
            action_stop=stop,
            stop_reason=StopReason.END,
            calls=calls_of(action),
            rewards=rewards if place == len(acting) else {},
        )
        for place, (action, (start, stop)) in enumerate(zip(actions_of(messages), acting, strict=True), start=1)
    ]
