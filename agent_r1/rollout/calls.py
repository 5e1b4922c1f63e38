"""Tool calls as a chat template writes them, and as environments read them (Hermes).

A model calls tools in the form that it was trained in, and its template writes that form. `form_of` has the template
render a few calls: all that stands around their names and arguments is the form, so no list of models is kept. A form
that puts a call into a message or a channel of its own is not found.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass
from typing import Any

from agent_r1.envs.base import ParsedCall, hermes, object_of, parse_action, refuse_constant
from agent_r1.records import Json

Render = Callable[[Sequence[ParsedCall]], str | None]  # the assistant's text for these calls; None if there is none
Types = dict[str, Json]  # the JSON schemas of a tool's arguments, by the tool's name
Taken = tuple[Json, int] | None  # arguments, and where they end

ID = "call00001"  # of every call that is rendered: some templates take nine letters and digits alone
NAME = "look_up"
_OTHER = "look_it"
_KEY = "zkey"
_TEXT = "ZWORD"
_NUMBER = "znumber"
_SIZE = 70707
_WORD = {_KEY: _TEXT}
_ONE = [ParsedCall(NAME, _WORD)]
_TWO = [ParsedCall(NAME, _WORD), ParsedCall(_OTHER, _WORD)]
_BOTH = [ParsedCall(NAME, _WORD | {_NUMBER: _SIZE})]
_NONE = [ParsedCall(NAME, {})]
_NEW = [ParsedCall("find.all-of_it", {"count": 3, "named": "a b\nc"})]
_BLOCKS = re.compile(r"\s*<tool_call>.*</tool_call>", re.DOTALL)
_TOOL = r"\s*(?P<tool>[\w.-]{1,128}?)\s*"
_FENCE = re.compile(r"\A\s*```\w*\s(.*?)(?:```\s*)?\Z", re.DOTALL)
_LENIENT = re.compile(
    r"<tool_call>(?P<call>.*?)(?:</tool_call>|\Z)|(?P<text>```\w*\s.*?(?:```|\Z)|\A\s*[\[{].*\Z)", re.DOTALL
)
_DECODER = json.JSONDecoder()
_MOST_CALLS = 64  # in an action


@dataclass(frozen=True, kw_only=True, slots=True)
class Keyed:
    """The text around arguments that are written one by one, each with its key."""

    text: str  # between a key and a text
    text_end: str  # behind a text, such as a quotation mark
    other: str  # between a key and any other value, which is JSON
    end: str  # behind an argument
    between: str  # the end of an argument and the next key
    bare: str  # after the name of a tool without arguments, in place of `CallForm.named`

    def write(self, arguments: Json) -> str:
        parts = (
            f"{key}{self.text}{value}{self.text_end}" if isinstance(value, str) else f"{key}{self.other}{_json(value)}"
            for key, value in arguments.items()
        )
        return (self.end + self.between).join(parts) + self.end

    def take(self, text: str, at: int, ends: str, types: Json) -> Taken:
        """The arguments that begin at a place; `ends` is the pattern of the text behind the last one."""
        arguments = Json()
        opening = re.compile(rf"\s*(?P<key>[\w.-]+?)(?:{_edged(self.text)}|{_edged(self.other)})")
        more = rf"(?P<more>{_edged(self.between)})(?={opening.pattern})"
        closing = re.compile(rf"(?:{_loose(self.text_end)})?{_edged(self.end)}(?:{more}|(?P<last>{ends}))")
        key = opening.match(text, at)
        while key:
            end = closing.search(text, key.end())
            if end is None:
                return None
            arguments[key["key"]] = _value(text[key.end() : end.start()], types.get(key["key"], {}))
            if end["more"] is None:
                return arguments, end.start("last")
            key = opening.match(text, end.end())
        return None


@dataclass(frozen=True, kw_only=True, slots=True)
class CallForm:
    """The text that a template writes around the names and the arguments of calls."""

    before: str  # the first name
    named: str  # between a name and its arguments
    between: str  # a call's arguments and the next name
    after: str  # the last arguments
    keyed: Keyed | None = None  # else arguments are an object of JSON

    def write(self, calls: Sequence[ParsedCall]) -> str:
        """The calls as the model writes them."""
        spell = self.keyed.write if self.keyed else _json
        parts = (
            call.tool + (self.keyed.bare if self.keyed and not call.arguments else self.named + spell(call.arguments))
            for call in calls
        )
        return self.before + self.between.join(parts) + self.after

    def read(self, text: str, types: Types) -> str:
        """A text with its calls as environments read them; the same text if not all calls are well formed."""
        gap = _edged if self.keyed else lambda literal: rf"\s*{_loose(literal)}"
        between = gap(self.between)
        closing = re.compile(gap(self.after))
        ends = rf"{between}{_TOOL.replace('?P<tool>', '?:')}|{closing.pattern or '$'}"
        opening = self._opening(ends)
        match = first = re.search(_loose(self.before) + opening, text)
        calls = list[ParsedCall]()
        stop = 0
        while match:
            call = self._take(text, match, ends, types.get(match["tool"], {}))
            if call is None:
                return text
            calls.append(ParsedCall(match["tool"], call[0]))
            stop = call[1]
            match = re.compile(between + opening).match(text, stop)
        end = closing.match(text, stop)
        return text[: first.start()] + hermes(calls) + text[end.end() :] if first and end else text

    def _opening(self, ends: str) -> str:
        """The pattern of a call up to its arguments; `ends` is that of the text behind them."""
        bare = rf"{_loose(self.keyed.bare)}\s*(?={ends})" if self.keyed else "(?!)"
        return rf"{_TOOL}(?:{_loose(self.named)}|(?P<bare>{bare}))" + r"\s*" * (self.keyed is None)

    def _take(self, text: str, opening: re.Match[str], ends: str, types: Json) -> Taken:
        if self.keyed:
            bare = opening["bare"] is not None
            return ({}, opening.end()) if bare else self.keyed.take(text, opening.end(), ends, types)
        try:
            arguments, stop = _DECODER.raw_decode(text, opening.end())
        except (ValueError, RecursionError):
            return None
        return (arguments, stop) if isinstance(arguments, dict) else None

    def native(self, action: str) -> str:
        """An action whose calls are as environments read them, with the calls as the model writes them."""
        calls = parse_action(action, _MOST_CALLS).calls
        return _BLOCKS.sub(lambda _: self.write(calls), action, count=1) if calls else action


def leniently(action: str, names: Container[str]) -> str:
    """An action whose calls are written as small models do, with the calls as environments read them.

    Calls are JSON between tags, the last of which may miss its end, in a code fence, or bare, the whole action behind
    its thought; one or a list, with `parameters` for `arguments`, or null. Without tags they are calls if they name
    tools by these `names`. The same action if its calls are well formed, or it has none of these forms.
    """
    if parse_action(action, _MOST_CALLS).calls:
        return action
    thought, mark, rest = action.rpartition("</think>")
    try:
        return thought + mark + _LENIENT.sub(lambda block: hermes(_calls(block, names)), rest)
    except (ValueError, RecursionError):
        return action


def _calls(block: re.Match[str], names: Container[str]) -> list[ParsedCall]:
    """The calls of a block. Raises ValueError if it holds anything else."""
    tagged = block["text"] is None
    value = json.loads(_FENCE.sub(r"\1", block["call"] if tagged else block["text"]), parse_constant=refuse_constant)
    calls = list[ParsedCall]()
    for call in value if isinstance(value, list) else [value]:
        fields = dict(call) if isinstance(call, dict) else {}
        name = fields.pop("name", None)
        given = fields.pop("arguments", fields.pop("parameters", {}))
        arguments = object_of(given) if isinstance(given, str) else given or {}
        if not isinstance(name, str) or not isinstance(arguments, dict) or fields.keys() - {"id", "type"}:
            raise ValueError(f"no call: {str(call)[:80]}")
        if not tagged and name not in names:
            raise ValueError(f"no call of a tool: {name[:80]!r}")
        calls.append(ParsedCall(name, arguments))
    return calls


def types_of(tools: Sequence[Json]) -> Types:
    """The JSON schemas of the arguments of tools in the OpenAI function form."""
    functions = [tool["function"] for tool in tools]
    return {function["name"]: function.get("parameters", {}).get("properties", {}) for function in functions}


def form_of(renders: Sequence[Render]) -> CallForm | None:
    """The form in which a template writes calls; None if it writes none, or one that cannot be read back.

    `renders` give the template arguments as an object, and as a text of JSON: some take only one of them.
    """
    forms = ((find(render), render) for render in renders if render(_ONE) for find in (_json_form, _keyed_form))
    return next((form for form, render in forms if form and _is_right(form, render)), None)


def _is_right(form: CallForm, render: Render) -> bool:
    """Whether a form writes a call that it was not made of as the template does, and reads all that it writes."""
    written = form.write(_NEW).strip() == (render(_NEW) or "").strip()
    return written and all(
        form.read(form.write(calls), {}).strip() == hermes(calls) for calls in (_NEW, _ONE, [*_NONE, *_TWO, *_NONE])
    )


def is_hermes(form: CallForm) -> bool:
    """Whether environments read the form as it is."""
    return form.write(_ONE).split() == hermes(_ONE).split()


def _json_form(render: Render) -> CallForm | None:
    word = re.escape(_json(_WORD))
    one = _parts(rf"(?P<before>.*){NAME}(?P<named>.*?){word}(?P<after>.*)", render(_ONE))
    two = _parts(rf".*?{NAME}.*?{word}(?P<between>.*?){_OTHER}.*", render(_TWO))
    if not one or one["named"].endswith("{"):  # a template of arguments one by one, which was given a text
        return None
    return CallForm(**one, between=two["between"] if two else one["after"] + one["before"], keyed=None)


def _keyed_form(render: Render) -> CallForm | None:
    keys = rf"{_KEY}(?P<text>.*?){_TEXT}(?P<between>.*?){_NUMBER}(?P<other>.*?){_SIZE}"
    one = _parts(rf"(?P<before>.*?){NAME}(?P<named>.*?){keys}(?P<after>.*)", render(_BOTH))
    none = _parts(rf".*?{NAME}(?P<bare>.*)", render(_NONE))
    two = _parts(rf".*?{_TEXT}(?P<between>.*?){_OTHER}.*", render(_TWO))
    text = _parts(rf".*?{_TEXT}(?P<end>.*)", render(_ONE))
    if not one or not none or not text:
        return None
    text_end = text["end"].removesuffix(one["after"])
    # the longest end that the two share closes a call
    apart = _parts(r"(?P<bare>.*?)(?P<after>.*)\0(?P<end>.*?)(?P=after)", f"{none['bare']}\0{one.pop('after')}")
    call_end = apart.pop("after")
    arguments_end = text_end + apart["end"]
    keyed = Keyed(
        text=one.pop("text"),
        text_end=text_end,
        other=one.pop("other"),
        between=one.pop("between").removeprefix(arguments_end),
        **apart,
    )
    next_call = two["between"].removeprefix(arguments_end) if two else call_end + one["before"]
    return CallForm(**one, between=next_call, after=call_end, keyed=keyed)


def _parts(pattern: str, text: str | None) -> dict[str, str]:
    match = re.fullmatch(pattern, text or "", re.DOTALL)
    return match.groupdict() if match else {}


def _loose(literal: str) -> str:
    """The pattern of a literal in which blanks, numbers and the calls' id may be others."""
    words = re.findall(r"\w+|[^\w\s]", literal)
    return r"\s*".join(r"[\w-]+" if word == ID else r"\d+" if word.isdigit() else re.escape(word) for word in words)


def _edged(literal: str) -> str:
    return r"\n?" * literal.startswith("\n") + _loose(literal) + r"\n?" * literal.endswith("\n")


def _value(text: str, schema: Any) -> Any:
    """The value of an argument: text where its schema asks for one, else JSON if it is some."""
    if isinstance(schema, dict) and schema.get("type") == "string":  # else it may be true
        return text
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return {"True": True, "False": False, "None": None}.get(text.strip(), text)


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)
