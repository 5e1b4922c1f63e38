"""Tools: functions, and methods of an episode's object, that the policy may call by name; their schemas and results."""

from __future__ import annotations

import asyncio
import inspect
import json
import logging
import re
import textwrap
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from graphlib import CycleError, TopologicalSorter
from typing import Any, Protocol, TypeVar, get_type_hints

from pydantic import BaseModel, ConfigDict, Field, ValidationError, create_model
from pydantic.json_schema import GenerateJsonSchema

from agent_r1.faults import WorldFault
from agent_r1.records import CallStatus, Json

Schema = Json
T = TypeVar("T")
logger = logging.getLogger(__name__)

NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")
MAX_CHARACTERS = 32_768  # of a schema as JSON: the policy reads all of it in every prompt
MAX_DEPTH = 32  # of values inside of each other
_REFERENCES = ("$ref", "$dynamicRef", "$recursiveRef")
_NOT_TOOLS = ("reset", "get_reward", "state_key")  # public methods of an episode's object that are not for the policy


def function_schema(name: str, description: str, parameters: Mapping[str, Any]) -> Schema:
    """The schema of a tool whose parameters are a JSON schema of an object.

    A ValueError names the tool and its fault: a name that a call could not spell, parameters that are no object, a
    schema that is too large or too deep or no JSON, a reference that leads outside, nowhere or in a circle.
    """
    if not NAME.fullmatch(name):
        raise ValueError(f"tool {name[:80]!r}: a name is made of 1 to 64 letters, digits, _ and -")
    try:
        function = {"name": name, "description": description, "parameters": object_schema(parameters)}
        _require_small(function)
    except ValueError as fault:
        raise ValueError(f"tool {name!r}: {fault}") from None
    return {"type": "function", "function": function}


def object_schema(schema: Mapping[str, Any]) -> Schema:
    """A JSON schema of an object, with properties, empty ones if there are none: templates list them.

    Raises ValueError for one that is of no object, too large or too deep, or refers outside, nowhere or in a circle.
    """
    is_object = isinstance(schema, Mapping) and schema.get("type") == "object"
    if not is_object or not isinstance(schema.get("properties", {}), dict):
        raise ValueError("its schema is of no object with properties")
    _require_small(schema)
    _require_resolvable(schema)
    return {"type": "object", "properties": {}} | dict(schema)


def _require_small(schema: Mapping[str, Any]) -> None:
    size = len(spelled(schema, "its schema"))
    if size > MAX_CHARACTERS:
        raise ValueError(f"its schema takes {size:,} characters, more than {MAX_CHARACTERS:,}; shorten its description")


def spelled(value: Any, name: str) -> str:
    """JSON that every program can read. Raises ValueError, which names the value, for one without any."""
    level = [value]
    for _ in range(MAX_DEPTH):
        level = [inner for outer in level for inner in inside(outer)]
    if level:
        raise ValueError(f"{name} holds values more than {MAX_DEPTH} deep inside of each other")
    try:
        return json.dumps(value, ensure_ascii=False, allow_nan=False).encode().decode()
    except (TypeError, ValueError):
        raise ValueError(f"{name} is no JSON") from None


def inside(value: Any) -> Iterable[Any]:
    """The values in an object or array; none in another value."""
    if isinstance(value, dict):
        return value.values()
    return value if isinstance(value, list | tuple) else ()


def _require_resolvable(parameters: Mapping[str, Any]) -> None:
    waiting = [*_references(parameters)]
    leads_to = dict[str, list[str]]()
    while waiting:
        reference = waiting.pop()
        if reference not in leads_to:
            leads_to[reference] = [*_references(_target(parameters, reference))]
            waiting += leads_to[reference]
    try:
        TopologicalSorter(leads_to).prepare()
    except CycleError as fault:
        raise ValueError(f"its schema refers in a circle: {' to '.join(fault.args[1])[:200]}") from None


def _references(value: Any) -> Iterator[str]:
    if isinstance(value, Mapping):
        yield from (value[key] for key in _REFERENCES if isinstance(value.get(key), str))
    for inner in inside(value):
        yield from _references(inner)


def _target(parameters: Mapping[str, Any], reference: str) -> Any:
    """The part of the schema to which a reference such as `#/$defs/Unit` leads."""
    where, *keys = reference.split("/")
    part: Any = parameters
    for key in keys:
        key = key.replace("~1", "/").replace("~0", "~")
        part = part.get(key) if isinstance(part, Mapping) else None
    if where != "#" or "%" in reference or part is None:  # a percent sign may spell another way
        raise ValueError(f"its schema refers to {reference[:80]!r}, which is not in it")
    return part


class ToolError(Exception):
    """A call that is well formed and fails by its own arguments; the message is for the policy."""


class ToolTimeout(ToolError):
    """A call that takes too long by its own arguments."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ToolResult:
    """The result of a call."""

    text: str  # for the policy
    titles: tuple[str, ...] = ()  # of the passages shown, none for tools that show none
    call_status: CallStatus = CallStatus.OK


class Tool(Protocol):
    """Something that the policy may call by name."""

    name: str
    schema: Schema  # told to the policy
    waits: bool  # for something besides its own computation, so that the same call may end differently another time

    async def call(self, arguments: Json) -> ToolResult:
        """The result of a call; the agent's faults are a status of it.

        Raises WorldFault if the other side failed, whatever the arguments. Any other exception is a bug of the tool.
        """
        ...

    async def recall(self, arguments: Json, result: ToolResult) -> None:
        """Takes note of a call that is not made again, because its result is kept: for tools with a state."""
        return

    async def close(self) -> None:
        """Frees the resources of one episode's tool, at the episode's end; may be called again."""
        return


class ServedTool(Tool):
    """A tool of a server, which checks the arguments itself."""

    def __init__(self, schema: Schema, ask: Callable[[str, Json], Awaitable[ToolResult]]) -> None:
        self.name = schema["function"]["name"]
        self.schema = schema
        self.waits = True
        self._ask = ask

    async def call(self, arguments: Json) -> ToolResult:
        try:
            spelled(arguments, "the object of arguments")
        except ValueError as fault:  # a server could end the session of all for it
            return ToolResult(text=str(fault), call_status=CallStatus.BAD_ARGUMENTS)
        return await self._ask(self.name, arguments)


Function = Callable[..., Any]  # its result, now or when awaited, is a ToolResult or told as `str` writes it


async def within(timeout_s: float | None, answer: Awaitable[T], late: Callable[[str], Exception]) -> T:
    """The awaited answer. Past the limit it is cancelled, and `late` makes the exception of a few words."""
    limit = asyncio.timeout(timeout_s)
    try:
        async with limit:
            return await answer
    except TimeoutError:
        if not limit.expired():
            raise
        raise late(f"took longer than {timeout_s:g} s") from None


class FunctionTool(Tool):
    """A function, told to the policy by its name and a schema of its signature and docstring.

    A `def` is answered on the spot. An `async def` may wait; past its limit of time it is cancelled.
    """

    def __init__(
        self,
        function: Function,
        *,
        timeout_s: float | None = None,
        refusal: type[Exception] = ToolError,
        waits: bool | None = None,
    ) -> None:
        """A `refusal`, raised by the function, is the agent's fault like any ToolError.

        By default an `async def` waits, as `Tool.waits` says, and a `def` does not.
        Raises ValueError unless the function has a docstring, and annotated parameters that JSON can give.
        """
        self.name = function.__name__
        self.waits = inspect.iscoroutinefunction(function) if waits is None else waits
        if timeout_s is not None and not self.waits:
            raise ValueError(
                f"tool {self.name!r}: timeout_s {timeout_s} has no effect on a `def`, which nothing can cancel; make "
                "it an `async def`, or leave timeout_s out"
            )
        self._function = function
        self._timeout_s = timeout_s
        self._refusal = refusal
        self._arguments = _arguments_model(function)
        if not function.__doc__:
            raise ValueError(f"tool {self.name!r} needs a docstring: the policy reads its first paragraph")
        description = re.split(r"\n\n|\nArgs:", inspect.cleandoc(function.__doc__))[0]
        self.schema = function_schema(self.name, " ".join(description.split()), _described(self._arguments))

    async def call(self, arguments: Json) -> ToolResult:
        """Checks the arguments and calls the function.

        Arguments that do not fit the signature give BAD_ARGUMENTS, a ToolTimeout and the limit of time TIMEOUT, and any
        other ToolError or refusal FAILED.
        """
        try:
            values = self._values(arguments)
        except (ValueError, RecursionError) as error:
            return ToolResult(text=_explain(error), call_status=CallStatus.BAD_ARGUMENTS)
        try:
            return await self._answer(values)
        except ToolTimeout as error:
            return ToolResult(text=str(error), call_status=CallStatus.TIMEOUT)
        except WorldFault:
            raise
        except (ToolError, self._refusal) as error:
            if not isinstance(error, ToolError | ValueError):
                logger.warning("tool %r raised %r, which the agent is told", self.name, error)
            return ToolResult(text=str(error), call_status=CallStatus.FAILED)

    def _values(self, arguments: Json) -> Json:
        """The arguments as the function takes them. Raises ValueError or RecursionError if they do not fit."""
        values = self._arguments.model_validate_json(json.dumps(arguments))
        return {name: getattr(values, name) for name in self._arguments.model_fields}

    async def _answer(self, values: Json) -> ToolResult:
        answer = self._function(**values)
        if inspect.isawaitable(answer):
            answer = await within(self._timeout_s, answer, lambda late: ToolTimeout(f"{self.name} {late}"))
        return answer if isinstance(answer, ToolResult) else ToolResult(text=str(answer))


def methods(box: object, *, timeout_s: float | None = None, refusal: type[Exception] = ToolError) -> list[Tool]:
    """The public methods of an object of one episode as tools, in the order in which its class defines them.

    The contract of TRL's environments: every public method is typed and documented, `def` or `async def`, which has the
    limit of time; `reset`, `get_reward` and `state_key` are for the training and not for the policy.
    """
    names = dict.fromkeys(name for kind in reversed(type(box).__mro__) for name in vars(kind))
    public = [name for name in names if not name.startswith("_") and name not in _NOT_TOOLS]
    functions = [getattr(box, name) for name in public if inspect.isfunction(getattr(type(box), name))]
    limits = [timeout_s if inspect.iscoroutinefunction(function) else None for function in functions]
    return [
        FunctionTool(function, timeout_s=limit, refusal=refusal)
        for function, limit in zip(functions, limits, strict=True)
    ]


class _UntitledSchema(GenerateJsonSchema):
    """Makes schemas without pydantic's titles of names: the policy pays for every token."""

    def field_title_should_be_set(self, schema: Any) -> bool:
        return False


def _described(arguments: type[BaseModel]) -> Schema:
    """A model's JSON schema without the model's own name and settings."""
    schema = arguments.model_json_schema(schema_generator=_UntitledSchema)
    definitions = {
        name: {key: value for key, value in definition.items() if key != "title"}
        for name, definition in schema.get("$defs", {}).items()
    }
    parts = {key: schema[key] for key in ("type", "properties", "required") if key in schema}
    return parts | ({"$defs": definitions} if definitions else {})


def _arguments_model(function: Function) -> type[BaseModel]:
    hints = get_type_hints(function)
    descriptions = _descriptions(function)
    fields: dict[str, Any] = {}
    for name, parameter in inspect.signature(function).parameters.items():
        if name not in hints or parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            raise ValueError(f"tool {function.__name__!r}: parameter {name!r} needs a type annotation of its own")
        default = ... if parameter.default is parameter.empty else parameter.default
        fields[name] = (hints[name], Field(default, description=descriptions.get(name)))
    return create_model(function.__name__, __config__=ConfigDict(extra="forbid", strict=True), **fields)


def _descriptions(function: Function) -> dict[str, str]:
    """The descriptions of parameters, which stand below `Args:` in a docstring of Google's style."""
    below = re.split(r"(?m)^Args:\n", inspect.cleandoc(function.__doc__ or ""))[1:]
    lines = textwrap.dedent(re.split(r"\n(?=\S)", below[0])[0]) if below else ""
    entries = [entry.partition(":") for entry in re.split(r"\n(?=\S)", lines)]
    return {name.split("(")[0].strip(): " ".join(text.split()) for name, _, text in entries if text}


def _explain(error: ValueError | RecursionError) -> str:
    if isinstance(error, RecursionError):
        return "the arguments are nested too deeply"
    if not isinstance(error, ValidationError):
        return str(error)
    problems = error.errors(include_url=False)
    return "; ".join(f"{'.'.join(map(str, problem['loc']))}: {problem['msg']}" for problem in problems)
