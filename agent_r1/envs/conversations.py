"""Conversations in a file: rows of `{"messages": [...]}` in the OpenAI form, which may name a data set beside them.

Their content is text: only the tags of an action become tokens, and only in the assistant's messages.
"""

from __future__ import annotations

import reprlib
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import cycle, islice
from pathlib import Path
from typing import Any

from agent_r1.data.sources import Row, read
from agent_r1.envs.base import Conversation, ParsedCall, hermes, object_of, parse_action
from agent_r1.params.env import EnvParams
from agent_r1.params.sections import nearest
from agent_r1.records import Json

_READ = {"assistant": {"tool_calls"}, "tool": {"tool_call_id"}}  # of a message, beside its role, content and name
_EMPTY: tuple[Any, ...] = (None, "", [], {})
_IN_TURN = "a system message or none, one of the user, then assistant and tool in turn, and the assistant last"
EXAMPLES = "env.examples"  # the key of params.yaml
MOST_CALLS = 64  # of an action that are looked at
_ONE_CALL = '{"function": {"name": ..., "arguments": an object, or a text of its JSON}}'


def read_conversations(path: Path, key: str = "warm_start.conversations") -> list[Conversation]:
    """The conversations of a file, JSON lines, plain or .gz, that `key` of params.yaml names.

    Raises FileNotFoundError if there is no such file, and ValueError, with row, message and remedy, for a conversation
    that no episode could have been.
    """
    if not path.is_file():
        raise FileNotFoundError(f"{path} is no file; put it there or correct {key} in params.yaml")
    conversations = [_conversation(row) for row in read(path)]
    if not conversations:
        raise ValueError(f'{path} holds no conversations; fill it, or set {key}: ""')
    return conversations


def read_examples(limits: EnvParams) -> list[Conversation]:
    """The conversations of `env.examples`, which open every context; none without a file.

    Raises as `read_conversations`, and ValueError for one with a system message or a data set of its own, and for an
    action that is no tool call or answer as `env.answers` and `env.parallel_calls` have them.
    """
    examples = read_conversations(Path(limits.examples), EXAMPLES) if limits.examples else []
    for example in examples:
        if example.system:
            remedy = "leave it out, as examples stand behind the environment's own; see env.instructions"
            raise ValueError(f"{example.where}: an example has no system message; {remedy}")
        if example.dataset:
            raise ValueError(f"{example.where}: an example stands before every question; leave its data set out")
        for action in example.actions:
            if problem := parse_action(action, limits.parallel_calls, limits.answers).problem:
                remedy = f"write a call in tool_calls, or an answer that env.answers {limits.answers} reads"
                raise ValueError(
                    f"{example.where}: the action {reprlib.repr(action)} is no example: {problem}; {remedy}"
                )
    return examples


def require_tools(conversation: Conversation, tools: Sequence[Json], whose: str) -> None:
    """Raises ValueError for a conversation with other tools than these, which `whose` environment has."""
    offered = [tool["function"]["name"] for tool in tools]
    if offered and conversation.replies == "user":
        raise ValueError(
            f"{conversation.where}: the user replies to the assistant; {whose} has tools: make that role tool"
        )
    for at, action in enumerate(conversation.actions):
        for tool in [call.tool for call in parse_action(action, MOST_CALLS).calls if call.tool not in offered]:
            where = f"{conversation.where}, message {2 * at + (3 if conversation.system else 2)}"
            close = nearest(tool, offered) if offered else ", nor any other; write a move between answer tags"
            raise ValueError(f"{where}: {whose} has no tool {reprlib.repr(tool)}{close}")


def _conversation(row: Row) -> Conversation:
    messages = [_Message(fields, f"{row}, message {at}") for at, fields in enumerate(row.objects("messages"), start=1)]
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

    fields: Json
    where: str  # row, and number in it

    def require(self, role: str) -> _Message:
        """Refuses another role, and fields that would be ignored."""
        actual = self.fields.get("role")
        if actual != role:
            raise self._fault(
                f"is of role {reprlib.repr(actual)} where {role} is due", f"a conversation has {_IN_TURN}"
            )
        names = {"role", "content", "name"} | _READ.get(role, set())
        for name, value in self.fields.items():
            if name not in names and value not in _EMPTY:
                remedy = "leave it out, and put a thought into the content, as <think>...</think>"
                raise self._fault(f"has a field {reprlib.repr(name)}, which would go unsaid", remedy)
        return self

    def content(self) -> str:
        """The text; of a tool it may be empty, and of an assistant beside a call."""
        content = self.fields.get("content")
        calls = self.fields.get("tool_calls")
        if content is None and calls:
            return ""
        if isinstance(content, str) and (content.strip() or calls or self.fields["role"] == "tool"):
            return content
        raise self._fault(f"has content that is no text, {reprlib.repr(content)}", "write one, not a list of parts")

    def action(self) -> str:
        """An assistant's text as an episode has it: its call after its content, between the tags."""
        content = self.content()
        calls = self.fields.get("tool_calls")
        try:
            return self._calling(content, *self._call(calls)) if calls else content
        except RecursionError:
            raise self._fault("has a tool call that is nested too deeply", "write its arguments flatter") from None

    def _calling(self, content: str, name: str, arguments: Json) -> str:
        opening = f"{content.rstrip()}\n" if content.strip() else ""
        text = opening + hermes([ParsedCall(name, arguments)])
        parsed = parse_action(text)
        if parsed.calls != ((name, arguments),):
            remedy = "leave tags and values that JSON does not have out of it"
            raise self._fault(f"is no action that makes this call ({parsed.problem or 'it reads as another'})", remedy)
        return text

    def _call(self, calls: Any) -> tuple[str, Json]:
        """Name and arguments of the one call."""
        if isinstance(calls, list) and len(calls) > 1:
            raise self._fault(f"makes {len(calls)} tool calls", "an action is one; give each an action of its own")
        match calls:
            case [{"function": {"name": str(name), "arguments": dict(arguments)}}] if name.strip():
                return name, arguments
            case [{"function": {"name": str(name), "arguments": str(text)}}] if name.strip():
                decoded = object_of(text)
                if decoded is not None:
                    return name, decoded
        raise self._fault(f"has a tool call {reprlib.repr(calls)} without name or arguments", f"write {_ONE_CALL}")

    def _fault(self, problem: str, remedy: str) -> ValueError:
        return ValueError(f"{self.where}: {problem}; {remedy}")
