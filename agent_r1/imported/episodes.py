"""A row that another trainer wrote, as far as its format says it, and how its fields are read.

Whoever wrote the file is not trusted: each field is checked in type, size and characters, and a fault names file, row,
field and what is expected.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np

from agent_r1.data.sources import Row
from agent_r1.params.credit import LOGGED, RewardWeights
from agent_r1.records import Call, CallStatus, Floats32, Int32s, Json

ROLES = ("system", "developer", "user", "assistant", "tool")
LARGEST = 1e12  # of a reward, by size
ROUNDING = 1e-3  # nats by which it can lift a logprob above 0
MOST_COLUMNS = 100  # of numbers, in a row
_COLUMN = re.compile(r"[A-Za-z_][\w .:/-]{,99}", re.ASCII)
_TAKEN = {*LOGGED, *RewardWeights.model_fields}  # names that a reward of one's own cannot have

Message = Json  # a chat message, as OpenAI writes it


class Sampled(NamedTuple):
    """The tokens of one action, as its sampler had them."""

    prompt: Int32s  # all that the policy read
    ids: Int32s  # [A]
    logprobs: Floats32  # [A] nats


@dataclass(frozen=True, kw_only=True, slots=True)
class Episode:
    """One attempt. What its source does not say is None or empty."""

    messages: list[Message]  # one of an assistant at least
    score: float | None  # the whole reward
    columns: dict[str, float] = field(default_factory=dict)  # further numbers, by name
    step: int | None = None  # of the training
    answers: list[str] = field(default_factory=list)  # right ones
    fault: str = ""  # of the world, which cut the attempt short
    sampled: list[Sampled] = field(default_factory=list)  # of each assistant's message, or none at all
    extra: Json = field(default_factory=dict)  # of the row, what is in no other field

    @property
    def actions(self) -> list[Message]:
        """The messages of the assistant."""
        return actions_of(self.messages)


def inner(row: Row, name: str) -> Row:
    """The object in a field, as a row of its own; empty where there is none."""
    fields = row.fields.get(name)
    if not isinstance(fields, dict | None):
        raise row.fault(name, "must be an object")
    return replace(row, fields=fields or {})


def objects_in(row: Row, name: str) -> list[Json]:
    """The objects in a field; none where it is empty or missing."""
    return row.objects(name) if row.fields.get(name) else []


def number(row: Row, name: str) -> float | None:
    """A finite number or a switch; None where there is none, or NaN, by which a reward function says nothing."""
    value = row.fields.get(name)
    if value is None or value != value:
        return None
    if not isinstance(value, int | float) or abs(value) > LARGEST:
        raise row.fault(name, "must be a finite number")
    return float(value)


def step_of(row: Row, name: str = "step") -> int | None:
    """The training's step; None where the row does not say it."""
    step = number(row, name)
    if step is not None and (step < 0 or step % 1):
        raise row.fault(name, "must be a whole number from 0 on")
    return None if step is None else int(step)


def columns_of(row: Row, known: Iterable[str]) -> dict[str, float]:
    """The numbers of a row in other fields than the known ones, under names that a reward may have."""
    names = [name for name, value in row.fields.items() if isinstance(value, int | float) and name not in known]
    columns = dict[str, float]()
    for name in names:
        column = column_of(name)
        if not _COLUMN.fullmatch(name) or column in columns or len(names) > MOST_COLUMNS:
            raise row.fault(
                name, f"must be one of at most {MOST_COLUMNS} columns of numbers, each with a name of its own"
            )
        value = number(row, name)
        if value is not None:
            columns[column] = value
    return columns


def column_of(name: str) -> str:
    """A column's name as a reward has it, such as `format_reward`; `em_` where `em` is a part of ours."""
    plain = re.sub(r"\W", "_", name)
    return f"{plain}_" if plain in _TAKEN else plain


def rest_of(row: Row, known: Iterable[str]) -> Json:
    """The fields of a row that no other one of an episode holds."""
    return {name: value for name, value in row.fields.items() if name not in known}


def answers_of(row: Row, name: str) -> list[str]:
    """The right answers, where they are texts or numbers; other kinds of truth stay in `extra`."""
    value = row.fields.get(name)
    values = value if isinstance(value, list) else [value]
    return [str(one) for one in values if isinstance(one, str | int | float) and str(one).strip()]


def messages_of(row: Row, name: str, role: str = "") -> list[Message]:
    """Chat messages, or where a `role` is given a text, which becomes one of that role."""
    content = row.fields.get(name)
    if role and isinstance(content, str):
        return [{"role": role, "content": content}]
    messages = row.objects(name)
    for message in messages:
        if message.get("role") not in ROLES or not isinstance(message.get("content"), str | list | None):
            raise row.fault(name, f"must hold messages with a content, and a role of {', '.join(ROLES)}")
        try:
            if message.get("tool_calls"):  # verifiers writes each as JSON in a text
                calls = [json.loads(call) if isinstance(call, str) else call for call in message["tool_calls"]]
                message["tool_calls"] = calls
            calls_of(message)
        except (ValueError, TypeError, KeyError, AttributeError):
            raise row.fault(name, "must hold tool_calls with a function's name and arguments") from None
    return messages


def actions_of(messages: Iterable[Message]) -> list[Message]:
    """The messages of the assistant, which are the policy's actions."""
    return [message for message in messages if message["role"] == "assistant"]


def acted(row: Row, name: str, messages: list[Message]) -> list[Message]:
    """Refuses messages in which no assistant speaks."""
    if not actions_of(messages):
        raise row.fault(name, "must hold a message of an assistant")
    return messages


def calls_of(message: Message) -> list[Call]:
    """The calls of a message. Arguments that are no JSON are malformed; no format says how other calls ended."""
    calls = list[Call]()
    for call in message.get("tool_calls") or []:
        function = call.get("function") or call
        arguments = function["arguments"]
        status = CallStatus.OK
        if not isinstance(arguments, str):
            arguments = json.dumps(arguments)
        try:
            json.loads(arguments or "{}")
        except (ValueError, RecursionError):
            status = CallStatus.MALFORMED
            arguments = json.dumps(arguments)
        calls.append(Call(tool=function["name"] + "", arguments=arguments, status=status))
    return calls


def text_of(content: Any) -> str:
    """A message's content as text; a part that is none stands as its kind in brackets."""
    if isinstance(content, list):
        parts = [part if isinstance(part, dict) else {"text": part} for part in content]
        return "".join(str(part.get("text") or f"[{part.get('type')}]") for part in parts)
    return content if isinstance(content, str) else ""


def sampled_of(row: Row, name: str, prompt: Any, ids: Any, logprobs: Any) -> Sampled:
    """The tokens of one action; `name` is the field that a fault names."""
    try:
        arrays = [np.asarray(values) for values in (prompt, ids, logprobs)]
    except (ValueError, OverflowError):
        arrays = []
    whole = len(arrays) == 3 and all(array.ndim == 1 for array in arrays)
    if not whole or not all(array.dtype.kind in "iu" or not array.size for array in arrays[:2]):
        raise row.fault(name, "must hold token ids and logprobs as flat lists of numbers")
    if any(array.size and not 0 <= array.min() <= array.max() < 1 << 31 for array in arrays[:2]):
        raise row.fault(name, "must hold token ids from 0 on")
    length = len(arrays[1])
    if not length or len(arrays[2]) != length:
        raise row.fault(name, f"must hold a logprob for each of its {length} sampled ids, one at least")
    if arrays[2].dtype.kind not in "if" or not (np.isfinite(arrays[2]) & (arrays[2] <= ROUNDING)).all():
        raise row.fault(name, "must hold logprobs that are numbers up to 0")
    return Sampled(arrays[0].astype(np.int32), arrays[1].astype(np.int32), arrays[2].astype(np.float32))
