"""Whether a call's arguments fit the JSON schema of its tool, where strangers wrote the one, the policy the other."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from jsonschema import Draft202012Validator, SchemaError  # type: ignore[import-untyped]
from jsonschema.validators import create  # type: ignore[import-untyped]
from pydantic_core import SchemaError as PatternError
from pydantic_core import SchemaValidator, core_schema
from referencing import Registry

from agent_r1.harmless import harmless
from agent_r1.records import Json
from agent_r1.tools.base import Schema

MOST = {"{": 1024, '"pattern"': 32}  # in a schema, of parts that each take time to read
MAX_WORK = 20_000  # of one check, in subschemas and keywords that are looked at
_CHARACTERS = 256  # that cost as much as a keyword does
_PAIRS = 8  # likewise
_BY_PATTERN = ("patternProperties", "additionalProperties", "unevaluatedProperties")

logger = logging.getLogger(__name__)


class ArgumentCheck:
    """A JSON schema of 2020-12 with bounded work: nothing is fetched, and each pattern is searched in linear time.

    `$id`, anchors and other dialects mean nothing: a `$ref` leads into the schema itself. A pattern that no engine of
    linear time knows, such as a look-ahead, is left unchecked, which is logged. Where a schema has `patternProperties`,
    neither they nor further properties are looked at.
    """

    def __init__(self, schema: Schema) -> None:
        """Takes an `object_schema`. Raises ValueError if it is no schema, or too much work."""
        schema_json = json.dumps(schema)
        for part, most in MOST.items():
            count = schema_json.count(part)
            if count > most:
                raise ValueError(f"its schema holds {part} {count:,} times, more than {most:,}")
        try:
            Draft202012Validator.check_schema(schema, format_checker=None)
        except SchemaError as fault:
            raise ValueError(f"its schema is no JSON schema: {fault.message[:200]}") from None
        self._budget = MAX_WORK
        self._searches = dict[str, Callable[[str], bool]]()
        self._unread = {"$schema", *(_BY_PATTERN if _BY_PATTERN[0] in schema_json else ())}
        keywords = {**Draft202012Validator.VALIDATORS, "pattern": self._pattern}
        kind = create(
            meta_schema={},
            validators={name: partial(self._metered, name, check) for name, check in keywords.items()},
            id_of=lambda _: None,
            applicable_validators=self._applicable,
        )
        self._validator = kind(json.loads(schema_json, object_hook=self._read), registry=Registry())

    def fits(self, arguments: Json) -> bool:
        """Whether arguments fit, and can be judged within the bound."""
        self._budget = MAX_WORK
        try:
            return bool(self._validator.is_valid(arguments))
        except Exception:  # such as numbers beyond floats, and depths beyond the stack
            return False

    def _read(self, schema: Schema) -> Schema:
        """A part of the schema without the keywords that lead elsewhere, or to another engine of patterns."""
        pattern = schema.get("pattern")
        if isinstance(pattern, str):
            self._searches[pattern] = _search(pattern)
        return {key: value for key, value in schema.items() if key not in self._unread}

    def _spend(self, work: int) -> None:
        self._budget -= work
        if self._budget < 0:
            raise RuntimeError(f"the check takes more than {MAX_WORK:,} steps")

    def _applicable(self, schema: Schema) -> Any:
        self._spend(1)
        return schema.items()

    def _metered(self, name: str, check: Callable[..., Any], *judged: Any) -> Any:
        """A keyword's faults, after their cost: the instance may stand in a message, or be compared pair by pair."""
        _, value, instance, _ = judged
        pairs = len(value) if name == "enum" else 0
        if name == "uniqueItems" and isinstance(instance, list):
            pairs = len(instance) ** 2
        self._spend(1 + pairs // _PAIRS + len(repr(instance)) // _CHARACTERS)
        return check(*judged)

    def _pattern(self, validator: Any, pattern: str, instance: Any, _: Schema) -> Iterator[Any]:
        if isinstance(instance, str) and not self._searches[pattern](instance):
            yield from validator.descend(instance, False)


def _search(pattern: str) -> Callable[[str], bool]:
    """Whether a text holds the pattern; of every text where no engine of linear time can say."""
    try:
        return SchemaValidator(core_schema.str_schema(pattern=pattern, regex_engine="rust-regex")).isinstance_python
    except PatternError:
        logger.warning("a tool's pattern %s is not checked: no engine of linear time has it", harmless(pattern[:200]))
        return lambda _: True
