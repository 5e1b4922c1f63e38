"""Conversations in a file: rows of `{"messages": [...]}` in the OpenAI form, which may name a data set beside them.

Their content is text: only the tags of an action become tokens, and only in the assistant's messages.
"""

from __future__ import annotations

import reprlib
from dataclasses import dataclass
from itertools import cycle, islice
from pathlib import Path
from typing import Any

from agent_r1.data.sources import Row, read
from agent_r1.envs.base import ParsedCall, hermes, object_of, parse_action

_READ = {"assistant": {"tool_calls"}, "tool": {"tool_call_id"}}  # of a message, beside its role, content and name
_EMPTY: tuple[Any, ...] = (None, "", [], {})
_IN_TURN = "a system message or none, one of the user, then assistant and tool in turn, and the assistant last"
_ONE_CALL = '{"function": {"name": ..., "arguments": an object, or a text of its JSON}}'


@dataclass(frozen=True, kw_only=True, slots=True)
class Conversation:
    """One row: the question, the assistant's actions, and the observations between them."""

    where: str  # file and row
    dataset: str  # "" where the row names none
    replies: str  # the role that answers the assistant: tool or user
    system: str  # "" where it opens without a system message
    user: str
    actions: list[str]  # [K] texts, without end tokens
    observations: list[str]  # [K - 1]

    @property
    def text(self) -> str:
        """All of it, for a tokenizer to learn its words from."""
        return "\n".join(["system", self.system, "user", self.user, "assistant", *self.actions, *self.observations])


def read_conversations(path: Path) -> list[Conversation]:
    """The conversations of a file, JSON lines, plain or .gz.

    Raises FileNotFoundError if there is no such file, and ValueError, with row, message and remedy, for a conversation
    that no episode could have been.
    """
    if not path.is_file():
        raise FileNotFoundError(f"{path} is no file; put it there or correct warm_start.conversations in params.yaml")
    if not (found := [_conversation(row) for row in read(path)]):
        raise ValueError(f'{path} holds no conversations; fill it, or set warm_start.conversations: ""')
    return found


def _conversation(row: Row) -> Conversation:
    messages = [_Message(each, f"{row}, message {at}") for at, each in enumerate(row.objects("messages"), start=1)]
    system = messages.pop(0).require("system").content() if messages[0].fields.get("role") == "system" else ""
    replies = "user" if [message.fields.get("role") for message in messages[2:3]] == ["user"] else "tool"
    roles = ["user", *islice(cycle(["assistant", replies]), max(1, len(messages) - 1))]
    for message, role in zip(messages, roles, strict=False):
        message.require(role)
    if len(messages) < len(roles) or roles[-1] == replies:
        raise ValueError(f"{row}: the last message is not the assistant's; a conversation has {_IN_TURN}")
    return Conversation(
        where=str(row),
        dataset=row.text("dataset") if row.has("dataset") else "",
        replies=replies,
        system=system,
        user=messages[0].content(),
        actions=[message.action() for message in messages[1::2]],
        observations=[message.content() for message in messages[2::2]],
    )


@dataclass(frozen=True, slots=True)
class _Message:
    """A message as it was read. Its methods raise ValueError, with the remedy, for one that cannot be used."""

    fields: dict[str, Any]
    where: str  # row, and number in it

    def require(self, role: str) -> _Message:
        """Refuses another role, and fields that would be ignored."""
        found = self.fields.get("role")
        if found != role:
            raise self._fault(f"is of role {reprlib.repr(found)} where {role} is due", f"a conversation has {_IN_TURN}")
        known = {"role", "content", "name"} | _READ.get(role, set())
        for name, value in self.fields.items():
            if name not in known and value not in _EMPTY:
                remedy = "leave it out, and put a thought into the content, as <think>...</think>"
                raise self._fault(f"has a field {reprlib.repr(name)}, which would go unsaid", remedy)
        return self

    def content(self) -> str:
        """The text; of a tool it may be empty, and of an assistant beside a call."""
        content, calls = self.fields.get("content"), self.fields.get("tool_calls")
        if content is None and calls:
            return ""
        if isinstance(content, str) and (content.strip() or calls or self.fields["role"] == "tool"):
            return content
        raise self._fault(f"has content that is no text, {reprlib.repr(content)}", "write one, not a list of parts")

    def action(self) -> str:
        """An assistant's text as an episode has it: its call after its content, between the tags."""
        content, calls = self.content(), self.fields.get("tool_calls")
        try:
            return self._calling(content, *self._call(calls)) if calls else content
        except RecursionError:
            raise self._fault("has a tool call that is nested too deeply", "write its arguments flatter") from None

    def _calling(self, content: str, name: str, arguments: dict[str, Any]) -> str:
        before = f"{content.rstrip()}\n" if content.strip() else ""
        text = before + hermes([ParsedCall(name, arguments)])
        parsed = parse_action(text)
        if parsed.calls != ((name, arguments),):
            remedy = "leave tags and values that JSON does not have out of it"
            raise self._fault(f"is no action that makes this call ({parsed.problem or 'it reads as another'})", remedy)
        return text

    def _call(self, calls: Any) -> tuple[str, dict[str, Any]]:
        """Name and arguments of the one call."""
        if isinstance(calls, list) and len(calls) > 1:
            raise self._fault(f"makes {len(calls)} tool calls", "an action is one; give each an action of its own")
        match calls:
            case [{"function": {"name": str(name), "arguments": dict(arguments)}}] if name.strip():
                return name, arguments
            case [{"function": {"name": str(name), "arguments": str(text)}}] if name.strip():
                if (decoded := object_of(text)) is not None:
                    return name, decoded
        raise self._fault(f"has a tool call {reprlib.repr(calls)} without name or arguments", f"write {_ONE_CALL}")

    def _fault(self, problem: str, remedy: str) -> ValueError:
        return ValueError(f"{self.where}: {problem}; {remedy}")
