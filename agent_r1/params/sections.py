"""Sections of params.yaml: number types, strict keys, and messages that name the remedy."""

from __future__ import annotations

import difflib
import json
import reprlib
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from itertools import chain
from operator import attrgetter
from types import UnionType
from typing import Annotated, Any, ClassVar, Self, TypeVar, get_args, get_origin, get_type_hints

import yaml
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, model_validator

from agent_r1.harmless import CREDENTIALS, without_password

Count = Annotated[int, Field(ge=1)]
Natural = Annotated[int, Field(ge=0)]
Share = Annotated[float, Field(ge=0, le=1)]
Positive = Annotated[float, Field(gt=0)]
Weight = Annotated[float, Field(ge=0, allow_inf_nan=False)]
LOOPBACK = ("127.0.0.1", "localhost", "::1")  # names of this machine that lead nowhere else
Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9_-]{1,64}$")]
Variable = Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")]
Names = Annotated[list[str], Field(min_length=1)]
Refusals = Iterator[str]


def _off_or_above_one(multiple: float) -> float:
    if 0 < multiple <= 1:
        raise ValueError("a multiple that rises is above 1, or 0 to switch it off")
    return multiple


Multiple = Annotated[Weight, AfterValidator(_off_or_above_one)]


def public(url: str) -> str:
    """An address without a password; a ValueError says where to put that."""
    if CREDENTIALS.search(url):
        raise ValueError(
            "dvc.lock and git would keep the password of this address; leave it out, and set AGENT_R1_SEARCH_KEY, "
            "AGENT_R1_ENGINE_KEY, AGENT_R1_ENDPOINT_KEY, AGENT_R1_OPENENV_KEY_<NAME> or AGENT_R1_MCP_KEY_<NAME>, which "
            "is sent to the server as a bearer token"
        )
    return url


def address(url: str) -> str:
    """The address of a server, without a slash at its end; a ValueError says what is wrong with it."""
    if not url.startswith(("http://", "https://")):
        raise ValueError(
            f"{without_password(url)!r} is no server's address; a server's address starts with http:// or https://"
        )
    return public(url).rstrip("/")


@dataclass(frozen=True, slots=True)
class Needs:
    """A knob that is read only where another one of its section has one of some values."""

    knob: str
    off: Any  # its value where it is not read
    other: str
    values: tuple[Any, ...]  # of `other`, with which the knob is read
    why: str = ""  # nothing reads it with another value
    missing: str = ""  # the remedy if it is off where it is read; "" allows that

    def refusals(self, section: Section) -> Refusals:
        value, condition = attrgetter(self.knob, self.other)(section)
        choices = " or ".join(map(_in_yaml, self.values))
        if value != self.off and condition not in self.values:
            what = f"{self.knob}: {_in_yaml(value)} has no effect with {self.other}: {_in_yaml(condition)}{self.why}"
            yield f"{what}; set {self.knob}: {_in_yaml(self.off)}, or {self.other}: {choices}"
        if value == self.off and condition in self.values and self.missing:
            yield f"{self.other}: {_in_yaml(condition)} needs {self.knob}, which is {_in_yaml(value)}; {self.missing}"


def _in_yaml(value: Any) -> str:
    return value if isinstance(value, str) and value else json.dumps(value, default=str)


class Section(BaseModel):
    """A mapping of params.yaml. No key is unknown, and one without a default is required."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    needs: ClassVar[Sequence[Needs]] = ()

    def refusals(self) -> Refusals:
        """Says what is wrong with values that are each in range, and how to mend it; the first one is raised."""
        yield from ()

    @model_validator(mode="before")
    @classmethod
    def _refuse_switches(cls, content: Any) -> Any:
        """A number is no switch: `yes` would be 1."""
        for name, field in cls.model_fields.items() if isinstance(content, dict) else ():
            kinds = {field.annotation, *get_args(field.annotation)}
            if isinstance(content.get(name), bool) and kinds & {int, float} and bool not in kinds:
                raise ValueError(f"{name} is {json.dumps(content[name])}; give a number")
        return content

    @model_validator(mode="after")
    def _refuse(self) -> Self:
        for refusal in chain(*(need.refusals(self) for need in self.needs), self.refusals()):
            raise ValueError(refusal)
        return self


# Keys of earlier versions -> the value that they have in every run. Stored runs have them among their parameters.
CONSTANTS: dict[str, Any] = {
    "train.monitor.stabilise.clip_high": 0.28,
    "train.monitor.stabilise.filter.kind": "top_fraction",
    "train.monitor.stabilise.filter.refill": 0,
    "train.monitor.stabilise.filter.share": 0.25,
    "train.monitor.stabilise.rollback": False,
    "train.monitor.thoughts_every": 0,
}

# Keys that stored runs of earlier versions lack -> the value under which today's code does as theirs; * is any name.
NEUTRAL: dict[str, Any] = {
    "env.agents.*.examples": False,
    "env.agents.*.python": None,
    "env.answers": "tagged",
    "env.calls": "strict",
    "env.examples": "",
    "env.tools.*": None,
    "env.too_long_share": 0.0,
    "evaluate.examples": "",
    "learner.defer_reduction": False,
    "learner.replicate": False,
    "model.base": "full",
    "model.portable": False,
    "model.template": {},
    "search.dense.pq_bytes": 0,
    "search.dense.rescore": 0,
    "search.remote.protocol": "search",
    "search.remote.version": "",
    "train.update.balance_loss": 0.0,
    "train.update.importance_floor": 0.0,
    "train.update.importance_rule": "cap",
    "train.rollout.demonstrate": 0.0,
    "warm_start.quotes": False,
}


def repeated(**lists: Iterable[Any]) -> Refusals:
    """Refuses lists that name a value twice, by their keys."""
    for what, values in lists.items():
        for value in [value for value, count in Counter(values).items() if count > 1]:
            yield f"{what} names {value!r} more than once; leave one of them"


S = TypeVar("S", bound=Section)


class _Shown(reprlib.Repr):
    """Values as messages show them: a few lines of YAML may stand for millions, and a text may hold a password."""

    def __init__(self) -> None:
        super().__init__()
        self.maxlevel = 3
        self.maxstring = 200
        self.maxlong = 200
        self.maxother = 200

    def repr_str(self, x: str, level: int) -> str:
        return super().repr_str(without_password(x), level)


_SHOWN = _Shown()


def override(base: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    """A mapping with changes: mappings inside are changed key by key, everything else is replaced."""
    merged = base.copy()  # of its own kind: one that keeps comments stays one
    for key, value in changes.items():
        both_mappings = isinstance(value, dict) and isinstance(base.get(key), dict)
        merged[key] = override(base[key], value) if both_mappings else value
    return merged


def changed(assignment: str) -> dict[str, Any]:
    """`train.iterations=4` as {"train": {"iterations": 4}}, the value as YAML; ValueError for anything else."""
    key, equals, value = assignment.partition("=")
    if not equals or not all(key.split(".")):
        raise ValueError(f"{assignment!r} changes no key; write train.iterations=4, for instance")
    try:
        content = yaml.safe_load(value)
    except yaml.YAMLError:
        raise ValueError(f"{assignment!r} has a value that is no YAML; quote it, for instance") from None
    for part in reversed(key.split(".")):
        content = {part: content}
    return dict(content)


def flatten(nested: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested mappings as one, with dots between the keys: {"a": {"b": 1}} is {"a.b": 1}."""
    flat: dict[str, Any] = {}
    for key, value in nested.items():
        flat |= flatten(value, f"{prefix}{key}.") if isinstance(value, Mapping) else {f"{prefix}{key}": value}
    return flat


def of_today(stored: Mapping[str, Any], today: Iterable[str]) -> dict[str, Any]:
    """Stored parameters by the keys that there are `today`: without the constants, with the neutral values."""
    parameters = {name: value for name, value in stored.items() if name not in CONSTANTS or value != CONSTANTS[name]}
    new_names = [name for name in today if name not in stored]
    return parameters | {name: value for name in new_names for key, value in NEUTRAL.items() if fnmatchcase(name, key)}


def bring_up(content: Any) -> Iterator[str]:
    """Changes the content of an earlier version's parameter file to mean the same today; names each change."""
    for name, value in {**CONSTANTS, **NEUTRAL}.items():
        if name.endswith("*"):
            continue
        *parents, key = name.split(".")
        sections = [content]
        for parent in parents:
            sections.append(sections[-1].get(parent) if isinstance(sections[-1], dict) else None)
        section = sections[-1]
        if not isinstance(section, dict):
            continue
        if name in NEUTRAL and key not in section:
            section[key] = value
            yield f"{name} is missing, and taken as {json.dumps(value)}"
        elif name in CONSTANTS and section.get(key) == value:
            del section[key]
            for outer, parent in reversed([*zip(sections, parents, strict=False)]):
                if not outer[parent]:
                    del outer[parent]
            yield f"{name} is no knob, and {json.dumps(value)} in every run"


def validated(kind: type[S], content: dict[str, Any], where: str) -> S:
    """A checked section; a ValueError names each key that is unknown, missing or refused, after `where`."""
    try:
        return kind.model_validate(content)
    except ValidationError as error:
        raise ValueError("\n".join(_explain(where, kind, problem) for problem in error.errors())) from None


def _explain(where: str, kind: type[Section], problem: Any) -> str:
    location = [without_password(str(part)) for part in problem["loc"]]
    key = ".".join(location)
    if problem["type"] == "extra_forbidden":
        for name, value in CONSTANTS.items():
            if f".{name}".endswith(f".{key}"):  # `key` is relative to the section that is checked
                return f"{where}: {key!r} is no knob: it is {value!r} in every run; leave it out"
        valid = _section_at(kind, location[:-1]).model_fields
        return f"{where}: unknown key {key!r}{nearest(location[-1], valid)}"
    if problem["type"] == "missing":
        return f"{where}: key {key!r} is missing"
    message = problem["msg"].removeprefix("Value error, ")
    ending = "" if isinstance(problem["input"], dict) else f"; got {_SHOWN.repr(problem['input'])}"
    return without_password(f"{where}: {key + ': ' if key else ''}{message}{ending}")


def _section_at(kind: Any, location: list[str]) -> type[BaseModel]:
    """The section at a place, inside of mappings and of sections that may be left out."""
    for key in location:
        if get_origin(kind) is dict:
            kind = get_args(kind)[1]
        elif key in kind.model_fields:
            kind = kind.model_fields[key].annotation
        else:  # one of the further keys that a section may allow
            kind = get_args(get_type_hints(kind)["__pydantic_extra__"])[1]
        kind = get_args(kind)[0] if get_origin(kind) is UnionType else kind
    section: type[BaseModel] = kind
    return section


def nearest(name: str, valid: Iterable[str]) -> str:
    """The end of a message about a wrong name: the valid one that is most like it, or all of them."""
    valid = list(valid)
    close = difflib.get_close_matches(name, valid, n=1, cutoff=0.4)
    return f"; did you mean {close[0]!r}?" if close else f"; valid names: {', '.join(valid)}"
