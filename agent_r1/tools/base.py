"""A tool: a typed function that the policy may call by name. There is one: `search`."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, get_type_hints

from pydantic import BaseModel, ConfigDict, ValidationError, create_model
from pydantic.json_schema import GenerateJsonSchema

from agent_r1.records import CallStatus, Passage
from agent_r1.search.base import Search


class ToolError(Exception):
    """A call that is well formed and fails by its own arguments; the message is for the policy."""


class ToolTimeout(ToolError):
    """A call that takes too long by its own arguments."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ToolResult:
    """What a call gave."""

    text: str  # for the policy
    titles: tuple[str, ...] = ()  # of the passages shown, none for tools that show none
    call_status: CallStatus = CallStatus.OK


class Tool:
    """A function with what the policy is told about it: its name, and a schema of its signature and docstring."""

    def __init__(self, function: Callable[..., ToolResult]) -> None:
        """Takes a function with a docstring and annotated parameters that JSON can give; else raises a ValueError."""
        self.name = function.__name__
        self._function = function
        self._arguments = _arguments_model(function)
        schema = self._arguments.model_json_schema(schema_generator=_UntitledSchema)
        parameters = {key: schema[key] for key in ("type", "properties", "required") if key in schema}
        described = {"name": self.name, "description": _description(function), "parameters": parameters}
        self.schema: dict[str, Any] = {"type": "function", "function": described}  # in the OpenAI function form

    def call(self, arguments: dict[str, Any]) -> ToolResult:
        """Checks the arguments and calls the function.

        Arguments that do not fit the signature give BAD_ARGUMENTS, a ToolTimeout gives TIMEOUT and any other
        ToolError FAILED. A WorldFault is raised: the other side failed, whatever the arguments. So is any other
        exception, which is a bug of the tool.
        """
        try:
            values = self._arguments.model_validate(arguments)
        except ValidationError as error:
            return ToolResult(text=_explain(error), call_status=CallStatus.BAD_ARGUMENTS)
        try:
            return self._function(**{name: getattr(values, name) for name in self._arguments.model_fields})
        except ToolTimeout as error:
            return ToolResult(text=str(error), call_status=CallStatus.TIMEOUT)
        except ToolError as error:
            return ToolResult(text=str(error), call_status=CallStatus.FAILED)


class _UntitledSchema(GenerateJsonSchema):
    """Without the titles that pydantic makes from names: the policy pays for every token."""

    def field_title_should_be_set(self, schema: Any) -> bool:
        return False


def _arguments_model(function: Callable[..., ToolResult]) -> type[BaseModel]:
    hints = get_type_hints(function)
    fields: dict[str, Any] = {}
    for name, parameter in inspect.signature(function).parameters.items():
        if name not in hints or parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            raise ValueError(f"tool {function.__name__!r}: parameter {name!r} needs a type annotation of its own")
        fields[name] = (hints[name], ... if parameter.default is parameter.empty else parameter.default)
    return create_model(function.__name__, __config__=ConfigDict(extra="forbid", strict=True), **fields)


def _description(function: Callable[..., ToolResult]) -> str:
    if not function.__doc__:
        raise ValueError(f"tool {function.__name__!r} needs a docstring: the policy reads its first paragraph")
    return re.sub(r"\s+", " ", inspect.cleandoc(function.__doc__).split("\n\n")[0])


def _explain(error: ValidationError) -> str:
    problems = error.errors(include_url=False)
    return "; ".join(f"{'.'.join(map(str, problem['loc']))}: {problem['msg']}" for problem in problems)


def search_tool(index: Search, *, top_k: int) -> Tool:
    """A tool that shows the `top_k` best passages for a query."""

    def search(query: str) -> ToolResult:
        """Finds passages about a query."""
        if not query.strip():
            raise ToolError("the query is empty")
        [passages] = index.search([query], top_k)
        return ToolResult(
            text=render_passages(passages) or "nothing found", titles=tuple(passage.title for passage in passages)
        )

    return Tool(search)


def render_passages(passages: Sequence[Passage]) -> str:
    """One line per passage, `Title: text`; an empty string without passages."""
    return "\n".join(" ".join(f"{passage.title}: {passage.text}".split()) for passage in passages)
