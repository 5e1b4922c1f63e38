"""Tool calls as a chat template writes them, and as environments read them (Hermes).

A model calls tools in the form that it was trained in, and its template writes that form. `form_of` has the template
render a few calls: all that stands around their names and arguments is the form, so no list of models is kept. A form
that puts a call into a message or a channel of its own is not found.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from agent_r1.envs.base import ParsedCall, hermes, parse_action

Render = Callable[[Sequence[ParsedCall]], str | None]  # the assistant's text for these calls; None if there is none
Types = dict[str, dict[str, Any]]  # the JSON schemas of a tool's arguments, by the tool's name
Taken = tuple[dict[str, Any], int] | None  # arguments, and where they end

ID = "call00001"  # of every call that is rendered: some templates take nine letters and digits alone
NAME = "look_up"
_OTHER, _KEY, _TEXT, _NUMBER, _SIZE = "look_it", "zkey", "ZWORD", "znumber", 70707
_WORD = {_KEY: _TEXT}
_ONE, _TWO = [ParsedCall(NAME, _WORD)], [ParsedCall(NAME, _WORD), ParsedCall(_OTHER, _WORD)]
_BOTH, _NONE = [ParsedCall(NAME, _WORD | {_NUMBER: _SIZE})], [ParsedCall(NAME, {})]
_NEW = [ParsedCall("find.all-of_it", {"count": 3, "named": "a b\nc"})]
_BLOCKS = re.compile(r"\s*<tool_call>.*</tool_call>", re.DOTALL)
_TOOL = r"\s*(?P<tool>[\w.-]{1,128}?)\s*"
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

    def write(self, arguments: dict[str, Any]) -> str:
        said = (
            f"{key}{self.text}{value}{self.text_end}" if isinstance(value, str) else f"{key}{self.other}{_json(value)}"
            for key, value in arguments.items()
        )
        return (self.end + self.between).join(said) + self.end

    def take(self, text: str, at: int, ends: str, types: dict[str, Any]) -> Taken:
        """The arguments that begin at a place; `ends` is the pattern of the text behind the last one."""
        arguments = dict[str, Any]()
        opened = rf"\s*(?P<key>[\w.-]+?)(?:{_edged(self.text)}|{_edged(self.other)})"
        behind = rf"(?:{_loose(self.text_end)})?{_edged(self.end)}"
        closed = re.compile(rf"{behind}(?:(?P<more>{_edged(self.between)})(?={opened})|(?P<last>{ends}))")
        while (key := re.compile(opened).match(text, at)) and (end := closed.search(text, key.end())):
            arguments[key["key"]] = _value(text[key.end() : end.start()], types.get(key["key"], {}))
            if end["more"] is None:
                return arguments, end.start("last")
            at = end.end()
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
        said = (
            call.tool + (self.keyed.bare if self.keyed and not call.arguments else self.named + spell(call.arguments))
            for call in calls
        )
        return self.before + self.between.join(said) + self.after

    def read(self, text: str, types: Types) -> str:
        """A text with its calls as environments read them; the same text if not all calls are well formed."""
        gap = _edged if self.keyed else lambda literal: rf"\s*{_loose(literal)}"
        between, after = gap(self.between), re.compile(gap(self.after))
        ends = rf"{between}{_TOOL.replace('?P<tool>', '?:')}|{after.pattern or '$'}"
        bare = rf"{_loose(self.keyed.bare)}\s*(?={ends})" if self.keyed else "(?!)"
        begun = rf"{_TOOL}(?:{_loose(self.named)}|(?P<bare>{bare}))" + r"\s*" * (self.keyed is None)
        found = first = re.search(_loose(self.before) + begun, text)
        calls, stop, again = list[ParsedCall](), 0, re.compile(between + begun)
        while found:
            taken = self._take(text, found, ends, types.get(found["tool"], {}))
            if taken is None:
                return text
            calls.append(ParsedCall(found["tool"], taken[0]))
            stop = taken[1]
            found = again.match(text, stop)
        ended = after.match(text, stop)
        return text[: first.start()] + hermes(calls) + text[ended.end() :] if first and ended else text

    def _take(self, text: str, begun: re.Match[str], ends: str, types: dict[str, Any]) -> Taken:
        if self.keyed:
            bare = begun["bare"] is not None
            return ({}, begun.end()) if bare else self.keyed.take(text, begun.end(), ends, types)
        try:
            arguments, stop = _DECODER.raw_decode(text, begun.end())
        except (ValueError, RecursionError):
            return None
        return (arguments, stop) if isinstance(arguments, dict) else None

    def native(self, action: str) -> str:
        """An action whose calls are as environments read them, with the calls as the model writes them."""
        calls = parse_action(action, _MOST_CALLS).calls
        return _BLOCKS.sub(lambda _: self.write(calls), action, count=1) if calls else action


def types_of(tools: Sequence[dict[str, Any]]) -> Types:
    """The JSON schemas of the arguments of tools in the OpenAI function form."""
    functions = [tool["function"] for tool in tools]
    return {each["name"]: each.get("parameters", {}).get("properties", {}) for each in functions}


def form_of(renders: Sequence[Render]) -> CallForm | None:
    """The form in which a template writes calls; None if it writes none, or one that cannot be read back.

    `renders` give the template arguments as an object, and as a text of JSON: some take only one of them.
    """
    found = ((find(render), render) for render in renders if render(_ONE) for find in (_json_form, _keyed_form))
    return next((form for form, render in found if form and _is_right(form, render)), None)


def _is_right(form: CallForm, render: Render) -> bool:
    """Whether a form writes a call that it was not made of as the template does, and reads all that it writes."""
    written = form.write(_NEW).strip() == (render(_NEW) or "").strip()
    return written and all(
        form.read(form.write(each), {}).strip() == hermes(each) for each in (_NEW, _ONE, [*_NONE, *_TWO, *_NONE])
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
    after, behind = apart.pop("after"), text_end + apart["end"]
    between = one.pop("between").removeprefix(behind)
    keyed = Keyed(text=one.pop("text"), text_end=text_end, other=one.pop("other"), between=between, **apart)
    next_call = two["between"].removeprefix(behind) if two else after + one["before"]
    return CallForm(**one, between=next_call, after=after, keyed=keyed)


def _parts(pattern: str, text: str | None) -> dict[str, str]:
    found = re.fullmatch(pattern, text or "", re.DOTALL)
    return found.groupdict() if found else {}


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
